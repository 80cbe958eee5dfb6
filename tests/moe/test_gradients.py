"""Gradients of rounds against those of the unsharded model in plain torch, and what happens where there are none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.speeds import exhaustive_but
from thinwire.comm.communicator import Communicator
from thinwire.errors import RoutingError
from thinwire.moe.dispatched import Dispatched
from thinwire.moe.parallel import ExpertParallel
from thinwire.testing import run_ranks

pytest.importorskip("numba", reason="CPU ranks need numba")

NUM_EXPERTS, TOP_K, HIDDEN, MOST = 7, 3, 72, 9
KINDS = ("ragged", "empty_first", "one_expert", "one_token")
TRANSPORTS = ("direct", "staged")

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _inputs(rank: int, kind: str, seed: int = 0) -> Inputs:
    """A rank's x, weights and experts, which want gradients, and ids: some missing, some twice."""
    generator = torch.Generator().manual_seed(31 * seed + rank)
    count = {"ragged": (5 * rank + 4) % 9, "empty_first": 5 * (rank > 0), "one_expert": 4, "one_token": rank == 1}[kind]
    x = torch.randn(int(count), HIDDEN, generator=generator)
    ids = torch.randint(-1, NUM_EXPERTS, (len(x), TOP_K), generator=generator)
    if kind == "one_expert":
        ids[:] = NUM_EXPERTS - 1
    if len(x) > 2:
        ids[1] = -1
        ids[2, 1] = ids[2, 0]
    weights = torch.rand(len(x), TOP_K, generator=generator)
    experts = torch.randn(NUM_EXPERTS, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(3)) / HIDDEN**0.5
    return x.requires_grad_(), ids, weights.requires_grad_(), experts.requires_grad_()


def _target(rank: int, count: int) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(1000 + rank))


def _unsharded(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    for expert in range(NUM_EXPERTS):
        weight = (weights * (ids == expert)).sum(1, keepdim=True)
        y = y + weight * (x @ experts[expert]).tanh()
    return y


def _run_experts(d: Dispatched, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    pieces, end = [rows[:0]], 0
    for expert, (start, count) in enumerate(zip(d.expert_offsets.tolist(), d.expert_counts.tolist(), strict=False)):
        pieces += [torch.zeros(start - end, HIDDEN), (rows[start : start + count] @ experts[expert]).tanh()]
        end = start + count
    return torch.cat([*pieces, torch.zeros(len(rows) - end, HIDDEN)])


def _sharded(ep: ExpertParallel, inputs: Inputs, lane: int = 0, capacity: int | None = None) -> torch.Tensor:
    x, ids, weights, experts = inputs
    d = ep.dispatch(x, ids, weights, lane=lane)
    rows = d.tokens if capacity is None else d.gather(capacity)[0]
    return ep.combine(_run_experts(d, rows, experts[ep.local_experts.start : ep.local_experts.stop]), d)


def _expected(comm: Communicator, kind: str, model: Callable[[Inputs], torch.Tensor]) -> list[torch.Tensor | None]:
    """This rank's gradients of x and weights, and those of the experts from all ranks' tokens."""
    own: list[torch.Tensor | None] = []
    of_experts = torch.zeros(NUM_EXPERTS, HIDDEN, HIDDEN)
    for rank in range(comm.size):
        inputs = _inputs(rank, kind)
        y = model(inputs)
        (y * _target(rank, len(y))).sum().backward()
        if inputs[3].grad is not None:
            of_experts += inputs[3].grad
        if rank == comm.rank:
            own = [inputs[0].grad, inputs[2].grad]
    return [*own, of_experts]


def _error(name: str, expected: torch.Tensor, got: torch.Tensor | None) -> float:
    """The largest difference, relative to the largest gradient."""
    assert got is not None and got.shape == expected.shape and got.dtype == expected.dtype, name
    if not expected.numel() or not expected.any():
        assert not got.any(), name
        return 0.0
    return float((got - expected).abs().max() / expected.abs().max())


def _compare(comm: Communicator, kind: str, model: Any, sharded: Any, bound: float = 1e-6) -> None:
    expected = _expected(comm, kind, model)
    inputs = _inputs(comm.rank, kind)
    y = sharded(inputs)
    (y * _target(comm.rank, len(y))).sum().backward()
    for name, want, got in zip(("x", "weights", "experts"), expected, (inputs[0], inputs[2], inputs[3]), strict=True):
        grad = got.grad
        if name == "experts":
            # Only the rank that owns an expert has its gradient.
            grad = torch.zeros_like(want) if grad is None else grad
            total = grad.clone()
            comm.all_reduce(total)
            assert torch.equal(total[grad != 0], grad[grad != 0])
            grad = total
        assert _error(name, want, grad) <= bound, f"{kind}: {name}: {_error(name, want, grad)}"


def _one_layer(comm: Communicator, transport: str) -> None:
    for align in (1, 4):
        with ExpertParallel(
            comm, NUM_EXPERTS, TOP_K, HIDDEN, MOST, wire="none", transport=transport, align=align
        ) as ep:
            assert ep.transport == transport
            for kind in KINDS:
                _compare(comm, kind, lambda inputs: _unsharded(*inputs), lambda inputs: _sharded(ep, inputs))
                _compare(
                    comm, kind, lambda inputs: _unsharded(*inputs), lambda inputs: _sharded(ep, inputs, capacity=200)
                )


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", exhaustive_but([3], [1, 2, 3, 4]))
def test_gradients_are_those_of_the_unsharded_model(size: int, transport: str) -> None:
    run_ranks(_one_layer, size, transport, mode="thread", timeout=100)


@pytest.mark.exhaustive
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_gradients_of_processes_are_those_of_the_unsharded_model(transport: str) -> None:
    run_ranks(_one_layer, 3, transport, timeout=100)


def _disagree(comm: Communicator, transport: str) -> None:
    x, ids, weights, _ = _inputs(comm.rank, "one_expert")
    with ExpertParallel(comm, NUM_EXPERTS, TOP_K, HIDDEN, MOST, wire="none", transport=transport) as ep:
        with pytest.raises(RoutingError, match="gradients"):
            ep.dispatch(x.detach() if comm.rank else x, ids, weights)
        d = ep.dispatch(x.detach(), ids, weights.detach())
        with pytest.raises(RoutingError, match="dispatched without"):
            ep.combine(d.tokens.requires_grad_(), d)
        d = ep.dispatch(x, ids, weights)
        with pytest.raises(RoutingError, match="leave out away"):
            ep.combine(d.tokens, d, out=torch.empty(x.shape))
        ep.combine(d.tokens, d).sum().backward()
        assert x.grad is not None and weights.grad is not None


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_that_want_different_gradients_are_told(transport: str) -> None:
    run_ranks(_disagree, 2, transport, mode="thread")


@pytest.mark.exhaustive
def test_gradients_through_tritons_kernels_are_those_of_the_unsharded_model() -> None:
    env = {"TRITON_INTERPRET": "1", "THINWIRE_BACKEND": "triton"}
    run_ranks(_one_layer, 2, "direct", env=env, timeout=280)
