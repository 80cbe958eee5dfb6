"""Beginning and closing a round on the CPU, and the waits between its parts.

A token is quantised once, straight into the mapped memory of a rank that it goes to, this one if it is among them, and
copied from there, still in this core's cache, to the others; or aside first, where that rank is far (`peer_stores`).
Nothing is counted or exchanged before: a record's slot is its token's number at the sender.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from thinwire.errors import RoutingError
from thinwire.triton_kernels.cpu.codec import quantize_row
from thinwire.triton_kernels.cpu.compat import FINGERPRINT, device, kernel
from thinwire.triton_kernels.cpu.ir.atomics import finish_stores, load_relaxed
from thinwire.triton_kernels.cpu.ir.intrinsics import (
    copy_bytes,
    load_float32,
    load_int32,
    load_int64,
    stack_buffer,
    store_float32,
    store_int32,
    store_int64,
)
from thinwire.triton_kernels.cpu.lane import (
    RANKS_BYTES,
    destinations,
    first_arguments,
    numbers_at,
    numbers_of,
    numbers_that_fit,
    readable_rows,
    record_layout_of,
)
from thinwire.triton_kernels.cpu.launch import addresses
from thinwire.triton_kernels.cpu.peer_stores import goes_aside, store_at
from thinwire.triton_kernels.cpu.round_checksum import (
    epoch_of,
    lines_fit,
    next_epoch,
    plane_sums,
    put,
    put_line_sums,
    record_sums,
)
from thinwire.triton_kernels.cpu.signal import ARRIVED, GAVE_UP, poison, publish, run_wait, signal_line, wait_or_give_up
from thinwire.triton_kernels.cpu.team import do_rows, run_in_team, threads_for
from thinwire.triton_kernels.round_layout import (
    ABANDONED,
    COMBINE,
    DISPATCH,
    DTYPE_BITS,
    LEFT_OPEN,
    REFUSED,
    REPORT_BAD_IDS,
    REPORT_LEFT_OPEN,
    SIGNAL_DTYPE,
    SIGNAL_END,
    SIGNAL_TOKENS,
    WITH_SUMS,
    Lane,
)
from thinwire.triton_kernels.signal import (
    CONTROL_EPOCH,
    CONTROL_STATUS,
    MISMATCHED,
    REPORT_PEERS,
    RUNNING,
    TIMED_OUT,
)

_SENDING, _WAITING = ("buffer_ptrs", "control", "report", "seen"), ("buffer_ptrs", "control", "report")
_ASIDE_BYTES = 32768  # of a record that is made before it is stored: an exact one of 7168 float32
_ID_TYPES = (torch.int32, torch.int64)
_ZERO = np.float32(0.0)


@device
def merge_experts(topk_ids, id_bytes, topk_weights, lane, ids, weights):
    """Writes a token's ids and weights as they travel, and returns whether some id was no expert's.

    Every expert is there once: its first mention has the float32 sum of its weights, in ascending k.
    """
    bad = False
    for k in range(lane.top_k):
        expert = load_int64(topk_ids + 8 * k) if id_bytes == 8 else np.int64(load_int32(topk_ids + 4 * k))
        if expert < 0 or expert >= lane.num_experts:
            bad |= expert != -1
            expert = np.int64(-1)
        mention = 0
        while mention < k and load_int32(ids + 4 * mention) != expert:
            mention += 1
        store_int32(ids + 4 * k, expert if mention == k else -1)
        store_float32(weights + 4 * k, _ZERO)
        if expert >= 0:
            total = load_float32(weights + 4 * mention) + load_float32(topk_weights + 4 * k)
            store_float32(weights + 4 * mention, total)
    return bad


@device
def store_tokens(where, begin, stop):
    """Tokens `begin` to before `stop`: their records to the peers, and their ids and weights into the own planes."""
    numbers, buffer_ptrs, control, report, seen, x, x_stride, topk_ids, id_bytes, topk_weights = where
    if load_int32(control + 4 * CONTROL_STATUS) != RUNNING:
        return
    lane = numbers_at(numbers)
    own = load_int64(buffer_ptrs + 8 * lane.rank)
    first_slot = lane.rank * lane.max_tokens
    ids_plane = lane.ids + 4 * first_slot * lane.top_k
    weights_plane = lane.weights + 4 * first_slot * lane.top_k
    layout = record_layout_of(lane)
    ranks, far, scratch = stack_buffer(RANKS_BYTES), stack_buffer(RANKS_BYTES), stack_buffer(_ASIDE_BYTES)
    # Once, and not for each record: the clock is read for it.
    for peer in range(lane.world):
        aside = peer != lane.rank and goes_aside(lane.record_row_bytes, load_relaxed(seen + 8 * peer))
        store_int64(far + 8 * peer, 1 if aside else 0)
    streamed = np.int64(0)
    epoch = next_epoch(control)
    for token in range(begin, stop):
        first = token * lane.top_k
        ids, weights = own + ids_plane + 4 * first, own + weights_plane + 4 * first
        if merge_experts(topk_ids + id_bytes * first, id_bytes, topk_weights + 4 * first, lane, ids, weights):
            store_int32(report + 4 * REPORT_BAD_IDS, 1)
        slot = first_slot + token
        if lane.checksums:
            pair = plane_sums(ids, weights, lane, epoch, lane.rank, slot)
            put(own + lane.plane_checksums + 16 * slot, pair)
        count = destinations(ids, lane, ranks)
        if count == 0:
            continue
        record = lane.records + slot * lane.record_bytes
        home = load_int64(ranks)
        for j in range(1, count):
            if load_int64(ranks + 8 * j) == lane.rank:
                home = lane.rank
        made = load_int64(buffer_ptrs + 8 * home) + record
        if load_int64(far + 8 * home) != 0 and lane.record_row_bytes <= _ASIDE_BYTES:
            made = scratch
        quantize_row(x + token * x_stride, lane.dtype, made, layout)
        for j in range(count):
            peer = load_int64(ranks + 8 * j)
            target = load_int64(buffer_ptrs + 8 * peer) + record
            if target == made:
                continue
            if load_int64(far + 8 * peer) != 0:
                is_far = store_at(seen + 8 * peer, target, made, lane.record_row_bytes) & 1
                store_int64(far + 8 * peer, is_far)
                streamed |= is_far
            else:
                copy_bytes(target, made, lane.record_row_bytes)
        if lane.checksums:
            pair = record_sums(made, lane, epoch, lane.rank, slot)
            for j in range(count):
                put(load_int64(buffer_ptrs + 8 * load_int64(ranks + 8 * j)) + lane.checksums + 16 * slot, pair)
    if streamed:
        finish_stores()


@kernel
def store_tokens_kernel(
    numbers, buffer_ptrs, control, report, seen, x, x_stride, topk_ids, id_bytes, topk_weights, tokens, words,
    member, fingerprint=FINGERPRINT,
):  # fmt: skip
    """`store_tokens` in each thread of a team."""
    where = (numbers, buffer_ptrs, control, report, seen, x, x_stride, topk_ids, id_bytes, topk_weights)
    do_rows(words, member, tokens, store_tokens, where)


@kernel
def send_tokens_kernel(
    numbers,
    buffer_ptrs,
    control,
    report,
    seen,
    x,
    x_stride,
    topk_ids,
    id_bytes,
    topk_weights,
    tokens,
    stored,
    tag,
    fingerprint=FINGERPRINT,
):
    """Planes and records to the peers, then the dispatch line and its flag. `x_stride` is in bytes.

    `stored`: so many of the tokens, the first ones, have gone through `store_tokens`. `tokens` may be negative, as
    REFUSED is, and nothing is looked at then.
    """
    lane = numbers_at(numbers)
    if load_int32(control + 4 * CONTROL_STATUS) != RUNNING:
        return
    where = (numbers, buffer_ptrs, control, report, seen, x, x_stride, topk_ids, id_bytes, topk_weights)
    store_tokens(where, stored, tokens)
    own = load_int64(buffer_ptrs + 8 * lane.rank)
    first_slot = lane.rank * lane.max_tokens
    ids_plane = lane.ids + 4 * first_slot * lane.top_k
    weights_plane = lane.weights + 4 * first_slot * lane.top_k
    epoch = next_epoch(control)
    plane_bytes, streamed = 4 * max(tokens, 0) * lane.top_k, np.int64(0)
    for peer in range(lane.world):
        base = load_int64(buffer_ptrs + 8 * peer)
        if peer != lane.rank:
            streamed |= store_at(seen + 8 * peer, base + ids_plane, own + ids_plane, plane_bytes)
            streamed |= store_at(seen + 8 * peer, base + weights_plane, own + weights_plane, plane_bytes)
            if lane.checksums:
                sums = lane.plane_checksums + 16 * first_slot
                streamed |= store_at(seen + 8 * peer, base + sums, own + sums, 16 * max(tokens, 0))
        line = signal_line(buffer_ptrs, peer, lane.signals, lane.rank)
        store_int32(line + 4 * SIGNAL_TOKENS, tokens)
        store_int32(line + 4 * SIGNAL_DTYPE, lane.dtype_word | tag << DTYPE_BITS)
        if lane.checksums:
            put_line_sums(base, line, lane, DISPATCH, epoch, lane.rank)
    store_int32(control + 4 * CONTROL_EPOCH, epoch)
    if streamed & 1:
        finish_stores()
    publish(buffer_ptrs, lane.world, lane.rank, lane.signals, epoch)


@kernel
def ids_are_experts_kernel(ids, id_bytes, count, num_experts, fingerprint=FINGERPRINT):
    """Whether all ids at an address are -1 ... num_experts - 1."""
    fit = True
    for place in range(count):
        expert = load_int64(ids + 8 * place) if id_bytes == 8 else np.int64(load_int32(ids + 4 * place))
        fit &= -1 <= expert < num_experts
    return fit


def ids_are_experts(topk_ids: torch.Tensor, num_experts: int) -> bool:
    """Whether all ids are -1 ... num_experts - 1, of a contiguous int32 or int64 tensor; a tenth of what torch takes.

    Raises TransportUnavailable without numba.
    """
    fit: bool = ids_are_experts_kernel(topk_ids.data_ptr(), topk_ids.itemsize, topk_ids.numel(), num_experts)
    return fit


def send_tokens(
    lane: Lane,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    num_programs: int | None = None,
    tag: int = 0,
    threads: int = 1,
) -> None:
    """`thinwire.triton_kernels.dispatch.send_tokens` for CPU tensors, whose kernels have no programs.

    Up to `threads` threads share the tokens of a large call; all are stored before the flags are published.

    Raises:
        RoutingError: another shape or another dtype of ids; nothing was sent.
        WireFormatError: another dtype of x, or one whose records are larger than the lane's slots; nothing was sent.
        TransportUnavailable: without numba.
    """
    layout = lane.layout
    x = readable_rows(x, layout.HIDDEN, "x")
    tokens = x.shape[0]
    expected = (tokens, layout.TOP_K)
    if tokens > layout.MAX_TOKENS or topk_ids.shape != expected or topk_weights.shape != expected:
        raise RoutingError(
            f"{tokens} tokens with topk_ids {tuple(topk_ids.shape)} and topk_weights {tuple(topk_weights.shape)}; "
            f"accepted: at most {layout.MAX_TOKENS} tokens, and [tokens, {layout.TOP_K}] of both"
        )
    if topk_ids.dtype not in _ID_TYPES:
        raise RoutingError(f"topk_ids is {topk_ids.dtype}; accepted: {', '.join(map(str, _ID_TYPES))}")
    memory = first_arguments(lane, x.dtype, _SENDING, numbers_that_fit)
    topk_ids, topk_weights = topk_ids.contiguous(), topk_weights.float().contiguous()
    ids, weights = topk_ids.data_ptr(), topk_weights.data_ptr()
    rows = x.data_ptr(), x.stride(0) * x.itemsize, ids, topk_ids.itemsize, weights, tokens
    stored = 0
    if threads > 1:
        threads = threads_for(tokens, layout.HIDDEN * x.itemsize, threads)
    if threads > 1:
        run_in_team(threads, tokens, store_tokens_kernel, *memory, *rows)
        stored = tokens
    send_tokens_kernel(*memory, *rows, stored, tag)


def refuse(lane: Lane) -> None:
    """`thinwire.triton_kernels.dispatch.refuse` for CPU tensors. Raises TransportUnavailable without numba."""
    numbers = numbers_of(lane)
    memory = addresses(lane, *_SENDING)
    send_tokens_kernel(numbers.address, *memory, 0, 0, 0, 8, 0, REFUSED, 0, 0)


@device
def publish_sums(buffer_ptrs, lane, control, end):
    """Signals the combine phase of the open round to all ranks, and how this rank ends it."""
    for peer in range(lane.world):
        line = signal_line(buffer_ptrs, peer, lane.combine_signals, lane.rank)
        store_int32(line + 4 * SIGNAL_END, end)
        if lane.checksums:
            put_line_sums(load_int64(buffer_ptrs + 8 * peer), line, lane, COMBINE, epoch_of(control), lane.rank)
    publish(buffer_ptrs, lane.world, lane.rank, lane.combine_signals, load_int32(control + 4 * CONTROL_EPOCH))


@kernel
def close_round_kernel(numbers, buffer_ptrs, control, end, fingerprint=FINGERPRINT):
    """Signals the combine phase without sums."""
    lane = numbers_at(numbers)
    if load_int32(control + 4 * CONTROL_STATUS) == RUNNING:
        publish_sums(buffer_ptrs, lane, control, end)


def close_round(lane: Lane, end: int = ABANDONED) -> None:
    """`thinwire.triton_kernels.dispatch.close_round` for CPU tensors. Raises TransportUnavailable without numba."""
    numbers = numbers_of(lane)
    close_round_kernel(numbers.address, *addresses(lane, "buffer_ptrs", "control"), end)


@device
def lines_agree(buffer_ptrs, lane, report):
    """Whether all dispatch lines name this rank's dtype and a possible number of tokens; notes those that do not."""
    agree = True
    own = load_int32(signal_line(buffer_ptrs, lane.rank, lane.signals, lane.rank) + 4 * SIGNAL_DTYPE)
    for peer in range(lane.world):
        line = signal_line(buffer_ptrs, lane.rank, lane.signals, peer)
        tokens = load_int32(line + 4 * SIGNAL_TOKENS)
        if load_int32(line + 4 * SIGNAL_DTYPE) != own or tokens < 0 or tokens > lane.max_tokens:
            store_int32(report + 4 * (REPORT_PEERS + peer), 1)
            agree = False
    return agree


@device
def note_left_open(buffer_ptrs, lane, report):
    """Notes a rank that left open the round that this one has combined, if there is one."""
    own = signal_line(buffer_ptrs, lane.rank, lane.combine_signals, lane.rank)
    if load_int32(own + 4 * SIGNAL_END) == WITH_SUMS:
        for peer in range(lane.world):
            line = signal_line(buffer_ptrs, lane.rank, lane.combine_signals, peer)
            if load_int32(line + 4 * SIGNAL_END) == LEFT_OPEN:
                store_int32(report + 4 * REPORT_LEFT_OPEN, 1 + peer)


@kernel
def wait_kernel(numbers, buffer_ptrs, control, report, phase, deadline, limit, fingerprint=FINGERPRINT):
    """Waits for one phase of a round; times are in nanoseconds. Returns how the wait ended."""
    lane = numbers_at(numbers)
    if load_int32(control + 4 * CONTROL_STATUS) != RUNNING:
        return GAVE_UP
    epoch = load_int32(control + 4 * CONTROL_EPOCH)
    lines = lane.signals if phase == DISPATCH else lane.combine_signals
    ended = wait_or_give_up(
        buffer_ptrs, lane.world, lane.rank, lines, lane.stuck, epoch, phase, deadline, limit, report
    )
    if ended == ARRIVED and lane.checksums and not lines_fit(buffer_ptrs, lane, control, report, phase, 0, lane.world):
        return ended
    status = TIMED_OUT if ended == GAVE_UP else RUNNING
    if ended == ARRIVED and phase == DISPATCH and not lines_agree(buffer_ptrs, lane, report):
        status = MISMATCHED
    if ended == ARRIVED and phase == COMBINE:
        note_left_open(buffer_ptrs, lane, report)
    if status != RUNNING:
        poison(control, report, status, epoch, phase)
    return ended


def wait(lane: Lane, phase: int, timeout: float, grace: float) -> None:
    """`thinwire.triton_kernels.dispatch.wait` for CPU tensors. A poisoned lane is not waited for.

    Python's signal handlers run meanwhile.

    Raises:
        ValueError: for another phase.
        TransportUnavailable: without numba.
    """
    if phase not in (DISPATCH, COMBINE):
        raise ValueError(f"phase is {phase!r}; accepted: {DISPATCH} (dispatch), {COMBINE} (combine)")
    run_wait(partial(wait_kernel, *first_arguments(lane, None, _WAITING), phase), timeout, grace)
