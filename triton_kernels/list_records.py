"""Records in a fixed shape, on the device: what is known of each, by source rank, then token, and behind them nothing.

Each program counts by itself what came before its slots: without atomics, so that order never depends on timing. A
record gets one row on a lane of its own, which `gather` and `send_sums` read.

*Nothing stale is read.* Slots are those of tokens below ROUTED_TOKENS, the most that the last routing found of any
source; it left no position behind them, and the lane of records may have rows of earlier rounds there. Kernels read the
tokens that signal lines tell of, which are not more, unless a peer breaks the protocol: any row is compared with rows'
number. Nor is anything beside tensors touched, whatever users write into those that they see: positions are compared,
rows are counted and compared with the capacity, and the search for a row's expert ends among the experts.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from thinwire.triton_kernels.compat import tl, triton
from thinwire.triton_kernels.launch import Launcher, kept, launcher_of
from thinwire.triton_kernels.round_layout import Lane
from thinwire.triton_kernels.signal import num_programs_for, register_limit

# Each program looks at all slots: with more programs that would take longer than what they share.
_MOST_PROGRAMS, _SLOTS_AT_ONCE = 64, 2048


@triton.jit(do_not_specialize=["capacity", "num_local"])
def list_records_kernel(
    ids_ptr, record_weights_ptr, source_ptr, capacity, control_ptr, positions_ptr, weights_ptr, expert_offsets_ptr,
    num_local, record_positions_ptr, record_offsets_ptr, ROUND: tl.constexpr, CHUNK: tl.constexpr,
    K_BLOCK: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Any number of programs, which share the slots, and behind them as many rows of nothing as there may be."""
    most = tl.load(control_ptr + ROUND.ROUTED_TOKENS)
    slots, most = most * ROUND.WORLD, tl.maximum(most, 1)
    numbers = slots + tl.cast(capacity, tl.int64)  # those of slots, then those of rows of nothing
    chunks = tl.cdiv(numbers, CHUNK).to(tl.int32)  # as AMD's GPUs divide 64 bits by floats
    share = tl.cdiv(chunks, tl.num_programs(0)).to(tl.int64) * CHUNK
    before, total = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
    begin, start = tl.program_id(0) * share, slots * 0
    while start < slots:
        number = start + tl.arange(0, BLOCK)
        first = positions_ptr + (number // most * ROUND.MAX_TOKENS + number % most).to(tl.int64) * ROUND.TOP_K
        came = tl.where(tl.load(first, mask=number < slots, other=-1) >= 0, 1, 0)
        total += came
        before += tl.where(number < begin, came, 0)
        start += BLOCK
    row, last = tl.sum(before).to(tl.int64), tl.sum(total).to(tl.int64)
    tl.store(record_offsets_ptr + num_local, last, mask=tl.program_id(0) == 0)
    ks = tl.arange(0, K_BLOCK)[None, :]
    end = tl.minimum(begin + share, numbers)
    while begin < end:
        number = begin + tl.arange(0, CHUNK)
        is_slot = number < slots
        token = tl.minimum(number, slots).to(tl.int32)
        source, token = token // most, token % most
        first = (source * ROUND.MAX_TOKENS + token).to(tl.int64) * ROUND.TOP_K
        there = tl.where(ks < ROUND.TOP_K, is_slot[:, None], False)
        positions = tl.load(positions_ptr + first[:, None] + ks, mask=there, other=-1)
        weights = tl.load(weights_ptr + first[:, None] + ks, mask=there, other=0.0)
        came = tl.where(tl.load(positions_ptr + first, mask=is_slot, other=-1) >= 0, 1, 0)
        rows = tl.where(came > 0, row + tl.cumsum(came, axis=0) - 1, -1)
        tl.store(record_positions_ptr + first, rows, mask=is_slot)
        experts = tl.zeros((CHUNK, K_BLOCK), tl.int64)  # of rows: the last that begins at or before each
        for step in tl.static_range(STEPS):
            later = experts + (1 << (STEPS - 1 - step))
            begins = tl.load(expert_offsets_ptr + later, mask=later < num_local, other=0)
            experts = tl.where((begins <= positions) & (later < num_local), later, experts)
        rows = tl.where(is_slot, rows, last + number - slots)
        is_row = (rows >= 0) & (rows < capacity)
        there = tl.where(ks < ROUND.TOP_K, is_row[:, None], False)
        entries = rows[:, None] * ROUND.TOP_K + ks
        tl.store(ids_ptr + entries, tl.where(positions >= 0, experts, -1), mask=there)
        tl.store(record_weights_ptr + entries, tl.where(positions >= 0, weights, 0.0), mask=there)
        tl.store(source_ptr + rows * 2, tl.where(is_slot, source, -1), mask=is_row)
        tl.store(source_ptr + rows * 2 + 1, tl.where(is_slot, token, -1), mask=is_row)
        row += tl.sum(came)
        begin += CHUNK


@torch.inference_mode(False)
def lane_of_records(lane: Lane) -> Lane:
    """The lane as kernels see it where each record is one row, of weight 1: one for all rounds, to be `kept`."""
    return replace(
        lane,
        expert_counts=torch.full_like(lane.expert_counts, 2**62),  # so that no row behind them is padding
        expert_offsets=torch.zeros_like(lane.expert_offsets),
        positions=torch.full_like(lane.positions, -1),
        weights=torch.ones_like(lane.weights),
    )


def list_records(lane: Lane, ids: torch.Tensor, weights: torch.Tensor, source: torch.Tensor) -> None:
    """What is known of each record of a lane that was routed, and its row on the `lane_of_records`.

    `ids`, int64 [capacity, top_k], are experts counted from this rank's first, ascending, `weights`, float32, theirs;
    -1 and 0 follow. `source`, int64 [capacity, 2], is rank and number of the token there; -1 behind the last record.
    """
    launch, programs = kept(lane, _listing)
    launch(programs, 1, (ids, weights, source), (), (len(ids),))


def _listing(lane: Lane) -> tuple[Launcher, int]:
    own, device, slots = kept(lane, lane_of_records), lane.buffer.device, lane.positions.shape[0]
    launch = launcher_of(
        lane, list_records_kernel,
        {"record_positions_ptr": own.positions, "record_offsets_ptr": own.expert_offsets,
         "BLOCK": min(_SLOTS_AT_ONCE, 1 << (slots - 1).bit_length()),
         "STEPS": (lane.expert_counts.shape[0] - 1).bit_length()},
        ("ids_ptr", "record_weights_ptr", "source_ptr"), (), ("capacity",), num_warps=8, **register_limit(device, 8),
    )  # fmt: skip
    return launch, num_programs_for(min(slots, _MOST_PROGRAMS), device, None)
