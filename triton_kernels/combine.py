"""Combine over peers' memory: the experts' sums go straight into the token's home, which adds them up.

At the experts' rank, for every token that came here::

    slot[token][j] at home = quantise( sum over its experts here of weight * expert_out )

with j this rank's ordinal among the ranks that the token went to, which both ends know from the token's ids. At home::

    out[t] = round( sum over j of dequantise(slot[t][j]) )

skipping ranks that closed the round without sums. With `RoundLayout.INVARIANT` each expert's weighted row goes home by
itself, and j is the expert's ordinal among all of the token's, in ascending id: what is added, and in which order, then
does not depend on which rank has which expert. Both sums are those of `thinwire.triton_kernels.sums`: explicit
float32 loops from +0.0 in ascending expert id and ascending rank, so the result is the same whichever way rows travel.
"""

from __future__ import annotations

import torch

from thinwire.triton_kernels.blocks import rotated_back
from thinwire.triton_kernels.codec import fill_row, load_encoded_tile, scaled_tile, store_rounded_tile, tile_columns
from thinwire.triton_kernels.compat import tl, triton
from thinwire.triton_kernels.dispatch import owner_of
from thinwire.triton_kernels.launch import Launcher, kept, launcher_of
from thinwire.triton_kernels.put import base_of, put, record_at
from thinwire.triton_kernels.record import MAX_TILE, NONE, RecordLayout
from thinwire.triton_kernels.round_layout import Lane, check_home_grads, check_weight_grads
from thinwire.triton_kernels.signal import (
    arrive,
    most_programs,
    num_programs_for,
    publish,
    register_limit,
    signal_words,
    store_signal_words,
)
from thinwire.triton_kernels.sums import copy_record, load_positions, num_terms, store_sum, sum_warps


@triton.jit
def ids_of(base, slot, ROUND: tl.constexpr, K_BLOCK: tl.constexpr, there=True):
    """The experts of a record's token, if it is `there`; -1 for none: int32 [K_BLOCK]. From this rank's planes."""
    ks = tl.arange(0, K_BLOCK)
    ids_row = (base + ROUND.IDS + slot * (ROUND.TOP_K * 4)).to(tl.pointer_type(tl.int32))
    return tl.load(ids_row + ks, mask=tl.where(there, ks < ROUND.TOP_K, False), other=-1)


@triton.jit
def owners_of(base, slot, ROUND: tl.constexpr, K_BLOCK: tl.constexpr):
    """The rank of each of them, -1 for none."""
    return owner_of(ids_of(base, slot, ROUND, K_BLOCK), ROUND)


@triton.jit
def ranks_below(owners, ranks, ROUND: tl.constexpr):
    """How many different ranks below each of `ranks` are among `owners` [K_BLOCK]: int32 of the shape of `ranks`."""
    count = ranks * 0
    for first in range(0, ROUND.WORLD, 32):
        bits = tl.full(owners.shape, 1, tl.uint32) << (owners & 31)
        bits = tl.reduce_or(tl.where(owners >= first, tl.where(owners < first + 32, bits, 0), 0), 0)
        lower = (tl.full(ranks.shape, 1, tl.uint32) << (ranks & 31)) - 1
        bits = tl.where(ranks < first, 0, tl.where(ranks < first + 32, bits & lower, bits))
        # The sum of the bits: pairs of them, fours, eights, and all four of those.
        bits -= (bits >> 1) & 0x55555555
        bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
        bits = (bits + (bits >> 4)) & 0x0F0F0F0F
        count += ((bits * 0x01010101) >> 24).to(tl.int32)
    return count


@triton.jit
def places_of(base, slot, owners, ROUND: tl.constexpr, K_BLOCK: tl.constexpr):
    """The place at home of what each expert of a slot's token adds to: int32 [K_BLOCK], nothing where there is none."""
    if not ROUND.INVARIANT:
        return ranks_below(owners, owners, ROUND)
    ids = ids_of(base, slot, ROUND, K_BLOCK)
    below = tl.where(ids[None, :] < ids[:, None], tl.where(ids[None, :] >= 0, 1, 0), 0)
    return tl.sum(below, axis=1)


@triton.jit
def slot_of(number, peers, counts, ends, ROUND: tl.constexpr):
    """The slot of one of the tokens that came from `peers`; `ends` is the sum of `counts` so far."""
    source = tl.sum(tl.where(ends <= number, 1, 0))
    return source * ROUND.MAX_TOKENS + number - tl.sum(tl.where(peers < source, counts, 0))


@triton.jit(do_not_specialize=["rank", "num_rows"])
def send_sums_kernel(
    expert_out_ptr,
    weight_grads_ptr,  # float32 [slots, top_k], of which each id's is read; only where lanes carry some
    expert_out_row_stride,
    num_rows,
    buffer_ptr,
    buffer_ptrs,
    home_ptrs,
    control_ptr,
    positions_ptr,
    weights_ptr,
    rank,
    ROUND: tl.constexpr,
    LAYOUT: tl.constexpr,
    K_BLOCK: tl.constexpr,
    ENCODED: tl.constexpr,  # rows are records
    AS_THEY_ARE: tl.constexpr,
    LAUNCH: tl.constexpr,
):
    """Sums to their homes, then the signal. Any number of programs."""
    lines: tl.constexpr = ROUND.COMBINE_SIGNALS
    base = buffer_ptr.to(tl.int64)
    # Tokens are numbered through the sources, so that few tokens still spread over all programs.
    peers = tl.arange(0, LAUNCH.BLOCK)
    tokens = signal_words(base, ROUND.SIGNALS, ROUND.TOKENS, peers, ROUND)
    counts = tl.load(tokens, mask=peers < ROUND.WORLD, other=0)  # on its way while the status is
    counts = tl.minimum(tl.maximum(counts, 0), ROUND.MAX_TOKENS)  # a peer may write since they were checked
    if tl.load(control_ptr + ROUND.STATUS) == ROUND.RUNNING:
        ends = tl.cumsum(counts, axis=0)
        total = tl.sum(counts)
        sums: tl.constexpr = ROUND.TOP_K if ROUND.INVARIANT else 1  # of a token, each of so many terms:
        terms: tl.constexpr = ROUND.TOP_K // sums
        parts: tl.constexpr = 1 if LAYOUT.TWO_PASSES or AS_THEY_ARE else LAYOUT.NUM_TILES  # of a sum
        items: tl.constexpr = sums * parts
        item = tl.program_id(0)
        slot, there = slot_of(item // items, peers, counts, ends, ROUND), item < total * items
        listed = load_positions(positions_ptr + slot.to(tl.int64) * ROUND.TOP_K + item // parts % sums, terms, there)
        ids = ids_of(base, slot.to(tl.int64), ROUND, K_BLOCK, there)
        while item < total * items:
            number, part = item // parts % sums, item % parts
            home, of_token = base_of(home_ptrs, slot // ROUND.MAX_TOKENS), (slot % ROUND.MAX_TOKENS).to(tl.int64)
            first = slot.to(tl.int64) * ROUND.TOP_K + number
            found, owners = num_terms(listed), owner_of(ids, ROUND)
            # What the next one needs is on its way while this one's rows are added up.
            item += tl.num_programs(0)
            slot, there = slot_of(item // items, peers, counts, ends, ROUND), item < total * items
            listed = load_positions(
                positions_ptr + slot.to(tl.int64) * ROUND.TOP_K + item // parts % sums, terms, there
            )
            ids = ids_of(base, slot.to(tl.int64), ROUND, K_BLOCK, there)
            if found > 0:
                if ROUND.INVARIANT:  # behind those of the ranks below, the rank's own experts are in ascending order
                    ordinal = tl.sum(tl.where(owners >= 0, tl.where(owners < rank, 1, 0), 0)) + number
                else:
                    ordinal = ranks_below(owners, rank, ROUND)
                ordinal = tl.minimum(ordinal, ROUND.SLOTS - 1)  # whatever the ids are by now
                record = record_at(home + (ROUND.SUMS + (of_token * ROUND.SLOTS + ordinal) * ROUND.SUM_BYTES))
                if ROUND.WEIGHT_GRADS:  # before the sum, or what they need would be held all the while
                    ks = tl.arange(0, K_BLOCK)
                    mine = (owners == rank) & (part == 0)
                    grads = tl.load(weight_grads_ptr + first + ks, mask=mine, other=0.0)
                    target = home + (ROUND.WEIGHT_GRADS + of_token * (ROUND.TOP_K * 4))
                    put(target.to(tl.pointer_type(tl.float32)) + ks, grads, mine)
                rows = (expert_out_ptr, expert_out_row_stride, num_rows)
                if AS_THEY_ARE:
                    copy_record(rows, positions_ptr + first, record, LAYOUT)
                else:
                    weights = weights_ptr + first
                    store_sum(rows, positions_ptr + first, weights, found, record, part, parts, LAYOUT, ENCODED)
        if arrive(control_ptr, ROUND, LAUNCH):
            store_signal_words(buffer_ptrs, rank, lines, ROUND.END, ROUND.WITH_SUMS, ROUND, LAUNCH)
            epoch = tl.load(control_ptr + ROUND.EPOCH)
            publish(buffer_ptrs, rank, lines, epoch, ROUND, LAUNCH)


@triton.jit(do_not_specialize=["rank", "num_tokens"])
def sum_home_kernel(
    out_ptr,
    weight_grads_ptr,  # float32 [tokens, top_k], written whole; only where lanes carry some
    out_row_stride,
    num_tokens,
    buffer_ptr,
    control_ptr,
    rank,
    ROUND: tl.constexpr,
    LAYOUT: tl.constexpr,
    K_BLOCK: tl.constexpr,
    FLIGHT: tl.constexpr,  # sums that are loaded before the first of them is added
):
    """Adds up what came home; NaN everywhere where a rank left the round open. Any number of programs."""
    lines: tl.constexpr = ROUND.COMBINE_SIGNALS
    base = buffer_ptr.to(tl.int64)
    status, left_open = tl.load(control_ptr + ROUND.STATUS), tl.load(control_ptr + ROUND.CONTROL_LEFT_OPEN)
    running = (status == ROUND.RUNNING) & (left_open == 0)
    token = tl.program_id(0)
    ks = tl.arange(0, K_BLOCK)
    while token < num_tokens:
        out_row = out_ptr + token.to(tl.int64) * out_row_stride
        if ROUND.WEIGHT_GRADS:
            grads_row = weight_grads_ptr + token.to(tl.int64) * ROUND.TOP_K + ks
            tl.store(grads_row, tl.full((K_BLOCK,), float("nan"), tl.float32), mask=ks < ROUND.TOP_K)
        if running:
            slot = rank.to(tl.int64) * ROUND.MAX_TOKENS + token
            owners = owners_of(base, slot, ROUND, K_BLOCK)
            there = owners >= 0
            ends = tl.load(signal_words(base, lines, ROUND.END, owners, ROUND), mask=there, other=0)
            told = ends == ROUND.WITH_SUMS
            places = places_of(base, slot, owners, ROUND, K_BLOCK)
            came = tl.reduce_or(tl.where(told, tl.full((K_BLOCK,), 1, tl.uint32) << places, 0), 0)
            slots = token.to(tl.int64) * ROUND.SLOTS
            for tile in range(LAYOUT.NUM_TILES):
                total = tl.zeros(tile_columns(tile, LAYOUT).shape, tl.float32)
                for first in range(0, ROUND.SLOTS, FLIGHT):
                    loaded = ()
                    for j in tl.static_range(FLIGHT):
                        record = tl.multiple_of(buffer_ptr + (ROUND.SUMS + (slots + first + j) * ROUND.SUM_BYTES), 16)
                        is_there = ((came >> (first + j)) & 1) > 0
                        tiles = load_encoded_tile(record, tile, LAYOUT, is_there)
                        loaded += (tiles,)  # type: ignore[assignment]
                    for j in tl.static_range(FLIGHT):
                        if ((came >> (first + j)) & 1) > 0:
                            payload, scale_bits = loaded[j]  # type: ignore[var-annotated]
                            total = total + scaled_tile(payload, scale_bits, LAYOUT)
                total = rotated_back(total, LAYOUT)
                store_rounded_tile(out_row, total, LAYOUT.HIDDEN, tile, LAYOUT.KIND != NONE, LAYOUT)
            if ROUND.WEIGHT_GRADS:
                grads_there = base + (ROUND.WEIGHT_GRADS + token.to(tl.int64) * (ROUND.TOP_K * 4))
                grads = tl.load(grads_there.to(tl.pointer_type(tl.float32)) + ks, mask=there, other=0.0)
                tl.store(grads_row, tl.where(told, grads, 0.0), mask=ks < ROUND.TOP_K)
        else:
            fill_row(out_row, LAYOUT.HIDDEN, float("nan"), LAYOUT)
        token += tl.num_programs(0)


# ---------------------------------------------------------------------------------------------------------------------
# Launchers


def _register_limit(lane: Lane, dtype: torch.dtype) -> dict[str, int]:
    """64 registers a thread, so that programs of 32 warps share a multiprocessor, where that is enough.

    It is not with int4, which gives a thread twice the columns, for rows of 4 bytes an element, and for rows that do
    not begin on 16 bytes each; nor need it be for records. With blocks a sender needs 168, and for such rows 224.
    """
    wire, narrow = lane.combine_wire, dtype.itemsize == 2 and lane.layout.HIDDEN % 8 == 0
    if wire.blocks:
        return register_limit(lane.buffer.device, least=168 if narrow else 224)
    return register_limit(lane.buffer.device, least=64 if narrow and wire.name != "int4" else 128)


def send_sums(
    lane: Lane,
    expert_out: torch.Tensor,
    dtype: torch.dtype,
    num_programs: int | None = None,
    weight_grads: torch.Tensor | None = None,
    as_they_are: bool = False,
) -> None:
    """Sums each token's weighted expert rows into its home's memory, and signals all ranks.

    Args:
        lane: a lane that was routed.
        expert_out: [rows, hidden] float32, float16 or bfloat16 with contiguous rows, in the order of the lane's index;
            rows past the last one given add nothing. Or records in the lane's combine_wire, which is quantised then:
            uint8 [rows, row_bytes], with a row stride that is a multiple of 16.
        dtype: the tokens' own, which the wire format `none` rounds the sums to.
        num_programs: programs of the launch; None means enough to fill the GPU.
        weight_grads: on a lane that carries them, float32 [world * max_tokens, top_k], in the order of the ids: those
            of this rank's experts are stored at their tokens' homes, exactly.
        as_they_are: each sum is the record at its first position, which is neither weighted nor quantised again.
    """
    launch, programs = kept(lane, _sum_sending, dtype, expert_out.dtype, as_they_are, num_programs)
    tensors = expert_out, check_weight_grads(lane, weight_grads)
    launch(programs, 1, tensors, (expert_out.stride(0),), (expert_out.shape[0],))


def _sum_sending(
    lane: Lane, dtype: torch.dtype, row_dtype: torch.dtype, as_they_are: bool, num_programs: int | None
) -> tuple[Launcher, int]:
    wire, device = lane.combine_wire, lane.buffer.device
    # Half a row each, where no scale needs all of it: four programs share a multiprocessor, and few rows suffice them.
    whole = wire.row_scale or as_they_are
    layout = RecordLayout.of(wire, lane.layout.HIDDEN, dtype, MAX_TILE if whole else MAX_TILE // 2)
    launch = launcher_of(
        lane, send_sums_kernel, {"LAYOUT": layout, "ENCODED": row_dtype == torch.uint8, "AS_THEY_ARE": as_they_are},
        ("expert_out_ptr", "weight_grads_ptr"), ("expert_out_row_stride",), ("num_rows",),
        num_warps=layout.num_warps if as_they_are else sum_warps(wire, layout), enable_fp_fusion=False,
        **_register_limit(lane, row_dtype),
    )  # fmt: skip
    sums = lane.positions.shape[0] * (lane.layout.TOP_K if lane.layout.INVARIANT else 1)
    return launch, num_programs_for(sums * (1 if whole else layout.NUM_TILES), device, num_programs)


def sum_home(lane: Lane, out: torch.Tensor, weight_grads: torch.Tensor | None = None) -> None:
    """Adds up the sums that came home.

    Args:
        lane: a lane whose combine phase has been waited for. A poisoned one gives NaN.
        out: [tokens, hidden] in the tokens' dtype with contiguous rows, written whole; zero where a token has no sum.
        weight_grads: on a lane that carries them, float32 [tokens, top_k], contiguous, filled with those of the tokens'
            weights, in the order of their ids; zero where no sum came from the expert's rank.
    """
    weight_grads = check_home_grads(lane, out, weight_grads)
    if out.shape[0] == 0:
        return
    launch, most = kept(lane, _home_summing, out.dtype)
    tokens = out.shape[0]
    launch(min(tokens, most), 1, (out, weight_grads), (out.stride(0),), (tokens,))


def _home_summing(lane: Lane, dtype: torch.dtype) -> tuple[Launcher, int]:
    layout = RecordLayout.of(lane.combine_wire, lane.layout.HIDDEN, dtype)
    least = 128 if lane.layout.HIDDEN * dtype.itemsize % 16 == 0 else 192
    limit = register_limit(lane.buffer.device, least=least) if layout.BLOCKS else _register_limit(lane, dtype)
    launch = launcher_of(
        lane, sum_home_kernel, {"LAYOUT": layout, "FLIGHT": 2 if layout.BLOCKS else 4},
        ("out_ptr", "weight_grads_ptr"), ("out_row_stride",), ("num_tokens",),
        num_warps=sum_warps(lane.combine_wire, layout), enable_fp_fusion=False, **limit,
    )  # fmt: skip
    return launch, most_programs(lane.buffer.device)
