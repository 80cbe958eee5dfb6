"""What arrived in a round, as tensors: records, in int8 as they lie, and the rows of experts made of them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from thinwire.comm.resources import available_bytes
from thinwire.comm.tensors import is_int
from thinwire.errors import CapacityError, WireFormatError
from thinwire.fused.codec import int8_parts
from thinwire.fused.counts import new_rows
from thinwire.moe.gradients import put_rows
from thinwire.wire import WireFormat

_MUCH = 1 << 28  # bytes, below which nobody asks what is free


class RowRouting(NamedTuple):
    """Of rows sorted by expert: what `Dispatched.weights`, `.expert_ids` and `.source` are, in a fixed shape."""

    weights: torch.Tensor
    expert_ids: torch.Tensor
    source: torch.Tensor


class Records(NamedTuple):
    """Records in a fixed shape: those that came, by source rank, then token, and behind them rows of nothing.

    Attributes:
        tokens: [capacity, hidden] in x's dtype, zero in a row of nothing.
        expert_ids, weights, source: as `Dispatched.record_ids`, `.record_weights` and `.record_source`; -1, 0 and -1 in
            a row of nothing.
        overflow: bool [], on the device: whether records were dropped.
    """

    tokens: torch.Tensor
    expert_ids: torch.Tensor
    weights: torch.Tensor
    source: torch.Tensor
    overflow: torch.Tensor


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


@dataclass(frozen=True)
class Arrived:
    """What a transport knows of the records, in the order of `Dispatched.rows`. On a GPU each operation is a launch."""

    positions: torch.Tensor  # int64 [records, top_k], their rows in ascending expert id, -1 behind them
    weights: torch.Tensor  # of the config's weight_dtype, [records, top_k], 0 where there is no row
    source: torch.Tensor  # int64 [records, 2], source rank, and the token's number there

    @functools.cached_property
    def came(self) -> torch.Tensor:
        """Which records are there, and for experts of this rank: bool [records]."""
        return self.positions[:, 0] >= 0

    @functools.cached_property
    def number(self) -> torch.Tensor:
        """How many of them came: int64 []."""
        return self.came.sum()

    @functools.cached_property
    def rows(self) -> torch.Tensor:
        """The row of each among the records that came, int64 [records]; -1 where it did not."""
        return self.came.cumsum(0) * self.came - 1

    def first(self, capacity: int) -> torch.Tensor:
        """The numbers of the first so many that came, in order, and -1 behind them: int64 [capacity]."""
        chosen = new_rows(self.rows, capacity + 1, ()).fill_(-1)
        # Row -1 is the last, too, which is for those that have no place.
        chosen[self.rows.clamp(max=capacity)] = torch.arange(len(self.rows), device=chosen.device)
        return chosen[:capacity]

    def at(self, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Positions, weights and source of records by number, and -1, 0 and -1 for -1."""
        return take(self.positions, chosen, -1), take(self.weights, chosen, 0), take(self.source, chosen, -1)

    def of_rows(self, index: torch.Tensor, offsets: torch.Tensor, capacity: int) -> RowRouting:
        """Of the first so many rows, by `Dispatched.index` and `.expert_offsets`."""
        index = _padded(index[:capacity], capacity, -1)
        # Users see the index, and may have written into it.
        there = (index >= 0) & (index < len(self.source))
        experts = torch.where(there, experts_of(torch.arange(capacity, device=index.device), offsets), -1)
        places = self.positions.flatten()
        weights = put_rows(self.weights.flatten(), torch.where(places < capacity, places, -1), capacity)
        return RowRouting(weights, experts, take(self.source, torch.where(there, index, -1), -1))


def experts_of(rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Whose rows these are: the last expert that begins at or before a row, and -1 of row -1."""
    return torch.searchsorted(offsets, rows, right=True) - 1


def check_capacity(capacity: Any, row_bytes: int) -> None:
    """Raises CapacityError for what is no number of rows, or of more than there is main memory for, if they lie there.

    Nothing else would: Linux hands out more memory than there is, and ends who uses it.
    """
    if not is_int(capacity, 0, 2**63 - 1):
        negative = " is negative" if isinstance(capacity, int) and capacity < 0 else ""
        raise CapacityError(f"capacity {capacity!r}{negative}; an int of at least 0 is needed")
    if capacity * row_bytes > _MUCH and capacity * row_bytes > (available := available_bytes()):
        raise CapacityError(
            f"capacity {capacity}, of {row_bytes} bytes a row, cannot be allocated: {available} are free"
        )


def _padded(values: torch.Tensor, length: int, value: int) -> torch.Tensor:
    """Values [n, ...] with so many more behind them that there are `length`, at least n."""
    padded = new_rows(values, length, values.shape[1:])
    padded[: len(values)] = values
    padded[len(values) :] = value
    return padded


def take(values: torch.Tensor, chosen: torch.Tensor, none: int) -> torch.Tensor:
    """Values [n, ...] by number; for -1 what stands for none."""
    return _padded(values, len(values) + 1, none)[chosen]  # -1 is what stands behind the last
