"""One round of expert parallelism: tokens that arrived for this rank's experts, between dispatch and combine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from thinwire.errors import CapacityError
from thinwire.moe.rounds import Round, Traffic

if TYPE_CHECKING:
    from thinwire.moe.parallel import ExpertParallel

__all__ = ["Dispatched", "Traffic"]


class Dispatched:
    """Tokens that arrived for this rank's experts: one round, from `dispatch` to `combine`.

    On the direct transport all tensors are the lane's own: the next dispatch on the lane overwrites them, their shapes
    never change, and reading them from kernels needs no synchronisation with the host.

    Attributes:
        rows: uint8 [records, row_bytes], the records as they arrived. Staged: by source rank, then token. Direct: one
            for every token that could come, `source rank * max_tokens + token`; `index` says which came.
        index: int64 [rows of `tokens`], the record of each row, by expert, then source rank, then token; -1 where the
            row is padding. On the direct transport there are as many entries as could ever be needed, -1 at the end.
        expert_counts: int64 [local experts], rows of each expert, without padding.
        expert_offsets: int64 [local experts + 1], where each expert's rows begin in `tokens`, with padding to `align`.
        lane: the lane of the round.
    """

    def __init__(self, ep: ExpertParallel, lane: int, round_: Round) -> None:
        self._ep = ep
        self._round = round_
        self._tokens: torch.Tensor | None = None
        self._capacity: int | None = None
        self._num_rows: int | None = None
        self.lane = lane
        self.rows = round_.rows
        self.index = round_.index
        self.expert_counts = round_.expert_counts
        self.expert_offsets = round_.expert_offsets

    @property
    def tokens(self) -> torch.Tensor:
        """The experts' input: [expert_offsets[-1], hidden] in x's dtype, expert-sorted, padding rows zero.

        How many rows there are must be known on the host for that, so on CUDA this waits for the device; `gather` does
        not.

        Raises:
            LaneError: the round is over.
            PeerTimeout: on CUDA, a peer did not answer the dispatch in time.
        """
        self._ep._require_open(self)
        if self._tokens is None:
            self._num_rows = self._round.num_rows()
            self._tokens, _ = self._round.gather(self._num_rows)
        return self._tokens

    def gather(self, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts' input in a fixed shape. Does not wait for the device.

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
        return self._round.gather(capacity)

    def abandon(self) -> None:
        """Ends the round as a `combine` to which no expert of this rank adds anything; the result is thrown away.

        Peers may combine meanwhile: what they sent here adds nothing.

        Raises:
            LaneError: the round is over.
            PeerTimeout: a peer did not answer in time.
        """
        self._ep._require_open(self)
        self._ep._open_rounds[self.lane] = None
        self._round.abandon()

    @property
    def dispatch_traffic(self) -> Traffic:
        """What this rank sent to dispatch its tokens. Waits for the device.

        Raises:
            LaneError: on the direct transport, when the lane has gone on to a later round.
        """
        return self._round.dispatch_traffic()

    @property
    def combine_traffic(self) -> Traffic:
        """What this rank sends back for the tokens that it received. Waits for the device.

        Raises:
            LaneError: on the direct transport, when the lane has gone on to a later round.
        """
        return self._round.combine_traffic()
