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
from thinwire.triton_kernels import round_layout as rounds
from thinwire.triton_kernels.cpu import signal
from thinwire.triton_kernels.cpu.codec import quantize_row
from thinwire.triton_kernels.cpu.compat import device, kernel
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
    numbers_at,
    numbers_of,
    numbers_that_fit,
    readable_rows,
    record_layout_of,
)
from thinwire.triton_kernels.cpu.peer_stores import goes_aside, store_at
from thinwire.triton_kernels.cpu.team import do_rows, run_in_team, threads_for
from thinwire.triton_kernels.round_layout import Lane
from thinwire.triton_kernels.signal import CONTROL_EPOCH, MISMATCHED, REPORT_PEERS, RUNNING, TIMED_OUT

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
    """Rows `begin` to before `stop`: their records to the peers, and their ids and weights into the own planes.

    A row is the token of its number, or of that in the int64 `places`, if these have an address.
    """
    numbers, x, x_stride, topk_ids, id_bytes, topk_weights, places = where
    lane = numbers_at(numbers)
    if not signal.is_running(lane):
        return
    own = load_int64(lane.buffer_ptrs + 8 * lane.rank)
    first_slot = lane.rank * lane.max_tokens
    ids_plane = lane.ids + 4 * first_slot * lane.top_k
    weights_plane = lane.weights + 4 * first_slot * lane.top_k
    layout = record_layout_of(lane)
    ranks, far, scratch = stack_buffer(RANKS_BYTES), stack_buffer(RANKS_BYTES), stack_buffer(_ASIDE_BYTES)
    # Once, and not for each record: the clock is read for it.
    for peer in range(lane.world):
        aside = peer != lane.rank and goes_aside(lane.record_row_bytes, load_relaxed(lane.seen + 8 * peer))
        store_int64(far + 8 * peer, 1 if aside else 0)
    streamed = np.int64(0)
    for row in range(begin, stop):
        token = load_int64(places + 8 * row) if places else row
        given, first = row * lane.top_k, token * lane.top_k
        ids, weights = own + ids_plane + 4 * first, own + weights_plane + 4 * first
        if merge_experts(topk_ids + id_bytes * given, id_bytes, topk_weights + 4 * given, lane, ids, weights):
            store_int32(lane.report + 4 * rounds.REPORT_BAD_IDS, 1)
        count = destinations(ids, lane, ranks)
        if count == 0:
            continue
        record = lane.records + (first_slot + token) * lane.record_bytes
        home = load_int64(ranks)
        for j in range(1, count):
            if load_int64(ranks + 8 * j) == lane.rank:
                home = lane.rank
        made = load_int64(lane.buffer_ptrs + 8 * home) + record
        if load_int64(far + 8 * home) != 0 and lane.record_row_bytes <= _ASIDE_BYTES:
            made = scratch
        quantize_row(x + row * x_stride, lane.dtype, made, layout)
        for j in range(count):
            peer = load_int64(ranks + 8 * j)
            target = load_int64(lane.buffer_ptrs + 8 * peer) + record
            if target == made:
                continue
            if load_int64(far + 8 * peer) != 0:
                is_far = store_at(lane.seen + 8 * peer, target, made, lane.record_row_bytes) & 1
                store_int64(far + 8 * peer, is_far)
                streamed |= is_far
            else:
                copy_bytes(target, made, lane.record_row_bytes)
    if streamed:
        finish_stores()


@kernel
def store_tokens_kernel(numbers, x, x_stride, topk_ids, id_bytes, topk_weights, places, rows, words, member):
    """`store_tokens` in each thread of a team."""
    do_rows(words, member, rows, store_tokens, (numbers, x, x_stride, topk_ids, id_bytes, topk_weights, places))


@kernel
def send_tokens_kernel(numbers, x, x_stride, topk_ids, id_bytes, topk_weights, tokens, stored, tag):
    """Planes and records to the peers, then the dispatch line and its flag. `x_stride` is in bytes.

    `stored`: so many of the tokens, the first ones, have gone through `store_tokens`. `tokens` may be negative, as
    REFUSED is, and nothing is looked at then.
    """
    lane = numbers_at(numbers)
    if not signal.is_running(lane):
        return
    store_tokens((numbers, x, x_stride, topk_ids, id_bytes, topk_weights, 0), stored, tokens)
    own = load_int64(lane.buffer_ptrs + 8 * lane.rank)
    first_slot = lane.rank * lane.max_tokens
    ids_plane = lane.ids + 4 * first_slot * lane.top_k
    weights_plane = lane.weights + 4 * first_slot * lane.top_k
    plane_bytes, streamed = 4 * max(tokens, 0) * lane.top_k, np.int64(0)
    for peer in range(lane.world):
        base = load_int64(lane.buffer_ptrs + 8 * peer)
        if base != own:
            streamed |= store_at(lane.seen + 8 * peer, base + ids_plane, own + ids_plane, plane_bytes)
            streamed |= store_at(lane.seen + 8 * peer, base + weights_plane, own + weights_plane, plane_bytes)
        line = signal.signal_line(lane.buffer_ptrs, peer, lane.signals, lane.rank)
        store_int32(line + 4 * rounds.SIGNAL_TOKENS, tokens)
        store_int32(line + 4 * rounds.SIGNAL_DTYPE, lane.dtype_word | tag << rounds.DTYPE_BITS)
    epoch = signal.epoch_of(lane) + 1
    store_int32(lane.control + 4 * CONTROL_EPOCH, epoch)
    if streamed & 1:
        finish_stores()
    signal.publish(lane, lane.signals, epoch)


@kernel
def ids_are_experts_kernel(ids, id_bytes, count, num_experts):
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
    numbers = numbers_that_fit(lane, x.dtype).address
    topk_ids, topk_weights = topk_ids.contiguous(), topk_weights.float().contiguous()
    ids, weights = topk_ids.data_ptr(), topk_weights.data_ptr()
    arguments = numbers, x.data_ptr(), x.stride(0) * x.itemsize, ids, topk_ids.itemsize, weights
    stored = 0
    if threads > 1:
        threads = threads_for(tokens, layout.HIDDEN * x.itemsize, threads)
    if threads > 1:
        run_in_team(threads, tokens, store_tokens_kernel, *arguments, 0, tokens)
        stored = tokens
    send_tokens_kernel(*arguments, tokens, stored, tag)


def store_tokens_at(
    lane: Lane, places: torch.Tensor, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
) -> None:
    """Stores some tokens, as `send_tokens` does with all; `publish_tokens` signals them when all are there.

    Args:
        places: int64 [rows], contiguous, the numbers of these tokens, each below the lane's MAX_TOKENS.
        x: [rows, hidden] floats, their columns side by side.
        topk_ids, topk_weights: int32 and float32 [rows, top_k], contiguous.
    """
    if len(places):
        run_in_team(
            1, len(places), store_tokens_kernel, numbers_that_fit(lane, x.dtype).address, x.data_ptr(),
            x.stride(0) * x.itemsize, topk_ids.data_ptr(), topk_ids.itemsize, topk_weights.data_ptr(),
            places.data_ptr(), len(places),
        )  # fmt: skip


def publish_tokens(lane: Lane, tokens: int, dtype: torch.dtype | None = None, tag: int = 0) -> None:
    """Sends the planes of so many tokens, which are stored, and signals them; `dtype` is that of their rows."""
    send_tokens_kernel(numbers_of(lane, dtype).address, 0, 0, 0, 8, 0, tokens, tokens, tag)


def refuse(lane: Lane, why: int) -> None:
    """`thinwire.triton_kernels.dispatch.refuse` for CPU tensors. Raises TransportUnavailable without numba."""
    publish_tokens(lane, rounds.REFUSED, torch.bfloat16, why)  # a dtype that leaves room for the tag


@device
def publish_sums(lane, end):
    """Signals the combine phase of the open round to all ranks, and how this rank ends it."""
    for peer in range(lane.world):
        line = signal.signal_line(lane.buffer_ptrs, peer, lane.combine_signals, lane.rank)
        store_int32(line + 4 * rounds.SIGNAL_END, end)
    signal.publish(lane, lane.combine_signals, signal.epoch_of(lane))


@kernel
def close_round_kernel(numbers, end):
    """Signals the combine phase without sums."""
    lane = numbers_at(numbers)
    if signal.is_running(lane):
        publish_sums(lane, end)


def close_round(lane: Lane, end: int = rounds.ABANDONED) -> None:
    """`thinwire.triton_kernels.dispatch.close_round` for CPU tensors. Raises TransportUnavailable without numba."""
    close_round_kernel(numbers_of(lane).address, end)


@device
def lines_agree(lane):
    """Whether all dispatch lines name this rank's dtype and a possible number of tokens; notes those that do not."""
    agree = True
    own = load_int32(signal.own_line(lane, lane.signals, lane.rank) + 4 * rounds.SIGNAL_DTYPE)
    for peer in range(lane.world):
        line = signal.own_line(lane, lane.signals, peer)
        tokens = load_int32(line + 4 * rounds.SIGNAL_TOKENS)
        if load_int32(line + 4 * rounds.SIGNAL_DTYPE) != own or tokens < 0 or tokens > lane.max_tokens:
            store_int32(lane.report + 4 * (REPORT_PEERS + peer), 1)
            agree = False
    return agree


@device
def note_left_open(lane):
    """Notes a rank that left open the round that this one has combined, if there is one."""
    lines = lane.combine_signals
    if load_int32(signal.own_line(lane, lines, lane.rank) + 4 * rounds.SIGNAL_END) == rounds.WITH_SUMS:
        for peer in range(lane.world):
            if load_int32(signal.own_line(lane, lines, peer) + 4 * rounds.SIGNAL_END) == rounds.LEFT_OPEN:
                store_int32(lane.report + 4 * rounds.REPORT_LEFT_OPEN, 1 + peer)


@kernel
def wait_kernel(numbers, phase, deadline, limit):
    """Waits for one phase of a round; times are in nanoseconds. Returns how the wait ended."""
    lane = numbers_at(numbers)
    if not signal.is_running(lane):
        return signal.GAVE_UP
    epoch = signal.epoch_of(lane)
    lines = lane.signals if phase == rounds.DISPATCH else lane.combine_signals
    ended = signal.wait_or_give_up(lane, lines, epoch, phase, deadline, limit)
    status = TIMED_OUT if ended == signal.GAVE_UP else RUNNING
    if ended == signal.ARRIVED and phase == rounds.DISPATCH and not lines_agree(lane):
        status = MISMATCHED
    if ended == signal.ARRIVED and phase == rounds.COMBINE:
        note_left_open(lane)
    if status != RUNNING:
        signal.poison(lane, status, epoch, phase)
    return ended


def wait(lane: Lane, phase: int, timeout: float, grace: float) -> None:
    """`thinwire.triton_kernels.dispatch.wait` for CPU tensors. A poisoned lane is not waited for.

    Python's signal handlers run meanwhile.

    Raises:
        ValueError: for another phase.
        TransportUnavailable: without numba.
    """
    if phase not in (rounds.DISPATCH, rounds.COMBINE):
        raise ValueError(f"phase is {phase!r}; accepted: {rounds.DISPATCH} (dispatch), {rounds.COMBINE} (combine)")
    lines = lane.layout.SIGNALS if phase == rounds.DISPATCH else lane.layout.COMBINE_SIGNALS
    kernel = partial(wait_kernel, numbers_of(lane).address, phase)
    signal.run_wait(kernel, timeout, grace, lane, lambda: signal.flags_behind(lane, lines))
