"""The kernels of the direct round, run by Triton's interpreter on ranks that all live in one process.

`tests/helpers/rounds.py` compares every step with plain torch; here are the shapes, the wires and the bad cases.
`TRITON_INTERPRET=1` must be set before Triton is imported, so each test runs its checks in a process of its own.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="interpreting kernels needs Triton")

import torch

from tests.helpers.round_kernels import KERNELS
from tests.helpers.rounds import Tokens, make_lanes, run_round
from tests.helpers.wires import WIRES
from thinwire.comm.communicator import Communicator
from thinwire.testing import run_ranks
from thinwire.triton_kernels.round_layout import COMBINE, DISPATCH, REPORT_BAD_IDS, SIGNAL_DTYPE, SIGNAL_TOKENS, Lane
from thinwire.triton_kernels.signal import (
    CONTROL_EPOCH,
    CONTROL_STATUS,
    MISMATCHED,
    REPORT_EPOCH,
    REPORT_PEERS,
    REPORT_PHASE,
    REPORT_STATUS,
    SIGNAL_LINE_BYTES,
    TIMED_OUT,
)

INTERPRETED = {"TRITON_INTERPRET": "1"}


def _rounds(
    wire: str,
    *,
    world: int = 2,
    num_experts: int = 5,
    top_k: int = 3,
    hidden: int = 150,
    counts: tuple[int, ...] = (4, 3),
    dtype: torch.dtype = torch.bfloat16,
    align: int = 1,
    first_epoch: int = 0,
    rounds: int = 1,
    closing: tuple[int, ...] = (),
    weight_grads: bool = False,
) -> list[Lane]:
    generator = torch.Generator().manual_seed(len(wire) + world)
    lanes = make_lanes(world, num_experts, top_k, hidden, max(counts), wire, align=align, weight_grads=weight_grads)
    experts = torch.randn(num_experts, hidden, generator=generator)
    for lane in lanes:
        lane.control[CONTROL_EPOCH] = first_epoch
        _lines(lane)[:, :, 0] = first_epoch
    for number in range(rounds):
        sent = counts[number % world :] + counts[: number % world]
        tokens = [Tokens.random(count, hidden, top_k, num_experts, dtype, generator) for count in sent]
        run_round(KERNELS, lanes, tokens, experts, closing)
    return lanes


def _lines(lane: Lane) -> torch.Tensor:
    """The lane's lines, int32 [stuck, dispatch, combine][source][word]."""
    size = 3 * lane.layout.WORLD * SIGNAL_LINE_BYTES
    return lane.buffer[lane.layout.STUCK :][:size].view(torch.int32).view(3, lane.layout.WORLD, -1)


def _every_wire(comm: Communicator) -> None:
    for number, wire in enumerate(WIRES):
        _rounds(wire, dtype=(torch.bfloat16, torch.float32, torch.float16)[number % 3])


def _rotated(comm: Communicator) -> None:
    _rounds("int8+h64", world=1, counts=(1,), hidden=70, num_experts=1, top_k=1)


def _shapes(comm: Communicator) -> None:
    _rounds("int8", world=1, counts=(5,), num_experts=3)
    _rounds("int8", world=3, counts=(0, 5, 1), rounds=2, align=4, weight_grads=True)
    _rounds("int8", world=3, counts=(2, 0, 3), num_experts=2, top_k=2)  # a rank without experts
    _rounds("none", world=2, counts=(3, 2), hidden=1, top_k=1, dtype=torch.float16)
    _rounds("int8:row", counts=(1, 1), hidden=9001, num_experts=40, top_k=32)  # two tiles; two blocks of experts
    _rounds("int8", counts=(1, 2), hidden=4300, weight_grads=True)  # sums go home in halves
    _rounds("int8", counts=(70, 3), hidden=20, num_experts=70)  # six chunks


def _fewer_tokens_each_round(comm: Communicator) -> None:
    """What an earlier round filled is cleared, and chunks are numbered by what came."""
    generator = torch.Generator().manual_seed(3)
    for num_experts in (6, 102):  # in one block for each rank, or two
        lanes = make_lanes(3, num_experts, 2, 16, 66, "none", align=4)
        experts = torch.randn(num_experts, 16, generator=generator)
        for counts in ((66, 0, 65), (1, 66, 2), (2, 3, 0), (0, 0, 0), (0, 1, 0)):
            tokens = [Tokens.random(n, 16, 2, num_experts, torch.float32, generator) for n in counts]
            run_round(KERNELS, lanes, tokens, experts)


def _epochs_wrap(comm: Communicator) -> None:
    lanes = _rounds("int8", first_epoch=2**31 - 2, rounds=3)
    assert lanes[0].control[CONTROL_EPOCH] == -(2**31) + 1


def _some_close(comm: Communicator) -> None:
    _rounds("int8", world=3, counts=(3, 2, 4), closing=(1,), weight_grads=True)
    _rounds("int8", counts=(3, 2), closing=(0, 1))


def _mismatches(comm: Communicator) -> None:
    for word, value in ((SIGNAL_DTYPE, 0), (SIGNAL_TOKENS, 5), (SIGNAL_TOKENS, -1)):
        lanes = make_lanes(2, 4, 2, 32, 4)
        for lane in lanes:
            mine = Tokens.random(4, 32, 2, 4, torch.bfloat16, torch.Generator().manual_seed(0))
            KERNELS.send_tokens(lane, mine.x, mine.ids, mine.weights)
        _lines(lanes[0])[1, 1, word] = value
        KERNELS.wait(lanes[0], DISPATCH, 1.0, 0.1)
        assert lanes[0].report[REPORT_STATUS] == lanes[0].control[CONTROL_STATUS] == MISMATCHED
        assert lanes[0].report[REPORT_PEERS : REPORT_PEERS + 2].tolist() == [0, 1]


def _foreign_ids(comm: Communicator) -> None:
    """Ids out of range send nothing; ids that a peer makes up match nothing and address nothing."""
    lanes = make_lanes(2, 4, 2, 32, 4)
    ids = torch.tensor([[0, 4], [2**32, 3], [-2, 1], [-1, -1]])
    tokens = [Tokens(torch.randn(4, 32), ids, torch.rand(4, 2)) for _ in lanes]
    for lane, mine in zip(lanes, tokens, strict=True):
        KERNELS.send_tokens(lane, mine.x, mine.ids, mine.weights)
    plane = lanes[0].buffer[lanes[0].layout.IDS :][: 2 * 4 * 2 * 4].view(torch.int32).view(2, 4, 2)
    assert plane.tolist() == 2 * [[[0, -1], [-1, 3], [-1, 1], [-1, -1]]]
    assert all(lane.report[REPORT_BAD_IDS] == 1 for lane in lanes)
    plane[1] = torch.tensor([[2**31 - 1, -(2**31)], [1, 1], [77, 0], [-5, 3]])
    KERNELS.wait(lanes[0], DISPATCH, 1.0, 0.1)
    KERNELS.route(lanes[0])
    assert lanes[0].expert_counts.tolist() == [2, 2]
    assert lanes[0].index[:5].tolist() == [0, 6, 2, 5, -1]


def _what_somebody_wrote(comm: Communicator) -> None:
    """Whatever users write into the tensors that they see, nothing but the rows given is written."""
    lanes = make_lanes(2, 5, 3, 40, 6, align=4)
    tokens = [Tokens.random(6, 40, 3, 5, torch.float32, torch.Generator().manual_seed(0)) for _ in lanes]
    for lane, mine in zip(lanes, tokens, strict=True):
        KERNELS.send_tokens(lane, mine.x, mine.ids, mine.weights)
    lane = lanes[0]
    KERNELS.wait(lane, DISPATCH, 1.0, 0.1)
    KERNELS.route(lane)
    rows = int(lane.expert_offsets[-1])
    memory, overflow = torch.full((rows + 46, 64), 7.0), torch.tensor(False)
    for tensor in (lane.positions, lane.index, lane.expert_counts, lane.expert_offsets):
        routed = tensor.clone()
        for value in (-(2**63), -1, rows + 6, 2**62, 2**63 - 1):
            tensor.fill_(value)
            for zero_tail in (False, True):
                KERNELS.gather(lane, memory[20:-20, :40], overflow, zero_tail)
        tensor.copy_(routed)
    assert (memory[:20] == 7).all() and (memory[-20:] == 7).all() and (memory[:, 40:] == 7).all()


def _an_expert_named_twice(comm: Communicator) -> None:
    """No rank sends an id twice; where a plane has one, every row that is counted is written all the same."""
    (lane,) = make_lanes(1, 8, 4, 64, 4, wire="none")
    x = torch.randn(2, 64).bfloat16()
    KERNELS.send_tokens(lane, x, torch.tensor([[1, 2, 5, -1], [0, 5, -1, -1]]), torch.rand(2, 4))
    KERNELS.wait(lane, DISPATCH, 5.0, 5.0)
    plane = lane.buffer[lane.layout.IDS :].view(torch.int32)
    plane[:4] = torch.tensor([1, 1, 5, -1])
    KERNELS.route(lane)
    assert lane.expert_counts.tolist() == [1, 1, 0, 0, 0, 2, 0, 0]
    rows, overflow = torch.full((4, 64), 7.0, dtype=torch.bfloat16), torch.tensor(True)
    KERNELS.gather(lane, rows, overflow)
    assert torch.equal(rows, x[torch.tensor([1, 0, 0, 1])])


def _a_silent_rank(comm: Communicator) -> None:
    """Rank 2 sends nothing: the others blame it, tell each other, and their lanes give NaN and send nothing more."""
    lanes = make_lanes(3, 4, 2, 32, 4)
    mine = Tokens.random(4, 32, 2, 4, torch.bfloat16, torch.Generator().manual_seed(0))
    for lane in lanes[:2]:
        KERNELS.send_tokens(lane, mine.x, mine.ids, mine.weights)
    _lines(lanes[0])[0, 1, 0] = 1  # rank 1 has said that it is stuck, or rank 0 would blame nobody else by luck
    for lane in lanes[:2]:
        KERNELS.wait(lane, DISPATCH, 0.05, 0.05)
        peers = lane.report[REPORT_PEERS:].view(3, 3)
        assert lane.report[[REPORT_STATUS, REPORT_EPOCH, REPORT_PHASE]].tolist() == [TIMED_OUT, 1, DISPATCH]
        assert peers[:2].tolist() == [[0, 0, 1], [0, 0, 1]]
    assert _lines(lanes[2])[0, :, :4].tolist() == [[1, 1, DISPATCH, 1], [1, 1, DISPATCH, 1], [0, 0, 0, 0]]
    before = [lane.buffer.clone() for lane in lanes]
    lane = lanes[0]
    KERNELS.send_tokens(lane, mine.x, mine.ids, mine.weights)
    KERNELS.route(lane)
    tokens, overflow, y = torch.zeros(3, 32), torch.tensor(True), torch.zeros(4, 32)
    KERNELS.gather(lane, tokens, overflow)
    KERNELS.send_sums(lane, tokens, torch.float32)
    KERNELS.close_round(lane)
    KERNELS.wait(lane, COMBINE, 5.0, 5.0)
    KERNELS.sum_home(lane, y)
    assert tokens.isnan().all() and y.isnan().all() and not overflow
    assert lane.expert_offsets.tolist() == [0, 0, 0] and (lane.index == -1).all()
    assert all(torch.equal(old, lane.buffer) for old, lane in zip(before, lanes, strict=True))
    assert lane.control[CONTROL_EPOCH] == 1


@pytest.mark.parametrize(
    "check",
    [
        _rotated,
        pytest.param(_every_wire, marks=pytest.mark.exhaustive),
        pytest.param(_shapes, marks=pytest.mark.exhaustive),
        pytest.param(_fewer_tokens_each_round, marks=pytest.mark.exhaustive),
        pytest.param(_epochs_wrap, marks=pytest.mark.exhaustive),
        pytest.param(_some_close, marks=pytest.mark.exhaustive),
        _mismatches,
        _foreign_ids,
        _what_somebody_wrote,
        _an_expert_named_twice,
        _a_silent_rank,
    ],
)
def test_interpreted_rounds(check: object) -> None:
    run_ranks(check, 1, env=INTERPRETED, timeout=300)  # type: ignore[arg-type]
