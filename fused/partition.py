"""How a tensor is cut for a collective: one part a rank, rows within a part. Pure arithmetic.

A collective sees a tensor as a flat sequence of elements. Scales belong to groups of consecutive elements, and a format
with one scale a row has one for every `row_elements`.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from thinwire.errors import CapacityError
from thinwire.fused.counts import Segments, dense_segments
from thinwire.fused.row_signature import describe_wire_word, wire_word
from thinwire.wire import WireFormat

#: Elements of a row: of a short message, and of one with enough for each rank. The longer, the less is padded.
SHORT_ROW, LONG_ROW = 1024, 4096

_OPS = ("all_reduce", "reduce_scatter", "all_gather")
_DTYPES = ("float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool")


def row_elements(part: int) -> int:
    """Elements of a row where the largest part has `part` of them.

    >>> row_elements(4095), row_elements(4096)
    (1024, 4096)
    """
    return SHORT_ROW if part < LONG_ROW else LONG_ROW


def split_parts(elements: int, world: int) -> tuple[Segments, int]:
    """Any number of elements dealt out in whole rows, and the elements of a row. The last parts may be short or empty.

    >>> split_parts(5000, 4)
    (Segments(counts=[2048, 2048, 904, 0], displs=[0, 2048, 4096, 5000]), 1024)
    """
    row = row_elements(-(-elements // world))
    rows = -(-elements // row)
    share = -(-rows // world) * row
    displs = [min(rank * share, elements) for rank in range(world)]
    counts = [min(share, elements - displ) for displ in displs]
    return Segments(counts, displs), row


def gathered_parts(counts: Sequence[int]) -> tuple[Segments, int]:
    """What each rank contributes, one after the other, and the elements of a row.

    >>> gathered_parts([3, 0, 5000])
    (Segments(counts=[3, 0, 5000], displs=[0, 3, 3]), 4096)
    """
    return dense_segments(list(counts)), row_elements(max(counts))


def signature_of(
    op: int, parts: Segments, row: int, dtype: object, wire: WireFormat, gather_wire: WireFormat
) -> tuple[int, int, int, int]:
    """What ranks tell each other of a call: four int64, equal on ranks that do the same. `dtype` may be its name."""
    name = str(dtype).removeprefix("torch.")
    spread, number = zlib.crc32(repr((parts.counts, row, name)).encode()), [*_DTYPES, name].index(name)
    return op | number << 8 | spread << 16, wire_word(wire), wire_word(gather_wire), sum(parts.counts)


def describe_signature(signature: Sequence[int]) -> str:
    """What `signature_of` stands for, for people; any four numbers.

    >>> wire = WireFormat.parse("int8")
    >>> describe_signature(signature_of(1, Segments([4, 4], [0, 4]), 1024, "float16", wire, wire))
    "reduce_scatter of 8 float16 elements as WireFormat(name='int8', group=128, alignment=32)"
    """
    op, dtype = signature[0] & 0xFF, signature[0] >> 8 & 0xFF
    names = [_OPS[op] if op < len(_OPS) else "something", _DTYPES[dtype] if dtype < len(_DTYPES) else "unknown"]
    legs = [describe_wire_word(word) for word in signature[1:3]]
    wires = {0: f"{legs[0]}, then {legs[1]}", 1: legs[0], 2: legs[1]}.get(op, "unknown")
    return f"{names[0]} of {signature[3]} {names[1]} elements as {wires}"


def describe_mismatch(members: Sequence[int], own: int, calls: Sequence[str], wrong: Sequence[int]) -> str:
    """Who does what, where the ranks in `wrong` do something else than `own`; `members` are their names."""
    lines = ["the ranks do different things:", f"  rank {members[own]}: {calls[own]}"]
    for peer in wrong:
        lines.append(f"  rank {members[peer]}: {calls[peer]}" + ", divided otherwise" * (calls[peer] == calls[own]))
    return "\n".join(lines)


def longest_record(row: int, dtype: torch.dtype, wires: Sequence[WireFormat], room: int) -> int:
    """Bytes of a row's record in the format that takes the most.

    Raises:
        CapacityError: there is not as much room for it.
    """
    longest = max(wire.row_bytes(row, dtype) for wire in wires)
    if longest > room:
        raise CapacityError(
            f"a record of {row} elements takes {longest} bytes as {' or '.join(map(repr, wires))}, and a piece of the "
            f"direct transport holds {room}: pass transport='staged', or a smaller alignment"
        )
    return longest
