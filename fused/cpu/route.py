"""Routing on the CPU: which rank owns what, which expert gets which record, and the experts' rows.

The order of rows is that of `thinwire.moe.plan.ArrivalPlan`: by expert, then source rank, then token. It follows from
the ids that arrived and from the counts of tokens alone. A peer's ids are only ever compared, and its counts are
checked, so that whatever it writes, nothing outside this rank's tensors is touched.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from thinwire.errors import RoutingError, WireFormatError
from thinwire.fused.cpu.codec import Layout, dequantize_row, dtype_code, element_bytes, record_layout
from thinwire.fused.cpu.compat import FINGERPRINT, device, intrinsic, kernel, types
from thinwire.fused.cpu.intrinsics import (
    load_float32,
    load_int32,
    load_int64,
    stack_buffer,
    store_float32,
    store_int8,
    store_int32,
    store_int64,
    zero_bytes,
)
from thinwire.fused.cpu.signal import line_of
from thinwire.fused.cpu.vectors import NONE, constant, load
from thinwire.triton_kernels.round_layout import (
    COMBINE,
    CONTROL_STATUS,
    DTYPE_CODES,
    LINE_BYTES,
    LINE_DTYPE,
    LINE_TOKENS,
    MAX_WORLD,
    RUNNING,
    Lane,
    RoundLayout,
)
from thinwire.wire import WireFormat

__all__ = [
    "MIXED_DTYPES",
    "POISONED",
    "RANKS_BYTES",
    "WRITTEN",
    "LaneNumbers",
    "Numbers",
    "check_dtype",
    "check_rows",
    "destinations",
    "gather",
    "mixed_dtypes",
    "numbers_at",
    "numbers_of",
    "record_layout_of",
    "route",
    "sum_layout_of",
    "token_count",
]

#: What kernels that fill an output return.
WRITTEN, POISONED, MIXED_DTYPES = 0, 1, 2

#: Bytes of an array of ranks, as int64.
RANKS_BYTES = 8 * MAX_WORLD

# Words of the control block that no other kernel uses. What the last round left in `positions` and in `index`: so much
# is cleared and no more, or a decode step would pay for slots that only a prefill fills.
_CONTROL_TOKENS, _CONTROL_ROWS = 3, 4
_ZERO = np.float32(0.0)

# ---------------------------------------------------------------------------------------------------------------------
# What kernels know of a lane


class LaneNumbers(NamedTuple):
    """All that is the same in every round of a lane. Kernels read it from memory: it is too long for an argument."""

    world: int
    num_experts: int
    top_k: int
    hidden: int
    max_tokens: int
    slots: int
    record_bytes: int
    sum_bytes: int
    stuck: int
    signals: int  # the dispatch lines
    combine_lines: int
    ids: int
    weights: int
    records: int
    sums: int
    rank: int
    align: int
    experts_each: int
    larger_ranks: int  # own one expert more
    first_expert: int
    local_experts: int
    num_rows: int  # that the index has room for
    dtype: int  # of the rows
    dtype_word: int  # how a dispatch line names it
    record_kind: int  # the layout of a dispatched record, as the codec has it
    record_group: int
    record_row_scale: int
    record_hidden: int
    record_scales_offset: int
    record_row_bytes: int
    sum_kind: int  # of a combined one
    sum_group: int
    sum_row_scale: int
    sum_hidden: int
    sum_scales_offset: int
    sum_row_bytes: int


_RECORD_FIELDS = [name for name in LaneNumbers._fields if name.startswith("record_") and name != "record_bytes"]
_SUM_FIELDS = [name for name in LaneNumbers._fields if name.startswith("sum_") and name != "sum_bytes"]


class Numbers(NamedTuple):
    """`LaneNumbers` in memory, as int64."""

    words: np.ndarray
    address: int


def _layout_that_fits(wire: WireFormat, hidden: int, dtype: torch.dtype | None, room: int) -> Layout:
    if dtype is None:
        return (0, 0, 0, hidden, 0, 0)
    layout = record_layout(wire, hidden, dtype)
    if layout[-1] > room:
        raise WireFormatError(
            f"a row of {hidden} elements of {dtype} takes {layout[-1]} bytes in wire format {str(wire)!r}, and this lane "
            f"was laid out for records of {room} bytes; accepted: rows of the dtype that it was laid out for"
        )
    return layout


@lru_cache(maxsize=512)
def _numbers(
    layout: RoundLayout, wire: WireFormat, combine_wire: WireFormat, rank: int, align: int, dtype: torch.dtype | None
) -> Numbers:
    if layout.WORLD > MAX_WORLD:
        raise RoutingError(f"a lane of {layout.WORLD} ranks; accepted: at most {MAX_WORLD}")
    record = _layout_that_fits(wire, layout.HIDDEN, dtype, layout.RECORD_BYTES)
    total = _layout_that_fits(combine_wire, layout.HIDDEN, dtype, layout.SUM_BYTES)
    numbers = LaneNumbers(
        world=layout.WORLD,
        num_experts=layout.NUM_EXPERTS,
        top_k=layout.TOP_K,
        hidden=layout.HIDDEN,
        max_tokens=layout.MAX_TOKENS,
        slots=layout.SLOTS,
        record_bytes=layout.RECORD_BYTES,
        sum_bytes=layout.SUM_BYTES,
        stuck=layout.STUCK,
        signals=layout.SIGNALS,
        combine_lines=layout.SIGNALS + COMBINE * layout.WORLD * LINE_BYTES,
        ids=layout.IDS,
        weights=layout.WEIGHTS,
        records=layout.RECORDS,
        sums=layout.SUMS,
        rank=rank,
        align=align,
        experts_each=layout.NUM_EXPERTS // layout.WORLD,
        larger_ranks=layout.NUM_EXPERTS % layout.WORLD,
        first_expert=layout.first_expert(rank),
        local_experts=layout.first_expert(rank + 1) - layout.first_expert(rank),
        num_rows=layout.num_rows(rank, align),
        dtype=0 if dtype is None else dtype_code(dtype),
        dtype_word=-1 if dtype is None else DTYPE_CODES[dtype],
        **dict(zip(_RECORD_FIELDS, record, strict=True)),
        **dict(zip(_SUM_FIELDS, total, strict=True)),
    )
    words = np.array(numbers, dtype=np.int64)
    words.flags.writeable = False
    return Numbers(words, words.ctypes.data)


def numbers_of(lane: Lane, dtype: torch.dtype | None = None) -> Numbers:
    """The numbers of a lane whose rows have a dtype; without one, of a kernel that looks at no row.

    They hold no address, so lanes that are alike share them. The caller holds on to what this returns while a kernel
    reads from it.

    Raises:
        WireFormatError: for a dtype that cannot travel, or whose records are larger than the lane's slots.
        RoutingError: for more ranks than `MAX_WORLD`.
    """
    return _numbers(lane.layout, lane.wire, lane.combine_wire, lane.rank, lane.align, dtype)


@intrinsic
def numbers_at(typing_context, address):
    """The `LaneNumbers` at an address."""
    count = len(LaneNumbers._fields)

    def codegen(context, builder, signature, args):
        addresses = (builder.add(args[0], constant(8 * field)) for field in range(count))
        word = context.get_value_type(types.int64)
        return context.make_tuple(
            builder, signature.return_type, [load(builder, address, word, 8) for address in addresses]
        )

    return types.NamedUniTuple(types.int64, count, LaneNumbers)(types.int64), codegen


@device
def record_layout_of(lane):
    """What the codec's row functions must know of a dispatched record: a `Layout`."""
    return (
        lane.record_kind,
        lane.record_group,
        lane.record_row_scale,
        lane.record_hidden,
        lane.record_scales_offset,
        lane.record_row_bytes,
    )


@device
def sum_layout_of(lane):
    """The same of a combined record."""
    return (
        lane.sum_kind,
        lane.sum_group,
        lane.sum_row_scale,
        lane.sum_hidden,
        lane.sum_scales_offset,
        lane.sum_row_bytes,
    )


@device
def mixed_dtypes(bases, lane, kind):
    """Whether records of `kind` hold elements of another dtype than `lane` has: only those of `none` hold a dtype."""
    line = line_of(bases, lane.rank, lane.signals, lane.rank)
    return kind == NONE and np.int64(load_int32(line + 4 * LINE_DTYPE)) != lane.dtype_word


@device
def token_count(bases, lane, source):
    """How many tokens a rank sent this rank in this round; 0 where it wrote a number that cannot be."""
    tokens = load_int32(line_of(bases, lane.rank, lane.signals, source) + 4 * LINE_TOKENS)
    return np.int64(tokens) if 0 <= tokens <= lane.max_tokens else np.int64(0)


@device
def destinations(ids, lane, ranks):
    """Writes the ranks that own a token's experts, ascending, each once, and returns how many: at most `slots`.

    `ids` is the address of the token's int32 ids, any numbers, and `ranks` of `RANKS_BYTES` for int64.
    """
    boundary = lane.larger_ranks * (lane.experts_each + 1)
    zero_bytes(ranks, 8 * lane.world)
    for k in range(lane.top_k):
        expert = load_int32(ids + 4 * k)
        if 0 <= expert < boundary:
            store_int64(ranks + 8 * (expert // (lane.experts_each + 1)), 1)
        elif 0 <= expert < lane.num_experts:
            store_int64(ranks + 8 * (lane.larger_ranks + (expert - boundary) // lane.experts_each), 1)
    count = 0
    for rank in range(lane.world):
        if load_int64(ranks + 8 * rank) != 0:
            store_int64(ranks + 8 * count, rank)
            count += 1
    return count


# ---------------------------------------------------------------------------------------------------------------------
# Route


@device
def take_slot(ids, factors, lane, counts, experts, weights):
    """Writes a token's experts on this rank, counted from its first, ascending, and their weights, and counts them.

    -1 and 0 follow them. A repeated one counts once: honest peers send none, and there is room for distinct ones only.
    """
    last, found = -1, 0
    while found < lane.top_k:
        expert, weight = lane.local_experts, _ZERO
        for k in range(lane.top_k):
            candidate = load_int32(ids + 4 * k) - lane.first_expert
            if last < candidate < expert:
                expert, weight = candidate, load_float32(factors + 4 * k)
        if expert == lane.local_experts:
            break
        store_int64(experts + 8 * found, expert)
        store_float32(weights + 4 * found, weight)
        store_int64(counts + 8 * expert, load_int64(counts + 8 * expert) + 1)
        last = expert
        found += 1
    for term in range(found, lane.top_k):
        store_int64(experts + 8 * term, -1)
        store_float32(weights + 4 * term, _ZERO)


@device
def clear_slots(lane, first, cleared, end, positions, weights):
    """Fills slots that hold no token with -1 and 0, up to `cleared`, and on to the first that is clear already.

    Behind `cleared` that is the very next, unless the lane's owner has written into it.
    """
    for slot in range(first, end):
        begin = slot * lane.top_k
        if slot >= cleared and load_int64(positions + 8 * begin) == -1:
            break
        for term in range(begin, begin + lane.top_k):
            store_int64(positions + 8 * term, -1)
            store_float32(weights + 4 * term, _ZERO)


@device
def place_experts(lane, counts, offsets):
    """Writes where each expert's rows begin; returns where the last one's end."""
    row = np.int64(0)
    for expert in range(lane.local_experts):
        store_int64(offsets + 8 * expert, row)
        row += (load_int64(counts + 8 * expert) + lane.align - 1) // lane.align * lane.align
    store_int64(offsets + 8 * lane.local_experts, row)
    return row


@device
def place_rows(lane, token_counts, index, offsets, positions):
    """Turns the experts in `positions` into rows, counting each expert's offset up to its end."""
    for source in range(lane.world):
        first_slot = source * lane.max_tokens
        for slot in range(first_slot, first_slot + load_int64(token_counts + 8 * source)):
            for term in range(slot * lane.top_k, (slot + 1) * lane.top_k):
                expert = load_int64(positions + 8 * term)
                if expert < 0:
                    break
                next_row = offsets + 8 * expert
                row = load_int64(next_row)
                store_int64(next_row, row + 1)
                store_int64(positions + 8 * term, row)
                store_int64(index + 8 * row, slot)


@device
def clear_rows(lane, rows, cleared, index, counts, offsets):
    """Takes the offsets back to the beginnings, and fills the index with -1 where it names no record."""
    for expert in range(lane.local_experts):
        end = load_int64(offsets + 8 * expert)
        store_int64(offsets + 8 * expert, end - load_int64(counts + 8 * expert))
        while end % lane.align:
            store_int64(index + 8 * end, -1)
            end += 1
    for row in range(rows, lane.num_rows):
        if row >= cleared and load_int64(index + 8 * row) == -1:
            break
        store_int64(index + 8 * row, -1)


@kernel
def route_kernel(numbers, bases, control, index, counts, offsets, positions, weights, fingerprint=FINGERPRINT):
    """Fills a lane's index, expert_counts, expert_offsets, positions and weights, whose addresses these are."""
    lane = numbers_at(numbers)
    own = load_int64(bases + 8 * lane.rank)
    token_counts = stack_buffer(RANKS_BYTES)
    running = load_int32(control + 4 * CONTROL_STATUS) == RUNNING
    cleared = np.int64(load_int32(control + 4 * _CONTROL_TOKENS))
    most = np.int64(0)
    zero_bytes(counts, 8 * lane.local_experts)
    # What peers wrote is read here. All that follows works on what this rank wrote down, since a peer that was blamed
    # elsewhere may still write.
    for source in range(lane.world):
        tokens = token_count(bases, lane, source) if running else np.int64(0)
        store_int64(token_counts + 8 * source, tokens)
        most = max(most, tokens)
        slot = source * lane.max_tokens
        for first in range(slot * lane.top_k, (slot + tokens) * lane.top_k, lane.top_k):
            ids, factors = own + lane.ids + 4 * first, own + lane.weights + 4 * first
            take_slot(ids, factors, lane, counts, positions + 8 * first, weights + 4 * first)
        clear_slots(lane, slot + tokens, slot + cleared, slot + lane.max_tokens, positions, weights)
    rows = place_experts(lane, counts, offsets)
    place_rows(lane, token_counts, index, offsets, positions)
    clear_rows(lane, rows, load_int32(control + 4 * _CONTROL_ROWS), index, counts, offsets)
    store_int32(control + 4 * _CONTROL_TOKENS, most)
    store_int32(control + 4 * _CONTROL_ROWS, rows)


def route(lane: Lane) -> None:
    """Fills the lane's index, expert_counts, expert_offsets, positions and weights from what arrived.

    Rows are sorted by expert, then source rank, then token. To a poisoned lane nothing has arrived: all counts are 0,
    all of index and positions is -1. Of these tensors only what this call and the last one used is written.

    Args:
        lane: a lane whose dispatch phase has been waited for.

    Raises:
        TransportUnavailable: without numba.
    """
    numbers = numbers_of(lane)
    route_kernel(
        numbers.address,
        lane.bases.data_ptr(),
        lane.control.data_ptr(),
        lane.index.data_ptr(),
        lane.expert_counts.data_ptr(),
        lane.expert_offsets.data_ptr(),
        lane.positions.data_ptr(),
        lane.weights.data_ptr(),
    )


# ---------------------------------------------------------------------------------------------------------------------
# Gather


@kernel
def gather_kernel(
    numbers, bases, control, index, offsets, out, out_stride, capacity, overflow, fingerprint=FINGERPRINT
):
    """Rows of the experts' input out of the records, at the address `out`; `out_stride` is in bytes."""
    lane = numbers_at(numbers)
    store_int8(overflow, 0)
    if load_int32(control + 4 * CONTROL_STATUS) != RUNNING:
        return POISONED
    if mixed_dtypes(bases, lane, lane.record_kind):
        return MIXED_DTYPES
    rows = load_int64(offsets + 8 * lane.local_experts)
    if rows > capacity:
        store_int8(overflow, 1)
    layout = record_layout_of(lane)
    records = load_int64(bases + 8 * lane.rank) + lane.records
    for row in range(capacity):
        record = load_int64(index + 8 * row) if row < rows else -1
        if record < 0:
            zero_bytes(out + row * out_stride, lane.hidden * element_bytes(lane.dtype))
        else:
            dequantize_row(records + record * lane.record_bytes, out + row * out_stride, lane.dtype, layout)
    return WRITTEN


def check_rows(rows: torch.Tensor, hidden: int, name: str) -> None:
    """Refuses rows that a kernel, which sees an address and a stride, would read or write past.

    Raises:
        RoutingError: naming what was passed.
    """
    if rows.dim() != 2 or rows.shape[1] != hidden or (hidden > 1 and rows.stride(1) != 1):
        raise RoutingError(
            f"{name} is a tensor {tuple(rows.shape)} with strides {rows.stride()}; accepted: [rows, {hidden}] with each "
            f"row's columns side by side"
        )


def check_dtype(result: int, name: str, dtype: torch.dtype) -> None:
    """Refuses rows of another dtype than the records hold.

    Raises:
        RoutingError: if a kernel returned `MIXED_DTYPES`.
    """
    if result == MIXED_DTYPES:
        raise RoutingError(f"{name} is {dtype}; with wire format 'none' it must be of the dtype of the tokens sent")


def gather(lane: Lane, out: torch.Tensor, overflow: torch.Tensor) -> None:
    """The experts' input: out[r] = dequantised record index[r], zero where there is none.

    Args:
        lane: a lane that was routed. A poisoned one gives NaN.
        out: [capacity, hidden] float32, float16 or bfloat16, each row's columns side by side, written whole. With wire
            format `none` its dtype must be the tokens'.
        overflow: bool [], whether there are more rows than `capacity`.

    Raises:
        RoutingError: another shape or stride of `out`, or with `none` another dtype.
        WireFormatError: another dtype.
        TransportUnavailable: without numba.
    """
    check_rows(out, lane.layout.HIDDEN, "out")
    numbers = numbers_of(lane, out.dtype)
    result = gather_kernel(
        numbers.address,
        lane.bases.data_ptr(),
        lane.control.data_ptr(),
        lane.index.data_ptr(),
        lane.expert_offsets.data_ptr(),
        out.data_ptr(),
        out.stride(0) * out.itemsize,
        out.shape[0],
        overflow.data_ptr(),
    )
    check_dtype(result, "out", out.dtype)
    if result == POISONED:
        out.fill_(float("nan"))
