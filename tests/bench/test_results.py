"""A results file is read as it was written, and one that is not one is refused by name with what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.bench.synthetic import figure, results, whole_run
from thinwire.errors import ThinwireError
from thinwire.tools.bench.results import parse_results, read_results

NO_NUMBERS: list[Any] = ["1", -1, float("nan"), float("inf"), True, [], 1e30]
ODD: dict[str, list[Any]] = {
    "format": ["x", None], "version": [2, "1", True], "command": [None, "a\x1b[2J", "x" * 4001],
    "commit": [1, "a\nb"], "machine": [[], None, {"cpu": {}}, {"\u202e": 1}, {"cpu": [[1]]}, {"cpu": "x" * 401}],
    "ranks": [0, "4", 1025, 4.0], "hosts": [0, 5, None], "launched": [None, 3], "settings": [3, {"a": {"b": 1}}],
    "figures": [None, {}, [1], [{}]], "skipped": [None, [{}], [{"implementation": "a", "reason": 1}], ["a"]],
    "traffic": [[], [[1] * 4] * 3, [[1] * 4] * 5, [[1] * 3] * 4, [[-1] * 4] * 4, [["1"] * 4] * 4, 7],
    "expert_load": [[], [-1], [None], "12", [float("nan")]],
    "copy_bandwidth": [*NO_NUMBERS, 0], "link_bandwidth": [*NO_NUMBERS, 0],
}  # fmt: skip
ODD_FIGURES: dict[str, list[Any]] = {
    "operation": ["barrier", None, ["moe"]], "implementation": [None, "\x07", "x" * 401], "wire": [None, 8],
    "transport": [1], "routing": [[]], "skew": NO_NUMBERS, "max_violation": NO_NUMBERS,
    "fastest_rank": [*NO_NUMBERS, 0], "rank_spread": NO_NUMBERS, "period": [*NO_NUMBERS, 0],
    "tokens": [-1, 1.5, "1", None],
    "size_bytes": NO_NUMBERS, "logical_bytes": [*NO_NUMBERS, None], "wire_bytes": NO_NUMBERS,
    "algorithm_bandwidth": NO_NUMBERS, "bus_bandwidth": NO_NUMBERS, "wire_bandwidth": NO_NUMBERS,
    "relative_error": NO_NUMBERS, "wrong": [-1, 0.5], "speedup": NO_NUMBERS, "paired_speedup": NO_NUMBERS,
    "reference": [0], "called": [1, "x" * 401],
    "seconds": [1.0, {}, *({"minimum": a, "median": b, "maximum": c} for a, b, c in (
        (2, 1, 3), (1, 3, 2), (0, 1, 1), (-1, 1, 1), ("1", 1, 1), (1, 1, float("nan")),
    )), *({"minimum": 1, "median": 3, "maximum": 5} | odd for odd in (
        {"lower_quartile": 0.5}, {"lower_quartile": 4}, {"upper_quartile": 2}, {"p99": 6}, {"p99": "4"},
        {"upper_quartile": 4, "p99": 3.5},
    ))],
}  # fmt: skip

#: Fields of figures that older files do not have.
LATER = ("paired_speedup", "max_violation", "fastest_rank", "rank_spread", "period", "called")


def refused(value: Any) -> str:
    with pytest.raises(ThinwireError) as caught:
        parse_results(value, "a.json")
    message = str(caught.value)
    assert message.startswith("a.json: ") and message.isascii() and message.isprintable() and len(message) < 400
    return message


@pytest.mark.parametrize("field", ODD)
def test_a_field_that_is_not_what_it_should_be_is_named(field: str) -> None:
    for value in ODD[field]:
        assert field in refused(results([figure()]) | {field: value})
    lacking = results([figure()])
    del lacking[field]
    assert f"no field {field!r}" in refused(lacking)


@pytest.mark.parametrize("field", ODD_FIGURES)
def test_a_field_of_a_figure_that_is_not_what_it_should_be_is_named(field: str) -> None:
    for value in ODD_FIGURES[field]:
        message = refused(results([figure(), figure() | {field: value}]))
        assert message.startswith("a.json: figures[1]: ") and field in message
    lacking = figure()
    del lacking[field]
    if field not in LATER:
        assert f"figures[0]: no field {field!r}" in refused(results([lacking]))


def test_a_file_of_before_there_were_quartiles_is_read_without_them() -> None:
    older = figure(seconds={"minimum": 1, "median": 2, "maximum": 3})
    for field in LATER:
        del older[field]
    (read,) = parse_results(results([older]), "a.json").figures
    assert all(getattr(read, field) is None for field in LATER)
    assert read.seconds is not None and read.seconds.median == 2
    assert read.seconds.lower_quartile is read.seconds.upper_quartile is read.seconds.p99 is None


def test_a_file_says_what_was_written(tmp_path: Path) -> None:
    run = whole_run() | {"machine": {"cpu": "x", "gpu": None, "cores": [1, 2], "turbo": True}}
    run["settings"] = {"sizes": list(range(1 << 40, (1 << 40) + 256))}
    (tmp_path / "a.json").write_text(json.dumps(run))
    read = read_results(tmp_path / "a.json")
    assert read.source == str(tmp_path / "a.json") and read.command == run["command"]
    assert read.machine == {"cpu": "x", "cores": "1, 2", "turbo": "yes"}
    assert read.settings["sizes"].split(", ") == list(map(str, run["settings"]["sizes"]))
    for figure_read, written in zip(read.figures, run["figures"], strict=True):
        assert vars(figure_read) | {"seconds": vars(figure_read.seconds)} == written
    assert [list(row) for row in read.traffic or ()] == run["traffic"]
    assert read.skipped[0].implementation == "nccl" and read.skipped[0].operation is None
    assert read.copy_bandwidth == 9.7e9 and read.link_bandwidth == 1.25e8


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b"9" * 5000])
def test_what_is_no_such_file_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ThinwireError, match=r"a\.json: "):
        read_results(tmp_path / "a.json")
