"""Large direct all-to-all-v calls whose pieces several threads share: what one thread gives, to the last bit."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from typing import Any

import pytest

pytest.importorskip("numba", reason="the direct transport of CPU ranks needs numba")

import numpy as np
import torch

from tests.fused.test_all_to_all_channel import Group, exchange
from tests.helpers.wires import WIRES, assert_same_bits
from thinwire.errors import CountsError, PeerTimeout, ThinwireError
from thinwire.fused.codec import dequantize, quantize
from thinwire.fused.host_channel import HostChannel
from thinwire.triton_kernels.cpu import all_to_all_v as kernels
from thinwire.triton_kernels.cpu import piece_team, team
from thinwire.wire import WireFormat

NONE = WireFormat.parse("none")
THREADS, PIECE = 3, 1 << 16
_NEVER = 1 << 62  # the next look at how far a peer is, further off than the clock goes


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """Teams for the smallest calls, too. The threads that were started."""
    started: list[threading.Thread] = []

    def start(kernel: Any, arguments: tuple[Any, ...]) -> None:
        started.append(threading.Thread(target=kernel, args=arguments, daemon=True))
        started[-1].start()

    monkeypatch.setattr(team, "BYTES_PER_THREAD", 1)
    monkeypatch.setattr(team, "start_new_thread", start)
    return started


def _results(rank: int, channel: HostChannel, wire: WireFormat, seen: int) -> list[torch.Tensor]:
    channel._peers[kernels.PEERS.index("seen")] = seen
    generator = torch.Generator().manual_seed(rank)
    results = []
    for tail, counts in (
        ((1025,), [[3, 161], [157, 0]]),
        ((20_001,), [[1, 9], [8, 2]]),
        ((), [[5, 150_001], [170_003, 1]]),
        ((7,), [[0, 0], [40_000, 0]]),
    ):
        x = torch.randn(sum(counts[rank]), *tail, generator=generator)
        receives = [row[rank] for row in counts]
        for known in (True, False):
            results.append(exchange(channel, x, counts[rank], receives if known else None, wire=wire).wait())
    return results


@pytest.mark.parametrize("spec", WIRES)
def test_rows_are_those_of_one_thread(spec: str, always: list[threading.Thread]) -> None:
    for seen in (_NEVER, _NEVER + 1, 0):
        one, several = (
            Group(2, PIECE, threads=threads).run(_results, WireFormat.parse(spec), seen) for threads in (1, THREADS)
        )
        for rank in range(2):
            for expected, got in zip(one[rank], several[rank], strict=True):
                assert_same_bits(f"{spec}, seen {seen}", expected, got)
    assert always


def test_a_wrong_count_is_told_and_the_ranks_go_on() -> None:
    group = Group(2, PIECE, threads=THREADS)

    def fn(rank: int, channel: HostChannel) -> torch.Tensor:
        x = torch.arange(200_000.0).view(100, 2000)
        if rank == 0:
            with pytest.raises(CountsError):
                exchange(channel, x, [50, 50], [50, 49]).wait()
        else:
            exchange(channel, x, [50, 50], [50, 50]).wait()
        return exchange(channel, x + rank, [50, 50]).wait()

    for rank, rows in enumerate(group.run(fn)):
        own = torch.arange(200_000.0).view(100, 2000)[50 * rank :][:50]
        assert torch.equal(rows, torch.cat([own, own + 1]))


def test_a_wait_that_a_signal_handler_ends_leaves_no_thread(always: list[threading.Thread]) -> None:
    group = Group(2, PIECE, threads=THREADS)
    channel, x = group.channels[0], torch.randn(200, 1000)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            exchange(channel, x, [100, 100], [100, 100])
    finally:
        signal.signal(signal.SIGALRM, before)
    for thread in always:
        if thread.ident is not None:  # on a busy machine the handler may come before it is started
            thread.join(5.0)
    assert always and not any(thread.is_alive() for thread in always)

    def fn(rank: int, channel: HostChannel) -> torch.Tensor:
        if rank == 1:
            assert torch.equal(exchange(channel, -x, [100, 100]).wait(), torch.cat([x[100:], -x[100:]]))
        return exchange(channel, x + rank, [100, 100]).wait()

    for rank, rows in enumerate(group.run(fn)):
        assert torch.equal(rows, torch.cat([x[100 * rank :][:100], (x + 1)[100 * rank :][:100]]))


def test_an_interrupted_call_leaves_no_thread_that_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # with threads that are started as they are
    channel = Group(1, PIECE, threads=4).channels[0]
    channel._shared_bytes = 0
    monkeypatch.setattr(team, "BYTES_PER_THREAD", 1)
    x, out = torch.randn(1000, 2048), torch.empty(1000, 2048)
    interrupted, chosen = 0, random.Random(0)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for _ in range(30):
            try:
                signal.setitimer(signal.ITIMER_REAL, chosen.uniform(1e-5, 1e-3))
                for _ in range(20):
                    exchange(channel, x, [1000], [1000], out=out)
                time.sleep(0.01)
            except KeyboardInterrupt:
                out.fill_(7)
                interrupted += 1
                time.sleep(0.002)
                assert (out == 7).all()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupted == 30
    exchange(channel, x, [1000], [1000], out=out)
    assert torch.equal(out, x)


def test_a_thread_that_does_not_lead_does_what_is_posted() -> None:
    channel = Group(1, PIECE, threads=2).channels[0]
    x, out = torch.randn(2 * PIECE // 4, 1), torch.zeros(2 * PIECE // 4, 1)
    exchange(channel, x, [len(x)], [len(x)], out=out)
    assert torch.equal(out, x)
    out.zero_()
    words, first = team._new_team(2)
    job = words[first:]
    for name, value in {"KIND": piece_team._UNPACK, "NUMBER": 1, "ADDRESS": x.data_ptr() + PIECE}.items():
        at = getattr(piece_team, f"_{name}") // 4
        job[at : at + 2].view(np.int64)[0] = value
    job[team._ROWS_PER_CHUNK // 4], job[team._LIMIT // 4] = PIECE // 4, 4
    helper = threading.Thread(
        target=kernels.move_in_team_kernel, args=(channel._call, channel._peers, 0, words, 1), daemon=True
    )
    helper.start()
    until = time.monotonic() + 20
    while job[team._DONE // 4] < 4 and time.monotonic() < until:
        time.sleep(1e-3)
    job[team._LIMIT // 4] = -1
    helper.join(20)
    assert torch.equal(out[PIECE // 4 :], x[PIECE // 4 :]) and not out[: PIECE // 4].any()


@pytest.mark.parametrize(
    ("spec", "mebibytes", "started"),
    [("int8", 7, 0), ("int8", 8, 1), ("int8", 64, 3), ("none", 31, 0), ("none", 32, 1)],
)
def test_calls_have_threads_by_their_bytes(
    spec: str, mebibytes: int, started: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    teams: list[object] = []  # a call that takes long pauses for Python, and goes on with another team
    monkeypatch.setattr(team, "start_new_thread", lambda kernel, arguments: teams.append(arguments[-2]))
    channel, rows = Group(1, threads=4, piece_bytes=1 << 18).channels[0], mebibytes << 10
    x = torch.ones(rows, 256)
    exchange(channel, x, [rows], [rows], out=torch.empty_like(x), wire=WireFormat.parse(spec))
    assert {*Counter(map(id, teams)).values()} == ({started} if started else set())


def test_nothing_is_published_before_all_threads_have_stored() -> None:
    group = Group(2, PIECE, threads=2)
    x = torch.randn(200, 1000)
    group.run(lambda rank, channel: exchange(channel, x, [100, 100], [100, 100]).wait())
    channel = group.channels[0]
    lines = group.layout.HEADERS  # of the second call, whose half is 0; rank 0's is the first
    header = group.buffers[1][lines : lines + 4].view(torch.int32)
    words, first = team._new_team(2)
    done = first + team._DONE // 4
    words[done] = -1  # somebody's part is still under way
    todo = kernels.POST
    leader = threading.Thread(
        target=kernels.move_in_team_kernel, args=(channel._call, channel._peers, todo, words, 0), daemon=True
    )
    leader.start()
    leader.join(0.3)
    assert leader.is_alive() and header[0] == 0
    words[done] += 1
    leader.join(20)
    assert not leader.is_alive() and header[0] == 2


@pytest.mark.exhaustive
def test_a_rank_that_never_comes_is_named_and_no_thread_is_left(always: list[threading.Thread]) -> None:
    group = Group(2, PIECE, timeout=0.5, threads=THREADS)
    x = torch.randn(200, 1000)
    with pytest.raises(PeerTimeout) as caught:
        exchange(group.channels[0], x, [100, 100], [100, 100]).wait()
    for thread in always:
        thread.join(0.5)
    assert caught.value.ranks == (1,) and always and not any(thread.is_alive() for thread in always)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(10))
def test_any_calls_of_many_ranks_and_threads(seed: int) -> None:
    together = random.Random(seed)
    world, threads = together.randint(1, 5), together.randint(2, 9)
    group = Group(world, PIECE, together.randint(1, 4), threads=threads)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(20):
        wire, width = WireFormat.parse(together.choice(WIRES)), together.choice([1, 100, 1500, 9000])
        counts = [[together.choice([0, 1, 7, 100]) for _ in range(world)] for _ in range(world)]
        inputs = [torch.randn(sum(row), width, generator=generator) for row in counts]
        sent = [dequantize(quantize(x, wire)).split(row) for x, row in zip(inputs, counts, strict=True)]

        def fn(
            rank: int,
            channel: HostChannel,
            counts: list[list[int]] = counts,
            inputs: list[torch.Tensor] = inputs,
            wire: WireFormat = wire,
        ) -> torch.Tensor:
            return exchange(channel, inputs[rank], counts[rank], [row[rank] for row in counts], wire=wire).wait()

        for rank, got in enumerate(group.run(fn)):
            assert_same_bits(f"{wire} {width} {counts}", torch.cat([rows[rank] for rows in sent]), got)


def test_a_first_call_that_is_cut_off_before_it_has_begun_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = Group(2, PIECE, threads=2)
    x = torch.arange(200_000.0).view(200, 1000)

    def cut(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(team, "start_new_thread", cut)
        with pytest.raises(KeyboardInterrupt):
            exchange(group.channels[0], x, [100, 100], [100, 100])
    found = group.run(lambda rank, channel: exchange(channel, x + rank, [100, 100], [100, 100]).wait())
    for rank, got in enumerate(found):
        part = x[100 * rank :][:100]
        assert torch.equal(got, torch.cat([part, part + 1]))


def test_peers_hear_of_who_closes_while_threads_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(2, PIECE, threads=2)
    own, peer = group.channels
    x = torch.ones(200, 1000)
    group.run(lambda rank, channel: exchange(channel, x, [100, 100], [100, 100]).wait())
    with monkeypatch.context() as patched:
        patched.setattr(team, "start_new_thread", lambda *arguments: own.close())
        with pytest.raises(ThinwireError, match="the communicator was closed while this call was under way"):
            exchange(own, x, [100, 100], [100, 100]).wait()
    with pytest.raises(PeerTimeout, match="rank 0 ended, or closed the communicator in the middle of a call"):
        exchange(peer, x, [100, 100], [100, 100]).wait()
