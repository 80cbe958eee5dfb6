"""Whole rounds on ranks that share this process, against what plain torch says of the same tokens.

All memory that a round may not read is poisoned before it, and after each phase every byte of every symmetric buffer is
compared with what should be there: a stale slot that is read, or a byte that is written beside its place, shows.
"""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest

numba = pytest.importorskip("numba", reason="the CPU kernels need numba")

import torch

from tests.helpers import rounds
from tests.helpers.wires import DTYPES, assert_same_bits
from thinwire.errors import RoutingError, WireFormatError
from thinwire.moe.plan import ArrivalPlan, SendPlan, merge_repeated_experts
from thinwire.triton_kernels.codec_reference import dequantize_reference, quantize_reference
from thinwire.triton_kernels.cpu import team
from thinwire.triton_kernels.cpu.combine import send_sums, sum_home
from thinwire.triton_kernels.cpu.dispatch import close_round, send_tokens, wait
from thinwire.triton_kernels.cpu.ir.intrinsics import copy_bytes
from thinwire.triton_kernels.cpu.permute import gather, route
from thinwire.triton_kernels.cpu.signal import signalled
from thinwire.triton_kernels.round_layout import (
    COMBINE,
    DISPATCH,
    DTYPE_CODES,
    REPORT_BAD_IDS,
    SIGNAL_DTYPE,
    SIGNAL_END,
    SIGNAL_TOKENS,
    Lane,
    RoundLayout,
)
from thinwire.triton_kernels.signal import (
    CONTROL_EPOCH,
    CONTROL_STATUS,
    MISMATCHED,
    REPORT_EPOCH,
    REPORT_PEERS,
    REPORT_PHASE,
    REPORT_STATUS,
    RUNNING,
    SIGNAL_LINE_BYTES,
    TIMED_OUT,
)
from thinwire.triton_kernels.sums import pack_weighted_sums_reference, sum_records_reference
from thinwire.wire import WireFormat

#: Those of numba, under the names that a round has for them.
KERNELS = SimpleNamespace(
    send_tokens=send_tokens, wait=wait, close_round=close_round, route=route, gather=gather, send_sums=send_sums,
    sum_home=sum_home,
)  # fmt: skip
POISON = 0xFF  # NaN as a scale and as a float
WIRES = ("none", "int8", "int8:row", "int8:64", "int4", "fp8", "int8+h64", "int6+h64")
TIMEOUT, GRACE = 20.0, 1.0

every_wire = pytest.mark.parametrize("spec", WIRES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


# ---------------------------------------------------------------------------------------------------------------------
# Ranks in one process, and what they send


def make_lanes(
    world: int,
    num_experts: int,
    top_k: int,
    hidden: int,
    max_tokens: int,
    align: int = 1,
    wire: str = "int8",
    combine_wire: str | None = None,
    dtype: torch.dtype | None = None,
) -> list[Lane]:
    """A lane of every rank, poisoned but for its lines."""
    wires = WireFormat.parse(wire), WireFormat.parse(combine_wire or wire)
    layout = RoundLayout.of(
        world=world,
        num_experts=num_experts,
        top_k=top_k,
        hidden=hidden,
        max_tokens=max_tokens,
        wire=wires[0],
        combine_wire=wires[1],
        dtype=dtype,
    )
    buffers = [torch.zeros(layout.NUM_BYTES, dtype=torch.uint8) for _ in range(world)]
    buffer_ptrs = torch.tensor([buffer.data_ptr() for buffer in buffers])
    return [Lane.of(layout, *wires, rank, align, buffer, buffer_ptrs) for rank, buffer in enumerate(buffers)]


def plane(lane: Lane, offset: int, dtype: torch.dtype) -> torch.Tensor:
    """The ids or the weights at a rank, [world, max_tokens, top_k]."""
    layout = lane.layout
    shape = layout.WORLD, layout.MAX_TOKENS, layout.TOP_K
    size = 4 * layout.WORLD * layout.MAX_TOKENS * layout.TOP_K
    return lane.buffer[offset : offset + size].view(dtype).view(shape)


def line(lane: Lane, source: int, phase: int = DISPATCH) -> torch.Tensor:
    """The words of the line that a rank wrote, int32 [16]."""
    first = lane.layout.SIGNALS + (phase * lane.layout.WORLD + source) * SIGNAL_LINE_BYTES
    return lane.buffer[first : first + SIGNAL_LINE_BYTES].view(torch.int32)


def poison(lane: Lane) -> None:
    """Overwrites all of a buffer but its lines. An expert id that must not be read is one that would matter."""
    layout = lane.layout
    lane.buffer[layout.IDS :] = POISON
    plane(lane, layout.IDS, torch.int32).random_(0, layout.NUM_EXPERTS)


@dataclasses.dataclass
class Sent:
    """What one rank dispatches."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


def random_tokens(
    layout: RoundLayout, dtype: torch.dtype, generator: torch.Generator, tokens: int | None = None
) -> Sent:
    """Any number of tokens, one in four without experts; ids repeat, some are -1."""
    if tokens is None:
        tokens = int(torch.randint(0, layout.MAX_TOKENS + 1, (1,), generator=generator))
    ids = torch.randint(-1, layout.NUM_EXPERTS, (tokens, layout.TOP_K), generator=generator)
    ids[torch.rand(tokens, generator=generator) < 0.25] = -1
    x = torch.randn(tokens, layout.HIDDEN, generator=generator).to(dtype)
    id_type = (torch.int32, torch.int64)[tokens % 2]
    return Sent(x, ids.to(id_type), torch.randn(tokens, layout.TOP_K, generator=generator))


# ---------------------------------------------------------------------------------------------------------------------
# What plain torch makes of it


@dataclasses.dataclass
class Travels:
    """How one rank's tokens travel: merged ids and weights, the ranks that each goes to, its record, what that says."""

    ids: torch.Tensor
    weights: torch.Tensor
    ranks: list[list[int]]
    records: torch.Tensor
    tokens: torch.Tensor
    dtype: torch.dtype


def expected_travels(lane: Lane, sent: Sent) -> Travels:
    layout = lane.layout
    known = torch.where((sent.ids >= 0) & (sent.ids < layout.NUM_EXPERTS), sent.ids.long(), -1)
    ids, weights = merge_repeated_experts(known, sent.weights)
    plan = SendPlan.of(ids, layout.NUM_EXPERTS, layout.WORLD)
    by_record = torch.arange(layout.WORLD).repeat_interleave(torch.tensor(plan.counts))
    ranks = [by_record[numbers[numbers >= 0]].tolist() for numbers in plan.record_index]
    records = quantize_reference(sent.x, lane.wire)
    tokens = dequantize_reference(records, lane.wire, layout.HIDDEN, sent.x.dtype)
    return Travels(ids, weights, ranks, records, tokens, sent.x.dtype)


@dataclasses.dataclass
class Arrived:
    """What one rank should find after dispatch."""

    index: torch.Tensor
    counts: torch.Tensor
    offsets: torch.Tensor
    positions: torch.Tensor
    weights: torch.Tensor
    rows: torch.Tensor


def expected_arrival(lane: Lane, travels: list[Travels]) -> Arrived:
    layout = lane.layout
    first, end = layout.first_expert(lane.rank), layout.first_expert(lane.rank + 1)
    slots = torch.cat([torch.arange(len(one.ids)) + source * layout.MAX_TOKENS for source, one in enumerate(travels)])
    ids, weights = torch.cat([one.ids for one in travels]), torch.cat([one.weights for one in travels])
    plan = ArrivalPlan.of(ids, weights, range(first, end), lane.align)
    index = torch.full((layout.num_rows(lane.rank, lane.align),), -1)
    index[plan.rows] = slots[plan.index]
    shape = layout.WORLD * layout.MAX_TOKENS, layout.TOP_K
    positions, factors = torch.full(shape, -1), torch.zeros(shape)
    positions[slots], factors[slots] = plan.positions, plan.weights
    rows = torch.zeros(plan.num_rows, layout.HIDDEN, dtype=travels[0].dtype)
    rows[plan.rows] = torch.cat([one.tokens for one in travels])[plan.index]
    return Arrived(index, plan.expert_counts, plan.expert_offsets, positions, factors, rows)


def expect_dispatch(image: torch.Tensor, lane: Lane, travels: list[Travels]) -> None:
    """Writes into a rank's memory image what dispatch should write."""
    layout = lane.layout
    there = dataclasses.replace(lane, buffer=image)
    ids, weights = plane(there, layout.IDS, torch.int32), plane(there, layout.WEIGHTS, torch.float32)
    for source, one in enumerate(travels):
        ids[source, : len(one.ids)], weights[source, : len(one.ids)] = one.ids, one.weights
        here = [token for token, ranks in enumerate(one.ranks) if lane.rank in ranks]
        slots = torch.tensor(here, dtype=torch.int64) + source * layout.MAX_TOKENS
        there.records[slots, : one.records.shape[1]] = one.records[here]
        words = line(there, source)
        words[0], words[SIGNAL_TOKENS] = lane.control[CONTROL_EPOCH], len(one.ids)
        words[SIGNAL_DTYPE] = DTYPE_CODES[one.dtype]


def experts(arrived: Arrived, rank: int, dtype: torch.dtype, capacity: int | None) -> torch.Tensor:
    """Stand-ins for experts: a factor for each row. Rows of padding come out as NaN, which nobody may read."""
    out = (arrived.rows.float() * (1 + torch.arange(len(arrived.rows))[:, None] % 5 / 4 + rank)).to(dtype)
    out[arrived.index[: len(out)] < 0] = torch.nan
    return out[:capacity]


def expected_sums(lane: Lane, arrived: Arrived, expert_out: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The record of every slot; meaningless where it has no positions."""
    positions = torch.where(arrived.positions < len(expert_out), arrived.positions, -1)
    return pack_weighted_sums_reference(expert_out, positions, arrived.weights, lane.combine_wire, dtype)


def expected_home(
    lane: Lane, travels: Travels, sums: list[torch.Tensor], closing: tuple[int, ...], image: torch.Tensor
) -> torch.Tensor:
    """What a rank's tokens come to; the records that come home go into its memory image."""
    layout, dtype = lane.layout, travels.dtype
    size = lane.combine_wire.row_bytes(layout.HIDDEN, dtype)
    slots = image[layout.SUMS : layout.SUMS + layout.MAX_TOKENS * layout.SLOTS * layout.SUM_BYTES]
    slots = slots.view(layout.MAX_TOKENS, layout.SLOTS, layout.SUM_BYTES)
    index = torch.full((len(travels.ranks), layout.SLOTS), -1)
    for token, ranks in enumerate(travels.ranks):
        for ordinal, rank in enumerate(ranks):
            if rank not in closing:
                slots[token, ordinal, :size] = sums[rank][lane.rank * layout.MAX_TOKENS + token]
                index[token, ordinal] = token * layout.SLOTS + ordinal
    records = slots.reshape(-1, layout.SUM_BYTES)[:, :size]
    return sum_records_reference(records, index, lane.combine_wire, layout.HIDDEN, dtype)


# ---------------------------------------------------------------------------------------------------------------------
# A round in lock-step, every step compared


def dispatch_all(lanes: list[Lane], sent: list[Sent], threads: int = 1) -> tuple[list[Travels], list[Arrived]]:
    travels = [expected_travels(lane, one) for lane, one in zip(lanes, sent, strict=True)]
    images = []
    for lane in lanes:
        poison(lane)
        images.append(lane.buffer.clone())
    for lane, one in zip(lanes, sent, strict=True):
        send_tokens(lane, one.x, one.ids, one.weights, threads=threads)
    arrivals = []
    for lane, image in zip(lanes, images, strict=True):
        wait(lane, DISPATCH, TIMEOUT, GRACE)
        assert lane.control[CONTROL_STATUS] == lane.report[REPORT_STATUS] == RUNNING
        expect_dispatch(image, lane, travels)
        assert torch.equal(lane.buffer, image)
        arrivals.append(expected_arrival(lane, travels))
        route(lane)
        assert_routed(lane, arrivals[-1])
    return travels, arrivals


def assert_routed(lane: Lane, arrived: Arrived) -> None:
    assert torch.equal(lane.expert_counts, arrived.counts)
    assert torch.equal(lane.expert_offsets, arrived.offsets)
    assert torch.equal(lane.index, arrived.index)
    assert torch.equal(lane.positions, arrived.positions)
    assert_same_bits("weights", arrived.weights, lane.weights)


def gathered(
    lane: Lane, capacity: int, dtype: torch.dtype, threads: int = 1, zero_tail: bool = False
) -> tuple[torch.Tensor, bool]:
    """What `gather` makes of rows of 7, after checking that it wrote nothing else."""
    memory = torch.full((capacity + 1, lane.layout.HIDDEN + 3), 7.0, dtype=dtype)
    overflow = torch.tensor([False, True, False])[capacity % 2 :][:1].view([]).clone()
    gather(lane, memory[:-1, :-3], overflow, zero_tail, threads=threads)
    assert (memory[-1] == 7.0).all() and (memory[:, -3:] == 7.0).all(), "written past a row"
    return memory[:-1, :-3], bool(overflow)


def play(
    lanes: list[Lane],
    sent: list[Sent],
    threads: int = 1,
    *,
    expert_dtype: torch.dtype | None = None,
    capacity: int | None = None,
    closing: tuple[int, ...] = (),
) -> list[torch.Tensor]:
    """One round of all ranks; returns what their tokens come to."""
    dtype = sent[0].x.dtype
    travels, arrivals = dispatch_all(lanes, sent, threads)
    for lane, arrived in zip(lanes, arrivals, strict=True):
        rows = len(arrived.rows)
        for room, zero_tail in ((rows + 2, False), (rows + 5, True), (rows, False), (rows // 2, True)):
            out, overflow = gathered(lane, room, dtype, threads, zero_tail)
            padding = (0, 0, 0, room - rows)
            expected = torch.nn.functional.pad(arrived.rows, padding, value=0.0 if zero_tail else 7.0)
            assert_same_bits("gathered", expected, out)
            assert overflow == (rows > room)
    images = [lane.buffer.clone() for lane in lanes]
    sums = []
    for lane, arrived in zip(lanes, arrivals, strict=True):
        if lane.rank in closing:
            close_round(lane)
            sums.append(torch.empty(0))
        else:
            expert_out = experts(arrived, lane.rank, expert_dtype or dtype, capacity)
            send_sums(lane, expert_out, dtype, num_programs=3, threads=threads)
            sums.append(expected_sums(lane, arrived, expert_out, dtype))
    results = []
    for lane, one, image in zip(lanes, travels, images, strict=True):
        wait(lane, COMBINE, TIMEOUT, GRACE)
        assert lane.control[CONTROL_STATUS] == lane.report[REPORT_STATUS] == RUNNING
        expected = expected_home(lane, one, sums, closing, image)
        for rank in range(len(lanes)):
            words = line(dataclasses.replace(lane, buffer=image), rank, COMBINE)
            words[0], words[SIGNAL_END] = lane.control[CONTROL_EPOCH], rank not in closing
        assert torch.equal(lane.buffer, image)
        memory = torch.full((len(one.ids) + 1, lane.layout.HIDDEN + 3), 7.0, dtype=dtype)
        sum_home(lane, memory[:-1, :-3], threads=threads)
        assert (memory[-1] == 7.0).all() and (memory[:, -3:] == 7.0).all(), "written past a row"
        assert_same_bits("home", expected, memory[:-1, :-3])
        assert torch.equal(lane.buffer, image)
        results.append(memory[:-1, :-3])
    return results


# world, experts, top_k, hidden, max_tokens, align
SHAPES = {
    "alone": (1, 4, 2, 7, 3, 1),
    "two ranks": (2, 8, 2, 200, 6, 4),
    "experts do not divide": (3, 8, 4, 129, 5, 1),
    "fewer experts than ranks": (5, 3, 2, 1, 4, 4),
    "many experts a token": (4, 70, 32, 16, 3, 1),
    "long odd rows": (2, 5, 3, 4097, 3, 4),
    "eight ranks": (8, 21, 8, 40, 5, 4),
}
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


@every_shape
@every_dtype
@every_wire
def test_rounds_equal_plain_torch_to_the_last_bit(
    spec: str, dtype: torch.dtype, shape: tuple[int, int, int, int, int, int]
) -> None:
    generator = torch.Generator().manual_seed(sum(shape))
    lanes = make_lanes(*shape, wire=spec)
    for _ in range(2):
        play(lanes, [random_tokens(lanes[0].layout, dtype, generator) for _ in lanes])


@pytest.mark.exhaustive
def test_the_largest_world() -> None:
    generator = torch.Generator().manual_seed(0)
    lanes = make_lanes(72, 75, 6, 5, 2)
    play(lanes, [random_tokens(lanes[0].layout, torch.bfloat16, generator) for _ in lanes])


@pytest.mark.parametrize("wires", [("int4", "int8"), ("none", "fp8"), ("int8", "none")], ids=str)
def test_each_leg_has_its_own_wire_format(wires: tuple[str, str]) -> None:
    generator = torch.Generator().manual_seed(1)
    lanes = make_lanes(3, 7, 3, 70, 4, wire=wires[0], combine_wire=wires[1])
    play(lanes, [random_tokens(lanes[0].layout, torch.float16, generator) for _ in lanes])


@every_dtype
@every_wire
def test_a_lane_laid_out_for_one_dtype(spec: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    lanes = make_lanes(2, 3, 2, 33, 4, wire=spec, dtype=dtype)
    play(lanes, [random_tokens(lanes[0].layout, dtype, generator) for _ in lanes])


NEVER = 1 << 62  # of a time: kernels look next when the clock never goes


@pytest.mark.parametrize("seen", [0, NEVER, NEVER + 1], ids=["a look", "near", "far"])
@pytest.mark.parametrize("spec", ("none", "int8"))
@pytest.mark.parametrize("threads", (1, 3))
def test_rounds_are_the_same_to_near_peers_and_to_far_ones(
    threads: int, spec: str, seen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(team, "BYTES_PER_THREAD", 1)
    generator = torch.Generator().manual_seed(14)
    for hidden in (4200, 9001):  # an exact record of the second is not made elsewhere
        lanes = make_lanes(3, 40, 32, hidden, 40, wire=spec)  # ids of 5 KiB
        for lane in lanes:
            lane.seen[:] = seen
        for tokens in (40, 0, 7):
            play(lanes, [random_tokens(lane.layout, torch.float32, generator, tokens) for lane in lanes], threads)
        for lane in lanes:
            found = [seen != 0 and seen == one for one in lane.seen.tolist()]
            peers = [lane.seen[rank] != 0 for rank in range(3) if rank != lane.rank]
            assert all(found) if seen else all(peers) and lane.seen[lane.rank] == 0


@pytest.mark.parametrize("seen", [0, NEVER, NEVER + 1], ids=["a look", "near", "far"])
@pytest.mark.parametrize("spec", ("none", "int8"))
def test_rounds_of_backward_are_the_same_to_near_peers_and_to_far_ones(spec: str, seen: int) -> None:
    generator = torch.Generator().manual_seed(17)
    lanes = rounds.make_lanes(3, 7, 3, 4200, 6, spec, weight_grads=True)
    for lane in lanes:
        lane.seen[:] = seen
    for closing in ((), (1,)):
        tokens = [rounds.Tokens.random(n, 4200, 3, 7, torch.float32, generator) for n in (6, 0, 5)]
        rounds.run_round(KERNELS, lanes, tokens, torch.randn(7, 4200, generator=generator), closing)
    assert not seen or all((lane.seen == seen).all() for lane in lanes)


@pytest.mark.parametrize("spec", ("int8", "none"))
def test_threads_share_any_call(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team, "BYTES_PER_THREAD", 1)
    generator = torch.Generator().manual_seed(15)
    lanes = make_lanes(3, 7, 3, 40, 30, align=4, wire=spec)
    for capacity, closing, tokens in ((None, (), 30), (7, (), None), (0, (), 2), (None, (1,), 29), (None, (), 0)):
        sent = [random_tokens(lanes[0].layout, torch.bfloat16, generator, tokens) for _ in lanes]
        play(lanes, sent, 4, expert_dtype=torch.float32, capacity=capacity, closing=closing)


def test_threads_follow_no_index_that_routing_did_not_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team, "BYTES_PER_THREAD", 1)
    lanes = make_lanes(2, 4, 2, 40, 30)
    dispatch_all(lanes, [random_tokens(lanes[0].layout, torch.float32, torch.Generator(), 30) for _ in lanes])
    rows, overflow = int(lanes[0].expert_offsets[-1]), torch.tensor(False)
    for tensor, place, value in (
        (lanes[0].index, rows - 1, 60),
        (lanes[0].index, 0, 2**40),
        (lanes[0].expert_offsets, -1, 2**40),
        (lanes[0].expert_offsets, -1, -1),
    ):
        before = int(tensor[place])
        tensor[place] = value
        with pytest.raises(RoutingError, match="were written into since they were routed"):
            gather(lanes[0], torch.empty(rows, 40), overflow, threads=3)
        tensor[place] = before
    gather(lanes[0], torch.empty(rows, 40), overflow, threads=3)


@every_dtype
@pytest.mark.parametrize("spec", ("none", "int8"))
def test_experts_may_compute_in_another_dtype(spec: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    lanes = make_lanes(2, 5, 3, 40, 6, align=4, wire=spec)
    for expert_dtype in DTYPES:
        sent = [random_tokens(lanes[0].layout, dtype, generator) for _ in lanes]
        play(lanes, sent, expert_dtype=expert_dtype)


@every_wire
def test_rows_beyond_the_capacity_add_nothing(spec: str) -> None:
    generator = torch.Generator().manual_seed(3)
    lanes = make_lanes(3, 7, 3, 40, 6, align=4, wire=spec)
    for capacity in (5, 0):
        sent = [random_tokens(lanes[0].layout, torch.float32, generator, 6) for _ in lanes]
        play(lanes, sent, capacity=capacity)


@pytest.mark.parametrize("closing", [(1,), (0, 2), (0, 1, 2)], ids=str)
def test_who_closes_a_round_adds_nothing_to_it(closing: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(4)
    lanes = make_lanes(3, 7, 3, 40, 6)
    for closes in (closing, (), closing):
        sent = [random_tokens(lanes[0].layout, torch.float32, generator, 5) for _ in lanes]
        results = play(lanes, sent, closing=closes)
    if len(closing) == 3:
        assert all((result == 0).all() for result in results)


def test_rounds_of_any_size_follow_each_other_across_the_wrap_of_the_epoch() -> None:
    generator = torch.Generator().manual_seed(5)
    lanes = make_lanes(3, 8, 4, 20, 9, align=4)
    for lane in lanes:
        lane.control[CONTROL_EPOCH] = 2**31 - 3
        for source in range(3):
            line(lane, source, DISPATCH)[0] = line(lane, source, COMBINE)[0] = 2**31 - 3
    epochs = []
    for tokens in (9, 0, 3, None, 9, 1):
        play(lanes, [random_tokens(lanes[0].layout, torch.bfloat16, generator, tokens) for _ in lanes])
        epochs.append(int(lanes[0].control[CONTROL_EPOCH]))
    assert epochs == [2**31 - 2, 2**31 - 1, -(2**31), -(2**31) + 1, -(2**31) + 2, -(2**31) + 3]


def test_a_new_lane_starts_next_to_the_wrap() -> None:
    lanes = make_lanes(2, 4, 2, 8, 3)
    for lane in lanes:
        lane.control[CONTROL_EPOCH] = 2**31 - 3
    generator = torch.Generator().manual_seed(5)
    play(lanes, [random_tokens(lanes[0].layout, torch.float32, generator, 3) for _ in lanes])


def test_routing_does_not_rely_on_what_the_owner_left_in_its_tensors() -> None:
    generator = torch.Generator().manual_seed(6)
    lanes = make_lanes(3, 8, 4, 20, 9, align=4)
    for tokens in (9, 2, 5):
        for lane in lanes:
            for tensor in (lane.index, lane.positions, lane.expert_counts, lane.expert_offsets, lane.weights):
                tensor.fill_(77)
        play(lanes, [random_tokens(lanes[0].layout, torch.float32, generator, tokens) for _ in lanes])


def test_tokens_may_lie_apart_and_columns_too() -> None:
    generator = torch.Generator().manual_seed(7)
    lanes = make_lanes(2, 4, 2, 24, 6)
    wide, turned = torch.randn(6, 60, generator=generator)[:, 5:29], torch.randn(24, 6, generator=generator).t()
    ids, weights = torch.randint(0, 4, (2, 6), generator=generator).t(), torch.rand(2, 6, generator=generator).t()
    play(lanes, [Sent(x, ids, weights) for x in (wide, turned)])


def test_weights_of_any_float_dtype_are_added_in_float32_and_in_order() -> None:
    lanes = make_lanes(1, 4, 4, 8, 3)
    ids = torch.tensor([[2, 2, 2, -1], [1, 0, 1, 0], [3, -1, -1, 3]])
    weights = torch.tensor([[1e8, 1.0, -1e8, 5.0], [-0.0, 1.0, -0.0, 2.0], [0.1, 9.0, 9.0, 0.2]])
    for dtype in (torch.float64, *DTYPES):
        play(lanes, [Sent(torch.randn(3, 8), ids, weights.to(dtype))])
    sent = plane(lanes[0], lanes[0].layout.WEIGHTS, torch.float32)[0]
    assert sent[0].tolist() == [0.0, 0.0, 0.0, 0.0]  # bfloat16, last, holds 1e8 too: 1 is lost beside it
    assert sent.view(torch.int32)[1, 0] == 0  # a sum from +0.0


@pytest.mark.parametrize("id_type", (torch.int32, torch.int64))
def test_ids_of_no_expert_count_as_none_and_are_noted(id_type: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(8)
    lanes = make_lanes(2, 5, 3, 8, 4)
    ids = torch.tensor([[0, 5, 4], [-2, 1, -2], [7, 7, 7], [-1, -1, 3]], dtype=id_type)
    fine = random_tokens(lanes[0].layout, torch.float32, generator, 4)
    play(lanes, [fine, Sent(torch.randn(4, 8), ids, torch.rand(4, 3))])
    assert [int(lane.report[REPORT_BAD_IDS]) for lane in lanes] == [0, 1]
    if id_type == torch.int64:
        lanes = make_lanes(2, 5, 3, 8, 4)
        play(lanes, [fine, Sent(torch.randn(4, 8), ids + 2**32, torch.rand(4, 3))])  # not the low 32 bits
        assert [int(lane.report[REPORT_BAD_IDS]) for lane in lanes] == [0, 1]


def test_nan_and_infinity_spoil_only_what_they_touch() -> None:
    for spec in WIRES:
        lanes = make_lanes(2, 4, 2, 150, 4, wire=spec)
        sent = [Sent(torch.ones(4, 150), torch.tensor([[0, 3]] * 4), torch.rand(4, 2)) for _ in lanes]
        sent[0].x[1, 3], sent[1].x[2, 149] = torch.nan, torch.inf
        sent[1].weights[0, 1] = torch.nan
        results = play(lanes, sent)
        assert results[0][[0, 2, 3]].isfinite().all() and results[1][[1, 3]].isfinite().all()
        assert results[0][1, 3].isnan() and not results[1][2, 149].isfinite() and results[1][0].isnan().all()


@pytest.mark.parametrize("spec", ("int8", "fp8"))
def test_records_of_a_quantised_wire_can_be_read_in_any_dtype(spec: str) -> None:
    lanes = make_lanes(1, 2, 1, 70, 3, wire=spec, combine_wire="none", dtype=torch.bfloat16)
    x = torch.randn(3, 70).bfloat16()
    dispatch_all(lanes, [Sent(x, torch.tensor([[0], [1], [0]]), torch.ones(3, 1))])
    for dtype in DTYPES:
        rows, _ = gathered(lanes[0], 3, dtype)
        expected = dequantize_reference(quantize_reference(x, lanes[0].wire), lanes[0].wire, 70, dtype)
        assert_same_bits(str(dtype), expected[[0, 2, 1]], rows)


# ---------------------------------------------------------------------------------------------------------------------
# What is refused


def one_round_open(spec: str) -> Lane:
    (lane,) = make_lanes(1, 2, 1, 8, 4, wire=spec)
    dispatch_all([lane], [Sent(torch.randn(3, 8), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))])
    return lane


def refusals(lane: Lane) -> dict[str, Callable[[], None]]:
    x, ids, weights = torch.randn(3, 8), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    flag = torch.tensor(False)
    return {
        r"x has the shape \(3, 7\); accepted: \[rows, 8\]": lambda: send_tokens(lane, x[:, 1:], ids, weights),
        r"x has the shape \(8,\); accepted": lambda: send_tokens(lane, x[0], ids, weights),
        r"5 tokens .*accepted: at most 4": lambda: send_tokens(
            lane, torch.randn(5, 8), torch.zeros(5, 1, dtype=torch.int64), torch.ones(5, 1)
        ),
        r"topk_ids \(3, 2\).*accepted: .*\[tokens, 1\]": lambda: send_tokens(lane, x, ids.expand(3, 2), weights),
        r"topk_weights \(2, 1\)": lambda: send_tokens(lane, x, ids, weights[1:]),
        r"topk_ids is torch.int16; accepted: torch.int32, torch.int64": lambda: send_tokens(
            lane, x, ids.short(), weights
        ),
        r"out has the shape \(3, 9\)": lambda: gather(lane, torch.zeros(3, 9), flag),
        r"out has the strides \(1, 3\)": lambda: gather(lane, torch.zeros(8, 3).t(), flag),
        r"overflow is torch.int64 \(\); accepted: one torch.bool": lambda: gather(lane, x, torch.tensor(0)),
        r"expert_out has the shape \(3, 4\)": lambda: send_sums(lane, torch.zeros(3, 4), torch.float32),
        r"out has 2 rows; accepted: as many as this rank sent": lambda: sum_home(lane, torch.zeros(2, 8)),
        r"out has the shape \(24,\)": lambda: sum_home(lane, torch.zeros(24)),
    }


@pytest.mark.parametrize("message", refusals(make_lanes(1, 2, 1, 8, 4)[0]))
def test_what_does_not_fit_is_refused_before_anything_is_sent(message: str) -> None:
    lane = one_round_open("int8")
    image, epoch = lane.buffer.clone(), int(lane.control[CONTROL_EPOCH])
    with pytest.raises(RoutingError, match=message):
        refusals(lane)[message]()
    assert torch.equal(lane.buffer, image) and lane.control[CONTROL_EPOCH] == epoch


def test_gradients_of_router_weights_go_home_with_the_sums() -> None:
    generator = torch.Generator().manual_seed(2)
    lanes = rounds.make_lanes(3, 7, 3, 40, 6, "int8", weight_grads=True)
    for closing in ((), (1,)):
        tokens = [rounds.Tokens.random(n, 40, 3, 7, torch.bfloat16, generator) for n in (5, 0, 6)]
        rounds.run_round(KERNELS, lanes, tokens, torch.randn(7, 40, generator=generator), closing)


@pytest.mark.parametrize("carries", [True, False])
def test_gradients_of_router_weights_that_do_not_fit_are_refused(carries: bool) -> None:
    (lane,) = rounds.make_lanes(1, 2, 1, 8, 4, weight_grads=carries)
    dispatch_all([lane], [Sent(torch.randn(3, 8), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))])
    image, good = lane.buffer.clone(), torch.zeros(4, 1)
    accepted = "torch.float32" if carries else "None"
    for given in (None, good[1:], good.double()) if carries else (good,):
        with pytest.raises(RoutingError, match=f"weight_grads is .*; accepted: {accepted}"):
            send_sums(lane, torch.zeros(3, 8), torch.float32, None, given)
    assert torch.equal(lane.buffer, image)


def test_other_dtypes_than_the_tokens_are_refused_where_records_hold_it() -> None:
    lane = one_round_open("none")
    image = lane.buffer.clone()
    for call in (
        lambda: gather(lane, torch.zeros(3, 8).half(), torch.tensor(False)),
        lambda: send_sums(lane, torch.zeros(3, 8), torch.float16),
        lambda: sum_home(lane, torch.zeros(3, 8).half()),
    ):
        with pytest.raises(RoutingError, match="is torch.float16; with wire format 'none' it must be"):
            call()
    with pytest.raises(WireFormatError, match="float64"):
        send_tokens(lane, torch.zeros(3, 8).double(), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))
    with pytest.raises(WireFormatError, match="float64"):
        send_sums(lane, torch.zeros(3, 8).double(), torch.float32)
    assert torch.equal(lane.buffer, image)


@pytest.mark.parametrize("wires", [("none", "int8"), ("int8", "none")], ids=str)
def test_records_that_are_larger_than_their_slots_are_refused(wires: tuple[str, str]) -> None:
    (lane,) = make_lanes(1, 2, 1, 80, 4, wire=wires[0], combine_wire=wires[1], dtype=torch.bfloat16)
    image = lane.buffer.clone()
    with pytest.raises(WireFormatError, match="takes 320 bytes in wire format 'none'.*laid out for 160"):
        send_tokens(lane, torch.zeros(3, 80), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))
    assert torch.equal(lane.buffer, image)


# ---------------------------------------------------------------------------------------------------------------------
# Peers that disagree, or write what they like


def test_dtypes_that_differ_end_the_lane_everywhere() -> None:
    generator = torch.Generator().manual_seed(9)
    lanes = make_lanes(3, 6, 2, 8, 4)
    dtypes = torch.float32, torch.bfloat16, torch.float32
    for lane, dtype in zip(lanes, dtypes, strict=True):
        one = random_tokens(lane.layout, dtype, generator)
        send_tokens(lane, one.x, one.ids, one.weights)
    for lane in lanes:
        wait(lane, DISPATCH, TIMEOUT, GRACE)
        assert lane.control[CONTROL_STATUS] == lane.report[REPORT_STATUS] == MISMATCHED
        assert lane.report[REPORT_EPOCH] == 1 and lane.report[REPORT_PHASE] == DISPATCH
        blamed = [int(dtype != dtypes[lane.rank]) for dtype in dtypes]
        assert lane.report[REPORT_PEERS:][:3].tolist() == blamed


@pytest.mark.parametrize("tokens", (-1, 5, 2**31 - 1, -(2**31)))
def test_a_number_of_tokens_that_cannot_be_ends_the_lane(tokens: int) -> None:
    generator = torch.Generator().manual_seed(10)
    lanes = make_lanes(3, 6, 2, 8, 4)
    for lane in lanes:
        one = random_tokens(lane.layout, torch.float32, generator)
        send_tokens(lane, one.x, one.ids, one.weights)
    line(lanes[0], 2)[SIGNAL_TOKENS] = tokens
    wait(lanes[0], DISPATCH, TIMEOUT, GRACE)
    assert lanes[0].report[REPORT_STATUS] == MISMATCHED
    assert lanes[0].report[REPORT_PEERS:][:3].tolist() == [0, 0, 1]
    wait(lanes[1], DISPATCH, TIMEOUT, GRACE)
    assert lanes[1].report[REPORT_STATUS] == RUNNING


GUARD = 4096


class Guarded:
    """A lane whose tensors, and whose peers' buffers, lie between guard bytes."""

    def __init__(self, lanes: list[Lane], rank: int) -> None:
        self._memories: list[tuple[torch.Tensor, int]] = []
        buffers = [self._moved(lane.buffer) for lane in lanes]
        buffer_ptrs = torch.tensor([buffer.data_ptr() for buffer in buffers])
        names = (
            "control",
            "report",
            "index",
            "expert_counts",
            "expert_offsets",
            "positions",
            "weights",
            "scratch",
            "seen",
        )
        moved = {name: self._moved(getattr(lanes[rank], name)) for name in names}
        self.buffers = buffers
        self.lane = dataclasses.replace(lanes[rank], buffer=buffers[rank], buffer_ptrs=buffer_ptrs, **moved)

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        size = tensor.numel() * tensor.itemsize
        memory = torch.full((size + 2 * GUARD,), 0xA5, dtype=torch.uint8)
        inside = memory[GUARD : GUARD + size]
        inside.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        self._memories.append((memory, size))
        return inside.view(tensor.dtype).view(tensor.shape)

    def assert_intact(self) -> None:
        for memory, size in self._memories:
            assert (memory[:GUARD] == 0xA5).all() and (memory[GUARD + size :] == 0xA5).all()


def garbage(layout: RoundLayout, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Planes of ids that no honest peer sends."""
    shape = layout.WORLD, layout.MAX_TOKENS, layout.TOP_K
    anything = torch.randint(-(2**31), 2**31, shape, generator=generator)
    near = torch.randint(-3, layout.NUM_EXPERTS + 3, shape, generator=generator)
    return {
        "anything": anything,
        "near": near,
        "repeated": near[:, :, :1].clamp(0, layout.NUM_EXPERTS - 1).expand(shape),
        "extreme": torch.tensor([-(2**31), 2**31 - 1, -1, layout.NUM_EXPERTS])[anything % 4],
        "mixed": torch.where(anything % 3 == 0, near, anything),
    }


@pytest.mark.parametrize("kind", garbage(make_lanes(1, 1, 1, 1, 1)[0].layout, torch.Generator()))
@pytest.mark.parametrize(
    ("shape", "seen"),
    [
        ((3, 7, 5, 20, 6, 1), 0),
        ((3, 3, 4, 20, 6, 4), 0),
        ((4, 8, 2, 20, 6, 1), 0),
        *[((3, 7, 5, hidden, 6, 1), seen) for hidden in (4200, 9001) for seen in (NEVER, NEVER + 1)],
    ],
    ids=str,
)
def test_no_ids_lead_outside_of_the_lane(shape: tuple[int, int, int, int, int, int], seen: int, kind: str) -> None:
    generator = torch.Generator().manual_seed(11)
    for rank in range(shape[0]):
        for late_change in (False, True):
            _play_with_garbage(make_lanes(*shape), rank, kind, late_change, generator, seen)


def _play_with_garbage(
    lanes: list[Lane], rank: int, kind: str, late_change: bool, generator: torch.Generator, seen: int
) -> None:
    layout = lanes[0].layout
    for lane in lanes:
        poison(lane)
        lane.seen[:] = seen
    guarded = Guarded(lanes, rank)
    lane = guarded.lane
    one = random_tokens(layout, torch.float32, generator, layout.MAX_TOKENS)
    send_tokens(lane, one.x, one.ids, one.weights)
    plane(lane, layout.IDS, torch.int32)[:] = garbage(layout, generator)[kind]
    for source in range(layout.WORLD):
        words = line(lane, source)
        words[0], words[SIGNAL_TOKENS], words[SIGNAL_DTYPE] = 1, layout.MAX_TOKENS, DTYPE_CODES[torch.float32]
    wait(lane, DISPATCH, TIMEOUT, GRACE)
    assert lane.control[CONTROL_STATUS] == RUNNING
    if late_change:
        line(lane, (rank + 1) % layout.WORLD)[SIGNAL_TOKENS] = 2**30
    route(lane)
    _assert_routed_within(lane)
    rows = int(lane.expert_offsets[-1])
    out, _ = gathered(lane, rows, torch.float32)
    if late_change:
        # What was routed stays; the peer writes other ids, and another number of tokens.
        plane(lane, layout.IDS, torch.int32)[:] = garbage(layout, generator)["near"]
        line(lane, (rank + 1) % layout.WORLD)[SIGNAL_TOKENS] = layout.MAX_TOKENS
        line(lane, rank)[SIGNAL_TOKENS] = layout.MAX_TOKENS
    images = [buffer.clone() for buffer in guarded.buffers]
    send_sums(lane, torch.randn(rows, layout.HIDDEN), torch.float32)
    placed = (lane.positions[:, 0] >= 0).view(layout.WORLD, layout.MAX_TOKENS)
    for home, (buffer, image) in enumerate(zip(guarded.buffers, images, strict=True)):
        changed = (buffer != image).nonzero()[:, 0]
        assert ((changed < layout.IDS) | (changed >= layout.SUMS)).all(), "what is not this rank's was written"
        places = (changed[changed >= layout.SUMS] - layout.SUMS) // (layout.SLOTS * layout.SUM_BYTES)
        assert placed[home][places].all(), "a token that has no sum got one"
    for source in range(layout.WORLD):
        words = line(lane, source, COMBINE)
        words[0], words[SIGNAL_END] = 1, 1
    wait(lane, COMBINE, TIMEOUT, GRACE)
    sum_home(lane, torch.empty(layout.MAX_TOKENS, layout.HIDDEN))
    guarded.assert_intact()


def _assert_routed_within(lane: Lane) -> None:
    """Rows and slots name each other, each once, and every row lies with its expert."""
    layout = lane.layout
    filled = (lane.index >= 0).nonzero()[:, 0]
    assert len(filled) == lane.expert_counts.sum() and (lane.index < layout.WORLD * layout.MAX_TOKENS).all()
    used = lane.positions >= 0
    assert torch.equal(lane.positions[used].sort().values, filled)
    slots = used.nonzero()[:, 0]
    assert torch.equal(lane.index[lane.positions[used]], slots)
    first = layout.first_expert(lane.rank)
    ids = plane(lane, layout.IDS, torch.int32).view(-1, layout.TOP_K).long() - first
    experts = torch.bucketize(lane.positions[used], lane.expert_offsets, right=True) - 1
    assert (ids[slots] == experts[:, None]).any(1).all()


def test_a_record_of_any_bytes_is_read_within_its_slot() -> None:
    generator = torch.Generator().manual_seed(12)
    for spec in WIRES:
        lanes = make_lanes(1, 2, 1, 129, 4, wire=spec)
        guarded = Guarded(lanes, 0)
        lane = guarded.lane
        send_tokens(lane, torch.randn(4, 129), torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1))
        wait(lane, DISPATCH, TIMEOUT, GRACE)
        lane.records.random_(0, 256, generator=generator)
        route(lane)
        rows, _ = gathered(lane, 4, torch.float32)
        size = lane.wire.row_bytes(129, torch.float32)
        expected = dequantize_reference(lane.records[:, :size], lane.wire, 129, torch.float32)
        if spec != "fp8":  # whose reference has NaN for codes that no encoder writes
            assert_same_bits(spec, expected, rows)
        guarded.assert_intact()


# ---------------------------------------------------------------------------------------------------------------------
# Poisoned lanes


@pytest.mark.parametrize("status", (TIMED_OUT, MISMATCHED))
@every_dtype
def test_a_poisoned_lane_sends_nothing_and_gives_nan(dtype: torch.dtype, status: int) -> None:
    generator = torch.Generator().manual_seed(13)
    lanes = make_lanes(2, 5, 3, 33, 6, align=4)
    sent = [random_tokens(lanes[0].layout, dtype, generator, 6) for _ in lanes]
    play(lanes, sent)
    lane, one = lanes[0], sent[0]
    lane.control[CONTROL_STATUS] = status
    images = [other.buffer.clone() for other in lanes]
    report = lane.report.clone()
    send_tokens(lane, one.x, one.ids, one.weights)
    start = time.monotonic()
    wait(lane, DISPATCH, TIMEOUT, GRACE)
    route(lane)
    assert (lane.index == -1).all() and (lane.positions == -1).all()
    assert (lane.expert_counts == 0).all() and (lane.expert_offsets == 0).all()
    rows, overflow = gathered(lane, 5, dtype)
    assert rows.isnan().all() and not overflow
    send_sums(lane, torch.randn(5, 33), dtype)
    close_round(lane)
    wait(lane, COMBINE, TIMEOUT, GRACE)
    assert time.monotonic() - start < TIMEOUT / 2, "a poisoned lane was waited for"
    for tokens in (6, 2):
        out = torch.zeros(tokens, 33, dtype=dtype)
        sum_home(lane, out)
        assert out.isnan().all()
    assert lane.control[CONTROL_STATUS] == status and torch.equal(lane.report, report)
    for other, image in zip(lanes, images, strict=True):
        assert torch.equal(other.buffer, image)


# ---------------------------------------------------------------------------------------------------------------------
# Ranks that run freely


def test_a_flag_comes_after_all_that_it_announces() -> None:
    """A peer that looks at its memory the moment it sees a flag finds what is there later."""

    @numba.njit(nogil=True)
    def copy_when_signalled(flag, epoch, target, source, count):
        looks = 0
        while looks < 10**10 and not signalled(flag, epoch):
            looks += 1
        copy_bytes(target, source, count)

    generator = torch.Generator().manual_seed(16)
    lanes = make_lanes(2, 8, 32, 64, 16)
    memory, looking = lanes[0].buffer, threading.Barrier(2)
    copy = torch.empty_like(memory)

    def look(phase: int, epoch: int) -> None:
        flag = line(lanes[0], 1, phase).data_ptr()
        looking.wait()
        copy_when_signalled(flag, epoch, copy.data_ptr(), memory.data_ptr(), memory.numel())

    def seen(phase: int, epoch: int, publish: Callable[[], None]) -> torch.Tensor:
        thread = threading.Thread(target=look, args=(phase, epoch), daemon=True)
        thread.start()
        looking.wait()
        time.sleep(1e-3)
        publish()
        thread.join(TIMEOUT)
        return copy

    look_once = threading.Thread(target=look, args=(DISPATCH, 0))  # compiles
    look_once.start()
    looking.wait()
    look_once.join()
    for epoch in range(1, 101):
        sent = [random_tokens(lanes[0].layout, torch.float32, generator, 16) for _ in lanes]
        for lane in lanes:
            poison(lane)
        there = seen(DISPATCH, epoch, partial(send_tokens, lanes[1], sent[1].x, sent[1].ids, sent[1].weights))
        assert torch.equal(there, memory), f"dispatch of epoch {epoch}"
        send_tokens(lanes[0], sent[0].x, sent[0].ids, sent[0].weights)
        for lane in lanes:
            wait(lane, DISPATCH, TIMEOUT, GRACE)
            route(lane)
        close_round(lanes[0])
        expert_out = torch.randn(int(lanes[1].expert_offsets[-1]), 64, generator=generator)
        there = seen(COMBINE, epoch, partial(send_sums, lanes[1], expert_out, torch.float32))
        assert torch.equal(there, memory), f"combine of epoch {epoch}"


RANKS, EPOCHS, SCRIPTS = 4, 300, 10


def scripts_of(lanes: list[Lane], seed: int) -> list[tuple[list[Sent], tuple[int, ...], list[torch.Tensor]]]:
    """Rounds with what comes out of them: what is sent, who closes, and results."""
    generator = torch.Generator().manual_seed(seed)
    scripts = []
    for number in range(SCRIPTS):
        sent = [random_tokens(lanes[0].layout, torch.bfloat16, generator) for _ in lanes]
        closing = (number % RANKS,) if number % 5 == 0 else ()
        scripts.append((sent, closing, play(lanes, sent, closing=closing)))
    return scripts


@pytest.mark.exhaustive
def test_ranks_on_threads_of_their_own_never_read_a_stale_byte() -> None:
    shape = RANKS, 7, 3, 1040, 24, 4  # rows that take a while
    scripts = scripts_of(make_lanes(*shape), seed=14)
    lanes = make_lanes(*shape)
    travels = [[expected_travels(lanes[0], one) for one in sent] for sent, _, _ in scripts]
    arrivals = [[expected_arrival(lane, one) for one in travels] for lane in lanes]
    for lane in lanes:
        poison(lane)
        lane.control[CONTROL_EPOCH] = 2**31 - EPOCHS // 2
        for source in range(RANKS):
            line(lane, source, DISPATCH)[0] = line(lane, source, COMBINE)[0] = 2**31 - EPOCHS // 2
    order = random.Random(15).choices(range(SCRIPTS), k=EPOCHS)
    failures: list[str] = []

    def run(lane: Lane) -> None:
        chance = random.Random(lane.rank)
        layout = lane.layout

        def dawdle() -> None:
            if chance.random() < 0.1:
                time.sleep(chance.random() * 2e-3)

        for epoch, number in enumerate(order):
            sent, closing, results = scripts[number]
            one, arrived = sent[lane.rank], arrivals[lane.rank][number]
            send_tokens(lane, one.x, one.ids, one.weights)
            dawdle()
            wait(lane, DISPATCH, TIMEOUT, GRACE)
            route(lane)
            rows = torch.empty(len(arrived.rows), layout.HIDDEN, dtype=torch.bfloat16)
            gather(lane, rows, torch.tensor(False))
            if not (torch.equal(lane.index, arrived.index) and torch.equal(rows, arrived.rows)):
                failures.append(f"rank {lane.rank}, round {epoch}: other rows")
                return
            # Peers write these again when this rank has signalled that it is done with them, and not before.
            lane.buffer[layout.RECORDS : layout.SUMS] = POISON
            dawdle()
            if lane.rank in closing:
                close_round(lane)
            else:
                send_sums(lane, experts(arrived, lane.rank, torch.bfloat16, None), torch.bfloat16)
            dawdle()
            wait(lane, COMBINE, TIMEOUT, GRACE)
            out = torch.empty_like(one.x)
            sum_home(lane, out)
            if not torch.equal(out, results[lane.rank]):
                failures.append(f"rank {lane.rank}, round {epoch}: other sums")
                return
            lane.buffer[layout.SUMS :] = POISON
            dawdle()

    threads = [threading.Thread(target=run, args=(lane,), daemon=True) for lane in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads) and failures == []
    assert all(lane.report[REPORT_STATUS] == RUNNING for lane in lanes)
