"""Ranks that are threads exchange as ranks that are processes do: exactly, matched alike, and in bounded time."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch

import thinwire as tw
from tests.comm import test_communicator as of_processes
from tests.helpers.wires import assert_same_bits
from thinwire.comm import Communicator, default_communicator
from thinwire.comm.launch.bootstrap import rank_thread
from thinwire.comm.threads import ThreadWorld
from thinwire.errors import ConfigMismatch, PeerTimeout, ThinwireError
from thinwire.testing import run_ranks

SLACK = 2.0  # seconds past its timeout within which a wait must have ended


def with_timeout(comm, timeout=0.4):
    """Another communicator over the same threads, for the waits that are to end."""
    made = Communicator.of_threads(ThreadWorld(comm.size), timeout=timeout) if comm.rank == 0 else []
    return comm.share_objects(made)[0][comm.rank]


def raised_by(call, *arguments):
    """How long the call took to raise PeerTimeout, and the error."""
    begin = time.monotonic()
    with pytest.raises(PeerTimeout) as caught:
        call(*arguments)
    return time.monotonic() - begin, caught.value


def row(*values):
    return torch.tensor(values, dtype=torch.uint8)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_random_exchanges_counts_objects_and_settings_arrive_as_sent(world_size):
    # The very checks that processes must pass.
    assert run_ranks(of_processes.check_everything, world_size, "seed", mode="thread") == list(range(world_size))


def test_large_messages_cross_each_other():
    assert run_ranks(of_processes.exchange_large, 2, 16_000_001, mode="thread") == [True, True]


def test_an_exchange_that_nobody_waits_for_still_happens_and_disturbs_no_other():
    run_ranks(of_processes.post_and_forget, 2, mode="thread")


def test_settings_that_differ_are_told_to_every_rank():
    expected = [f"ExpertParallel: the ranks' settings differ\n{text}" for _, text in of_processes.MISMATCHES]
    assert run_ranks(of_processes.compare, 3, mode="thread") == [expected] * 3


def test_threads_have_no_process_group_and_say_so():
    def check(comm):
        assert comm.in_process and not comm.closed
        with pytest.raises(ThinwireError, match="threads of one process have no process group"):
            _ = comm.group
        for fact in (f"rank {comm.rank} of 2", "the threads of one process", "backend: threads", "timeout: 30 s"):
            assert fact in comm.explain()
        comm.check_exchange()
        comm.check_device("x", row(1))
        comm.close()
        comm.close()
        assert comm.closed and "closed" in comm.explain()
        for call in (comm.barrier, lambda: comm.share_objects(1), lambda: comm.post([None] * 2, [None] * 2)):
            with pytest.raises(ThinwireError, match="communicator is closed"):
                call()

    run_ranks(check, 2, mode="thread")


def share_from_a_process(comm):
    assert not comm.in_process
    with pytest.raises(ThinwireError, match="cannot share objects; all_gather_object sends copies"):
        comm.share_objects(1)


def test_objects_are_shared_between_threads_and_not_between_processes():
    def share(comm):
        mine = threading.Lock()  # which cannot be pickled
        shared = comm.share_objects(mine)
        assert shared[comm.rank] is mine
        comm.barrier()
        again = comm.share_objects(shared)
        return [[id(lock) for lock in locks] for locks in again]

    results = run_ranks(share, 3, mode="thread")
    assert results[0] == results[1] == results[2] and results[0] == [results[0][0]] * 3
    assert len(set(results[0][0])) == 3
    run_ranks(share_from_a_process, 1)


def test_what_was_exchanged_is_let_go_while_the_ranks_live_on():
    class Thing:
        pass

    alive = []

    def share(comm):
        thing, buffer = Thing(), row(1, 2, 3)
        alive.extend((weakref.ref(thing), weakref.ref(buffer)))
        comm.share_objects(thing)
        peers = [None if peer == comm.rank else buffer for peer in range(comm.size)]
        pending = comm.post(peers, [None if peer is None else torch.zeros_like(peer) for peer in peers])
        comm.barrier()  # so all is done, although nobody has waited for this
        del thing, buffer, peers
        gc.collect()
        comm.barrier()
        assert len(alive) == 6 and all(reference() is None for reference in alive)
        pending.wait()

    run_ranks(share, 3, mode="thread")


def test_a_threads_communicator_gives_way_to_the_one_before():
    outer, inner = Communicator.of_threads(ThreadWorld(2))
    with rank_thread(outer):
        with rank_thread(inner):
            assert default_communicator() is inner
        assert default_communicator() is outer
    with pytest.raises(ThinwireError, match="no default communicator"):
        default_communicator()


def test_a_buffer_of_a_thread_in_inference_mode_can_be_filled_by_one_that_is_not():
    posted = threading.Event()

    def exchange(comm):
        with torch.inference_mode(comm.rank == 0):
            received = torch.zeros(3, dtype=torch.uint8)
            if comm.rank == 0:
                pending = comm.post([None, None], [None, received])
                posted.set()
            else:
                assert posted.wait(20.0)  # so the sender comes second, and moves the bytes
                pending = comm.post([row(5, 6, 7), None], [None, None])
            pending.wait()
            return received.tolist()

    assert run_ranks(exchange, 2, mode="thread") == [[5, 6, 7], [0, 0, 0]]


# --- what does not match ----------------------------------------------------------------------------------------------


DISAGREEMENTS = {  # what rank 0 receives and rank 1 sends, each as (length, label)
    "longer": ([(4, "")], [(8, "")]),
    "shorter": ([(8, "")], [(4, "")]),
    "order": ([(100, ""), (200, "")], [(200, ""), (100, "")]),
    "label": ([(4, "int8")], [(4, "fp8")]),
    "missing": ([(4, ""), (4, "")], [(4, "")]),
}


@pytest.mark.parametrize("case", list(DISAGREEMENTS))
def test_ranks_that_disagree_time_out_instead_of_mixing_up_bytes(case):
    def disagree(comm):
        short, under_way = with_timeout(comm), []
        received = []
        for length, label in DISAGREEMENTS[case][comm.rank]:
            buffer, nothing = torch.full((length,), comm.rank, dtype=torch.uint8), [None, None]
            if comm.rank == 0:
                received.append(buffer)
                under_way.append(short.post(nothing, [None, buffer], label))
            else:
                under_way.append(short.post([buffer, None], nothing, label))
        comm.barrier()  # both have posted
        if case == "missing":
            under_way.pop(0).wait()
            assert comm.rank or received.pop(0).tolist() == [1] * 4
        for pending in under_way:
            seconds, error = raised_by(pending.wait)
            assert seconds < 0.4 + SLACK
            if case == "missing":  # rank 1 has sent all it has, and waits for nobody
                assert error.ranks == (1,) and "stuck, gone, or expecting another message" in str(error)
            else:
                assert error.ranks == ()
                assert "nobody is lost: all of them wait, so they called something else" in str(error)
        assert not any(buffer.any() for buffer in received)
        comm.barrier()
        return len(under_way)

    results = run_ranks(disagree, 2, mode="thread")
    assert results == ([1, 0] if case == "missing" else [len(DISAGREEMENTS[case][0])] * 2)


# --- waits that end ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("absent", [0, 2])
def test_a_rank_that_never_comes_is_named_by_all_others_within_the_timeout(absent):
    given_up = threading.Barrier(3)

    def wait(comm):
        short = with_timeout(comm)
        if comm.rank == absent:
            given_up.wait(30.0)
        seconds, error = raised_by(short.barrier)
        if comm.rank != absent:
            given_up.wait(30.0)
        again_seconds, again = raised_by(short.barrier)
        assert again_seconds < SLACK and again.ranks == error.ranks
        assert "this group cannot be used any more, make a new one" in str(again)
        comm.barrier()  # the other world is as it was
        return seconds, error.ranks, str(error)

    for rank, (seconds, ranks, told) in enumerate(run_ranks(wait, 3, mode="thread")):
        assert seconds < 0.4 + SLACK
        assert ranks == (absent,)
        if rank == absent:  # it finds that the others have given it up
            assert f"the others have given up rank {absent}, which is this rank" in told
        else:
            assert told.startswith(f"rank {rank} of 3: no answer from rank {absent} within 0.4 s")


def test_the_rank_at_the_end_of_a_chain_of_waits_is_blamed():
    world = ThreadWorld(4)
    hasty = Communicator.of_threads(world, timeout=0.4)
    patient = Communicator.of_threads(world, timeout=0.8)

    def wait(comm):
        short = (patient if comm.rank else hasty)[comm.rank]
        if comm.rank == 3:
            comm.barrier()
            return None
        receives = [None] * 4
        receives[comm.rank + 1] = row(0)
        seconds, error = raised_by(short.post([None] * 4, receives).wait)
        assert seconds < short.timeout + SLACK
        comm.barrier()
        return error.ranks, str(error)

    first, second, third, _ = run_ranks(wait, 4, mode="thread")
    assert first[0] == (3,)
    assert "no answer from rank 1 within 0.4 s" in first[1] and "it was rank 3 that did not wait" in first[1]
    for ranks, told in (second, third):
        assert ranks == (3,), told


@pytest.mark.parametrize("how", ["closes", "raises", "returns"])
def test_nobody_waits_for_a_rank_that_is_gone(how):
    def wait(comm):
        other = with_timeout(comm, 20.0)
        if comm.rank == 1:
            if how == "closes":
                other.close()
                comm.barrier()
            if how == "raises":
                raise ValueError("rank 1 is\nunhappy")
            return None
        if how != "closes":
            other = comm
        begin = time.monotonic()
        _, error = raised_by(other.barrier)
        assert time.monotonic() - begin < 10.0 and error.ranks == (1,)
        told.append(str(error))
        if how == "closes":
            comm.barrier()

    told: list[str] = []
    if how == "raises":
        with pytest.raises(ThinwireError, match="rank 1 of 3 failed"):
            run_ranks(wait, 3, mode="thread")
    else:
        run_ranks(wait, 3, mode="thread")
    assert len(told) == 2
    reason = "rank 1 raised ValueError: rank 1 is" if how == "raises" else "rank 1 of 3 closed its communicator"
    assert all(reason in text and "unhappy" not in text for text in told), told


def test_messages_of_a_rank_that_is_gone_are_taken_back():
    """Nobody may write to its buffers once it was told that the exchange was given up."""
    (first, second) = Communicator.of_threads(ThreadWorld(2), timeout=0.2)
    received = row(1, 2, 3)
    _, error = raised_by(first.post([None, None], [None, received]).wait)
    assert error.ranks == (1,)
    _, error = raised_by(second.post([row(7, 8, 9), None], [None, None]).wait)
    assert error.ranks == (1,) and received.tolist() == [1, 2, 3]  # itself, as the other has given it up


def test_many_ranks_that_give_up_one_after_another_say_why_in_few_words():
    def wait(comm):
        if comm.rank == 0:
            raise ValueError("the root of it")
        _, error = raised_by(comm.barrier)
        texts.append(str(error))

    texts: list[str] = []
    with pytest.raises(ThinwireError, match="rank 0 of 12 failed"):
        run_ranks(wait, 12, mode="thread")
    assert len(texts) == 11 and all(text.count("the root of it") == 1 and len(text) < 300 for text in texts), texts


# --- what runs on top of it -------------------------------------------------------------------------------------------


def exchange_rows(comm):
    """Rows by all-to-all-v and by experts, staged, in several formats."""
    generator = torch.Generator().manual_seed(11 + comm.rank)
    found = []
    counts = [[3, 0, 2], [1, 4, 0], [0, 5, 1]]
    for wire in ("none", "int8", "int4", "int8:row"):
        x = torch.randn(sum(counts[comm.rank]), 200, generator=generator)
        found.append(tw.all_to_all_v(x, counts[comm.rank], wire=wire, comm=comm, check=True))
        ids = torch.randint(-1, 7, (5 + comm.rank, 3), generator=generator)
        tokens, weights = torch.randn(len(ids), 200, generator=generator), torch.rand(ids.shape, generator=generator)
        with tw.ExpertParallel(comm, 7, 3, 200, 16, wire=wire, transport="staged") as ep, torch.no_grad():
            d = ep.dispatch(tokens, ids, weights)
            found += [d.tokens, ep.combine(d.tokens.tanh() + 0.25, d)]
    with pytest.raises(ConfigMismatch, match="hidden_size: 64 on rank 0; 65"):
        tw.ExpertParallel(comm, 7, 3, 64 + comm.rank, 16, transport="staged")
    return found


def test_rows_are_the_same_to_the_last_bit_over_threads_and_over_processes():
    threads, processes = run_ranks(exchange_rows, 3, mode="thread"), run_ranks(exchange_rows, 3, timeout=120)
    for rank in range(3):
        assert len(threads[rank]) == 12
        for number, (thread, process) in enumerate(zip(threads[rank], processes[rank], strict=True)):
            assert_same_bits(f"rank {rank}, result {number}", process, thread)
