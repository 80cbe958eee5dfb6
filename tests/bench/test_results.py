"""Bounds let through what a wire gives alone; times are the slowest rank's; files tell them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from thinwire.comm import Communicator
from thinwire.errors import ThinwireError
from thinwire.fused.codec import dequantize, quantize
from thinwire.testing import run_ranks
from thinwire.tools.bench import timing
from thinwire.tools.bench.problems import Verdict, compare, moved_bound, values
from thinwire.tools.bench.results import read_results, timed
from thinwire.wire import WireFormat

DEVICE = torch.device("cpu")


def _rows(dtype: torch.dtype) -> torch.Tensor:
    scales = torch.tensor([1.0, 1e-3, 50.0])[:, None]
    return (values(1, 3 * 301, DEVICE, torch.float32).view(3, 301) * scales).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["int8", "int8:64", "int8:row", "int4", "fp8"])
def test_what_a_wire_gives_is_right_and_a_little_more_is_wrong(name: str, dtype: torch.dtype) -> None:
    wire, rows = WireFormat.parse(name), _rows(dtype)
    got = dequantize(quantize(rows, wire), dtype)
    bound = moved_bound(rows, wire)
    assert isinstance(bound, torch.Tensor)
    found = compare(got, rows, bound)
    assert found.wrong == 0 and 0 < found.error_squares < 0.03 * found.squares
    # A bound that nothing comes near would prove nothing.
    assert float(((got.double() - rows.double()).abs() / bound.double()).max()) > 0.7
    beyond = rows.double()
    beyond[1, 300] += 1.01 * float(bound[1, 300])
    assert compare(beyond, rows, bound).wrong == 1
    got[2, 7] = float("nan")
    assert compare(got, rows, bound).wrong == 1


def test_exact_rows_must_be_equal_and_of_the_right_shape_and_differ_between_ranks() -> None:
    rows = _rows(torch.bfloat16)
    assert compare(rows.clone(), rows, 0.0) == Verdict(0, 0.0, float(rows.double().square().sum()))
    assert compare(rows[[1, 0, 2]], rows, 0.0).wrong > 500 and compare(rows[:2], rows, 0.0).wrong == rows.numel()
    index = torch.tensor([2, 0, 0, 1])
    assert compare(rows[index], rows, 0.0, index).wrong == 0 < compare(rows[index], rows, 0.0, index.flip(0)).wrong
    one, other = (values(rank, 9000, DEVICE, torch.float32) for rank in (0, 1))
    assert (one == other).sum() < 100 and (one[4096:] == one[:-4096]).sum() < 100


def _sample(comm: Communicator) -> tuple[list[str], timing.Times, timing.Times]:
    clock, called = SimpleNamespace(now=0.0), []
    timing.time = SimpleNamespace(perf_counter=lambda: clock.now)  # type: ignore[assignment]

    def spend(name: str, *seconds: float) -> None:
        called.append(name)
        clock.now += seconds[comm.rank]

    functions = {"a": lambda: spend("a", 1.0, 3.0), "b": lambda: spend("b", 5.0, 4.0)}
    times = timing.interleaved_over_ranks(comm, functions, 3, sample_seconds=8.0)
    laps = timing.Laps(comm.device)

    def parts() -> None:
        laps.start()
        clock.now += 2.0
        laps.end("first")
        clock.now += 100.0
        laps.skip()  # belongs to the whole alone
        clock.now += 1.0 + comm.rank
        laps.end("second", "whole")

    return called, times, timing.interleaved_over_ranks(comm, {"parts": parts}, 2, sample_seconds=0, laps=laps)


def test_functions_run_in_turn_and_every_sample_is_the_slowest_ranks() -> None:
    first, second = run_ranks(_sample, 2)
    assert first[1:] == second[1:]
    called, times, parts = first
    assert times == {"a": [3.0] * 3, "b": [5.0] * 3}
    # One call to compile and three to learn how long it takes; then samples of 8 seconds, in turn.
    assert called == ["a"] * 4 + ["b"] * 4 + (["a"] * 3 + ["b"] * 2) * 3
    assert parts == {"first": [2.0] * 2, "second": [2.0] * 2, "whole": [104.0] * 2}


def test_ratios_are_of_medians_and_medians_of_the_ratios_within_rounds() -> None:
    made = timed({"size_bytes": 8, "logical_bytes": 6}, [4.0, 8.0, 3.0], [1.0, 2.0, 9.0], 2)
    assert (made["speedup"], made["paired_speedup"]) == (0.5, 0.25)
    assert [made[f"{name}_bandwidth"] for name in ("algorithm", "bus", "wire")] == [2.0, 1.5, 0.5]


def figure(operation: str = "dispatch", tokens: int = 64, **fields: Any) -> dict[str, Any]:
    """One figure, made up; `fields` are put in place of its own."""
    sizes = {"size_bytes": tokens * 8192, "logical_bytes": tokens * 6144}
    return {
        "operation": operation, "implementation": "thinwire", "wire": "int8", "transport": "direct",
        "routing": "uniform", "skew": 1.03, "max_violation": 0.4, "tokens": tokens, **sizes,
        **timed(sizes, [tokens * 1e-6 * k for k in (8, 9, 10, 11, 12)], [tokens * 2e-5] * 5, tokens * 3000.0),
        "relative_error": 0.0065, "wrong": 0, "reference": "gloo",
    } | fields  # fmt: skip


def run_of(figures: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """A run of four ranks."""
    head = {"format": "thinwire bench", "version": 1, "ranks": 4, "hosts": 1, "machine": {"cpu": "A processor"}}
    return head | {"figures": figures, "copy_bandwidth": 9.7e9} | fields


def test_a_file_says_what_predictions_need_and_those_of_before_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(run_of([figure(), figure(seconds=None)])))
    read = read_results(tmp_path / "a.json")
    assert (read.source, read.ranks, read.hosts) == (str(tmp_path / "a.json"), 4, 1)
    assert read.points == {("dispatch", "thinwire", "int8", "direct", "uniform"): [(192e3, pytest.approx(640e-6))]}
    recorded = Path(__file__).parents[2] / "benchmarks" / "results" / "cpu"
    for name in ("bench", "bench_mpi", "wire_price"):
        assert read_results(recorded / f"{name}.json").points


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (run_of([], version=2), "version is 2"), (run_of([], ranks=0), "ranks is 0"), (run_of([], hosts=5), "hosts is"),
        (run_of([figure("typo")]), "operation is 'typo'"), (run_of([figure(wire_bytes=-1)]), "wire_bytes is -1"),
        (run_of([figure(seconds={"median": 0})]), "median above 0"), (run_of([figure(wire=1)]), "wire is 1"),
        (run_of([{}]), "no field 'operation'"), ([], "expected an object"),
    ],
)  # fmt: skip
def test_what_is_no_such_file_is_refused(value: Any, named: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(value))
    with pytest.raises(ThinwireError, match=r"a\.json: ") as caught:
        read_results(tmp_path / "a.json")
    assert named in str(caught.value)
