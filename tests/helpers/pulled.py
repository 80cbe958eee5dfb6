"""Rounds of CPU ranks that all live here: their kernels called one after the other, phase by phase.

Their memory is ordinary tensors whose addresses the ranks know, so this tests what the kernels compute and where they
store it, and leaves waiting for peers to other tests.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import torch

from tests.helpers.rounds import POISON, Tokens, arrivals, check_results
from tests.helpers.wires import assert_same_bits
from thinwire.moe.plan import ArrivalPlan, merge_repeated_experts
from thinwire.moe.routing import expert_range
from thinwire.triton_kernels.codec_reference import dequantize_reference, quantize_reference
from thinwire.triton_kernels.cpu import rounds as kernels
from thinwire.triton_kernels.cpu.lane import PulledLane, PulledLayout
from thinwire.triton_kernels.cpu.lines import board_bytes, board_words
from thinwire.triton_kernels.round_layout import ABANDONED, DTYPE_CODES, WITH_SUMS
from thinwire.wire import WireFormat


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
    weight_grads: bool = False,
    invariant: bool = False,
    new_memory: Any = None,
) -> list[PulledLane]:
    """A lane of each rank, over memory in this process, which `new_memory` makes of a number of bytes, zero at first.

    `kept["memory"]` of each is all of a rank's, its board before the lane.
    """
    first, second = WireFormat.parse(wire), WireFormat.parse(combine_wire or wire)
    layout = PulledLayout(
        world=world, num_experts=num_experts, top_k=top_k, hidden=hidden, max_tokens=max_tokens, wire=first,
        combine_wire=second, dtype=dtype, weight_grads=weight_grads, invariant=invariant,
    )  # fmt: skip
    board = -(-board_bytes(world, 1) // 128) * 128
    new_memory = new_memory or (lambda size: torch.zeros(size, dtype=torch.uint8))
    memories = [new_memory(board + layout.NUM_BYTES) for _ in range(world)]
    heaps = torch.tensor([memory.data_ptr() for memory in memories])
    lanes = []
    for rank, memory in enumerate(memories):
        words = board_words(heaps.data_ptr(), world, rank, 1)
        words[-world:] = rank % 2 - (1 << 62)  # odd ranks store past the caches
        lane = PulledLane(
            layout, first, second, rank, align, words.ctypes.data, 0, memory[board:], heaps + board, heaps + board,
            torch.arange(world),
        )  # fmt: skip
        lane.kept["memory"], lane.kept["alive"] = memory, (heaps, words, memories)
        lanes.append(lane)
    return lanes


def on_board(lane: PulledLane, address: int) -> PulledLane:
    """The same lane, whose lines lie on another board."""
    other = copy(lane)
    other.board, other.kept = address, {}
    return other


def poison(lanes: list[PulledLane]) -> None:
    """Overwrites everything that no rank may read in the next round without its being sent in that round.

    Of what routing writes, that is what it left filled; it counts on the rest.
    """
    for lane in lanes:
        lane.memory[:] = POISON
        if lane.expert_counts.shape[0] == 0:
            continue  # a rank without experts routes nothing: its positions stay -1
        tokens, rows = lane.filled.tolist()
        lane.positions.view(lane.layout.WORLD, lane.layout.MAX_TOKENS, -1)[:, :tokens] = 2**40
        lane.weights.fill_(float("nan"))
        lane.index[:rows] = 2**40


def run_round(
    lanes: list[PulledLane], tokens: list[Tokens], experts: torch.Tensor, closing: tuple[int, ...] = ()
) -> list[torch.Tensor]:
    """One round of all ranks, checked at every step; `experts` [num_experts, hidden] scale a token's elements.

    Args:
        closing: ranks that close the round instead of sending sums.

    Returns:
        What each rank's tokens come to.
    """
    poison(lanes)
    dtype = tokens[0].x.dtype
    word = DTYPE_CODES[dtype] | 5 << 2
    for lane, mine in zip(lanes, tokens, strict=True):
        kernels.send_tokens(lane, mine.x, mine.ids.contiguous(), mine.weights.float().contiguous(), word)
    plans, outputs = [], []
    for lane in lanes:
        assert kernels.route(lane, dtype, word)
        plans.append(_check_route(lane, tokens))
        outputs.append(_check_gather(lane, tokens, plans[-1], experts))
    dots = [torch.randn(len(expert_out)) for expert_out in outputs]
    for lane, expert_out, of_rows in zip(lanes, outputs, dots, strict=True):
        if lane.rank in closing:
            kernels.tell(lane, ABANDONED)
        else:
            kernels.send_sums(lane, expert_out, dtype, dots=of_rows if lane.layout.WEIGHT_GRADS else None)
    results = []
    for lane, mine in zip(lanes, tokens, strict=True):
        memory = torch.full((len(mine.x) + 1, mine.x.shape[1] + 3), 7.0, dtype=dtype)
        grads = torch.full(mine.ids.shape, 7.0)
        assert not kernels.sum_home(lane, memory[:-1, :-3], grads if lane.layout.WEIGHT_GRADS else None)
        assert (memory[-1] == 7.0).all() and (memory[:, -3:] == 7.0).all(), "written past a row"
        assert lane.said.tolist() == [WITH_SUMS if rank not in closing else ABANDONED for rank in range(len(lanes))]
        results.append(memory[:-1, :-3])
        if lane.layout.WEIGHT_GRADS:
            assert_same_bits("weight grads", _home_grads(lane, tokens, plans, dots, closing), grads)
    check_results(lanes, tokens, plans, outputs, results, closing)  # type: ignore[arg-type]
    return results


def _check_route(lane: PulledLane, tokens: list[Tokens]) -> tuple[torch.Tensor, ArrivalPlan]:
    slots, plan, rows = arrivals(lane, tokens)  # type: ignore[arg-type]
    index = torch.full_like(lane.index, -1)
    index[plan.rows] = slots[plan.index]
    assert torch.equal(lane.index, index)
    assert torch.equal(lane.expert_counts, plan.expert_counts)
    assert torch.equal(lane.expert_offsets, plan.expert_offsets)
    positions = torch.full_like(lane.positions, -1)
    positions[slots] = plan.positions
    assert torch.equal(lane.positions, positions)
    assert_same_bits("weights", plan.weights[plan.positions >= 0], lane.weights[positions >= 0])
    records = quantize_reference(rows, lane.wire)
    assert torch.equal(kernels.copy_records(lane, rows.dtype)[slots], records)
    return slots, plan


def _check_gather(
    lane: PulledLane, tokens: list[Tokens], plan: tuple[torch.Tensor, ArrivalPlan], experts: torch.Tensor
) -> torch.Tensor:
    """Compares the experts' rows with plain torch, in several shapes. Gives what experts make of them."""
    x, used = tokens[0].x, plan[1].num_rows
    received = torch.cat(
        [dequantize_reference(quantize_reference(t.x, lane.wire), lane.wire, x.shape[1], x.dtype) for t in tokens]
    )
    first = torch.tensor([0, *(len(t.x) for t in tokens)]).cumsum(0)
    expected = torch.zeros(used + 3, x.shape[1], dtype=x.dtype)
    slots = plan[0][plan[1].index]
    most = lane.layout.MAX_TOKENS
    expected[plan[1].rows] = received[first[slots // most] + slots % most]
    for capacity, zero_tail in ((used + 3, True), (used + 3, False), (used // 2, True)):
        memory = torch.full((capacity + 1, x.shape[1] + 3), 7.0, dtype=x.dtype)
        overflow = torch.tensor(capacity % 2 == 0)
        kernels.gather(lane, memory[:-1, :-3], overflow, zero_tail)
        assert (memory[-1] == 7.0).all() and (memory[:, -3:] == 7.0).all(), "written past a row"
        expected[used:] = 0.0 if zero_tail else 7.0
        assert_same_bits("gathered", expected[:capacity], memory[:-1, :-3])
        assert bool(overflow) == (capacity < used)
    scales = torch.zeros(used, x.shape[1])
    for expert, (start, count) in enumerate(
        zip(lane.expert_offsets.tolist(), lane.expert_counts.tolist(), strict=False)
    ):
        scales[start : start + count] = experts[lane.layout.first_expert(lane.rank) + expert]
    return (expected[:used].float() * scales).to(x.dtype)


def _home_grads(
    lane: PulledLane,
    tokens: list[Tokens],
    plans: list[tuple[torch.Tensor, ArrivalPlan]],
    dots: list[torch.Tensor],
    closing: tuple[int, ...],
) -> torch.Tensor:
    """The gradients of a rank's router weights, in the order of its merged ids."""
    layout = lane.layout
    ids, _ = merge_repeated_experts(tokens[lane.rank].ids, tokens[lane.rank].weights)
    grads = torch.zeros(ids.shape)
    for rank, ((slots, plan), of_rows) in enumerate(zip(plans, dots, strict=True)):
        if rank in closing:
            continue
        local = expert_range(layout.NUM_EXPERTS, layout.WORLD, rank)
        for record in (slots // layout.MAX_TOKENS == lane.rank).nonzero()[:, 0].tolist():
            token = int(slots[record]) % layout.MAX_TOKENS
            for k, expert in enumerate(ids[token].tolist()):
                if expert in local:
                    grads[token, k] = of_rows[plan.rows_of_ids[record, k]]
    return grads
