"""What ranks tell each other of settings arrives as it was sent, and what no rank would send is refused."""

from __future__ import annotations

import ast
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire
from thinwire.comm import Communicator
from thinwire.comm.shaped_json import MOST_BYTES, OneOf, decode, encode
from thinwire.errors import CountsError, ThinwireError
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


@pytest.mark.parametrize(
    ("value", "shape"),
    [
        (1, str),
        (True, int),
        (1, bool),
        (1.0, int),
        (2**63, int),
        (2**63, float),
        (float("nan"), float),
        (float("inf"), float),
        (b"bytes", str),
        ({1: 2}, {str: int}),
        ([1, "a"], [int]),
        ([1], (int, int)),
        ({"a": 1}, [int]),
        ([1], {str: int}),
        (object(), str),
        (None, OneOf(int, [int])),
    ],
)
def test_what_does_not_fit_is_not_sent(value: object, shape: Any) -> None:
    with pytest.raises(TypeError, match="cannot be sent to peers as"):
        encode(value, shape)


HOSTILE = {
    "a pickle": (b"\x80\x04cposix\nsystem\n(S'true'\ntR.", "not JSON"),
    "nothing": (b"", "not JSON"),
    "cut short": (b'["a', "not JSON"),
    "cut short and filled up": (b'["a"' + bytes(20), "not JSON"),
    "two values": (b"1 2", "not JSON"),
    "not UTF-8": (b'"\xff"', "not JSON"),
    "UTF-16": ('"abc"'.encode("utf-16"), "not JSON"),
    "deep lists": (b"[" * 200_000, "not JSON"),
    "deep lists that end": (b"[" * 100_000 + b"]" * 100_000, "not JSON"),
    "deep objects": (b'{"a":' * 100_000, "not JSON"),
    "a key twice": (b'{"a":1,"a":2}', "not JSON.*appears twice"),
    "a long key twice": (b'{"%(key)b":1,"%(key)b":2}' % {b"key": b"k" * 9999}, "not JSON.*appears twice"),
    "a number of many digits": (b"1" * 100_000, "not JSON.*a number of 100000 digits"),
    "a fraction of many digits": (b"0." + b"1" * 100_000, "not JSON.*digits"),
    "65 bits": (str(2**63).encode(), "sent '9223372036854775808', expected int"),
    "infinity": (b"Infinity", "expected int"),
    "a large exponent": (b"1e999", "expected int"),
    "NaN": (b"NaN", "expected int"),
    "a bool": (b"true", "expected int"),
    "text": (b'"1"', "expected int"),
    "a terminal's commands": (b'"\x1b[2J"', "not JSON"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_no_rank_would_send_is_refused_by_name(name: str) -> None:
    message, told = HOSTILE[name]
    with pytest.raises(ThinwireError, match=f"rank 3 .*{told}") as caught:
        decode(message, int, "rank 3")
    assert len(str(caught.value)) < 500 and str(caught.value).isprintable()


def test_a_key_that_is_there_twice_among_many_is_found_at_once() -> None:
    keys = [*range(90_000), 89_999]  # comparing each with each would take minutes
    start = time.process_time()
    with pytest.raises(ThinwireError, match="the key '89999' appears twice"):
        decode(b"{%b}" % b",".join(b'"%d":0' % key for key in keys), {str: int}, "rank 3")
    assert time.process_time() - start < 20


@pytest.mark.parametrize("message", [b"Infinity", b"-Infinity", b"NaN", b"1e999"])
def test_numbers_that_are_not_finite_fit_no_shape(message: bytes) -> None:
    with pytest.raises(ThinwireError, match="expected float"):
        decode(message, float, "rank 3")


@pytest.mark.parametrize(
    ("message", "shape", "told"),
    [
        (b"[1]", (int, int), r"\[int, int\]"),
        (b"[1,2,3]", (int, int), r"\[int, int\]"),
        (b'{"a":1}', {str: str}, r"\{str: str\}"),
        (b"[1]", [str | None], r"\[str \| None, \.\.\.\]"),
        (b"[1,2]", OneOf((str, str), (int,)), r"\[str, str\] or \[int\]"),
    ],
)
def test_the_error_says_what_was_expected(message: bytes, shape: Any, told: str) -> None:
    with pytest.raises(ThinwireError, match=f"rank 3 sent .*, expected {told}"):
        decode(message, shape, "rank 3")


def _tell(comm: Communicator) -> list[Any]:
    value = {"rank": [comm.rank], "text": ["x" * 1000 * comm.rank]}
    found = comm.all_gather_data(value, {str: [OneOf(int, str)]})
    assert found == [{"rank": [rank], "text": ["x" * 1000 * rank]} for rank in range(comm.size)]
    with pytest.raises(TypeError, match="'7' cannot be sent to peers as int"):
        comm.all_gather_data("7", int)
    with pytest.raises(ThinwireError, match=f"at most {MOST_BYTES} can be sent"):
        comm.all_gather_data("x" * MOST_BYTES, str)
    with pytest.raises(ThinwireError, match=f"at most {MOST_BYTES} can be sent"):
        comm.require_same("a thing", {"text": "x" * MOST_BYTES})
    return comm.all_gather_data((comm.rank, None), (int, str | None))  # the ranks are still in step


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
    assert told == "rank 1 sent '[1]', expected str"


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
