"""Rounds in float64, which exist so that gradients can be compared with finite differences."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.speeds import exhaustive_but
from thinwire.comm.communicator import Communicator
from thinwire.moe.parallel import ExpertParallel
from thinwire.testing import run_ranks

EXPERTS, TOP_K, HIDDEN, TOKENS = 5, 3, 5, 4


def _make(comm: Communicator, **options: object) -> ExpertParallel:
    return ExpertParallel(comm, EXPERTS, TOP_K, HIDDEN, TOKENS, **{"wire": "none", "dtype": torch.float64, **options})


def _inputs(rank: int, count: int = TOKENS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(count, HIDDEN, generator=generator, dtype=torch.float64)
    ids = torch.randint(-1, EXPERTS, (count, TOP_K), generator=generator)
    ids[:1, 2] = ids[:1, 0]  # one that is named twice
    weights = torch.rand(count, TOP_K, generator=generator, dtype=torch.float64)
    return x.requires_grad_(), ids, weights.requires_grad_()


def _experts() -> torch.Tensor:
    shape, generator = (EXPERTS, HIDDEN, HIDDEN), torch.Generator().manual_seed(99)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def _unsharded(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    for expert in range(EXPERTS):
        y = y + (weights * (ids == expert)).sum(1, keepdim=True) * (x @ experts[expert]).tanh()
    return y


def _layer(
    ep: ExpertParallel, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, view: str
) -> torch.Tensor:
    d, first = ep.dispatch(x, ids, weights), ep.local_experts.start
    if view == "rows":
        rows = d.tokens
        spread = [(rows * (d.expert_ids == e)[:, None]) @ experts[first + e] for e in range(len(ep.local_experts))]
        return ep.combine(torch.stack([rows * 0, *spread]).sum(0).tanh(), d)
    y = d.records * 0.0
    for expert in range(len(ep.local_experts)):
        weight = (d.record_weights * (d.record_ids == expert)).sum(1, keepdim=True)
        y = y + weight * (d.records @ experts[first + expert]).tanh()
    return ep.combine(y, d, weighted=True)


def _finite_differences(comm: Communicator, view: str) -> None:
    # A rank's result depends on no other rank's tokens: so each may vary its own, and all run as many rounds.
    x, ids, weights = _inputs(comm.rank)
    experts = _experts().detach()
    with _make(comm) as ep:
        assert ep.transport == "staged" and "float64" in ep.explain()
        assert torch.autograd.gradcheck(lambda x, weights: _layer(ep, x, ids, weights, experts, view), (x, weights))


@pytest.mark.parametrize("view", ["rows", "records"])
@pytest.mark.parametrize("size", exhaustive_but([2], [1, 2, 3, 4]))
def test_gradients_are_those_of_finite_differences(size: int, view: str) -> None:
    run_ranks(_finite_differences, size, view, mode="thread", timeout=100)


def _as_unsharded(comm: Communicator, view: str) -> None:
    counts = [(3 * rank + 2) % 5 for rank in range(comm.size)]  # 2, 0, 3, 1
    expected, of_experts = [], torch.zeros(EXPERTS, HIDDEN, HIDDEN, dtype=torch.float64)
    for rank, count in enumerate(counts):
        x, ids, weights = _inputs(rank, count)
        experts = _experts()
        y = _unsharded(x, ids, weights, experts)
        y.square().sum().backward()
        of_experts += experts.grad
        expected.append((y.detach(), x.grad, weights.grad))
    x, ids, weights = _inputs(comm.rank, counts[comm.rank])
    experts = _experts()
    with _make(comm) as ep:
        y = _layer(ep, x, ids, weights, experts, view)
        y.square().sum().backward()
    total = torch.zeros_like(experts) if experts.grad is None else experts.grad.clone()
    comm.all_reduce(total)
    for got, wanted in zip((y, x.grad, weights.grad, total), (*expected[comm.rank], of_experts), strict=True):
        assert got.dtype == torch.float64
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("view", ["rows", "records"])
@pytest.mark.parametrize("size", exhaustive_but([3], [1, 2, 3, 4]))
def test_results_and_gradients_are_those_of_the_unsharded_model(size: int, view: str) -> None:
    run_ranks(_as_unsharded, size, view, mode="thread", timeout=100)
