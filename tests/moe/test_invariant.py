"""Rounds with `invariant=True`: one answer for any number of ranks, and what that costs."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("numba", reason="the direct transport of CPU ranks needs numba")

import thinwire as tw
from thinwire.comm.communicator import Communicator
from thinwire.errors import ConfigMismatch, RoutingError
from thinwire.testing import run_ranks
from verification.soak.invariant import MOST_RANKS, Program, hash_of, run_programs

_TRITON = {"TRITON_INTERPRET": "1", "THINWIRE_BACKEND": "triton"}


@pytest.mark.parametrize("world", range(1, MOST_RANKS + 1))
def test_random_programs_give_the_same_bits_on_any_number_of_ranks(world: int) -> None:
    run_programs(list(range(30)), [world])


def test_the_interpreted_kernels_give_them_too() -> None:
    run_programs([3, 8, 13, 22], [3], mode="process", env=_TRITON)


def _ordinary(comm: Communicator, number: int) -> torch.Tensor:
    program = Program.draw(number)
    x, ids, weights = program.rows()
    part = slice(program.tokens * comm.rank // comm.size, program.tokens * (comm.rank + 1) // comm.size)
    sizes = program.num_experts, program.top_k, program.hidden, program.tokens
    with tw.ExpertParallel(comm, *sizes, wire="int8") as ep:
        d = ep.dispatch(x[part], ids[part], weights[part])
        return ep.combine(program.experts(d.tokens, d.expert_ids + ep.local_experts.start), d)


def test_without_it_the_bits_depend_on_the_number_of_ranks() -> None:
    number = next(n for n in range(100) if (p := Program.draw(n)).tokens > 9 and p.hidden > 99 and p.top_k > 3)
    assert len({hash_of(torch.cat(run_ranks(_ordinary, world, number, mode="thread"))) for world in (1, 2, 4)}) == 3


def _alone_and_together(comm: Communicator, transport: str, invariant: bool) -> None:
    generator = torch.Generator().manual_seed(comm.rank)
    x, weights = torch.randn(9, 96, generator=generator), torch.rand(9, 3, generator=generator)
    ids = torch.rand(9, 7, generator=generator).topk(3).indices
    with tw.ExpertParallel(comm, 7, 3, 96, 9, wire="int8", transport=transport, invariant=invariant) as ep:

        def run(part: slice) -> torch.Tensor:
            d = ep.dispatch(x[part], ids[part], weights[part])
            return ep.combine(d.tokens * (1 + d.expert_ids + ep.local_experts.start)[:, None], d)

        together = run(slice(0, 9))
        assert torch.equal(torch.cat([run(slice(token, token + 1)) for token in range(9)]), together)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("transport", ["direct", "staged"])
def test_what_else_is_in_a_batch_changes_no_bit(transport: str, invariant: bool) -> None:
    run_ranks(_alone_and_together, 2, transport, invariant, mode="thread")


def _mixed(comm: Communicator) -> None:
    tw.ExpertParallel(comm, 4, 2, 64, 8, invariant=comm.rank == 0)


def test_ranks_agree_on_it() -> None:
    with pytest.raises(Exception, match="invariant") as raised:
        run_ranks(_mixed, 2, mode="thread")
    assert ConfigMismatch.__name__ in str(raised.value)


def _trained(comm: Communicator, transport: str, invariant: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(comm.rank)
    x = torch.randn(6, 96, generator=generator, requires_grad=True)
    weights = torch.rand(6, 3, generator=generator, requires_grad=True)
    ids = torch.stack([torch.randperm(7, generator=generator)[:3] for _ in range(6)])
    with tw.ExpertParallel(comm, 7, 3, 96, 8, wire="none", transport=transport, invariant=invariant) as ep:
        d = ep.dispatch(x, ids, weights)
        y = ep.combine(d.tokens * (1 + d.expert_ids + ep.local_experts.start)[:, None], d)
        (y * torch.randn(y.shape, generator=generator)).sum().backward()
        assert x.grad is not None and weights.grad is not None
        return [y.detach(), x.grad, weights.grad]


@pytest.mark.parametrize("transport", ["direct", "staged"])
def test_gradients_are_those_of_an_ordinary_round(transport: str) -> None:
    for got, want in zip(
        run_ranks(_trained, 3, transport, True, mode="thread"),
        run_ranks(_trained, 3, transport, False, mode="thread"),
        strict=True,
    ):
        torch.testing.assert_close(got[0], want[0])  # added in another order
        assert torch.equal(got[1], want[1]) and torch.equal(got[2], want[2])


def _traffic(comm: Communicator, transport: str) -> tuple[int, int]:
    # Rank 0's one token has experts 0 and 1 here, and 2 and 3 at the other rank, which has none.
    ids = torch.tensor([[3, 1, 2, 0]])[: 1 - comm.rank]
    with tw.ExpertParallel(comm, 4, 4, 64, 8, wire="int8", transport=transport, invariant=True) as ep:
        d = ep.dispatch(torch.ones(len(ids), 64), ids, torch.ones(ids.shape))
        sent = d.combine_traffic
        ep.combine(d.tokens, d)
        return sent.rows, sent.wire_bytes - ep._assembly.config.combine_bytes(transport, 2, torch.float32)[1]


@pytest.mark.parametrize("transport", ["direct", "staged"])
def test_each_expert_of_a_peer_sends_a_row(transport: str) -> None:
    row_bytes = tw.WireFormat.parse("int8").row_bytes(64, torch.float32)
    assert run_ranks(_traffic, 2, transport, mode="thread") == [(0, 0), (2, 2 * row_bytes)]


def _left_open(comm: Communicator, transport: str) -> str:
    with tw.ExpertParallel(comm, 4, 2, 64, 8, wire="none", transport=transport, invariant=True) as ep:
        tokens = torch.ones(3, 64), torch.tensor([[0, 3], [1, 2], [2, -1]]), torch.ones(3, 2)
        d = ep.dispatch(*tokens)
        said = ""
        if comm.rank == 0:
            with pytest.raises(RoutingError, match="rank 1 left this round open") as raised:
                ep.combine(d.tokens, d)
            said = str(raised.value)
        d = ep.dispatch(*tokens)
        if comm.rank == 1:
            d.abandon()
        else:
            y = ep.combine(d.tokens, d)
            assert y[:, 0].tolist() == [1.0, 1.0, 0.0]  # without rank 1's experts
        return said


@pytest.mark.parametrize("transport", ["direct", "staged"])
def test_rounds_that_are_left_open_or_abandoned_end_as_others_do(transport: str) -> None:
    assert run_ranks(_left_open, 2, transport, mode="thread")[0]
