"""The legs of a round, dispatch and combine: a rank sends its part, then waits for the peers'.

The halves may be calls of their own, with other work between them, or both are in one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from thinwire.moe.dispatched import Dispatched, ExpertRows
from thinwire.moe.gradients import Link, RoundGradients, Wants
from thinwire.moe.round_transport import OnLane, Rounds

#: What is dispatched: x, topk_ids and topk_weights.
Tokens = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_AS_IT_IS = contextlib.nullcontext()


class Started(OnLane):
    """A leg of which this rank has sent its part, until it is finished or a later dispatch takes the lane."""

    _how_over = "it was finished"
    end: Callable[[], Any]  # waits for the peers' part

    def __init__(self, rounds: Rounds, lane: int) -> None:
        self._rounds = rounds
        self.lane = lane

    def finish(self) -> Any:
        """Waits for the peers' part, which they do not number as a call."""
        rounds = self._rounds
        with rounds.config.comm.call("finish", transport=rounds.name, details=rounds.place(self.lane), numbered=False):
            rounds.open_rounds[self.lane] = None  # not before: an interrupt would lose what peers still have to read
            return self.end()


class StartedDispatch(Started):
    """What `ExpertParallel.dispatch_start` returns, for `dispatch_finish`."""

    d: Dispatched  # at the end
    gradients: RoundGradients | None = None  # if gradients are enabled, and what their plan needs then
    link: Link | None = None  # to autograd's graph; compiled code has its own
    graph: tuple[torch.Tensor, torch.Tensor]

    def __init__(self, rounds: Rounds, lane: int, wants: Wants) -> None:
        super().__init__(rounds, lane)
        self.wants = wants

    def begin(self, tokens: Tokens, layer: int, whole: bool) -> None:
        """Sends this rank's part, which ends a round that is open on the lane; if `whole`, waits for the peers' too."""
        rounds, lane, (x, topk_ids, topk_weights) = self._rounds, self.lane, tokens
        # Kernels see memory, where the sign of a negative view is another.
        if x.is_neg() or topk_ids.is_neg() or topk_weights.is_neg():
            x, topk_ids, topk_weights = x.resolve_neg(), topk_ids.resolve_neg(), topk_weights.resolve_neg()
        x = x if x.stride(1) == 1 else x.contiguous()
        if (places := rounds.places_of_ids) is not None:  # from the end of which negative ids count
            topk_ids = places[topk_ids.clamp(-2, rounds.config.num_experts)]
        wanted = self.wants.experts
        # Where gradients are not enabled there is none to keep from being recorded.
        with torch.no_grad() if wanted else _AS_IT_IS:
            rounds.leave_open(lane)
            with rounds.call("dispatch", lane, x.shape, x.dtype, ahead=1):
                self.end = rounds.begin(lane, x, topk_ids, topk_weights, self.wants.tag(layer))
                if whole:
                    self.d = self.end()
        if wanted:
            self._keep(x, topk_ids, topk_weights)
        if not whole:
            rounds.open_rounds[lane] = self

    def _keep(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> None:
        """Keeps what the gradients' plan needs, which callers may overwrite, and takes a place in the graph."""
        ids = topk_ids.clone()
        self.gradients = RoundGradients(ids, self._rounds.config.comm.recorder)
        self.graph = ids, topk_weights.detach().float().clone()
        if torch.is_grad_enabled():  # which it is not in an operator of compiled code
            self.link = Link.of(x, topk_weights, self.gradients)


class StartedCombine(Started):
    """What `ExpertParallel.combine_start` returns, for `combine_finish`."""

    out: torch.Tensor  # filled at the end

    def begin(
        self, expert_out: ExpertRows, d: Dispatched, out: torch.Tensor | None, weighted: bool, whole: bool
    ) -> None:
        """Sends this rank's sums, which ends the round; if `whole`, waits for the peers' too."""
        d._require_open()
        given = d._check_combine(expert_out, out, weighted)
        if d._link is not None and torch.is_grad_enabled() and out is None and given.is_floating_point():
            places = d._places_of(d._arrived.first(len(given))) if weighted else None
            self.out = d._link.combine(given, lambda rows: self._send(rows, d, None, weighted, whole), places)
        else:
            self.out = self._send(given, d, out, weighted, whole)

    def _send(
        self, rows: torch.Tensor, d: Dispatched, out: torch.Tensor | None, weighted: bool, whole: bool
    ) -> torch.Tensor:
        """Sends checked rows. Returns the output, filled once the leg ends."""
        rounds, config = self._rounds, self._rounds.config
        if rows.requires_grad:
            rows = rows.detach()
        if rows.is_neg():
            rows = rows.resolve_neg()
        if out is None:
            out = config.comm.result_memory.new_empty(rows, (d._num_sent, config.hidden_size), d._dtype)
        with rounds.call("combine", self.lane, (rows.shape[0], config.hidden_size), d._dtype):
            rounds.open_rounds[self.lane] = None
            self.end = d._begin_combine(rows if rows.stride(1) == 1 else rows.contiguous(), out, weighted)
            if whole:
                self.end()
            else:
                rounds.open_rounds[self.lane] = self
        return out
