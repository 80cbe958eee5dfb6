"""Redistribute: the same tensor from one layout over the ranks to another, partial sums made on the way.

`thinwire.comm.layouts.layout_plan` chooses the operations; here they are carried out. What several ranks hold of the
result is the same on all of them to the last bit, on quantised wires too: an operation quantises what a rank keeps as
well. Parts travel flat, so groups of consecutive elements share a scale, wherever a row of the part ends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from thinwire.comm import Communicator, Group, communicator_or_default
from thinwire.comm.calls import Attachment
from thinwire.comm.layouts.layout import TensorLayout, as_tensor_layout
from thinwire.comm.layouts.layout_plan import Block, RedistributePlan, Step, num_elements, plan_redistribute
from thinwire.compiler import GraphNode
from thinwire.errors import LayoutError
from thinwire.fused.all_gather import all_gather
from thinwire.fused.all_reduce import all_reduce
from thinwire.fused.all_to_all import all_to_all_v
from thinwire.fused.codec import require_float, resolve_wire
from thinwire.fused.gradients import require_linear
from thinwire.fused.operations import on_communicator
from thinwire.fused.prepared import check_out
from thinwire.fused.reduce_scatter import reduce_scatter
from thinwire.fused.transport import check_transport
from thinwire.wire import WireFormat

_Groups = tuple[tuple[int, ...], ...]


@on_communicator
def redistribute(
    x: torch.Tensor,
    src: TensorLayout | Sequence[int],
    dst: TensorLayout | Sequence[int],
    *,
    shape: Sequence[int] | None = None,
    out: torch.Tensor | None = None,
    wire: str | WireFormat | None = None,
    comm: Group | None = None,
    transport: str = "auto",
    grad_layout: TensorLayout | Sequence[int] | None = None,
    grad_wire: str | WireFormat | None = None,
) -> torch.Tensor:
    """What this rank holds of a tensor in the layout `dst`, from what the ranks hold in `src`. Collective.

    `plan_redistribute(shape, src, dst).explain()` says which operations it takes. Sums are of float32 in the order of
    the ranks. The first call that needs a group of ranks makes it, with `comm`, and later ones use it again.

    It has a backward: the gradient goes from `grad_layout` back to `src`, where ranks that hold the same part, or
    summands of it, all get the part's whole gradient. It is collective as well.

    Args:
        x: this rank's part, `src.shard_shape(shape)`. Quantised wires take float32, float16 and bfloat16; `none` any
            dtype.
        src, dst: layouts over the ranks of `comm`, or numbers of parts such as (4, 1), see `as_tensor_layout`.
        shape: of the whole tensor, to be compared with what x's shape and `src` give.
        out: contiguous, filled in place; it shares no memory with x. Where the last operation is an all-gather or
            all-to-all-v of all ranks, whose parts lie one after the other in the result, they are received right into
            it, and, exactly, stored straight into a tensor of `thinwire.empty`.
        wire: the format of what travels; None means THINWIRE_WIRE, else int8+h64. With `none` values are
            moved as they are.
        comm: a communicator, a process group, or a DeviceMesh of one axis; None means the one that `init` made.
        transport: "direct", "staged" or "auto", see `all_to_all_v`.
        grad_layout: the layout in which the gradient of the result arrives; None means `dst`, with what is partial
            repeated. Where ranks hold the same part but each uses it in another part of the work, as in a matrix
            product with a weight that is cut by columns, each has a summand of the gradient: pass
            `dst.partial(*axes)`.
        grad_wire: the wire on the way back; None means the same.

    Returns:
        `dst.shard_shape(shape)`, of x's dtype: `out`; or a tensor, which may share x's memory where nothing travels.

    Raises:
        LayoutError: layouts that do not fit the tensor, the communicator or each other.
        CountsError: an `out` that does not fit.
        WireFormatError: a dtype that the wire cannot carry, or gradients wanted with `out`.
        PeerTimeout: a peer did not answer within the communicator's timeout.
        TransportUnavailable: the direct transport was asked for and cannot be had.
        ArgumentError: a tensor on another device.

    Source: the cases of DTensor's and MindSpore's redistribution; their multi-step searches are not needed, as what is
    no single collective is one all-to-all-v of the parts in which two ranks' shards overlap.

    >>> import thinwire as tw
    >>> from thinwire.comm.layouts.layout import Layout
    >>> layout = Layout((1, 1), ("dp", "mp"))
    >>> with tw.init() as comm:
    ...     redistribute(torch.ones(2, 2), layout("dp", "mp"), layout("mp", "None"), wire="none", comm=comm).shape
    torch.Size([2, 2])
    """
    comm = communicator_or_default(comm)
    check_transport(transport)
    there = resolve_wire(wire)
    back = there if grad_wire is None else resolve_wire(grad_wire)
    comm.check_device("x", x)
    require_float(x, there, "redistribute")
    src, dst = as_tensor_layout(src, comm.size), as_tensor_layout(dst, comm.size)
    whole = src.full_shape(x.shape)
    if shape is not None and (not isinstance(shape, tuple | list) or tuple(shape) != whole):
        raise LayoutError(f"x is {list(x.shape)}, which in {src} is part of {whole}, not of {shape!r}")
    plan = plan_redistribute(whole, src, dst)
    if out is not None:
        check_out("redistribute", x, out, dst.shard_shape(whole), None)
    if not (x.requires_grad and torch.is_grad_enabled()):
        return _carry_out(plan, x, _Link(comm, there, transport), out)
    require_linear("redistribute", out, False)
    require_float(x, back, "redistribute, on the way back")
    arrives = dst.reduced() if grad_layout is None else as_tensor_layout(grad_layout, comm.size)
    if arrives.slices(whole, comm.rank) != dst.slices(whole, comm.rank):
        raise LayoutError(f"grad_layout is {arrives}, which does not cut as the result's layout {dst} does")
    way_back = plan_redistribute(whole, arrives, src.reduced())
    links = (_Link(comm, there, transport), _Link(comm, back, transport))
    result: torch.Tensor = _Redistribute.apply(x, plan, way_back, *links)
    return result


class _SharedSplit(Attachment):
    """A communicator as an attachment of the one that it was split from."""

    def __init__(self, communicator: Communicator, groups: _Groups) -> None:
        self.communicator, self.groups = communicator, groups

    def describe(self) -> str:
        return f"split: {len(self.groups)} groups, this rank in one of {self.communicator.size}"

    def close(self) -> None:
        self.communicator._close_all()


def shared_split(comm: Communicator, groups: _Groups) -> Communicator:
    """As `comm.split`, but only the first call with these groups makes one; closed together with `comm`."""
    return comm.attached(f"split {groups}", lambda: _SharedSplit(comm.split(groups=groups), groups)).communicator


@dataclass(frozen=True)
class _Link:
    """How rows travel."""

    comm: Communicator
    wire: WireFormat
    transport: str

    def among(self, groups: _Groups) -> dict[str, Any]:
        """The arguments of a collective in which each of the groups is by itself."""
        comm = self.comm if len(groups) == 1 else shared_split(self.comm, groups)
        return {"wire": self.wire, "comm": comm, "transport": self.transport}


class _Redistribute(GraphNode):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, plan: RedistributePlan, way_back: RedistributePlan, there: _Link, back: _Link
    ) -> torch.Tensor:
        ctx.way_back, ctx.link = way_back, back
        moved = _carry_out(plan, x, there)
        return moved.view_as(moved)  # autograd would take x itself for a leaf that is modified

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _carry_out(ctx.way_back, grads[0], ctx.link), None, None, None, None


@torch.no_grad()
def _carry_out(plan: RedistributePlan, x: torch.Tensor, link: _Link, out: torch.Tensor | None = None) -> torch.Tensor:
    details = ("from", plan.src, "to", plan.dst)
    with link.comm.call("redistribute", plan.shape, x.dtype, link.wire, link.transport, details):
        if 0 in plan.shape:
            return x.new_empty(plan.dst.shard_shape(plan.shape)) if out is None else out
        for step in plan.steps:
            x = _take_step(step, x, link, out if step is plan.steps[-1] else None)
        return x if out is None or x is out else out.copy_(x)


def _take_step(step: Step, x: torch.Tensor, link: _Link, out: torch.Tensor | None) -> torch.Tensor:
    """What a rank holds after a step: in `out`, where the step can fill that at once."""
    rank = link.comm.rank
    moved: Any  # a tensor: these collectives are waited for
    if step.op == "slice":
        return x[_within(step.wanted[rank], step.held[rank])].contiguous()
    if step.op == "zero":
        return x if step.keeps(rank) else torch.zeros_like(x)
    through = link.among(step.groups)
    if step.op == "all_reduce":
        moved = all_reduce(x.reshape(-1), **through)
        return moved.view(x.shape)
    shape = step.dst.shard_shape(step.shape)
    if step.op == "reduce_scatter":
        parts = [x[_within(step.wanted[member], step.held[rank])].reshape(-1) for member in step.group_of(rank)]
        moved = reduce_scatter(torch.cat(parts), **through)
        return moved.view(shape)
    blocks: Sequence[Block | None]
    if step.op == "all_gather":
        blocks, collect = [step.held[member] for member in step.group_of(rank)], partial(all_gather, x.reshape(-1))
    else:
        sends, blocks = step.blocks[rank], [row[rank] for row in step.blocks]
        sent = [x[_within(block, step.held[rank])].reshape(-1) for block in sends if block is not None]
        flat = torch.cat(sent) if sent else x.new_empty(0)
        collect = partial(all_to_all_v, flat, [num_elements(block) for block in sends], list(map(num_elements, blocks)))
    places = [_within(block, step.wanted[rank]) for block in blocks if block is not None]
    if _fill_in_order(places, shape):
        moved = collect(out=None if out is None else out.view(-1), **through)
        return moved.view(shape) if out is None else out
    moved = collect(**through)
    out = link.comm.result_memory.new_empty(x, shape) if out is None else out
    views = [out[place] for place in places]
    for view, part in zip(views, moved.split([view.numel() for view in views]), strict=True):
        view.copy_(part.view(view.shape))
    return out


def _fill_in_order(places: Sequence[Block], shape: Sequence[int]) -> bool:
    """Whether parts of a tensor of this shape, one after the other, lie as the tensor itself does.

    >>> _fill_in_order([(slice(0, 1), slice(0, 3)), (slice(1, 3), slice(0, 3))], (3, 3))
    True
    >>> _fill_in_order([(slice(0, 2), slice(0, 1)), (slice(0, 2), slice(1, 2))], (2, 2))
    False
    """
    position = 0
    for place in places:
        sizes = [part.stop - part.start for part in place]
        cut = next((dim for dim, size in enumerate(sizes) if size > 1), len(sizes))  # behind it all has to be whole
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        first = sum(part.start * stride for part, stride in zip(place, strides, strict=True))
        if first != position or sizes[cut + 1 :] != list(shape[cut + 1 :]):
            return False
        position += math.prod(sizes)
    return True


def _within(block: Block, outer: Block) -> Block:
    """Where a block is in a tensor that holds `outer`."""
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(block, outer, strict=True))
