"""One round of expert parallelism: tokens that arrived for this rank's experts, between dispatch and combine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from thinwire.errors import CapacityError
from thinwire.moe.plan import ArrivalPlan, SendPlan

if TYPE_CHECKING:
    from thinwire.moe.parallel import ExpertParallel

__all__ = ["Dispatched", "Traffic"]


@dataclass(frozen=True)
class Traffic:
    """What one leg of a round sends from this rank to other ranks; rows that stay are not counted.

    Attributes:
        rows: records sent.
        logical_bytes: what the rows hold in their own dtype.
        wire_bytes: what is sent instead: records, and with them the expert ids and router weights on the dispatch leg.
    """

    rows: int
    logical_bytes: int
    wire_bytes: int


class Dispatched:
    """Tokens that arrived for this rank's experts: one round, from `dispatch` to `combine`.

    Attributes:
        rows: uint8 [records, row_bytes], the records as they arrived, by source rank, then token.
        index: int64 [entries], the record of each expert-sorted row: by expert, then source rank, then token.
        expert_counts: int64 [local experts], rows of each expert, without padding.
        expert_offsets: int64 [local experts + 1], where each expert's rows begin in `tokens`, with padding to `align`.
        lane: the lane of the round.
    """

    def __init__(
        self,
        ep: ExpertParallel,
        lane: int,
        dtype: torch.dtype,
        sends: SendPlan,
        recv_counts: list[int],
        rows: torch.Tensor,
        arrival: ArrivalPlan,
    ) -> None:
        self._ep = ep
        self._dtype = dtype
        self._sends = sends
        self._recv_counts = recv_counts
        self._arrival = arrival
        self._tokens: torch.Tensor | None = None
        self._capacity: int | None = None
        self.lane = lane
        self.rows = rows
        self.index = arrival.index
        self.expert_counts = arrival.expert_counts
        self.expert_offsets = arrival.expert_offsets

    @property
    def tokens(self) -> torch.Tensor:
        """The experts' input: [expert_offsets[-1], hidden] in x's dtype, expert-sorted, padding rows zero.

        Raises:
            LaneError: the round is over.
        """
        self._ep._require_open(self)
        if self._tokens is None:
            self._tokens = self._gather(self._arrival.num_rows)
        return self._tokens

    def gather(self, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts' input in a fixed shape.

        Args:
            capacity: rows of the result. Rows past it are dropped: they add nothing to `combine`.

        Returns:
            tokens [capacity, hidden], zero past the last row, and whether rows were dropped: bool [], on the device.

        Raises:
            LaneError: the round is over.
            CapacityError: a negative capacity.
        """
        self._ep._require_open(self)
        if capacity < 0:
            raise CapacityError(f"capacity {capacity} is negative")
        self._capacity = capacity
        overflow = torch.tensor(self._arrival.num_rows > capacity, device=self.rows.device)
        return self._gather(capacity), overflow

    def _gather(self, capacity: int) -> torch.Tensor:
        arrival = self._arrival
        tokens = torch.zeros(capacity, self._ep.hidden_size, dtype=self._dtype, device=self.rows.device)
        fits = arrival.rows < capacity
        unpack_rows = self._ep._dispatch_backend.unpack_rows
        unpack_rows(self.rows, self._ep.wire, arrival.index[fits], arrival.rows[fits], tokens)
        return tokens

    def abandon(self) -> None:
        """Ends the round as a `combine` to which no expert of this rank adds anything; the result is thrown away.

        Peers may combine meanwhile: they get zeros for what they sent here.

        Raises:
            LaneError: the round is over.
            PeerTimeout: a peer did not answer in time.
        """
        self._ep._require_open(self)
        nothing = torch.empty(0, self._ep.hidden_size, dtype=self._dtype, device=self.rows.device)
        self._ep._send_home(nothing, self, None)

    @property
    def dispatch_traffic(self) -> Traffic:
        """What this rank sent to dispatch its tokens."""
        sent = sum(self._sends.counts) - self._sends.counts[self._ep.comm.rank]
        return self._ep._traffic(sent, self._dtype, self._ep._message_bytes(self._dtype))

    @property
    def combine_traffic(self) -> Traffic:
        """What this rank sends back for the tokens that it received."""
        sent = sum(self._recv_counts) - self._recv_counts[self._ep.comm.rank]
        return self._ep._traffic(sent, self._dtype, self._ep.combine_wire.row_bytes(self._ep.hidden_size, self._dtype))
