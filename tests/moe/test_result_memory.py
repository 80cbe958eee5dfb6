"""Rounds on CPU ranks use the memory of earlier results again, and nobody who holds a result can tell."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import thinwire as tw
from thinwire.comm.communicator import Communicator
from thinwire.comm.result_memory import LEAST_BYTES
from thinwire.moe.dispatched import Dispatched
from thinwire.testing import run_ranks

HIDDEN, TOKENS, EXPERTS = 1024, 640, 4
TRANSPORTS = pytest.mark.parametrize("transport", ["direct", "staged"])


def inputs(comm: Communicator, seed: int, tokens: int = TOKENS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * seed + comm.rank)
    x = torch.randn(tokens, HIDDEN, generator=generator)
    ids = torch.rand(tokens, EXPERTS, generator=generator).argsort(1)[:, :2].contiguous()
    return x, ids, torch.rand(tokens, 2, generator=generator)


def parallel(comm: Communicator, transport: str, align: int = 1) -> tw.ExpertParallel:
    return tw.ExpertParallel(comm, EXPERTS, 2, HIDDEN, TOKENS, wire="int8", transport=transport, align=align)


def _addresses(comm: Communicator, transport: str) -> tuple[bool, bool, bool]:
    with parallel(comm, transport) as ep:
        arguments = inputs(comm, 0)
        found = []
        held = None
        for call in range(4):
            d = ep.dispatch(*arguments)
            tokens = d.tokens
            y = ep.combine(tokens, d)
            assert tokens.nbytes >= LEAST_BYTES <= y.nbytes
            found.append((tokens.data_ptr(), y.data_ptr()))
            if call == 1:
                held = tokens[7:]
                kept = held.clone()
            del d, tokens, y
        assert held is not None and torch.equal(held, kept)
    used_again = found[0] == found[1]
    return used_again, found[1][0] not in (found[2][0], found[3][0]), found[2] == found[3]


@TRANSPORTS
def test_memory_of_results_is_used_again_unless_it_is_held(transport: str) -> None:
    for used_again, spared, used_again_then in run_ranks(_addresses, 2, transport, mode="thread"):
        assert used_again and spared and used_again_then


def _rounds(comm: Communicator, transport: str, align: int, again: bool) -> list[list[torch.Tensor]]:
    """Results and gradients of rounds: in memory that is new each time, or, if `again`, that was full of NaN."""
    found = []
    with parallel(comm, transport, align) as ep:
        for seed in range(2):
            if not again:
                comm.result_memory.clear()
            elif found:
                like = found[-1][0]
                spoilt = [comm.result_memory.new_empty(like, like.shape).fill_(torch.nan) for _ in range(4)]
                del spoilt
            x, ids, weights = inputs(comm, seed, TOKENS - 10 * seed)
            x.requires_grad_(), weights.requires_grad_()
            d = ep.dispatch(x, ids, weights)
            tokens, (gathered, _) = d.tokens, d.gather(d.tokens.shape[0] + 9)
            expert_out = tokens * 2 + 1
            expert_out.retain_grad()
            y = ep.combine(expert_out, d)
            y.backward(torch.ones_like(y))
            assert x.grad is not None and weights.grad is not None and expert_out.grad is not None
            grads = [x.grad, weights.grad, expert_out.grad.clone()]
            found.append([tokens.detach().clone(), gathered.detach().clone(), y.detach(), *grads])
            del d, tokens, gathered, expert_out
    return found


@TRANSPORTS
@pytest.mark.parametrize("align", [1, pytest.param(16, marks=pytest.mark.exhaustive)])
def test_what_memory_held_before_is_not_seen_in_results(transport: str, align: int) -> None:
    again, anew = (run_ranks(_rounds, 2, transport, align, used, mode="thread") for used in (True, False))
    for rounds, expected in zip(again, anew, strict=True):
        for results, wanted in zip(rounds, expected, strict=True):
            for result, want in zip(results, wanted, strict=True):
                assert torch.equal(result, want)


def _given_back(comm: Communicator, transport: str, close: Callable[[Communicator, tw.ExpertParallel], None]) -> None:
    ep = parallel(comm, transport)
    planned = ep.memory_bytes
    assert comm.memory_bytes == 0
    d: Dispatched = ep.dispatch(*inputs(comm, 0))
    tokens = d.tokens
    y = ep.combine(tokens, d)
    kept = comm.memory_bytes
    assert kept >= tokens.nbytes + y.nbytes
    assert ep.memory_bytes == planned
    assert "memory of results" in comm.explain()
    before = tokens.clone()
    close(comm, ep)
    assert comm.memory_bytes == 0
    assert torch.equal(tokens, before)


def _close_both(comm: Communicator, ep: tw.ExpertParallel) -> None:
    comm.close()


def _close_one(comm: Communicator, ep: tw.ExpertParallel) -> None:
    ep.close()


@pytest.mark.parametrize("close", [_close_both, _close_one], ids=["communicator", "expert parallel"])
def test_close_gives_memory_back_but_for_what_is_held(close: Callable[..., None]) -> None:
    run_ranks(_given_back, 2, "direct", close, mode="thread")


def _compiled(comm: Communicator, transport: str) -> bool:
    with parallel(comm, transport) as ep:
        x, ids, weights = inputs(comm, 0)

        def layer(x: torch.Tensor) -> torch.Tensor:
            d = ep.dispatch(x * 2, ids, weights)
            rows, _ = d.gather(3 * TOKENS)
            return ep.combine(rows * rows, d) + x

        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        for scale in (1.0, 3.0, 5.0):
            found = []
            for function in (compiled, layer):
                given = (scale * x).requires_grad_()
                function(given).square().sum().backward()
                assert given.grad is not None
                found.append((function(given).detach(), given.grad))
            assert all(map(torch.equal, *found))
        with torch.inference_mode():
            assert torch.equal(compiled(x), layer(x))
        return comm.memory_bytes > 0


@pytest.mark.exhaustive
@TRANSPORTS
def test_compiled_rounds_are_pythons_in_memory_that_is_used_again(transport: str) -> None:
    assert all(run_ranks(_compiled, 2, transport, timeout=300))
