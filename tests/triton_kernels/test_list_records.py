"""Records in a fixed shape, listed by Triton's interpreter: what torch's operations make of the same lane, bit for bit.

`tests/helpers/rounds.py` compares tokens, too. Planes and signal lines are written as peers would
write them, among them some that the protocol does not allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import pytest

pytest.importorskip("triton", reason="interpreting kernels needs Triton")

import torch

from tests.helpers.rounds import arrived_on, make_lanes
from tests.helpers.wires import assert_same_bits
from thinwire.comm.communicator import Communicator
from thinwire.moe.received import experts_of
from thinwire.testing import run_ranks
from thinwire.triton_kernels import permute
from thinwire.triton_kernels.launch import kept
from thinwire.triton_kernels.list_records import lane_of_records, list_records
from thinwire.triton_kernels.round_layout import SIGNAL_TOKENS, Lane
from thinwire.triton_kernels.signal import SIGNAL_LINE_BYTES

INTERPRETED = {"TRITON_INTERPRET": "1"}


def _came(lane: Lane, counts: Sequence[int], generator: torch.Generator) -> None:
    """Routes so many tokens of each source, whose ids may repeat."""
    layout = lane.layout
    shape = layout.WORLD, layout.MAX_TOKENS, layout.TOP_K
    ids = torch.randint(-1, layout.NUM_EXPERTS, shape, generator=generator, dtype=torch.int32)
    words = lane.buffer.view(torch.int32)
    words[layout.IDS // 4 :][: ids.numel()] = ids.flatten()
    words[layout.WEIGHTS // 4 :][: ids.numel()] = torch.randn(shape, generator=generator).view(torch.int32).flatten()
    lines = words[layout.SIGNALS // 4 :][: layout.WORLD * SIGNAL_LINE_BYTES // 4].view(layout.WORLD, -1)
    lines[:, SIGNAL_TOKENS] = torch.tensor(counts, dtype=torch.int32)
    lane.weights.fill_(float("nan"))
    permute.route(lane)


def _listed(lane: Lane, capacity: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, weights and source, behind which nothing was written."""
    wholes = [
        torch.full((capacity + 9, columns), 7, dtype=dtype)
        for columns, dtype in ((lane.layout.TOP_K, torch.int64), (lane.layout.TOP_K, torch.float32), (2, torch.int64))
    ]
    ids, weights, source = (whole[:capacity] for whole in wholes)
    list_records(lane, ids, weights, source)
    assert all((whole[capacity:] == 7).all() for whole in wholes)
    return ids, weights, source


def _rounds(lane: Lane, rounds: Sequence[Sequence[int]], seed: int) -> None:
    """Rounds one after the other on a lane."""
    layout, generator = lane.layout, torch.Generator().manual_seed(seed)
    own = kept(lane, lane_of_records)
    for counts in rounds:
        _came(lane, counts, generator)
        arrived = arrived_on(lane)
        number = int(arrived.number)
        assert number or max(counts) < 5
        for capacity in (number + 20, number, number // 2, 0):
            own.positions[:, 0] = 2**40
            ids, weights, source = _listed(lane, capacity)
            positions, expected_weights, expected_source = arrived.at(arrived.first(capacity))
            assert torch.equal(ids, experts_of(positions, lane.expert_offsets)), (counts, capacity)
            assert_same_bits("weights", expected_weights, weights)
            assert torch.equal(source, expected_source)
            assert own.expert_offsets[-1] == number
            looked_at = torch.arange(layout.MAX_TOKENS) < max(counts)
            rows = own.positions[:, 0].view(layout.WORLD, -1)
            assert torch.equal(rows[:, looked_at], arrived.rows.view(rows.shape)[:, looked_at])
            assert (rows[:, ~looked_at] == 2**40).all() and (own.positions[:, 1:] == -1).all()


def _shapes(comm: Communicator) -> None:
    fewer = (20, 0, 17), (1, 20, 2), (2, 3, 0), (0, 0, 0), (0, 1, 0)
    _rounds(make_lanes(3, 6, 2, 16, 20)[0], fewer, 0)
    _rounds(make_lanes(2, 5, 1, 16, 33, align=4)[1], ((33, 30), (3, 0)), 1)
    _rounds(make_lanes(8, 48, 8, 16, 5, align=8)[5], ((5, 0, 1, 5, 0, 0, 3, 2), (0, 0, 0, 0, 0, 0, 0, 1)), 2)
    _rounds(make_lanes(2, 140, 8, 16, 9)[1], ((9, 4), (2, 2)), 3)  # routed in three blocks of experts


def _many_slots(comm: Communicator) -> None:
    """Chunks of 64, counted in several steps."""
    _rounds(make_lanes(3, 6, 2, 16, 1400)[2], ((900, 1400, 7), (70, 3, 0)), 4)


def _expert_twice(comm: Communicator) -> None:
    """A peer that names an expert twice leaves a hole among a record's positions."""
    lane, generator = make_lanes(1, 4, 3, 16, 2)[0], torch.Generator()
    with mock.patch.object(
        torch, "randint", lambda *_, **__: torch.tensor([[[2, 2, 3], [-1, 1, 1]]], dtype=torch.int32)
    ):
        _rounds(lane, ((2,),), 0)
        _came(lane, (2,), generator)
    ids, weights, _ = _listed(lane, 2)
    assert ids.tolist() == [[2, -1, 3], [1, -1, -1]] and (weights[ids < 0] == 0).all()


def _what_somebody_wrote(comm: Communicator) -> None:
    """Whatever is in tensors that users see, experts are this rank's, and nothing beside the tensors is written."""
    lane, generator = make_lanes(2, 6, 3, 16, 20)[0], torch.Generator().manual_seed(0)
    own, slots = kept(lane, lane_of_records), len(lane.positions)
    for tensor in (lane.expert_offsets, lane.positions):
        for value in (-(2**63), -7, 0, 5, 2**63 - 1):
            _came(lane, (20, 13), generator)
            tensor.fill_(value)
            for capacity in (50, 4):
                ids, _, _ = _listed(lane, capacity)
                assert -1 <= int(ids.min()) and int(ids.max()) < len(lane.expert_counts)
                assert -1 <= int(own.positions.min()) and int(own.positions.max()) < slots


@pytest.mark.parametrize("check", [_shapes, _many_slots, _expert_twice, _what_somebody_wrote], ids=lambda f: f.__name__)
def test_listed_records(check: object) -> None:
    run_ranks(check, 1, env=INTERPRETED, timeout=300)
