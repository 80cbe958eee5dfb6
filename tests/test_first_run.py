"""Kernels are compiled once on a machine, by one process, which says so if it takes long, and is waited for."""

from __future__ import annotations

import functools
import os
import runpy
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import thinwire as tw
from thinwire import first_run
from thinwire.comm import Communicator
from thinwire.testing import run_ranks
from thinwire.triton_kernels.cpu import HAS_NUMBA

#: Calls a kernel when told to, and says how often its cache was of use.
_CALLS_A_KERNEL = """
import sys, torch
from thinwire.triton_kernels.cpu.pack import pack_kernel as kernel, pack_rows
from thinwire.wire import WireFormat
wire = WireFormat.parse("int8")
print("ready", flush=True)
sys.stdin.readline()
pack_rows(torch.zeros(1, 8), wire, None, torch.empty(1, wire.row_bytes(8), dtype=torch.uint8))
print(sum(kernel.stats.cache_misses.values()), sum(kernel.stats.cache_hits.values()))
"""


@pytest.mark.skipif(not HAS_NUMBA, reason="numba compiles kernels for the CPU")
def test_of_processes_that_need_a_kernel_one_compiles_it(tmp_path: Path) -> None:
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _CALLS_A_KERNEL],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(3)
    ]  # fmt: skip
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    told = sorted(process.communicate(timeout=300)[0].split() for process in processes)
    assert told == [["0", "1"], ["0", "1"], ["1", "0"]]


def test_a_turn_waits_for_the_process_before_and_ends_with_it() -> None:
    code = (
        "import sys\nfrom thinwire import first_run\nwith first_run.turn('kernel', 'of this test', 'a test'):\n"
        "    print('mine', flush=True)\n    sys.stdin.readline()\n"
    )
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None and other.stdout.readline() == "mine\n"
    mine = threading.Event()

    def take() -> None:
        with first_run.turn("kernel", "of this test", "a test"):
            mine.set()

    waits = threading.Thread(target=take)
    waits.start()
    with first_run.turn("another kernel", "of this test", ""), first_run.turn("kernel", "another cache", ""):
        assert not mine.wait(0.3)
    other.kill()
    assert mine.wait(60)
    waits.join()
    other.communicate()


def test_nobody_waits_for_ever_for_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_run, "_LONGEST_TURN_SECONDS", 0.1)
    with first_run.turn("kernel", "held", "a test"), first_run.turn("kernel", "held", "a test"):
        pass


def test_where_no_turn_can_be_taken_and_nothing_be_said_work_is_done_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(1, "not permitted")

    with first_run.turn("kernel" * 30, "a name too long", "a test"):
        pass
    monkeypatch.setattr(first_run.socket, "socket", refused)
    with first_run.turn("kernel", "refused", "a test"):
        pass
    monkeypatch.setattr(first_run.threading.Thread, "start", lambda self: (_ for _ in ()).throw(RuntimeError("none")))
    with first_run.said("without a thread"):
        pass
    with pytest.raises(OSError, match="of the block"), first_run.turn("kernel", "refused", "a test"):
        raise OSError("of the block")


@pytest.mark.skipif(not HAS_NUMBA, reason="numba compiles kernels for the CPU")
def test_threads_that_compile_a_kernel_for_two_signatures_take_a_turn_each(tmp_path: Path) -> None:
    import numpy as np
    from numba.core.compiler_lock import global_compiler_lock

    from thinwire.triton_kernels.cpu.compat import kernel

    source = tmp_path / "doubles.py"
    source.write_text("def double(x):\n    return 2 * x\n")
    double = kernel(runpy.run_path(str(source))["double"])
    threads = [threading.Thread(target=double, args=(value,)) for value in (np.float32(1), np.float64(1), np.int64(1))]
    with global_compiler_lock:
        for thread in threads:
            thread.start()
        time.sleep(0.5)  # all come to the compiler meanwhile
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert not [thread for thread in threading.enumerate() if thread.name == "thinwire compiling"]


def test_what_takes_long_is_said_again_and_again_and_what_does_not_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with first_run.said("quick"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(first_run, "_SILENT_SECONDS", 0.01)
    monkeypatch.setattr(first_run, "_REPEAT_SECONDS", 0.01)
    told, ends = "", time.monotonic() + 60
    with first_run.said("doing what is slow"):
        while told.count("\n") < 2 and time.monotonic() < ends:
            told += capsys.readouterr().err
    assert told.startswith("thinwire: doing what is slow ... 0 s\n") and told.count("\n") >= 2
    capsys.readouterr()
    time.sleep(0.05)
    assert capsys.readouterr().err == ""


def _calls_that_wait_for_rank_1(comm: Communicator) -> None:
    """A call that waits in each of the ways in which CPU ranks wait, while rank 1 compiles for long."""
    if comm.in_process:
        comm._exchange.timeout = 1.0
    else:
        comm = Communicator(comm.group, timeout=1.0)
    x = torch.ones(8)
    calls: list[Callable[[], Any]] = [
        comm.barrier,
        lambda: tw.all_reduce(x, wire="none", transport="staged", comm=comm),
        lambda: tw.all_reduce(x, wire="none", transport="direct", comm=comm),
        lambda: tw.all_to_all_v(x, [4, 4], [4, 4], wire="none", transport="direct", comm=comm),
        lambda: tw.all_to_all_v(x, [4, 4], wire="none", transport="direct", comm=comm),
    ][: 5 if HAS_NUMBA else 2]
    for call in calls:
        call()
        if comm.rank == 1:
            with first_run.working("compiling a kernel"):
                time.sleep(2.5 * comm.timeout)
        call()


@pytest.mark.parametrize("mode", ["process", "thread"])
def test_a_rank_that_compiles_for_longer_than_the_timeout_is_waited_for(mode: str) -> None:
    run_ranks(_calls_that_wait_for_rank_1, 2, mode=mode, timeout=150)


@pytest.mark.skipif(not HAS_NUMBA, reason="numba compiles kernels for the CPU")
def test_the_clock_of_a_wait_starts_when_its_own_kernel_is_compiled() -> None:
    from thinwire.fused import pulled

    calls: list[object] = []

    def kernel(*_: object) -> int:
        calls.append(None)
        if len(calls) == 1:
            time.sleep(0.5)  # as if it were compiled
        return pulled.lines.LATE if len(calls) < 4 else pulled.lines.ARRIVED

    board = object.__new__(pulled.Board)
    board.address, board.looks, board.late = 0, 1, np.zeros(2, np.int64)
    with mock.patch.object(pulled.lines, "wait_kernel", kernel):
        assert not board.look(0, 0, 0.4)
        assert board.wait(0, 0, 0.4, lambda peers: [], lambda: False)


def test_one_of_the_processes_of_a_parent_speaks_for_all() -> None:
    code = "from thinwire import first_run\nprint(first_run._speaker()[0], flush=True)\ninput()"
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    told = [process.stdout.readline() for process in processes if process.stdout is not None]
    for process in processes:
        process.communicate("\n")
    assert sorted(told) in (["False\n", "False\n", "True\n"], ["False\n"] * 3)  # another test's process may speak


def test_what_is_compiled_within_a_kernel_is_told_with_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(first_run, "_SILENT_SECONDS", 0.01)
    with first_run.compiling("a kernel"), first_run.compiling("a part of it"):
        assert first_run.work_here() == "compiling a kernel"
        time.sleep(0.3)
    told = capsys.readouterr().err
    assert told.startswith("thinwire: compiling a kernel (number ") and told.count("\n") == 1


@pytest.mark.skipif(not HAS_NUMBA, reason="numba compiles kernels for the CPU")
@pytest.mark.parametrize(
    ("harm", "told"),
    [
        ("full", "No space left"),
        ("replaced", "Not a directory"),
        ("unreadable", "Is a directory"),
        ("cut off", "invalid load key"),
        ("none", "no folder for them can be written"),
    ],
)
def test_without_a_usable_folder_kernels_run_and_one_line_says_that_they_are_not_kept(
    harm: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import numba
    from numba.core import caching

    from thinwire.triton_kernels.cpu.compat import kernel

    def fail(error: Exception, *_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(first_run, "_speaker", lambda: (True, None))
    monkeypatch.setattr(first_run, "_told_unkept", [])
    source, folder = tmp_path / "doubles.py", tmp_path / "cache"
    source.write_text("def double(x):\n    return 2 * x\n")
    function = runpy.run_path(str(source))["double"]
    if harm == "none":
        monkeypatch.setattr(caching.FunctionCache, "__init__", functools.partial(fail, RuntimeError("no locator")))
    assert kernel(function)(1) == 2
    double = kernel(function)
    if harm == "full":
        full = OSError(28, "No space left on device")
        monkeypatch.setattr(caching.IndexDataCacheFile, "_save_data", functools.partial(fail, full))
    elif harm == "replaced":
        shutil.rmtree(folder)
        folder.write_text("")
    elif harm == "unreadable":
        index = next(folder.rglob("*.nbi"))
        index.unlink()
        index.mkdir()
    elif harm == "cut off":
        next(folder.rglob("*.nbi")).write_bytes(b"\0")
    assert double(1) == 2 and double(1.5) == 3.0
    line = [text for text in capsys.readouterr().err.splitlines() if "not kept" in text]
    assert len(line) == 1 and told in line[0] and "NUMBA_CACHE_DIR" in line[0], line


def test_a_fork_in_the_middle_has_no_turn_and_is_not_at_work() -> None:
    code = """
import os, threading
from thinwire import first_run
entered, over, (read, write) = threading.Event(), threading.Event(), os.pipe()
def work():
    with first_run.turn("kernel", "of forks", "a test"), first_run.working("compiling"):
        entered.set()
        over.wait()
thread = threading.Thread(target=work)
thread.start()
entered.wait()
child = os.fork()
if not child:
    os.write(write, f"at work: {first_run.work_here()!r}".encode())
    while True:
        threading.Event().wait()
print(os.read(read, 99).decode())
over.set()
thread.join()
with first_run.turn("kernel", "of forks", "a test"):  # which waits for half an hour while the child has it
    os.kill(child, 9)
"""
    ran = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    assert ran.stdout == "at work: ''\n"
