"""Where a token goes, as compiled code has it: each rank that owns one of its experts once, in turn."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="compiling kernels needs Triton")

import torch
import triton
import triton.language as tl

from tests.helpers.speeds import exhaustive_but
from thinwire.moe.routing import expert_range
from thinwire.triton_kernels.combine import ranks_below
from thinwire.triton_kernels.dispatch import next_destination, owner_of
from thinwire.triton_kernels.round_layout import RoundLayout
from thinwire.wire import WireFormat
from verification.ptx.device import Device

TOKENS = 24


@triton.jit(do_not_specialize=["rank"])
def _destinations(ids_ptr, rank, peers_ptr, below_ptr, ROUND: tl.constexpr, K_BLOCK: tl.constexpr):
    token = tl.program_id(0)
    ks = tl.arange(0, K_BLOCK)
    owners = owner_of(tl.load(ids_ptr + token * ROUND.TOP_K + ks, mask=ks < ROUND.TOP_K, other=-1), ROUND)
    turn = rank * 0 - 1
    for j in range(ROUND.SLOTS):
        turn, peer = next_destination(owners, turn, rank, ROUND)
        tl.store(peers_ptr + token * ROUND.SLOTS + j, tl.where(turn < ROUND.WORLD, peer, -1))
    below = ranks_below(owners, owners, ROUND)
    tl.store(below_ptr + token * (K_BLOCK + 1) + ks, below)
    tl.store(below_ptr + token * (K_BLOCK + 1) + K_BLOCK, ranks_below(owners, rank, ROUND))


@pytest.mark.parametrize(
    "sizes",
    exhaustive_but(
        [(5, 13, 4)],
        [
            (1, 5, 3),
            (4, 8, 1),
            (5, 13, 4),
            (3, 2, 2),
            (8, 256, 8),
            (32, 64, 8),
            (33, 70, 6),
            (64, 64, 32),
            (72, 144, 8),
        ],
    ),
    ids=str,
)
def test_each_rank_comes_once_round_the_ranks_and_is_counted_once(sizes: tuple[int, int, int]) -> None:
    world, experts, top_k = sizes
    wire, block = WireFormat.parse("int8"), 1 << (top_k - 1).bit_length()
    layout = RoundLayout.of(
        world=world, num_experts=experts, top_k=top_k, hidden=64, max_tokens=TOKENS, wire=wire, combine_wire=wire
    )
    owner_of_expert = {id_: rank for rank in range(world) for id_ in expert_range(experts, world, rank)}
    # Repeated ids, none, and such as are no expert's.
    ids = torch.randint(-2, experts + 2, (TOKENS, top_k), generator=torch.Generator().manual_seed(world))
    for rank in {0, world // 2, world - 1}:
        peers = torch.full((TOKENS, layout.SLOTS), -7, dtype=torch.int32)
        below = torch.full((TOKENS, block + 1), -7, dtype=torch.int32)
        with Device().patch():
            _destinations[(TOKENS,)](ids, rank, peers, below, layout, block)
        for token, row in enumerate(ids.tolist()):
            owners = [owner_of_expert.get(id_, -1) for id_ in row]
            known = set(owners) - {-1}
            in_turn = sorted(known, key=lambda peer: (peer - rank - 1) % world)
            assert peers[token].tolist() == in_turn + [-1] * (layout.SLOTS - len(in_turn))
            of_each = [sum(other < owner for other in known) for owner in owners]
            assert below[token, :top_k].tolist() == of_each and below[token, -1] == sum(o < rank for o in known)
