"""Teams of threads on the CPU: each row once, the same bits for any number of threads, and nothing after the return."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest

pytest.importorskip("numba", reason="the CPU kernels need numba")

import torch

from tests.helpers.speeds import exhaustive_but
from tests.helpers.wires import DTYPES, WIRES, assert_same_bits, magnitudes
from thinwire.triton_kernels.cpu import team
from thinwire.triton_kernels.cpu.pack import pack_rows, unpack_rows
from thinwire.wire import WireFormat

POISON = 0xA5
INT8 = WireFormat.parse("int8")


@pytest.fixture
def always(monkeypatch):
    """Teams for the smallest calls, too."""
    monkeypatch.setattr(team, "BYTES_PER_THREAD", 1)


def first_of(words):
    """The number of the first word of a team."""
    return -words.ctypes.data % 64 // 4


def index_or_none(random_numbers, rows, distinct):
    """In some calls an index, with gaps between its numbers."""
    if random_numbers.random() < 0.5:
        return None
    numbers = random_numbers.sample(range(rows), rows) if distinct else random_numbers.choices(range(rows), k=rows)
    table = torch.zeros(rows, 2, dtype=torch.int64)
    table[:, 0] = torch.tensor(numbers, dtype=torch.int64)
    return table[:, 0]


@pytest.mark.parametrize("spec", WIRES)
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(2, 20))])
def test_any_number_of_threads_gives_the_same_bits(spec, seed, always):
    chosen, wire = random.Random(f"{spec} {seed}"), WireFormat.parse(spec)
    generator = torch.Generator().manual_seed(seed)
    for dtype in DTYPES:
        rows, hidden, threads = chosen.choice([1, 2, 7, 100]), chosen.choice([1, 42, 431, 1024]), chosen.randint(2, 9)
        x = magnitudes(rows, hidden + 3, dtype, generator)[:, 2:-1]
        index = index_or_none(chosen, rows, distinct=False)
        records = [torch.full((rows + 1, wire.row_bytes(hidden, dtype)), POISON, dtype=torch.uint8) for _ in range(2)]
        for number, made in zip((1, threads), records, strict=True):
            pack_rows(x, wire, index, made[:rows], threads=number)
        assert torch.equal(*records), (dtype, rows, hidden, threads)
        record_index = index_or_none(chosen, rows, distinct=False)
        row_index = index_or_none(chosen, rows, distinct=True)
        outs = [torch.zeros(rows + 1, hidden + 5, dtype=dtype) for _ in range(2)]
        for number, out in zip((1, threads), outs, strict=True):
            unpack_rows(records[0][:rows], wire, record_index, row_index, out[:rows, 3 : 3 + hidden], threads=number)
        assert_same_bits(f"{dtype}", *outs)


def test_a_call_gets_threads_by_its_bytes():
    row = team.BYTES_PER_THREAD // 64
    assert [team.threads_for(count, row, 4) for count in (0, 127, 128, 4096)] == [1, 1, 2, 4]
    assert team.threads_for(1, 1 << 40, 4) == 1


def test_threads_of_small_stacks_are_not_used():
    before = threading.stack_size(32 << 10)
    try:
        assert team.threads_for(1 << 20, 1 << 10, 4) == 1
        threading.stack_size(128 << 10)
        assert team.threads_for(1 << 20, 1 << 10, 4) == 4
    finally:
        threading.stack_size(before)


def test_a_thread_that_starts_late_touches_nothing(always, monkeypatch):
    late = []
    monkeypatch.setattr(team, "start_new_thread", lambda kernel, arguments: late.append((kernel, arguments)))
    x = torch.randn(50, 300)
    records = torch.empty(50, INT8.row_bytes(300), dtype=torch.uint8)
    expected = records.clone()
    pack_rows(x, INT8, None, expected)
    pack_rows(x, INT8, None, records, threads=3)
    assert torch.equal(records, expected) and len(late) == 2
    records.fill_(POISON)
    for kernel, arguments in late:
        kernel(*arguments)
    assert (records == POISON).all()


def test_only_the_caller_waits(always, monkeypatch):
    others = []
    monkeypatch.setattr(team, "start_new_thread", lambda kernel, arguments: others.append((kernel, arguments)))
    pack_rows(torch.randn(50, 300), INT8, None, torch.empty(50, INT8.row_bytes(300), dtype=torch.uint8), threads=2)
    kernel, arguments = others[0]
    done = first_of(arguments[-2]) + team._DONE // 4
    arguments[-2][done] -= 1  # somebody's chunk is still under way
    other = threading.Thread(target=kernel, args=arguments, daemon=True)
    other.start()
    other.join(20)
    arguments[-2][done] += 1
    assert not other.is_alive()


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
def test_fewer_threads_than_wanted_are_told_once_and_do_it_all(error, always, monkeypatch, caplog):
    def refuse(*arguments):
        raise error

    monkeypatch.setattr(team, "start_new_thread", refuse)
    x = torch.randn(50, 300)
    records, expected = (torch.empty(50, INT8.row_bytes(300), dtype=torch.uint8) for _ in range(2))
    pack_rows(x, INT8, None, expected)
    with caplog.at_level(logging.WARNING, logger="thinwire"):
        for _ in range(2):
            pack_rows(x, INT8, None, records.fill_(POISON), threads=3)
            assert torch.equal(records, expected)
    assert caplog.messages == [f"1 of 3 threads share the rows of large calls: {error!r}"]


def test_an_interrupted_call_leaves_no_thread_that_writes(always):
    x = torch.randn(1000, 2048)
    records = torch.empty(1000, INT8.row_bytes(2048), dtype=torch.uint8)
    pack_rows(x, INT8, None, records, threads=4)
    interrupted, chosen = 0, random.Random(0)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for _ in range(30):
            try:
                signal.setitimer(signal.ITIMER_REAL, chosen.uniform(1e-5, 1e-3))
                for _ in range(20):
                    pack_rows(x, INT8, None, records, threads=4)
                time.sleep(0.01)
            except KeyboardInterrupt:
                records.fill_(POISON)
                interrupted += 1
                time.sleep(0.002)
                assert (records == POISON).all()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupted == 30


def test_a_child_has_teams_of_its_own(always):
    x = torch.randn(200, 512)
    records, expected = (torch.empty(200, INT8.row_bytes(512), dtype=torch.uint8) for _ in range(2))
    pack_rows(x, INT8, None, expected, threads=3)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        pack_rows(x, INT8, None, records, threads=3)
        # Not compared by torch, whose own threads do not outlive a fork.
        os._exit(0 if records.numpy().tobytes() == expected.numpy().tobytes() else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_child_of_a_call_under_way_does_it_all_alone(always, monkeypatch):
    start, children, x = team.start_new_thread, [], torch.randn(50, 300)
    records, expected = (torch.empty(50, INT8.row_bytes(300), dtype=torch.uint8) for _ in range(2))
    pack_rows(x, INT8, None, expected)

    def fork(kernel, arguments):
        # As a signal handler may, while a thread that the child does not have is about its chunk.
        if not children:
            children.append(os.fork())
        if children == [0]:
            signal.alarm(20)
            kernel(*arguments)
            if not (records == POISON).all():
                os._exit(2)  # the chunks are not for threads of the child
            arguments[-2][first_of(arguments[-2]) + team._NEXT // 4] += 1
            start(kernel, arguments)

    monkeypatch.setattr(team, "start_new_thread", fork)
    pack_rows(x, INT8, None, records.fill_(POISON), threads=3)
    same = records.numpy().tobytes() == expected.numpy().tobytes()
    if children == [0]:
        os._exit(0 if same else 1)
    assert same and os.waitpid(children[0], 0)[1] == 0


def test_whatever_a_trace_function_raises_comes_after_the_work(always, monkeypatch):
    started, x = [], torch.randn(50, 300)
    monkeypatch.setattr(team, "start_new_thread", lambda *arguments: started.append(arguments))
    records, expected = (torch.empty(50, INT8.row_bytes(300), dtype=torch.uint8) for _ in range(2))
    pack_rows(x, INT8, None, expected)
    lines = 0

    def trace(frame, event, argument):
        nonlocal lines
        if frame.f_globals is not team.__dict__:
            return trace
        lines -= 1
        if lines == 0:
            raise KeyboardInterrupt
        return trace

    before, moment, interrupted = sys.gettrace(), 0, True
    while interrupted:
        moment += 1
        started.clear()
        records.fill_(POISON)
        lines, interrupted = moment, False
        sys.settrace(trace)
        try:
            pack_rows(x, INT8, None, records, threads=3)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            sys.settrace(before)
        assert torch.equal(records, expected) or (interrupted and not started), moment
    assert moment > 20


LATE = """
import torch
from thinwire.triton_kernels.cpu import team
from thinwire.triton_kernels.cpu.pack import pack_rows
from thinwire.wire import WireFormat

team.BYTES_PER_THREAD = 1
wire = WireFormat.parse("int8")
x, records = torch.randn(50, 300), torch.empty(50, wire.row_bytes(300), dtype=torch.uint8)
pack_rows(x, wire, None, records, threads=3)

class Late:
    def __del__(self, call=pack_rows, arguments=(x, wire, None, records, 3)):
        call(*arguments)
        print("done", flush=True)

late = Late()
"""


@pytest.mark.exhaustive
def test_a_call_while_python_ends_is_a_call():
    ended = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.stderr) == ("done\n", "")


@pytest.mark.exhaustive
@pytest.mark.parametrize("chunks", [8, 1 << 14])  # the second so that threads often want one at the same time
def test_every_row_is_done_once(chunks, monkeypatch):
    import numba
    import numpy as np

    @numba.njit(nogil=True)
    def count(counts, first, stop):
        for row in range(first, stop):
            counts[row] += 1

    @numba.njit(nogil=True)
    def count_rows(counts, words, member):
        team.do_rows(words, member, len(counts), count, counts)

    monkeypatch.setattr(team, "_CHUNKS_PER_THREAD", chunks)
    for rows in (1, 2, 31, 1000, 100_003):
        for threads in (1, 2, 3, 8):
            for _ in range(20):
                counts = np.zeros(rows, np.int64)
                team.run_in_team(threads, rows, count_rows, counts)
                assert (counts == 1).all(), (rows, threads)


@pytest.fixture(scope="module")
def add_pieces():
    """A kernel of a standing team: adds each piece's number, and one, to its counts; how many the leader saw done."""
    import numba
    import numpy as np

    from thinwire.triton_kernels.cpu.ir.intrinsics import load_int64, store_int64

    @numba.njit(nogil=True)
    def add(counts, team_of, chunk):
        piece = load_int64(team_of + team.JOB)
        first, stop = team.rows_of_chunk(team_of, chunk, counts.shape[1])
        for row in range(first, stop):
            counts[piece, row] += piece + 1
        team.finish(team_of)

    @numba.njit(nogil=True)
    def add_pieces(counts, words, member):
        at = team.team_at(words)
        if member > 0:
            while True:
                chunk = team.wait_for_work(at)
                if chunk < 0:
                    return 0
                add(counts, at, chunk)
        for piece in range(len(counts)):
            store_int64(at + team.JOB, piece)
            team.post(at, counts.shape[1])
            chunk = team.claim(at)
            while chunk >= 0:
                add(counts, at, chunk)
                chunk = team.claim(at)
            team.wait_for_team(at)
            if (counts[piece] != piece + 1).any():
                return piece
        team.dismiss(at)
        return len(counts)

    add_pieces(np.zeros((0, 1), np.int64), team._new_team(1)[0], 0)  # compiles
    return add_pieces


@pytest.mark.parametrize("calls", exhaustive_but([10], [10, 300]))
def test_what_is_posted_is_done_once_before_more_is_posted(calls, add_pieces):
    import numpy as np

    for width in (1, 7, 64, 1000):
        for threads in (1, 2, 3, 8):
            for _ in range(calls):
                counts = np.zeros((100, width), np.int64)
                assert team.run_standing_team(threads, add_pieces, counts) == 100, (width, threads)


def threads_of(monkeypatch):
    """The threads that teams start from now on."""
    started = []

    def start(kernel, arguments):
        started.append(threading.Thread(target=kernel, args=arguments, daemon=True))
        started[-1].start()

    monkeypatch.setattr(team, "start_new_thread", start)
    return started


def test_a_standing_team_ends_with_its_call(add_pieces, monkeypatch):
    import numpy as np

    started = threads_of(monkeypatch)
    for pieces in (0, 50):
        team.run_standing_team(4, add_pieces, np.zeros((pieces, 64), np.int64))
    for thread in started:
        thread.join(20)
    assert len(started) == 6 and not any(thread.is_alive() for thread in started)


def test_a_standing_team_ends_without_its_call(add_pieces, monkeypatch):
    import numpy as np

    started = threads_of(monkeypatch)
    start = team.start_new_thread

    def interrupted(kernel, arguments):
        if started:
            raise KeyboardInterrupt
        start(kernel, arguments)

    monkeypatch.setattr(team, "start_new_thread", interrupted)
    counts = np.zeros((50, 64), np.int64)
    with pytest.raises(KeyboardInterrupt):
        team.run_standing_team(4, add_pieces, counts)
    started[0].join(0.5)  # before it would have gone by itself
    assert not started[0].is_alive() and not counts.any()


@pytest.mark.exhaustive
def test_a_standing_team_that_nobody_leads_ends(add_pieces, monkeypatch):
    import numpy as np

    words, _ = team._new_team(1)
    began = time.monotonic()
    add_pieces(np.zeros((1, 1), np.int64), words, 1)
    assert 0.9 < time.monotonic() - began < 20


def test_a_thread_that_comes_late_to_a_standing_team_touches_nothing(add_pieces, monkeypatch):
    import numpy as np

    late = []
    monkeypatch.setattr(team, "start_new_thread", lambda kernel, arguments: late.append((kernel, arguments)))
    counts = np.zeros((50, 64), np.int64)
    assert team.run_standing_team(3, add_pieces, counts) == 50 and len(late) == 2
    counts[:] = 0
    for kernel, arguments in late:
        kernel(*arguments)
    assert not counts.any()
