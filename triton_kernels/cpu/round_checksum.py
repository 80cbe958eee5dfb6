"""The sums of a round on the CPU: put beside what travels, and compared where it is read, row by row.

What is compared is in this core's cache when it is used. The first row that does not fit ends the lane.
"""

from __future__ import annotations

import numpy as np

from thinwire.triton_kernels.cpu.checksum import fits, put, row_sums, word_sums
from thinwire.triton_kernels.cpu.compat import device
from thinwire.triton_kernels.cpu.ir.checksum import mix
from thinwire.triton_kernels.cpu.ir.intrinsics import load_int32, load_int64, store_int32
from thinwire.triton_kernels.cpu.lane import owner_of
from thinwire.triton_kernels.cpu.signal import epoch_of, nothing, own_line, poison, tell_stuck
from thinwire.triton_kernels.round_layout import (
    CHECKED_COMBINE_LINE,
    CHECKED_LINE,
    CHECKED_PLANES,
    CHECKED_RECORD,
    CHECKED_SUM,
    COMBINE,
    DISPATCH,
    REPORT_CHECKED,
    REPORT_ROW,
    REPORT_SOURCE,
)
from thinwire.triton_kernels.signal import CORRUPTED

_LINE_BYTES = 8  # behind a line's flag


@device
def round_seed(kind, epoch, source):
    """The seed of rows of one kind, which a rank sends in one round; all int64."""
    return mix(mix(mix(kind) ^ epoch) ^ source)


@device
def next_epoch(lane):
    """The number of the round that comes next, across the wrap too."""
    return ((epoch_of(lane) + 1 + (1 << 31)) & ((1 << 32) - 1)) - (1 << 31)


@device
def record_sums(record, lane, epoch, source, slot):
    """Of a dispatched record, by its slot at the receiver."""
    return row_sums(record, lane.record_row_bytes, round_seed(CHECKED_RECORD, epoch, source), slot)


@device
def combined_sums(record, lane, epoch, source, place, tail):
    """Of a combined record, by its place at home, and of its `tail`: two sums without seeds."""
    a, b = row_sums(record, lane.sum_row_bytes, round_seed(CHECKED_SUM, epoch, source), place)
    more_a, more_b = tail
    return a + more_a, b + more_b


@device
def copy_weight_grads(ids, grads, target, lane, rank):
    """Copies a token's gradients of those experts' weights that a rank owns, float32 [top_k].

    Returns their two sums as if they stood behind the rank's combined record, without seeds; with checksums or not.
    """
    a, b = np.int64(0), np.int64(0)
    for k in range(lane.top_k):
        if owner_of(load_int32(ids + 4 * k), lane) == rank:
            bits = load_int32(grads + 4 * k)
            store_int32(target + 4 * k, bits)
            place = lane.sum_row_bytes + 4 * k
            word = (np.int64(bits) & 0xFFFFFFFF) << (8 * (place & 7))
            a += word
            b += word * ((place >> 3) + 1)
    return a, b


@device
def plane_sums(ids, weights, lane, epoch, source, slot):
    """Of a token's ids and weights, as if the weights' words stood behind those of the ids."""
    s = mix(round_seed(CHECKED_PLANES, epoch, source) ^ slot) | 1
    a, b = word_sums(ids, 4 * lane.top_k)
    more_a, more_b = word_sums(weights, 4 * lane.top_k)
    return a + more_a + s, b + more_b + (lane.top_k + 1) // 2 * more_a + mix(s)


@device
def put_line_sums(base, line, lane, phase, epoch, source):
    """Of what a line publishes, written at the rank whose buffer begins at `base`."""
    kind = CHECKED_LINE if phase == DISPATCH else CHECKED_COMBINE_LINE
    number = phase * lane.world + source
    pair = row_sums(line + 4, _LINE_BYTES, round_seed(kind, epoch, source), number)
    put(base + lane.line_checksums + 16 * number, pair)


@device
def lines_fit(lane, phase, first, stop):
    """Whether the lines of ranks first ... stop - 1, of a phase, fit their sums; if not, the lane has ended."""
    own, epoch = load_int64(lane.buffer_ptrs + 8 * lane.rank), epoch_of(lane)
    kind, lines = (CHECKED_LINE, lane.signals) if phase == DISPATCH else (CHECKED_COMBINE_LINE, lane.combine_signals)
    for source in range(first, stop):
        line, number = own_line(lane, lines, source), phase * lane.world + source
        pair = row_sums(line + 4, _LINE_BYTES, round_seed(kind, epoch, source), number)
        if not fits(own + lane.line_checksums + 16 * number, pair):
            end_lane(lane, kind, source, 0)
            return False
    return True


@device
def planes_fit(lane, source, token):
    """The same for the ids and weights of a token of a rank."""
    own, slot = load_int64(lane.buffer_ptrs + 8 * lane.rank), source * lane.max_tokens + token
    first = 4 * slot * lane.top_k
    pair = plane_sums(own + lane.ids + first, own + lane.weights + first, lane, epoch_of(lane), source, slot)
    if fits(own + lane.plane_checksums + 16 * slot, pair):
        return True
    end_lane(lane, CHECKED_PLANES, source, token)
    return False


@device
def record_fits(lane, slot):
    """The same for a dispatched record."""
    own, source = load_int64(lane.buffer_ptrs + 8 * lane.rank), slot // lane.max_tokens
    pair = record_sums(own + lane.records + slot * lane.record_bytes, lane, epoch_of(lane), source, slot)
    if fits(own + lane.checksums + 16 * slot, pair):
        return True
    end_lane(lane, CHECKED_RECORD, source, slot % lane.max_tokens)
    return False


@device
def combined_fits(lane, source, place, tail):
    """The same for a combined record that a rank sent home, and what came with it, whose two sums are `tail`."""
    own = load_int64(lane.buffer_ptrs + 8 * lane.rank)
    pair = combined_sums(own + lane.sums + place * lane.sum_bytes, lane, epoch_of(lane), source, place, tail)
    if fits(own + lane.sum_checksums + 16 * place, pair):
        return True
    end_lane(lane, CHECKED_SUM, source, place // lane.slots)
    return False


@device
def end_lane(lane, kind, source, row):
    """Poisons the lane, and tells the peers that this rank gave up, so that they do not wait for it."""
    epoch = epoch_of(lane)
    phase = COMBINE if kind in (CHECKED_COMBINE_LINE, CHECKED_SUM) else DISPATCH
    tell_stuck(lane, epoch, phase, nothing, 0)
    store_int32(lane.report + 4 * REPORT_CHECKED, kind)
    store_int32(lane.report + 4 * REPORT_SOURCE, source)
    store_int32(lane.report + 4 * REPORT_ROW, row)
    poison(lane, CORRUPTED, epoch, phase)
