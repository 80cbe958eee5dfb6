"""A session on ranks that are threads: every operation is right, its bytes are what travels, and wrong results show."""

from __future__ import annotations

import functools
import json
import os
import socket
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("numba", reason="the CPU kernels need numba")

from thinwire import files
from thinwire.comm import Communicator
from thinwire.errors import TransportUnavailable
from thinwire.moe.parallel import ExpertParallel
from thinwire.testing import run_ranks
from thinwire.tools.bench import contenders, session
from thinwire.tools.bench.options import COLLECTIVES, OPERATIONS, ROUND, Routing, Settings
from thinwire.tools.bench.session import Results, run_session
from thinwire.tools.cli import main
from thinwire.wire import WireFormat

RANKS, HIDDEN = 3, 96
FEW = {"sizes": (6000,), "tokens": (5,), "iterations": 2, "warmup": 0, "sample_seconds": 0.0}
SMALL = {**FEW, "hidden": HIDDEN, "experts": 6, "top_k": 2}
ONE_WAY = {"wires": ("none",), "transports": ("staged",), "baselines": ()}


def _run(**changes: Any) -> Results:
    return run_ranks(run_session, RANKS, Settings(**{**SMALL, **changes}), mode="thread", timeout=300)[0]


def _as_threads(*args: Any, **kwargs: Any) -> Any:
    return run_ranks(*args, **{**kwargs, "mode": "thread"})


def _lines(results: Results, operation: str) -> dict[tuple[str, str, str | None], dict[str, Any]]:
    return {
        (line["implementation"], line["wire"], line["transport"]): line
        for line in results.figures
        if line["operation"] == operation
    }


def test_every_operation_is_right_and_says_what_it_sends(capsys: pytest.CaptureFixture[str]) -> None:
    results = _run()
    assert results.wrong == 0
    settings = Settings()
    for operation in OPERATIONS:
        lines = _lines(results, operation)
        copies = [] if operation == "moe" else [("copy", "none", None)]
        ways = [("thinwire", wire, way) for way in settings.transports for wire in settings.wires]
        assert list(lines) == copies + ways
        for (name, wire, _), line in lines.items():
            seconds = line["seconds"]
            assert 0 < seconds["minimum"] <= seconds["median"] <= seconds["maximum"] and line["wrong"] == 0
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
    assert {entry["implementation"] for entry in results.skipped} == {"Open MPI", "group"}
    printed = capsys.readouterr().out.splitlines()
    expected = [f"# {rank} {os.getpid()} {socket.gethostname()} cpu".split() for rank in range(RANKS)]
    assert [line.split() for line in printed[2 : 2 + RANKS]] == expected and max(map(len, printed)) <= 110


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("size", [1, 1000, 200_000])
def test_every_wire_keeps_its_bound_at_every_size(size: int, dtype: str) -> None:
    wires = ("none", "int8", "int8:row", "int8:32", "int8+h64", "int4", "fp8")
    routings = (Routing("uniform"), Routing("hot", 0.8), Routing("zipf", 1.0))
    results = _run(sizes=(size,), tokens=(1, 17), wires=wires, dtype=dtype, routings=routings, iterations=1)
    assert [line for line in results.figures if line["wrong"]] == []
    assert {line["wire"] for line in results.figures} == set(wires)


def _swap_ends(number: int, rank: int, out: torch.Tensor) -> None:
    if rank == 1:
        out.view(-1)[[0, -1]] = out.view(-1)[[-1, 0]]


def _nudge(number: int, rank: int, out: torch.Tensor) -> None:
    if rank == 1:
        out.view(-1)[3] += 0.25


def _leave(number: int, rank: int, out: torch.Tensor) -> None:
    if rank == 1:
        out.view(-1)[-2:] = float("nan")  # as memory that nothing was written to


def _forget(number: int, rank: int, out: torch.Tensor) -> None:
    if number > 3:  # while it is timed
        out.zero_()


class _OldRow:
    """The first row is that of an earlier call."""

    row: torch.Tensor | None = None

    def __call__(self, number: int, rank: int, out: torch.Tensor) -> None:
        if rank == 1:
            now = out[:1].clone()
            out[:1] = now if self.row is None else self.row
            self.row = now


def _spoil(monkeypatch: pytest.MonkeyPatch, operation: str, spoil: Callable[[int, int, torch.Tensor], None]) -> None:
    """Has thinwire's results spoiled: by the number of the call on its rank, the rank, and what is in `out` then."""
    original, calls = getattr(contenders, operation), Counter[int]()

    def spoiled(*args: Any, **kwargs: Any) -> Any:
        result, rank = original(*args, **kwargs), kwargs["comm"].rank
        calls[rank] += 1
        spoil(calls[rank], rank, kwargs["out"])
        return result

    monkeypatch.setattr(contenders, operation, spoiled)


@pytest.mark.parametrize(
    ("operation", "spoil", "wrong"),
    [
        ("all_to_all_v", _swap_ends, 2),
        ("all_gather", _leave, 2),
        ("reduce_scatter", _nudge, 1),
        ("all_reduce", _nudge, 1),
        ("all_gather", _forget, 9000),
        ("all_to_all_v", _OldRow(), HIDDEN),
    ],
)
def test_a_wrong_result_is_found_and_has_no_figure(
    operation: str, spoil: Callable[[int, int, torch.Tensor], None], wrong: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _spoil(monkeypatch, operation, spoil)
    (line,) = _run(operations=(operation,), **ONE_WAY).figures
    assert line["wrong"] == wrong and line["seconds"] is line["speedup"] is line["bus_bandwidth"] is None


def test_a_wrong_result_is_told_and_the_others_are_still_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _spoil(monkeypatch, "all_reduce", _nudge)
    monkeypatch.setattr(session, "run_ranks", _as_threads)
    file = tmp_path / "new" / "bench.json"
    few = ["-b", "6000", "-e", "6000", "-n", "1", "-w", "0", "--sample-seconds", "0", "--transport", "direct"]
    command = ["bench", "all_gather", "all_reduce", *few, "--wire", "int8", "--ranks", "3", "--json", str(file)]
    assert main(command) == 1
    figures = json.loads(file.read_text())["figures"]
    assert [line["wrong"] for line in figures] == [0, 0, 0, 1]
    printed, told = (text.splitlines() for text in capsys.readouterr())
    (line,) = [line.split() for line in printed if "WRONG" in line]
    assert ["thinwire", "int8", "direct", "WRONG"] == line[2:6]
    assert printed[-1] == "# wrong: 1 elements, of all_reduce thinwire"
    assert any("of 2: all_reduce of 6000 bytes" in line for line in told)


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
    (alone,) = _run(operations=("dispatch",), **ONE_WAY).figures
    assert alone["seconds"] is None and alone["wrong"] > 0, "a leg that was not asked for counts, too"
    for line in _run(operations=ROUND).figures:
        spoiled_here = line["transport"] == "staged" and line["operation"] != "dispatch"
        assert (line["wrong"] > 0) == spoiled_here
        # A round of which one leg is wrong has no time at all.
        assert (line["seconds"] is None) == (line["transport"] == "staged")


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
    (line,) = _run(operations=("moe",), wires=("none",), transports=("direct",), baselines=()).figures
    assert line["wrong"] > 0 and line["seconds"] is None


def test_without_checks_nothing_is_said_of_errors() -> None:
    results = _run(operations=("all_gather",), check=False)
    assert all(line["wrong"] is line["relative_error"] is None and line["seconds"] for line in results.figures)


def test_a_transport_that_is_not_there_is_skipped_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    original = contenders.all_gather

    def refused(x: torch.Tensor, **kwargs: Any) -> Any:
        if kwargs["transport"] == "direct":
            raise TransportUnavailable("no such memory")
        return original(x, **kwargs)

    monkeypatch.setattr(contenders, "all_gather", refused)
    results = _run(operations=("all_gather",), wires=("none",))
    assert {line["transport"] for line in results.figures} == {None, "staged"}
    assert {"implementation": "thinwire", "reason": "no such memory", "operation": "all_gather", "wire": "none",
            "transport": "direct"} in results.skipped  # fmt: skip


def test_sizes_that_do_not_fit_into_memory_are_skipped_and_a_run_of_nothing_has_not_succeeded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(session, "available_bytes", lambda: 1 << 20)
    results = _run(operations=("all_gather", "moe"), sizes=(6000, 60000), tokens=(1, 1024), **ONE_WAY)
    assert {line["size_bytes"] for line in results.figures} == {6000, 2 * HIDDEN}
    reasons = {entry["implementation"]: entry["reason"] for entry in results.skipped}
    assert reasons["all_gather of 60000 bytes"] == "needs about 3 MiB, more than half of what is free"
    assert "a round of 1024 tokens" in reasons
    monkeypatch.setattr(session, "run_ranks", _as_threads)
    assert main(["bench", "all_gather", "-b", "1M", "-e", "1M", "--ranks", "2"]) == 1
    assert "# nothing was measured" in capsys.readouterr().out


def test_the_file_is_whole_after_each_size_and_says_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, seen = tmp_path / "bench.json", []
    original = session.replace_file

    def seeing(path: Path, content: bytes) -> None:
        original(path, content)
        written = json.loads(path.read_text())
        left = [each["implementation"] for each in written["skipped"] if "cut off" in each["reason"]]
        seen.append(({figure["size_bytes"] for figure in written["figures"]}, left))

    monkeypatch.setattr(session, "replace_file", seeing)
    monkeypatch.setattr(session, "run_ranks", _as_threads)
    few = ["-b", "600", "-e", "6000", "-f", "10", "-n", "1", "-w", "0", "--sample-seconds", "0", "--wire", "none"]
    command = ["bench", "all_gather", "--device", "cpu", "--ranks", "1", "--baselines", "copy", *few]
    assert main([*command, "--json", str(file)]) == 0
    assert seen == [({600}, ["all_gather of 6000 bytes"]), ({600, 6000}, []), ({600, 6000}, [])]
    assert os.listdir(tmp_path) == ["bench.json"]
    pipe = tmp_path / "pipe"  # which gets everything at the end
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE)
    holding = os.open(pipe, os.O_WRONLY)  # the bench opens it once before it starts
    assert main([*command, "--json", str(pipe)]) == 0
    os.close(holding)
    assert len(json.loads(reader.communicate()[0])["figures"]) > 2 and pipe.is_fifo()


def test_a_file_that_cannot_be_replaced_keeps_what_it_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    files.replace_file(file, b"old")

    def killed(*paths: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        files.replace_file(file, b"new")
    assert file.read_bytes() == b"old"
