"""No word in the memory that ranks share leads out of the tensors, hangs, or ends the process.

Calls run in a process of their own, between pages that nobody may touch (`tests/helpers/guarded.py`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba", reason="the direct transport of CPU ranks needs numba")

from tests.helpers.guarded import PAGE, guarded
from thinwire.comm.communicator import Communicator
from thinwire.testing import RankError, run_ranks
from verification.corruption.__main__ import Report, Worker


def _touch(comm: Communicator, offset: int, first: bool) -> int:
    x = guarded([100], first=first)
    address = x.data_ptr() + offset
    import ctypes

    return ctypes.c_uint8.from_address(address).value


@pytest.mark.parametrize(("offset", "first"), [(100, False), (-1, True)])
def test_the_pages_around_a_tensor_end_whoever_touches_them(offset: int, first: bool) -> None:
    assert PAGE >= 4096
    assert run_ranks(_touch, 1, 0, first) == [0]
    with pytest.raises(RankError, match="SIGSEGV|signal 11|-11"):
        run_ranks(_touch, 1, offset, first)


_LONG = [pytest.param(*case, marks=pytest.mark.exhaustive) for case in (("numba", 3000), ("triton", 25))]


@pytest.mark.parametrize(("kernels", "rounds"), [("numba", 200), *_LONG])
def test_random_corruption_ends_in_a_result_or_a_named_error(kernels: str, rounds: int, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    command = [sys.executable, "-m", "verification.corruption", "--rounds", str(rounds), "--kernels", kernels]
    done = subprocess.run([*command, "--json", str(path)], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(path.read_text())
    assert report["rounds"] == report["in_time"] == report["returned"] + report["raised_named_errors"] == rounds
    assert not any(report[kind] for kind in ("crashed", "hung", "out_of_bounds", "late", "unexpected", "failures"))
    # Cases go on after CountsError and ConfigMismatch, with the next call.
    wanted = {"PeerTimeout", "RoutingError", "ThinwireError"} if rounds > 1000 else {"PeerTimeout"}
    assert report["outcomes"].keys() >= wanted


@pytest.mark.exhaustive
def test_a_run_goes_on_where_it_ended_whatever_the_commit(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    for rounds in (2, 7):
        command = [sys.executable, "-m", "verification.corruption", "--rounds", str(rounds), "--seed", "40"]
        subprocess.run(
            [*command, "--processes", "2", "--json", str(path)], check=True, capture_output=True, timeout=300
        )
        report = json.loads(path.read_text())
        assert report["rounds"] == rounds
        report["runs"][0]["commit"] = "0123456789ab"
        path.write_text(json.dumps(report))
    assert [run["rounds"] for run in report["runs"]] == [2, 5]
    alone = tmp_path / "alone.json"
    command = [sys.executable, "-m", "verification.corruption", "--rounds", "7", "--seed", "40", "--json", str(alone)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    assert json.loads(alone.read_text())["cases"].keys() == report["cases"].keys()


@pytest.mark.exhaustive
def test_a_worker_that_ends_in_a_case_is_told_and_followed_by_another() -> None:
    worker = Worker("numba")
    try:
        os.kill(worker._process.pid, signal.SIGSEGV)
        worker._process.wait()
        report = Report(1, "numba", None)
        report.add(1, *worker.run(1))
        report.add(2, *worker.run(2))
    finally:
        worker.close()
    assert report.outcomes["out_of_bounds"] == 1 == len(report.failures) and report.done == 2, report.content()
