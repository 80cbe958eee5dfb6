"""JSON of others: messages between ranks arrive as they were sent, and what does not fit is refused by name."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire
from thinwire.comm import Communicator
from thinwire.errors import CheckpointError, CountsError, ThinwireError
from thinwire.fields import (
    MOST_BYTES,
    Fields,
    OneOf,
    decode,
    encode,
    just,
    list_of,
    number,
    one_of,
    or_none,
    text_of,
    within,
)
from thinwire.testing import run_ranks

ROOT = Path(thinwire.__file__).parent
ROOMS = ("comm", "fused", "moe", "triton_kernels")
SOURCES = [*ROOT.glob("*.py"), *(file for room in ROOMS for file in (ROOT / room).resolve().rglob("*.py"))]

GOOD = [
    (None, None),
    (True, bool),
    (-(2**63), int),
    (2**63 - 1, int),
    (1e-310, float),
    (3, float),
    ("a \udc80 \u2028 \x00 line\n", str),
    (None, str | None),
    ("x", str | None),
    ([], [int]),
    ([[1], []], [[int]]),
    (["a", 1, None], (str, int, int | None)),
    ({"a": [1], "": []}, {str: [int]}),
    ([["k", "t"], [None]], [OneOf((str, str), (None,))]),
]


@pytest.mark.parametrize(("value", "shape"), GOOD)
def test_what_fits_arrives_as_it_was(value: object, shape: Any) -> None:
    assert decode(encode(value, shape), shape, "rank 0") == value


def test_tuples_become_lists() -> None:
    assert decode(encode((1, ("a",)), (int, (str,))), (int, (str,)), "rank 0") == [1, ["a"]]


FIELD = {
    "text": (
        text_of(3),
        ["a", "\u00e9t\u00e9", ""],
        ["long", "a\n", 1, None],
        "printable text of at most 3 characters",
    ),
    "just": (just(1), [1], [True, 1.0, "1", None], "1, the one that can be read"),
    "one of": (one_of(("a", "b")), ["a"], ["c", None, ["a"], {}], "one of a, b"),
    "number": (number("a number of seconds", 9), [0, 8.5], [-1, 9, True, "1", float("nan")], "a number of seconds"),
    "range": (within(1, 3), [1, 3], [0, 4, True, 2.0, "2"], "an int from 1 to 3"),
    "or none": (or_none(within(1, 3)), [None, 2], [0], "an int from 1 to 3"),
    "list": (list_of(within(1, 3), 2), [(), (1, 3)], [[1, 2, 3], 1, "12", [0]], "a list of at most 2|an int from 1"),
    "not empty": (list_of(within(1, 3), 2, 1), [(1,)], [[], [1, 2, 3]], "a list of 1 to 2"),
}


@pytest.mark.parametrize("name", FIELD)
def test_a_field_is_what_its_check_says_or_refused_by_name(name: str) -> None:
    check, taken, refused, told = FIELD[name]
    for value in taken:
        assert Fields({"x": value}, "file").get("x", check) == value
    for value in refused:
        with pytest.raises(CheckpointError, match=f"^file: x is .*, expected ({told})"):
            Fields({"x": value}, "file", CheckpointError).get("x", check)


def test_a_field_that_is_missing_is_named_and_so_is_the_place_of_one_within() -> None:
    fields = Fields({"a": 1, "b": [{"c": 1}, {"c": 0}], "d": 7}, "file")
    assert fields.get(("z", "a"), within(0, 9)) == 1 and fields.get("z", within(0, 9), 5) == 5
    with pytest.raises(ThinwireError, match="^file: no field 'y' or 'z'; it has a, b, d$"):
        fields.get(("y", "z"), within(0, 9))
    with pytest.raises(ThinwireError, match=r"^file: b\[1\]: c is 0, expected an int from 1 to 9$"):
        fields.get("b", list_of(lambda value: Fields(value, "").get("c", within(1, 9)), 2))
    with pytest.raises(ThinwireError, match="^file: d: 7, expected an object$"):
        fields.get("d", lambda value: Fields(value, ""))
    with pytest.raises(ThinwireError, match="^file: 'x', expected an object$"):
        Fields("x", "file")


def _tell(comm: Communicator) -> list[Any]:
    value = {"rank": [comm.rank], "text": ["x" * 1000 * comm.rank]}
    found = comm.all_gather_data(value, {str: [OneOf(int, str)]})
    assert found == [{"rank": [rank], "text": ["x" * 1000 * rank]} for rank in range(comm.size)]
    return comm.all_gather_data((comm.rank, None), (int, str | None))


@pytest.mark.parametrize("mode", ["process", "thread"])
def test_every_rank_gets_every_ranks_data(mode: str) -> None:
    assert run_ranks(_tell, 3, mode=mode) == [[[0, None], [1, None], [2, None]]] * 3


def _announce_too_much(comm: Communicator) -> str:
    if comm.rank == 1:
        comm.exchange_counts([MOST_BYTES + 1, 0])
        return ""
    with pytest.raises(ThinwireError) as caught:
        comm.all_gather_data("x", str)
    return str(caught.value)


def test_a_message_that_is_announced_as_too_long_is_not_waited_for() -> None:
    (told, _) = run_ranks(_announce_too_much, 2)
    assert told == f"rank 1 wants to send {MOST_BYTES + 1} bytes of data; at most {MOST_BYTES} are accepted"


def _send(comm: Communicator, message: bytes) -> str:
    if comm.rank == 1:
        comm._gather_messages(message, "data")
        return ""
    with pytest.raises(ThinwireError) as caught:
        comm.all_gather_data("x", str)
    return str(caught.value)


@pytest.mark.parametrize("mode", ["process", "thread"])
def test_what_a_peer_sends_is_decoded_and_the_peer_is_named(mode: str) -> None:
    (told, _) = run_ranks(_send, 2, b"[1]", mode=mode)
    assert told == "rank 1 sent [1], expected str"


def _send_a_negative_count(comm: Communicator) -> None:
    if comm.rank == 1:
        comm._exchange_rows(torch.tensor([[-5], [0]]).view(torch.uint8), "counts")
        return
    with pytest.raises(CountsError, match="rank 1 sent the count -5, expected 0 to"):
        comm.exchange_counts([0, 0])


def test_a_count_below_zero_is_refused() -> None:
    run_ranks(_send_a_negative_count, 2)


def _calls(*names: str) -> set[tuple[str, str]]:
    """Files of the library and their functions that call something of these names."""
    found = set()
    for file in SOURCES:
        for function in ast.walk(ast.parse(file.read_text())):
            if isinstance(function, ast.FunctionDef):
                for node in ast.walk(function):
                    called = node.func if isinstance(node, ast.Call) else None
                    if (getattr(called, "attr", None) or getattr(called, "id", None)) in names:
                        found.add((file.name, function.name))
    return found


def test_the_library_opens_no_pickle_that_a_peer_sent() -> None:
    """Those that `run_ranks` opens were written by its own processes, in a folder that only their user may enter."""
    readers = {file.name for file in SOURCES if re.search(r"\b(pickle|marshal|shelve|dill)\b", file.read_text())}
    assert readers >= {"host_collectives.py", "testing.py", "_rank_process.py"}
    opened = {(file, function) for file, function in _calls("loads", "load", "Unpickler") if file in readers}
    assert {function for file, function in opened if file == "host_collectives.py"} == {"_unpickled"}
    assert {file for file, _ in opened} == {"host_collectives.py", "testing.py", "_rank_process.py"}
    exchanges = ("all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list")
    assert not _calls(*exchanges, "send_object_list", "recv_object_list")
