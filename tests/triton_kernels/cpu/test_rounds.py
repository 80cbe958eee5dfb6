"""Whole rounds of ranks that share this process, against what plain torch says of the same tokens.

All memory that a round may not read is poisoned before it.
"""

from __future__ import annotations

import pytest

pytest.importorskip("numba", reason="the CPU kernels need numba")

import random
from collections.abc import Sequence

import torch

from tests.helpers.guarded import guarded
from tests.helpers.pulled import make_lanes, poison, run_round
from tests.helpers.rounds import Tokens
from tests.helpers.speeds import exhaustive_but
from tests.helpers.wires import DTYPES, assert_same_bits
from thinwire.errors import RoutingError, WireFormatError
from thinwire.triton_kernels.codec_reference import dequantize_reference
from thinwire.triton_kernels.cpu import rounds as kernels
from thinwire.triton_kernels.cpu.lane import REFUSED, PulledLane
from thinwire.triton_kernels.round_layout import ABANDONED, LEFT_OPEN
from thinwire.triton_kernels.sums import pack_weighted_sums_reference

WIRES = ("none", "int8", "int8:row", "int8:64", "int4", "fp8", "int8+h64", "int6+h64")
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


def draw(lanes: list[PulledLane], dtype: torch.dtype, generator: torch.Generator) -> tuple[list[Tokens], torch.Tensor]:
    """Any number of tokens of each rank, and what experts scale by."""
    layout = lanes[0].layout
    tokens = []
    for _ in lanes:
        count = int(torch.randint(0, layout.MAX_TOKENS + 1, (1,), generator=generator))
        drawn = Tokens.random(count, layout.HIDDEN, layout.TOP_K, layout.NUM_EXPERTS, dtype, generator)
        drawn.ids = drawn.ids.to((torch.int32, torch.int64)[count % 2])
        tokens.append(drawn)
    return tokens, torch.randn(layout.NUM_EXPERTS, layout.HIDDEN, generator=generator)


KINDS = {"plain": (False, False), "weight grads": (True, False), "invariant": (False, True)}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("number", exhaustive_but([0, 3, 7], range(len(WIRES))), ids=lambda number: WIRES[number])
def test_rounds_equal_plain_torch_to_the_last_bit(number: int, shape: tuple[int, ...]) -> None:
    *sizes, align = shape
    _play(number, sizes, align)


def _play(number: int, sizes: Sequence[int], align: int) -> None:
    """Rounds of each kind, in a wire and dtypes that differ."""
    generator = torch.Generator().manual_seed(sum(sizes))
    for place, (weight_grads, invariant) in enumerate(KINDS.values()):
        lanes = make_lanes(*sizes, wire=WIRES[number], align=align, weight_grads=weight_grads, invariant=invariant)
        for turn in range(2):
            dtype = DTYPES[(number + place + turn) % 3]
            run_round(lanes, *draw(lanes, dtype, generator), tuple(range(turn, len(lanes), 3)) * turn)


@pytest.mark.exhaustive
def test_the_largest_world() -> None:
    _play(1, (72, 75, 6, 5, 2), 1)


@pytest.mark.parametrize("wires", [("int4", "int8"), ("none", "fp8"), ("int8", "none")], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_leg_has_its_own_wire_format_and_a_lane_may_be_of_one_dtype(
    wires: tuple[str, str], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(1)
    lanes = make_lanes(3, 7, 3, 70, 4, *wires, dtype=dtype)
    run_round(lanes, *draw(lanes, dtype, generator))
    if dtype != torch.float32 and "none" in wires:
        with pytest.raises(WireFormatError, match="this lane was laid out for"):
            kernels.route(lanes[0], torch.float32, 0)


def test_routing_does_not_rely_on_what_the_owner_left_in_its_tensors() -> None:
    generator = torch.Generator().manual_seed(3)
    lanes = make_lanes(2, 4, 2, 16, 5)
    for tokens in (5, 0, 3):
        run_round(
            lanes,
            [Tokens.random(tokens, 16, 2, 4, torch.float32, generator) for _ in lanes],
            torch.ones(4, 16),
        )
        for lane in lanes:
            lane.index[:] = 77
            lane.positions[:] = 77


def test_rows_beyond_the_capacity_add_nothing_and_records_may_go_home_as_they_are() -> None:
    generator = torch.Generator().manual_seed(4)
    lanes = make_lanes(1, 1, 1, 32, 4)
    x, ids = torch.randn(4, 32, generator=generator), torch.zeros(4, 1, dtype=torch.int32)
    lane = lanes[0]
    for as_records in (False, True):
        poison(lanes)
        kernels.send_tokens(lane, x, ids, torch.full((4, 1), 2.0), 0)
        assert kernels.route(lane, x.dtype, 0)
        rows = torch.randn(3, 32, generator=generator)
        expected = torch.zeros(4, 32)
        if as_records:
            places, ones = torch.arange(3)[:, None], torch.ones(3, 1)
            records = pack_weighted_sums_reference(rows, places, ones, lane.wire, x.dtype)
            kernels.send_sums(lane, records, x.dtype, lane.positions, lane.weights, as_they_are=True)
        else:
            kernels.send_sums(lane, rows, x.dtype)
            records = pack_weighted_sums_reference(
                rows, torch.arange(3)[:, None], torch.full((3, 1), 2.0), lane.wire, x.dtype
            )
        out = torch.full((4, 32), 7.0)
        assert not kernels.sum_home(lane, out)
        expected[:3] = dequantize_reference(records, lane.wire, 32, x.dtype)
        assert_same_bits("home", expected + 0.0, out)


def test_what_ranks_say_is_compared_and_kept() -> None:
    lanes = make_lanes(3, 3, 1, 8, 2)
    x, ids, weights = torch.ones(1, 8), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
    for words in ((4, 4, 5), (4, REFUSED - 2, 4)):
        for lane, word in zip(lanes, words, strict=True):
            if word < 0:
                kernels.tell(lane, word)
            else:
                kernels.send_tokens(lane, x, ids, weights, word)
        for lane in lanes:
            assert not kernels.route(lane, x.dtype, 4)
            assert lane.said.tolist() == list(words)
            assert lane.counts.tolist() == [1, 1, 1] and (lane.positions == -1).all()
        for lane in lanes:
            kernels.tell(lane, ABANDONED)
        for lane in lanes:
            kernels.take(lane)
    for lane in lanes:
        kernels.send_tokens(lane, x, ids, weights, 1)
    for lane in lanes:
        assert kernels.route(lane, x.dtype, 1)
    for lane in lanes:
        kernels.tell(lane, LEFT_OPEN) if lane.rank == 2 else kernels.send_sums(lane, x.expand(3, 8), x.dtype)
    for lane in lanes:
        assert kernels.sum_home(lane, torch.empty(1, 8))
        assert lane.said.tolist() == [1, 1, LEFT_OPEN]


@pytest.mark.parametrize("tokens", [-1, 3, 2**62, -(2**63)])
def test_a_number_of_tokens_that_cannot_be_is_found(tokens: int) -> None:
    lanes = make_lanes(2, 2, 1, 8, 2)
    x, ids, weights = torch.ones(1, 8), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
    for lane in lanes:
        kernels.send_tokens(lane, x, ids, weights, 0)
    lanes[1].part()["tokens"].fill_(tokens)
    assert not kernels.route(lanes[0], x.dtype, 0)
    assert lanes[0].counts.tolist() == [1, tokens]


@pytest.mark.parametrize("seed", exhaustive_but([0, 1], range(30)))
def test_no_words_in_the_ranks_memory_lead_outside_of_it(seed: int) -> None:
    """All memory lies between pages that nobody may touch."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    sizes = rng.choice(((2, 8, 2, 40, 6), (3, 3, 2, 33, 4), (4, 70, 32, 16, 3)))
    kinds = {"weight_grads": rng.random() < 0.5}
    kinds["invariant"] = not kinds["weight_grads"] and rng.random() < 0.5
    wire = rng.choice(WIRES)
    lanes = make_lanes(*sizes, wire=wire, new_memory=lambda size: guarded([-(-size // 64) * 64])[:size], **kinds)
    (tokens, _), dtype = draw(lanes, torch.float32, generator), torch.float32

    def spoil() -> None:
        for lane in lanes:
            words = lane.memory[: lane.memory.numel() // 4 * 4].view(torch.int32)
            places = torch.randint(0, words.numel(), (words.numel() // 3,), generator=generator)
            values = torch.tensor([-1, 0, 1, 2, 7, 2**31 - 1, -(2**31), 0x7FC00000], dtype=torch.int32)
            words[places] = values[torch.randint(0, len(values), places.shape, generator=generator)]
            lane.part()["tokens"].fill_(rng.choice((0, 1, lane.layout.MAX_TOKENS)))

    for lane, mine in zip(lanes, tokens, strict=True):
        kernels.send_tokens(lane, mine.x, mine.ids.contiguous(), mine.weights, 0)
    spoil()
    for lane in lanes:
        assert kernels.route(lane, dtype, 0)
        spoil()
        used = int(lane.expert_offsets[-1])
        out = guarded([used, lane.layout.HIDDEN], dtype)
        kernels.gather(lane, out, torch.tensor(False))
        kernels.copy_records(lane, dtype)
        kernels.send_sums(lane, out, dtype, dots=guarded([used], dtype) if kinds["weight_grads"] else None)
    for lane, mine in zip(lanes, tokens, strict=True):
        spoil()
        grads = guarded(mine.ids.shape, dtype) if kinds["weight_grads"] else None
        kernels.sum_home(lane, guarded(mine.x.shape, dtype), grads)


def test_an_index_that_routing_did_not_write_is_refused() -> None:
    generator = torch.Generator().manual_seed(5)
    lanes = make_lanes(2, 2, 1, 8, 4)
    tokens, _ = draw(lanes, torch.float32, generator)
    for lane, mine in zip(lanes, tokens, strict=True):
        kernels.send_tokens(lane, mine.x, mine.ids.contiguous(), mine.weights, 0)
    lane = lanes[0]
    assert kernels.route(lane, torch.float32, 0)
    for tensor, value in ((lane.expert_offsets, -1), (lane.expert_offsets, lane.index.shape[0] + 1), (lane.index, 8)):
        before = tensor.clone()
        tensor[:] = value
        lane.expert_offsets[-1] = max(1, int(lane.expert_offsets[-1])) if tensor is lane.index else value
        with pytest.raises(RoutingError, match="they are to be read only"):
            kernels.gather(lane, torch.empty(4, 8), torch.tensor(False))
        tensor.copy_(before)
