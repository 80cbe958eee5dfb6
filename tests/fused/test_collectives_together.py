"""Collectives beside each other: what is under way, the order of waits, modes of the caller, memory that overlaps."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest

pytest.importorskip("numba", reason="the CPU kernels need numba")

import torch
import torch.distributed as dist

from thinwire.comm.communicator import Communicator
from thinwire.errors import ConfigMismatch, ThinwireError
from thinwire.fused.all_to_all import all_to_all_v
from thinwire.fused.ops import all_gather, all_reduce, reduce_scatter
from thinwire.moe.parallel import ExpertParallel
from thinwire.testing import run_ranks

MODES = ("process", "thread")
LONG = 300_000  # elements: more than one piece, and more than one step


def _waits(comm: Communicator) -> None:
    """Ranks wait at other places among their other calls, and in another order."""
    x = torch.ones(LONG)
    staged = {"comm": comm, "wire": "none", "transport": "staged", "async_op": True}
    for late in (False, True):
        p, q = all_reduce(x, **staged), all_reduce(100 * x, **staged)
        pair = (p, q) if (comm.rank == 0) == late else (q, p)
        for call in pair:
            call.wait()
        assert torch.equal(p.wait(), comm.size * x) and torch.equal(q.wait(), 100 * comm.size * x)
    others: list[Callable[[], object]] = [
        comm.barrier,
        lambda: all_reduce(x[:100], comm=comm, transport="direct"),
        lambda: comm.all_reduce(x.clone()),
        lambda: all_gather(x[:100], comm=comm, transport="staged"),
    ]
    pendings: list[Callable[[], object]] = [
        lambda: all_reduce(x, **staged),
        lambda: all_to_all_v(torch.ones(comm.size * LONG), wire="int8", comm=comm, transport="direct", async_op=True),
        lambda: comm.all_reduce(x.clone(), async_op=True),
    ]
    for other in others:
        for begin in pendings:
            pending = begin()
            if comm.rank == 0:
                other()
            pending.wait()  # type: ignore[attr-defined]
            if comm.rank != 0:
                other()
    all_reduce(x, **staged)  # nobody waits for it
    gc.collect()
    assert torch.equal(all_reduce(x[:7], comm=comm, wire="none"), comm.size * x[:7])


@pytest.mark.parametrize("mode", MODES)
def test_ranks_may_wait_at_different_places(mode: str) -> None:
    run_ranks(_waits, 2, mode=mode)


def _round_beside(comm: Communicator) -> None:
    ep = ExpertParallel(comm, num_experts=comm.size, top_k=1, hidden_size=16, max_tokens=4, transport="direct")
    x, ids, weights = torch.ones(4, 16), torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)
    work = comm.all_reduce(torch.ones(LONG), async_op=True)
    if comm.rank == 1:
        work.wait()
    ep.combine((d := ep.dispatch(x, ids, weights)).tokens, d)
    work.wait()
    ep.close()


def test_a_round_ends_what_its_peers_may_wait_for() -> None:
    run_ranks(_round_beside, 2)


def _closed(comm: Communicator) -> None:
    x = torch.ones(LONG)
    calls = [
        all_gather(x, comm=comm, transport="staged", async_op=True),
        all_reduce(x, comm=comm, transport="staged", async_op=True),
        comm.all_reduce(torch.ones(10), async_op=True),
    ]
    # A rank that closes while another still posts would break its connection.
    store = dist.distributed_c10d._get_default_store()
    store.set(f"posted {comm.rank}", "")
    store.wait([f"posted {rank}" for rank in range(comm.size)])
    comm.close()
    for call in calls:
        with pytest.raises(ThinwireError, match="closed"):
            call.wait()


def test_a_call_whose_communicator_was_closed_has_no_result() -> None:
    run_ranks(_closed, 2)


def _modes(comm: Communicator) -> None:
    """The first call in inference mode, and later ones not."""
    last = comm.rank == comm.size - 1
    with torch.inference_mode():
        x = torch.ones(comm.size * 5)
        assert torch.equal(all_reduce(x, comm=comm, wire="none"), comm.size * x)
        pending = [
            call(x, comm=comm, wire="none", transport="staged", async_op=True)
            for call in (all_reduce, reduce_scatter, all_gather)
        ]
        work = comm.all_reduce(torch.ones(LONG), async_op=True)
    comm.barrier()
    work.wait()
    for call in pending:
        assert call.wait().max() in (1, comm.size)
    for _ in range(2):
        with pytest.raises(ConfigMismatch, match="the ranks do different things"):
            all_reduce(torch.ones(5 + last), comm=comm)
        assert torch.equal(all_reduce(torch.ones(4), comm=comm, wire="none"), torch.full((4,), float(comm.size)))


@pytest.mark.parametrize("mode", MODES)
def test_calls_outlive_the_inference_mode_they_began_in(mode: str) -> None:
    run_ranks(_modes, 2, mode=mode)


def _nothing(comm: Communicator) -> None:
    """Nothing beside something: all learn it, and no later call takes the one for the other."""
    x = torch.ones(comm.size * 4)
    for call in (all_reduce, reduce_scatter, all_gather):
        with pytest.raises(ConfigMismatch, match="the ranks do different things"):
            call(x[:0] if comm.rank == 0 else x, comm=comm, wire="int8")
        assert call(x[:0], comm=comm, wire="int8").shape == (0,)
    assert torch.equal(all_reduce(x, comm=comm, wire="none"), comm.size * x)


def test_an_empty_tensor_beside_a_full_one_is_told() -> None:
    run_ranks(_nothing, 3, mode="thread")


def _memory(comm: Communicator) -> None:
    # Rows that arrive where others still leave.
    x = torch.full((comm.size, LONG), float(comm.rank)) + 10 * torch.arange(comm.size)[:, None]
    comm.all_to_all_v(x, x)
    assert torch.equal(x[:, 0], torch.arange(comm.size) + 10.0 * comm.rank) and torch.equal(x[:, 0], x[:, -1])
    rows = [torch.full((LONG,), float(comm.rank)) for _ in range(comm.size)]
    comm.all_to_all(rows[::-1], rows)
    assert [float(row[-1]) for row in rows] == [float(comm.size - 1 - rank) for rank in range(comm.size)]
    # A view that stands for its conjugate.
    z = torch.full((3,), 1 + 2j)
    assert torch.equal(all_reduce(z.conj(), wire="none", comm=comm), torch.full((3,), comm.size * (1 - 2j)))
    # What autograd keeps is not overwritten behind its back.
    for transport in ("direct", "staged"):
        w = torch.ones(2000, requires_grad=True)
        y = w.exp()
        with torch.no_grad():
            all_reduce(y, out=y, comm=comm, transport=transport)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    assert torch.equal(all_reduce(torch.ones(3), wire="none", comm=comm), torch.full((3,), float(comm.size)))


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_overwritten_before_it_is_sent(mode: str) -> None:
    run_ranks(_memory, 2, mode=mode)
