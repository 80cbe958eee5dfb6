"""Routing on the CPU: which of this rank's experts gets which record, and the experts' rows.

The order of rows is that of `thinwire.moe.plan.ArrivalPlan`: by expert, then source rank, then token. It follows from
the ids that arrived and from the counts of tokens alone. A peer's ids are only ever compared, and its counts are
checked, so that whatever it writes, nothing outside this rank's tensors is touched.
"""

from __future__ import annotations

import numpy as np
import torch

from thinwire.errors import RoutingError
from thinwire.triton_kernels.cpu.codec import dequantize_row, element_bytes
from thinwire.triton_kernels.cpu.compat import device, kernel
from thinwire.triton_kernels.cpu.ir.intrinsics import (
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
from thinwire.triton_kernels.cpu.lane import (
    MIXED_DTYPES,
    POISONED,
    RANKS_BYTES,
    WRITTEN,
    check_dtype,
    check_out,
    mixed_dtypes,
    numbers_at,
    numbers_of,
    record_layout_of,
    token_count,
)
from thinwire.triton_kernels.cpu.signal import is_running
from thinwire.triton_kernels.cpu.team import do_rows, run_in_team, threads_for
from thinwire.triton_kernels.round_layout import CONTROL_ROWS, CONTROL_TOKENS, Lane

#: What `gather_kernel` returns, beside what other kernels do: the index or the offsets are not what routing wrote.
_OVERWRITTEN = 3
_ZERO = np.float32(0.0)


@device
def take_slot(ids, factors, lane, experts, weights):
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
        count = lane.expert_counts + 8 * expert
        store_int64(count, load_int64(count) + 1)
        last = expert
        found += 1
    for term in range(found, lane.top_k):
        store_int64(experts + 8 * term, -1)
        store_float32(weights + 4 * term, _ZERO)


@device
def clear_slots(lane, first, cleared, end):
    """Fills slots that hold no token with -1 and 0, up to `cleared`, and on to the first that is clear already.

    Behind `cleared` that is the very next, unless the lane's owner has written into it.
    """
    for slot in range(first, end):
        begin = slot * lane.top_k
        if slot >= cleared and load_int64(lane.positions + 8 * begin) == -1:
            break
        for term in range(begin, begin + lane.top_k):
            store_int64(lane.positions + 8 * term, -1)
            store_float32(lane.row_weights + 4 * term, _ZERO)


@device
def place_experts(lane):
    """Writes where each expert's rows begin; returns where the last one's end."""
    row = np.int64(0)
    for expert in range(lane.local_experts):
        store_int64(lane.expert_offsets + 8 * expert, row)
        row += (load_int64(lane.expert_counts + 8 * expert) + lane.align - 1) // lane.align * lane.align
    store_int64(lane.expert_offsets + 8 * lane.local_experts, row)
    return row


@device
def place_rows(lane, token_counts):
    """Turns the experts in `positions` into rows, counting each expert's offset up to its end."""
    for source in range(lane.world):
        first_slot = source * lane.max_tokens
        for slot in range(first_slot, first_slot + load_int64(token_counts + 8 * source)):
            for term in range(slot * lane.top_k, (slot + 1) * lane.top_k):
                expert = load_int64(lane.positions + 8 * term)
                if expert < 0:
                    break
                next_row = lane.expert_offsets + 8 * expert
                row = load_int64(next_row)
                store_int64(next_row, row + 1)
                store_int64(lane.positions + 8 * term, row)
                store_int64(lane.index + 8 * row, slot)


@device
def clear_rows(lane, rows, cleared):
    """Takes the offsets back to the beginnings, and fills the index with -1 where it names no record."""
    for expert in range(lane.local_experts):
        end = load_int64(lane.expert_offsets + 8 * expert)
        store_int64(lane.expert_offsets + 8 * expert, end - load_int64(lane.expert_counts + 8 * expert))
        while end % lane.align:
            store_int64(lane.index + 8 * end, -1)
            end += 1
    for row in range(rows, lane.num_rows):
        if row >= cleared and load_int64(lane.index + 8 * row) == -1:
            break
        store_int64(lane.index + 8 * row, -1)


@kernel
def route_kernel(numbers):
    """Fills a lane's index, expert_counts, expert_offsets, positions and weights."""
    lane = numbers_at(numbers)
    own = load_int64(lane.buffer_ptrs + 8 * lane.rank)
    token_counts = stack_buffer(RANKS_BYTES)
    running = is_running(lane)
    # Only what the last round left in `positions` and in `index` is cleared, or a decode step would pay for slots that
    # only a prefill fills.
    cleared = np.int64(load_int32(lane.control + 4 * CONTROL_TOKENS))
    most = np.int64(0)
    zero_bytes(lane.expert_counts, 8 * lane.local_experts)
    # What peers wrote is read here. All that follows works on what this rank wrote down, since a peer that was blamed
    # elsewhere may still write.
    for source in range(lane.world):
        tokens = token_count(lane, source) if running else np.int64(0)
        store_int64(token_counts + 8 * source, tokens)
        most = max(most, tokens)
        slot = source * lane.max_tokens
        for first in range(slot * lane.top_k, (slot + tokens) * lane.top_k, lane.top_k):
            ids, factors = own + lane.ids + 4 * first, own + lane.weights + 4 * first
            take_slot(ids, factors, lane, lane.positions + 8 * first, lane.row_weights + 4 * first)
        clear_slots(lane, slot + tokens, slot + cleared, slot + lane.max_tokens)
    rows = place_experts(lane)
    place_rows(lane, token_counts)
    clear_rows(lane, rows, load_int32(lane.control + 4 * CONTROL_ROWS))
    store_int32(lane.control + 4 * CONTROL_TOKENS, most)
    store_int32(lane.control + 4 * CONTROL_ROWS, rows)


def route(lane: Lane) -> None:
    """`thinwire.triton_kernels.permute.route` for CPU tensors; writes only what this call and the last one used."""
    route_kernel(numbers_of(lane).address)


# ---------------------------------------------------------------------------------------------------------------------
# Gather


@device
def gather_rows(where, begin, stop):
    """Rows `begin` to before `stop` of the experts' input out of the records; returns what a kernel does."""
    numbers, out, out_stride, zero_tail = where
    lane = numbers_at(numbers)
    if not is_running(lane):
        return POISONED
    if mixed_dtypes(lane, lane.record_kind):
        return MIXED_DTYPES
    # Users see the index and the offsets, and may have written into them.
    rows = load_int64(lane.expert_offsets + 8 * lane.local_experts)
    if rows < 0 or rows > lane.num_rows:
        return _OVERWRITTEN
    layout = record_layout_of(lane)
    records = load_int64(lane.buffer_ptrs + 8 * lane.rank) + lane.records
    for row in range(begin, stop if zero_tail else min(stop, rows)):
        record = load_int64(lane.index + 8 * row) if row < rows else -1
        if record >= lane.world * lane.max_tokens:
            return _OVERWRITTEN
        if record < 0:
            zero_bytes(out + row * out_stride, lane.hidden * element_bytes(lane.dtype))
        else:
            dequantize_row(records + record * lane.record_bytes, out + row * out_stride, lane.dtype, layout)
    return WRITTEN


@kernel
def gather_rows_kernel(numbers, out, out_stride, zero_tail, capacity, words, member):
    """`gather_rows` in each thread of a team."""
    do_rows(words, member, capacity, gather_rows, (numbers, out, out_stride, zero_tail))


@kernel
def gather_kernel(numbers, out, out_stride, zero_tail, capacity, overflow, gathered):
    """All rows, unless a team has gathered them, at the address `out`; `out_stride` is in bytes."""
    lane = numbers_at(numbers)
    store_int8(overflow, 0)
    if not is_running(lane):
        return POISONED
    rows = load_int64(lane.expert_offsets + 8 * lane.local_experts)
    if capacity < rows <= lane.num_rows:
        store_int8(overflow, 1)
    result = gather_rows((numbers, out, out_stride, zero_tail), 0, 0 if gathered else capacity)
    if gathered and result == WRITTEN:
        for row in range(min(rows, capacity)):  # a thread of the team that met such a one went no further
            if load_int64(lane.index + 8 * row) >= lane.world * lane.max_tokens:
                return _OVERWRITTEN
    return result


def gather(lane: Lane, out: torch.Tensor, overflow: torch.Tensor, zero_tail: bool = False, *, threads: int = 1) -> None:
    """`thinwire.triton_kernels.permute.gather` for CPU tensors.

    Up to `threads` threads share the rows of a large call.

    Raises:
        RoutingError: another shape or stride of `out`, or with `none` another dtype; an `overflow` that is none; an
            index or offsets that somebody wrote into since `route`.
        WireFormatError: another dtype.
        TransportUnavailable: without numba.
    """
    check_out(out, lane.layout.HIDDEN)
    if overflow.dtype != torch.bool or overflow.numel() != 1:
        raise RoutingError(f"overflow is {overflow.dtype} {tuple(overflow.shape)}; accepted: one torch.bool")
    address, stride = numbers_of(lane, out.dtype).address, out.stride(0) * out.itemsize
    arguments = address, out.data_ptr(), stride, int(zero_tail), out.shape[0]
    gathered = 0
    if threads > 1:
        threads = threads_for(out.shape[0], lane.layout.HIDDEN * out.itemsize, threads)
    if threads > 1:
        run_in_team(threads, out.shape[0], gather_rows_kernel, *arguments)
        gathered = 1
    result = gather_kernel(*arguments, overflow.data_ptr(), gathered)
    check_dtype(result, "out", out.dtype)
    if result == _OVERWRITTEN:
        raise RoutingError("index or expert_offsets were written into since they were routed; they are to be read only")
    if result == POISONED:
        out.fill_(float("nan"))
