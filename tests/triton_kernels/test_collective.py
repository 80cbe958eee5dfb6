"""The kernels of the direct collectives, interpreted, between ranks that are processes and share memory.

`TRITON_INTERPRET=1` must be set before Triton is imported, so each test runs its checks in processes of their own. Rows
and slots are small, so that a call is several chunks; what no rank may read is overwritten before each call.
"""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import product

import pytest

pytest.importorskip("triton", reason="interpreting kernels needs Triton")

import torch

from tests.helpers.collective_calls import Call
from tests.helpers.speeds import exhaustive_but
from tests.helpers.wires import DTYPES, assert_same_bits
from thinwire.comm import Communicator, SymmetricMemory, allocate
from thinwire.fused.collective import collective_layout
from thinwire.testing import run_ranks
from thinwire.triton_kernels.codec_reference import quantize_reference
from thinwire.triton_kernels.collective import gather_recv, reduce, send
from thinwire.triton_kernels.leg_layout import (
    ALL_GATHER,
    ALL_REDUCE,
    FIRST_LEG,
    HEADER_SIGNATURE,
    REDUCE_SCATTER,
    SECOND_LEG,
    Endpoint,
    Job,
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

INTERPRETED = {"TRITON_INTERPRET": "1"}
WIRES = ("int8", "int8:row", "int8:32", "int4", "fp8", "none", "int8+h64", "int6")
OPS = (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER)
POISON = 0xFF


class Ranks:
    """This rank's lane, and calls on it."""

    def __init__(self, comm: Communicator, slot_bytes: int = 1024) -> None:
        layout = collective_layout(comm.size, slot_bytes)
        self.comm = comm
        self.memory: SymmetricMemory = allocate(comm, layout.NUM_BYTES)
        self.lane = Endpoint.of(layout, comm.rank, self.memory.local, self.memory.buffer_ptrs)
        self.timeout, self.grace = 20.0, 1.0

    @property
    def leg(self) -> int:
        return int(self.lane.control[CONTROL_EPOCH])

    @property
    def status(self) -> int:
        assert self.lane.control[CONTROL_STATUS] == self.lane.report[REPORT_STATUS]
        return int(self.lane.report[REPORT_STATUS])

    def set_leg(self, leg: int) -> None:
        """As if as many legs had gone by."""
        lane = self.lane
        lane.control[CONTROL_EPOCH] = leg
        lines = lane.buffer[lane.layout.HEADERS : lane.layout.HALVES].view(torch.int32)
        lines[: 2 * self.comm.size * (SIGNAL_LINE_BYTES // 4)].view(2 * self.comm.size, -1)[:, 0] = leg
        self.comm.barrier()

    def await_word(self, line: int, value: int) -> None:
        """Until rank 0 has stored a flag into a row of lines here."""
        flag, deadline = self.lane.buffer[line:].view(torch.int32), time.monotonic() + 20.0
        while flag[0] != value:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def poison_slots(self) -> None:
        self.comm.barrier()
        self.lane.buffer[self.lane.layout.HALVES :] = POISON
        self.comm.barrier()

    def launch(self, call: Call, job: Job, x: torch.Tensor, out: torch.Tensor) -> None:
        """All chunks of a call."""
        call.launch(self.lane, job, x, out, self.timeout, self.grace)

    def check(self, call: Call, poison: bool = True) -> None:
        """One call, compared with plain torch."""
        job = call.job()
        x, out = call.tensors(self.comm.rank)
        before, expected, leg = x.clone(), call.result(self.comm.rank, out), self.leg
        if poison:
            self.poison_slots()
        self.launch(call, job, x, out)
        assert self.status == RUNNING and (self.leg - leg) % 2**32 == job.num_chunks * (1 + (call.op == ALL_REDUCE))
        assert_same_bits(str(call), expected, out)
        if not call.in_place:
            assert_same_bits("the input", before, x)
        if poison:
            self.check_slots(call, job)
            self.comm.barrier()  # the next call's legs may lie where these were

    def check_slots(self, call: Call, job: Job) -> None:
        """That the slots of the last chunk's legs hold the references' records, padding included."""
        layout, world, first = self.lane.layout, self.comm.size, (job.num_chunks - 1) * job.rows_per_chunk
        last = self.leg & 1
        for source in range(world):
            second_leg = layout.HALVES + (last * world + source) * layout.SLOT_BYTES
            first_leg = layout.HALVES + ((last ^ (call.op == ALL_REDUCE)) * world + source) * layout.SLOT_BYTES
            for op, begin, wire in (
                (ALL_GATHER, first_leg, job.gather_wire),
                (ALL_REDUCE, first_leg, job.wire),
                (ALL_REDUCE, second_leg, job.gather_wire),
                (REDUCE_SCATTER, first_leg, job.wire),
            ):
                if op != call.op:
                    continue
                if begin == first_leg and op != ALL_GATHER:
                    records = quantize_reference(call.rows(call.inputs()[source], self.comm.rank), wire)
                else:
                    records = call.gathered(source)
                records = records[first:].reshape(-1)
                got = self.lane.buffer[begin:][: len(records)]
                name = f"{call}: records from rank {source}"
                if wire.quantized:
                    assert torch.equal(records, got), name
                else:
                    assert_same_bits(name, records.view(call.dtype), got.view(call.dtype))


# ---------------------------------------------------------------------------------------------------------------------
# What comes out


def _every_wire(comm: Communicator) -> None:
    ranks = Ranks(comm)
    for number, (wire, dtype) in enumerate(product(WIRES, DTYPES)):
        op = OPS[(number + number // 3) % 3]
        call = Call(
            op,
            (130, 301) if number % 4 == 0 else (129, 77),
            wire,
            wire,
            dtype,
            gap=number % 4,
            num_programs=1 + number % 5,
            seed=number,
        )
        ranks.check(call)


@pytest.mark.exhaustive
def test_every_wire_and_dtype_gives_the_references_bits() -> None:
    run_ranks(_every_wire, 2, env=INTERPRETED, timeout=120)


def _two_formats(comm: Communicator) -> None:
    ranks = Ranks(comm)
    pairs = [(wire, "none") for wire in WIRES] + [
        ("none", "int8"),
        ("int8", "int4"),
        ("int4", "int8:row"),
        ("fp8", "int8:32"),
        ("int8", "int8:row+h64"),
        ("int10+h64", "int4"),
    ]
    for number, (wire, gather_wire) in enumerate(pairs):
        ranks.check(Call(ALL_REDUCE, (200, 70), wire, gather_wire, DTYPES[number % 3], num_programs=2, seed=number))


@pytest.mark.exhaustive
def test_sums_travel_in_a_format_of_their_own() -> None:
    run_ranks(_two_formats, 2, env=INTERPRETED, timeout=120)


def _parts(comm: Communicator) -> None:
    ranks = Ranks(comm)
    three = comm.size == 3
    for number, counts in enumerate([(1, 0, 513), (0, 0, 0), (128, 256, 5), (0, 300, 0)]):
        for op in OPS if three else OPS[number % 3 :][:1]:
            counts_ = counts if three else (*counts, number)
            wire = "none" if number == 0 else "int8:32"  # exact rows show in which order they are added
            call = Call(op, counts_, wire, wire, DTYPES[(number + op) % 3], gap=number, seed=number)
            ranks.check(replace(call, in_place=(number + op) % 2 == 0, num_programs=1 + (number + op) % 5))


@pytest.mark.exhaustive
@pytest.mark.parametrize("world", [3, 4])
def test_ragged_and_empty_parts_in_place_or_not(world: int) -> None:
    run_ranks(_parts, world, env=INTERPRETED, timeout=120)


def _rows(comm: Communicator) -> None:
    ranks = Ranks(comm, 2048)
    rows = ((70, "int8+h64"), (200, "int8:row"), (40, "none"), (1, "int4"), (64, "int8"))
    for number, (row, wire) in enumerate(rows):  # the rotated ones travel in both legs
        counts = (2 * row + 3, row - 1)[: comm.size]
        ranks.check(Call(OPS[number % 3], counts, wire, wire, row=row, rows_per_chunk=3, seed=row))


@pytest.mark.parametrize("world", exhaustive_but([2], [1, 2]))
def test_rows_of_any_length(world: int) -> None:
    run_ranks(_rows, world, env=INTERPRETED, timeout=120)


def _long_rows(comm: Communicator) -> None:
    ranks = Ranks(comm, 12032)
    for op, wire in ((ALL_REDUCE, "int8:row"), (REDUCE_SCATTER, "int8"), (ALL_REDUCE, "int8:row+h64")):
        gather_wire = wire if op == ALL_REDUCE else "int8:row"
        ranks.check(Call(op, (9000, 11), wire, gather_wire, row=9000, rows_per_chunk=1))


@pytest.mark.exhaustive
def test_a_row_of_two_tiles_has_one_scale() -> None:
    run_ranks(_long_rows, 2, env=INTERPRETED, timeout=120)


def _extremes(comm: Communicator) -> None:
    """Sums beyond the dtype's range: finite where the rows are quantised, infinite where they are exact."""
    ranks = Ranks(comm)
    for dtype, wire, gather_wire in (
        (torch.float16, "int8", "none"),
        (torch.float16, "none", "none"),
        (torch.float16, "none", "int8"),
        (torch.float32, "int8", "int8"),
    ):
        for op in (ALL_REDUCE, REDUCE_SCATTER):
            call, largest = Call(op, (128, 128), wire, gather_wire, dtype), torch.finfo(dtype).max
            job, out = call.job(), torch.zeros(256 if op == ALL_REDUCE else 128, dtype=dtype)
            ranks.launch(call, job, torch.full((256,), 0.9 * largest, dtype=dtype), out)
            finite = wire == "int8" or (gather_wire == "int8" and op == ALL_REDUCE)
            lowest = (1 - 2**-7) * largest if finite else float("inf")
            assert (out >= lowest).all() and bool(out.isfinite().all()) == finite, (wire, gather_wire, op, out)


@pytest.mark.exhaustive
def test_sums_saturate_where_rows_are_quantised() -> None:
    run_ranks(_extremes, 2, env=INTERPRETED, timeout=120)


def _wider(comm: Communicator) -> None:
    ranks = Ranks(comm)
    for dtype, wire in ((torch.bfloat16, "none"), (torch.float16, "none"), (torch.bfloat16, "int8")):
        ranks.check(Call(REDUCE_SCATTER, (301, 70), wire, dtype=dtype, out_dtype=torch.float32))


def test_sums_of_sixteen_bits_may_be_float32() -> None:
    run_ranks(_wider, 2, env=INTERPRETED, timeout=120)


def _mixed_formats(comm: Communicator) -> str:
    ranks = Ranks(comm)
    try:
        ranks.check(Call(ALL_REDUCE, (64,), "int8", "int4", row=64))
    except ValueError as error:
        return str(error)
    return ""


def test_rows_shorter_than_a_group_of_one_of_two_formats_are_refused() -> None:
    (told,) = run_ranks(_mixed_formats, 1, env=INTERPRETED, timeout=60)
    assert told == (
        "rows of 64 elements, of which int8 makes 128 and int4 64; expected rows of at least a group of either"
    )


# ---------------------------------------------------------------------------------------------------------------------
# Epochs


def _many(comm: Communicator, last: int) -> int:
    """Calls of all kinds, nothing between them, and ranks of different speed."""
    ranks = Ranks(comm)
    for number in range(last):
        op = OPS[(number * number // 2) % 3]
        call = Call(op, (257, 3, 130), "int8:32", "int4", torch.bfloat16, rows_per_chunk=1 + number % 2, seed=number)
        if (number + comm.rank) % 3 == 0:
            time.sleep(0.02)
        job, (x, out) = call.job(), call.tensors(comm.rank)
        expected = call.result(comm.rank, out)
        ranks.launch(call, job, x, out)
        assert_same_bits(str(call), expected, out)
    return ranks.leg


@pytest.mark.exhaustive
def test_calls_of_all_kinds_follow_one_another() -> None:
    legs = run_ranks(_many, 3, 9, env=INTERPRETED, timeout=120)
    assert len(set(legs)) == 1 and legs[0] > 15


def _one_is_ahead(comm: Communicator) -> None:
    """Rank 0 has stored the next leg before rank 1 looks at the last."""
    ranks = Ranks(comm)
    for op in (REDUCE_SCATTER, ALL_GATHER):
        calls = [Call(op, (100, 100), "int8:32", seed=seed) for seed in (1, 2)]
        tensors = [call.tensors(comm.rank) for call in calls]
        ranks.poison_slots()
        for number, (call, (x, out)) in enumerate(zip(calls, tensors, strict=True)):
            expected, job = call.result(comm.rank, out), call.job()
            send(ranks.lane, job, x, 0)
            if comm.rank == 1 and number == 0:
                line = (ranks.leg + 1) % 2 * comm.size * SIGNAL_LINE_BYTES
                ranks.await_word(ranks.lane.layout.HEADERS + line, ranks.leg + 1)
            (gather_recv if op == ALL_GATHER else reduce)(ranks.lane, job, out, 0, 20.0, 1.0)
            assert_same_bits(str(call), expected, out)


def test_what_a_late_rank_has_not_read_is_not_overwritten() -> None:
    run_ranks(_one_is_ahead, 2, env=INTERPRETED, timeout=120)


def _wraps(comm: Communicator) -> None:
    ranks = Ranks(comm)
    ranks.set_leg(2**31 - 3)
    for number in range(3):
        ranks.check(Call(OPS[number], (300, 40), seed=number))
    assert ranks.leg == 2**31 - 3 + (2 + 1 + 1) * 2 - 2**32


def test_legs_wrap() -> None:
    run_ranks(_wraps, 2, env=INTERPRETED, timeout=120)


# ---------------------------------------------------------------------------------------------------------------------
# Ranks that disagree, and ranks that stay away


def _at_once(comm: Communicator) -> None:
    """In one launch, in turn by all ranks and by all but one."""
    ranks = Ranks(comm, 2048)
    for number, (op, counts) in enumerate(product(OPS, [(300, 257), (128, 0), (1, 5)])):
        call = Call(
            op,
            counts,
            ("int8", "none")[number % 2],
            gap=number % 3,
            seed=number,
            rows_per_chunk=3,
            in_place=number % 2 == 0,
        )
        ranks.check(replace(call, at_once=number % 3 > 0 or comm.rank == 0))


def test_one_launch_gives_the_same_bits_also_beside_ranks_in_several() -> None:
    run_ranks(_at_once, 2, env=INTERPRETED, timeout=120)


def _disagree(comm: Communicator) -> None:
    ranks = Ranks(comm)
    ranks.check(Call(REDUCE_SCATTER, (300, 300, 300)))
    call = Call(ALL_REDUCE, (260, 260, 260))
    others: list[tuple[int, tuple[int, ...]]] = [
        (ALL_GATHER, call.job().signature),
        (REDUCE_SCATTER, call.job().signature),
    ]
    others += [(call.op, tuple(2**40 + n if n == word else n for n in range(4))) for word in range(4)]
    for number, (op, signature) in enumerate(others):
        odd = comm.rank == number % 3
        ours = replace(call, op=op) if odd else call
        changed = ours.job().signature if number < 2 else signature if odd else (0, 1, 2, 3)
        job, (x, out) = replace(ours.job(), signature=changed), ours.tensors(comm.rank)  # type: ignore[arg-type]
        leg = ranks.leg
        ranks.launch(ours, job, x, out)
        assert ranks.status == MISMATCHED and ranks.leg == leg + 1, number
        assert ranks.lane.report[[REPORT_EPOCH, REPORT_PHASE]].tolist() == [leg + 1, FIRST_LEG]
        blamed = ranks.lane.report[REPORT_PEERS : REPORT_PEERS + 3].tolist()
        assert blamed == [int((peer == number % 3) != odd) for peer in range(3)]
        assert out.isnan().all()
        ranks.lane.control[CONTROL_STATUS] = ranks.lane.report[REPORT_STATUS] = RUNNING
        ranks.check(replace(call, op=OPS[number % 3], counts=(3, 0, 1), seed=number), poison=False)  # and all go on


@pytest.mark.exhaustive
def test_ranks_that_disagree_all_notice_in_that_leg_and_can_go_on() -> None:
    run_ranks(_disagree, 3, env=INTERPRETED, timeout=120)


def _a_silent_rank(comm: Communicator, leg: int, at_once: bool) -> None:
    ranks = Ranks(comm)
    ranks.check(Call(ALL_REDUCE, (100, 100, 100)))
    # Ranks of a busy machine may take this long for a leg, and come this much later than each other to their giving up.
    ranks.timeout, ranks.grace = (2.0, 2.0)
    call = Call(ALL_REDUCE, (300, 300, 300), gap=1, rows_per_chunk=3, at_once=at_once)
    job, (x, out) = call.job(), call.tensors(comm.rank)
    if comm.rank == 2 and leg == SECOND_LEG:
        send(ranks.lane, job, x, 0)
    comm.barrier()
    if comm.rank != 2:
        time.sleep(0.2 * comm.rank)
        ranks.launch(call, job, x, out)
        assert ranks.status == TIMED_OUT
        assert ranks.lane.report[[REPORT_EPOCH, REPORT_PHASE]].tolist() == [3 + leg, leg]
        assert ranks.lane.report[REPORT_PEERS : REPORT_PEERS + 3].tolist() == [0, 0, 1]
        parts = torch.zeros_like(out, dtype=torch.bool)
        for start in call.starts:
            parts[start : start + 300] = True
        assert out[parts].isnan().all() and (out[~parts] == 7).all()
    comm.barrier()
    before = ranks.lane.buffer.clone()
    comm.barrier()
    if comm.rank != 2:
        started, before_leg = time.monotonic(), ranks.leg
        ranks.timeout = 20.0
        for op in OPS:
            again = replace(call, op=op)
            x, out = again.tensors(comm.rank)
            ranks.launch(again, again.job(), x, out)
            assert out.isnan().any()
        assert ranks.leg == before_leg and ranks.status == TIMED_OUT and time.monotonic() - started < 10
    comm.barrier()
    assert torch.equal(before, ranks.lane.buffer)


@pytest.mark.exhaustive
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("leg", [FIRST_LEG, SECOND_LEG])
def test_survivors_name_a_silent_rank_and_store_nothing_more(leg: int, at_once: bool) -> None:
    run_ranks(_a_silent_rank, 3, leg, at_once, env=INTERPRETED, timeout=120)


def _late_but_alive(comm: Communicator) -> None:
    """A rank that is later than others have patience for one leg, but in time, is waited for."""
    ranks = Ranks(comm)
    for number in range(3):
        time.sleep(0.3 * (comm.rank == number % 2))
        ranks.check(Call(OPS[number], (100, 3), seed=number), poison=False)
    line = ranks.lane.buffer[ranks.lane.layout.HEADERS :][: 2 * 2 * SIGNAL_LINE_BYTES].view(torch.int64).view(2, 2, -1)
    words = line[ranks.leg & 1, :, HEADER_SIGNATURE // 2 : HEADER_SIGNATURE // 2 + 4]
    assert words.tolist() == [list(Call(OPS[2], (100, 3), seed=2).job().signature)] * 2


@pytest.mark.exhaustive
def test_a_first_line_says_what_its_rank_does() -> None:
    run_ranks(_late_but_alive, 2, env=INTERPRETED, timeout=120)
