"""What is done with an input in each fuzz target: everything of thinwire that reads files or text of others.

A target is called with bytes, which hold what such a file or environment could: it returns whether thinwire took
them, and then all that is promised of the result was found to hold. False says that they were refused, with the class
of error that the documentation names. Anything else that is raised is a defect.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from tests.helpers.guarded import guarded, guarded_copy
from tests.helpers.wires import DTYPES, WIRES, assert_same_bits
from thinwire.comm.hosts import is_loopback
from thinwire.comm.launch.launchers import discover
from thinwire.comm.launch.rank_table import RankTable
from thinwire.errors import ArgumentError, RankTableError, ThinwireError, WireFormatError
from thinwire.flight import FORMAT, VERSION, parse_flight, read_flight
from thinwire.fused.codec import WireRows, dequantize
from thinwire.tools.commands.inspect import report
from thinwire.triton_kernels.codec_reference import dequantize_reference
from thinwire.triton_kernels.cpu.pack import unpack_rows
from thinwire.wire import WireFormat
from verification.fuzz.change import Change, json_behind, json_in_lines, words_in_lines

__all__ = ["TARGETS", "Target"]

_TWO_RANKS = {
    "server_list": [
        {"server_id": "node7", "device": [{"device_id": "0", "rank_id": "1"}, {"device_id": 4, "rank_id": 0}]}
    ]
}


class Target(NamedTuple):
    """A parser that is fuzzed.

    Attributes:
        run: whether thinwire took the input; raises what is a defect.
        change: makes another input of one, of much the same form; None where any bytes are as good.
    """

    run: Callable[[bytes], bool]
    change: Change | None


@contextlib.contextmanager
def _file(data: bytes) -> Iterator[str]:
    """A file that holds the input, for as long as it is read."""
    descriptor = os.memfd_create("input")
    try:
        os.write(descriptor, data)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _text(data: bytes) -> str:
    return data.decode(errors="surrogateescape")


# ---------------------------------------------------------------------------------------------------------------------
# Formats and records


def wire_string(data: bytes) -> bool:
    try:
        wire = WireFormat.parse(_text(data))
    except WireFormatError:
        return False
    assert WireFormat.parse(str(wire)) == wire and len(str(wire)) <= len(data) + len(":row")
    for hidden in (1, 129, 7168):
        payload, scales = wire.payload_bytes(hidden, torch.bfloat16), wire.scales_offset(hidden, torch.bfloat16)
        end = scales + wire.num_groups(hidden) * wire.scale_bytes
        assert payload <= scales and end <= wire.row_bytes(hidden, torch.bfloat16)
    return True


def records(data: bytes) -> bool:
    """Nine bytes choose format, dtypes, and what the rows say of their shape; the others are the records, repeated."""
    choices, rest = data[:9].ljust(9, b"\0"), data[9:] or b"\0"
    wire = WireFormat.parse(WIRES[choices[0] % len(WIRES)])
    dtype, into = DTYPES[choices[1] % 3], DTYPES[choices[2] % 3]
    hidden, rows = 1 + int.from_bytes(choices[3:5], "little") % 3000, choices[5] % 4
    shape: tuple[Any, ...] = (rows, hidden)
    lie = choices[6] % 8  # mostly it is none
    if lie < 3:
        (size,) = struct.unpack("<q", rest[:8].ljust(8, b"\xff"))
        shape = ((rows, size), (size, hidden), (size, -size, hidden))[lie]
    octets = torch.frombuffer(bytearray(rest), dtype=torch.uint8)
    shift = choices[7] % 5  # a kernel reads 16 bytes at a time
    row_bytes = wire.row_bytes(hidden, dtype)
    held = guarded([rows * row_bytes + shift])
    held.copy_(octets.repeat(-(-held.numel() // octets.numel()))[: held.numel()])
    passed = WireRows(held[shift:].view(rows, row_bytes), wire, shape, dtype)  # type: ignore[arg-type]
    try:
        got = dequantize(passed, into)
    except (WireFormatError, ArgumentError):
        return False
    assert got.shape == shape
    hidden = shape[-1]  # a record may be just as long as one of a few elements less
    expected = dequantize_reference(passed.records, wire, hidden, into)
    assert_same_bits(str(wire), expected, got.reshape(rows, hidden))
    aligned, out = guarded_copy(passed.records), guarded([rows, hidden], into, fill=0x55)
    if aligned.data_ptr() % 16 == 0:
        unpack_rows(aligned, wire, None, None, out)
        assert_same_bits(str(wire), expected, out)
    return True


# ---------------------------------------------------------------------------------------------------------------------
# Environment and files


def launcher(data: bytes) -> bool:
    """Lines of NAME=VALUE; with a line that is "table" they start the ranks of a table of two."""
    lines = data.replace(b"\0", b"").split(b"\n")  # which no variable can have
    environ = dict(_text(line).split("=", 1) for line in lines if b"=" in line)
    try:
        info = discover(environ, rank_table=_TWO_RANKS if b"table" in lines else None)
    except ThinwireError:
        return False
    assert 0 <= info.rank < info.size and (info.local_rank is None or info.local_rank >= 0) and info.source
    assert (info.address is None) == (info.size == 1)
    if info.address is not None:
        is_loopback(info.address[0])
        assert info.address[0] and 1 <= info.address[1] <= 65535
    return True


def rank_table(data: bytes) -> bool:
    try:
        with _file(data) as path:
            table = RankTable.load(path)
    except RankTableError:
        return False
    assert [entry.rank for entry in table.entries] == list(range(table.size)) and table.size
    for server in table.servers:
        here = [entry for entry in table.entries if entry.server == server]
        here.sort(key=lambda entry: entry.device_id)
        assert [entry.local_rank for entry in here] == list(range(len(here)))
        assert len({entry.device_id for entry in here}) == len(here)
    assert RankTable.load(json.loads(data)).entries == table.entries
    try:
        info = discover({}, rank=table.size - 1, rank_table=table)
    except ThinwireError as error:
        assert "expected a host's name" in str(error)
        return False
    assert (info.size, info.device_id) == (table.size, table.entries[-1].device_id)
    return True


def flight(data: bytes) -> bool:
    """A line for each rank's file, of what their flight recorders wrote."""
    flights = []
    for number, line in enumerate(data.split(b"\n")[:8]):
        with contextlib.suppress(ThinwireError), _file(line) as path:
            flights.append(read_flight(path))
            fields = dataclasses.asdict(flights[-1]) | {"format": FORMAT, "version": VERSION}
            again = parse_flight(json.dumps(fields).encode(), flights[-1].source)
            assert again == flights[-1], f"file {number} is otherwise when written again"
    try:
        text = report(flights)
    except ThinwireError:
        return False
    lines = text.split("\n")
    assert all(line.isprintable() for line in lines) and len(lines) <= 60 * len(flights) + 1
    assert all(len(line) < 20_000 for line in lines)
    return bool(flights)


TARGETS: dict[str, Target] = {
    "wire_string": Target(wire_string, None),
    "records": Target(records, None),
    "launcher": Target(launcher, words_in_lines),
    "rank_table": Target(rank_table, json_behind(0)),
    "flight": Target(flight, json_in_lines),
}
