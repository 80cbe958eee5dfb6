"""How a row looks on the wire: names, bytes, offsets.

One row of a tensor travels as one *record*::

    [ payload ][ scales ]

Each section begins on a 16-byte boundary, the record is padded to `alignment` bytes, and pad bytes are zero. int4 has
columns 2k and 2k + 1 in a byte, the first in the low bits. int6 and int10 fill a row up with zeros to whole blocks of
64 columns, and cut each block into bit planes, 4 + 2 and 8 + 2 bits from the lowest up. The payload is the low planes
of all blocks, then the high ones. A plane of p bits has 8p bytes a block, and byte k of it holds the bits of columns k,
k + 8p, k + 16p ..., the first in the low bits.

Every launcher, reference and test takes its offsets from `WireFormat` and from nowhere else.

The numerics, equal to the last bit in every backend, for a group `x` of finite values::

    amax  = the largest |x|, found as an integer maximum of the float32 bit patterns (a float maximum loses NaN)
    s     = round_to_scale_dtype(amax * float32(1 / qmax))
            qmax = 127 (int8), 7 (int4), 31 (int6), 509 (int10), 448 (fp8)
    q     = clamp(round_half_even(x * (1 / s)), -largest, largest)  largest = qmax, but 511 of int10; fp8: to e4m3
    x'    = q * s in float32, rounded once to the output's dtype, saturating at its largest finite value

A group with `amax < 2**-110` gets `s = 0` and an all-zero payload. A group that holds a NaN or an infinity gets `s =
NaN` and an all-zero payload, and all of its elements come out as NaN. For the integer formats and `amax >= 2**-110`,
before the last rounding, `|x' - x| <= s * (1/2 + qmax * 2**-22)`.

`+h64` behind the name of an integer format: each block of 64 columns is rotated first, by a Hadamard matrix with signs,
so that a few large values are spread over the block. A row is filled up with zeros to whole blocks, which all travel.
With c a column's number in its block::

    t     = x * sign                   sign = -1 where an odd number of bits of c & (c >> 1) & 0x15 are 1
    for k in 1, 2, 4, 8, 16, 32:       in float32, for every c without bit k
        t[c], t[c + k] = t[c] + t[c + k], t[c] - t[c + k]

Scales and elements are those of t; the scale is stored times 2**-6, which is exact (0 and NaN stay). Back: t' = q * s,
the same six stages, `x' = t' * sign`, and one rounding. Where rows are added up, that is done before the stages. From
2**122 on finite values, and sums of rows, may overflow in the stages, and their group then arrives as NaN. Zeros may
come out as -0.0.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from thinwire.errors import WireFormatError

if TYPE_CHECKING:
    import torch

#: Raised when a format comes or its bytes change; ranks compare it before a row moves.
WIRE_VERSION = 2
#: Environment variable that names the format of calls that pass none.
WIRE_VARIABLE = "THINWIRE_WIRE"

#: Columns of a block, which is rotated, or cut into planes, as a whole.
BLOCK = 64

_DEFAULT, _DEFAULT_OF_PARTIAL_BLOCKS = "int8+h64", "int8"

_SECTION_ALIGNMENT = 16  # widest single load and store of a GPU thread
_GROUP_LIMITS = (16, 1024)
_WHOLE_ROW = 0
_SPEC = re.compile(r"(?P<name>[a-z0-9]+)(?::(?P<group>row|[0-9]{1,9}))?(?P<rotated>\+h64)?")
_ACCEPTED = (
    "accepted: none, int8, int8+h64, int10, int6, int4, fp8; or with elements a scale, int8:N, N a power of two from "
    "16 to 1024, and int8:row: docs/wire-formats.md has all"
)


class Format(NamedTuple):
    """What there is to know of the elements of a format.

    Attributes:
        kind: its number in kernels, and for peers.
        bits: of an element; 0 where it keeps its dtype.
        qmax: the largest magnitude of a quantised element.
        bound: what no payload decodes beyond, whatever its bytes; without the scale.
        group: elements that share a scale unless the name says otherwise.
        planes: bits of each plane that a block is cut into, from the lowest bits up; none where it is not.
    """

    kind: int
    bits: int
    qmax: float
    bound: float
    group: int
    planes: tuple[int, ...] = ()


#: All formats, each at the place that is its kind.
FORMATS = {
    "none": Format(0, 0, 1.0, 1.0, _WHOLE_ROW),
    "int8": Format(1, 8, 127.0, 128.0, 128),
    "int4": Format(2, 4, 7.0, 8.0, 32),
    "fp8": Format(3, 8, 448.0, 480.0, 128),
    "int6": Format(4, 6, 31.0, 32.0, 128, (4, 2)),
    # A bfloat16 scale may be 2**-8 too small: codes reach 511, where from 511 they would not fit.
    "int10": Format(5, 10, 509.0, 512.0, 128, (8, 2)),
}


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _default_group(name: str, rotated: bool) -> int:
    return max(FORMATS[name].group, BLOCK) if rotated else FORMATS[name].group


@dataclass(frozen=True)
class WireFormat:
    """The layout of one row in transit.

    Args:
        name: `"none"`, `"int8"`, `"int6"`, `"int10"`, `"int4"` or `"fp8"` (e4m3).
        group: number of elements that share a scale. 0 means the whole row (int8 only) or, for `none`, no scale.
        alignment: records are padded to a multiple of this many bytes; a power of two, at least 16.
        rotated: whether blocks of 64 columns are rotated before they are quantised (integer formats only).

    Raises:
        WireFormatError: no backend implements this combination.

    >>> wire = WireFormat.parse("int8")
    >>> wire.num_groups(7168), wire.scales_offset(7168), wire.row_bytes(7168)
    (56, 7168, 7296)
    >>> str(WireFormat.parse("int8:64")), str(WireFormat.parse("int6:128+h64"))
    ('int8:64', 'int6+h64')
    """

    name: str
    group: int = _WHOLE_ROW
    alignment: int = 32
    rotated: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or self.name not in FORMATS:
            raise WireFormatError(f"unknown wire format {self.name!r}; {_ACCEPTED}")
        for field in ("group", "alignment"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int):
                raise WireFormatError(f"{field} of wire format {self.name!r} is {value!r}; an int is needed")
        if self.alignment < _SECTION_ALIGNMENT or self.alignment & (self.alignment - 1):
            raise WireFormatError(f"alignment {self.alignment} is not a power of two of at least {_SECTION_ALIGNMENT}")
        if not isinstance(self.rotated, bool):
            raise WireFormatError(f"rotated of wire format {self.name!r} is {self.rotated!r}; a bool is needed")
        if self.rotated and self.name in ("none", "fp8"):
            raise WireFormatError(f"wire format {self.name!r} is not rotated; {_ACCEPTED}")
        low, high = _GROUP_LIMITS
        low = BLOCK if self.blocks else low
        whole_row = self.group == _WHOLE_ROW and self.name in ("int8", "none")
        grouped = low <= self.group <= high and self.group & (self.group - 1) == 0 and self.name != "none"
        if not (whole_row or grouped):
            groups = f"groups of {self.group}" if self.group else "one scale for a row"
            raise WireFormatError(f"wire format {self._label!r} cannot have {groups}; {_ACCEPTED}")

    @classmethod
    def parse(cls, spec: str | WireFormat) -> WireFormat:
        """Reads `name[:row|:N][+h64]`; a WireFormat passes through.

        Raises:
            WireFormatError: the format is unknown; the message says what is accepted.
        """
        if isinstance(spec, WireFormat):
            return spec
        match = _SPEC.fullmatch(spec) if isinstance(spec, str) else None
        if match is None or match["name"] not in FORMATS:
            raise WireFormatError(f"unknown wire format {spec!r}; {_ACCEPTED}")
        name, group, rotated = match["name"], match["group"], match["rotated"] is not None
        if group is None:
            return cls(name, _default_group(name, rotated), rotated=rotated)
        if name == "none":
            raise WireFormatError(f"wire format {spec!r}: 'none' has no groups; {_ACCEPTED}")
        if group == "row":
            return cls(name, _WHOLE_ROW, rotated=rotated)
        if int(group) == _WHOLE_ROW:
            raise WireFormatError(f"wire format {spec!r} has groups of no elements; {_ACCEPTED}")
        return cls(name, int(group), rotated=rotated)

    def __repr__(self) -> str:
        # Messages are matched by it. That of dataclasses guards against recursion, and an interrupt in the middle of it
        # leaves the guard behind: from then on it would be "..." in that thread.
        rotated = ", rotated=True" if self.rotated else ""
        return f"WireFormat(name={self.name!r}, group={self.group}, alignment={self.alignment}{rotated})"

    def __str__(self) -> str:
        group = "" if self.group == _default_group(self.name, self.rotated) else f":{self.group or 'row'}"
        return f"{self.name}{group}{'+h64' if self.rotated else ''}"

    @property
    def _label(self) -> str:
        return self.name + ("+h64" if self.rotated else "")

    @property
    def quantized(self) -> bool:
        """Whether rows lose precision in transit."""
        return self.name != "none"

    @property
    def kind(self) -> int:
        """The number of its elements in kernels, and for peers."""
        return FORMATS[self.name].kind

    @property
    def blocks(self) -> bool:
        """Whether rows travel in whole blocks of 64 columns."""
        return self.rotated or bool(FORMATS[self.name].planes)

    @property
    def qmax(self) -> float:
        """Largest magnitude of a quantised element."""
        return FORMATS[self.name].qmax

    @property
    def row_scale(self) -> bool:
        """Whether one float32 scale serves the whole row; otherwise scales are bfloat16, one a group."""
        return self.quantized and self.group == _WHOLE_ROW

    @property
    def scale_bytes(self) -> int:
        """Bytes of one scale."""
        return 0 if not self.quantized else 4 if self.row_scale else 2

    def num_groups(self, hidden: int) -> int:
        """Scales in a record of `hidden` elements; the last group may be short."""
        _check_hidden(hidden)
        if not self.quantized:
            return 0
        return 1 if self.row_scale else -(-hidden // self.group)

    def columns(self, hidden: int) -> int:
        """Elements that travel for a row of `hidden`: as many, or those of whole blocks."""
        _check_hidden(hidden)
        return _round_up(hidden, BLOCK) if self.blocks else hidden

    def payload_bytes(self, hidden: int, dtype: torch.dtype | None = None) -> int:
        """Bytes of the elements alone. `dtype` is only needed and used for `none`."""
        _check_hidden(hidden)
        if not self.quantized:
            if dtype is None:
                raise WireFormatError("the record of wire format 'none' depends on the tensor's dtype: pass dtype")
            if not hasattr(dtype, "itemsize"):
                raise WireFormatError(f"dtype is {dtype!r}; a torch.dtype is needed")
            return hidden * dtype.itemsize
        return -(-self.columns(hidden) * FORMATS[self.name].bits // 8)

    def scales_offset(self, hidden: int, dtype: torch.dtype | None = None) -> int:
        """Where the scales begin in a record, in bytes."""
        return _round_up(self.payload_bytes(hidden, dtype), _SECTION_ALIGNMENT)

    def row_bytes(self, hidden: int, dtype: torch.dtype | None = None) -> int:
        """Bytes of one whole record, padding included."""
        if self.quantized:
            _check_hidden(hidden)
            return _quantized_row_bytes(self, hidden)
        return _round_up(self.scales_offset(hidden, dtype), self.alignment)


#: Rows travel as they are.
EXACT = WireFormat("none")


@dataclass(frozen=True)
class Traffic:
    """What one leg sends from a rank to other ranks; rows that stay are not counted.

    Attributes:
        rows: records sent.
        logical_bytes: what the rows hold in their own dtype.
        wire_bytes: what is sent instead: records, and on a round's dispatch leg expert ids and router weights too.
    """

    rows: int
    logical_bytes: int
    wire_bytes: int

    @classmethod
    def of(
        cls, counts: Sequence[int], rank: int, hidden: int, dtype: torch.dtype, record_bytes: int, beside: int = 0
    ) -> Traffic:
        """Of a rank with `counts[peer]` rows of `hidden` elements for each peer.

        Args:
            record_bytes: what travels of each row: a format's `row_bytes`, and what is sent behind it.
            beside: bytes beside all records.

        >>> import torch
        >>> wire = WireFormat.parse("int8")
        >>> Traffic.of([3, 1], 0, 256, torch.bfloat16, wire.row_bytes(256))
        Traffic(rows=1, logical_bytes=512, wire_bytes=288)
        """
        rows = sum(counts) - counts[rank]
        return cls(rows, rows * hidden * dtype.itemsize, rows * record_bytes + beside)

    def __add__(self, other: Traffic) -> Traffic:
        """Both together."""
        return Traffic(
            self.rows + other.rows, self.logical_bytes + other.logical_bytes, self.wire_bytes + other.wire_bytes
        )


def default_wire(columns: int) -> str:
    """The format of rows of so many elements where nobody names one.

    >>> default_wire(7168), default_wire(100)
    ('int8+h64', 'int8')
    """
    return _DEFAULT_OF_PARTIAL_BLOCKS if columns % BLOCK else _DEFAULT


@lru_cache(maxsize=1024)
def _quantized_row_bytes(wire: WireFormat, hidden: int) -> int:
    scales = _round_up(wire.num_groups(hidden) * wire.scale_bytes, _SECTION_ALIGNMENT)
    return _round_up(wire.scales_offset(hidden) + scales, wire.alignment)


def _check_hidden(hidden: int) -> None:
    if isinstance(hidden, bool) or not isinstance(hidden, int) or hidden < 1:
        raise WireFormatError(f"a row of {hidden!r} elements cannot be put on the wire; hidden must be at least 1")
