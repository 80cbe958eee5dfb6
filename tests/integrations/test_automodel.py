"""NeMo Automodel as it is on PyPI: its flex dispatcher over thinwire, also where recomputation replays handles."""

from __future__ import annotations

import contextlib
import importlib.metadata
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

pytest.importorskip("nemo_automodel", reason="`make test-integrations` installs nemo-automodel and runs this")
pytest.importorskip("numba", reason="CPU ranks need numba")

from tests.integrations.deep_ep_clients import EXPERTS, GATES, HIDDEN, TOKENS, TOP_K, check, compare_with_whole, show
from thinwire.comm.communicator import Communicator
from thinwire.integrations import deep_ep
from thinwire.testing import run_ranks

PACKAGE = f"nemo-automodel {importlib.metadata.version('nemo-automodel')}"


def dispatched(comm: Communicator, wire: str, sizes: list[int], replayed: bool) -> dict[str, float]:
    deep_ep.install(wire=wire, grad_wire=wire)
    from nemo_automodel.components.moe.megatron import fused_a2a
    from nemo_automodel.components.moe.megatron.token_dispatcher import MoEFlexTokenDispatcher, TokenDispatcherConfig

    local = EXPERTS // comm.size
    dispatcher = MoEFlexTokenDispatcher(
        num_local_experts=local, local_expert_indices=list(range(comm.rank * local, (comm.rank + 1) * local)),
        config=TokenDispatcherConfig(moe_router_topk=TOP_K, num_moe_experts=EXPERTS), ep_group=dist.group.WORLD,
    )  # fmt: skip
    recorder = fused_a2a.DispatchReplayRecorder()

    def block(x: torch.Tensor, logits: torch.Tensor, experts: Any) -> torch.Tensor:
        weights, ids = logits.softmax(-1).topk(TOP_K, -1)
        rows, counts, row_weights = dispatcher.token_permutation2(x, len(x), weights, ids)
        y: torch.Tensor = dispatcher.token_unpermutation(experts(rows, counts.tolist(), row_weights))
        return y.view(len(x), HIDDEN)

    def layer(x: torch.Tensor, logits: torch.Tensor, experts: Any) -> torch.Tensor:
        if not replayed:
            return block(x, logits, experts)

        def contexts() -> tuple[Any, Any]:
            @contextlib.contextmanager
            def scoped(mode: str) -> Any:
                if mode == "replay":
                    recorder.rewind()
                with fused_a2a.dispatch_replay_scope(recorder, mode):
                    yield

            return scoped("record"), scoped("replay")

        y: Any = checkpoint(block, x, logits, experts, use_reentrant=False, context_fn=contexts)
        return y

    errors = compare_with_whole(comm, layer, sizes)
    if replayed:
        assert len(recorder._records) == recorder._cursor == 1 and not recorder.replay_misses
    return errors


@pytest.mark.parametrize("replayed", [False, True], ids=["", "recomputed"])
@pytest.mark.parametrize("wire", GATES)
def test_the_flex_dispatcher_gives_what_the_whole_model_gives(wire: str, replayed: bool) -> None:
    errors = run_ranks(dispatched, 2, wire, [TOKENS, TOKENS - 7], replayed)[0]
    show(PACKAGE, "MoEFlexTokenDispatcher" + ", recomputed" * replayed, 2, wire, errors)
    check(errors, wire)


@pytest.mark.exhaustive
@pytest.mark.parametrize("wire", GATES)
def test_the_flex_dispatcher_on_four_ranks(wire: str) -> None:
    errors = run_ranks(dispatched, 4, wire, [TOKENS, 1, TOKENS - 7, TOKENS], True)[0]
    show(PACKAGE, "MoEFlexTokenDispatcher, recomputed", 4, wire, errors)
    check(errors, wire)
