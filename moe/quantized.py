"""What arrived, as it arrived: int8 rows and their scales, for experts that compute in int8."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from thinwire.errors import WireFormatError
from thinwire.wire import WireFormat


@dataclass(frozen=True)
class QuantizedRows:
    """Received records of int8, in place. Element k of record r is ``payload[r, k] * scales[r, k // group]``.

    Only records that `index` names came in this round; what others hold is of no meaning.

    Attributes:
        payload: int8 [records, hidden], a view of `records`.
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
                f"rows that arrived in {str(wire)!r} are no int8 rows; accepted: int8, int8:N, int8:row. d.tokens and "
                "d.gather give rows of every wire format"
            )
        start = wire.scales_offset(hidden)
        scales = records[:, start : start + wire.num_groups(hidden) * wire.scale_bytes]
        return cls(
            payload=records[:, :hidden].view(torch.int8),
            scales=scales.view(torch.float32 if wire.row_scale else torch.bfloat16).float(),
            group=wire.group or hidden,
            index=index,
            records=records,
            wire=wire,
        )
