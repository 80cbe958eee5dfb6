"""The link benchmark runs where there can be a link, says why where there cannot, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from benchmarks import bench_link, processor_time
from thinwire.comm import Communicator
from thinwire.errors import ThinwireError
from thinwire.testing import run_ranks
from thinwire.tools import link
from thinwire.wire import WireFormat

ROOT = Path(__file__).parents[2]
SETTLING = 20.0  # seconds that an ended process may take to be gone


def interfaces(comm: Communicator) -> list[list[str]]:
    """The network interfaces of every rank's host."""
    own = [name for _, name in socket.if_nameindex()]
    return comm.all_gather_object(sorted(own))


@pytest.fixture(scope="module")
def linked() -> list[list[list[str]]]:
    """What `interfaces` says on two linked hosts, for tests that need a link; they are skipped where there is none."""
    try:
        return link.run_on_two_hosts(f"{__name__}:interfaces", {}, rate="1gbit", timeout=120)
    except link.LinkUnavailable as reason:
        pytest.skip(f"there can be no limited link here: {reason}")


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


def leave_a_thread_in_torch(comm: Communicator) -> int:
    """Returns while a thread, as Gloo's may, still works for torch and then needs Python."""

    def work() -> None:
        x = torch.zeros(100_000)
        while True:
            x.add_(1)

    threading.Thread(target=work, daemon=True).start()
    print(f"rank {comm.rank} has left a thread")
    return comm.rank


def _pids(folder: Path) -> list[int]:
    return [int(file.read_text()) for file in sorted(folder.glob("*.pid"))]


def _await_end(pids: Sequence[int]) -> None:
    deadline = time.monotonic() + SETTLING
    while any(_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, f"of {pids} some still run"
        time.sleep(0.05)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.exhaustive
@pytest.mark.usefixtures("linked")
def test_it_runs_and_counts_what_travels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "link.json"
    arguments = ["--rate", "1gbit", "--rows", "5", "--hidden", "96", "--repeats", "2", "--runs", "2"]
    bench_link.main([*arguments, "--json", str(file)])
    lines = json.loads(file.read_text())["figures"]
    names = ["all_to_all_single bf16", "isend, irecv bf16", "thinwire none", "thinwire int8", "thinwire int4"]
    assert [line["transfer"] for line in lines] == names
    for line in lines:
        wire = line["transfer"].split()[-1]
        row_bytes = WireFormat.parse(wire).row_bytes(96) if wire in ("int8", "int4") else 2 * 96
        assert line["wire_bytes"] == 5 * row_bytes and line["logical_bytes"] == 5 * 2 * 96
        assert 0 < line["fastest"] <= line["seconds"] <= line["slowest"]
        assert [len(samples) for samples in line["samples"]] == [2, 2]
        assert min(line["ratios_to_best_bf16"]) <= line["ratio_to_best_bf16"] <= max(line["ratios_to_best_bf16"])
        account = line["account"]
        assert 0 < account["call"] < account["whole"] and account["link"] == pytest.approx(
            line["wire_bytes"] * 8.368e-9
        )
        assert (account["pack"] > 0) == (account["unpack"] > 0) == (wire in ("int8", "int4"))
        low, high = {"int8": (0.001, 0.012), "int4": (0.02, 0.15)}.get(wire, (0, 0))
        assert low <= line["error"] <= high
    assert "thinwire int8 at 1gbit" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_the_ranks_reach_each_other_through_the_link_alone(linked: list[list[list[str]]]) -> None:
    # A kernel may put tunnels that are down into every namespace.
    unusable = {"tunl0", "sit0", "gre0", "gretap0", "erspan0", "ip_vti0", "ip6_vti0", "ip6tnl0", "ip6gre0"}
    assert linked[0] == linked[1]
    assert [set(names) - unusable for names in linked[0]] == [{"lo", "tw0"}] * 2
    assert "tw0" not in [name for _, name in socket.if_nameindex()]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("linked")
def test_a_rank_ends_well_with_a_thread_in_torch(capfd: pytest.CaptureFixture[str]) -> None:
    assert link.run_on_two_hosts(f"{__name__}:leave_a_thread_in_torch", {}, rate="1gbit", timeout=120) == [0, 1]
    assert sorted(capfd.readouterr().out.splitlines()) == [f"rank {rank} has left a thread" for rank in range(2)]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("linked")
def test_ranks_of_a_host_share_its_network_and_know_their_places() -> None:
    found = link.run_on_two_hosts(f"{__name__}:place", {}, rate="1gbit", timeout=120, ranks_per_host=2)
    assert [rank[:5] for rank in found] == [[rank, rank, 4, rank % 2, [[0, 1], [2, 3]]] for rank in range(4)]
    namespaces = [rank[5] for rank in found]
    assert namespaces[0] == namespaces[1] != namespaces[2] == namespaces[3]
    assert os.readlink("/proc/self/ns/net") not in namespaces


@pytest.mark.exhaustive
@pytest.mark.usefixtures("linked")
def test_a_rank_that_fails_ends_the_others(tmp_path: Path) -> None:
    with pytest.raises(ThinwireError, match="rank 1 ended with exit code 1"):
        settings = {"folder": str(tmp_path), "fail": True}
        link.run_on_two_hosts(f"{__name__}:stay", settings, rate="1gbit", timeout=120, ranks_per_host=2)
    assert len(_pids(tmp_path)) == 4
    _await_end(_pids(tmp_path))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("linked")
def test_ranks_that_are_late_end(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match="ranks .* had not finished in time and were killed"):
        settings = {"folder": str(tmp_path), "fail": False}
        link.run_on_two_hosts(f"{__name__}:stay", settings, rate="1gbit", timeout=30, ranks_per_host=2)
    assert len(_pids(tmp_path)) == 4
    _await_end(_pids(tmp_path))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("linked")
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL], ids=["interrupted", "killed"])
def test_ranks_end_with_the_benchmark(tmp_path: Path, end: signal.Signals) -> None:
    settings = {"folder": str(tmp_path), "fail": False}
    job = f"{__name__ + ':stay'!r}, {settings!r}, rate='1gbit', ranks_per_host=2"
    code = f"from thinwire.tools import link; link.run_on_two_hosts({job})"
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    benchmark = subprocess.Popen(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 120
        while len(_pids(tmp_path)) < 4:
            assert benchmark.poll() is None and time.monotonic() < deadline, "the ranks did not start"
            time.sleep(0.05)
        benchmark.send_signal(end)
        benchmark.wait(SETTLING)
        _await_end(_pids(tmp_path))
    finally:
        benchmark.kill()
        benchmark.wait()
        for pid in filter(_alive, _pids(tmp_path)):
            os.kill(pid, signal.SIGKILL)


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    bench_link.main(["--rate", "1gbit"])
    assert capsys.readouterr().out == "skipped: network namespaces need root; this is user 1000\n"


def test_without_the_tools_it_names_them(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(link, "_SYSTEM_FOLDERS", ())
    bench_link.main(["--rate", "1gbit"])
    shown = "skipped: unshare, nsenter, ip, tc not found; they come with iproute2 and util-linux\n"
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize("rate", ["fast", "1", "10gbps", "-1gbit"])
def test_a_rate_that_is_none_is_refused(rate: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_link.main([f"--rate={rate}"])
    assert f"rate {rate!r} is none; accepted: a number and mbit or gbit" in capsys.readouterr().err


def test_no_rank_on_a_host_is_refused() -> None:
    with pytest.raises(ValueError, match="ranks_per_host is 0, expected an int of at least 1"):
        link.run_on_two_hosts(f"{__name__}:place", {}, rate="1gbit", ranks_per_host=0)


@pytest.mark.usefixtures("linked")
@pytest.mark.exhaustive
def test_what_the_kernel_refuses_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(link, "_LATENCY", "long")
    bench_link.main(["--rate", "1gbit"])
    shown = capsys.readouterr().out
    assert shown.startswith("skipped: ") and "nsenter" in shown and "latency" in shown


def test_ratios_are_within_rounds_and_against_the_faster_of_the_exact_ways() -> None:
    samples = {
        bench_link.COLLECTIVE: [4.0, 8.0, 36.0],
        bench_link.EXACT[0]: [3.0, 3.0, 3.0],
        bench_link.EXACT[1]: [1.0, 2.0, 9.0],
        "thinwire int8": [4.0, 8.0, 3.0],
    }
    account = dict.fromkeys(samples, {"whole": 4.0, "in line": 2.0, "pack": 1.0, "Gloo": 2.0})
    rank = {"samples": samples, "wire_bytes": dict.fromkeys(samples, 100), "account": account}
    slower = {**rank, "samples": samples | {"thinwire int8": [8.0, 16.0, 6.0]}}
    runs = [[{**one, "error": dict.fromkeys(samples, error)} for error in (0.1, 0.3)] for one in (rank, slower, rank)]
    line = bench_link.figures("1gbit", 200, runs, cores=2)[-1]
    assert line["ratio_to_all_to_all"] == 1.0 and line["ratio_to_best_bf16"] == 0.25
    assert line["ratios_to_best_bf16"] == [0.25, 0.125, 0.25] and line["ratios_to_all_to_all"] == [1.0, 0.5, 1.0]
    assert line["wire_bits_per_second"] == 800 / 6 and line["error"] == 0.3
    assert line["account"]["cores"] == 3.0 and line["account"]["whole"] == 4.0  # 2 ranks of 3 s of 2 cores


def burn(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def account_of_known_work(comm: Communicator) -> dict[str, float]:
    with ThreadPoolExecutor(1) as other:
        other.submit(burn, 0).result()  # its thread is there from now on

        def work() -> None:
            burn(0.01)
            comm.recorder.phase("pack")
            burn(0.04)
            comm.recorder.phase("wait for peers")
            other.submit(burn, 0.02).result()

        return processor_time.account(comm, work, calls=3)


def test_an_account_tells_phases_of_the_callers_thread_from_other_threads_and_from_waits() -> None:
    for taken in run_ranks(account_of_known_work, 2):
        assert {*taken} <= {"whole", "call", "pack", "wait for peers", "Gloo", "other", "in line"}
        assert taken["call"] >= 0.01 and taken["pack"] >= 0.04 and taken["other"] >= 0.015 > taken["wait for peers"]
        assert taken["whole"] >= taken["call"] + taken["pack"] + taken["wait for peers"]
