"""Redistribute: the same tensor from one layout over the ranks to another, partial sums made on the way.

`thinwire.comm.layout` chooses the operations; here they are carried out. What several ranks hold of the result is the
same on all of them to the last bit, on quantised wires too: an operation quantises what a rank keeps as well. Parts
travel flat, so groups of consecutive elements share a scale.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from thinwire.comm import Communicator, Group, communicator_or_default, on_communicator
from thinwire.comm.communicator import shared_split
from thinwire.comm.layout import Block, Plan, Step, TensorLayout, as_tensor_layout, num_elements, plan_redistribute
from thinwire.errors import LayoutError
from thinwire.fused.all_to_all import all_to_all_v
from thinwire.fused.call import check_out
from thinwire.fused.codec import require_float, resolve_wire
from thinwire.fused.gradients import require_linear, wants_gradient, with_gradient
from thinwire.fused.ops import all_gather, all_reduce, reduce_scatter
from thinwire.fused.transport import check_transport
from thinwire.wire import WireFormat


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

    Returns `out`, or a tensor `dst.shard_shape(shape)` of x's dtype, which shares x's memory where nothing travels.
    `plan_redistribute(shape, src, dst).explain()` says which operations it takes. Sums are of float32 in the order of
    the ranks. Groups of ranks are made by the first call that needs them. It has a backward, collective as well: the
    gradient goes from `grad_layout` to `src`, where ranks that hold the same part, or summands of it, get all of it.

    Args:
        x: this rank's part, `src.shard_shape(shape)`; float32, float16 or bfloat16, or any dtype in the wire `none`.
        src, dst: layouts over the ranks of `comm`, or numbers of parts such as (4, 1), see `as_tensor_layout`.
        shape: of the whole tensor, to be compared with what x's shape and `src` give.
        out: contiguous, filled in place; it shares no memory with x. What lies in it as it travels arrives there.
        wire, comm, transport: see `all_gather`. `grad_wire` is that of the way back; None means the same.
        grad_layout: the layout in which the gradient of the result arrives; None means `dst`, with what is partial
            repeated. Where ranks hold the same part but each uses it in another part of the work, as in a product with
            a weight that is cut by columns, each has a summand of the gradient: pass `dst.partial(*axes)`.

    Raises:
        LayoutError: layouts that do not fit the tensor, the communicator or each other.
        CountsError, WireFormatError, ArgumentError: an `out`, dtype or device that does not fit; gradients with `out`.
        PeerTimeout, TransportUnavailable: see `all_gather`.

    >>> import thinwire as tw
    >>> layout = tw.Layout((1, 1), ("dp", "mp"))
    >>> with tw.init() as comm:
    ...     redistribute(torch.ones(2, 2), layout("dp", "mp"), layout("mp", "None"), wire="none", comm=comm).shape
    torch.Size([2, 2])
    """
    comm = communicator_or_default(comm)
    check_transport(transport)
    there, back = resolve_wire(wire), resolve_wire(wire if grad_wire is None else grad_wire)
    comm.check_device("x", x)
    require_float(x, there, "redistribute")
    src, dst = as_tensor_layout(src, comm.size), as_tensor_layout(dst, comm.size)
    whole = src.full_shape(x.shape)
    if shape is not None and (not isinstance(shape, tuple | list) or tuple(shape) != whole):
        raise LayoutError(f"x is {list(x.shape)}, which in {src} is part of {whole}, not of {shape!r}")
    carry = partial(_carry_out, comm, plan_redistribute(whole, src, dst), there, transport)
    if out is not None:
        check_out("redistribute", x, out, dst.shard_shape(whole), None)
    if not wants_gradient(x):
        return carry(x, out)
    require_linear("redistribute", out, False)
    require_float(x, back, "redistribute, on the way back")
    arrives = dst.reduced() if grad_layout is None else as_tensor_layout(grad_layout, comm.size)
    if arrives.slices(whole, comm.rank) != dst.slices(whole, comm.rank):
        raise LayoutError(f"grad_layout is {arrives}, which does not cut as the result's layout {dst} does")
    way_back = plan_redistribute(whole, arrives, src.reduced())
    return with_gradient(x, carry, partial(_carry_out, comm, way_back, back, transport))


@torch.no_grad()
def _carry_out(
    comm: Communicator, plan: Plan, wire: WireFormat, transport: str, x: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    with comm.call("redistribute", plan.shape, x.dtype, wire, transport, ("from", plan.src, "to", plan.dst)):
        if 0 in plan.shape:
            return x.new_empty(plan.dst.shard_shape(plan.shape)) if out is None else out
        for step in plan.steps:
            x = _take_step(comm, step, wire, transport, x, out if step is plan.steps[-1] else None)
        return x if out is None or x is out else out.copy_(x)


def _take_step(
    comm: Communicator, step: Step, wire: WireFormat, transport: str, x: torch.Tensor, out: torch.Tensor | None
) -> torch.Tensor:
    """Returns what a rank holds after a step: `out`, where the step can fill that at once."""
    held, wanted = step.held[comm.rank], step.wanted[comm.rank]
    group = next(group for group in step.groups if comm.rank in group)
    shape = tuple(part.stop - part.start for part in wanted)
    collect: Any  # makes a tensor: these collectives are waited for
    if step.op == "slice":
        return x[_within(wanted, held)].contiguous()
    if step.op == "zero":
        return x if comm.rank == group[0] else torch.zeros_like(x)
    among = comm if len(step.groups) == 1 else shared_split(comm, step.groups)
    through: dict[str, Any] = {"wire": wire, "comm": among, "transport": transport}
    if step.op == "all_reduce":
        collect, blocks = partial(all_reduce, x.reshape(-1)), [wanted]
    elif step.op == "reduce_scatter":
        collect, blocks = partial(reduce_scatter, _packed(x, [step.wanted[peer] for peer in group], held)), [wanted]
    elif step.op == "all_gather":
        collect, blocks = partial(all_gather, x.reshape(-1)), [step.held[peer] for peer in group]
    else:
        sends, receives = step.blocks[comm.rank], [row[comm.rank] for row in step.blocks]
        counts = list(map(num_elements, sends)), list(map(num_elements, receives))
        collect = partial(all_to_all_v, _packed(x, sends, held), *counts)
        blocks = [block for block in receives if block is not None]
    # Where parts lie one after the other in the result, they arrive there.
    views = [torch.empty(shape, dtype=torch.uint8, device="meta")[_within(block, wanted)] for block in blocks]
    starts = itertools.accumulate((view.numel() for view in views), initial=0)
    if all(view.is_contiguous() and view.storage_offset() == start for view, start in zip(views, starts, strict=False)):
        filled = collect(out=None if out is None else out.view(-1), **through)
        return filled.view(shape) if out is None else out
    parts = collect(**through).split([view.numel() for view in views])
    out = comm.result_memory.new_empty(x, shape) if out is None else out
    for block, view, part in zip(blocks, views, parts, strict=True):
        out[_within(block, wanted)].copy_(part.view(view.shape))
    return out


def _packed(x: torch.Tensor, blocks: Sequence[Block | None], held: Block) -> torch.Tensor:
    """Blocks of a tensor that x is the part `held` of, one after the other, flat."""
    parts = [x[_within(block, held)].reshape(-1) for block in blocks if block is not None]
    return torch.cat(parts) if parts else x.new_empty(0)


def _within(block: Block, outer: Block) -> Block:
    """Where a block is in a tensor that holds `outer`."""
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(block, outer, strict=True))
