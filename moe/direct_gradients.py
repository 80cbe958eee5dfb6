"""Backward over the direct transport: gradients have lanes of their own, beside those of forward.

A gradient takes the way of a token: ids and weights travel with it again, 8 bytes for each of a token's experts, and
the experts' ranks route anew what comes, in kernels. So a plan is what a rank dispatched, and holds nothing of its
peers'.
With the sums come the gradients of router weights, each stored at its token's home by the rank that owns the expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from thinwire.errors import LaneError
from thinwire.moe.direct import DirectRounds
from thinwire.moe.dispatched import Dispatched
from thinwire.moe.gradients import GradientPlan, Wants
from thinwire.triton_kernels.round_layout import COMBINE, DISPATCH, LEFT_OPEN, Lane


class DirectPlan(GradientPlan):
    """What a rank dispatched in a round, and the lane on which its gradients travel.

    Args:
        find_rounds: gives rounds of backward, whose lanes have the numbers of those of forward; collective at first.
        d: the round.
        topk_ids, topk_weights: what was dispatched, float32 weights; nobody else may write into them.
    """

    def __init__(
        self,
        find_rounds: Callable[[], DirectRounds],
        d: Dispatched,
        wants: Wants,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
    ) -> None:
        self.wants = wants
        self._find_rounds, self._lane, self._dtype = find_rounds, d.lane, d._dtype
        # Whether experts alone want gradients shows in backward.
        self._known_rounds = find_rounds() if wants.of_tokens else None
        self._ids, self._weights = topk_ids, topk_weights
        self._place = d._rounds.place(d.lane)
        self._tag = wants.tag(d._rounds.rounds_begun[d.lane])
        self._open: Dispatched | None = None

    @property
    def _rounds(self) -> DirectRounds:
        if self._known_rounds is None:
            self._known_rounds = self._find_rounds()
        return self._known_rounds

    def send(self, dy: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        rounds, lane = self._rounds, self._lane
        with rounds.call_backward(rounds.phases[DISPATCH], dy.shape, self._dtype, rounds.config.wire, self._place):
            tensors = rounds.lanes[lane]
            rounds.open_rounds[lane] = self._open = None
            if rounds.is_open(lane):  # rows' gradients were not asked for
                rounds.close_round(lane, LEFT_OPEN)
            self._open = rounds.begin(lane, dy, self._ids, self._weights, self._tag)()
            rounds.open_rounds[lane] = self._open
        rows, _ = self._open._gather(num_rows, True)  # they are multiplied by their weights, which are 0 in the tail
        # Row `num_rows` takes what has no place.
        places = torch.where((tensors.positions >= 0) & (tensors.positions < num_rows), tensors.positions, num_rows)
        weights = torch.zeros(num_rows + 1, device=dy.device, dtype=torch.float32)
        weights[places.view(-1)] = tensors.weights.view(-1)
        tensors.weights.fill_(1.0)  # the rows' gradients are added up as they are
        self._keep_ids(tensors)
        return rows, weights[:num_rows]

    def collect(
        self, rows: torch.Tensor | None, dots: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        rounds, lane = self._rounds, self._lane
        hidden, device = rounds.config.hidden_size, rounds.device
        memory, shape = rounds.config.comm.result_memory, (self._ids.shape[0], hidden)
        dx = memory.new_empty(self._weights, shape, self._dtype)
        if self._open is None:  # the sums are not in the graph: only the tokens are
            self.send(dx.zero_(), 0)
        if rounds.open_rounds[lane] is not self._open:
            raise LaneError(
                f"the backward of another round on lane {lane} began before that of this one was over; the rounds of a "
                "lane must be used one after the other, by nodes of one device"
            )
        tensors = rounds.lanes[lane]
        grads = None
        if tensors.layout.WEIGHT_GRADS:
            home = torch.empty(self._ids.shape, dtype=torch.float32, device=device)
            grads = self._of_experts(tensors, dots), home
        if rows is None:
            rows = dx[:0]
        with rounds.call_backward(rounds.phases[COMBINE], rows.shape, self._dtype, rounds.config.wire, self._place):
            rounds.open_rounds[lane] = self._open = None
            rounds.begin_combine(lane, rows.resolve_neg().contiguous(), self._dtype, dx, grads)()
        return dx if self.wants.rows else None, grads[1] if self.wants.weights and grads else None

    def _keep_ids(self, tensors: Lane) -> None:
        self._ids_here = _ids_of(tensors)

    def _of_experts(self, tensors: Lane, dots: torch.Tensor | None) -> Any:
        """The gradients of router weights of this rank's experts, as they travel."""
        return _in_order_of_ids(tensors, self._ids_here, dots)


def _ids_of(lane: Lane) -> torch.Tensor:
    """A copy of all tokens' ids: int32 [slots, top_k]."""
    ids = lane.buffer[lane.layout.IDS :][: 4 * lane.weights.numel()].clone()
    return ids.view(torch.int32).view(lane.weights.shape)


def _in_order_of_ids(lane: Lane, ids: torch.Tensor, dots: torch.Tensor | None) -> torch.Tensor:
    """One number for each row, by slot and place of the row's expert among the token's ids; zero elsewhere.

    `lane.positions` has the rows of a slot in ascending expert id; what a peer wrote as ids is only compared.
    """
    layout = lane.layout
    if dots is None:
        return torch.zeros_like(lane.weights)
    first = layout.first_expert(lane.rank)
    here = (ids >= first) & (ids < layout.first_expert(lane.rank + 1)) & (lane.positions[:, :1] >= 0)
    ordinal = (here.unsqueeze(1) & (ids.unsqueeze(1) < ids.unsqueeze(2))).sum(2)
    rows = lane.positions.gather(1, ordinal.clamp(max=layout.TOP_K - 1))
    there = here & (rows >= 0) & (rows < len(dots))
    return torch.where(there, torch.nn.functional.pad(dots, (0, 1))[torch.where(there, rows, len(dots))], 0.0)
