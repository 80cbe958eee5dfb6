"""Survivors agree on who is lost, whoever it is, and go on without them."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import thinwire as tw
from tests.helpers.files import open_files
from tests.helpers.mortal import TIMEOUT, die, ranks, tell, wait_for
from thinwire.comm import Communicator, communicator
from thinwire.comm.agreement.standby import Meeting, Standby
from thinwire.errors import ArgumentError, PeerTimeout, ThinwireError
from thinwire.fused.pulled_legs import NAME
from thinwire.testing import run_ranks

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")


def check_sums(comm: Communicator) -> None:
    """all_reduce in one step and in two is right."""
    for length in (3, 40_000):
        x = torch.full((length,), comm.rank + 1.0)
        comm.all_reduce(x)
        assert bool((x == comm.size * (comm.size + 1) / 2).all())


def lose(comm: Communicator) -> PeerTimeout:
    """Calls until a peer is missed."""
    with pytest.raises(PeerTimeout) as caught:
        for _ in range(1000):
            comm.all_reduce(torch.ones(40_000))
            time.sleep(0.002)
    return caught.value


def lose_and_shrink(comm: Communicator) -> tuple[object, ...]:
    check_sums(comm)
    tell("ready")
    error = lose(comm)
    left = comm.shrink()
    check_sums(left)
    assert comm.closed and left is comm.shrink() is tw.init()
    assert dist.get_world_size() == left.size and dist.get_rank() == left.rank
    with left.split(groups=[[rank] for rank in range(left.size)]) as alone:
        assert alone.size == 1
    assert tw.init(domain="again").all_gather_object(left.rank) == list(range(left.size))
    return error.ranks, left.rank, left.size, str(error)


@pytest.mark.parametrize(
    ("victims", "number"),
    [
        ((0,), signal.SIGKILL),
        pytest.param((2,), signal.SIGKILL, marks=pytest.mark.exhaustive),
        pytest.param((0,), signal.SIGSTOP, marks=pytest.mark.exhaustive),
        pytest.param((0, 1), signal.SIGKILL, marks=pytest.mark.exhaustive),
        pytest.param((3,), signal.SIGSTOP, marks=pytest.mark.exhaustive),
        pytest.param((0, 1), signal.SIGSTOP, marks=pytest.mark.exhaustive),
        pytest.param((1, 3), signal.SIGKILL, marks=pytest.mark.exhaustive),
    ],
)
def test_survivors_name_the_same_ranks_and_go_on(
    tmp_path: Path, victims: tuple[int, ...], number: signal.Signals
) -> None:
    with ranks(tmp_path, 4, lose_and_shrink) as case:
        case.told(range(4), "ready")
        case.signal(number, *victims)
        left = [rank for rank in range(4) if rank not in victims]
        told = list(case.told(left).values())
        for place, (named, rank, size, text) in enumerate(told):
            assert (named, rank, size) == (told[0][0], place, len(left)), text
            # Who is stopped beside another may not have been missed yet when the first one was.
            assert named and set(named) <= set(victims) and "the ranks agree that" in text, text


_CALLS: dict[str, Callable[[Communicator, tw.ExpertParallel | None], object]] = {
    "collective": lambda comm, _: tw.all_reduce(torch.ones(3000), wire="int8", transport="direct", comm=comm),
    "all-to-all-v": lambda comm, _: tw.all_to_all_v(torch.ones(3, 8), [1] * 3, [1] * 3, transport="direct", comm=comm),
    "round": lambda _, ep: ep and ep.combine((d := ep.dispatch(*_tokens(ep.comm.rank))).tokens, d),
    "two steps, staged": lambda comm, _: comm.all_reduce(torch.ones(40_000)),
}


def lose_within(comm: Communicator, name: str) -> tuple[tuple[int, ...], str]:
    ep = tw.ExpertParallel(comm, 6, 2, 64, 8, transport="direct") if name == "round" else None
    call = _CALLS[name]
    call(comm, ep)
    comm.barrier()
    if comm.rank == 2:
        die()
    with pytest.raises(PeerTimeout) as caught:
        for _ in range(3):
            call(comm, ep)
    return caught.value.ranks, str(caught.value)


@pytest.mark.parametrize("name", _CALLS)
def test_a_killed_rank_is_named_long_before_the_limit(tmp_path: Path, name: str) -> None:
    with ranks(tmp_path, 3, lose_within, name, timeout=600.0) as case:
        for named, text in case.told((0, 1), "result").values():
            assert named == (2,) and "pass timeout=" not in text, text


def split_and_leave(comm: Communicator) -> int:
    if comm.rank == 1:
        make = communicator.new_group

        def make_late(*arguments: Any, **named: Any) -> Any:
            time.sleep(1.0)  # rank 0 has its own by now, and nothing more to do
            return make(*arguments, **named)

        communicator.new_group = make_late
    return comm.split(groups=[[0], [1]]).size


def shrink_and_leave(comm: Communicator) -> int:
    if comm.rank == 2:
        die()
    if comm.rank == 1:
        pin = Standby._pin_patiently

        def pin_late(self: Standby, rank: int, key: str = "", note: Any = ()) -> Any:
            time.sleep(2.0 * key.startswith("outcome/"))  # rank 0, the host, has found it, and gone on
            return pin(self, rank, key, note)

        Standby._pin_patiently = pin_late  # type: ignore[method-assign]
    return comm.shrink([2]).size


@pytest.mark.parametrize(("call", "size", "left"), [(split_and_leave, 2, 1), (shrink_and_leave, 3, 2)])
def test_a_rank_that_is_done_may_leave(tmp_path: Path, call: Any, size: int, left: int) -> None:
    with ranks(tmp_path, size, call, timeout=20.0) as case:
        assert case.told((0, 1), "result") == {0: left, 1: left}


def give_up_in_turn(comm: Communicator) -> None:
    short = Communicator(comm.group, timeout=1.5)
    tell("ready")
    wait_for("rank 0 is stopped")
    time.sleep(0.3 * comm.rank)  # so rank 1 is the first to give up, and then rank 2 has lost the connection to it
    with pytest.raises(PeerTimeout) as caught:
        peers = range(comm.size)
        receives = [torch.zeros(4, dtype=torch.uint8) if peer == comm.rank - 1 else None for peer in peers]
        short.post([None] * comm.size, receives).wait()
    with pytest.raises(PeerTimeout) as again:
        short.barrier()
    assert caught.value.ranks == again.value.ranks
    tell("named", (caught.value.ranks, str(caught.value)))
    wait_for("all know")  # and can ask, as this process lives


@pytest.mark.exhaustive
def test_who_gave_up_first_is_not_taken_for_lost(tmp_path: Path) -> None:
    with ranks(tmp_path, 4, give_up_in_turn) as case:
        case.told(range(4), "ready")
        case.signal(signal.SIGSTOP, 0)
        case.allow("rank 0 is stopped")
        told = case.told([1, 2, 3], "named")
        case.allow("all know")
        case.told([1, 2, 3])
    assert [named for named, _ in told.values()] == [(0,)] * 3, told
    assert any("lost the connection to rank 1" in text for _, text in told.values())


def lose_twice(comm: Communicator) -> list[object]:
    found: list[object] = []
    for victim in (0, 1):  # ranks 0 and 2 of four: the second is rank 1 of those that are left
        if comm.rank == victim:
            die()
        found.append(lose(comm).ranks)
        comm = comm.shrink()
        check_sums(comm)
    with pytest.raises(ThinwireError, match="close"):
        tw.init(rank=comm.rank, world_size=4)
    return [*found, comm.rank, comm.size]


def test_a_shrunk_communicator_is_shrunk_again(tmp_path: Path) -> None:
    with ranks(tmp_path, 4, lose_twice) as case:
        assert case.told([1, 3]) == {1: [(0,), (1,), 0, 2], 3: [(0,), (1,), 1, 2]}


def call_different_things(comm: Communicator) -> tuple[object, ...]:
    with pytest.raises(PeerTimeout) as caught:
        comm.all_reduce(torch.ones(3 if comm.rank else 4))
    left = comm.shrink()
    check_sums(left)
    return caught.value.ranks, "nobody is lost" in str(caught.value), left.rank, left.size


@pytest.mark.exhaustive
def test_where_nobody_died_nobody_is_named_and_all_go_on(tmp_path: Path) -> None:
    with ranks(tmp_path, 3, call_different_things) as case:
        assert case.told(range(3)) == {rank: ((), True, rank, 3) for rank in range(3)}


def lose_the_host(comm: Communicator) -> tuple[object, ...]:
    report = Standby._report
    if comm.rank == 0:
        # It holds the vote on rank 3, and ends with a report in it that nobody has acted on.
        Standby._report = lambda *arguments: (report(*arguments), die())[0]  # type: ignore[method-assign, func-returns-value]
    else:
        Standby._report = lambda *arguments: (time.sleep(0.3), report(*arguments))[1]  # type: ignore
    if comm.rank == 3:
        die()
    error = lose(comm)
    Standby._report = report  # type: ignore[method-assign]
    left = comm.shrink()
    check_sums(left)
    return error.ranks, left.rank, left.size


def test_a_host_that_is_lost_during_the_vote_is_named_too(tmp_path: Path) -> None:
    with ranks(tmp_path, 4, lose_the_host) as case:
        assert case.told([1, 2]) == {rank: ((0, 3), rank - 1, 2) for rank in (1, 2)}


def ask_after_the_host_has_died(comm: Communicator) -> tuple[int, ...]:
    if comm.rank == 3:
        die()
    if comm.rank == 2:
        wait_for("rank 0 has died, too")
    named = lose(comm).ranks
    tell("named")
    wait_for("rank 0 has died, too")
    if comm.rank == 1:
        wait_for("rank 2 knows")
    return named


@pytest.mark.exhaustive
def test_a_verdict_outlives_its_host(tmp_path: Path) -> None:
    with ranks(tmp_path, 4, ask_after_the_host_has_died) as case:
        case.told([0, 1], "named")
        case.signal(signal.SIGKILL, 0)
        case.processes[0].join(10)
        case.allow("rank 0 has died, too")
        assert case.told([2]) == {2: (3,)}
        case.allow("rank 2 knows")
        assert case.told([1]) == {1: (3,)}


def lose_another_meanwhile(comm: Communicator, of_init: bool) -> tuple[object, ...]:
    comm = comm if of_init else Communicator(comm.group, timeout=TIMEOUT)
    if comm.rank == 0:
        die()
    if comm.rank == 2:
        Meeting.make = lambda *arguments: die()  # type: ignore[method-assign, assignment]
    lose(comm)
    with pytest.raises(PeerTimeout, match=r"lost while ranks 1, 2, 3 were about to go on; call shrink\(\) again"):
        comm.shrink()
    left = comm.shrink()
    check_sums(left)
    return left.rank, left.size


@pytest.mark.exhaustive
@pytest.mark.parametrize("of_init", [True, False])
def test_a_rank_that_is_lost_while_the_others_shrink_makes_them_call_it_again(tmp_path: Path, of_init: bool) -> None:
    with ranks(tmp_path, 4, lose_another_meanwhile, of_init) as case:
        assert case.told([1, 3]) == {1: (0, 2), 3: (1, 2)}


def shrink_a_domain(_: Communicator) -> bool:
    comm = tw.init()
    domain = tw.init(domain="a")
    left = domain.shrink()
    assert tw.init(domain="a") is left is not domain and tw.init() is comm
    check_sums(left)
    comm.close()
    return left.closed


@pytest.mark.parametrize("mode", ["process", "thread"])
def test_a_domain_that_was_shrunk_is_found_by_its_name_and_ends_with_the_others(mode: str) -> None:
    assert run_ranks(shrink_a_domain, 2, mode=mode) == [True, True]


def lose_in_parts(comm: Communicator) -> tuple[object, ...]:
    """Of a communicator of a part, and one over a group that torch.distributed was given: neither is `init`'s."""
    half = comm.split(groups=[[0, 1, 2], [3]])
    own = Communicator(comm.group, timeout=TIMEOUT)
    if comm.rank == 0:
        die()
    if comm.rank == 3:
        assert own.shrink(lost=[0]).all_gather_object(comm.rank) == [1, 2, 3]
        return ()
    named = lose(half).ranks
    left = half.shrink()
    check_sums(left)
    with left.split(groups=[[1], [0]]) as alone, left.split(groups=[[1, 0]]) as turned:
        assert (alone.size, turned.rank) == (1, 1 - left.rank)
        check_sums(turned)
    told = left.explain()
    assert "shrunk from 3 ranks to ranks 1, 2" in told and "unknown to torch.distributed" in told
    assert "standby: 127.0.0.1:" in told
    assert own.shrink(lost=[0]).all_gather_object(comm.rank) == [1, 2, 3]
    assert dist.get_world_size() == 4  # torch.distributed's own groups are as they were
    left.close()
    assert "closed" in left.explain() and "unknown to torch.distributed" in left.explain()
    with pytest.raises(ThinwireError, match="closed"):
        _ = left.group
    return named, left.rank, left.size


def test_communicators_of_other_groups_shrink_by_themselves(tmp_path: Path) -> None:
    with ranks(tmp_path, 4, lose_in_parts) as case:
        assert case.told([1, 2, 3]) == {1: ((0,), 0, 2), 2: ((0,), 1, 2), 3: ()}


def come_late(comm: Communicator) -> str:
    if comm.rank == 2:
        wait_for("the others went on")
        with pytest.raises(PeerTimeout) as caught:
            comm.barrier()
        assert caught.value.ranks == (2,)
        assert "the others have given up rank 2, which is this rank" in str(caught.value)
        for lost in (None, []):
            with pytest.raises(ThinwireError, match="rank 2 of 3 is itself one of the ranks that are lost, rank 2;"):
                comm.shrink(lost)
        return "left out"
    with pytest.raises(PeerTimeout) as caught:
        comm.barrier()
    assert caught.value.ranks == (2,)
    left = comm.shrink()
    check_sums(left)
    tell("went on")
    wait_for("rank 2 knows")  # and can ask, as this process lives
    return "went on"


@pytest.mark.exhaustive
def test_a_rank_that_comes_late_finds_itself_named_and_left_out(tmp_path: Path) -> None:
    with ranks(tmp_path, 3, come_late) as case:
        case.told([0, 1], "went on")
        case.allow("the others went on")
        assert case.told([2]) == {2: "left out"}
        case.allow("rank 2 knows")
        case.told([0, 1])


def wake_alone(comm: Communicator) -> object:
    tell("ready")
    error = lose(comm)
    assert error.ranks == (0,), str(error)
    if comm.rank == 0:
        assert "the others have given up rank 0, which is this rank" in str(error)
        with pytest.raises(ThinwireError, match="rank 0 of 3 is itself one of the ranks that are lost"):
            comm.shrink()
        return None
    with comm.shrink() as left:
        check_sums(left)
        tell("went on")
        wait_for("rank 0 knows")  # and can ask, as this process lives
        return left.size


@pytest.mark.exhaustive
def test_a_rank_0_that_was_stopped_does_not_go_on_alone(tmp_path: Path) -> None:
    """Its own standby, which it asks first, has no verdict."""
    with ranks(tmp_path, 3, wake_alone) as case:
        case.told(range(3), "ready")
        case.signal(signal.SIGSTOP, 0)
        case.told([1, 2], "went on")
        case.signal(signal.SIGCONT, 0)
        case.told([0])
        case.allow("rank 0 knows")
        assert case.told([1, 2]) == {1: 2, 2: 2}


def wake_last(comm: Communicator, transport: str) -> object:
    x = torch.ones(3000)
    tw.all_reduce(x, transport=transport, comm=comm)
    tell("ready")
    with pytest.raises(PeerTimeout) as caught:
        while True:
            tw.all_reduce(x, transport=transport, comm=comm)
            time.sleep(0.002)
    error = caught.value
    assert error.ranks == (0,), str(error)
    if comm.rank:
        with comm.shrink() as left:
            check_sums(left)
            return left.size
    assert "the others have given up rank 0, which is this rank" in str(error)
    for lost in (None, []):
        with pytest.raises(ThinwireError, match="rank 0 of 3 is itself one of the ranks that are lost"):
            comm.shrink(lost)
    return "left out"


@pytest.mark.exhaustive
@pytest.mark.parametrize("transport", ["direct", "staged"])
def test_a_rank_0_that_wakes_when_all_others_have_ended_does_not_go_on_alone(tmp_path: Path, transport: str) -> None:
    with ranks(tmp_path, 3, wake_last, transport) as case:
        case.told(range(3), "ready")
        case.signal(signal.SIGSTOP, 0)
        assert case.told([1, 2]) == {1: 2, 2: 2}
        for process in case.processes[1:]:
            process.join(20)
            assert process.exitcode == 0
        case.signal(signal.SIGCONT, 0)
        assert case.told([0]) == {0: "left out"}


def call_in_different_places(comm: Communicator) -> tuple[object, ...]:
    """Rank 2 waits in the process group, or among the threads, and the others in memory that they share."""
    part = comm.split(groups=[range(comm.size)])
    tw.all_reduce(torch.ones(30), transport="direct", comm=part)
    part._exchange.timeout = 1.0
    part.attached(NAME).timeout = 1.0
    comm.barrier()
    with pytest.raises(PeerTimeout) as caught:
        if comm.rank == 2:
            part.barrier()
        else:
            tw.all_reduce(torch.ones(30), transport="direct", comm=part)
    left = part.shrink()
    check_sums(left)
    return caught.value.ranks, "nobody is lost" in str(caught.value), left.size


@pytest.mark.parametrize("mode", [pytest.param("process", marks=pytest.mark.exhaustive), "thread"])
def test_ranks_that_wait_in_different_places_take_nobody_for_lost(mode: str) -> None:
    assert run_ranks(call_in_different_places, 3, mode=mode) == [((), True, 3)] * 3


def lose_two(comm: Communicator) -> tuple[int, ...]:
    """The first to die has signalled all ranks a call further than the second has."""
    x = torch.ones(30)
    tw.all_reduce(x, transport="direct", comm=comm)
    tell("ready")
    with pytest.raises(PeerTimeout) as caught:
        while True:
            tw.all_reduce(x, transport="direct", comm=comm)
    return caught.value.ranks


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_all_name_the_same_of_two_that_are_lost_at_once(tmp_path: Path, number: signal.Signals) -> None:
    for repeat in range(4):
        folder = tmp_path / str(repeat)
        folder.mkdir()
        with ranks(folder, 4, lose_two) as case:
            case.told(range(4), "ready")
            case.signal(number, 1, 3)
            told = case.told([0, 2])
            assert told[0] == told[2] and {*told[0]} <= {1, 3} and told[0], told
            assert number != signal.SIGKILL or told[0] == (1, 3), told


def come_too_late(comm: Communicator) -> object:
    if comm.rank == 2:
        wait_for("the others went on")
        with pytest.raises(ThinwireError, match="rank 2 of 3 is not among those that go on, ranks 0, 1: it came too"):
            comm.shrink()
        return None
    left = comm.shrink()
    check_sums(left)
    tell("went on", left.size)
    wait_for("rank 2 knows")
    return None


@pytest.mark.exhaustive
def test_who_does_not_come_is_left_out_though_nobody_missed_it(tmp_path: Path) -> None:
    with ranks(tmp_path, 3, come_too_late) as case:
        assert case.told([0, 1], "went on") == {0: 2, 1: 2}
        case.allow("the others went on")
        case.told([2])
        case.allow("rank 2 knows")
        case.told([0, 1])


def lose_experts(comm: Communicator, transport: str) -> tuple[object, ...]:
    ep = tw.ExpertParallel(comm, 6, 2, 64, 8, transport=transport, timeout=1.0)
    x, ids, weights = _tokens(comm.rank)
    ep.combine(ep.dispatch(x, ids, weights).tokens, ep._assembly.rounds.open_rounds[0])
    if comm.rank == 0:
        die()
    with pytest.raises(PeerTimeout) as caught:
        ep.dispatch(x, ids, weights)
    if comm.rank == 1:
        with pytest.raises(ArgumentError, match=r"lost is \[4\], expected None or ranks of this communicator"):
            ep.rebuild([4])
    ep.rebuild(caught.value.ranks if comm.rank % 2 else None)
    fresh = tw.ExpertParallel(ep.comm, 6, 2, 64, 8, transport=transport)
    results = []
    for other in (ep, fresh):
        x, ids, weights = _tokens(other.comm.rank)
        d = other.dispatch(x, ids, weights)
        results.append(other.combine(d.tokens * 2, d))
    assert torch.equal(*results) and bool(results[0].any())
    return caught.value.ranks, ep.comm.rank, ep.comm.size, ep.transport


def _tokens(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    ids = torch.stack([torch.randperm(6, generator=generator)[:2] for _ in range(5)])
    return torch.randn(5, 64, generator=generator), ids, torch.rand(5, 2, generator=generator)


@pytest.mark.parametrize("transport", ["direct", "staged"])
def test_experts_are_rebuilt_without_rank_0(tmp_path: Path, transport: str) -> None:
    with ranks(tmp_path, 4, lose_experts, transport) as case:
        assert case.told([1, 2, 3]) == {rank: ((0,), rank - 1, 3, transport) for rank in (1, 2, 3)}


def return_early_or_shrink(comm: Communicator) -> tuple[object, ...]:
    if comm.rank == 0:
        return ()
    with pytest.raises(PeerTimeout) as caught:
        comm.barrier()
    left = comm.shrink()
    check_sums(left)
    assert tw.init() is left is comm.shrink() and comm.closed
    return caught.value.ranks, left.rank, left.size


def test_threads_shrink_too() -> None:
    assert run_ranks(return_early_or_shrink, 3, mode="thread") == [(), ((0,), 0, 2), ((0,), 1, 2)]


def shrink_and_count(comm: Communicator) -> None:
    comm = Communicator(comm.group)

    def open_now() -> tuple[int, int]:
        gc.collect()
        return len(open_files()), len(os.listdir("/proc/self/task"))

    def once() -> None:
        # Of the same ranks: nobody died, and the new communicator is of a standalone group.
        with Communicator(comm.group, timeout=5.0) as first, first.shrink() as left:
            check_sums(left)

    once()
    comm.barrier()
    before = open_now()
    for _ in range(3):
        once()
    comm.barrier()
    deadline = time.monotonic() + 10  # Gloo's threads may take a moment
    while any(now > then for now, then in zip(open_now(), before, strict=True)):
        assert time.monotonic() < deadline, (before, open_now())
        time.sleep(0.05)


def test_nothing_is_left_of_what_was_shrunk_and_closed() -> None:
    run_ranks(shrink_and_count, 2)
