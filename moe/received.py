"""What experts see of a round: rows sorted by expert, or one row a record, with weights, experts and sources of either.

A *record* is a token that came from one rank, whatever number of this rank's experts it is for. Expert-major, it is a
row for each of them, `tokens`; token-major, it is one row, `records`. Both have a compact form, the same on every
transport, whose size the host must know, and a fixed one, which needs no synchronisation and may be captured in a CUDA
graph. A lane of the direct transport has a place for every token that could come, and most are empty. The fixed form of
records is not those places, but what came, in order, and zeros behind it: so experts in fixed shapes choose how many
rows they pay for. Kernels that read records in place have `rows` and `index`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch

from thinwire.comm.tensors import is_int
from thinwire.compiler import opaque
from thinwire.errors import CapacityError
from thinwire.fused.counts import new_rows
from thinwire.moe.gradients import Link, put_rows


class Arrived(NamedTuple):
    """What a transport knows of the records, in the order of `Dispatched.rows`."""

    positions: torch.Tensor  # int64 [records, top_k], their rows in ascending expert id, -1 behind them
    weights: torch.Tensor  # of the config's weight_dtype, [records, top_k], 0 where there is no row
    source: torch.Tensor  # int64 [records, 2], source rank, and the token's number there


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


class Received(ABC):
    """The base of `thinwire.moe.dispatched.Dispatched`, which says what its tensors are."""

    rows: torch.Tensor
    index: torch.Tensor
    expert_counts: torch.Tensor
    expert_offsets: torch.Tensor

    # Of a round as it begins; on the class, as setting each would be a good part of making one.
    _tokens: torch.Tensor | None = None
    _records: torch.Tensor | None = None
    _num_rows: int | None = None  # of `tokens`, once the host knows
    _num_records: int | None = None
    _capacity: int | None = None  # of what was gathered in a fixed shape
    _record_capacity: int | None = None
    _known: Arrived | None = None
    _link: Link | None = None  # to the graph, of a round that wants gradients

    # -----------------------------------------------------------------------------------------------------------------
    # By expert

    @property
    @opaque
    def tokens(self) -> torch.Tensor:
        """The experts' input: [expert_offsets[-1], hidden] in x's dtype, expert-sorted, padding rows zero.

        They have a gradient where x wants one.

        How many rows there are must be known on the host for that, so on CUDA this waits for the device; `gather` does
        not.

        Raises:
            LaneError: the round is over.
            PeerTimeout: on CUDA, a peer did not answer the dispatch in time.
        """
        self._require_open()
        if self._tokens is None or (self._link is not None and self._link.lacks_gradient(self._tokens)):
            self._num_rows = self._read_num_rows()
            self._tokens, _ = self._gather_linked(self._num_rows)
        return self._tokens

    @opaque
    def gather(self, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts' input in a fixed shape. Does not wait for the device.

        Args:
            capacity: rows of the result. Rows past it are dropped: they add nothing to `combine`.

        Returns:
            tokens [capacity, hidden], zero past the last row, and whether rows were dropped: bool [], on the device.

        Raises:
            LaneError: the round is over.
            CapacityError: a negative capacity, or more rows than there is memory for.
        """
        self._require_open()
        _check_capacity(capacity)
        gathered = self._gather_linked(capacity)
        self._capacity = capacity
        return gathered

    @property
    @opaque
    def weights(self) -> torch.Tensor:
        """The router weight of each row of `tokens`: float32 [rows], 0 where it is padding.

        What an expert named twice was given is added up. They have a gradient where topk_weights wants one; `combine`
        applies them itself, and theirs comes beside that. Waits and raises as `tokens`.
        """
        return self._routing().weights

    @property
    @opaque
    def expert_ids(self) -> torch.Tensor:
        """The expert of each row of `tokens`: int64 [rows], counted from this rank's first, -1 where it is padding.

        So they index what a rank has of its experts; `ep.local_experts.start` more is the global id. Waits and raises
        as `tokens`.
        """
        return self._routing().expert_ids

    @property
    @opaque
    def source(self) -> torch.Tensor:
        """Where each row of `tokens` came from: int64 [rows, 2], rank and number of the token there, -1 for padding.

        On the staged transport the number is what that rank says; it is not compared with anything. Waits and raises as
        `tokens`.
        """
        return self._routing().source

    @opaque
    def gather_routing(self, capacity: int) -> RowRouting:
        """`weights`, `expert_ids` and `source` of the rows that `gather(capacity)` returns. Does not wait.

        Raises:
            LaneError: the round is over.
            CapacityError: a negative capacity, or more rows than there is memory for.
        """
        self._require_open()
        _check_capacity(capacity)
        arrived, num_records = self._arrived(), self.rows.shape[0]
        index = _padded(self.index[:capacity], capacity, -1)
        # Users see the index, and may have written into it.
        there = (index >= 0) & (index < num_records)
        # -1 is what stands behind the last.
        source = _padded(arrived.source, num_records + 1, -1)[torch.where(there, index, num_records)]
        rows = torch.arange(capacity, device=index.device)
        experts = torch.where(there, self._experts_of(rows), -1)
        places = arrived.positions.flatten()
        weights = put_rows(arrived.weights.flatten(), torch.where(places < capacity, places, -1), capacity)
        if self._link is not None:
            weights = self._link.weights(weights, (rows, capacity))
        return RowRouting(weights, experts, source)

    def _routing(self) -> RowRouting:
        self._require_open()
        if self._num_rows is None:
            self._num_rows = self._read_num_rows()
        return self.gather_routing(self._num_rows)

    def _experts_of(self, rows: torch.Tensor) -> torch.Tensor:
        """Whose rows these are: the last expert that begins at or before a row."""
        return torch.searchsorted(self.expert_offsets, rows, right=True) - 1

    def _gather_linked(self, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._gather(capacity) if self._link is None else self._link.gather(lambda: self._gather(capacity))

    # -----------------------------------------------------------------------------------------------------------------
    # By token

    @property
    @opaque
    def records(self) -> torch.Tensor:
        """The tokens that came, one row a record: [records, hidden] in x's dtype, by source rank, then token.

        The same on both transports. They have a gradient where x wants one. `combine(..., weighted=True)` takes a row
        for each of them. How many there are must be known on the host, so on CUDA this waits for the device;
        `gather_records` does not.

        Raises:
            LaneError: the round is over.
            PeerTimeout: on CUDA, a peer did not answer the dispatch in time.
        """
        self._require_open()
        if self._records is None or (self._link is not None and self._link.lacks_gradient(self._records)):
            self._records = self._gather_records(self._chosen(self._read_num_records()))
        return self._records

    @property
    @opaque
    def record_ids(self) -> torch.Tensor:
        """The experts of each of `records` on this rank: int64 [records, top_k], ascending, -1 behind them.

        They are counted from this rank's first, as `expert_ids`. An expert of another rank is none of them. Waits and
        raises as `records`.
        """
        return self._ids_of(self._all_records())

    @property
    @opaque
    def record_weights(self) -> torch.Tensor:
        """Their router weights: float32 [records, top_k], 0 where there is no expert.

        They have a gradient where topk_weights wants one. Waits and raises as `records`.
        """
        return self._weights_of(self._all_records())

    @property
    @opaque
    def record_source(self) -> torch.Tensor:
        """Where each of `records` came from: int64 [records, 2], rank and number of the token there.

        Waits and raises as `records`.
        """
        return self._take(self._arrived().source, self._all_records(), -1)

    @opaque
    def gather_records(self, capacity: int) -> Records:
        """The records in a fixed shape, and all that is known of them. Does not wait for the device.

        Args:
            capacity: rows of the result. Records past it are dropped: they add nothing to `combine`. On the direct
                transport no more than `rows.shape[0]` ever come.

        Raises:
            LaneError: the round is over.
            CapacityError: a negative capacity, or more rows than there is memory for.
        """
        self._require_open()
        _check_capacity(capacity)
        chosen = self._chosen(capacity)
        tokens = self._gather_records(chosen)
        overflow = self._came().sum() > capacity
        source = self._take(self._arrived().source, chosen, -1)
        self._record_capacity = capacity
        return Records(tokens, self._ids_of(chosen), self._weights_of(chosen), source, overflow)

    def _came(self) -> torch.Tensor:
        """Which of `rows` are there, and for experts of this rank: bool [records]."""
        return self._arrived().positions[:, 0] >= 0

    def _row_of_each_record(self) -> torch.Tensor:
        """Its row among `records`, int64 [records, 1]; -1 where it did not come."""
        came = self._came()
        return torch.where(came, came.cumsum(0) - 1, -1).unsqueeze(1)

    def _read_num_records(self) -> int:
        """How many came, on the host."""
        if self._num_records is None:
            self._num_rows = self._read_num_rows()  # waits, and raises what kernels reported
            self._num_records = int(self._came().sum())
        return self._num_records

    def _all_records(self) -> torch.Tensor:
        self._require_open()
        return self._chosen(self._read_num_records())

    def _chosen(self, capacity: int) -> torch.Tensor:
        """The first so many that came, in order, and -1 behind them: int64 [capacity]."""
        came = self._came()
        most = came.shape[0]
        numbers = torch.arange(most, device=came.device)
        chosen = torch.where(came, numbers, most).sort().values[:capacity]
        return _padded(torch.where(chosen < most, chosen, -1), capacity, -1)

    def _take(self, values: torch.Tensor, chosen: torch.Tensor, default: int) -> torch.Tensor:
        return _padded(values, values.shape[0] + 1, default)[chosen]  # -1 is what stands behind the last

    def _positions_of(self, chosen: torch.Tensor) -> torch.Tensor:
        return self._take(self._arrived().positions, chosen, -1)

    def _ids_of(self, chosen: torch.Tensor) -> torch.Tensor:
        positions = self._positions_of(chosen)
        return torch.where(positions >= 0, self._experts_of(positions), -1)

    def _weights_of(self, chosen: torch.Tensor) -> torch.Tensor:
        weights = self._take(self._arrived().weights, chosen, 0)
        if self._link is None:
            return weights
        return self._link.weights(weights, (self._positions_of(chosen), self._most_rows))

    def _gather_records(self, chosen: torch.Tensor) -> torch.Tensor:
        if self._link is None:
            return self._unpack(chosen)
        overflow = torch.zeros((), dtype=torch.bool, device=chosen.device)
        return self._link.gather(lambda: (self._unpack(chosen), overflow), self._places_of(chosen))[0]

    def _places_of(self, chosen: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Gradients travel by row of an expert: a record's is that of its first, and the others add nothing to it."""
        return self._positions_of(chosen)[:, 0], self._most_rows

    @property
    def _most_rows(self) -> int:
        return self.index.shape[0] if self._num_rows is None else self._num_rows

    # -----------------------------------------------------------------------------------------------------------------
    # What a transport gives

    def _arrived(self) -> Arrived:
        if self._known is None:
            self._known = self._read_arrived()
        return self._known

    @abstractmethod
    def _require_open(self) -> None:
        """Raises LaneError if the round is over."""

    @abstractmethod
    def _read_num_rows(self) -> int:
        """Rows of the experts' input with padding, on the host."""

    @abstractmethod
    def _read_arrived(self) -> Arrived:
        """What it knows of the records. Does not wait for the device."""

    @abstractmethod
    def _gather(self, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What `gather` returns."""

    @abstractmethod
    def _unpack(self, chosen: torch.Tensor) -> torch.Tensor:
        """Records by number, int64 [n], dequantised: [n, hidden] in x's dtype, zero for -1."""


def _check_capacity(capacity: object) -> None:
    if not is_int(capacity, 0, 2**63 - 1):
        negative = " is negative" if isinstance(capacity, int) and capacity < 0 else ""
        raise CapacityError(f"capacity {capacity!r}{negative}; an int of at least 0 is needed")


def _padded(values: torch.Tensor, length: int, value: int) -> torch.Tensor:
    """Values [n, ...] with so many more behind them that there are `length`, at least n."""
    padded = new_rows(values, length, values.shape[1:])
    padded[: len(values)] = values
    padded[len(values) :] = value
    return padded
