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

import contextlib
import itertools
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from thinwire.errors import LaneError
from thinwire.moe.dispatched import Dispatched
from thinwire.moe.gradients import Link, RoundGradients, Wants, once
from thinwire.moe.legs import StartedDispatch, Tokens
from thinwire.operators import OPS, differentiable, operator, registered
from thinwire.triton_kernels.codec_reference import sum_dtype


class _Parallel(Protocol):
    """What operators need of an ExpertParallel."""

    def _begin_round(
        self, tokens: Tokens, lane: int, layer: int, whole: bool, wants: Wants | None
    ) -> StartedDispatch: ...

    def combine(self, expert_out: Tensor, d: Dispatched, *, out: Tensor | None = None) -> Tensor: ...


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


def _new_ticket(d: Dispatched, gradients: RoundGradients | None) -> Tensor:
    for known, entry in list(_rounds.items()):
        if entry.ticket.expired():
            _rounds.pop(known, None)  # another thread may have been here
    number = next(_numbers)
    ticket = torch.full((1,), float(number), dtype=torch.float64, device="cpu")  # a float may have a gradient
    _rounds[number] = _Round(StorageWeakRef(ticket.untyped_storage()), weakref.ref(d), gradients)
    return ticket


@contextlib.contextmanager
def _gradients_of(ticket: Tensor) -> Iterator[RoundGradients]:
    """What a ticket's backward operators share; what comes from outside while one works ends the communicator."""
    found = _rounds.get(int(ticket))
    if found is None or found.gradients is None:
        raise LaneError(
            "the way of this round's gradients is not known: it was dispatched without, or in another process"
        )
    try:
        yield found.gradients
    except BaseException as error:
        found.gradients.ended_by(error)
        raise


def round_of(ticket: Tensor) -> Dispatched | None:
    """The round of a ticket, if it is still there."""
    found = _rounds.get(int(ticket))
    return None if found is None else found.dispatched()


def open_round(ticket: Tensor) -> Dispatched:
    """The round of a ticket.

    Raises:
        LaneError: it is over.
    """
    d = round_of(ticket)
    if d is None:
        raise LaneError("this round is over: it was combined or abandoned, overtaken by a later dispatch, or closed")
    d._require_open()
    return d


def linked_round(ticket: Tensor) -> Dispatched:
    """The same, for a caller that is no operator: what has a gradient has it there."""
    d, gradients = open_round(ticket), _rounds[int(ticket)].gradients
    if gradients is not None and d._link is None:
        d._link = Link(ticket, gradients)
    return d


def _fake_dispatch(x: Tensor, local_experts: int, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
    counts = x.new_empty(local_experts, dtype=torch.int64)
    return torch.empty(1, dtype=torch.float64, device="cpu"), counts, counts.new_empty(local_experts + 1)


@operator(fake=_fake_dispatch)
def dispatch(
    anchor: Tensor | None, x: Tensor, topk_ids: Tensor, topk_weights: Tensor,
    handle: int, lane: int, layer: int, wants: int, local_experts: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The round's ticket, float64 [1] on the CPU, expert_counts and expert_offsets; `wants` is a `Wants.code`."""
    parallel, wanted = _parallel_of(handle), Wants.of_code(wants)
    started = parallel._begin_round((x, topk_ids, topk_weights), lane, layer, True, wanted)
    d = started.d
    return _new_ticket(d, started.gradients), d.expert_counts.clone(), d.expert_offsets.clone()


def _fake_gather(
    capacity: int, hidden_size: int, dtype: torch.dtype, device: torch.device, **_: Any
) -> tuple[Tensor, Tensor]:
    # What the operator refuses is no size either.
    num_rows = max(capacity, 0) if isinstance(capacity, int) else capacity
    tokens = torch.empty(num_rows, hidden_size, dtype=dtype, device=device)
    return tokens, torch.empty((), dtype=torch.bool, device=device)


@operator(fake=_fake_gather)
def gather(
    ticket: Tensor, capacity: int, hidden_size: int, dtype: torch.dtype, device: torch.device, wants: int
) -> tuple[Tensor, Tensor]:
    """`Dispatched.gather`."""
    return open_round(ticket).gather(capacity)


@operator(
    fake=lambda expert_out, num_tokens, hidden_size, dtype, **_: expert_out.new_empty(
        num_tokens, hidden_size, dtype=dtype
    )
)
def combine(
    ticket: Tensor, expert_out: Tensor, handle: int, num_tokens: int, hidden_size: int, dtype: torch.dtype,
    refused: bool, wants: int,
) -> Tensor:  # fmt: skip
    """`ExpertParallel.combine`; `refused`: expert_out wants a gradient that there cannot be, and that error is due."""
    d, parallel = open_round(ticket), _parallel_of(handle)
    with torch.set_grad_enabled(refused):
        return parallel.combine(expert_out.detach().requires_grad_(refused), d)


@operator("out", fake=lambda **_: None)
def combine_into(ticket: Tensor, expert_out: Tensor, out: Tensor, handle: int, refused: bool) -> None:
    """The same into `out`."""
    d, parallel = open_round(ticket), _parallel_of(handle)
    with torch.set_grad_enabled(refused):
        parallel.combine(expert_out, d, out=out.detach().requires_grad_(refused))


@operator(fake=lambda dy, num_rows, **_: dy.new_empty(num_rows, dy.shape[1]))
def combine_backward(ticket: Tensor, dy: Tensor, expert_out: Tensor | None, num_rows: int) -> Tensor:
    """Sends dy, and gives expert_out's gradients, [num_rows, hidden] in dy's dtype."""
    with _gradients_of(ticket) as gradients:
        return gradients.of_experts(dy, expert_out, num_rows)


@operator(fake=lambda **_: None)
def gather_backward(ticket: Tensor, grad: Tensor) -> None:
    """Keeps the gradients of rows for dispatch's backward."""
    with _gradients_of(ticket) as gradients:
        gradients.add_rows(grad.clone())  # compiled code uses the memory again


def _fake_dispatch_backward(
    num_tokens: int, hidden_size: int, top_k: int, dtype: torch.dtype, device: torch.device, wants: int, **_: Any
) -> tuple[Tensor, Tensor]:
    wanted = Wants.of_code(wants)
    dx = torch.empty(num_tokens if wanted.rows else 0, hidden_size, dtype=dtype, device=device)
    return dx, torch.empty(num_tokens if wanted.weights else 0, top_k, dtype=sum_dtype(dtype), device=device)


@operator(fake=_fake_dispatch_backward)
def dispatch_backward(
    ticket: Tensor, num_tokens: int, hidden_size: int, top_k: int, dtype: torch.dtype, device: torch.device, wants: int
) -> tuple[Tensor, Tensor]:
    """Collects the gradients of x [num_tokens, hidden] and of topk_weights, as they travel; none where not wanted."""
    with _gradients_of(ticket) as gradients:
        dx, dw = gradients.of_tokens()
    empty = torch.empty(0, hidden_size, dtype=dtype, device=device)
    return empty if dx is None else dx, empty.new_empty(0, top_k, dtype=sum_dtype(dtype)) if dw is None else dw


# ---------------------------------------------------------------------------------------------------------------------
# How gradients go: of each operator what backward needs, and what it gives


def _keep_dispatch(
    ctx: Any, result: tuple[Tensor, ...], x: Tensor, topk_ids: Tensor, topk_weights: Tensor, wants: int, **_: Any
) -> None:
    ticket, counts, offsets = result
    ctx.save_for_backward(ticket)
    ctx.mark_non_differentiable(counts, offsets)
    ctx.weights_dtype, ctx.args = topk_weights.dtype, (*x.shape, topk_ids.shape[1], x.dtype, x.device, wants)


def _dispatch_gradients(ctx: Any, *_: Tensor) -> dict[str, Tensor | None]:
    if not Wants.of_code(ctx.args[-1]).of_tokens:
        return {}
    dx, dw = OPS.dispatch_backward(ctx.order, *ctx.saved_tensors, *ctx.args)
    return {"x": dx, "topk_weights": dw.to(ctx.weights_dtype)}


def _keep_gather(ctx: Any, result: tuple[Tensor, Tensor], ticket: Tensor, **_: Any) -> None:
    ctx.save_for_backward(ticket)
    ctx.mark_non_differentiable(result[1])


def _gather_gradients(ctx: Any, *grads: Tensor) -> dict[str, Tensor | None]:
    (ticket,) = ctx.saved_tensors
    OPS.gather_backward(ctx.order, ticket, grads[0])
    return {"ticket": torch.zeros_like(ticket)}


def _keep_combine(ctx: Any, result: Tensor, ticket: Tensor, expert_out: Tensor, wants: int, **_: Any) -> None:
    # Something is saved in any case: `moe/gradients.py` says why.
    ctx.save_for_backward(ticket, *([expert_out] if Wants.of_code(wants).weights else []))
    ctx.num_rows, ctx.dtype = expert_out.shape[0], expert_out.dtype


def _combine_gradients(ctx: Any, dy: Tensor) -> dict[str, Tensor | None]:
    ticket, *kept = ctx.saved_tensors  # may run forward rounds anew, so it comes first
    rows = OPS.combine_backward(ctx.order, ticket, dy, kept[0] if kept else None, ctx.num_rows)
    return {"ticket": torch.zeros_like(ticket), "expert_out": rows.to(ctx.dtype)}


differentiable(
    "dispatch", lambda wants, **_: wants > 0, _keep_dispatch,
    _dispatch_gradients, once,
)  # fmt: skip
differentiable(
    "gather", lambda ticket, wants, **_: ticket.requires_grad and Wants.of_code(wants).rows, _keep_gather,
    _gather_gradients, once,
)  # fmt: skip
differentiable("combine", lambda ticket, **_: ticket.requires_grad, _keep_combine, _combine_gradients, once)
