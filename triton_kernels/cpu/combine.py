"""The way home on the CPU: each token's weighted expert rows into one record at its home, and those records into one.

Both sides of a pair know a sum's place without asking: the token's number, and the sender's ordinal among the ranks
that own the token's experts, or with `RoundLayout.INVARIANT` the expert's ordinal among those.
"""

from __future__ import annotations

import numpy as np
import torch

from thinwire.errors import RoutingError
from thinwire.triton_kernels import round_layout as rounds
from thinwire.triton_kernels.cpu.compat import device, kernel
from thinwire.triton_kernels.cpu.dispatch import publish_sums
from thinwire.triton_kernels.cpu.ir.atomics import (
    finish_stores,
    load_acquire,
    load_relaxed,
    monotonic_ns,
    store_release,
)
from thinwire.triton_kernels.cpu.ir.intrinsics import (
    load_int32,
    load_int64,
    stack_buffer,
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
    numbers_that_fit,
    owner_of,
    readable_rows,
    senders,
    sum_layout_of,
    token_count,
)
from thinwire.triton_kernels.cpu.launch import scratch_of
from thinwire.triton_kernels.cpu.peer_stores import goes_aside, store_at
from thinwire.triton_kernels.cpu.signal import (
    ARRIVED,
    GAVE_UP,
    PAUSED,
    SLICE_NS,
    SPINS,
    is_running,
    let_others_run,
    lines_of,
    own_line,
    run_wait,
    signal_line,
    someone_is_stuck,
)
from thinwire.triton_kernels.cpu.sums import (
    AS_THEY_ARE,
    copy_record,
    pack_sum_row,
    rows_code,
    scratch_bytes,
    sum_record_row,
    weighted_sum_row,
)
from thinwire.triton_kernels.cpu.team import do_rows, run_in_team, threads_for
from thinwire.triton_kernels.round_layout import Lane, RoundLayout, check_home_grads, check_weight_grads
from thinwire.triton_kernels.signal import CONTROL_EPOCH

#: What `sum_home_kernel` returns, beside what other kernels do.
_OTHER_TOKENS = 3


@device
def terms_within(positions, lane, row_count, chosen):
    """Copies a slot's positions with -1 for rows that are not there, and returns how many there are."""
    for k in range(lane.top_k):
        position = load_int64(positions + 8 * k)
        if position < 0:
            return k
        store_int64(chosen + 8 * k, position if position < row_count else -1)
    return lane.top_k


def round_scratch_bytes(layout: RoundLayout) -> int:
    """What the kernels here need for themselves, whatever rows they are given; a lane keeps it from its first combine.

    Needs no numba.
    """
    for_sums = layout.SUM_BYTES + 8 * layout.TOP_K + scratch_bytes(layout.HIDDEN, layout.TOP_K, encoded=True)
    return max(for_sums, scratch_bytes(layout.HIDDEN, layout.SLOTS))


def _scratch(lane: Lane) -> int:
    """Its address, for one kernel at a time. A lane's is of one size, so it is reckoned once."""
    found: int | None = lane.kept.get("round_scratch")
    if found is None:
        found = lane.kept["round_scratch"] = scratch_of(lane, round_scratch_bytes(lane.layout))
    return found


def _team_scratch(lane: Lane, threads: int) -> tuple[torch.Tensor, int]:
    """The same for each of a team, for one call, and the bytes of one."""
    size = round_scratch_bytes(lane.layout)
    return torch.empty(threads * size, dtype=torch.uint8, device="cpu"), size


@device
def copy_weight_grads(ids, grads, target, lane, rank):
    """Copies a token's gradients of those experts' weights that a rank owns, float32 [top_k]."""
    for k in range(lane.top_k):
        if owner_of(load_int32(ids + 4 * k), lane) == rank:
            store_int32(target + 4 * k, load_int32(grads + 4 * k))


@device
def store_sums(where, begin, stop):
    """Sums `begin` to before `stop` to their homes.

    They are counted home by home, `each` of every rank's tokens, beginning with the right-hand neighbour's.
    """
    numbers, rows, row_stride, row_count, row_dtype, weight_grads, scratch, each = where
    lane = numbers_at(numbers)
    if not is_running(lane) or mixed_dtypes(lane, lane.sum_kind):
        return
    own = load_int64(lane.buffer_ptrs + 8 * lane.rank)
    layout = sum_layout_of(lane)
    ranks = stack_buffer(RANKS_BYTES)
    chosen = scratch + lane.sum_bytes
    parts = chosen + 8 * lane.top_k
    streamed = False
    for step in range(begin // each, (stop + each - 1) // each):
        source = (lane.rank + 1 + step) % lane.world
        sums = load_int64(lane.home_ptrs + 8 * source) + lane.sums
        far = source != lane.rank and goes_aside(lane.sum_row_bytes, load_relaxed(lane.seen + 8 * source))
        last = min(stop - step * each, each, token_count(lane, source))
        for token in range(max(begin - step * each, 0), last):
            first = (source * lane.max_tokens + token) * lane.top_k
            terms = terms_within(lane.positions + 8 * first, lane, row_count, chosen)
            if terms == 0:
                continue
            # The ids are the peer's: whatever they are by now, they choose among the token's own places.
            count = senders(own + lane.ids + 4 * first, lane, ranks)
            each_sum = 1 if lane.invariant else terms
            term = 0
            for ordinal in range(count):
                if load_int64(ranks + 8 * ordinal) != lane.rank:
                    continue
                named, factors = chosen + 8 * term, lane.row_weights + 4 * (first + term)
                record = sums + (token * lane.slots + ordinal) * lane.sum_bytes
                made = scratch if far else record
                if row_dtype == AS_THEY_ARE:
                    copy_record(rows, row_stride, named, made, layout)
                else:
                    total = weighted_sum_row(rows, row_stride, row_dtype, named, factors, each_sum, layout, parts)
                    pack_sum_row(total, lane.dtype, made, layout)
                if lane.weight_grads:
                    grads = sums - lane.sums + lane.weight_grads + 4 * token * lane.top_k
                    copy_weight_grads(own + lane.ids + 4 * first, weight_grads + 4 * first, grads, lane, lane.rank)
                if far:
                    far = store_at(lane.seen + 8 * source, record, made, lane.sum_row_bytes) & 1 != 0
                    streamed |= far
                term += each_sum
                if term == terms:
                    break
    if streamed:
        finish_stores()


@kernel
def store_sums_kernel(
    numbers, rows, row_stride, row_count, row_dtype, weight_grads, scratch, each, scratch_size, count, words, member,
):  # fmt: skip
    """`store_sums` in each thread of a team, whose members have a scratch each."""
    scratch += member * scratch_size
    where = (numbers, rows, row_stride, row_count, row_dtype, weight_grads, scratch, each)
    do_rows(words, member, count, store_sums, where)


@kernel
def send_sums_kernel(numbers, rows, row_stride, row_count, row_dtype, weight_grads, scratch, stored):
    """Sums to their homes, unless they are `stored`, then the combine line and its flag. `row_stride` is in bytes."""
    lane = numbers_at(numbers)
    if not is_running(lane):
        return POISONED
    if mixed_dtypes(lane, lane.sum_kind):
        return MIXED_DTYPES
    if not stored:
        each = max(1, lane.max_tokens)
        where = (numbers, rows, row_stride, row_count, row_dtype, weight_grads, scratch, each)
        store_sums(where, 0, lane.world * each)
    publish_sums(lane, rounds.WITH_SUMS)
    return WRITTEN


MOST_PARTS = 4095


def parts_word(epoch: int, parts: int) -> int:
    """What says in a combine line that so many parts, or MOST_PARTS for all, of a round's sums are there."""
    word = (epoch << 12 | parts) & 0xFFFFFFFF
    return word - (1 << 32) if word >= 1 << 31 else word


@kernel
def send_part_kernel(
    numbers, rows, row_stride, row_count, row_dtype, weight_grads, scratch, sources, count, begin, stop, end, word,
):  # fmt: skip
    """Sums of tokens `begin` to before `stop` of each of `count` sources, and then how many parts there are."""
    lane = numbers_at(numbers)
    if not is_running(lane):
        return POISONED
    each = max(1, lane.max_tokens)
    where = (numbers, rows, row_stride, row_count, row_dtype, weight_grads, scratch, each)
    for place in range(count):
        first = (load_int64(sources + 8 * place) - lane.rank - 1 + lane.world) % lane.world * each
        store_sums(where, first + min(begin, each), first + min(stop, each))
    for peer in range(lane.world):
        line = signal_line(lane.buffer_ptrs, peer, lane.combine_signals, lane.rank)
        store_int32(line + 4 * rounds.SIGNAL_END, end)
        store_release(line + 4 * rounds.SIGNAL_PARTS, word)
    return WRITTEN


def send_part(
    lane: Lane,
    expert_out: torch.Tensor | None,
    sources: torch.Tensor,
    tokens: range,
    parts: int,
    weight_grads: torch.Tensor | None = None,
) -> None:
    """Sums some tokens of some ranks into their homes, as `send_sums`, and tells all ranks how many parts are there.

    The combine line is published by `close_round`, after the last part.

    Args:
        lane: whose sums are float32, in the format `none`.
        expert_out: [rows, hidden] floats; None: this rank abandons the round.
        sources: int64 [ranks], contiguous.
        tokens: of each of them.
        parts: how many of this rank's parts are there then, or MOST_PARTS for all.
        weight_grads: as `send_sums` takes them.
    """
    end, ranks = (rounds.WITH_SUMS, len(sources)) if expert_out is not None else (rounds.ABANDONED, 0)
    rows = torch.empty(0, lane.layout.HIDDEN, dtype=torch.float32, device="cpu") if expert_out is None else expert_out
    rows = readable_rows(rows, lane.layout.HIDDEN, "expert_out")
    grads = check_weight_grads(lane, weight_grads) if ranks else None
    send_part_kernel(
        numbers_that_fit(lane, torch.float32).address, rows.data_ptr(), rows.stride(0) * rows.itemsize, len(rows),
        rows_code(rows), 0 if grads is None else grads.data_ptr(), _scratch(lane), sources.data_ptr(), ranks,
        tokens.start, tokens.stop, end, parts_word(int(lane.control[CONTROL_EPOCH]), parts),
    )  # fmt: skip


@kernel
def wait_for_parts_kernel(numbers, sources, count, word, deadline):
    """Waits until so many parts of each of `count` ranks are there; time is in nanoseconds. Returns how that ended."""
    lane = numbers_at(numbers)
    begun, place, looks = monotonic_ns(), 0, 0
    while True:
        ended = ARRIVED
        if looks >= SPINS:
            now = monotonic_ns()  # and reports: before the words, as in other waits
            if now > deadline or someone_is_stuck(lane):
                ended = GAVE_UP
            elif now > begun + SLICE_NS:
                ended = PAUSED
        while place < count:
            line = own_line(lane, lane.combine_signals, load_int64(sources + 8 * place))
            ahead = np.int64(load_acquire(line + 4 * rounds.SIGNAL_PARTS)) - word
            if ahead & 0xFFFFFFFF > 2 * MOST_PARTS:  # across the wrap of 32 bits; nobody is a round ahead
                break
            place += 1
        if place == count:
            return ARRIVED
        if ended != ARRIVED:
            return ended
        looks += 1
        if looks > SPINS:
            let_others_run(monotonic_ns() - begun)


def wait_for_parts(lane: Lane, sources: torch.Tensor, parts: int, timeout: float) -> bool:
    """Waits until so many parts of some ranks' sums are there, for so many seconds; gives whether they are.

    Python's signal handlers run meanwhile.
    """
    word = parts_word(int(lane.control[CONTROL_EPOCH]), parts)
    arguments = numbers_of(lane).address, sources.data_ptr(), len(sources), word

    def missed() -> list[int]:
        parts_there = lines_of(lane, lane.layout.COMBINE_SIGNALS)[sources.numpy(), rounds.SIGNAL_PARTS]
        behind = (parts_there.astype(np.int64) - word) & 0xFFFFFFFF > 2 * MOST_PARTS
        found: list[int] = sources.numpy()[behind].tolist()
        return found

    kernel = lambda deadline, _: wait_for_parts_kernel(*arguments, deadline)  # noqa: E731
    return run_wait(kernel, timeout, 0.0, lane, missed) == ARRIVED


def send_sums(
    lane: Lane,
    expert_out: torch.Tensor,
    dtype: torch.dtype,
    num_programs: int | None = None,
    weight_grads: torch.Tensor | None = None,
    as_they_are: bool = False,
    threads: int = 1,
) -> None:
    """`thinwire.triton_kernels.combine.send_sums` for CPU tensors, whose kernels have no programs.

    Up to `threads` threads share the sums of a large call; all are stored before the flags are published.

    Raises:
        RoutingError: another shape of `expert_out` or `weight_grads`, or with `none` another dtype than the tokens';
            nothing was sent.
        WireFormatError: a dtype that the kernels cannot read or write; nothing was sent.
        TransportUnavailable: without numba.
    """
    layout = lane.layout
    encoded = expert_out.dtype == torch.uint8
    width = lane.combine_wire.row_bytes(layout.HIDDEN, dtype) if encoded else layout.HIDDEN
    expert_out = readable_rows(expert_out, width, "expert_out")
    numbers = numbers_that_fit(lane, dtype).address
    row_bytes, count = expert_out.stride(0) * expert_out.itemsize, expert_out.shape[0]
    weight_grads = check_weight_grads(lane, weight_grads)
    grads = 0 if weight_grads is None else weight_grads.data_ptr()
    arguments = numbers, expert_out.data_ptr(), row_bytes, count, rows_code(expert_out, as_they_are), grads
    stored = 0
    if threads > 1:
        threads = threads_for(count, row_bytes, threads)
    if threads > 1:
        each = int(lane.control[rounds.CONTROL_TOKENS])  # the most that a rank sent, as routing found it
        threads = min(threads, layout.WORLD * each)
    if threads > 1:
        scratch, size = _team_scratch(lane, threads)
        places = scratch.data_ptr(), each, size, layout.WORLD * each
        run_in_team(threads, layout.WORLD * each, store_sums_kernel, *arguments, *places)
        stored = 1
    result = send_sums_kernel(*arguments, _scratch(lane), stored)
    check_dtype(result, "dtype", dtype)


@device
def sums_came(lane, tokens):
    """WRITTEN if so many tokens of this rank may be summed, or what says why not."""
    if not is_running(lane):
        return POISONED
    if mixed_dtypes(lane, lane.sum_kind):
        return MIXED_DTYPES
    if tokens != token_count(lane, lane.rank):
        return _OTHER_TOKENS
    return WRITTEN


@device
def sum_tokens(where, begin, stop):
    """Tokens `begin` to before `stop`, into their rows; returns what a kernel does."""
    numbers, out, out_stride, tokens, weight_grads, scratch = where
    lane = numbers_at(numbers)
    came = sums_came(lane, tokens)
    if came != WRITTEN:
        return came
    own = load_int64(lane.buffer_ptrs + 8 * lane.rank)
    first_ids = own + lane.ids + 4 * lane.rank * lane.max_tokens * lane.top_k
    layout = sum_layout_of(lane)
    ranks = stack_buffer(RANKS_BYTES)
    for token in range(begin, stop):
        ids, of_token = first_ids + 4 * token * lane.top_k, 4 * token * lane.top_k
        if lane.weight_grads:
            zero_bytes(weight_grads + of_token, 4 * lane.top_k)
        count = senders(ids, lane, ranks)
        for j in range(count):
            # The list of ranks becomes one of records, in place.
            source, place = load_int64(ranks + 8 * j), token * lane.slots + j
            line = own_line(lane, lane.combine_signals, source)
            has_sums = load_int32(line + 4 * rounds.SIGNAL_END) == rounds.WITH_SUMS
            if has_sums and lane.weight_grads:
                copy_weight_grads(ids, own + lane.weight_grads + of_token, weight_grads + of_token, lane, source)
            store_int64(ranks + 8 * j, place if has_sums else -1)
        row = out + token * out_stride
        sum_record_row(own + lane.sums, lane.sum_bytes, ranks, count, lane.dtype, layout, row, scratch)
    return WRITTEN


@kernel
def sum_tokens_kernel(numbers, out, out_stride, tokens, weight_grads, scratch, scratch_size, words, member):
    """`sum_tokens` in each thread of a team, whose members have a scratch each."""
    where = (numbers, out, out_stride, tokens, weight_grads, scratch + member * scratch_size)
    do_rows(words, member, tokens, sum_tokens, where)


@kernel
def sum_home_kernel(numbers, out, out_stride, tokens, weight_grads, scratch, summed):
    """Adds up what came home into the rows at `out`, unless that is `summed`. `out_stride` is in bytes."""
    if summed:
        return sums_came(numbers_at(numbers), tokens)
    return sum_tokens((numbers, out, out_stride, tokens, weight_grads, scratch), 0, tokens)


def sum_home(lane: Lane, out: torch.Tensor, weight_grads: torch.Tensor | None = None, threads: int = 1) -> None:
    """`thinwire.triton_kernels.combine.sum_home` for CPU tensors.

    Up to `threads` threads share the tokens of a large call.

    Raises:
        RoutingError: another shape or stride of `out` or `weight_grads`, or with `none` another dtype than the tokens'.
        WireFormatError: a dtype that the kernels cannot write.
        TransportUnavailable: without numba.
    """
    layout = lane.layout
    check_out(out, layout.HIDDEN)
    grads = check_home_grads(lane, out, weight_grads)
    numbers = numbers_that_fit(lane, out.dtype).address
    of_weights = 0 if grads is None else grads.data_ptr()
    arguments = numbers, out.data_ptr(), out.stride(0) * out.itemsize, out.shape[0], of_weights
    summed = 0
    if threads > 1:
        threads = threads_for(out.shape[0], layout.HIDDEN * out.itemsize, threads)
    if threads > 1:
        scratch, size = _team_scratch(lane, threads)
        run_in_team(threads, out.shape[0], sum_tokens_kernel, *arguments, scratch.data_ptr(), size)
        summed = 1
    result = sum_home_kernel(*arguments, _scratch(lane), summed)
    check_dtype(result, "out", out.dtype)
    if result == _OTHER_TOKENS:
        raise RoutingError(f"out has {out.shape[0]} rows; accepted: as many as this rank sent tokens in this round")
    if result == POISONED:
        out.fill_(float("nan"))
        if grads is not None:
            grads.fill_(float("nan"))
