"""Rows of experts in int8, with their scales: what arrived, as it arrived, and what goes home as it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from thinwire.comm import Communicator
from thinwire.errors import ArgumentError, WireFormatError
from thinwire.fused.codec import WireRows, int8_parts, readable_records
from thinwire.wire import WireFormat


@dataclass(frozen=True)
class QuantizedRows:
    """Received records of int8, in place. Element k of record r is ``payload[r, k] * scales[r, k // group]``.

    Where the format has ``+h64``, that is an element of the rotated row, divided by 64. Only records that `index` names
    came in this round; what others hold is of no meaning.

    Attributes:
        payload: int8 [records, hidden], a view of `records`; whole blocks of 64 columns of a rotated format.
        scales: float32 [records, scales of a row]; with int8:row a view, else widened from bfloat16.
        group: columns that share a scale; the row's length with int8:row.
        index: int64, the record of each row of the experts' input, -1 where it is padding: the round's own.
        records: uint8 [records, row_bytes], payload and scales: the round's `rows`.
        wire: their format.
    """

    payload: torch.Tensor
    scales: torch.Tensor
    group: int
    index: torch.Tensor
    records: torch.Tensor
    wire: WireFormat

    @classmethod
    def of(cls, records: torch.Tensor, index: torch.Tensor, wire: WireFormat, hidden: int) -> QuantizedRows:
        """Of records of `hidden` elements.

        Raises:
            WireFormatError: they are not int8.

        >>> from thinwire.fused.codec import quantize
        >>> rows = quantize(torch.ones(1, 256), "int8")
        >>> q = QuantizedRows.of(rows.records, torch.zeros(1, dtype=torch.int64), rows.wire, 256)
        >>> q.payload[0, :2].tolist(), q.scales.shape
        ([127, 127], torch.Size([1, 2]))
        """
        if wire.name != "int8":
            raise WireFormatError(
                f"rows that arrived in {str(wire)!r} are no int8 rows; accepted: int8, int8:N, int8:row, also "
                "+h64. d.tokens and d.gather give rows of every wire format"
            )
        payload, scales = int8_parts(records, wire, hidden)
        return cls(
            payload=payload,
            scales=scales.float(),
            group=wire.group or wire.columns(hidden),
            index=index,
            records=records,
            wire=wire,
        )


def combined_records(rows: WireRows, wire: WireFormat, comm: Communicator) -> torch.Tensor:
    """Records that experts give back, as kernels read them: uint8 [rows, row_bytes].

    Raises:
        WireFormatError: another format than the combine leg's `wire`, or records that are none of it.
        ArgumentError, TransportUnavailable: as for a tensor.
    """
    if rows.wire != wire or not wire.quantized:
        accepted = f"{wire!r}" if wire.quantized else "none but float rows, as the combine wire is 'none'"
        raise WireFormatError(
            f"expert_out has rows in {rows.wire!r}, which combine does not take; accepted: {accepted}"
        )
    comm.check_device("expert_out.records", rows.records)
    return readable_records(rows)


def require_rows(expert_out: object) -> None:
    """Raises ArgumentError for what came in int8 and is no row for each of the experts' rows."""
    if isinstance(expert_out, QuantizedRows):
        raise ArgumentError(
            "expert_out is a QuantizedRows, which has a row for each record; accepted: a float tensor, or WireRows, "
            "with a row for each row of an expert"
        )
