"""A rank that leaves a round open, or leaves one out: its peers get an error that names it, and all go on in step."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("numba", reason="the direct transport of CPU ranks needs numba")

import torch

from tests.helpers.hosts import for_transport
from tests.helpers.speeds import exhaustive_but
from thinwire.comm.communicator import Communicator
from thinwire.errors import RoutingError
from thinwire.moe.layer import MoELayer
from thinwire.moe.parallel import ExpertParallel
from thinwire.testing import run_ranks

HIDDEN = 32
TRANSPORTS = ("direct", "staged", "two_level")
WORLDS = exhaustive_but([("thread", 2)], [("thread", 2), ("thread", 3), ("process", 2), ("process", 3)], several=True)
each_world = pytest.mark.parametrize(("mode", "size"), WORLDS)
each_transport = pytest.mark.parametrize("transport", TRANSPORTS)


def _parallel(comm: Communicator, transport: str, **options: Any) -> ExpertParallel:
    size = comm.size
    comm = for_transport(comm, transport)
    return ExpertParallel(comm, size, size, HIDDEN, 8, wire="none", transport=transport, timeout=10.0, **options)


def _tokens(comm: Communicator, value: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Four, each for the experts of all ranks."""
    ids = torch.arange(comm.size).expand(4, -1).contiguous()
    return torch.full((4, HIDDEN), value), ids, torch.ones(4, comm.size)


def _round(ep: ExpertParallel, value: float, **options: Any) -> float:
    """What each element comes to: `value` of every rank's expert."""
    d = ep.dispatch(*_tokens(ep.comm, value), **options)
    return float(ep.combine(d.tokens, d).unique())


def _experts_fail(comm: Communicator, transport: str, how: str) -> None:
    """The last rank leaves its second round open, and all go on."""
    leaver, name = comm.size - 1, f"rank {comm.size - 1} left this round open"
    with _parallel(comm, transport) as ep:
        assert _round(ep, 1.0) == comm.size
        x, ids, weights = _tokens(comm, 2.0)
        wanted = how == "with gradients"
        d = ep.dispatch(x.requires_grad_(wanted), ids, weights)
        if comm.rank == leaver:
            if how == "combine is refused":
                with pytest.raises(RoutingError, match="expert_out is"):
                    ep.combine(torch.ones(1, HIDDEN), d)
        else:
            with pytest.raises(RoutingError, match=name):
                if how == "in halves":
                    ep.combine_finish(ep.combine_start(d.tokens, d))
                else:
                    ep.combine(d.tokens, d)
        for value in (3.0, 4.0):
            assert _round(ep, value) == value * comm.size


@each_transport
@each_world
@pytest.mark.parametrize("how", ["experts raise", "combine is refused", "in halves", "with gradients"])
def test_peers_of_a_rank_that_leaves_a_round_open_are_told(transport: str, mode: str, size: int, how: str) -> None:
    run_ranks(_experts_fail, size, transport, how, mode=mode, timeout=60)


def _abandoned(comm: Communicator, transport: str) -> float:
    with _parallel(comm, transport) as ep:
        d = ep.dispatch(*_tokens(comm, 1.0))
        if comm.rank == 0:
            d.abandon()
            return 0.0
        return float(ep.combine(d.tokens, d).unique())


@each_transport
@each_world
def test_a_round_that_is_abandoned_is_combined_without_that_rank(transport: str, mode: str, size: int) -> None:
    assert run_ranks(_abandoned, size, transport, mode=mode) == [0.0, *[size - 1.0] * (size - 1)]


def _all_leave(comm: Communicator, transport: str) -> None:
    """As activation checkpointing leaves them."""
    with _parallel(comm, transport) as ep:
        for value in (1.0, 2.0):
            ep.dispatch(*_tokens(comm, value))
        started = ep.dispatch_start(*_tokens(comm, 3.0))
        assert _round(ep, 4.0) == 4.0 * comm.size
        del started


@each_transport
@each_world
def test_what_all_ranks_leave_open_is_no_error(transport: str, mode: str, size: int) -> None:
    run_ranks(_all_leave, size, transport, mode=mode)


def _layers(comm: Communicator, transport: str) -> list[str]:
    """Two layers on one object; the last rank fails between them in the second batch, and takes the next batch."""
    outcomes = []
    with _parallel(comm, transport) as ep:
        layers = [MoELayer(HIDDEN, 8, comm.size, comm.size).shard(ep) for _ in range(2)]
        for layer in layers:
            layer.requires_grad_(False)
            layer.router.weight.zero_()
        for batch in range(5 + (comm.rank == comm.size - 1)):
            x = torch.full((4, HIDDEN), 1.0 + batch)
            try:
                layers[0](x)
                if (batch, comm.rank) == (1, comm.size - 1):
                    raise MemoryError
                layers[1](x)
                outcomes.append("right")
            except MemoryError:
                outcomes.append("failed here")
            except RoutingError as error:
                assert "of layer 1" in str(error) and "of layer 2" in str(error), str(error)
                outcomes.append("RoutingError")
    return outcomes


@each_transport
@each_world
def test_layers_of_ranks_that_are_out_of_step_do_not_meet(transport: str, mode: str, size: int) -> None:
    *others, last = run_ranks(_layers, size, transport, mode=mode, timeout=60)
    # That rank was in the first layer of its third batch when the others were in the second layer of their second one.
    assert last == ["right", "failed here", "RoutingError", "right", "right", "right"]
    assert all(outcomes == ["right", "RoutingError", "right", "right", "right"] for outcomes in others)


def _forgotten(comm: Communicator) -> None:
    with _parallel(comm, "staged") as ep:
        x, ids, weights = _tokens(comm, 1.0)
        ep.dispatch(x.requires_grad_(), ids, weights)
        with pytest.warns(RuntimeWarning, match="lane 0: a round whose x .* not combined"):
            ep.dispatch(x, ids, weights)


def test_a_round_with_gradients_that_is_not_combined_is_warned_of() -> None:
    run_ranks(_forgotten, 1, mode="thread")
