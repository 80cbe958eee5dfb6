"""Kernels of a round of CPU ranks: each stores into its own memory alone, and reads the peers'.

A token is quantised once, whoever wants it, into its home's memory, beside its experts and weights. Ranks of its
experts read it there, and the home reads their sums out of their memories. Lines say when (`lines.py`), and the host
waits for them; `docs/protocol.md`, "Pulling", argues why one place is enough. The order of rows is that of
`thinwire.moe.plan.ArrivalPlan`: by expert, then source rank, then token.

Whatever a peer writes, ids are only compared, numbers of tokens are checked, and each is loaded once: nothing outside
of this rank's tensors is written, and nothing outside of the ranks' memory is read.
"""

from __future__ import annotations

import numpy as np
import torch

from thinwire.errors import RoutingError
from thinwire.triton_kernels.cpu.codec import dequantize_row, element_bytes, pack_row
from thinwire.triton_kernels.cpu.compat import device, kernel
from thinwire.triton_kernels.cpu.ir.memory import (
    copy_bytes,
    finish_stores,
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
    RANKS_BYTES,
    PulledLane,
    numbers_at,
    numbers_of,
    owner_of,
    record_layout_of,
    senders,
    sum_layout_of,
)
from thinwire.triton_kernels.cpu.lines import (
    board_at,
    look_far,
    next_line,
    number_in,
    open_line,
    put_line,
    take_line,
    wake,
)
from thinwire.triton_kernels.cpu.sums import (
    AS_THEY_ARE,
    copy_record,
    pack_sum_row,
    rows_code,
    sum_record_row,
    weighted_sum_row,
)
from thinwire.triton_kernels.round_layout import LEFT_OPEN, WITH_SUMS

#: What `gather_kernel` and `copy_records_kernel` return: the index or the offsets are not what routing wrote.
_OVERWRITTEN = 1
_ZERO = np.float32(0.0)
_ANY = torch.bfloat16  # of kernels that look at no row: every lane has room for it

# ---------------------------------------------------------------------------------------------------------------------
# Lines


@device
def tell_all(lane, word):
    """Puts a line with one word at every peer, and at this rank itself."""
    finish_stores()  # those past the caches
    for place in range(lane.num_peers):
        store_int64(open_line(lane.board, lane.channel, place) + 8, word)
        put_line(lane.board, lane.channel, place)
    wake(lane.board)


@device
def take_lines(lane):
    """Takes the next line of every rank, and keeps what it said."""
    for place in range(lane.num_peers):
        word = number_in(next_line(lane.board, lane.channel, place), 0)
        store_int64(lane.said + 8 * load_int64(lane.peers + 8 * place), word)
        take_line(lane.board, lane.channel, place)


@kernel
def tell_kernel(numbers, word):
    """Puts a line with one word at every rank."""
    tell_all(numbers_at(numbers), word)


@kernel
def take_kernel(numbers):
    """Takes the next line of every rank, and keeps what it said."""
    take_lines(numbers_at(numbers))


# ---------------------------------------------------------------------------------------------------------------------
# Dispatch


@device
def merge_experts(topk_ids, id_bytes, topk_weights, lane, ids, weights):
    """Writes a token's ids and weights as they are read by peers, and returns how many experts it has.

    Every expert is there once: its first mention has the float32 sum of its weights, in ascending k.
    """
    count = 0
    for k in range(lane.top_k):
        expert = load_int64(topk_ids + 8 * k) if id_bytes == 8 else np.int64(load_int32(topk_ids + 4 * k))
        if expert < 0 or expert >= lane.num_experts:
            expert = np.int64(-1)
        mention = 0
        while mention < k and load_int32(ids + 4 * mention) != expert:
            mention += 1
        store_int32(ids + 4 * k, expert if mention == k else -1)
        store_float32(weights + 4 * k, _ZERO)
        if expert >= 0:
            count += 1
            total = load_float32(weights + 4 * mention) + load_float32(topk_weights + 4 * k)
            store_float32(weights + 4 * mention, total)
    return count


@kernel
def send_tokens_kernel(numbers, x, x_stride, topk_ids, id_bytes, topk_weights, tokens, word):
    """This rank's part, and then a line to everyone. `x_stride` is in bytes."""
    lane = numbers_at(numbers)
    part = load_int64(lane.part_ptrs + 8 * lane.rank)
    far = look_far(lane.board, board_at(lane.board).rank, part + lane.records, lane.max_tokens * lane.record_bytes)
    for token in range(tokens):
        first = token * lane.top_k
        ids, weights = part + lane.ids + 4 * first, part + lane.weights + 4 * first
        if merge_experts(topk_ids + id_bytes * first, id_bytes, topk_weights + 4 * first, lane, ids, weights):
            record = part + lane.records + token * lane.record_bytes
            pack_row(x + token * x_stride, lane.dtype, record, record_layout_of(lane), far)
    store_int64(part, tokens)
    tell_all(lane, word)


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
def place_rows(lane):
    """Turns the experts in `positions` into rows, counting each expert's offset up to its end."""
    for source in range(lane.world):
        first_slot = source * lane.max_tokens
        for slot in range(first_slot, first_slot + load_int64(lane.counts + 8 * source)):
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
def route_kernel(numbers, word):
    """Takes the lines of all ranks, and fills a lane's index, expert_counts, expert_offsets, positions and weights.

    Returns whether all ranks said `word` and have a possible number of tokens; if not, it routes nothing.
    """
    lane, alike = numbers_at(numbers), True
    take_lines(lane)
    for place in range(lane.num_peers):
        alike &= load_int64(lane.said + 8 * load_int64(lane.peers + 8 * place)) == word
    for source in range(lane.world):
        tokens = load_int64(load_int64(lane.part_ptrs + 8 * source))
        alike &= 0 <= tokens <= lane.max_tokens
        store_int64(lane.counts + 8 * source, tokens)
    if not alike:
        return False
    # Only what the last round left in `positions` and in `index` is cleared, or a decode step would pay for slots that
    # only a prefill fills.
    cleared, most = load_int64(lane.filled), np.int64(0)
    zero_bytes(lane.expert_counts, 8 * lane.local_experts)
    # What peers wrote is read here. All that follows works on what this rank wrote down.
    for source in range(lane.world):
        tokens, slot = load_int64(lane.counts + 8 * source), source * lane.max_tokens
        most, part = max(most, tokens), load_int64(lane.part_ptrs + 8 * source)
        for token in range(tokens):
            first, theirs = (slot + token) * lane.top_k, part + 4 * token * lane.top_k
            experts, factors = lane.positions + 8 * first, lane.row_weights + 4 * first
            take_slot(theirs + lane.ids, theirs + lane.weights, lane, experts, factors)
        clear_slots(lane, slot + tokens, slot + cleared, slot + lane.max_tokens)
    rows = place_experts(lane)
    place_rows(lane)
    clear_rows(lane, rows, load_int64(lane.filled + 8))
    store_int64(lane.filled, most)
    store_int64(lane.filled + 8, rows)
    return True


@device
def record_of(slot, lane):
    """Where a record lies, in the memory of the rank that serves its source."""
    source = slot // lane.max_tokens
    record = lane.records + (slot - source * lane.max_tokens) * lane.record_bytes
    return load_int64(lane.part_ptrs + 8 * source) + record


@kernel
def gather_kernel(numbers, index, used, out, out_stride, zero_tail, capacity, overflow):
    """The records that an index names, as rows at the address `out`; `out_stride` is in bytes.

    `index` is the address of int64, -1 for a row of zeros, and `used` that of how many there are; 0 for both: the
    lane's. Later rows are zeroed or left as they are.
    """
    lane = numbers_at(numbers)
    slots = lane.world * lane.max_tokens
    if index == 0:
        index, used = lane.index, lane.expert_offsets + 8 * lane.local_experts
    # Users see the index and the offsets, and may have written into them.
    rows = load_int64(used)
    if rows < 0 or rows > lane.num_rows:
        return _OVERWRITTEN
    store_int8(overflow, 1 if capacity < rows else 0)
    for row in range(capacity if zero_tail else min(capacity, rows)):
        slot = load_int64(index + 8 * row) if row < rows else np.int64(-1)
        if slot >= slots:
            return _OVERWRITTEN
        if slot < 0:
            zero_bytes(out + row * out_stride, lane.hidden * element_bytes(lane.dtype))
        else:
            dequantize_row(record_of(slot, lane), out + row * out_stride, lane.dtype, record_layout_of(lane))
    return 0


@kernel
def copy_records_kernel(numbers, out, row_bytes):
    """The records that came, each at the place of its slot; the bytes of others are left as they are."""
    lane = numbers_at(numbers)
    for slot in range(lane.world * lane.max_tokens):
        if load_int64(lane.positions + 8 * slot * lane.top_k) >= 0:
            copy_bytes(out + slot * row_bytes, record_of(slot, lane), row_bytes)


# ---------------------------------------------------------------------------------------------------------------------
# Combine


@device
def terms_within(positions, lane, row_count, chosen):
    """Copies a slot's positions with -1 for rows that are not there, and returns how many there are."""
    for k in range(lane.top_k):
        position = load_int64(positions + 8 * k)
        if position < 0:
            return k
        store_int64(chosen + 8 * k, position if position < row_count else -1)
    return lane.top_k


@device
def sum_place(rank, slot, lane):
    """Where a rank has its sums for a slot."""
    return load_int64(lane.lane_ptrs + 8 * rank) + lane.sums + slot * lane.each * lane.sum_bytes


@device
def store_grads(positions, terms, dots, dot_count, grads):
    """Writes the gradients of a slot's router weights: of each of its experts here, that of the expert's row."""
    for term in range(terms):
        row = load_int64(positions + 8 * term)
        store_float32(grads + 4 * term, load_float32(dots + 4 * row) if 0 <= row < dot_count else _ZERO)


@kernel
def send_sums_kernel(numbers, rows, row_stride, row_count, row_dtype, positions, factors, dots, dot_count):
    """This rank's sums for all tokens that came, and then a line to everyone. `row_stride` is in bytes."""
    lane = numbers_at(numbers)
    own, chosen = load_int64(lane.lane_ptrs + 8 * lane.rank), lane.scratch
    layout, parts = sum_layout_of(lane), chosen + 8 * lane.top_k
    any_far = look_far(lane.board, board_at(lane.board).rank, own + lane.sums, 0)
    for source in range(lane.world):
        far = any_far and source != lane.rank
        first_slot = source * lane.max_tokens
        for slot in range(first_slot, first_slot + load_int64(lane.counts + 8 * source)):
            first = slot * lane.top_k
            terms = terms_within(positions + 8 * first, lane, row_count, chosen)
            if terms == 0:
                continue
            each = 1 if lane.invariant else terms
            for term in range(0, terms, each):
                record = sum_place(lane.rank, slot, lane) + term * lane.sum_bytes
                if row_dtype == AS_THEY_ARE:
                    copy_record(rows, row_stride, chosen, record, layout)
                else:
                    named, weights = chosen + 8 * term, factors + 4 * (first + term)
                    total = weighted_sum_row(rows, row_stride, row_dtype, named, weights, each, layout, parts)
                    pack_sum_row(total, lane.sum_dtype, record, layout, 0, far)
            if lane.weight_grads:
                store_grads(positions + 8 * first, terms, dots, dot_count, own + lane.weight_grads + 4 * first)
    tell_all(lane, WITH_SUMS)


@device
def has_sums(rank, lane):
    """Whether a rank's last line said that it packed sums."""
    return load_int64(lane.said + 8 * rank) == WITH_SUMS


@device
def read_grads(ids, slot, lane, grads):
    """The gradients of a token's router weights, in the order of its ids, out of the memories of its experts."""
    for k in range(lane.top_k):
        expert, ordinal, found = load_int32(ids + 4 * k), 0, _ZERO
        owner = owner_of(expert, lane)
        if owner >= 0 and has_sums(owner, lane):
            for other in range(lane.top_k):
                candidate = load_int32(ids + 4 * other)
                if other != k and candidate < expert and owner_of(candidate, lane) == owner:
                    ordinal += 1
            theirs = load_int64(lane.lane_ptrs + 8 * owner) + lane.weight_grads
            found = load_float32(theirs + 4 * (slot * lane.top_k + ordinal))
        store_float32(grads + 4 * k, found)


@device
def sum_tokens(lane, source, places, tokens, out, out_stride, grads):
    """Adds up what ranks have for a source's tokens, into rows; and reads gradients of router weights.

    `places` is the address of the tokens' numbers, or 0: 0 to before `tokens`.
    """
    ranks, part = stack_buffer(RANKS_BYTES), load_int64(lane.part_ptrs + 8 * source)
    for row in range(tokens):
        token = load_int64(places + 8 * row) if places else np.int64(row)
        ids, slot = part + lane.ids + 4 * token * lane.top_k, source * lane.max_tokens + token
        if lane.weight_grads:
            read_grads(ids, slot, lane, grads + 4 * row * lane.top_k)
        count, last, ordinal = senders(ids, lane, ranks), np.int64(-1), 0
        for j in range(count):  # the list of ranks becomes one of addresses, in place
            rank = load_int64(ranks + 8 * j)
            ordinal = ordinal + 1 if rank == last else 0
            last = rank
            there = has_sums(rank, lane) and ordinal < lane.each
            address = sum_place(rank, slot, lane) + ordinal * lane.sum_bytes
            store_int64(ranks + 8 * j, address if there else np.int64(-1))
        row_layout, target = sum_layout_of(lane), out + row * out_stride
        sum_record_row(np.int64(0), np.int64(1), ranks, count, lane.sum_dtype, row_layout, target, lane.scratch)


@kernel
def sum_home_kernel(numbers, out, out_stride, tokens, grads):
    """Takes the lines of all ranks, and adds up the sums of this rank's tokens. Returns whether one left it open."""
    lane, left = numbers_at(numbers), False
    take_lines(lane)
    sum_tokens(lane, lane.rank, np.int64(0), tokens, out, out_stride, grads)
    for place in range(lane.num_peers):
        left |= load_int64(lane.said + 8 * load_int64(lane.peers + 8 * place)) == LEFT_OPEN
    return left


@kernel
def sum_for_kernel(numbers, source, places, tokens, out, out_stride, grads):
    """Adds up the sums of some of a source's tokens, once lines are taken."""
    sum_tokens(numbers_at(numbers), source, places, tokens, out, out_stride, grads)


# ---------------------------------------------------------------------------------------------------------------------
# Launchers; the rows' columns lie side by side


def send_tokens(
    lane: PulledLane, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, word: int
) -> None:
    """Puts this rank's tokens into its part, and a line at every rank.

    Args:
        x: [tokens, hidden], at most MAX_TOKENS.
        topk_ids: int32 or int64 [tokens, top_k], contiguous; what is no expert counts as none.
        topk_weights: float32 [tokens, top_k], contiguous.
        word: at least 0, which `route` compares.

    Raises WireFormatError for a dtype that the lane has no room for, TransportUnavailable without numba.
    """
    ids = topk_ids.data_ptr(), topk_ids.itemsize, topk_weights.data_ptr()
    send_tokens_kernel(numbers_of(lane, x.dtype), x.data_ptr(), x.stride(0) * x.itemsize, *ids, x.shape[0], word)


def tell(lane: PulledLane, word: int) -> None:
    """Puts a line at every rank, and nothing else: a refusal, or how the round ends without sums."""
    tell_kernel(numbers_of(lane, _ANY), word)


def route(lane: PulledLane, dtype: torch.dtype, word: int) -> bool:
    """Takes the lines of all ranks and routes their tokens; False if one says something else, and nothing is routed."""
    alike: bool = route_kernel(numbers_of(lane, dtype), word)
    return alike


def gather(
    lane: PulledLane,
    out: torch.Tensor,
    overflow: torch.Tensor,
    zero_tail: bool = False,
    index: torch.Tensor | None = None,
    used: torch.Tensor | None = None,
) -> None:
    """Fills `out` with the experts' rows, or with the records that an index names.

    Args:
        out: [capacity, hidden].
        overflow: bool [], becomes whether rows were dropped.
        zero_tail: whether rows that are nobody's become zero; else they are left as they are.
        index: int64 [capacity], with `used`, int64 [].

    Raises:
        RoutingError: the lane's index or offsets were written into since `route`.
    """
    chosen = (0, 0) if index is None or used is None else (index.data_ptr(), used.data_ptr())
    place = out.data_ptr(), out.stride(0) * out.itemsize, int(zero_tail), out.shape[0], overflow.data_ptr()
    if gather_kernel(numbers_of(lane, out.dtype), *chosen, *place) == _OVERWRITTEN:
        raise RoutingError("index or expert_offsets were written into since they were routed; they are to be read only")


def copy_records(lane: PulledLane, dtype: torch.dtype) -> torch.Tensor:
    """The records that came: uint8 [world * max_tokens, row_bytes], by source rank, then token.

    Rows that `index` does not name hold anything.
    """
    layout = lane.layout
    row_bytes = lane.wire.row_bytes(layout.HIDDEN, dtype)
    out = torch.empty(layout.WORLD * layout.MAX_TOKENS, row_bytes, dtype=torch.uint8, device="cpu")
    copy_records_kernel(numbers_of(lane, dtype), out.data_ptr(), row_bytes)
    return out


def send_sums(
    lane: PulledLane,
    rows: torch.Tensor,
    dtype: torch.dtype,
    positions: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    dots: torch.Tensor | None = None,
    as_they_are: bool = False,
) -> None:
    """Puts the weighted sums of experts' rows into this rank's memory, and a line at every rank.

    Args:
        rows: floats [rows, hidden], or records of the combine wire, uint8 [rows, row_bytes].
        dtype: of the tokens.
        positions, weights: as the lane's, which None stands for.
        dots: float32, the gradient of each row's router weight, on lanes that carry them; None: they are zero.
        as_they_are: records, one a token, go home as they are.
    """
    terms = lane.positions if positions is None else positions, lane.weights if weights is None else weights
    of_rows = rows.data_ptr(), rows.stride(0) * rows.itemsize, rows.shape[0], rows_code(rows, as_they_are)
    of_weights = (0, 0) if dots is None else (dots.data_ptr(), dots.numel())
    send_sums_kernel(numbers_of(lane, dtype), *of_rows, *(of.data_ptr() for of in terms), *of_weights)


def take(lane: PulledLane) -> None:
    """Takes the lines of all ranks, and nothing else."""
    take_kernel(numbers_of(lane, _ANY))


def sum_home(lane: PulledLane, out: torch.Tensor, grads: torch.Tensor | None = None) -> bool:
    """Takes the lines of all ranks, and adds up this rank's sums into `out`, [tokens, hidden].

    `grads`, contiguous float32 [tokens, top_k], becomes the gradients of router weights, on lanes that carry them.
    Returns whether a rank left the round open: its sums are missing, as are those of one that abandoned it.
    """
    place = out.data_ptr(), out.stride(0) * out.itemsize, out.shape[0], 0 if grads is None else grads.data_ptr()
    left: bool = sum_home_kernel(numbers_of(lane, out.dtype), *place)
    return left


def sum_for(
    lane: PulledLane,
    dtype: torch.dtype,
    source: int,
    tokens: torch.Tensor,
    out: torch.Tensor,
    grads: torch.Tensor | None = None,
) -> None:
    """Adds up the sums of a source's tokens, once lines are taken; over two levels their sums are float32.

    Args:
        dtype: of the tokens.
        tokens: int64 [rows], contiguous, their numbers, each below MAX_TOKENS.
        out: [rows, hidden] of the lane's `sum_dtype`, or that of the tokens.
        grads: as `sum_home` has it.
    """
    place = out.data_ptr(), out.stride(0) * out.itemsize, 0 if grads is None else grads.data_ptr()
    sum_for_kernel(numbers_of(lane, dtype), source, tokens.data_ptr(), len(tokens), *place)
