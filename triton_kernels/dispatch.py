"""Dispatch: one kernel quantises each token into the memory of the ranks that own its experts, and tells all ranks.

A token's slot at a receiver is its index at the sender, so nothing is counted or scanned before the first store. Every
rank also sends every peer, in every round, how many tokens it has and the dense ids and weights of all of them: from
that alone the receiver knows which slots hold something, and never looks at one that was not written in this round.

Source: the order of the signals is that of `docs/protocol.md`.
"""

from __future__ import annotations

import torch

from thinwire.triton_kernels.blocks import rotated
from thinwire.triton_kernels.codec import (
    encode_tile,
    group_amax,
    row_amax_bits,
    store_encoded_tile,
    store_record_tail,
    tile_columns,
)
from thinwire.triton_kernels.compat import tl, triton
from thinwire.triton_kernels.floats import widened
from thinwire.triton_kernels.launch import Launcher, kept, launcher_of
from thinwire.triton_kernels.put import base_of, put, record_at
from thinwire.triton_kernels.record import NONE, RecordLayout
from thinwire.triton_kernels.round_layout import (
    ABANDONED,
    COMBINE,
    DISPATCH,
    DTYPE_BITS,
    DTYPE_CODES,
    REFUSED,
    Lane,
)
from thinwire.triton_kernels.rows import load_tile
from thinwire.triton_kernels.signal import (
    advance,
    arrive,
    most_programs,
    poison,
    publish,
    register_limit,
    signal_words,
    store_signal_words,
    wait_or_give_up,
)

# Tokens whose ids and weights a program sends at a time.
PLANE_TOKENS = 32


@triton.jit
def owner_of(ids, ROUND: tl.constexpr):
    """The rank that owns each expert, int32; -1 where an id is no expert's."""
    base: tl.constexpr = ROUND.NUM_EXPERTS // ROUND.WORLD
    rest: tl.constexpr = ROUND.NUM_EXPERTS % ROUND.WORLD
    known = tl.where(ids < 0, False, ids < ROUND.NUM_EXPERTS)
    ids = tl.where(known, ids, 0).to(tl.uint32)  # a division of 64 bits is a long one
    if rest == 0:  # without a choice between two divisions, which would be one by a number that is not known
        owner = ids // base
    else:
        split: tl.constexpr = rest * (base + 1)  # experts of the ranks that own one more
        divisor: tl.constexpr = base if base > 0 else 1
        owner = tl.where(ids < split, ids // (base + 1), rest + (ids - split) // divisor)
    return tl.where(known, owner.to(tl.int32), -1)


@triton.jit
def next_destination(owners, turn, rank, ROUND: tl.constexpr):
    """Of the ranks among a token's `owners` [K_BLOCK], the one behind the `turn`-th round the ranks from `rank` on.

    Returns its turn and itself; the turn is WORLD where there is none. So each rank comes once, however often it is
    among the owners, and of all ranks that send at a time no two begin with the same one.
    """
    turns = owners - rank - 1
    turns = tl.where(owners < 0, ROUND.WORLD, tl.where(turns < 0, turns + ROUND.WORLD, turns))
    turn = tl.min(tl.where(turns > turn, turns, ROUND.WORLD))
    peer = turn + rank + 1
    return turn, tl.where(peer >= ROUND.WORLD, peer - ROUND.WORLD, peer)


@triton.jit
def is_near(owners, rank, ROUND: tl.constexpr):
    """Whether each of `owners` is a rank of this rank's host; not -1, which is none."""
    first = rank // ROUND.MEMBERS * ROUND.MEMBERS
    return tl.where(owners >= first, owners < first + ROUND.MEMBERS, False)


@triton.jit
def send_plane(
    ids_ptr, weights_ptr, buffer_ptrs, report_ptr, message_ptr, rank, num_tokens, start, ROUND: tl.constexpr,
    TOKENS: tl.constexpr, K_BLOCK: tl.constexpr,
):  # fmt: skip
    """Ids and weights of TOKENS tokens from `start` on, repeated experts merged, to every peer's planes.

    On several hosts all of them go into the message, and to the host's ranks those of its experts.
    """
    tokens = start + tl.arange(0, TOKENS)
    ks = tl.arange(0, K_BLOCK)
    there = tokens[:, None] < num_tokens
    entries = tokens[:, None].to(tl.int64) * ROUND.TOP_K + ks[None, :]
    mask = tl.where(ks[None, :] < ROUND.TOP_K, there, False)
    ids = tl.load(ids_ptr + entries, mask=mask, other=-1)
    outside = tl.where(ids < -1, 1, tl.where(ids >= ROUND.NUM_EXPERTS, 1, 0))
    if tl.sum(outside) > 0:
        tl.store(report_ptr + ROUND.BAD_IDS, 1)
    total = tl.zeros((TOKENS, K_BLOCK), tl.float32)
    first = tl.full((TOKENS, K_BLOCK), K_BLOCK, tl.int32)
    for k in range(ROUND.TOP_K):
        column = tokens.to(tl.int64) * ROUND.TOP_K + k
        id_k = tl.load(ids_ptr + column, mask=tokens < num_tokens, other=-1)
        weight = tl.load(weights_ptr + column, mask=tokens < num_tokens, other=0.0).to(tl.float32)
        same = ids == id_k[:, None]
        total = total + tl.where(same, weight[:, None], 0.0)
        first = tl.minimum(first, tl.where(same, k, K_BLOCK))
    kept = tl.where(outside + tl.where(ids < 0, 1, 0) > 0, 0, tl.where(first == ks[None, :], 1, 0)) > 0
    ids = tl.where(kept, ids, -1).to(tl.int32)
    total = tl.where(kept, total, 0.0)
    if ROUND.MEMBERS:
        message = message_ptr.to(tl.int64) + entries * 4
        tl.store((message + ROUND.MESSAGE_IDS).to(tl.pointer_type(tl.int32)), ids, mask=mask)
        tl.store((message + ROUND.MESSAGE_WEIGHTS).to(tl.pointer_type(tl.float32)), total, mask=mask)
    store_plane(ids, total, entries, mask, buffer_ptrs, rank, rank, ROUND)


@triton.jit
def store_plane(ids, weights, entries, mask, buffer_ptrs, rank, source, ROUND: tl.constexpr):
    """Those of some of a `source`'s entries into its planes at every peer; on several hosts, at those of this one."""
    offsets = (source.to(tl.int64) * ROUND.MAX_TOKENS * ROUND.TOP_K + entries) * 4
    if ROUND.MEMBERS:
        near = is_near(owner_of(ids, ROUND), rank, ROUND)
        ids, weights = tl.where(near, ids, -1), tl.where(near, weights, 0.0)
        for member in range(ROUND.MEMBERS):
            base = base_of(buffer_ptrs, rank // ROUND.MEMBERS * ROUND.MEMBERS + member)
            put((base + ROUND.IDS + offsets).to(tl.pointer_type(tl.int32)), ids, mask)
            put((base + ROUND.WEIGHTS + offsets).to(tl.pointer_type(tl.float32)), weights, mask)
    else:
        for peer in range(ROUND.WORLD):
            base = base_of(buffer_ptrs, peer)
            put((base + ROUND.IDS + offsets).to(tl.pointer_type(tl.int32)), ids, mask)
            put((base + ROUND.WEIGHTS + offsets).to(tl.pointer_type(tl.float32)), weights, mask)


@triton.jit
def send_record(x_row, buffer_ptrs, rank, slot, owners, message, ROUND: tl.constexpr, LAYOUT: tl.constexpr):
    """One row to each rank among `owners` [K_BLOCK] that is not -1: encoded once, stored as often as needed.

    And to `message`, an address, unless it is None.
    """
    row_amax = row_amax_bits(x_row, LAYOUT.HIDDEN, LAYOUT)
    for tile in range(LAYOUT.NUM_TILES):
        columns = tile_columns(tile, LAYOUT)
        payload = load_tile(x_row, columns, tile, LAYOUT)
        scale_bits = payload
        if LAYOUT.KIND != NONE:
            x = rotated(widened(payload), LAYOUT)
            payload, scale_bits = encode_tile(x, row_amax if LAYOUT.TWO_PASSES else group_amax(x, LAYOUT), LAYOUT)
        turn = rank * 0 - 1
        for _ in range(ROUND.SLOTS):
            turn, peer = next_destination(owners, turn, rank, ROUND)
            if turn < ROUND.WORLD:
                record = record_at(base_of(buffer_ptrs, peer) + ROUND.RECORDS + slot * ROUND.RECORD_BYTES)
                _store_tile(record, payload, scale_bits, columns, tile, LAYOUT)
        if message is not None:
            _store_tile(record_at(message), payload, scale_bits, columns, tile, LAYOUT)


@triton.jit
def _store_tile(record, payload, scale_bits, columns, tile, LAYOUT: tl.constexpr):
    if LAYOUT.KIND == NONE:
        put(record.to(tl.pointer_type(LAYOUT.DTYPE)) + columns, payload, columns < LAYOUT.ELEMENTS)
    else:
        store_encoded_tile(record, payload, scale_bits, tile, LAYOUT)
    if tile == LAYOUT.NUM_TILES - 1:
        store_record_tail(record, LAYOUT)


@triton.jit(do_not_specialize=["rank", "num_tokens", "dtype_code"])
def send_tokens_kernel(
    x_ptr,
    ids_ptr,  # int32 or int64 [num_tokens, top_k], contiguous
    weights_ptr,  # float [num_tokens, top_k], contiguous
    x_row_stride,
    num_tokens,
    dtype_code,
    buffer_ptrs,
    control_ptr,
    report_ptr,
    message_ptr,  # what other hosts get; only on several
    rank,
    ROUND: tl.constexpr,
    LAYOUT: tl.constexpr,
    PLANE_TOKENS: tl.constexpr,
    K_BLOCK: tl.constexpr,
    LAUNCH: tl.constexpr,
):
    """Planes and records to the peers, then the header and the signal. Any number of programs."""
    if tl.load(control_ptr + ROUND.STATUS) == ROUND.RUNNING:
        start = tl.program_id(0) * PLANE_TOKENS
        while start < num_tokens:
            send_plane(
                ids_ptr, weights_ptr, buffer_ptrs, report_ptr, message_ptr, rank, num_tokens, start, ROUND,
                PLANE_TOKENS, K_BLOCK,
            )  # fmt: skip
            start += tl.num_programs(0) * PLANE_TOKENS
        # Backwards, since the first programs had planes to send.
        token = tl.num_programs(0) - 1 - tl.program_id(0)
        ks = tl.arange(0, K_BLOCK)
        while token < num_tokens:
            ids_row = ids_ptr + token.to(tl.int64) * ROUND.TOP_K
            owners = owner_of(tl.load(ids_row + ks, mask=ks < ROUND.TOP_K, other=-1), ROUND)
            slot = rank.to(tl.int64) * ROUND.MAX_TOKENS + token
            x_row = x_ptr + token.to(tl.int64) * x_row_stride
            if ROUND.MEMBERS:
                owners = tl.where(is_near(owners, rank, ROUND), owners, -1)
                message = message_ptr.to(tl.int64) + ROUND.MESSAGE_RECORDS + token.to(tl.int64) * LAYOUT.ROW_BYTES
                send_record(x_row, buffer_ptrs, rank, slot, owners, message, ROUND, LAYOUT)
            else:
                send_record(x_row, buffer_ptrs, rank, slot, owners, None, ROUND, LAYOUT)
            token += tl.num_programs(0)
        if arrive(control_ptr, ROUND, LAUNCH):
            epoch = advance(control_ptr + ROUND.EPOCH, 1)
            if ROUND.MEMBERS:
                header = message_ptr.to(tl.int64).to(tl.pointer_type(tl.int32))
                tl.store(header, epoch)
                tl.store(header + ROUND.TOKENS, num_tokens)
                tl.store(header + ROUND.DTYPE, dtype_code)
            store_signal_words(buffer_ptrs, rank, ROUND.SIGNALS, ROUND.TOKENS, num_tokens, ROUND, LAUNCH)
            store_signal_words(buffer_ptrs, rank, ROUND.SIGNALS, ROUND.DTYPE, dtype_code, ROUND, LAUNCH)
            publish(buffer_ptrs, rank, ROUND.SIGNALS, epoch, ROUND, LAUNCH)


@triton.jit(do_not_specialize=["end", "rank"])
def close_round_kernel(
    end,  # ABANDONED or LEFT_OPEN
    buffer_ptrs,
    control_ptr,
    rank,
    ROUND: tl.constexpr,
    LAUNCH: tl.constexpr,
):
    """Signals the combine phase without sums. One program."""
    lines: tl.constexpr = ROUND.COMBINE_SIGNALS
    if tl.load(control_ptr + ROUND.STATUS) == ROUND.RUNNING:
        epoch = tl.load(control_ptr + ROUND.EPOCH)
        store_signal_words(buffer_ptrs, rank, lines, ROUND.END, end, ROUND, LAUNCH)
        publish(buffer_ptrs, rank, lines, epoch, ROUND, LAUNCH)


@triton.jit(do_not_specialize=["rank", "timeout_ns", "grace_ns"])
def wait_kernel(
    buffer_ptr,
    buffer_ptrs,
    control_ptr,
    report_ptr,
    rank,
    timeout_ns: tl.int64,
    grace_ns: tl.int64,
    PHASE: tl.constexpr,
    ROUND: tl.constexpr,
    LAUNCH: tl.constexpr,
):
    """One phase of a round: until every rank has signalled it. One program of one warp."""
    lines: tl.constexpr = ROUND.SIGNALS if PHASE == 0 else ROUND.COMBINE_SIGNALS
    if tl.load(control_ptr + ROUND.STATUS) == ROUND.RUNNING:
        base = buffer_ptr.to(tl.int64)
        epoch = tl.load(control_ptr + ROUND.EPOCH)
        status = wait_or_give_up(
            base, buffer_ptrs, report_ptr, rank, lines, epoch, epoch, timeout_ns, grace_ns, PHASE, ROUND, LAUNCH
        )
        if PHASE == 0:
            if status == ROUND.RUNNING:
                peers = tl.arange(0, LAUNCH.BLOCK)
                known = peers < ROUND.WORLD
                tokens = tl.load(signal_words(base, lines, ROUND.TOKENS, peers, ROUND), mask=known, other=0)
                dtypes = tl.load(signal_words(base, lines, ROUND.DTYPE, peers, ROUND), mask=known, other=0)
                own = tl.sum(tl.where(peers == rank, dtypes, 0))
                wrong = tl.where(dtypes != own, 1, tl.where(tokens < 0, 1, tl.where(tokens > ROUND.MAX_TOKENS, 1, 0)))
                wrong = tl.where(known, wrong, 0)
                if tl.sum(wrong) > 0:
                    tl.store(report_ptr + ROUND.REPORT_PEERS + peers, wrong, mask=known)
                    status = status * 0 + ROUND.MISMATCHED
        elif status == ROUND.RUNNING:
            peers = tl.arange(0, LAUNCH.BLOCK)
            ends = tl.load(signal_words(base, lines, ROUND.END, peers, ROUND), mask=peers < ROUND.WORLD, other=0)
            combined = tl.sum(tl.where(peers == rank, ends, 0)) == ROUND.WITH_SUMS
            left_open = tl.where(combined, tl.max(tl.where(ends == ROUND.LEFT_OPEN, peers + 1, 0)), 0)
            tl.store(control_ptr + ROUND.CONTROL_LEFT_OPEN, left_open)
            if left_open > 0:
                tl.store(report_ptr + ROUND.REPORT_LEFT_OPEN, left_open)
        if status != ROUND.RUNNING:
            poison(control_ptr, report_ptr, status, epoch, PHASE, ROUND, LAUNCH)


# ---------------------------------------------------------------------------------------------------------------------
# Launchers


def send_tokens(
    lane: Lane,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    num_programs: int | None = None,
    tag: int = 0,
) -> None:
    """Begins a round: quantises each token into the memory of the ranks that own its experts, and signals all ranks.

    Args:
        lane: the lane, whose last round is closed.
        x: [tokens, hidden] float32, float16 or bfloat16 with contiguous rows; at most MAX_TOKENS.
        topk_ids: int32 or int64 [tokens, top_k]; -1 is none. Any other id outside of 0 ... NUM_EXPERTS - 1 counts as
            none too, and is noted in the lane's report.
        topk_weights: float [tokens, top_k].
        num_programs: programs of the launch; None means enough to fill the GPU.
        tag: 0 ... 2**29 - 1; ranks with different ones find that their lines differ.
    """
    _send_tokens(lane, x, topk_ids, topk_weights, x.shape[0], num_programs, tag)


def refuse(lane: Lane, why: int) -> None:
    """Begins a round in which this rank has nothing to send: all find that their lines differ, and `why` as its tag."""
    x = torch.empty(1, lane.layout.HIDDEN, dtype=torch.bfloat16, device=lane.buffer.device)
    ids = torch.empty(1, lane.layout.TOP_K, dtype=torch.int64, device=x.device)
    _send_tokens(lane, x, ids, ids.float(), REFUSED, 1, why)


def _send_tokens(
    lane: Lane,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    tokens: int,
    num_programs: int | None,
    tag: int,
) -> None:
    dtype = x.dtype
    launch, most = kept(lane, _token_sending, dtype, num_programs)
    launch(
        max(1, min(x.shape[0], most)), 1, (x, topk_ids.contiguous(), topk_weights.contiguous()), (x.stride(0),),
        (tokens, DTYPE_CODES[dtype] | tag << DTYPE_BITS),
    )  # fmt: skip


def _token_sending(lane: Lane, dtype: torch.dtype, num_programs: int | None) -> tuple[Launcher, int]:
    layout, device = RecordLayout.of(lane.wire, lane.layout.HIDDEN, dtype), lane.buffer.device
    # Of int4 a thread has twice the columns, which take more room where they are loaded one by one. Of
    # blocks it has as many, which takes more where floats are added in pairs.
    one_by_one = lane.wire.name == "int4" and lane.layout.HIDDEN * dtype.itemsize % 16 > 0
    launch = launcher_of(
        lane, send_tokens_kernel, {"LAYOUT": layout, "PLANE_TOKENS": PLANE_TOKENS},
        ("x_ptr", "ids_ptr", "weights_ptr"), ("x_row_stride",), ("num_tokens", "dtype_code"),
        num_warps=layout.num_warps, enable_fp_fusion=False,
        **register_limit(device, least=192 if one_by_one else 168 if layout.BLOCKS else 128),
    )  # fmt: skip
    return launch, most_programs(device, num_programs)


def close_round(lane: Lane, end: int = ABANDONED) -> None:
    """Ends the open round without sums of this rank: peers that wait for them learn that there are none.

    Args:
        end: ABANDONED, as asked for; or LEFT_OPEN, which ranks that combine the round learn.
    """
    kept(lane, _closing)(1, 1, (), (), (end,))


def _closing(lane: Lane) -> Launcher:
    return launcher_of(lane, close_round_kernel, {}, counts=("end",), num_warps=1)


def wait(lane: Lane, phase: int, timeout: float, grace: float) -> None:
    """Waits until every rank has signalled a phase of the lane's round.

    Args:
        phase: DISPATCH or COMBINE.
        timeout: seconds until the lane is given up.
        grace: seconds that peers then get to report that they are stuck too.
    """
    if phase not in (DISPATCH, COMBINE):
        raise ValueError(f"phase is {phase!r}; accepted: {DISPATCH} (dispatch), {COMBINE} (combine)")
    kept(lane, _waiting, phase, timeout, grace)(1)


def _waiting(lane: Lane, phase: int, timeout: float, grace: float) -> Launcher:
    times = {"timeout_ns": int(timeout * 1e9), "grace_ns": int(grace * 1e9)}
    return launcher_of(lane, wait_kernel, {**times, "PHASE": phase}, num_warps=1)
