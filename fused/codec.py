"""Quantise and dequantise, for users who move the bytes themselves."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from thinwire.comm.launch.bootstrap import current_cpu_share
from thinwire.comm.tensors import is_int, require_dense
from thinwire.compiler import opaque
from thinwire.errors import ArgumentError, WireFormatError
from thinwire.fused.backend import Backend, select_backend
from thinwire.wire import BLOCK, WIRE_VARIABLE, WireFormat, default_wire

#: What a quantised wire carries.
FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_SHARED_BYTES = 8 << 20  # of the fewest rows that are worth a second thread


@dataclass(frozen=True)
class WireRows:
    """Rows as they travel.

    Attributes:
        records: uint8 [rows, row_bytes], one record a row.
        wire: their format.
        shape: of the tensor they came from; its last dimension is one row.
        dtype: of the tensor they came from.

    >>> rows = WireRows.zeros((4, 256), "int8")  # for who has int8 rows and scales of their own
    >>> rows.payload[:], rows.scales[:] = 127, 0.25
    >>> float(dequantize(rows).max())
    31.75
    """

    records: torch.Tensor
    wire: WireFormat
    shape: torch.Size
    dtype: torch.dtype

    @classmethod
    def zeros(
        cls, shape: Sequence[int], wire: str | WireFormat | None = None, device: str | torch.device | None = None
    ) -> WireRows:
        """Rows of zeros, to be filled: see `payload` and `scales`; `dtype` is float32.

        Args:
            shape: [..., hidden].
            wire: a quantised format; None means THINWIRE_WIRE, else int8+h64, or int8 where a row is no multiple of 64.
            device: where they lie; None means torch's default.

        Raises:
            WireFormatError: an unknown format, or `none`, or a shape that it cannot carry.
        """
        shape = torch.Size(shape)
        wire = resolve_wire(wire, shape[-1] if shape else BLOCK)
        if not wire.quantized or not shape:
            raise WireFormatError(f"rows of shape {list(shape)} in {str(wire)!r}; accepted: [..., hidden], quantised")
        size = math.prod(shape[:-1]), wire.row_bytes(shape[-1])
        return cls(torch.zeros(size, dtype=torch.uint8, device=device), wire, shape, torch.float32)

    @property
    def payload(self) -> torch.Tensor:
        """int8 [rows, hidden], a view; element k is ``payload[r, k] * scales[r, k // group]``.

        With ``+h64`` that is an element of the rotated row, divided by 64, and there are as many as travel.

        Raises:
            WireFormatError: rows that are not int8.
        """
        return int8_parts(self.records, self.wire, self.shape[-1])[0]

    @property
    def scales(self) -> torch.Tensor:
        """[rows, scales of a row], a view: bfloat16, or float32 with int8:row. Raises as `payload`."""
        return int8_parts(self.records, self.wire, self.shape[-1])[1]


def int8_parts(records: torch.Tensor, wire: WireFormat, hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Payload, int8, and scales of records of `hidden` elements: views.

    Raises:
        WireFormatError: they are not int8, or lie so that no view has scales.
    """
    if wire.name != "int8":
        raise WireFormatError(f"rows in {str(wire)!r} are no int8 rows; accepted: int8, int8:N, int8:row, also +h64")
    size, strides = wire.scale_bytes, records.stride()
    if strides[1:] != (1,) or strides[0] % size or records.storage_offset() % size:
        raise WireFormatError(
            f"records have strides {strides}; accepted: [{size} times a number, 1], as clone() has them"
        )
    start = wire.scales_offset(hidden)
    scales = records[:, start : start + wire.num_groups(hidden) * wire.scale_bytes]
    payload = records[:, : wire.columns(hidden)].view(torch.int8)
    return payload, scales.view(torch.float32 if wire.row_scale else torch.bfloat16)


def resolve_wire(wire: str | WireFormat | None, columns: int = BLOCK) -> WireFormat:
    """The format of a call for rows of `columns` elements: its argument, else THINWIRE_WIRE, else a default.

    Raises:
        WireFormatError: for a name that is not a format.
    """
    named = named_wire(wire)
    if isinstance(named, WireFormat):
        return named
    if named is None:
        named = default_wire(columns)
    # Of what is no text, WireFormat says what is accepted.
    return _parse(named) if isinstance(named, str) else WireFormat.parse(named)


def wire_of_rows(wire: str | WireFormat | None, x: torch.Tensor) -> WireFormat:
    """`resolve_wire` for x [rows, ...]; one of one dimension travels in rows of whole blocks."""
    return resolve_wire(wire, x.shape[1:].numel() if x.dim() > 1 else BLOCK)


def named_wire(wire: str | WireFormat | None) -> str | WireFormat | None:
    """What was passed; for None the name in THINWIRE_WIRE, whatever it names, if there is one."""
    return wire if wire is not None else os.environ.get(WIRE_VARIABLE) or None


@functools.lru_cache(maxsize=64)
def _parse(name: str) -> WireFormat:
    return WireFormat.parse(name)


def require_float(x: torch.Tensor, wire: WireFormat, what: str) -> None:
    """Raises WireFormatError unless a quantised wire can carry x."""
    if wire.quantized and x.dtype not in FLOAT_DTYPES:
        raise WireFormatError(
            f"{what}: a {x.dtype} tensor cannot travel as {wire}, which takes float32, float16 and bfloat16; "
            'pass wire="none" to move it exactly'
        )


@opaque
def quantize(x: torch.Tensor, wire: str | WireFormat | None = None) -> WireRows:
    """Quantises the rows of a tensor into wire records. Gradients do not pass through.

    Args:
        x: float32, float16 or bfloat16 [..., hidden].
        wire: the format; None means THINWIRE_WIRE, else int8+h64, or int8 where a row is no multiple of 64.

    Returns:
        WireRows with one record for every row of x.

    Raises:
        WireFormatError: for an unknown format, or a dtype or shape it cannot carry.
        ArgumentError: x is no plain dense tensor.
        TransportUnavailable: there are no kernels for x's device.

    >>> rows = quantize(torch.ones(2, 256), "int8")
    >>> rows.records.shape, float((dequantize(rows) - 1).abs().max()) < 0.004
    (torch.Size([2, 288]), True)
    """
    require_dense("x", x)
    wire = resolve_wire(wire, x.shape[-1] if x.dim() else BLOCK)
    require_float(x, wire, "quantize")
    if x.dtype not in FLOAT_DTYPES or x.dim() < 1:
        raise WireFormatError(
            f"quantize takes float32, float16 or bfloat16 [..., hidden]; got {x.dtype} {list(x.shape)}"
        )
    row_bytes = wire.row_bytes(x.shape[-1], x.dtype)
    rows = x.detach().resolve_neg().reshape(math.prod(x.shape[:-1]), x.shape[-1]).contiguous()
    records = torch.empty(rows.shape[0], row_bytes, dtype=torch.uint8, device=x.device)
    _backend(rows, wire).pack_rows(rows, wire, None, records)
    return WireRows(records, wire, x.shape, x.dtype)


@opaque
def dequantize(rows: WireRows, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The tensor that wire records stand for.

    Args:
        rows: what `quantize` returned.
        dtype: float32, float16 or bfloat16; None means the original's. `none` keeps the original's.

    Returns:
        A tensor of the original's shape, rounded once, saturating at the dtype's largest finite value.

    Raises:
        WireFormatError: for another dtype, or records that are not those of such a tensor.
        ArgumentError: rows is no WireRows, or its records no plain dense tensor.
        TransportUnavailable: there are no kernels for the records' device.
    """
    if not isinstance(rows, WireRows):
        raise ArgumentError(f"rows is a {type(rows).__name__}, expected the WireRows that quantize returned")
    records = readable_records(rows)
    dtype = rows.dtype if dtype is None else dtype
    if not isinstance(dtype, torch.dtype) or dtype not in (FLOAT_DTYPES if rows.wire.quantized else (rows.dtype,)):
        accepted = "float32, float16 or bfloat16" if rows.wire.quantized else f"{rows.dtype} (the wire is 'none')"
        raise WireFormatError(f"dequantize to {dtype} is not possible; accepted: {accepted}")
    out = torch.empty(records.shape[0], rows.shape[-1], dtype=dtype, device=records.device)
    _backend(out, rows.wire).unpack_rows(records, rows.wire, None, None, out)
    return out.view(tuple(rows.shape))


def _backend(rows: torch.Tensor, wire: WireFormat) -> Backend:
    """The kernels for rows that are packed or unpacked."""
    shared = rows.is_cpu and rows.nbytes >= _SHARED_BYTES
    return select_backend(rows.device, wire, current_cpu_share().threads if shared else 1)


def readable_records(rows: WireRows) -> torch.Tensor:
    """Its records, or a copy of them where they do not lie as kernels read.

    Raises:
        WireFormatError: they are not what rows say of themselves.
        ArgumentError: they are no plain dense tensor.
    """
    require_dense("rows.records", rows.records)
    sizes = rows.shape if isinstance(rows.shape, tuple | list) else ()
    known_dtype = isinstance(rows.dtype, torch.dtype) and rows.dtype in FLOAT_DTYPES
    known_sizes = len(sizes) > 0 and all(is_int(size, 0, 2**63 - 1) for size in sizes)
    if not known_dtype or not known_sizes or not isinstance(rows.wire, WireFormat):
        raise WireFormatError(
            f"rows say of themselves shape {rows.shape!r}, dtype {rows.dtype!r} and wire {rows.wire!r}; expected [..., "
            "hidden] of float32, float16 or bfloat16, and a WireFormat"
        )
    records, count = rows.records, math.prod(rows.shape[:-1])
    row_bytes = rows.wire.row_bytes(rows.shape[-1], rows.dtype)
    if records.dtype != torch.uint8 or records.shape != (count, row_bytes):
        raise WireFormatError(
            f"records are {records.dtype} {list(records.shape)}; rows of shape {list(rows.shape)} in {rows.wire} are "
            f"torch.uint8 [{count}, {row_bytes}]"
        )
    # Kernels read 16 bytes at a time.
    if records.stride(1) != 1 or records.stride(0) % 16 or records.data_ptr() % 16:
        records = records.clone(memory_format=torch.contiguous_format)
    return records
