"""`thinwire inspect`: odd files are refused by name, and what ranks' files say together is said in one line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from thinwire.errors import ThinwireError
from thinwire.fields import LONGEST_FILE
from thinwire.flight import FORMAT, VERSION, Flight, parse_flight, read_flight
from thinwire.tools.cli import main
from thinwire.tools.commands.inspect import report


def operation(number: int | None, name: str = "barrier", /, **fields: Any) -> dict[str, Any]:
    start = 1000 * (number or 1)
    return {
        "number": number, "name": name, "shape": None, "dtype": None, "wires": [], "transport": None, "details": {},
        "start_ns": start, "end_ns": start + 500, "state": "done", "failure": None, "lane": None, "epoch": None,
        "phase": None, "blamed": [], "inside": None,
    } | fields  # fmt: skip


def content(rank: int = 0, size: int = 2, operations: Any = (), **fields: Any) -> dict[str, Any]:
    return {
        "format": FORMAT, "version": VERSION, "communicator": "00ff", "origin": "a test", "backend": "gloo",
        "rank": rank, "size": size, "timeout": 1.0, "host": "here", "pid": 7, "written": 1.5, "written_ns": 9,
        "reason": "asked for", "operations": list(operations),
    } | fields  # fmt: skip


def flight(*passed: Any, **fields: Any) -> Flight:
    return parse_flight(json.dumps(content(*passed, **fields)).encode(), f"rank {passed[0]}'s file")


def barriers(count: int) -> list[dict[str, Any]]:
    return [operation(number) for number in range(1, count + 1)]


def failed(number: int, *blamed: int, **fields: Any) -> dict[str, Any]:
    return operation(number, **{"state": "failed", "failure": "PeerTimeout", "blamed": list(blamed), **fields})


# ---------------------------------------------------------------------------------------------------------------------
# Odd files

ODD: dict[str, Any] = {
    "format": ["x", None, 1],
    "version": [2, "1", 1.0, True],
    "communicator": [None, "a\x1b[2J", "x" * 401, 3],
    "origin": ["two\nlines", {}],
    "backend": [[]],
    "rank": [2, -1, "0", None, 0.0, True],
    "size": [0, 1 << 17, "2"],
    "host": [7, "\u202e"],
    "written": [None, True],
    "reason": [None],
    "operations": [{}, None, ["x"], [operation(0)], barriers(257), [{}]],
}
ODD_OPERATIONS: dict[str, Any] = {
    "number": [0, "1", 1 << 63],
    "name": [None, "\x07"],
    "shape": [[-1], [1] * 65, "12", [1.5], [None]],
    "dtype": [1],
    "wires": ["int8", ["a"] * 3, [1], None],
    "transport": [1],
    "details": [[], {"a": None}, {"a": [[1]]}, {"a": 1.5}, {"\x1b": 1}, {"a": True}],
    "start_ns": [-1, None],
    "end_ns": ["", 1 << 63],
    "state": ["DONE", None, ["done"]],
    "failure": [1],
    "phase": [[]],
    "blamed": [[-1], 1, ["0"]],
    "inside": [0],
}  # fmt: skip


def refused(text: bytes) -> str:
    with pytest.raises(ThinwireError) as caught:
        parse_flight(text, "a.json")
    message = str(caught.value)
    assert message.startswith("a.json: ") and message.isascii() and message.isprintable() and len(message) < 400
    return message


@pytest.mark.parametrize("field", ODD)
def test_a_field_that_is_not_what_it_should_be_is_named(field: str) -> None:
    good = content(operations=[operation(1)])
    assert parse_flight(json.dumps(good).encode(), "good").operations[0].name == "barrier"
    for value in ODD[field]:
        assert field in refused(json.dumps(good | {field: value}).encode())
    del good[field]
    assert f"no field {field!r}" in refused(json.dumps(good).encode())


@pytest.mark.parametrize("field", ODD_OPERATIONS)
def test_a_field_of_an_operation_that_is_not_what_it_should_be_is_named(field: str) -> None:
    for value in ODD_OPERATIONS[field]:
        found = refused(json.dumps(content(operations=[operation(1), operation(2, **{field: value})])).encode())
        assert found.startswith("a.json: operations[1]: ") and field in found
    lacking = operation(1)
    del lacking[field]
    assert f"operations[0]: no field {field!r}" in refused(json.dumps(content(operations=[lacking])).encode())


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b"9" * 5000, b'{"a": NaN}', b" " * (LONGEST_FILE + 1)],
    ids=lambda text: str(text[:8]),
)
def test_what_is_no_such_file_is_refused(text: bytes) -> None:
    refused(text)


def test_files_that_cannot_be_read_are_told_and_the_others_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "text").write_text("x")
    (tmp_path / "good").write_text(json.dumps(content(operations=barriers(3))))
    names = ["pipe", "text", "gone", ".", "good"]
    assert main(["inspect", *(str(tmp_path / name) for name in names)]) == 2
    printed = capsys.readouterr()
    assert printed.out.startswith("no rank stopped: all came to the end of operation 3; no file of rank 1\n")
    lines = printed.err.splitlines()
    assert len(lines) == 4 and all(line.startswith(f"thinwire: error: {tmp_path}") for line in lines)
    assert "pipe: cannot be read" in lines[0] and "not a regular file" in lines[0]
    assert "text: not JSON" in lines[1] and "No such file" in lines[2]
    assert main(["inspect", str(tmp_path / "good"), str(tmp_path / "good")]) == 0
    assert main(["inspect", str(tmp_path / "text")]) == 2
    with pytest.raises(ThinwireError, match="cannot be read: embedded null"):
        read_flight("\0")


def test_of_two_files_of_one_rank_the_newest_is_taken() -> None:
    files = [flight(0, 1, barriers(count), written=written) for count, written in ((3, 1.0), (7, 3.0), (5, 2.0))]
    assert first_line(*files) == "no rank stopped: all came to the end of operation 7"


@pytest.mark.exhaustive
def test_the_documented_output_is_what_the_example_prints() -> None:
    root = Path(__file__).parents[1]
    (shown,) = re.findall(
        r"<!-- lost rank -->\n```\n(.*?)```", (root / "docs/flight_recorder.md").read_text(), re.DOTALL
    )
    done = subprocess.run([sys.executable, str(root / "examples/lost_rank.py")], capture_output=True, text=True)
    printed = [line for line in done.stdout.splitlines() if not line.startswith("written by")]

    def steady(lines: list[str]) -> list[str]:
        """Without what differs from run to run."""
        return [re.sub(r"after [0-9.,]+ ms|communicator [0-9a-f]+", "", line) for line in lines]

    assert steady(printed) == steady(shown.splitlines()), done.stderr


def test_it_needs_no_torch(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps(content(size=1, operations=barriers(1))))
    code = "import sys; sys.modules['torch'] = None; from thinwire.tools.cli import main; "
    code += f"main(['inspect', {str(file)!r}])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.startswith("no rank stopped: all came to the end of operation 1\n"), done.stderr


# ---------------------------------------------------------------------------------------------------------------------
# What files say together


def first_line(*flights: Flight) -> str:
    return report(flights).splitlines()[0]


def test_a_rank_that_is_behind_stopped_and_where_is_told() -> None:
    waiting = operation(3, "all_reduce", state="under way", end_ns=0, inside="all_gather_object")
    flights = [
        flight(0, 3, [*barriers(2), waiting]),
        flight(1, 3, barriers(2)),
        flight(2, 3, [*barriers(2), failed(3)]),
    ]
    flights[2] = flight(2, 3, [*barriers(2), failed(3, 1, name="all_reduce")])
    text = report(flights)
    assert text.splitlines()[0] == (
        "rank 1 stopped before operation 3, all_reduce, in which ranks 0, 2 waited: the last of rank 1 is operation 2, "
        "barrier, done"
    )
    assert "3  all_reduce  under way, within all_gather_object on rank 0\n" in text
    assert "3  all_reduce  PeerTimeout after 0.0 ms on rank 2\n" in text
    assert "not called on rank 1" in text


def test_a_rank_that_raised_stopped_by_what_it_raised() -> None:
    mine = failed(2, failure="CapacityError")
    assert first_line(flight(0, 2, [*barriers(1), failed(2, 1)]), flight(1, 2, [*barriers(1), mine])) == (
        "rank 1 stopped in operation 2, barrier, by CapacityError, in which rank 0 waited"
    )
    interrupted = operation(2, state="interrupted", failure="KeyboardInterrupt")
    assert first_line(flight(0, 2, [*barriers(1), failed(2, 1)]), flight(1, 2, [*barriers(1), interrupted])) == (
        "rank 1 stopped in operation 2, barrier, by KeyboardInterrupt, in which rank 0 waited"
    )


def test_ranks_may_go_on_after_errors_that_all_of_them_had() -> None:
    def had(rank: int) -> Flight:
        return flight(rank, 2, [operation(1), failed(2, failure="ConfigMismatch"), operation(3)])

    assert first_line(had(0), had(1)) == "no rank stopped: all came to the end of operation 3"


def test_a_rank_that_is_still_in_it_stopped_there() -> None:
    inside = operation(2, state="under way", end_ns=0)
    assert first_line(flight(0, 2, [*barriers(1), failed(2, 1)]), flight(1, 2, [*barriers(1), inside])) == (
        "rank 1 stopped in operation 2, barrier, in which rank 0 gave up"
    )


def test_whom_the_first_to_give_up_blames_stopped_or_whoever_called_after_that() -> None:
    def gave_up(rank: int, *blamed: int, start: int, end: int, **fields: Any) -> Flight:
        return flight(rank, 3, [*barriers(1), failed(2, *blamed, start_ns=start, end_ns=end)], **fields)

    late = gave_up(0, 1, start=10, end=30), gave_up(1, 0, start=40, end=50), gave_up(2, 0, start=10, end=35)
    assert first_line(*late) == (
        "rank 1 stopped before operation 2, barrier, and called it when ranks 0, 2 had given up"
    )
    inside = gave_up(0, 1, start=10, end=30), gave_up(1, 0, start=11, end=50), gave_up(2, 0, start=10, end=35)
    assert first_line(*inside) == "rank 1 stopped in or before operation 2, barrier: blamed by rank 0"
    apart = [gave_up(rank, 1, start=10, end=30, host=str(rank)) for rank in (0, 2)]
    assert first_line(*apart, gave_up(1, 0, start=9, end=20)) == (
        "rank 1 stopped in or before operation 2, barrier: blamed by ranks 0, 2"
    )


def test_where_all_are_in_it_all_stopped_there() -> None:
    flights = [flight(rank, 2, [*barriers(1), operation(2, state="under way", end_ns=0)]) for rank in range(2)]
    assert first_line(*flights) == "all ranks stopped in operation 2, barrier"


def test_the_first_of_several_differences_in_a_row_is_the_one() -> None:
    calls = [("broadcast", "all_reduce", "barrier"), ("all_reduce", "barrier", "barrier")]
    flights = [
        flight(rank, 2, [operation(1), *(operation(n, name) for n, name in enumerate(names, 2)), failed(5, 1 - rank)])
        for rank, names in enumerate(calls)
    ]
    assert "operation 5, barrier" in first_line(*flights)  # they agreed in between
    flights = [
        flight(rank, 2, [operation(1), *(operation(n, name) for n, name in enumerate(names[:2], 2))])
        for rank, names in enumerate(calls)
    ]
    assert first_line(*flights) == "no rank stopped: all came to the end of operation 3"
    flights = [
        flight(rank, 2, [operation(1), operation(2, names[0]), failed(3, name=names[1])])
        for rank, names in enumerate(calls)
    ]
    assert first_line(*flights) == "rank 0 called broadcast as operation 2, where rank 1 called all_reduce"


def test_what_may_differ_between_ranks_is_no_difference() -> None:
    def rows(rank: int, name: str, shape: list[int]) -> Flight:
        return flight(rank, 2, [operation(1, name, shape=shape, dtype="float32", state="under way", end_ns=0)])

    assert first_line(rows(0, "all_gather_v", [3, 64]), rows(1, "all_gather_v", [5])).startswith("all ranks stopped in")
    for name in ("all_to_all_v", "dispatch"):
        assert first_line(rows(0, name, [3, 64]), rows(1, name, [5, 64])).startswith("all ranks stopped in")
        assert "where rank 1 called" in first_line(rows(0, name, [3, 64]), rows(1, name, [3, 65]))
    assert first_line(rows(0, "combine", [3, 64]), rows(1, "abandon", [])).startswith("all ranks stopped in")
    assert "where rank 1 called" in first_line(rows(0, "all_reduce", [3, 64]), rows(1, "all_reduce", [5, 64]))


def test_messages_between_two_ranks_have_no_number_and_are_told() -> None:
    message = operation(None, "recv", state="failed", failure="PeerTimeout", details={"src": 1, "tag": 0})
    text = report([flight(0, 2, [*barriers(2), message]), flight(1, 2, barriers(2))])
    assert text.splitlines()[0] == "rank 0 stopped in recv (src 1, tag 0), PeerTimeout, after operation 2"


def test_communicators_are_apart_and_the_one_with_trouble_comes_first() -> None:
    origins = "the variables of rank 0", "the variables of rank 1"
    calm = [flight(r, 2, barriers(9), communicator="aa", written=99.0, origin=origins[r]) for r in range(2)]
    trouble = [flight(0, 2, [*barriers(2), failed(3, 1)])]
    first, *_, last = report([*calm, *trouble]).split("\n\n")
    assert first.startswith(
        "rank 1 stopped in or before operation 3, barrier, in which rank 0 waited: no file of rank 1"
    )
    assert "no rank stopped: all came to the end of operation 9\n" in report([*calm, *trouble])
    assert last.lstrip().startswith("number")


def test_rings_that_have_moved_on_are_compared_where_they_overlap() -> None:
    ahead = [operation(number) for number in range(300, 556)]
    assert first_line(flight(0, 2, ahead), flight(1, 2, [operation(n) for n in range(299, 555)])).startswith(
        "rank 1 stopped before operation 555, barrier: the last of rank 1 is operation 554"
    )
    assert first_line(flight(0, 2, ahead), flight(1, 2, barriers(5))).startswith(
        "rank 1 stopped before operation 6: the last of rank 1 is operation 5, barrier"
    )
