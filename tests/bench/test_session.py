"""A session on ranks that are threads: every operation is right, its bytes are what travels, and wrong results show."""

from __future__ import annotations

import functools
import json
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("numba", reason="the CPU kernels need numba")

from thinwire.comm import Communicator
from thinwire.errors import TransportUnavailable
from thinwire.moe.parallel import ExpertParallel
from thinwire.testing import run_ranks
from thinwire.tools.bench import launch, machine, operations
from thinwire.tools.bench.checks import Verdict
from thinwire.tools.bench.expert_problem import Round
from thinwire.tools.bench.options import COLLECTIVES, OPERATIONS, ROUND, Routing, Settings
from thinwire.tools.bench.session import Results, Session, run_session
from thinwire.tools.cli import main
from thinwire.wire import WireFormat

RANKS, HIDDEN = 3, 96
#: What can be into memory of `thinwire.empty`, too.
STRAIGHT = ("all_to_all_v", "all_gather")
SMALL = Settings(
    sizes=(6000,), tokens=(5,), iterations=2, warmup=0, sample_seconds=0, hidden=HIDDEN, experts=6, top_k=2
)


def _run(settings: Settings) -> Results:
    return run_ranks(run_session, RANKS, settings, mode="thread", timeout=300)[0]


def _with(**changes: Any) -> Settings:
    return Settings(**{**SMALL.__dict__, **changes})


def _lines(results: Results, operation: str) -> dict[tuple[str, str, str | None], dict[str, Any]]:
    return {
        (line["implementation"], line["wire"], line["transport"]): line
        for line in results.figures
        if line["operation"] == operation
    }


def test_every_operation_is_right_and_says_what_it_sends() -> None:
    results = _run(SMALL)
    assert results.wrong == 0
    for operation in OPERATIONS:
        lines = _lines(results, operation)
        copies = [] if operation == "moe" else [("copy", "none", None)]
        ways = [("thinwire", wire, way) for way in SMALL.transports for wire in SMALL.wires]
        if operation in STRAIGHT:  # behind the others of its transport
            ways.insert(ways.index(("thinwire", SMALL.wires[-1], "direct")) + 1, ("tw.empty", "none", "direct"))
        assert list(lines) == copies + ways
        for (name, wire, _), line in lines.items():
            seconds = line["seconds"]
            assert 0 < seconds["minimum"] <= seconds["median"] <= seconds["maximum"] and line["wrong"] == 0
            assert 0 < line["fastest_rank"] <= seconds["median"] and line["rank_spread"] >= 0
            assert (line["period"] is not None and line["period"] > 0) == (operation == "moe")
            assert line["algorithm_bandwidth"] == line["size_bytes"] / seconds["median"]
            assert line["bus_bandwidth"] == line["logical_bytes"] / seconds["median"]
            if name == "thinwire":
                low, high = (0.003, 0.02) if wire.startswith("int8") else (0, 0.003)
                assert low <= line["relative_error"] <= high
            assert (line["routing"] is None) == (operation in COLLECTIVES[1:])
    # 2000 bytes for each other rank: what nccl-tests calls (n - 1) / n, and twice that in all_reduce.
    shares = {operation: _lines(results, operation)["thinwire", "none", "staged"] for operation in COLLECTIVES}
    assert [shares[operation]["logical_bytes"] for operation in COLLECTIVES[1:]] == [4000, 4000, 8000]
    assert all(shares[operation]["size_bytes"] == 6000 for operation in COLLECTIVES[1:])
    row = WireFormat.parse("int8").row_bytes
    assert _lines(results, "all_gather")["thinwire", "int8", "direct"]["wire_bytes"] == 2 * row(1024)
    exchanged = _lines(results, "all_to_all_v")["thinwire", "int8", "direct"]
    assert exchanged["wire_bytes"] * 2 * HIDDEN == pytest.approx(exchanged["logical_bytes"] * row(HIDDEN))
    assert results.traffic is not None and results.expert_load is not None and sum(results.expert_load) == RANKS * 5 * 2
    dispatched = _lines(results, "dispatch")
    for key, line in _lines(results, "moe").items():
        assert line["logical_bytes"] == 2 * dispatched[key]["logical_bytes"]
        assert line["max_violation"] == max(results.expert_load) * 6 / sum(results.expert_load) - 1
    assert {entry["implementation"] for entry in results.skipped} >= {"Open MPI", "group"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("size", [1, 1000, 200_000])
def test_every_wire_keeps_its_bound_at_every_size(size: int, dtype: str) -> None:
    wires = ("none", "int8", "int8:row", "int8:32", "int4", "fp8")
    routings = (Routing("uniform"), Routing("hot", 0.8), Routing("zipf", 1.0))
    results = _run(_with(sizes=(size,), tokens=(1, 17), wires=wires, dtype=dtype, routings=routings, iterations=1))
    assert [line for line in results.figures if line["wrong"]] == []
    assert {line["wire"] for line in results.figures} == set(wires)


Spoil = Callable[[torch.Tensor], object]


def _spoiled(spoil: Spoil, original: Callable[..., Any], at_rank: int = 1) -> Callable[..., Any]:
    def spoiled(x: torch.Tensor, *args: Any, out: torch.Tensor, **kwargs: Any) -> Any:
        result = original(x, *args, out=out, **kwargs)
        if kwargs["comm"].rank == at_rank and kwargs["transport"] == "direct" and kwargs["wire"] == "int8":
            spoil(out)
        return result

    return spoiled


def _swap_ends(out: torch.Tensor) -> None:
    out.view(-1)[[0, -1]] = out.view(-1)[[-1, 0]]


def _nudge(out: torch.Tensor) -> None:
    out.view(-1)[3] += 0.25


def _leave(out: torch.Tensor) -> None:
    out.view(-1)[-2:] = float("nan")  # as memory that nothing was written to


@pytest.mark.parametrize(
    ("operation", "spoil", "wrong"),
    [
        ("all_to_all_v", _swap_ends, 2),
        ("all_gather", _leave, 2),
        ("reduce_scatter", _nudge, 1),
        ("all_reduce", _nudge, 1),
    ],
    ids=COLLECTIVES,
)
def test_a_wrong_result_gets_no_figure_and_the_others_are_still_printed(
    operation: str,
    spoil: Spoil,
    wrong: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(operations, operation, _spoiled(spoil, getattr(operations, operation)))
    monkeypatch.setattr(launch, "run_ranks", _as_threads)
    file = tmp_path / "new" / "bench.json"
    few = ["-b", "6000", "-e", "6000", "--hidden", str(HIDDEN), "-n", "1", "-w", "0", "--sample-seconds", "0"]
    assert main(["bench", operation, *few, "--wire", "none,int8", "--ranks", "3", "--json", str(file)]) == 1
    written = json.loads(file.read_text())
    lines = {(line["wire"], line["transport"]): line for line in written["figures"]}
    bad = lines.pop(("int8", "direct"))
    assert bad["wrong"] == wrong and bad["seconds"] is None and bad["speedup"] is None
    assert bad["algorithm_bandwidth"] is bad["bus_bandwidth"] is bad["wire_bandwidth"] is None
    assert all(line["wrong"] == 0 and line["seconds"] for line in lines.values()) and len(lines) == 4
    printed, told = (text.splitlines() for text in capsys.readouterr())
    shown = [line.split() for line in printed if line.startswith(" ")]
    (spoiled,) = [cells for cells in shown if "WRONG" in cells]
    assert str(wrong) in spoiled and ["thinwire", "int8", "direct", "WRONG"] == spoiled[2:6]
    assert len(shown) == 5 + (operation in STRAIGHT) and max(map(len, printed)) <= 110
    # The fastest is named, wrong results and the copy apart.
    (summary,) = [line for line in printed if line.startswith(f"# {operation}: ")]
    assert re.match(rf"# {operation}: (thinwire|tw.empty) .*is fastest at [\d.]+ KiB", summary)
    assert "int8 direct" not in summary and "copy is" not in summary
    assert printed[-1] == f"# wrong: {wrong} elements, of {operation} thinwire"
    assert any(f"1 of 1: {operation} of 6000 bytes" in line for line in told)


@pytest.mark.exhaustive
def test_a_run_is_drawn_and_its_wrong_result_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(operations, "all_reduce", _spoiled(_nudge, operations.all_reduce))
    monkeypatch.setattr(launch, "run_ranks", _as_threads)
    few = ["-b", "600", "-e", "6000", "--tokens", "2,5", "--hidden", str(HIDDEN), "-n", "1", "-w", "0"]
    routings = ["--routing", "uniform,hot:0.8", "--experts", "6", "--top-k", "2", "--sample-seconds", "0"]
    assert main(["bench", "all_reduce", "moe", *few, *routings, "--ranks", "3", "--plot", str(tmp_path)]) == 1
    assert "<td class=wrong>1</td>" in (tmp_path / "report.html").read_text()
    assert {path.stem for path in tmp_path.glob("*.png")} >= {"bandwidth_all_reduce", "latency_moe", "traffic"}


def test_ranks_are_told_with_their_processes_before_anything_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    _run(_with(operations=("all_gather",), wires=("none",), transports=("direct",), baselines=()))
    printed = capsys.readouterr().out.splitlines()
    assert printed[1].split() == "# rank process host device".split()
    expected = [f"# {rank} {os.getpid()} {socket.gethostname()} cpu".split() for rank in range(RANKS)]
    assert [line.split() for line in printed[2 : 2 + RANKS]] == expected
    assert printed[2 + RANKS] == "" and printed[3 + RANKS].split()[:3] == ["#", "size", "count"]


def test_lines_appear_as_each_size_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = []
    original = Session._collective

    def watched(self: Session, *args: Any) -> None:
        if self.comm.rank == 0:
            before.append(capsys.readouterr().out)
        original(self, *args)

    monkeypatch.setattr(Session, "_collective", watched)
    _run(_with(operations=("all_gather",), sizes=(600, 6000), baselines=(), wires=("none",), transports=("direct",)))
    assert len(before) == 2 and "thinwire none direct" in before[1]


def _as_threads(*args: Any, **kwargs: Any) -> Any:
    return run_ranks(*args, **{**kwargs, "mode": "thread"})


@pytest.mark.parametrize("leg", ["dispatch", "combine"])
def test_a_wrong_leg_of_a_round_is_found(leg: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = getattr(ExpertParallel, leg)

    @functools.wraps(original)
    def spoiled(self: ExpertParallel, first: Any, *args: Any, **kwargs: Any) -> Any:
        if leg == "dispatch" and self.transport == "staged":
            ids, weights = args
            args = ids, weights.flip(1)  # the right experts, with each other's weights
        result = original(self, first, *args, **kwargs)
        if leg == "combine" and self.transport == "staged" and self.comm.rank == 2:
            result[[0, 1]] = result[[1, 0]]
        return result

    monkeypatch.setattr(ExpertParallel, leg, spoiled)
    results = _run(_with(operations=ROUND))
    for line in results.figures:
        spoiled_here = line["transport"] == "staged" and line["operation"] != "dispatch"
        assert (line["wrong"] > 0) == spoiled_here and (line["speedup"] is None) >= spoiled_here
        # A round of which one leg is wrong has no time at all.
        assert (line["seconds"] is None) == (line["transport"] == "staged")


def test_what_becomes_wrong_while_it_is_timed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {rank: 0 for rank in range(RANKS)}
    original = operations.all_gather

    def forgets(x: torch.Tensor, **kwargs: Any) -> Any:
        calls[kwargs["comm"].rank] += 1
        result = original(x, **kwargs)
        if calls[kwargs["comm"].rank] > 3:
            kwargs["out"].zero_()
        return result

    monkeypatch.setattr(operations, "all_gather", forgets)
    results = _run(_with(operations=("all_gather",), wires=("none",), transports=("staged",), baselines=()))
    (line,) = results.figures
    assert line["wrong"] == 9000 and line["seconds"] is None


def test_what_is_wrong_only_in_a_chain_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    since = {rank: 0 for rank in range(RANKS)}  # rounds since the ranks met
    combine = ExpertParallel.combine

    def met(name: str) -> None:
        original = getattr(Communicator, name)

        def meets(self: Communicator, *args: Any) -> Any:
            since[self.rank] = 0
            return original(self, *args)

        monkeypatch.setattr(Communicator, name, meets)

    met("barrier"), met("all_gather_object")

    @functools.wraps(combine)
    def overtaken(self: ExpertParallel, *args: Any, **kwargs: Any) -> Any:
        result = combine(self, *args, **kwargs)
        since[self.comm.rank] += 1
        return result.zero_() if since[self.comm.rank] > 4 else result

    monkeypatch.setattr(ExpertParallel, "combine", overtaken)
    results = _run(_with(operations=("moe",), wires=("none",), transports=("direct",), baselines=()))
    (line,) = results.figures
    assert line["wrong"] > 0 and line["seconds"] is line["period"] is line["fastest_rank"] is None


def test_rows_left_from_an_earlier_call_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original, arrived = operations.all_to_all_v, {}

    def stale(x: torch.Tensor, *counts: Any, **kwargs: Any) -> Any:
        result = original(x, *counts, **kwargs)
        rank, now = kwargs["comm"].rank, kwargs["out"][:1].clone()
        if rank == 1:
            kwargs["out"][:1] = arrived.get(rank, now)
        arrived[rank] = now
        return result

    monkeypatch.setattr(operations, "all_to_all_v", stale)
    results = _run(_with(operations=("all_to_all_v",), wires=("none",), transports=("staged",), baselines=()))
    (line,) = results.figures
    assert line["wrong"] == HIDDEN and line["seconds"] is None


def test_a_wrong_leg_that_was_not_asked_for_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Round, "judge_dispatch", lambda self, got, wire: Verdict(2, 1.0, 1.0))
    results = _run(_with(operations=("combine",), wires=("none",), transports=("direct",), baselines=()))
    (line,) = results.figures
    assert line["wrong"] == results.wrong == 2 * RANKS and line["seconds"] is None


def test_without_checks_nothing_is_said_of_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    results = _run(_with(operations=("all_gather",), check=False))
    assert all(line["wrong"] is line["relative_error"] is None and line["seconds"] for line in results.figures)


def test_a_transport_that_is_not_there_is_skipped_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    original = operations.all_gather

    def refused(x: torch.Tensor, **kwargs: Any) -> Any:
        if kwargs["transport"] == "direct":
            raise TransportUnavailable("no such memory")
        return original(x, **kwargs)

    monkeypatch.setattr(operations, "all_gather", refused)
    results = _run(_with(operations=("all_gather",), wires=("none",)))
    assert {line["transport"] for line in results.figures} == {None, "staged"}
    assert {"implementation": "thinwire", "reason": "no such memory", "operation": "all_gather", "wire": "none",
            "transport": "direct"} in results.skipped  # fmt: skip


def test_sizes_that_do_not_fit_into_memory_are_skipped_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_free", lambda device: 1 << 20)
    results = _run(_with(operations=("all_gather", "moe"), sizes=(6000, 60000), tokens=(1, 1024)))
    assert {line["size_bytes"] for line in results.figures} == {6000, 2 * HIDDEN}
    reasons = {entry["implementation"]: entry["reason"] for entry in results.skipped}
    assert reasons["all_gather of 60000 bytes"] == "needs about 3 MiB, and 1 MiB are free"
    assert "a round of 1024 tokens" in reasons


def test_a_run_that_could_measure_nothing_has_not_succeeded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "_free", lambda device: 1)
    monkeypatch.setattr(launch, "run_ranks", _as_threads)
    assert main(["bench", "all_gather", "-b", "6000", "-e", "6000", "--ranks", "2"]) == 1
    assert "# nothing was measured" in capsys.readouterr().out
