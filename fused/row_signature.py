"""What a rank says of its rows in the header of an all-to-all-v, and how two ranks' headers differ."""

from __future__ import annotations

import math
import zlib

import torch

from thinwire.errors import WireFormatError
from thinwire.wire import FORMATS, WireFormat


def signature_of(tail: torch.Size, dtype: torch.dtype, wire: WireFormat) -> tuple[int, int, int, int]:
    """What a header says of rows of shape `tail`: four numbers, the same on ranks that send the same."""
    return (
        zlib.crc32(str(dtype).encode()),
        wire_word(wire),
        math.prod(tail),
        zlib.crc32(repr(tuple(tail)).encode()),
    )


def wire_word(wire: WireFormat) -> int:
    """A wire format as one number, for peers to compare."""
    return wire.kind | wire.rotated << 3 | wire.group << 4 | wire.alignment << 16


def describe_wire_word(word: int) -> str:
    """The format that a number stands for, for people; any number."""
    try:
        return repr(WireFormat(tuple(FORMATS)[word & 7], word >> 4 & 0xFFF, word >> 16, word >> 3 & 1 == 1))
    except (IndexError, WireFormatError):
        return "an unknown wire format"


def describe_difference(
    rank: int, peer: int, header: list[int], expected_count: int | None, expected: list[int]
) -> str:
    """How a peer's header (ring pieces, count, `signature_of`) differs from what this rank expected of it.

    Args:
        expected_count: None or negative, where any was.
    """
    pieces, count, *sent = header
    if sent == expected:
        if expected_count in (None, count) or expected_count < 0:
            return f"rank {peer} says that it sends rank {rank} {count} rows in {pieces + 1} pieces, which cannot be"
        return f"rank {peer} sends rank {rank} {count} rows, but rank {rank} expects {expected_count} from rank {peer}"
    shape = ", of another shape" if sent[:3] == expected[:3] else ""
    return f"rank {peer} sends {_describe_rows(sent)}, but rank {rank} expects {_describe_rows(expected)}{shape}"


def _describe_rows(signature: list[int]) -> str:
    known = [value for value in vars(torch).values() if isinstance(value, torch.dtype)]
    dtypes = {zlib.crc32(str(dtype).encode()): dtype for dtype in known}
    wire = describe_wire_word(signature[1])
    return f"rows of {signature[2]} elements of {dtypes.get(signature[0], 'an unknown dtype')} as {wire}"
