"""Rounds in compiled code: operators of torch, which torch.compile keeps in its graphs and does not look into.

    thinwire::dispatch             thinwire::gather             thinwire::combine
    thinwire::dispatch_backward    thinwire::gather_backward    thinwire::combine_backward

torch.compile traces `dispatch` and `combine` of this file in place of ExpertParallel's: they call operators, and make a
`CompiledRound`. A graph holds tensors and numbers alone. So an operator finds an ExpertParallel by the number that it
was given when it was made (`register`), and a round by a *ticket*, a number in a tensor that dispatch returns. What
operators return is nobody else's.

The order of rounds. A compiler drops, merges and moves operators that look like functions. These are declared to write
into a tensor, `ORDER`, one for all operators and objects of a process: so in a graph each reads what the one before it
has written, and all of them, in the order in which Python called them, lie on the way to ORDER's last value, which the
graph's caller gets. Collectives are called between two graphs. Ranks whose programs call the same operations therefore
run them in the same order, whatever each of them compiled, and wherever its graphs end.

Backward has an order tensor of its own, one for each graph, made in it: backward would otherwise write into ORDER, into
which every other forward has written meanwhile, and autograd refuses that. The compiler differentiates a graph by
running autograd over its operators, in the order that `moe/gradients.py` argues for, the reverse of forward's, and each
operator reads what the one before it has written. What the last one has written is on the way to a gradient: that of
`ANCHOR`, which goes into every dispatch, or of the ticket, if an earlier graph began the round. A graph computes the
gradients of all its inputs, and so drops no operator, not even one of whose own gradient nothing is made, such as that
of a tensor that was rounded. To autograd a graph is one node, made when its forward ran, and stands for a row of
operations that nothing came between: the reverse of the graphs, each in reverse, is the reverse of the operations.

Where it is not eager's: a graph runs the backward of all that leads to any of its results, with zeros for those results
that have no gradient, where autograd alone would leave out a round of which no result is differentiated; and
`torch.utils.checkpoint` within a graph keeps what operators have given, where eager's runs them anew. A rank that
compiles such code, and another that does not, would run different legs, and get the errors that `moe/gradients.py`
names: a leg says to which round it belongs.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointPolicy

from thinwire.compiler import GraphNode, opaque
from thinwire.errors import LaneError
from thinwire.moe.dispatched import Dispatched
from thinwire.moe.gradients import Link, RoundGradients, Wants, once
from thinwire.moe.legs import StartedDispatch, Tokens
from thinwire.triton_kernels.codec_reference import sum_dtype

with torch.inference_mode(False):
    #: What all operators are declared to write into. Nobody does: what counts is what a compiler thinks.
    ORDER = torch.zeros(1, dtype=torch.int64, device="cpu")
    #: What has a gradient, zero, that is known when all operators of a graph's backward have been run.
    ANCHOR = torch.zeros(1, dtype=torch.float64, device="cpu", requires_grad=True)

_LIBRARY = torch.library.Library("thinwire", "DEF")
_OPS: Any = torch.ops.thinwire


class _Parallel(Protocol):
    """What compiled code needs of an ExpertParallel."""

    _handle: int
    num_local_experts: int

    def _begin_round(
        self, tokens: Tokens, lane: int, layer: int, whole: bool, wants: Wants | None
    ) -> StartedDispatch: ...

    def combine(self, expert_out: Tensor, d: Dispatched) -> Tensor: ...


class _Round(NamedTuple):
    """What a ticket stands for, while somebody holds the ticket's memory, be it a graph that waits for backward."""

    ticket: StorageWeakRef
    dispatched: weakref.ref[Dispatched]  # its lane holds it while it is open
    gradients: RoundGradients | None


_numbers = itertools.count(1)
_parallels: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_rounds: dict[int, _Round] = {}


def register(parallel: object) -> int:
    """The number by which operators find an ExpertParallel, for as long as somebody holds it."""
    handle = next(_numbers)
    _parallels[handle] = parallel
    return handle


def _parallel_of(handle: int) -> _Parallel:
    found: _Parallel | None = _parallels.get(handle)
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
    """Gives what a ticket's backward operators share; what comes from outside meanwhile ends the communicator."""
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


def _find_round(ticket: Tensor) -> Dispatched | None:
    found = _rounds.get(int(ticket))
    return None if found is None else found.dispatched()


def _open_round(ticket: Tensor) -> Dispatched:
    d = _find_round(ticket)
    if d is None:
        raise LaneError("this round is over: it was combined or abandoned, overtaken by a later dispatch, or closed")
    d._require_open()
    return d


def _linked_round(ticket: Tensor) -> Dispatched:
    """The open round for a caller that is no operator, who gets with a gradient what has one."""
    d, gradients = _open_round(ticket), _rounds[int(ticket)].gradients
    if gradients is not None and d._link is None:
        d._link = Link(ticket, gradients)
    return d


# ---------------------------------------------------------------------------------------------------------------------
# What compiled code sees


class CompiledRound:
    """A round that compiled code began: a `Dispatched`, whose `gather` and combine may lie in a graph.

    `expert_counts` and `expert_offsets` are copies. Everything else is asked of the round itself, between two graphs;
    `tokens` too, as torch 2.13's Inductor has no backward for operators that write, and give as many rows as come.
    """

    def __init__(self, ticket: Tensor, counts: Tensor, offsets: Tensor, x: Tensor, wants: int, lane: int) -> None:
        self.expert_counts, self.expert_offsets, self.lane = counts, offsets, lane
        self._ticket, self._wants = ticket, wants
        self._num_tokens, self._hidden_size = x.shape
        self._dtype, self._device = x.dtype, x.device

    def gather(self, capacity: int) -> tuple[Tensor, Tensor]:
        """`Dispatched.gather` in a graph."""
        of_round = self._hidden_size, self._dtype, self._device, self._wants
        gathered: tuple[Tensor, Tensor] = _OPS.gather(ORDER, self._ticket, capacity, *of_round)
        return gathered

    @property
    @opaque
    def is_open(self) -> bool:
        """`Dispatched.is_open`, between two graphs."""
        d = _find_round(self._ticket)
        return d is not None and d.is_open

    @opaque
    def __getattr__(self, name: str) -> Any:
        """Gives an attribute of the open round itself, between two graphs."""
        if name not in _OF_ROUNDS:
            raise AttributeError(f"a round has no attribute {name!r}")
        return getattr(_linked_round(self._ticket), name)


_OF_ROUNDS = {name for name in (*dir(Dispatched), *Dispatched.__annotations__) if not name.startswith("_")}
Dispatched.register(CompiledRound)


def dispatch(
    parallel: _Parallel, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, *, lane: int = 0, layer: int = 0
) -> CompiledRound:
    """`ExpertParallel.dispatch` in a graph."""
    wants = Wants.of(x, topk_weights).code
    anchor, local_experts = ANCHOR if wants else None, parallel.num_local_experts
    ticket, counts, offsets = _OPS.dispatch(
        ORDER, anchor, x, topk_ids, topk_weights, parallel._handle, lane, layer, wants, local_experts
    )
    return CompiledRound(ticket, counts, offsets, x, wants, lane)


def combine(
    parallel: _Parallel, expert_out: Any, d: object, *, weighted: bool = False, out: Tensor | None = None
) -> Any:
    """`ExpertParallel.combine` in a graph; NotImplemented for what is called between two graphs.

    That is a combine into `out`, one of a round that Python began, of rows that were weighted or quantised, and one
    that is refused, since the round was dispatched without gradients and they are enabled.
    """
    if not isinstance(d, CompiledRound) or weighted is not False or out is not None:
        return NotImplemented
    if not isinstance(expert_out, Tensor) or (torch.is_grad_enabled() and not d._wants):
        return NotImplemented
    of_round = d._num_tokens, d._hidden_size, d._dtype, d._wants
    return _OPS.combine(ORDER, d._ticket, expert_out, parallel._handle, *of_round)


@opaque
def uncompiled(d: Any) -> Any:
    """The round itself, of one that compiled code began; anything else as it is."""
    return _linked_round(d._ticket) if isinstance(d, CompiledRound) else d


# ---------------------------------------------------------------------------------------------------------------------
# Operators


def _operator(fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Defines a function as an operator of its name and signature, before whose arguments it gets ORDER.

    Args:
        fake: gives empty tensors as the operator's, of its arguments by name.
    """

    def define(function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__.removeprefix("_")
        names = list(inspect.signature(function).parameters)
        schema = torch.library.infer_schema(function, mutates_args=()).removeprefix("(")
        # A CUDA graph's replay would call no Python, which has to know of every round.
        _LIBRARY.define(f"{name}(Tensor(order!) order, {schema}", tags=(torch.Tag.cudagraph_unsafe,))

        @opaque  # or it is compiled where graphs end, and called as it is
        @functools.wraps(function)
        def kernel(order: Tensor, *args: Any) -> Any:
            with torch.no_grad():
                return function(*args)

        def fake_kernel(order: Tensor, *args: Any) -> Any:
            return fake(**dict(zip(names, args, strict=True)))

        _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"thinwire::{name}", fake_kernel, lib=_LIBRARY)
        return function

    return define


def _fake_dispatch(x: Tensor, local_experts: int, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
    counts = x.new_empty(local_experts, dtype=torch.int64)
    return torch.empty(1, dtype=torch.float64, device="cpu"), counts, counts.new_empty(local_experts + 1)


@_operator(_fake_dispatch)
def _dispatch(
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


@_operator(_fake_gather)
def _gather(
    ticket: Tensor, capacity: int, hidden_size: int, dtype: torch.dtype, device: torch.device, wants: int
) -> tuple[Tensor, Tensor]:
    """`Dispatched.gather`."""
    return _open_round(ticket).gather(capacity)


@_operator(
    lambda expert_out, num_tokens, hidden_size, dtype, **_: expert_out.new_empty(num_tokens, hidden_size, dtype=dtype)
)
def _combine(
    ticket: Tensor, expert_out: Tensor, handle: int, num_tokens: int, hidden_size: int, dtype: torch.dtype, wants: int
) -> Tensor:
    """`ExpertParallel.combine`."""
    return _parallel_of(handle).combine(expert_out, _open_round(ticket))


@_operator(lambda dy, num_rows, **_: dy.new_empty(num_rows, dy.shape[1]))
def _combine_backward(ticket: Tensor, dy: Tensor, expert_out: Tensor | None, num_rows: int) -> Tensor:
    """Sends dy, and gives expert_out's gradients, [num_rows, hidden] in dy's dtype."""
    with _gradients_of(ticket) as gradients:
        return gradients.of_experts(dy, expert_out, num_rows)


@_operator(lambda **_: None)
def _gather_backward(ticket: Tensor, grad: Tensor) -> None:
    """Keeps the gradients of rows for dispatch's backward."""
    with _gradients_of(ticket) as gradients:
        gradients.add_rows(grad.clone())  # compiled code uses the memory again


def _fake_dispatch_backward(
    num_tokens: int, hidden_size: int, top_k: int, dtype: torch.dtype, device: torch.device, wants: int, **_: Any
) -> tuple[Tensor, Tensor]:
    wanted = Wants.of_code(wants)
    dx = torch.empty(num_tokens if wanted.rows else 0, hidden_size, dtype=dtype, device=device)
    return dx, torch.empty(num_tokens if wanted.weights else 0, top_k, dtype=sum_dtype(dtype), device=device)


@_operator(_fake_dispatch_backward)
def _dispatch_backward(
    ticket: Tensor, num_tokens: int, hidden_size: int, top_k: int, dtype: torch.dtype, device: torch.device, wants: int
) -> tuple[Tensor, Tensor]:
    """Collects the gradients of x [num_tokens, hidden] and of topk_weights, as they travel; none where not wanted."""
    with _gradients_of(ticket) as gradients:
        dx, dw = gradients.of_tokens()
    empty = torch.empty(0, hidden_size, dtype=dtype, device=device)
    return empty if dx is None else dx, empty.new_empty(0, top_k, dtype=sum_dtype(dtype)) if dw is None else dw


# ---------------------------------------------------------------------------------------------------------------------
# Nodes of operators in autograd's graph


def _order_of_backward(order: Tensor) -> Tensor:
    """The tensor that the operators of backward are declared to write into: one for each graph, as `order` is there."""
    found: Tensor | None = getattr(order, "_order_of_backward", None)
    if found is None:
        found = torch.zeros(1, dtype=torch.float64, device="cpu")
        order._order_of_backward = found  # type: ignore[attr-defined]
    return found


@contextlib.contextmanager
def _kept_by_checkpoints() -> Iterator[None]:
    """Marks what a graph being made gets meanwhile, so that a checkpoint in it keeps that."""
    tracing = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    if tracing is None:
        yield
        return
    nodes = tracing.tracer.graph.nodes
    before = len(nodes)
    yield
    for node in itertools.islice(reversed(nodes), len(nodes) - before):
        if "recompute" in node.meta:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _differentiable(name: str, node: type[GraphNode]) -> None:
    """Has autograd see a node in place of an operator, by a kernel: `register_autograd` refuses what writes."""
    operator = getattr(_OPS, name)

    @opaque
    def kernel(order: Tensor, *args: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(each, Tensor) and each.requires_grad for each in args):
            with _kept_by_checkpoints():
                return node.apply(order, _order_of_backward(order), *args)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(order, *args)

    _LIBRARY.impl(name, kernel, "Autograd")


class _Dispatch(GraphNode):
    @staticmethod
    def forward(
        ctx: Any, order: Tensor, order_of_backward: Tensor, anchor: Tensor | None, x: Tensor, topk_ids: Tensor,
        topk_weights: Tensor, handle: int, lane: int, layer: int, wants: int, local_experts: int,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        ctx.order, ctx.wants, ctx.weights_dtype = order_of_backward, Wants.of_code(wants), topk_weights.dtype
        ctx.of_tokens = *x.shape, topk_ids.shape[1], x.dtype, x.device, wants
        ticket, counts, offsets = _OPS.dispatch(
            order, anchor, x, topk_ids, topk_weights, handle, lane, layer, wants, local_experts
        )
        ctx.save_for_backward(ticket)
        ctx.mark_non_differentiable(counts, offsets)
        return ticket, counts, offsets

    @staticmethod
    @once
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        dx = dw = None
        if ctx.wants.of_tokens:
            dx, dw = _OPS.dispatch_backward(ctx.order, *ctx.saved_tensors, *ctx.of_tokens)
            dx, dw = dx if ctx.wants.rows else None, dw.to(ctx.weights_dtype) if ctx.wants.weights else None
        anchor = ctx.order.clone() if ctx.needs_input_grad[2] else None  # zero, once this backward has written into it
        return None, None, anchor, dx, None, dw, None, None, None, None, None


class _Gather(GraphNode):
    @staticmethod
    def forward(
        ctx: Any, order: Tensor, order_of_backward: Tensor, ticket: Tensor, capacity: int, hidden_size: int,
        dtype: torch.dtype, device: torch.device, wants: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.order = order_of_backward
        tokens, overflow = _OPS.gather(order, ticket, capacity, hidden_size, dtype, device, wants)
        ctx.save_for_backward(ticket)
        ctx.mark_non_differentiable(overflow, *([] if Wants.of_code(wants).rows else [tokens]))
        return tokens, overflow

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (ticket,) = ctx.saved_tensors
        _OPS.gather_backward(ctx.order, ticket, grads[0])
        return None, None, ctx.order.clone(), None, None, None, None, None


class _Combine(GraphNode):
    @staticmethod
    def forward(
        ctx: Any, order: Tensor, order_of_backward: Tensor, ticket: Tensor, expert_out: Tensor, handle: int,
        num_tokens: int, hidden_size: int, dtype: torch.dtype, wants: int,
    ) -> Tensor:  # fmt: skip
        ctx.order, ctx.num_rows, ctx.dtype = order_of_backward, expert_out.shape[0], expert_out.dtype
        # Something is saved in any case: `moe/gradients.py` says why.
        ctx.save_for_backward(ticket, *([expert_out] if Wants.of_code(wants).weights else []))
        combined: Tensor = _OPS.combine(order, ticket, expert_out, handle, num_tokens, hidden_size, dtype, wants)
        return combined

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ticket, *kept = ctx.saved_tensors  # may run forward rounds anew, so it comes first
        rows = _OPS.combine_backward(ctx.order, ticket, grads[0], kept[0] if kept else None, ctx.num_rows)
        rows = rows.to(ctx.dtype) if ctx.needs_input_grad[3] else None
        return None, None, ctx.order.clone(), rows, None, None, None, None, None


_differentiable("dispatch", _Dispatch)
_differentiable("gather", _Gather)
_differentiable("combine", _Combine)
