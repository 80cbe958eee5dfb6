"""Bounds let through what a wire gives alone; times are the slowest rank's; tables, files and pictures tell them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from thinwire.comm import Communicator
from thinwire.errors import ThinwireError
from thinwire.fused.codec import dequantize, quantize
from thinwire.testing import run_ranks
from thinwire.tools.bench import timing
from thinwire.tools.bench.problems import Verdict, compare, moved_bound, values, wire_bound
from thinwire.tools.bench.results import line, median_ratio, read_results, timed
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


def test_exact_rows_must_be_equal_and_of_the_right_shape() -> None:
    rows = _rows(torch.bfloat16)
    assert compare(rows.clone(), rows, 0.0) == Verdict(0, 0.0, float(rows.double().square().sum()))
    assert compare(rows[[1, 0, 2]], rows, 0.0).wrong > 500
    assert compare(rows[:2], rows, 0.0).wrong == rows.numel()
    nothing = torch.tensor([], dtype=torch.int64)
    assert compare(rows[:0], rows, 0.0, nothing).wrong == 0
    assert compare(rows, rows, 0.0, nothing).wrong == rows.numel()
    index = torch.tensor([2, 0, 0, 1])
    assert compare(rows[index], rows, 0.0, index).wrong == 0
    assert compare(rows[index], rows, 0.0, index.flip(0)).wrong > 0


def test_bounds_of_a_flat_tensor_begin_anew_in_each_part_and_row() -> None:
    wire, flat = WireFormat.parse("int8"), torch.arange(1.0, 701.0)
    got = wire_bound(flat, wire, [300, 0, 400], 256)
    parts = torch.zeros(2, 256), torch.zeros(2, 256)
    parts[0].view(-1)[:300], parts[1].view(-1)[:400] = flat[:300], flat[300:]
    wanted = [wire_bound(rows, wire).view(-1)[:count] for rows, count in zip(parts, (300, 400), strict=True)]
    assert torch.equal(got, torch.cat(wanted)) and wire_bound(flat[None][:0], wire).shape == (0, 700)


def test_values_of_ranks_differ_and_are_the_same_everywhere() -> None:
    one, two = (values(rank, 3_000_000, DEVICE, torch.float32) for rank in (0, 1))
    assert torch.equal(one, values(0, 3_000_000, DEVICE, torch.float32)) and len(one) == 3_000_000
    assert (one == two).sum() < 100 and (one[4096:] == one[:-4096]).sum() < 100
    values(0, 8, DEVICE, torch.float32).zero_()  # nobody else's
    assert torch.equal(one[:8], values(0, 8, DEVICE, torch.float32))


class _Clock:
    """Time that passes only where a function says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


def _sample(comm: Communicator) -> tuple[list[str], timing.Times, timing.Times]:
    clock, called = _Clock(), []
    timing.time = clock  # type: ignore[assignment]

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

    both = {"a": functions["a"], "parts": parts}
    return called, times, timing.interleaved_over_ranks(comm, both, 2, sample_seconds=0, laps=laps)


def test_functions_run_in_turn_and_every_sample_is_the_slowest_ranks() -> None:
    first, second = run_ranks(_sample, 2)
    assert first[1:] == second[1:]
    called, times, parts = first
    assert times == {"a": [3.0] * 3, "b": [5.0] * 3}
    # One call to compile and three to learn how long it takes; then samples of 8 seconds, in turn.
    assert called == ["a"] * 4 + ["b"] * 4 + (["a"] * 3 + ["b"] * 2) * 3 + ["a"] * 3
    assert parts == {"a": [3.0] * 2, "first": [2.0] * 2, "second": [2.0] * 2, "whole": [104.0] * 2}


def test_ratios_are_of_medians_and_medians_of_the_ratios_within_rounds() -> None:
    # Of the medians it would be 2 / 4; the last round has one time only.
    assert median_ratio([1.0, 2.0, 9.0, 7.0], [4.0, 8.0, 3.0]) == 0.25
    made = timed({"size_bytes": 8, "logical_bytes": 6}, [4.0, 8.0, 3.0], [1.0, 2.0, 9.0], 2)
    assert (made["speedup"], made["paired_speedup"]) == (0.5, 0.25)
    assert [made[f"{name}_bandwidth"] for name in ("algorithm", "bus", "wire")] == [2.0, 1.5, 0.5]
    wrong = timed({"size_bytes": 8, "logical_bytes": 6}, None, [1.0], 2)
    assert set(wrong.values()) == {None, 2}


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


def test_a_line_shows_a_figure_in_its_columns() -> None:
    cells = line(figure()).split()
    assert cells == "524288 64 thinwire int8 direct 640.0 768.0 0.819 0.614 0.300 0.0065 0 2.00".split()
    assert "WRONG" in line(figure(seconds=None, wrong=3, speedup=None, algorithm_bandwidth=None))


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


def test_pictures_show_the_medians_and_quartiles_of_each_way(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    from thinwire.tools.bench import plots

    rounds = [figure(tokens=n, transport=way) for n in (256, 16) for way in ("direct", "staged")]
    moved = [figure("all_reduce", tokens=n, routing=None) for n in (16, 256)]
    wrong, other = figure(wire="int4", seconds=None), figure(routing="hot:0.5")
    run = run_of([*rounds, wrong, other, *moved, figure("moe", seconds=None)])
    made = plots.draw(run, "dispatch")
    assert made is not None and plots.draw(run, "moe") is plots.draw(run, "combine") is None
    axes = made.axes[0]
    direct, staged = axes.lines
    assert list(direct.get_xdata()) == [16, 256] and list(direct.get_ydata()) == pytest.approx([160e-6, 2560e-6])
    assert direct.get_color() == staged.get_color() and direct.get_linestyle() != staged.get_linestyle()
    heights = {float(y) for _, y in axes.collections[0].get_paths()[0].vertices}
    assert (min(heights), max(heights)) == pytest.approx((16 * 9e-6, 256 * 11e-6))
    assert {text.get_text() for text in axes.get_legend().get_texts()} == {
        "thinwire int8 direct",
        "thinwire int8 staged",
    }
    assert plots.draw(run_of(moved), "all_reduce").axes[0].lines[0].get_ydata()[0] == pytest.approx(0.6144)
    written = plots.write_pictures(run, tmp_path / "new")
    assert [path.name for path in written] == ["dispatch.png", "all_reduce.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
