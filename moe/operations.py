"""A round's legs as operators of torch, which torch.compile keeps in its graphs and does not look into.

    thinwire::dispatch   thinwire::gather            thinwire::combine, combine_into
    thinwire::dispatch_backward, gather_backward     thinwire::combine_backward

A graph holds tensors and numbers, so an operator finds its round by a *ticket*, a number in a tensor that dispatch
returns. What operators return is nobody else's. `thinwire.operators` says what keeps their order, in forward and in
backward: there a gather's and a combine's are followed by their dispatch's, so that it is enough for dispatch to be
anchored. Ranks that run different legs, as where one compiled what says so there and another did not, get the errors
that `moe/gradients.py` names: a leg says to which round it belongs.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any, NamedTuple, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from thinwire.errors import LaneError
from thinwire.moe.dispatched import Dispatched
from thinwire.moe.gradients import Link, RoundGradients, Wants, once
from thinwire.operators import OPS, anchored, differentiable, operator, registered
from thinwire.triton_kernels.codec import sum_dtype


class _Parallel(Protocol):
    """What operators need of an ExpertParallel."""

    def _whole_dispatch(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        lane: int,
        layer: int,
        wants: Wants | None,
    ) -> tuple[Dispatched, RoundGradients | None]: ...

    def combine(self, expert_out: torch.Tensor, d: Dispatched, *, out: torch.Tensor | None = None) -> torch.Tensor: ...


class _Round(NamedTuple):
    """What a ticket stands for, while somebody holds the ticket's memory, be it a graph that waits for backward."""

    ticket: StorageWeakRef
    dispatched: weakref.ref[Dispatched]  # its lane holds it while it is open
    gradients: RoundGradients | None


_numbers = itertools.count(1)
_rounds: dict[int, _Round] = {}


def _parallel_of(handle: int) -> _Parallel:
    found: _Parallel | None = registered(handle)
    if found is None:
        raise LaneError(
            f"there is no ExpertParallel {handle} in this process: it was dropped, or the code was compiled elsewhere"
        )
    return found


def _new_ticket(d: Dispatched, gradients: RoundGradients | None) -> torch.Tensor:
    for known, entry in list(_rounds.items()):
        if entry.ticket.expired():
            _rounds.pop(known, None)  # another thread may have been here
    number = next(_numbers)
    ticket = torch.full((1,), float(number), dtype=torch.float64, device="cpu")  # a float may have a gradient
    _rounds[number] = _Round(StorageWeakRef(ticket.untyped_storage()), weakref.ref(d), gradients)
    return ticket


def _gradients_of(ticket: torch.Tensor) -> RoundGradients:
    found = _rounds.get(int(ticket))
    if found is None or found.gradients is None:
        raise LaneError(
            "the way of this round's gradients is not known: it was dispatched without, or in another process"
        )
    return found.gradients


def open_round(ticket: torch.Tensor) -> Dispatched:
    """The round of a ticket.

    Raises:
        LaneError: it is over.
    """
    found = _rounds.get(int(ticket))
    d = None if found is None else found.dispatched()
    if d is None:
        raise LaneError("this round is over: it was combined or abandoned, or a later dispatch took its lane")
    d._require_open()
    return d


def linked_round(ticket: torch.Tensor) -> Dispatched:
    """The same, for a caller that is no operator: what has a gradient has it there."""
    d, gradients = open_round(ticket), _rounds[int(ticket)].gradients
    if gradients is not None and d._link is None:
        d._link = Link(ticket, gradients)
    return d


def _fake_dispatch(
    order: torch.Tensor, anchor: torch.Tensor | None, x: torch.Tensor, *args: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    counts = x.new_empty(args[-1], dtype=torch.int64)
    return torch.empty(1, dtype=torch.float64, device="cpu"), counts, counts.new_empty(args[-1] + 1)


@operator(fake=_fake_dispatch)
def dispatch(
    order: torch.Tensor,
    anchor: torch.Tensor | None,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    handle: int,
    lane: int,
    layer: int,
    wants: int,
    local_experts: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The round's ticket, float64 [1] on the CPU, expert_counts and expert_offsets; `wants` is a `Wants.tag`."""
    parallel, wanted = _parallel_of(handle), Wants.of_tag(wants)
    d, gradients = parallel._whole_dispatch(x, topk_ids, topk_weights, lane, layer, wanted)
    return _new_ticket(d, gradients), d.expert_counts.clone(), d.expert_offsets.clone()


def _fake_gather(
    order: torch.Tensor,
    ticket: torch.Tensor,
    capacity: int,
    hidden_size: int,
    dtype: torch.dtype,
    device: torch.device,
    wants: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    # What the operator refuses is no size either.
    num_rows = max(capacity, 0) if isinstance(capacity, int) else capacity
    tokens = torch.empty(num_rows, hidden_size, dtype=dtype, device=device)
    return tokens, torch.empty((), dtype=torch.bool, device=device)


@operator(fake=_fake_gather)
def gather(
    order: torch.Tensor,
    ticket: torch.Tensor,
    capacity: int,
    hidden_size: int,
    dtype: torch.dtype,
    device: torch.device,
    wants: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`Dispatched.gather`."""
    return open_round(ticket).gather(capacity)


def _fake_combine(order: torch.Tensor, ticket: torch.Tensor, expert_out: torch.Tensor, *args: Any) -> torch.Tensor:
    _, num_tokens, hidden_size, dtype, *_ = args
    return expert_out.new_empty(num_tokens, hidden_size, dtype=dtype)


@operator(fake=_fake_combine)
def combine(
    order: torch.Tensor,
    ticket: torch.Tensor,
    expert_out: torch.Tensor,
    handle: int,
    num_tokens: int,
    hidden_size: int,
    dtype: torch.dtype,
    refused: bool,
    wants: int,
) -> torch.Tensor:
    """`ExpertParallel.combine`; `refused`: expert_out wants a gradient that there cannot be, and that error is due."""
    d, parallel = open_round(ticket), _parallel_of(handle)
    with torch.set_grad_enabled(refused):
        return parallel.combine(expert_out.detach().requires_grad_(refused), d)


def _no_result(order: torch.Tensor, *args: Any) -> None:
    """Of operators that give nothing back."""


@operator("out", fake=_no_result)
def combine_into(
    order: torch.Tensor,
    ticket: torch.Tensor,
    expert_out: torch.Tensor,
    out: torch.Tensor,
    handle: int,
    refused: bool,
) -> None:
    """The same into `out`."""
    d, parallel = open_round(ticket), _parallel_of(handle)
    with torch.set_grad_enabled(refused):
        parallel.combine(expert_out, d, out=out.detach().requires_grad_(refused))


def _fake_combine_backward(order: torch.Tensor, ticket: torch.Tensor, dy: torch.Tensor, *args: Any) -> torch.Tensor:
    return dy.new_empty(args[-1], dy.shape[1])


@operator(fake=_fake_combine_backward)
def combine_backward(
    order: torch.Tensor, ticket: torch.Tensor, dy: torch.Tensor, expert_out: torch.Tensor | None, num_rows: int
) -> torch.Tensor:
    """Sends dy, and gives expert_out's gradients, [num_rows, hidden] in dy's dtype."""
    return _gradients_of(ticket).of_experts(dy, expert_out, num_rows)


@operator(fake=_no_result)
def gather_backward(order: torch.Tensor, ticket: torch.Tensor, grad: torch.Tensor) -> None:
    """Keeps the gradients of rows for dispatch's backward."""
    _gradients_of(ticket).add_rows(grad.clone())  # compiled code uses the memory again


def _fake_dispatch_backward(
    order: torch.Tensor,
    ticket: torch.Tensor,
    num_tokens: int,
    hidden_size: int,
    top_k: int,
    dtype: torch.dtype,
    device: torch.device,
    wants: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    wanted = Wants.of_tag(wants)
    dx = torch.empty(num_tokens if wanted.rows else 0, hidden_size, dtype=dtype, device=device)
    return dx, torch.empty(num_tokens if wanted.weights else 0, top_k, dtype=sum_dtype(dtype), device=device)


@operator(fake=_fake_dispatch_backward)
def dispatch_backward(
    order: torch.Tensor,
    ticket: torch.Tensor,
    num_tokens: int,
    hidden_size: int,
    top_k: int,
    dtype: torch.dtype,
    device: torch.device,
    wants: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Collects the gradients of x [num_tokens, hidden] and of topk_weights, as they travel; none where not wanted."""
    dx, dw = _gradients_of(ticket).of_tokens()
    empty = torch.empty(0, hidden_size, dtype=dtype, device=device)
    return empty if dx is None else dx, empty.new_empty(0, top_k, dtype=sum_dtype(dtype)) if dw is None else dw


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, order: torch.Tensor, order_of_backward: torch.Tensor, anchor: torch.Tensor, *args: Any
    ) -> Any:
        x, topk_ids, topk_weights, *_, wants, _ = args
        ticket, counts, offsets = OPS.dispatch(order, anchor, *args)
        ctx.save_for_backward(ticket)
        ctx.mark_non_differentiable(counts, offsets)
        ctx.order, ctx.weights_dtype = order_of_backward, topk_weights.dtype
        ctx.args = *x.shape, topk_ids.shape[1], x.dtype, x.device, wants
        return ticket, counts, offsets

    @staticmethod
    @once
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dx, dw = OPS.dispatch_backward(ctx.order, *ctx.saved_tensors, *ctx.args)
        needs = ctx.needs_input_grad
        dx, dw = dx if needs[3] else None, dw.to(ctx.weights_dtype) if needs[5] else None
        return None, None, anchored(ctx), dx, None, dw, None, None, None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, order: torch.Tensor, order_of_backward: torch.Tensor, ticket: torch.Tensor, *args: Any
    ) -> Any:
        tokens, overflow = OPS.gather(order, ticket, *args)
        ctx.save_for_backward(ticket)
        ctx.mark_non_differentiable(overflow)
        ctx.order = order_of_backward
        return tokens, overflow

    @staticmethod
    @once
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (ticket,) = ctx.saved_tensors
        OPS.gather_backward(ctx.order, ticket, grads[0])
        return None, None, torch.zeros_like(ticket), None, None, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        order: torch.Tensor,
        order_of_backward: torch.Tensor,
        ticket: torch.Tensor,
        expert_out: torch.Tensor,
        *args: Any,
    ) -> torch.Tensor:
        # Something is saved in any case: `moe/gradients.py` says why.
        ctx.save_for_backward(ticket, *([expert_out] if Wants.of_tag(args[-1]).weights else []))
        ctx.order, ctx.num_rows, ctx.dtype = order_of_backward, expert_out.shape[0], expert_out.dtype
        combined: torch.Tensor = OPS.combine(order, ticket, expert_out, *args)
        return combined

    @staticmethod
    @once
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ticket, *kept = ctx.saved_tensors  # may run forward rounds anew, so it comes first
        rows = OPS.combine_backward(ctx.order, ticket, grads[0], kept[0] if kept else None, ctx.num_rows)
        rows = rows.to(ctx.dtype) if ctx.needs_input_grad[3] else None
        return None, None, torch.zeros_like(ticket), rows, None, None, None, None, None, None


differentiable("dispatch", _Dispatch, lambda anchor, x, ids, weights, *args: x.requires_grad or weights.requires_grad)
differentiable("gather", _Gather, lambda ticket, *args: ticket.requires_grad and Wants.of_tag(args[-1]).rows)
differentiable("combine", _Combine, lambda ticket, *args: ticket.requires_grad)
