"""Rounds of the direct transport on ranks that all live here: their kernels called one after the other, phase by phase.

The buffers are ordinary tensors whose addresses the ranks know, so this tests what the kernels compute and where they
store it, and leaves waiting for peers to other tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tests.helpers.wires import assert_same_bits
from thinwire.moe.direct import sources_of_slots
from thinwire.moe.plan import ArrivalPlan, merge_repeated_experts
from thinwire.moe.received import Arrived, Records, experts_of, take
from thinwire.moe.routing import expert_range
from thinwire.triton_kernels.codec_reference import dequantize_reference, quantize_reference
from thinwire.triton_kernels.launch import kept
from thinwire.triton_kernels.list_records import lane_of_records
from thinwire.triton_kernels.round_layout import COMBINE, CONTROL_ROWS, CONTROL_TOKENS, DISPATCH, Lane, RoundLayout
from thinwire.triton_kernels.signal import CONTROL_EPOCH, REPORT_STATUS
from thinwire.triton_kernels.sums import pack_weighted_sums_reference, sum_records_reference
from thinwire.wire import WireFormat

POISON = 0xFF  # as a float NaN, as an id none, as a position far out of range


@dataclass
class Tokens:
    """What one rank dispatches."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def random(
        cls, count: int, hidden: int, top_k: int, num_experts: int, dtype: torch.dtype, generator: torch.Generator
    ) -> Tokens:
        """Random tokens: some ids are missing, some repeat, a token has no expert at all."""
        ids = torch.randint(-1, num_experts, (count, top_k), generator=generator)
        if count > 2:
            ids[1] = -1
            ids[2, -1] = ids[2, 0]
        return cls(
            torch.randn(count, hidden, generator=generator).to(dtype),
            ids,
            torch.randn(count, top_k, generator=generator),
        )


def make_lanes(
    world: int,
    num_experts: int,
    top_k: int,
    hidden: int,
    max_tokens: int,
    wire: str = "int8",
    combine_wire: str | None = None,
    align: int = 1,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    weight_grads: bool = False,
    invariant: bool = False,
) -> list[Lane]:
    """A lane of each rank, over buffers in this process."""
    first, second = WireFormat.parse(wire), WireFormat.parse(combine_wire or wire)
    layout = RoundLayout.of(
        world=world, num_experts=num_experts, top_k=top_k, hidden=hidden, max_tokens=max_tokens, wire=first,
        combine_wire=second, dtype=dtype, weight_grads=weight_grads, invariant=invariant,
    )  # fmt: skip
    buffers = [torch.zeros(layout.NUM_BYTES, dtype=torch.uint8, device=device) for _ in range(world)]
    buffer_ptrs = torch.tensor([buffer.data_ptr() for buffer in buffers], device=device)
    return [Lane.of(layout, first, second, rank, align, buffer, buffer_ptrs) for rank, buffer in enumerate(buffers)]


def poison(lanes: list[Lane]) -> None:
    """Overwrites everything that no rank may read in the next round without having been sent it in that round.

    Of what routing writes, that is what it left filled; it counts on the rest.
    """
    for lane in lanes:
        lane.buffer[lane.layout.IDS :] = POISON
        if lane.expert_counts.shape[0] == 0:
            continue  # a rank without experts routes nothing: its positions stay -1
        tokens, rows = lane.control[[CONTROL_TOKENS, CONTROL_ROWS]].tolist()
        lane.positions.view(lane.layout.WORLD, lane.layout.MAX_TOKENS, -1)[:, :tokens] = 2**40
        lane.weights.fill_(float("nan"))
        lane.index[:rows] = 2**40


def run_round(
    kernels: Any, lanes: list[Lane], tokens: list[Tokens], experts: torch.Tensor, closing: tuple[int, ...] = ()
) -> list[torch.Tensor]:
    """One round of all ranks, checked at every step; `experts` [num_experts, hidden] scale a token's elements.

    Args:
        kernels: what has send_tokens, wait, route, gather, send_sums, close_round and sum_home; maybe list_records.
        closing: ranks that close the round instead of sending sums.

    Returns:
        What each rank's tokens come to.
    """
    poison(lanes)
    epochs = [int(lane.control[CONTROL_EPOCH]) for lane in lanes]
    for lane, mine in zip(lanes, tokens, strict=True):
        kernels.send_tokens(lane, mine.x, mine.ids, mine.weights)
    for lane, epoch in zip(lanes, epochs, strict=True):
        kernels.wait(lane, DISPATCH, 1.0, 0.1)
        assert lane.report[REPORT_STATUS] == 0
        assert (int(lane.control[CONTROL_EPOCH]) - epoch) % 2**32 == 1
    plans, outputs = [], []
    for lane in lanes:
        kernels.route(lane)
        plan = _check_route(lane, tokens)
        outputs.append(_check_gather(kernels, lane, tokens, experts))
        if hasattr(kernels, "list_records"):
            _check_records(kernels, lane, len(plan[0]), tokens[0].x.dtype)
        plans.append(plan)
    grads = [torch.randn(lane.weights.shape, device=lane.weights.device) for lane in lanes]
    for lane, expert_out, of_weights in zip(lanes, outputs, grads, strict=True):
        if lane.rank in closing:
            kernels.close_round(lane)
        elif lane.layout.WEIGHT_GRADS:
            kernels.send_sums(lane, expert_out, tokens[0].x.dtype, None, of_weights)
        else:
            kernels.send_sums(lane, expert_out, tokens[0].x.dtype)
    results, home = [], []
    for lane, mine in zip(lanes, tokens, strict=True):
        kernels.wait(lane, COMBINE, 1.0, 0.1)
        assert lane.report[REPORT_STATUS] == 0
        out = torch.full_like(mine.x, 7.0)
        if lane.layout.WEIGHT_GRADS:
            home.append(torch.full(mine.ids.shape, 7.0, device=out.device))
            kernels.sum_home(lane, out, home[-1])
        else:
            kernels.sum_home(lane, out)
        results.append(out)
    check_results(lanes, tokens, plans, outputs, results, closing)
    if lanes[0].layout.WEIGHT_GRADS:
        _check_weight_grads(lanes, tokens, grads, home, closing)
    return results


def arrivals(lane: Lane, tokens: list[Tokens]) -> tuple[torch.Tensor, ArrivalPlan, torch.Tensor]:
    """Slots that hold a record, the plan over those records, and each record's token, one source after the other."""
    layout = lane.layout
    local = expert_range(layout.NUM_EXPERTS, layout.WORLD, lane.rank)
    slots, ids, weights, rows = [], [], [], []
    for source, sent in enumerate(tokens):
        merged, summed = merge_repeated_experts(sent.ids.cpu(), sent.weights.cpu())
        here = ((merged >= local.start) & (merged < local.stop)).any(1).nonzero()[:, 0]
        slots.append(source * layout.MAX_TOKENS + here)
        ids.append(merged[here])
        weights.append(summed[here])
        rows.append(sent.x.cpu()[here])
    plan = ArrivalPlan.of(torch.cat(ids), torch.cat(weights), local, lane.align)
    return torch.cat(slots), plan, torch.cat(rows)


def _check_route(lane: Lane, tokens: list[Tokens]) -> tuple[torch.Tensor, ArrivalPlan]:
    slots, plan, rows = arrivals(lane, tokens)
    index = torch.full_like(lane.index, -1, device="cpu")
    index[plan.rows] = slots[plan.index]
    assert torch.equal(lane.index.cpu(), index)
    assert torch.equal(lane.expert_counts.cpu(), plan.expert_counts)
    assert torch.equal(lane.expert_offsets.cpu(), plan.expert_offsets)
    positions = torch.full_like(lane.positions, -1, device="cpu")
    positions[slots] = plan.positions
    assert torch.equal(lane.positions.cpu(), positions)
    assert_same_bits("weights", plan.weights[plan.positions >= 0], lane.weights.cpu()[positions >= 0])
    records = quantize_reference(rows, lane.wire)
    assert torch.equal(lane.records.cpu()[slots, : records.shape[1]], records)
    return slots, plan


def _check_gather(kernels: Any, lane: Lane, tokens: list[Tokens], experts: torch.Tensor) -> torch.Tensor:
    x = tokens[0].x
    used = int(lane.expert_offsets[-1])
    expected = torch.zeros(used + 3, x.shape[1], dtype=x.dtype)
    filled = lane.index[:used].cpu() >= 0
    records = lane.records.cpu()[lane.index[:used].cpu()[filled]]
    expected[:used][filled] = dequantize_reference(
        records[:, : lane.wire.row_bytes(x.shape[1], x.dtype)], lane.wire, x.shape[1], x.dtype
    )
    for capacity, zero_tail in ((used + 3, True), (used + 3, False), (used // 2, True)):
        out = torch.full((capacity, x.shape[1]), 7.0, dtype=x.dtype, device=x.device)
        overflow = torch.tensor(capacity % 2 == 0, device=x.device)
        kernels.gather(lane, out, overflow, zero_tail)
        expected[used:] = 0.0 if zero_tail else 7.0
        assert_same_bits("gathered", expected[:capacity], out.cpu())
        assert bool(overflow) == (capacity < used)
    scales = torch.zeros(used, x.shape[1])
    for expert, (start, count) in enumerate(
        zip(lane.expert_offsets.tolist(), lane.expert_counts.tolist(), strict=False)
    ):
        scales[start : start + count] = experts[lane.layout.first_expert(lane.rank) + expert]
    return (expected[:used].float() * scales).to(x.dtype).to(x.device)


def _check_records(kernels: Any, lane: Lane, number: int, dtype: torch.dtype) -> None:
    """Against torch's operations. If `number` of records is odd, half of them are dropped."""
    capacity, layout, device = number // 2 if number % 2 else number + 3, lane.layout, lane.buffer.device
    shapes = (capacity, layout.HIDDEN), (capacity, layout.TOP_K), (capacity, layout.TOP_K), (capacity, 2)
    dtypes = dtype, torch.int64, torch.float32, torch.int64
    out = [torch.full(shape, 7, dtype=each, device=device) for shape, each in zip(shapes, dtypes, strict=True)]
    out.append(torch.tensor(number <= capacity, device=device))
    if len(lane.expert_counts):  # else nothing is ever written there
        kept(lane, lane_of_records).positions[:, 0] = 0  # a row of an earlier round would overwrite the first
    kernels.list_records(lane, *out[1:4])
    kernels.gather(kept(lane, lane_of_records), out[0], out[4], True)
    arrived = arrived_on(lane)
    chosen = arrived.first(capacity)
    positions, *routing = arrived.at(chosen)
    records = take(lane.records[:, : lane.wire.row_bytes(layout.HIDDEN, dtype)], chosen, 0)
    tokens = dequantize_reference(records.cpu(), lane.wire, layout.HIDDEN, dtype)
    tokens[chosen.cpu() < 0] = 0.0
    expected = tokens, experts_of(positions, lane.expert_offsets), *routing, arrived.number > capacity
    for name, want, got in zip(Records._fields, expected, out, strict=True):
        assert torch.equal(want.cpu(), got.cpu()), (name, want, got)


def arrived_on(lane: Lane) -> Arrived:
    """What came on a lane that was routed, for torch's operations."""
    weights = lane.weights.masked_fill(lane.positions < 0, 0.0)
    return Arrived(lane.positions, weights, sources_of_slots(lane))


def check_results(
    lanes: list[Lane],
    tokens: list[Tokens],
    plans: list[tuple[torch.Tensor, ArrivalPlan]],
    outputs: list[torch.Tensor],
    results: list[torch.Tensor],
    closing: tuple[int, ...],
) -> None:
    """Compares what each rank's tokens came to with plain torch.

    Args:
        plans: for each rank the first two of `arrivals`.
        outputs: what each rank's experts made of their rows.
    """
    wire, dtype, layout = lanes[0].combine_wire, tokens[0].x.dtype, lanes[0].layout
    each = layout.TOP_K if layout.INVARIANT else 1  # records of a rank for a token
    for home, (mine, result) in enumerate(zip(tokens, results, strict=True)):
        hidden = mine.x.shape[1]
        sums, index = [], torch.full((mine.x.shape[0], len(lanes), each), -1, dtype=torch.int64)
        for rank, ((slots, plan), expert_out) in enumerate(zip(plans, outputs, strict=True)):
            own = (slots // layout.MAX_TOKENS == home).nonzero()[:, 0]
            if rank not in closing:
                positions, weights = (
                    of[own].view(len(own) * each, layout.TOP_K // each) for of in (plan.positions, plan.weights)
                )
                places = torch.where(positions[:, 0] >= 0, sum(map(len, sums)) + torch.arange(len(positions)), -1)
                index[slots[own] % layout.MAX_TOKENS, rank] = places.view(-1, each)
                sums.append(pack_weighted_sums_reference(expert_out.cpu(), positions, weights, wire, dtype))
        index = index.flatten(1)
        records = torch.cat([*sums, torch.zeros(0, wire.row_bytes(hidden, dtype), dtype=torch.uint8)])
        assert_same_bits("combined", sum_records_reference(records, index, wire, hidden, dtype), result.cpu())


def _check_weight_grads(
    lanes: list[Lane], tokens: list[Tokens], grads: list[torch.Tensor], home: list[torch.Tensor],
    closing: tuple[int, ...],
) -> None:  # fmt: skip
    """Each rank has stored those of its own experts, and nobody anything else; they are what the home has read."""
    came = home_weight_grads(lanes, tokens, grads, closing)
    for lane, read, expected in zip(lanes, home, came, strict=True):
        stored = torch.full((lane.layout.MAX_TOKENS, lane.layout.TOP_K), -1, dtype=torch.int32)  # POISON, four times
        stored[: len(expected)] = torch.where(expected.isnan(), -1, expected.view(torch.int32))
        assert torch.equal(lane.weight_grads.cpu().view(torch.int32), stored)
        assert torch.equal(read.cpu().view(torch.int32), expected.nan_to_num(0.0).view(torch.int32))


def home_weight_grads(
    lanes: list[Lane], tokens: list[Tokens], grads: list[torch.Tensor], closing: tuple[int, ...]
) -> list[torch.Tensor]:
    """What comes home to each rank, [tokens, top_k] in the order of its ids; NaN where nobody stores anything."""
    layout, came = lanes[0].layout, []
    for lane, mine in zip(lanes, tokens, strict=True):
        ids, _ = merge_repeated_experts(mine.ids.cpu(), mine.weights.cpu())
        expected = torch.full(ids.shape, float("nan"))
        for source, of_weights in enumerate(grads):
            local = expert_range(layout.NUM_EXPERTS, layout.WORLD, source)
            own = (ids >= local.start) & (ids < local.stop) & (source not in closing)
            sent = of_weights.cpu().view(layout.WORLD, layout.MAX_TOKENS, layout.TOP_K)[lane.rank, : len(ids)]
            expected[own] = sent[own]
        came.append(expected)
    return came
