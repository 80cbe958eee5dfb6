"""Links of a limited rate: ranks at both ends know their places, and end with their caller, whichever way it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("numba", reason="the CPU kernels need numba")

from benchmarks import bench_fsdp, bench_link, bench_two_level, demo_on_link, link
from thinwire.comm import Communicator
from thinwire.errors import ThinwireError

ROOT = Path(__file__).parents[2]
SETTLING = 20.0  # seconds that an ended process may take to be gone


def place(comm: Communicator) -> list[object]:
    """Who a rank is, by its variables and by its communicator, and its network namespace."""
    variables = [int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
    return [comm.rank, *variables, comm.hosts, os.readlink("/proc/self/ns/net")]


def stay(comm: Communicator, *, folder: str, fail: bool) -> None:
    """Leaves word that this rank is there, and does not come back; rank 1 may fail instead."""
    comm.barrier()
    Path(folder, f"{comm.rank}.partial").write_text(str(os.getpid()))
    Path(folder, f"{comm.rank}.partial").rename(Path(folder, f"{comm.rank}.pid"))
    comm.barrier()
    if fail and comm.rank == 1:
        raise ValueError("as asked")
    time.sleep(600)


@pytest.fixture(scope="module")
def places() -> list[list[Any]]:
    """What `place` says on two linked hosts of two ranks, for tests that are skipped where there can be no link."""
    try:
        return link.run_on_two_hosts(f"{__name__}:place", {}, rate="1gbit", timeout=120, ranks_per_host=2)
    except link.LinkUnavailable as reason:
        pytest.skip(f"there can be no limited link here: {reason}")


@pytest.mark.exhaustive
def test_ranks_know_their_places_and_are_in_their_hosts_namespace(places: list[list[Any]]) -> None:
    assert [rank[:5] for rank in places] == [[rank, rank, 4, rank % 2, [[0, 1], [2, 3]]] for rank in range(4)]
    namespaces = [rank[5] for rank in places]
    assert namespaces[0] == namespaces[1] != namespaces[2] == namespaces[3] != os.readlink("/proc/self/ns/net")


def _is_alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""  # as it is of one that nobody has waited for
    except OSError:
        return False


def _await_end(folder: Path) -> None:
    pids, deadline = [file.read_text() for file in folder.glob("*.pid")], time.monotonic() + SETTLING
    assert len(pids) == 4
    while any(_is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, f"of {pids} some still run"
        time.sleep(0.05)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("places")
@pytest.mark.parametrize("end", ["fails", "time is up", signal.SIGINT, signal.SIGKILL], ids=str)
def test_ranks_end_with_one_that_fails_when_time_is_up_and_with_their_caller(
    end: str | signal.Signals, tmp_path: Path
) -> None:
    settings = {"folder": str(tmp_path), "fail": end == "fails"}
    if isinstance(end, str):
        error, told = (ThinwireError, "rank 1 ended with exit code 1") if end == "fails" else (TimeoutError, "in time")
        with pytest.raises(error, match=told):
            link.run_on_two_hosts(f"{__name__}:stay", settings, rate="1gbit", timeout=30, ranks_per_host=2)
        return _await_end(tmp_path)
    job = f"{__name__ + ':stay'!r}, {settings!r}, rate='1gbit', ranks_per_host=2"
    code = f"from benchmarks import link; link.run_on_two_hosts({job})"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.DEVNULL) as benchmark:
        deadline = time.monotonic() + 120
        while len(list(tmp_path.glob("*.pid"))) < 4:
            assert benchmark.poll() is None and time.monotonic() < deadline, "the ranks did not start"
            time.sleep(0.05)
        benchmark.send_signal(end)
        benchmark.wait(SETTLING)
        _await_end(tmp_path)


@pytest.mark.parametrize("script", [bench_link, bench_fsdp, bench_two_level, demo_on_link])
def test_without_root_or_the_tools_a_script_says_so(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)  # the tests after it shall have theirs
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    script.main([])
    assert capsys.readouterr().out.endswith("skipped: network namespaces need root; this is user 1000\n")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(link, "_SYSTEM_FOLDERS", ())
    script.main([])
    told = "skipped: unshare, nsenter, ip, tc not found; they come with iproute2 and util-linux\n"
    assert capsys.readouterr().out.endswith(told)
