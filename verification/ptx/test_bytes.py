"""Global bytes that compiled kernels load and store, beside those that the routing makes necessary.

A byte that a program loads again counts once, as it is in its cache; one that it stores again counts again. Words of
control and of signals that every program looks at are necessary for each.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

pytest.importorskip("triton", reason="compiling kernels needs Triton")

import torch

from tests.helpers.collective_calls import Call
from tests.helpers.rounds import Tokens, arrivals, make_lanes
from thinwire.triton_kernels import combine, dispatch, permute
from thinwire.triton_kernels.leg_layout import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, SIGNATURE_WORDS
from thinwire.triton_kernels.round_layout import COMBINE, DISPATCH, Lane
from thinwire.wire import WireFormat
from verification.ptx.collectives import Collectives
from verification.ptx.device import Device
from verification.ptx.meter import Launched

WORLD, EXPERTS, TOP_K, HIDDEN, COUNTS = 2, 8, 4, 2048, (24, 17)
ROW = 2 * HIDDEN
PROGRAMS = 3  # of every launch but waits, as launchers choose on a CPU
FLAGS = 4 * WORLD
#: How many rows of the gathered tensor nobody needs.
ROOM = 20


@dataclass(frozen=True)
class Needed:
    """Bytes that a launch must load and store, and those that one is known to move that exceeds them."""

    kernel: str
    loaded: int
    stored: int
    known: dict[str, int] = field(default_factory=dict)

    def check(self, launch: Launched) -> None:
        """No more than 5 % above; what is known to exceed them must do so, or the mark has to go."""
        assert launch.kernel == self.kernel
        for what, moved in (("loaded", launch.loaded.by_program), ("stored", launch.stored.requested)):
            needed = getattr(self, what)
            least, most = 0.95 * needed, 1.05 * needed
            if what in self.known:
                least, most = most, 1.05 * self.known[what]
            assert least <= moved <= most, f"{self.kernel} {what} {moved} bytes of {needed}"


@pytest.fixture(scope="module")
def launches() -> tuple[list[Launched], list[Needed]]:
    """What rank 1 launches in a round, and what that needs."""
    device, generator = Device(ranks=WORLD, metered=True), torch.Generator().manual_seed(1)
    lanes = make_lanes(WORLD, EXPERTS, TOP_K, HIDDEN, max(COUNTS), dtype=torch.bfloat16)
    for lane in lanes:
        device.register(f"rank {lane.rank}'s buffer", lane.buffer)
    tokens = [
        Tokens(
            torch.randn(count, HIDDEN, generator=generator).bfloat16(),
            torch.rand(count, EXPERTS, generator=generator).topk(TOP_K).indices,
            torch.rand(count, TOP_K, generator=generator),
        )
        for count in COUNTS
    ]
    with device.patch():
        for device.rank, (lane, mine) in enumerate(zip(lanes, tokens, strict=True)):
            dispatch.send_tokens(lane, mine.x, mine.ids, mine.weights)
        rows = []
        for device.rank, lane in enumerate(lanes):
            dispatch.wait(lane, DISPATCH, 1.0, 0.1)
            permute.route(lane)
            rows.append(torch.empty(int(lane.expert_offsets[-1]) + ROOM, HIDDEN, dtype=torch.bfloat16))
            permute.gather(lane, rows[-1], torch.tensor(False))
        for device.rank, (lane, expert_out) in enumerate(zip(lanes, rows, strict=True)):
            combine.send_sums(lane, expert_out, expert_out.dtype)
        for device.rank, (lane, mine) in enumerate(zip(lanes, tokens, strict=True)):
            dispatch.wait(lane, COMBINE, 1.0, 0.1)
            combine.sum_home(lane, torch.empty_like(mine.x))
    return [launch for launch in device.meters if launch.rank == 1], _of_round(lanes, tokens)


def _of_round(lanes: list[Lane], tokens: list[Tokens]) -> list[Needed]:
    lane, mine, came = lanes[1], COUNTS[1], sum(COUNTS)
    slots, plan, _ = arrivals(lane, tokens)
    records, rows, local = len(slots), plan.num_rows, len(lane.expert_counts)
    sent = sum(int((arrivals(each, tokens)[0] // max(COUNTS) == 1).sum()) for each in lanes)
    record, sum_bytes = lane.layout.RECORD_BYTES, lane.layout.SUM_BYTES
    counts = sum(-(-count // lane.layout.chunk) for count in COUNTS) * local * 4  # of chunks, by expert
    planes, words = came * TOP_K * 4, PROGRAMS * (FLAGS + 12)
    return [
        Needed("send_tokens_kernel", mine * (ROW + TOP_K * 12), sent * record + WORLD * mine * TOP_K * 8 + 3 * FLAGS),
        Needed("wait_kernel", 3 * FLAGS + 8, 0),
        Needed("count_kernel", planes + words, came * TOP_K * 8 + counts),
        # Each program adds up the counts of all chunks, which takes less time than a launch for it.
        Needed("place_kernel", 2 * planes + counts + words, rows * (8 + 8 + 4) + (2 * local + 1) * 8,
               {"loaded": 2 * planes + PROGRAMS * counts + words}),
        Needed("gather_kernel", records * record + rows * 8, rows * ROW),
        Needed("send_sums_kernel", rows * (ROW + 12) + planes, records * sum_bytes + 2 * FLAGS),
        Needed("wait_kernel", 2 * FLAGS + 8, 4),
        Needed("sum_home_kernel", sent * sum_bytes + mine * TOP_K * 4, mine * ROW),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("number", "kernel"),
    list(enumerate(["send_tokens", "wait", "count", "place", "gather", "send_sums", "wait", "sum_home"])),
)
def test_kernels_of_a_round_move_what_they_must(
    launches: tuple[list[Launched], list[Needed]], number: int, kernel: str
) -> None:
    found, needed = launches
    assert len(found) == len(needed) and found[number].kernel == f"{kernel}_kernel"
    needed[number].check(found[number])


@pytest.mark.parametrize(
    "op", [ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER], ids=["all-reduce", "reduce-scatter", "all-gather"]
)
def test_kernels_of_a_collective_move_what_they_must(op: int) -> None:
    row, rows = 1024, (8, 5)
    call = Call(op, tuple(row * each for each in rows), dtype=torch.bfloat16, row=row, rows_per_chunk=8, num_programs=3)
    record, values = WireFormat.parse("int8").row_bytes(row, torch.bfloat16), 2 * row
    device = Device(ranks=WORLD, metered=True)
    with device.patch(queued=True):
        collectives = Collectives.of(device, WORLD, 8 * -(-record // 128) * 128)
        collectives.queue(call)
        device.run_queued()
    own, every, header = rows[1], sum(rows), WORLD * (4 + 4 + 8 + 8 * SIGNATURE_WORDS)
    # Status, epoch, an address and flags, as no wait here looks so often that it looks at stuck lines; then what the
    # peers are doing.
    wait = Needed("wait_kernel", 16 + FLAGS, 0)
    first_wait = Needed("wait_kernel", wait.loaded + WORLD * 8 * SIGNATURE_WORDS, 0)
    scatter = Needed("send_kernel", every * values, every * record + header)
    send_to_all = Needed("send_kernel", own * values, WORLD * own * record + header)
    sums = WORLD * own * record + FLAGS if op == ALL_REDUCE else own * values
    reduce = Needed("reduce_kernel", WORLD * own * record, sums)
    gather = Needed("gather_recv_kernel", every * record, every * values)
    needed = {
        ALL_REDUCE: [scatter, first_wait, reduce, wait, gather],
        REDUCE_SCATTER: [scatter, first_wait, reduce],
        ALL_GATHER: [send_to_all, first_wait, gather],
    }[op]
    found = [launch for launch in device.meters if launch.rank == 1]
    for each, launch in zip(needed, found, strict=True):
        each.check(launch)
