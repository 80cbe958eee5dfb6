"""megatron-core as it is on PyPI: its flex dispatcher, and a whole MoELayer with it, over thinwire."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

# Not by importing it: it looks for deep_ep then, which ranks register before.
if importlib.util.find_spec("megatron") is None:
    pytest.skip("`make test-integrations` installs megatron-core and runs this", allow_module_level=True)
pytest.importorskip("numba", reason="CPU ranks need numba")

from tests.integrations.deep_ep_clients import (
    EXPERTS,
    GATES,
    HIDDEN,
    TOKENS,
    TOP_K,
    check,
    compare_with_whole,
    drawn,
    show,
    stand_in_for_cuda,
)
from thinwire.comm.communicator import Communicator
from thinwire.integrations import deep_ep
from thinwire.testing import run_ranks

PACKAGE = f"megatron-core {importlib.metadata.version('megatron-core')}"


def configuration(ranks: int, kind: str, **more: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=4, num_moe_experts=EXPERTS, moe_router_topk=TOP_K,
        moe_ffn_hidden_size=64, moe_token_dispatcher_type=kind, expert_model_parallel_size=ranks,
        use_cpu_initialization=True, add_bias_linear=False, moe_router_dtype="fp32", moe_aux_loss_coeff=0.0,
        moe_grouped_gemm=False, gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        bias_activation_fusion=False, **more,
    )  # fmt: skip


FLEX = {"kind": "flex", "moe_flex_dispatcher_backend": "deepep"}


def dispatched(comm: Communicator, wire: str, sizes: list[int]) -> dict[str, float]:
    warnings.simplefilter("ignore")
    deep_ep.install(wire=wire, grad_wire=wire)
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.token_dispatcher import MoEFlexTokenDispatcher

    groups, local = ProcessGroupCollection(), EXPERTS // comm.size
    groups.ep = groups.tp_ep = dist.group.WORLD
    groups.tp = groups.expt_tp = [dist.new_group([rank]) for rank in range(comm.size)][comm.rank]
    own = list(range(comm.rank * local, (comm.rank + 1) * local))
    dispatcher = MoEFlexTokenDispatcher(local, own, configuration(comm.size, **FLEX), pg_collection=groups)

    def layer(x: torch.Tensor, logits: torch.Tensor, experts: Any) -> torch.Tensor:
        weights, ids = logits.softmax(-1).topk(TOP_K, -1)
        probs = torch.zeros_like(logits).scatter(1, ids, weights)
        chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, ids, True)
        rows, row_weights = dispatcher.dispatch_preprocess(x.view(len(x), 1, HIDDEN), chosen, probs)
        rows, row_weights = dispatcher.token_dispatch(rows, row_weights)
        rows, counts, row_weights = dispatcher.dispatch_postprocess(rows, row_weights)
        out = dispatcher.combine_preprocess(experts(rows, counts.tolist(), row_weights))
        y: torch.Tensor = dispatcher.combine_postprocess(dispatcher.token_combine(out))
        return y.view(len(x), HIDDEN)

    return compare_with_whole(comm, layer, sizes)


@pytest.mark.parametrize("wire", GATES)
def test_the_flex_dispatcher_gives_what_the_whole_model_gives(wire: str) -> None:
    errors = run_ranks(dispatched, 2, wire, [TOKENS, TOKENS - 7])[0]
    show(PACKAGE, "MoEFlexTokenDispatcher (deepep)", 2, wire, errors)
    check(errors, wire)


@pytest.mark.exhaustive
@pytest.mark.parametrize("wire", GATES)
def test_the_flex_dispatcher_on_four_ranks(wire: str) -> None:
    errors = run_ranks(dispatched, 4, wire, [TOKENS, 1, TOKENS - 7, TOKENS])[0]
    show(PACKAGE, "MoEFlexTokenDispatcher (deepep)", 4, wire, errors)
    check(errors, wire)


def build(ranks: int, rank: int, **kind: Any) -> Any:
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.moe_layer import MoELayer

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # a NameError of 0.16.1's without TransformerEngine
    spec = get_moe_module_spec(use_te=False, num_experts=EXPERTS, moe_grouped_gemm=False)
    layer = MoELayer(configuration(ranks, **kind), submodules=spec.submodules)
    local, ffn = EXPERTS // ranks, 64
    w1, w2 = drawn(EXPERTS, 2 * ffn, HIDDEN, seed=5) * 0.05, drawn(EXPERTS, HIDDEN, ffn, seed=6) * 0.05
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "experts" not in name:
                parameter.copy_(drawn(*parameter.shape, seed=7) * 0.05)
        for expert in range(local):
            layer.experts.local_experts[expert].linear_fc1.weight.copy_(w1[rank * local + expert])
            layer.experts.local_experts[expert].linear_fc2.weight.copy_(w2[rank * local + expert])
    return layer


def trained(comm: Communicator, wire: str, steps: int) -> dict[str, Any]:
    """Losses of two layers, of ranks with different numbers of tokens, beside megatron's own exchange."""
    warnings.simplefilter("ignore")
    stand_in_for_cuda()
    deep_ep.install(wire=wire)
    from megatron.core import parallel_state
    from torch.utils.checkpoint import checkpoint

    parallel_state.initialize_model_parallel(expert_model_parallel_size=comm.size)

    def losses(recompute: bool, **kind: Any) -> list[float]:
        layers, found = [build(comm.size, comm.rank, **kind) for _ in range(2)], []
        optimizer = torch.optim.SGD([each for layer in layers for each in layer.parameters()], lr=0.05)
        for step in range(steps):
            x = drawn(12 + 3 * comm.rank * (step % 2), 2, HIDDEN, seed=100 * step + comm.rank).requires_grad_()
            y = x
            for layer in layers:
                run = lambda rows, layer=layer: layer(rows)[0]  # noqa: E731
                y = y + (checkpoint(run, y, use_reentrant=False) if recompute else run(y))
            loss = (y - x.detach().flip(-1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            for layer in layers:
                dist.all_reduce(layer.router.weight.grad)
            optimizer.step()
            found.append(float(loss.detach()))
        return found

    return {"alltoall": losses(False, kind="alltoall"), **{
        f"flex, recompute {recompute}": losses(recompute, **FLEX) for recompute in (False, True)
    }}  # fmt: skip


@pytest.mark.parametrize("wire", GATES)
def test_moe_layers_train_as_with_megatrons_own_exchange(wire: str) -> None:
    for found in run_ranks(trained, 2, wire, 3, timeout=240.0):
        own = found.pop("alltoall")
        assert len({*own}) == len(own)
        for name, losses in found.items():
            apart = max(abs(a - b) for a, b in zip(losses, own, strict=True))
            print(
                f"\n{PACKAGE:24} 2 MoELayers, {name:22} 2 ranks, {wire:5} losses differ by {apart:.1e} of {own[0]:.2f}"
            )
            assert apart == 0 if wire == "none" else 0 < apart < 2e-3 * own[0]
