"""What torch.compile traces in place of dispatch and combine: calls of operators (`moe/operations.py`), and a round."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from thinwire.compiler import opaque
from thinwire.moe.dispatched import Dispatched
from thinwire.moe.gradients import Wants
from thinwire.moe.operations import linked_round, open_round, round_of
from thinwire.moe.received import Records, RowRouting
from thinwire.operators import ANCHOR, OPS, ORDER


class _Parallel(Protocol):
    _handle: int
    num_local_experts: int


def _between_graphs(name: str) -> property:
    """The property of the round itself, which compiled code reads between two graphs, and while the round is open."""

    @opaque
    def read(compiled: CompiledRound) -> Any:
        return getattr(linked_round(compiled._ticket), name)

    return property(read, doc=f"As `Dispatched.{name}`, between two graphs.")


class CompiledRound:
    """A round that compiled code began: a `Dispatched`, whose operators may lie in a graph, and be called.

    `expert_counts` and `expert_offsets` are copies. What is no operator is asked of the round itself, between graphs.
    """

    def __init__(
        self, ticket: torch.Tensor, counts: torch.Tensor, offsets: torch.Tensor, x: torch.Tensor, wants: int, lane: int
    ) -> None:
        self.expert_counts, self.expert_offsets, self.lane = counts, offsets, lane
        self._ticket, self._wants = ticket, wants
        self._num_tokens, self._hidden_size = x.shape
        self._dtype, self._device = x.dtype, x.device

    def gather(self, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Dispatched.gather`."""
        of_round = self._hidden_size, self._dtype, self._device, self._wants
        gathered: tuple[torch.Tensor, torch.Tensor] = OPS.gather(ORDER, self._ticket, capacity, *of_round)
        return gathered

    def _combine(self, handle: int, expert_out: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        # Whether gradients are enabled can be asked here, and not in the operators.
        refused = torch.is_grad_enabled() and not self._wants
        if out is not None:
            wants = Wants.of_code(self._wants).of_tokens or out.requires_grad or expert_out.requires_grad
            refused = refused or (torch.is_grad_enabled() and wants)
            OPS.combine_into(ORDER, self._ticket, expert_out, out, handle, refused)
            return out
        of_round = self._num_tokens, self._hidden_size, self._dtype
        combined: torch.Tensor = OPS.combine(ORDER, self._ticket, expert_out, handle, *of_round, refused, self._wants)
        return combined

    @property
    @opaque
    def is_open(self) -> bool:
        """As `Dispatched.is_open`, between two graphs."""
        d = round_of(self._ticket)
        return d is not None and d.is_open

    @opaque
    def gather_routing(self, capacity: int) -> RowRouting:
        """As `Dispatched.gather_routing`, between two graphs."""
        return linked_round(self._ticket).gather_routing(capacity)

    @opaque
    def gather_records(self, capacity: int) -> Records:
        """As `Dispatched.gather_records`, between two graphs."""
        return linked_round(self._ticket).gather_records(capacity)

    @opaque
    def abandon(self) -> None:
        """As `Dispatched.abandon`, between two graphs."""
        open_round(self._ticket).abandon()

    # torch 2.13's Inductor has no backward for operators that write, and give as many rows as come.
    tokens = _between_graphs("tokens")
    rows, index, quantized = _between_graphs("rows"), _between_graphs("index"), _between_graphs("quantized")
    weights, expert_ids, source = _between_graphs("weights"), _between_graphs("expert_ids"), _between_graphs("source")
    records, record_ids = _between_graphs("records"), _between_graphs("record_ids")
    record_weights, record_source = _between_graphs("record_weights"), _between_graphs("record_source")
    dispatch_traffic, combine_traffic = _between_graphs("dispatch_traffic"), _between_graphs("combine_traffic")


Dispatched.register(CompiledRound)


def dispatch(
    parallel: _Parallel,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    lane: int = 0,
    layer: int = 0,
) -> CompiledRound:
    """`ExpertParallel.dispatch` in a graph."""
    wants = Wants.of(x, topk_weights).code
    anchor, local_experts = ANCHOR if wants else None, parallel.num_local_experts
    ticket, counts, offsets = OPS.dispatch(
        ORDER, anchor, x, topk_ids, topk_weights, parallel._handle, lane, layer, wants, local_experts
    )
    return CompiledRound(ticket, counts, offsets, x, wants, lane)


@opaque
def uncompiled(d: Any) -> Any:
    """The round itself, of one that compiled code began; anything else as it is."""
    return linked_round(d._ticket) if isinstance(d, CompiledRound) else d


def combine(
    parallel: _Parallel, expert_out: Any, d: object, *, weighted: bool = False, out: torch.Tensor | None = None
) -> Any:
    """`ExpertParallel.combine` in a graph; NotImplemented for what lies between two graphs.

    That is a round that Python began, and rows which were weighted, or quantised.
    """
    if not isinstance(d, CompiledRound) or weighted is not False or not isinstance(expert_out, torch.Tensor):
        return NotImplemented
    return d._combine(parallel._handle, expert_out, out)
