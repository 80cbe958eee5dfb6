"""Kernels are compiled once on a machine, by one process, which says so if it takes long."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from thinwire import first_run
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
        "import sys\nfrom thinwire import first_run\nwith first_run.turn('kernel', 'of this test'):\n"
        "    print('mine', flush=True)\n    sys.stdin.readline()\n"
    )
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None and other.stdout.readline() == "mine\n"
    mine = threading.Event()

    def take() -> None:
        with first_run.turn("kernel", "of this test"):
            mine.set()

    waits = threading.Thread(target=take)
    waits.start()
    with first_run.turn("another kernel", "of this test"), first_run.turn("kernel", "another cache"):
        assert not mine.wait(0.3)
    other.kill()
    assert mine.wait(60)
    waits.join()
    other.communicate()


def test_nobody_waits_for_ever_for_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_run, "_LONGEST_TURN_SECONDS", 0.1)
    with first_run.turn("kernel", "held"), first_run.turn("kernel", "held"):
        pass


def test_where_no_turn_can_be_taken_and_nothing_be_said_work_is_done_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(1, "not permitted")

    with first_run.turn("kernel" * 30, "a name too long"):
        pass
    monkeypatch.setattr(first_run.socket, "socket", refused)
    with first_run.turn("kernel", "refused"):
        pass
    monkeypatch.setattr(first_run.threading.Thread, "start", lambda self: (_ for _ in ()).throw(RuntimeError("none")))
    with first_run.said("without a thread"):
        pass
    with pytest.raises(OSError, match="of the block"), first_run.turn("kernel", "refused"):
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
