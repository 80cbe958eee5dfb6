"""Links of a limited rate: ranks at both ends run and end with their caller; every script over them runs or says why.

Where there can be no link, what needs one is skipped.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba", reason="the CPU kernels need numba")

from benchmarks import bench_fsdp, bench_link, bench_on_link, bench_two_level, demo_on_link, link
from benchmarks.bench_two_level import ONE_LEVEL, ONE_LEVEL_BF16, OPERATIONS, ROUND, TWO_LEVELS, WAYS
from benchmarks.demo_on_link import LinkScore, format_chart, score_rank
from thinwire import ExpertParallel
from thinwire.comm import Communicator
from thinwire.errors import ThinwireError
from thinwire.testing import run_ranks
from thinwire.tools.demo.tiny_moe import HELD_OUT_PATH, bits_per_byte, load_tiny_moe
from thinwire.wire import WireFormat

ROOT = Path(__file__).parents[2]
SETTLING = 20.0  # seconds that an ended process may take to be gone
HELD_OUT = HELD_OUT_PATH.read_bytes()


def interfaces(comm: Communicator) -> list[list[str]]:
    """The network interfaces of every rank's host."""
    return comm.all_gather_object(sorted(name for _, name in socket.if_nameindex()))


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


def score_share(comm: Communicator, *, text: str) -> list[float]:
    """Bits per byte of a rank's share of the text, of the model on two levels: in the format `none`, and in int8."""
    config, length = load_tiny_moe().config, len(text) // comm.size
    share = text[comm.rank * length :][:length].encode("latin-1")
    sizes, bits = (config.num_experts, config.top_k, config.hidden_size, 16 * config.context), []
    for wire in ("none", "int8"):
        with ExpertParallel(comm, *sizes, wire=wire, transport="two_level") as ep:
            bits.append(bits_per_byte(load_tiny_moe(ep=ep), share))
    return bits


@pytest.fixture(scope="module")
def linked() -> list[list[list[str]]]:
    """What `interfaces` says on two linked hosts, for tests that need a link; they are skipped where there is none."""
    try:
        return link.run_on_two_hosts(f"{__name__}:interfaces", {}, rate="1gbit", timeout=120)
    except link.LinkUnavailable as reason:
        pytest.skip(f"there can be no limited link here: {reason}")


def _await_end(folder: Path) -> None:
    pids, deadline = [int(file.read_text()) for file in folder.glob("*.pid")], time.monotonic() + SETTLING
    assert len(pids) == 4
    while any(_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, f"of {pids} some still run"
        time.sleep(0.05)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.exhaustive
def test_ranks_reach_each_other_through_the_link_alone_and_know_their_places(linked: list[list[list[str]]]) -> None:
    # A kernel may put tunnels that are down into every namespace.
    unusable = {"tunl0", "sit0", "gre0", "gretap0", "erspan0", "ip_vti0", "ip6_vti0", "ip6tnl0", "ip6gre0"}
    assert [set(names) - unusable for names in linked[0]] == [{"lo", "tw0"}] * 2
    assert "tw0" not in [name for _, name in socket.if_nameindex()]
    found = link.run_on_two_hosts(f"{__name__}:place", {}, rate="1gbit", timeout=120, ranks_per_host=2)
    assert [rank[:5] for rank in found] == [[rank, rank, 4, rank % 2, [[0, 1], [2, 3]]] for rank in range(4)]
    namespaces = [rank[5] for rank in found]
    assert namespaces[0] == namespaces[1] != namespaces[2] == namespaces[3] != os.readlink("/proc/self/ns/net")


@pytest.mark.exhaustive
@pytest.mark.usefixtures("linked")
@pytest.mark.parametrize(
    ("fail", "error", "told"),
    [(True, ThinwireError, "rank 1 ended with exit code 1"), (False, TimeoutError, "had not finished in time")],
)
def test_ranks_end_with_one_that_fails_and_when_time_is_up(
    fail: bool, error: type[Exception], told: str, tmp_path: Path
) -> None:
    settings = {"folder": str(tmp_path), "fail": fail}
    with pytest.raises(error, match=told):
        link.run_on_two_hosts(f"{__name__}:stay", settings, rate="1gbit", timeout=30, ranks_per_host=2)
    _await_end(tmp_path)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("linked")
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL], ids=["interrupted", "killed"])
def test_ranks_end_with_the_benchmark(tmp_path: Path, end: signal.Signals) -> None:
    settings = {"folder": str(tmp_path), "fail": False}
    job = f"{__name__ + ':stay'!r}, {settings!r}, rate='1gbit', ranks_per_host=2"
    code = f"from benchmarks import link; link.run_on_two_hosts({job})"
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path}
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
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    script.main([])
    assert capsys.readouterr().out.endswith("skipped: network namespaces need root; this is user 1000\n")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(link, "_SYSTEM_FOLDERS", ())
    script.main([])
    told = "skipped: unshare, nsenter, ip, tc not found; they come with iproute2 and util-linux\n"
    assert capsys.readouterr().out.endswith(told)


def test_a_rate_that_is_none_and_no_rank_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for rate in ("fast", "1", "10gbps", "-1gbit"):
        with pytest.raises(SystemExit):
            bench_link.main([f"--rate={rate}"])
        assert f"rate {rate!r} is none; accepted: a number and mbit or gbit" in capsys.readouterr().err
    with pytest.raises(ValueError, match="ranks_per_host is 0, expected an int of at least 1"):
        link.run_on_two_hosts(f"{__name__}:place", {}, rate="1gbit", ranks_per_host=0)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("linked")
def test_an_exchange_over_a_link_counts_what_travels(tmp_path: Path) -> None:
    few = ["--rate", "1gbit", "--rows", "5", "--hidden", "96", "--repeats", "2", "--runs", "2"]
    bench_link.main([*few, "--json", str(tmp_path / "link.json")])
    lines = json.loads((tmp_path / "link.json").read_text())["figures"]
    names = ["all_to_all_single bf16", "isend, irecv bf16", "thinwire none", "thinwire int8", "thinwire int4"]
    assert [line["transfer"] for line in lines] == names
    for line in lines:
        wire = line["transfer"].split()[-1]
        row_bytes = WireFormat.parse(wire).row_bytes(96) if wire in ("int8", "int4") else 2 * 96
        assert line["wire_bytes"] == 5 * row_bytes and line["logical_bytes"] == 5 * 2 * 96
        assert 0 < line["fastest"] <= line["seconds"] <= line["slowest"]
        low, high = {"int8": (0.001, 0.012), "int4": (0.02, 0.15)}.get(wire, (0, 0))
        assert low <= line["error"] <= high


@pytest.mark.exhaustive
@pytest.mark.usefixtures("linked")
def test_fsdp_and_the_bench_run_over_a_link(tmp_path: Path) -> None:
    few = ["--runs", "1", "--repeats", "2", "--width", "256", "--blocks", "2"]
    bench_fsdp.main([*few, "--json", str(tmp_path / "fsdp.json")])
    lines = json.loads((tmp_path / "fsdp.json").read_text())["figures"]
    assert [line["sent_as"] for line in lines] == list(bench_fsdp.WIRES) * 2
    few = ["all_gather", "-b", "64K", "-e", "64K", "-n", "2", "--rate", "500mbit", "--wire", "int8"]
    assert bench_on_link.main([*few, "--json", str(tmp_path / "link.json")]) == 0
    written = json.loads((tmp_path / "link_500mbit.json").read_text())
    assert written["launched"] == "two hosts joined by 500mbit" and written["hosts"] == written["ranks"] == 2
    (line,) = [line for line in written["figures"] if line["implementation"] == "thinwire"]
    assert line["transport"] == "staged" and line["wrong"] == 0


@pytest.mark.exhaustive
@pytest.mark.usefixtures("linked")
def test_what_crosses_on_two_levels_is_what_was_predicted(tmp_path: Path) -> None:
    few = "--rate 1gbit --ranks-per-host 2 --runs 1 --repeats 2 --host-tokens 600 --hidden 1024 --experts 10".split()
    bench_two_level.main([*few, "--top-k", "2", "--mebibytes", "1", "--json", str(tmp_path / "two_level.json")])
    lines = json.loads((tmp_path / "two_level.json").read_text())["figures"]
    assert [(line["operation"], line["way"]) for line in lines] == [
        (each, way) for each in OPERATIONS for way in WAYS[each]
    ]
    for line in lines:
        assert 0 < line["fastest"] <= line["seconds"] <= line["slowest"] and line["error"] < 0.04
        if line["way"] != bench_two_level.GLOO:  # and counts, and the messages of barriers
            assert 1 <= line["payload_bytes"] / line["predicted_bytes"] < 1.03


@pytest.mark.exhaustive
@pytest.mark.usefixtures("linked")
def test_the_demo_runs_over_a_link_also_on_two_levels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_bytes(HELD_OUT[:3000])
    demo_on_link.main(["--wires", "int8", "--text", str(tmp_path / "text"), "--json", str(tmp_path / "figures")])
    assert "\nnone (bf16) " in (shown := capsys.readouterr().out) and "\nint8 " in shown
    assert [score["wire"] for score in json.loads((tmp_path / "figures").read_text())["scores"]] == ["none", "int8"]
    text, unsharded = HELD_OUT[:19_262], load_tiny_moe()
    expected = [bits_per_byte(unsharded, text[start:][:4815]) for start in range(0, 4 * 4815, 4815)]
    settings = {"text": text.decode("latin-1")}
    found = link.run_on_two_hosts(f"{__name__}:score_share", settings, rate="1gbit", ranks_per_host=2, timeout=120)
    none, int8 = (sum(bits) / 4 for bits in zip(*found, strict=True))
    assert none == pytest.approx(sum(expected) / 4, rel=1e-6) and 0 < abs(int8 / none - 1) < 0.005


def test_the_demos_rounds_are_counted_and_the_text_costs_what_it_does_in_one_process() -> None:
    text = HELD_OUT[:3000]
    first, second = run_ranks(score_rank, 2, text.decode("latin-1"), ["none", "int8", "int4"])
    assert first == second
    none, int8, int4 = (LinkScore(**score) for score in first)
    expected = bits_per_byte(load_tiny_moe(), text)
    assert abs(none.bits_per_byte / expected - 1) < 0.002 and abs(int8.bits_per_byte / expected - 1) < 0.005
    # A row of 256 bfloat16 against records of 288 and 160 bytes; ids and weights travel with it on one leg.
    assert 1.6 < none.wire_bytes / int8.wire_bytes < 2 < none.wire_bytes / int4.wire_bytes < 3.2
    lines = format_chart([none, int8, int4], "#").splitlines()
    assert all(len(line) <= 80 for line in lines) and max(line.count("#") for line in lines) == 24


def _two_level_rank(two_levels: float, packets: int) -> dict[str, Any]:
    ways = (ONE_LEVEL, ONE_LEVEL_BF16, TWO_LEVELS)
    samples = {ONE_LEVEL: [4.0, 8.0], ONE_LEVEL_BF16: [8.0, 16.0], TWO_LEVELS: [two_levels, 2 * two_levels]}
    samples |= {f"{way}: {part}": [1.0, 3.0] for way in ways for part in bench_two_level.PARTS}
    samples |= {f"{way}: legs": [4.0 if way == TWO_LEVELS else 2.0] * 2 for way in ways}
    meter = {"bytes": 1000, "packets": packets, "rank": 1.0, "machine": 3.0, "seconds": 2.0}
    one = {"samples": samples, "meters": dict.fromkeys(ways, meter), "error": dict.fromkeys(ways, 0.1 * packets)}
    return {ROUND: one | {"predicted": dict.fromkeys(ways, [800, 820])}}


def test_ratios_over_links_are_within_rounds_and_headers_are_taken_off() -> None:
    samples: dict[str, Sequence[float]] = {
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
    assert line["ratio_to_all_to_all"] == 1.0 and line["ratios_to_best_bf16"] == [0.25, 0.125, 0.25]
    assert line["wire_bits_per_second"] == 800 / 6 and line["error"] == 0.3
    runs = [[_two_level_rank(seconds, packets) for packets in (1, 9, 3, 9)] for seconds in (2.0, 1.0, 4.0)]
    line = bench_two_level.figures("1gbit", 2, runs, cores=2)[-1]
    assert line["ratios_to_int8"] == [2.0, 4.0, 1.0] and line["ratios_to_bf16"] == [4.0, 8.0, 2.0]
    assert line["payload_bytes"] == 1000 - 2 * 66 and line["predicted_bytes"] == 810  # the mean of both hosts
