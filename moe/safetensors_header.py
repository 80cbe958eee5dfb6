"""The header of a safetensors file, believed only after every part of it was looked at.

A file is 8 bytes, a length in little-endian; so many bytes of JSON, `{"name": {"dtype": "BF16", "shape": [2, 3],
"data_offsets": [0, 12]}, ...}` with an optional `"__metadata__"` of strings; and the tensors' bytes, in C order.
Source: the format's description in Hugging Face's repository `safetensors`. This reader asks for what that library asks
for, and besides that no name is there twice: the library takes the last of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from thinwire.comm.shaped_json import parse
from thinwire.comm.tensors import is_int
from thinwire.errors import CheckpointError

__all__ = [
    "LENGTH_BYTES",
    "MOST_HEADER_BYTES",
    "StoredTensor",
    "dtype_name",
    "make_header",
    "offsets_of",
    "parse_header",
]

#: Of the number in front of the header.
LENGTH_BYTES = 8
#: A hundred thousand tensors have headers of 15 MB; the smallest entries that fit here take seconds to look at.
MOST_HEADER_BYTES = 16 << 20

_MOST = 2**63 - 1
_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8"), 8),
    **dict.fromkeys(("F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in _FLOATS.items()} | {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
}  # fmt: skip


class StoredTensor(NamedTuple):
    """A tensor of a file.

    Attributes:
        dtype: safetensors' name of it.
        shape: sizes.
        offset: bytes from the beginning of the file to the first element.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def float_dtype(self) -> torch.dtype | None:
        """As torch has it; None for what is not float64, float32, float16 or bfloat16."""
        return _FLOATS.get(self.dtype)

    def bytes_of(self, row: int | None) -> int:
        """Of all of it, or of one part along the first dimension."""
        return math.prod(self.shape if row is None else self.shape[1:]) * _BITS[self.dtype] // 8


def parse_header(octets: bytes, file_bytes: int, source: str) -> dict[str, StoredTensor]:
    """The tensors of a file, by name.

    Args:
        octets: the JSON, without the length in front of it.
        file_bytes: size of the whole file.
        source: the file, for people.

    Raises:
        CheckpointError: it is no such JSON; a name is there twice; or a tensor has an unknown dtype, other bytes than
            its shape and dtype need, shares some with another, or leaves some between it and the next, or at the end.

    >>> header = b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'
    >>> parse_header(header, 8 + len(header) + 8, "file")
    {'w': StoredTensor(dtype='F32', shape=(2,), offset=69)}
    """
    try:
        header = parse(octets)
    except ValueError as error:
        raise CheckpointError(f"{source} has a header that is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{source} has a header that is a {type(header).__name__}, expected an object")
    metadata = header.pop("__metadata__", None)
    if not (
        metadata is None or (isinstance(metadata, dict) and all(isinstance(text, str) for text in metadata.values()))
    ):
        raise CheckpointError(f"{source} has a __metadata__ that is no object of strings")
    first = LENGTH_BYTES + len(octets)
    spans = sorted((*_span(name, entry, source), name) for name, entry in header.items())
    end = 0
    for start, stop, name in spans:
        if start != end:
            raise CheckpointError(f"{source}: {name[:200]!r} begins at byte {start} of the tensors, expected {end}")
        end = stop
    if first + end != file_bytes:
        raise CheckpointError(f"{source} has {file_bytes} bytes, but its header speaks of {first + end}: cut short?")
    return {
        name: StoredTensor(entry["dtype"], tuple(entry["shape"]), first + entry["data_offsets"][0])
        for name, entry in header.items()
    }


def dtype_name(dtype: torch.dtype) -> str:
    """safetensors' name of a dtype.

    Raises:
        CheckpointError: it has none here.
    """
    if dtype not in _NAMES:
        raise CheckpointError(f"{dtype} cannot be stored; one of {', '.join(map(str, _NAMES))} can")
    return _NAMES[dtype]


def _bytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * _BITS[dtype] // 8


def offsets_of(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, int]:
    """Where each tensor begins behind the header: those of wide elements come first, so all are aligned.

    >>> offsets_of({"flags": ("BOOL", (3,)), "w": ("F32", (2,))})
    {'w': 0, 'flags': 8}
    """
    in_order = sorted(tensors, key=lambda name: -_BITS[tensors[name][0]])
    ends = accumulate((_bytes_of(*tensors[name]) for name in in_order), initial=0)
    return dict(zip(in_order, ends, strict=False))


def make_header(tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]) -> tuple[bytes, int]:
    """What a file begins with, and the bytes of the tensors behind it, which lie where `offsets_of` says.

    Args:
        tensors: safetensors' name of each one's dtype, and its shape.
        metadata: strings by name.

    Raises:
        CheckpointError: more than can be read again.

    >>> header, end = make_header({"w": ("F32", (2,))}, {})
    >>> parse_header(header[8:], len(header) + end, "file")["w"].offset == len(header)
    True
    """
    described: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, begin in offsets_of(tensors).items():
        dtype, shape = tensors[name]
        end = begin + _bytes_of(dtype, shape)
        described[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    octets = json.dumps(described, separators=(",", ":")).encode()
    octets += b" " * (-len(octets) % LENGTH_BYTES)
    if len(octets) > MOST_HEADER_BYTES:
        raise CheckpointError(f"a header of {len(octets)} bytes; at most {MOST_HEADER_BYTES} are read")
    return len(octets).to_bytes(LENGTH_BYTES, "little") + octets, end


def _span(name: str, entry: Any, source: str) -> tuple[int, int]:
    """First byte of a tensor, and the one behind its last."""

    def refused(why: str) -> CheckpointError:
        return CheckpointError(f"{source}: {name[:200]!r} {why}")

    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise refused("is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise refused(f"has dtype {str(dtype)[:40]!r}, expected one of {', '.join(_BITS)}")
    if not isinstance(shape, list) or len(shape) > 64 or not all(is_int(size, 0, _MOST) for size in shape):
        raise refused("has a shape that is no list of at most 64 sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(is_int(offset, 0, _MOST) for offset in offsets):
        raise refused("has data_offsets that are not two numbers of bytes")
    bits = math.prod(shape) * _BITS[dtype]
    if offsets[1] < offsets[0] or bits % 8 or bits // 8 != offsets[1] - offsets[0]:
        raise refused(f"is {dtype} {shape}, of {bits / 8:g} bytes, but its data_offsets are {offsets}")
    return offsets[0], offsets[1]
