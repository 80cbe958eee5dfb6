"""Ranks that are killed, stopped or wrong in the middle of a round: who is told what, when, and how the others go on.

Each case has four processes over shared memory. `run_ranks` would end the others with the one that dies, so they are
started here: forked from a process that has everything imported and its kernels loaded, and met through a store in the
test's own process, which survives them all.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing
import os
import pickle
import re
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.files import mapped_segments, open_files, resident_bytes, shared_files
from tests.helpers.pulled import make_lanes, on_board, run_round
from tests.helpers.rounds import Tokens
from tests.helpers.wires import DTYPES
from thinwire.comm.communicator import Communicator
from thinwire.errors import LaneError, PeerTimeout
from thinwire.moe.parallel import ExpertParallel
from thinwire.moe.pulled import PulledRounds
from thinwire.testing import run_ranks
from thinwire.triton_kernels.cpu import HAS_NUMBA
from thinwire.triton_kernels.cpu.lane import PulledLane
from thinwire.triton_kernels.round_layout import COMBINE
from verification.soak.schedules import PULLED_KERNELS, RandomRound, Settings

pytestmark = [
    pytest.mark.skipif(not HAS_NUMBA, reason="needs numba"),
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux's pidfd_open"),
]

WORLD = 4
TIMEOUT = 1.5  # seconds that a round waits for a peer
SPARE = 2.0  # and so many more may pass, the grace time among them, until the caller is told
AT_ONCE = TIMEOUT / 2
LIMIT = 60.0  # seconds after which whatever is left of a case is killed
_PR_SET_PDEATHSIG = 1  # Linux's number of it
SETTINGS = Settings(
    world=WORLD, num_experts=7, top_k=3, hidden=72, max_tokens=6, wire="int8", combine_wire="int8", dtype=None, align=1,
    lanes=2, first_epoch=0,
)  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Processes that may die


class Case:
    """The processes of one case. Leaving the context kills what is left of them."""

    def __init__(self, nursery: Connection, function: Callable[..., Any], *arguments: object) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.deadline = time.monotonic() + LIMIT
        nursery.send((function, arguments, self.store.port))
        pids = nursery.recv()
        # They hold the process itself: its number may be another one's once it has ended.
        self._processes = [os.pidfd_open(pid) for pid in pids]
        self._nursery = nursery
        nursery.send("go")

    def __enter__(self) -> Case:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
        running = [rank for rank in range(WORLD) if not self.has_ended(rank, 5.0)]
        for process in self._processes:
            os.close(process)
        assert not running

    def send_signal(self, rank: int, number: int) -> None:
        """Sends a process a signal."""
        signal.pidfd_send_signal(self._processes[rank], number)

    def has_ended(self, rank: int, seconds: float = 0.0) -> bool:
        """Whether a process ends within so many seconds."""
        return bool(select.select([self._processes[rank]], [], [], seconds)[0])

    def wait_for(self, key: str, ranks: Iterable[int]) -> None:
        """Until each of these ranks has set a key, which their numbers complete.

        Raises:
            AssertionError: the function raised at one of them, with its traceback; one ended without; or time is up.
        """
        missing = set(ranks)
        while missing:
            for rank in sorted(missing):
                ended = self.has_ended(rank, 0.01)
                if self.store.check([f"result {rank}"]) and self._result(rank)[1] is not None:
                    time.sleep(TIMEOUT + SPARE)  # what the others then say may tell why
                    self._raise_failures()
                if self.store.check([f"{key} {rank}"]):
                    missing.discard(rank)
                assert rank not in missing or not ended, f"rank {rank} ended without {key!r}"
            assert time.monotonic() < self.deadline, f"ranks {sorted(missing)} have not set {key!r}"

    def results(self, ranks: Iterable[int]) -> dict[int, Any]:
        """What the function returned at these ranks. Raises as `wait_for` does."""
        ranks = list(ranks)
        self.wait_for("result", ranks)
        return {rank: self._result(rank)[0] for rank in ranks}

    def _raise_failures(self) -> None:
        there = [rank for rank in range(WORLD) if self.store.check([f"result {rank}"])]
        failures = {rank: self._result(rank)[1] for rank in there}
        raise AssertionError("\n".join(f"rank {rank}:\n{text}" for rank, text in failures.items() if text is not None))

    def _result(self, rank: int) -> tuple[Any, str | None]:
        result: tuple[Any, str | None] = pickle.loads(self.store.get(f"result {rank}"))
        return result


def _nursery(connection: Connection) -> None:
    """Forks ranks on request. It has no threads, so a fork finds nothing half-done."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    for dtype in DTYPES:
        lanes = make_lanes(2, 3, 2, 40, 3)
        tokens = [Tokens.random(3, 40, 2, 3, dtype, generator) for _ in lanes]
        run_round(lanes, tokens, torch.rand(3, 40), closing=(1,))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    gc.collect()
    gc.freeze()  # or a collection in a fork copies all that is here, which takes part of its peers' time
    connection.send("ready")
    while True:
        try:
            function, arguments, port = connection.recv()
        except EOFError:
            return
        parent, (gate, opener) = os.getpid(), os.pipe()
        pids = []
        for rank in range(WORLD):
            pid = os.fork()
            if pid == 0:
                os.close(opener)
                _run_rank(rank, parent, gate, port, function, arguments)
            pids.append(pid)
        connection.send(pids)
        connection.recv()
        for descriptor in (opener, gate):
            os.close(descriptor)


def _run_rank(
    rank: int, parent: int, gate: int, port: int, function: Callable[..., Any], arguments: tuple[object, ...]
) -> None:
    # The kernel kills this process with its parent, even while it is stopped.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    os.read(gate, 1)  # returns when the nursery closes the other end, as the test holds all processes by then
    result, failure = None, None
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=LIMIT))
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=LIMIT))
        result = function(Communicator(), store, *arguments)
    except BaseException:
        failure = traceback.format_exc()
    store.set(f"result {rank}", pickle.dumps((result, failure)))
    os._exit(0)  # taking the groups apart would wait for the dead


@pytest.fixture(scope="module")
def nursery() -> Iterator[Connection]:
    """The process that forks ranks, ready to do so."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    here, there = context.Pipe()
    process = context.Process(target=_nursery, args=(there,))
    process.start()
    there.close()
    try:
        assert here.poll(300), "the kernels are not loaded"
        assert here.recv() == "ready"
        yield here
    finally:
        here.close()
        process.join(5)
        process.kill()
        process.join()
        process.close()


# ---------------------------------------------------------------------------------------------------------------------
# What ranks do


Call = tuple[str, int]  # "dispatch" or "combine", and the lane


def _make(comm: Communicator) -> ExpertParallel:
    """All lanes have had a round when this returns."""
    ep = SETTINGS.make(comm, TIMEOUT)
    for lane in range(SETTINGS.lanes):
        RandomRound(ep, SETTINGS, f"first {lane}").play(lane)
    return ep


class _Calls:
    """The calls of a case at one rank, each of which may be the last."""

    def __init__(self, ep: ExpertParallel) -> None:
        self.ep = ep
        self.rounds: dict[int, RandomRound] = {}
        self.begun = 0

    def make(self, call: Call) -> None:
        """One call, its result checked."""
        kind, lane = call
        if kind == "dispatch":
            self.begun += 1
            self.rounds[lane] = RandomRound(self.ep, SETTINGS, f"round {self.begun}", abandons=False)
            self.rounds[lane].dispatch(lane)
        else:
            round_ = self.rounds[lane]
            round_.read()
            round_.end()


def _expect_timeout(calls: _Calls, call: Call, victims: tuple[int, ...]) -> float:
    """The call blames the victims in time, and so does whatever is called after it, at once. Returns seconds waited."""
    ep, (kind, own_lane) = calls.ep, call
    started = time.monotonic()
    with pytest.raises(PeerTimeout) as caught:
        calls.make(call)
    waited = time.monotonic() - started
    error = caught.value
    assert error.ranks == victims, str(error)
    assert isinstance(ep._assembly.rounds, PulledRounds)
    assert (error.lane, error.phase) == (own_lane, kind), str(error)
    assert error.epoch == ep._assembly.rounds.rounds_begun[own_lane], str(error)
    named = f"rank{'s' * (len(victims) > 1)} {', '.join(map(str, victims))}"
    told = (f"no answer from {named} within", f"{named} ended, or closed the communicator")  # who is dead, or stopped
    assert any(each in str(error) for each in told), str(error)
    assert waited <= TIMEOUT + SPARE, f"{waited:.2f} s"
    _expect_nothing_more(calls, victims)
    return waited


def _expect_nothing_more(calls: _Calls, victims: tuple[int, ...]) -> None:
    """Whatever is called now raises what was raised, without waiting, on every lane."""
    ep = calls.ep
    later: list[Callable[[], object]] = [ep.check]
    for lane, round_ in calls.rounds.items():
        d = round_.dispatched
        if d is not None and ep._assembly.rounds.open_rounds[lane] is d:
            later += [partial(d.gather, 3), partial(ep.combine, torch.zeros(3, SETTINGS.hidden), d)]
    later += [partial(RandomRound(ep, SETTINGS, "later").dispatch, lane) for lane in range(SETTINGS.lanes)]
    for again in later:
        started = time.monotonic()
        with pytest.raises(PeerTimeout) as caught:
            again()
        assert caught.value.ranks == victims, str(caught.value)
        assert time.monotonic() - started <= AT_ONCE, again


def _rebuild(ep: ExpertParallel, ranks: list[int]) -> Settings:
    """Goes on with some ranks of torch's default group, in new memory, and plays five rounds."""
    before = mapped_segments()
    ep.rebuild(dist.new_group(ranks, use_local_synchronization=True))
    gc.collect()
    ep.comm.barrier()  # the machine may be slow, and the time for a round is short
    assert len(mapped_segments()) == len(ranks) and not before & mapped_segments()
    assert ep.transport == "direct" and ep.comm.size == len(ranks)
    settings = replace(SETTINGS, world=len(ranks))
    for number in range(5):
        RandomRound(ep, settings, f"rebuilt {number}").play(number % 2)
    return settings


def _close(ep: ExpertParallel) -> None:
    """Nothing is left of it in this process, nor under a name."""
    ep.close()
    gc.collect()
    assert not mapped_segments()
    links = open_files()
    assert not [link for link in links if "thinwire" in link or link.startswith("/dev/shm")], links
    assert not shared_files()
    with pytest.raises(LaneError, match="closed"):
        ep.check()


def _send_oneself(number: int) -> None:
    os.kill(os.getpid(), number)


# ---------------------------------------------------------------------------------------------------------------------
# Killed


@dataclass(frozen=True)
class Fault:
    """Ranks that die at a call.

    Attributes:
        calls: what every rank calls. The last one is where survivors learn of it, at the latest.
        at: the call at which the victims die.
        how: "before" they make it; "between signals": when rank 0 was told, and no other; "waiting": in its wait.
        learnt: the call at which survivors learn of it.
        told: the same for rank 0.
        victims: who dies.
    """

    name: str
    calls: tuple[Call, ...]
    at: int
    how: str
    learnt: int
    told: int
    victims: tuple[int, ...] = (2,)


_D0, _D1, _C0, _C1 = ("dispatch", 0), ("dispatch", 1), ("combine", 0), ("combine", 1)
FAULTS = (
    Fault("before its dispatch", (_D0,), 0, "before", 0, 0),
    Fault("between its dispatch signals", (_D0, _C0), 0, "between signals", 0, 1),
    Fault("while its experts compute", (_D0, _C0), 1, "before", 1, 1),
    Fault("between its combine signals", (_D0, _C0, _D0), 1, "between signals", 1, 2),
    Fault("waiting for the combine", (_D0, _C0, _D0), 1, "waiting", 2, 2),
    Fault("after its combine", (_D0, _C0, _D0), 2, "before", 2, 2),
    Fault("with two lanes open", (_D0, _D1, _C0), 2, "before", 2, 2),
    Fault("between dispatch signals of the second lane", (_D0, _D1, _C0), 1, "between signals", 1, 2),
    Fault("between combine signals of the first lane", (_D0, _D1, _C0, _C1), 2, "between signals", 2, 3),
    Fault("between combine signals, the other lane at rest", (_D0, _C0, _D1), 1, "between signals", 1, 2),
    Fault("two ranks at once", (_D0, _C0), 1, "before", 1, 1, victims=(1, 2)),
)


def _die(comm: Communicator, store: dist.Store, fault: Fault) -> float | None:
    """Returns how long a survivor waited."""
    ep = _make(comm)
    assert len(mapped_segments()) == WORLD
    calls = _Calls(ep)
    if comm.rank in fault.victims:
        for number, call in enumerate(fault.calls):
            if number == fault.at:
                _prepare_death(ep, store, fault.how)
            calls.make(call)
        raise AssertionError("a victim lived on")
    last = fault.told if comm.rank == 0 else fault.learnt
    for number, call in enumerate(fault.calls[:last]):
        if number == fault.at and fault.how == "waiting" and comm.rank == 0:
            store.wait([f"waiting {rank}" for rank in fault.victims])
            time.sleep(0.5)  # so the victims die in their waits for this rank
        calls.make(call)
    waited = _expect_timeout(calls, fault.calls[last], fault.victims)
    del calls
    _rebuild(ep, [rank for rank in range(WORLD) if rank not in fault.victims])
    _close(ep)
    return waited


def _prepare_death(ep: ExpertParallel, store: dist.Store, how: str) -> None:
    if how == "before":
        _send_oneself(signal.SIGKILL)
    if how == "waiting":
        _signal_in_its_wait(ep, store, signal.SIGKILL)
    else:
        rounds: Any = ep._assembly.rounds
        others = {name: getattr(rounds.kernels, name) for name in PULLED_KERNELS}
        for name in ("send_tokens", "send_sums"):
            others[name] = _telling_rank_0(rounds, others[name])
        rounds.kernels = SimpleNamespace(**others)


def _signal_in_its_wait(ep: ExpertParallel, store: dist.Store, number: int) -> None:
    """Its next wait for a combine is interrupted, a little after it has begun."""
    rounds: Any = ep._assembly.rounds
    wait = rounds.await_peers

    def interrupted(channel: int, wanted: int, epoch: int, phase: int, *others: Any) -> None:
        if phase == COMBINE:
            rounds.await_peers = wait
            store.set(f"waiting {rounds.rank}", "")
            threading.Timer(0.2, _send_oneself, [number]).start()
        wait(channel, wanted, epoch, phase, *others)

    rounds.await_peers = interrupted


def _telling_rank_0(rounds: Any, kernel: Callable[..., None]) -> Callable[..., None]:
    """A kernel that puts lines at rank 0 and at this rank, and dies."""

    def run(lane: PulledLane, *others: Any) -> None:
        words, heaps = rounds.board._words.copy(), rounds.board._heaps.copy()
        elsewhere = torch.zeros(WORLD, rounds.board.num_bytes, dtype=torch.uint8)
        for peer in range(1, WORLD):
            if peer != rounds.rank:
                heaps[peer] = elsewhere[peer].data_ptr()
        words[0] = heaps.ctypes.data
        board = on_board(lane, words.ctypes.data)
        kernel(board, *others)
        _send_oneself(signal.SIGKILL)

    return run


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_survivors_name_the_killed_and_go_on(nursery: Connection, fault: Fault) -> None:
    with Case(nursery, _die, fault) as case:
        waited = case.results(rank for rank in range(WORLD) if rank not in fault.victims)
        for rank in fault.victims:
            assert case.has_ended(rank) and not case.store.check([f"result {rank}"])
    print(f"seconds waited: {waited}")
    assert not shared_files()


def _die_in_turn(comm: Communicator, store: dist.Store) -> None:
    ep = _make(comm)
    if comm.rank == 3:
        _send_oneself(signal.SIGKILL)
    _expect_timeout(_Calls(ep), _D0, (3,))
    settings = _rebuild(ep, [0, 1, 2])
    if comm.rank == 1:
        _send_oneself(signal.SIGKILL)
    with pytest.raises(PeerTimeout) as caught:
        RandomRound(ep, settings, "second").dispatch(1)
    assert caught.value.ranks == (1,) and caught.value.lane == 1
    del caught
    _rebuild(ep, [0, 2])
    assert ep._assembly.generation == 2
    _close(ep)


@pytest.mark.exhaustive
def test_a_rebuilt_group_may_lose_a_rank_too(nursery: Connection) -> None:
    with Case(nursery, _die_in_turn) as case:
        case.results((0, 2))


# ---------------------------------------------------------------------------------------------------------------------
# Stopped, slow or wrong


def _stop(comm: Communicator, store: dist.Store, when: str) -> set[int]:
    """Rank 2 stops, and wakes when the others have gone on. Returns the memory that a rank had at its end."""
    ep = _make(comm)
    calls = _Calls(ep)
    if comm.rank == 2:
        return _stop_and_wake(calls, store, when)
    if when == "dispatch":
        _expect_timeout(calls, _D0, (2,))
    else:
        calls.make(_D0)
        if when == "experts":
            _expect_timeout(calls, _C0, (2,))
        else:
            if comm.rank == 0:
                store.wait(["waiting 2"])
                time.sleep(0.5)  # so it stops in its wait for this rank
            calls.make(_C0)
            _expect_timeout(calls, _D0, (2,))
    del calls
    settings = _rebuild(ep, [0, 1, 3])
    new = mapped_segments()
    store.set(f"rebuilt {comm.rank}", "")
    number = 0
    while not all(ep.comm.all_gather_object(store.check(["given up"]))):
        RandomRound(ep, settings, f"meanwhile {number}").play(number % 2)
        number += 1
    assert number > 0
    for last in range(5):
        RandomRound(ep, settings, f"afterwards {last}").play(last % 2)
    assert mapped_segments() == new
    _close(ep)
    return new


def _stop_and_wake(calls: _Calls, store: dist.Store, when: str) -> set[int]:
    ep = calls.ep
    remaining = [_D0, _C0, _D0, _C0]
    if when != "dispatch":
        calls.make(remaining.pop(0))
    if when == "wait":
        _signal_in_its_wait(ep, store, signal.SIGSTOP)
    else:
        _send_oneself(signal.SIGSTOP)
    with pytest.raises(PeerTimeout) as caught:
        for call in remaining:
            started = time.monotonic()
            calls.make(call)
    if when != "wait":
        assert time.monotonic() - started <= AT_ONCE
    message = str(caught.value)
    assert re.search(r"ranks 0, 1, 3 waited for this rank for too long and gave up", message), message
    assert caught.value.ranks == (2,) and caught.value.lane == 0, message
    assert "the others have given up rank 2, which is this rank" in message
    _expect_nothing_more(calls, (2,))
    old = mapped_segments()
    assert len(old) == WORLD
    store.set("given up", "")
    calls.rounds.clear()
    del caught
    _close(ep)
    return old


@pytest.mark.exhaustive
@pytest.mark.parametrize("when", ["dispatch", "experts", "wait"])
def test_a_stopped_rank_is_given_up_and_disturbs_nobody_when_it_wakes(nursery: Connection, when: str) -> None:
    with Case(nursery, _stop, when) as case:
        case.wait_for("rebuilt", (0, 1, 3))
        assert not case.store.check(["given up"])
        case.send_signal(2, signal.SIGCONT)
        memory = case.results(range(WORLD))
    for rank in (0, 1, 3):
        assert not memory[rank] & memory[2]  # what it wrote to after it woke was none of theirs


def _miss_a_round(comm: Communicator, store: dist.Store) -> None:
    """Rank 2 lives, but is late; all four go on."""
    ep = _make(comm)
    calls = _Calls(ep)
    if comm.rank != 2:
        _expect_timeout(calls, _D0, (2,))
        store.set(f"timed out {comm.rank}", "")
    else:
        store.wait([f"timed out {rank}" for rank in (0, 1, 3)])
        with pytest.raises(PeerTimeout, match="ranks 0, 1, 3 waited for this rank") as caught:
            for call in (_D0, _C0):
                calls.make(call)
        assert caught.value.ranks == (2,)
        del caught
    del calls
    _rebuild(ep, list(range(WORLD)))
    _close(ep)


@pytest.mark.exhaustive
def test_a_rank_that_misses_a_round_is_named_and_may_join_again(nursery: Connection) -> None:
    with Case(nursery, _miss_a_round) as case:
        case.results(range(WORLD))


# ---------------------------------------------------------------------------------------------------------------------
# Memory


def _play_many(comm: Communicator, rounds: int) -> tuple[int, int]:
    """Resident bytes before and after, once everything has been used."""
    hidden, tokens, experts = 4096, 32, 4
    with ExpertParallel(comm, experts, 2, hidden, tokens, transport="direct", lanes=2) as ep:
        memory_bytes = ep.memory_bytes
        generator = torch.Generator().manual_seed(comm.rank)
        resident = []
        for number in range(2 * rounds):
            if number == rounds:
                resident.append(resident_bytes())
            ids = torch.randint(-1, experts, (tokens, 2), generator=generator)
            d = ep.dispatch(torch.ones(tokens, hidden), ids, torch.ones(ids.shape), lane=number % 2)
            if number % 5:
                ep.combine(d.tokens, d)
            elif number % 10:
                d.abandon()
        resident.append(resident_bytes())
        assert ep.memory_bytes == memory_bytes
    return resident[0], resident[1]


@pytest.mark.exhaustive
def test_memory_does_not_grow() -> None:
    rounds = 100
    for before, after in run_ranks(_play_many, 2, rounds, timeout=120):
        print(f"{before / 2**20:.1f} MiB before, {after / 2**20:.1f} MiB after {rounds} rounds")
        # A result is 512 KiB: had every tenth round kept one, it would be more than this.
        assert after - before <= 4 * 2**20
