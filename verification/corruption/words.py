"""Words that no honest peer writes, at random: lines, headers, planes and records of the direct transport on the CPU.

Every buffer and every tensor lies between pages that nobody may touch (`tests/helpers/guarded.py`), so what is read or
written elsewhere is seen. A call may return, since some words are only other data, or raise an error of thinwire's.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch

from tests.helpers.guarded import guarded, guarded_copy
from thinwire.errors import ThinwireError
from thinwire.wire import WireFormat

WORLD = 3
TIMEOUT, GRACE = 0.002, 0.001
PULLED_TIMEOUT = 0.05  # of ranks that are threads, and may be late
INT32 = (-1, -2, 0, 1, 2, 3, 7, 255, 2**31 - 1, -(2**31), 2**30, 2**16, 0x7FC00000, -0x400000)
INT64 = (*INT32, 2**63 - 1, -(2**63), 2**62, 2**53, 2**40, 2**33, -(2**40))


class Memory:
    """What a transport needs of symmetric memory, in one process."""

    def __init__(self, local: torch.Tensor, buffer_ptrs: torch.Tensor) -> None:
        self.local, self.buffer_ptrs, self.num_bytes, self.closed = local, buffer_ptrs, local.numel(), False

    def held(self) -> object:
        return self.local, self.buffer_ptrs

    def close(self) -> None:
        self.closed = True


def memories(num_bytes: int) -> list[Any]:
    """One of each rank."""
    buffers = [guarded([num_bytes]) for _ in range(WORLD)]
    buffer_ptrs = guarded_copy(torch.tensor([buffer.data_ptr() for buffer in buffers]))
    return [Memory(buffer, buffer_ptrs) for buffer in buffers]


def scribble(rng: random.Random, octets: torch.Tensor, words: int) -> None:
    """Writes hostile words of 4 or 8 bytes at random places of uint8 memory."""
    for _ in range(words):
        size = rng.choice((4, 8))
        place = rng.randrange(octets.numel() // size)
        value = rng.choice(INT32 if size == 4 else INT64) if rng.random() < 0.8 else rng.getrandbits(8 * size - 1)
        octets[: octets.numel() // size * size].view(torch.int32 if size == 4 else torch.int64)[place] = value


@contextmanager
def scribbling(rng: random.Random, octets: torch.Tensor) -> Iterator[None]:
    """Meanwhile another thread writes; kernels let it."""
    stop, own = threading.Event(), random.Random(rng.random())

    def body() -> None:
        while not stop.is_set():
            scribble(own, octets, 8)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


# ---------------------------------------------------------------------------------------------------------------------
# Calls, of which rank 0 is the one that is lied to


def all_to_all(rng: random.Random, triton: bool) -> None:
    """An all-to-all-v whose headers, tails, heads, stuck lines and records are not what the peers wrote."""
    if not triton:
        return pulled_rows(rng)
    from tests.helpers.channels import send_rows
    from thinwire.fused.channel import RecvBuffer, Transfer, channel_layout
    from thinwire.fused.counts import new_rows, receive_segments, send_segments
    from thinwire.fused.device_channel import DeviceChannel

    layout = channel_layout(WORLD, 1280, 2)
    channels: list[Any] = [
        DeviceChannel(memory, layout, rank, TIMEOUT) for rank, memory in enumerate(memories(layout.NUM_BYTES))
    ]
    wire = WireFormat.parse(rng.choice(("none", "none", "int8", "int4:32", "int8:row")))
    tail = torch.Size(rng.choice(((), (64,), (3, 4), (0,)) if not wire.quantized else ((), (64,), (0,))))
    counts = [[rng.choice((0, 1, 2, 5, 9, 700)) for _ in range(WORLD)] for _ in range(WORLD)]

    def place_in(rank: int) -> Callable[[list[int]], Any]:
        def place(received: list[int]) -> RecvBuffer:
            segments = receive_segments(received, None, None)
            like = torch.empty(0)
            if segments.rows * max(1, tail.numel()) > 2**20:
                return RecvBuffer(segments, new_rows(like, segments.rows, tail))  # too large to be filled, or to be had
            return RecvBuffer(segments, guarded((segments.rows, *tail), torch.float32))

        return place

    def begin(rank: int, known: bool, wait: bool) -> Transfer:
        x = guarded((sum(counts[rank]), *tail), torch.float32, fill=0x3F)
        place = place_in(rank)
        placed = place([row[rank] for row in counts]) if known else None
        sends = send_segments(counts[rank], None, x.shape[0])
        return send_rows(channels[rank], x, tail, sends, placed, place, wire, wait=wait)

    unfinished = [begin(rank, False, False) for rank in (1, 2)]
    buffer = channels[0].memory.local
    lines, half = buffer[: layout.HALVES], layout.HEADERS + WORLD * 64  # of epoch 1
    peer = rng.choice((1, 2))
    header = buffer[half + 64 * peer :][:64]
    if rng.random() < 0.5:  # one word of the header in use
        word = rng.choice(((0, 4), (4, 4), (8, 8), (16, 8), (24, 8)))
        field = header[word[0] : word[0] + word[1]].view(torch.int32 if word[1] == 4 else torch.int64)
        field[0] = rng.choice(INT32 if word[1] == 4 else INT64)
    if rng.random() < 0.3:  # a count and pieces that go together
        pieces = rng.choice((1, 2, 3, 2**20, 2**31 - 1))
        step = 4 * max(1, tail.numel())
        header[4:8].view(torch.int32)[0] = pieces - 1
        header[8:16].view(torch.int64)[0] = pieces * 1280 // step + rng.choice((-1, 0, 0, 1))
    if rng.random() < 0.5:  # rings
        for row in (layout.TAILS, layout.HEADS):
            buffer[row + 64 * peer :][:4].view(torch.int32)[0] = rng.choice(INT32)
    if rng.random() < 0.3:
        scribble(rng, lines[layout.HEADERS :] if rng.random() < 0.8 else lines, 3)
    if rng.random() < 0.3:
        scribble(rng, buffer[layout.HALVES :], 20)
    known = rng.random() < 0.4
    try:
        begin(0, known, True).wait()
    except ThinwireError:
        scribble(rng, lines, 2)
        if channels[0].failure is None:  # the call is over, and the channel bears another
            with suppress(ThinwireError):
                begin(0, known, True).wait()
        raise
    finally:
        del unfinished


def collective(rng: random.Random, triton: bool) -> None:
    """A collective of one leg or two."""
    if not triton:
        return pulled_collective(rng)
    from thinwire.fused.collective import DirectCollectives, collective_layout
    from thinwire.fused.partition import gathered_parts, split_parts
    from thinwire.triton_kernels import collective as kernels
    from thinwire.triton_kernels.leg_layout import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER

    layout = collective_layout(WORLD, 1 << 15)
    ends = [DirectCollectives(memory, layout, rank, TIMEOUT) for rank, memory in enumerate(memories(layout.NUM_BYTES))]
    op, elements = rng.choice((ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER)), rng.choice((1, 7, 1000, 5000))
    wire, gather_wire = (WireFormat.parse(rng.choice(("none", "int8", "int4", "int8:row"))) for _ in range(2))
    parts, row = split_parts(elements, WORLD) if op == ALL_REDUCE else gathered_parts([elements] * WORLD)
    whole = sum(parts.counts)
    dtype = rng.choice((torch.float32, torch.bfloat16))

    def call(rank: int) -> None:
        x = guarded([parts.counts[rank] if op == ALL_GATHER else whole], dtype, fill=0x3E)
        out = guarded([parts.counts[rank] if op == REDUCE_SCATTER else whole], dtype)
        end = ends[rank]
        job = end.job(op, parts, row, wire, gather_wire, dtype)
        if rank == 0:
            end.run(job, x, out)
        else:
            kernels.send(end._end, job, x, 0)

    for rank in (1, 2):
        call(rank)
    buffer = ends[0].memory.local
    for peer in (0, 1, 2):  # as if they had sent their sums
        buffer[layout.HEADERS + 64 * peer :][:4].view(torch.int32)[0] = 2 if peer else 0
    if rng.random() < 0.5:
        scribble(rng, buffer[: layout.HALVES], rng.choice((1, 2, 20)))
    if rng.random() < 0.7:
        scribble(rng, buffer[layout.HALVES :], 200)
    if rng.random() < 0.1:
        with scribbling(rng, buffer):
            call(0)
    else:
        call(0)


def pulled_legs(rng: random.Random, piece: int) -> list[Any]:
    """Legs of CPU ranks. Each time that rank 0 has what it waited for, words of its board are others, and records."""
    from thinwire.fused.pulled_legs import PulledLegs, memory_bytes
    from thinwire.triton_kernels.cpu import lines, pull

    shared = memories(memory_bytes(WORLD, piece))
    own, likely = random.Random(rng.random()), rng.choice((0.2, 0.6))
    board = lines.board_bytes(WORLD, 1)
    rings = board - WORLD * lines.RING * lines.LINE_BYTES

    class Lied(PulledLegs):
        def await_peers(self, *arguments: Any, **options: Any) -> None:
            super().await_peers(*arguments, **options)
            local = shared[0].local
            if own.random() < likely:  # a word of a line
                line = local[rings + 64 * own.randrange(WORLD * lines.RING) :][:64].view(torch.int64)
                place = own.randrange(8)
                line[place] = _near(int(line[place])) if own.random() < 0.5 else own.choice(INT64)
            if own.random() < likely / 3:  # any word of a board: who sleeps, has ended, has taken how many lines
                scribble(own, shared[own.randrange(WORLD)].local[: own.choice((rings, board))], own.choice((1, 3)))
            if own.random() < likely / 3:
                scribble(own, shared[own.randrange(WORLD)].local[pull.aligned_slots(board) :], 200)

    def _near(value: int) -> int:
        changed = value + own.choice((-piece, -64, -1, 1, 3, 64, piece, 1 << 20))
        return max(-(1 << 63), min(changed, (1 << 63) - 1))

    made = [
        (PulledLegs if rank else Lied)(memory, rank, piece, own.random() < 0.5, PULLED_TIMEOUT)
        for rank, memory in enumerate(shared)
    ]
    for legs in made:
        legs.grace = GRACE
    return made


def pull_together(rng: random.Random, legs: list[Any], call: Callable[[int], object]) -> None:
    """The call of all ranks, in threads of their own; raises what rank 0 did, or anything that is no named error."""
    found: dict[int, Exception] = {}

    def body(rank: int) -> None:
        try:
            call(rank)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(WORLD)]
    with scribbling(rng, legs[0].memory.local) if rng.random() < 0.1 else nullcontext():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for end in legs:
        end.close()
    for error in sorted(found.values(), key=lambda error: isinstance(error, ThinwireError)):
        if not isinstance(error, ThinwireError) or error is found.get(0):
            raise error


def pulled_rows(rng: random.Random) -> None:
    """Calls of all-to-all-v one after the other, until one ends the memory."""
    from types import SimpleNamespace

    from thinwire.errors import CountsError
    from thinwire.fused.channel import RecvBuffer
    from thinwire.fused.counts import new_rows, receive_segments, send_segments

    piece = rng.choice((128, 1280, 17920))
    legs = pulled_legs(rng, piece)
    wire = WireFormat.parse(rng.choice(("none", "none", "int8", "int4:32", "int8:row")))
    tails = ((), (64,), (3, 4), (0,)) if not wire.quantized else ((64,), (0,), *[()] * (piece > 1280))
    tail, known = torch.Size(rng.choice(tails)), rng.random() < 0.4
    counts = [[rng.choice((0, 1, 2, 5, 9, 700)) for _ in range(WORLD)] for _ in range(WORLD)]

    def place(received: list[int]) -> RecvBuffer:
        segments = receive_segments(received, None, None)
        if segments.rows * max(1, tail.numel()) > 2**20:
            return RecvBuffer(segments, new_rows(torch.empty(0), segments.rows, tail))  # too large to be had, or filled
        return RecvBuffer(segments, guarded((segments.rows, *tail), torch.float32))

    def call(rank: int) -> None:
        for _ in range(4):
            x = guarded((sum(counts[rank]), *tail), torch.float32, fill=0x3F)
            sends = send_segments(counts[rank], None, len(x))
            told: Any = SimpleNamespace(tail=tail, sends=sends, receives=None, wire=wire, route=None)
            placed = place([row[rank] for row in counts]) if known else None
            with suppress(CountsError):  # the call is over, and the memory bears another
                legs[rank].rows.begin(None, told, x, placed, None if known else place, True)()

    pull_together(rng, legs, call)


def pulled_collective(rng: random.Random) -> None:
    """The same of collectives."""
    from thinwire.errors import ConfigMismatch
    from thinwire.fused.partition import gathered_parts, split_parts
    from thinwire.triton_kernels.leg_layout import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER

    legs = pulled_legs(rng, 17920)
    op, elements = rng.choice((ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER)), rng.choice((1, 7, 1000, 50_000))
    wire, gather_wire = (WireFormat.parse(rng.choice(("none", "int8", "int4", "int8:row"))) for _ in range(2))
    parts, row = split_parts(elements, WORLD) if op == ALL_REDUCE else gathered_parts([elements] * WORLD)
    whole, dtype = sum(parts.counts), rng.choice((torch.float32, torch.bfloat16))

    def call(rank: int) -> None:
        for _ in range(4):
            x = guarded([parts.counts[rank] if op == ALL_GATHER else whole], dtype, fill=0x3E)
            out = guarded([parts.counts[rank] if op == REDUCE_SCATTER else whole], dtype)
            with suppress(ConfigMismatch):
                legs[rank].run(legs[rank].job(op, parts, row, wire, gather_wire, dtype), x, out)

    pull_together(rng, legs, call)


def moe_round(rng: random.Random, triton: bool) -> None:
    """A round, kernel by kernel, with what users see of it written into as well."""
    (_stored_round if triton else _pulled_round)(rng)


def _pulled_round(rng: random.Random) -> None:
    """A round of CPU ranks. All that the ranks share is spoilt, the one's own memory too."""
    from tests.helpers.pulled import make_lanes
    from tests.helpers.rounds import Tokens
    from thinwire.errors import RoutingError
    from thinwire.triton_kernels.cpu import rounds
    from thinwire.triton_kernels.round_layout import ABANDONED, DTYPE_CODES

    experts, top_k, hidden, most = rng.choice((3, 7)), rng.choice((1, 3)), rng.choice((40, 72)), 5
    wire, combine_wire = (rng.choice(("none", "int8", "int4", "int8:row")) for _ in range(2))
    grads = rng.random() < 0.3
    lanes = make_lanes(
        WORLD, experts, top_k, hidden, most, wire, combine_wire, align=rng.choice((1, 4)), weight_grads=grads,
        invariant=not grads and rng.random() < 0.3, new_memory=lambda size: guarded([size]),
    )  # fmt: skip
    dtype = rng.choice((torch.float32, torch.bfloat16))
    names = ("index", "expert_counts", "expert_offsets", "positions", "weights", "counts", "said", "filled", "scratch")
    for lane in lanes:
        for name in names:
            setattr(lane, name, guarded_copy(getattr(lane, name)))
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    tokens = [Tokens.random(rng.choice((0, 1, most)), hidden, top_k, experts, dtype, generator) for _ in lanes]
    victim, word = lanes[0], DTYPE_CODES[dtype]
    for lane, mine in zip(lanes, tokens, strict=True):
        rounds.send_tokens(lane, guarded_copy(mine.x), guarded_copy(mine.ids), guarded_copy(mine.weights), word)

    def corrupt(likely: float) -> None:
        for lane in lanes:
            planes, everything = lane.memory[: lane.layout.RECORDS], lane.kept["memory"]
            for octets, words in ((planes[:8], 1), (planes[8:], 30), (everything, 50)):
                if rng.random() < likely:
                    scribble(rng, octets, words)

    corrupt(0.3)
    spoilt = rng.choice(lanes).kept["memory"]
    with scribbling(rng, spoilt) if rng.random() < 0.2 else nullcontext():
        if not rounds.route(victim, dtype, word):
            raise RoutingError("ranks say different things")
    corrupt(0.3)
    used = int(victim.expert_offsets[-1])
    for seen in (victim.index, victim.expert_offsets, victim.expert_counts):
        if rng.random() < 0.3 and seen.numel():
            scribble(rng, seen.view(-1).view(torch.uint8), 2)
    with suppress(RoutingError):  # and the rest of the round must bear it, too
        out = guarded([rng.choice((used, used + 3, max(0, used - 1), victim.index.shape[0] + 2)), hidden], dtype)
        rounds.gather(victim, out, guarded([1], torch.bool))
    rounds.copy_records(victim, dtype)
    rows, dots = guarded([used, hidden], dtype, fill=0x3E), guarded([used], torch.float32)
    with scribbling(rng, spoilt) if rng.random() < 0.1 else nullcontext():
        rounds.send_sums(victim, rows, dtype, dots=dots if grads else None)
    for lane in lanes[1:]:
        rounds.tell(lane, rng.choice((ABANDONED, 1, 1, 2, -9)))
    corrupt(0.3)
    home = guarded(tokens[0].ids.shape, torch.float32) if grads else None
    with scribbling(rng, spoilt) if rng.random() < 0.1 else nullcontext():
        rounds.sum_home(victim, guarded(tokens[0].x.shape, dtype), home)


def _stored_round(rng: random.Random) -> None:
    """A round of Triton's kernels, one by one."""
    from tests.helpers.rounds import Tokens, make_lanes
    from thinwire.errors import PeerTimeout, RoutingError
    from thinwire.triton_kernels import combine as c
    from thinwire.triton_kernels import dispatch as d
    from thinwire.triton_kernels import permute as p
    from thinwire.triton_kernels.round_layout import COMBINE, DISPATCH, Lane
    from thinwire.triton_kernels.signal import REPORT_STATUS, TIMED_OUT

    experts, top_k, hidden, most = rng.choice((3, 7)), rng.choice((1, 3)), rng.choice((40, 72)), 5
    wire, combine_wire = (rng.choice(("none", "int8", "int4", "int8:row")) for _ in range(2))
    lanes = make_lanes(WORLD, experts, top_k, hidden, most, wire, combine_wire, align=rng.choice((1, 4)))
    shared = memories(lanes[0].layout.NUM_BYTES)

    def between_pages(lane: Lane) -> Lane:
        names = ("control", "report", "index", "expert_counts", "expert_offsets", "positions", "weights", "scratch")
        memory = shared[lane.rank]
        return replace(
            lane, buffer=memory.local, buffer_ptrs=memory.buffer_ptrs, home_ptrs=memory.buffer_ptrs,
            **{name: guarded_copy(getattr(lane, name)) for name in names},
        )  # fmt: skip

    lanes = [between_pages(lane) for lane in lanes]
    victim, layout = lanes[0], lanes[0].layout
    dtype = rng.choice((torch.float32, torch.bfloat16))
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    tokens = [Tokens.random(rng.choice((0, 1, most)), hidden, top_k, experts, dtype, generator) for _ in lanes]
    for lane, mine in zip(lanes, tokens, strict=True):
        d.send_tokens(lane, guarded_copy(mine.x), guarded_copy(mine.ids), guarded_copy(mine.weights))
    planes, lines = victim.buffer[layout.IDS : layout.RECORDS], victim.buffer[: layout.IDS]

    def corrupt(likely: float) -> None:
        for octets, words in ((lines, 2), (planes, 30), (victim.buffer[layout.RECORDS :], 50)):
            if rng.random() < likely:
                scribble(rng, octets, words)

    def wait(phase: int) -> None:
        d.wait(victim, phase, TIMEOUT, GRACE)
        status = int(victim.report[REPORT_STATUS])
        if status:
            raise (PeerTimeout if status == TIMED_OUT else RoutingError)("as the report says")

    corrupt(0.4)
    wait(DISPATCH)
    corrupt(0.5)
    if rng.random() < 0.2:
        with scribbling(rng, planes):
            p.route(victim)
    else:
        p.route(victim)
    corrupt(0.3)
    used = int(victim.expert_offsets[-1])
    for seen in (victim.index, victim.expert_offsets, victim.expert_counts, victim.positions):
        if rng.random() < 0.3 and seen.numel():
            scribble(rng, seen.view(-1).view(torch.uint8), 2)
    try:
        out = guarded([rng.choice((used, used + 3, max(0, used - 1), victim.index.shape[0] + 2)), hidden], dtype)
        p.gather(victim, out, guarded([1], torch.bool))
    except RoutingError:
        pass  # and the rest of the round must bear it, too
    rows = guarded([used, hidden], dtype, fill=0x3E)
    if rng.random() < 0.1:
        with scribbling(rng, victim.buffer[layout.IDS :]):
            c.send_sums(victim, rows, dtype)
    else:
        c.send_sums(victim, rows, dtype)
    for lane in lanes[1:]:
        d.close_round(lane)
    corrupt(0.3)
    wait(COMBINE)
    corrupt(0.3)
    c.sum_home(victim, guarded(tokens[0].x.shape, dtype))


CASES = (all_to_all, collective, moe_round)
PULLED = CASES[:2]


def warm_up(triton: bool) -> None:
    """Compiles or loads what the cases need, or who comes first would be late by it."""
    for number in range(0 if triton else 8):
        for case in CASES:
            with suppress(ThinwireError):
                case(random.Random(number), triton)


def run_case(rng: random.Random, triton: bool, cases: Sequence[Callable[..., None]] = CASES) -> tuple[str, str]:
    """Draws a case and runs it: which it was, and "returned" or the name of an error of thinwire's."""
    case = rng.choice(cases)
    try:
        case(rng, triton)
    except ThinwireError as error:
        return case.__name__, type(error).__name__
    return case.__name__, "returned"
