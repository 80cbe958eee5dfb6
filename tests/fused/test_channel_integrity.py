"""The direct all-to-all-v with checksums: what is corrupted in a rank's memory gives an error, never a wrong result."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("numba", reason="the direct transport of CPU ranks needs numba")

import torch

from tests.fused.test_all_to_all_channel import Group, exchange
from tests.helpers.speeds import exhaustive_but
from tests.helpers.tampering import CHANGES
from thinwire.errors import IntegrityError, PeerTimeout
from thinwire.fused.channel import channel_layout
from thinwire.triton_kernels.checksum_seed import CHECKSUM_BYTES
from thinwire.triton_kernels.signal import SIGNAL_LINE_BYTES
from thinwire.wire import WireFormat

WORLD, VICTIM, SLOTS = 3, 1, 2
#: Wire, shape of a row, bytes of a piece, and rows from each rank to each: none, one piece, and more than the ring has.
FORMS: dict[str, tuple[str, tuple[int, ...], int, list[list[int]]]] = {
    "int8": ("int8", (64,), 640, [[4, 12, 0], [2, 5, 1], [7, 3, 0]]),
    "none": ("none", (7,), 9088, [[900, 1300, 0], [0, 40, 300], [5, 800, 2]]),
    "flat": ("int8:32", (), 2304, [[3000, 7000, 0], [10, 1024, 0], [0, 5000, 9]]),
}
each_form = pytest.mark.parametrize("form", FORMS)
Tamper = Callable[["Calls"], None]


class Calls:
    """A group of channels, and calls on it, in the midst of which something happens to the victim's memory."""

    def __init__(self, form: str, checksums: bool = True, timeout: float = 20.0) -> None:
        spec, self.tail, piece_bytes, self.counts = FORMS[form]
        self.wire = WireFormat.parse(spec)
        self.group = Group(WORLD, piece_bytes, SLOTS, timeout, checksums)
        self.layout, self.memory = self.group.layout, self.group.buffers[VICTIM]
        self.epoch = 0

    def call(self, tamper: Tamper | None = None) -> list[Any]:
        """What each rank gets, or the error that it raises."""
        self.epoch += 1
        return self.group.run(self._of_rank, tamper)

    def _of_rank(self, rank: int, channel: Any, tamper: Tamper | None) -> Any:
        sends, receives = self.counts[rank], [row[rank] for row in self.counts]
        generator = torch.Generator().manual_seed(10 * self.epoch + rank)
        x = torch.randn(sum(sends), *self.tail, generator=generator)
        try:
            transfer = exchange(channel, x, sends, receives, wire=self.wire, wait=False)
            self.group.meeting.wait(30)
            if rank == VICTIM and tamper is not None:
                self._until_rings_are_full(channel)
                tamper(self)
            return transfer.wait()
        except (IntegrityError, PeerTimeout) as error:
            return error

    def _until_rings_are_full(self, channel: Any) -> None:
        received = channel._peers[channel._kernels.PEERS.index("received")]
        until = time.monotonic() + 30
        for peer in {*range(WORLD)} - {VICTIM}:
            pieces = int(self.group.channels[peer]._peers[channel._kernels.PEERS.index("end_out"), VICTIM]) - 1
            tail = self.memory[self.layout.TAILS + SIGNAL_LINE_BYTES * peer :][:4].view(torch.int32)
            while int(tail[0]) - int(received[peer]) < min(pieces, SLOTS):
                assert time.monotonic() < until
                time.sleep(1e-4)

    def regions(self) -> dict[str, torch.Tensor]:
        """Parts of the victim's memory that are read in this call, of all sources; views."""
        layout, half = self.layout, self.epoch & 1
        lines = layout.HEADERS + half * WORLD * SIGNAL_LINE_BYTES
        halves = layout.HALVES + half * WORLD * layout.SLOT_BYTES
        return {
            "headers": self.memory[lines:][: WORLD * SIGNAL_LINE_BYTES].view(WORLD, -1)[:, 4:],
            "half": self.memory[halves:][: WORLD * layout.SLOT_BYTES].view(WORLD, -1),
            "rings": self.memory[layout.RINGS : layout.CHECKSUMS].view(WORLD, -1),
            "sums": self.memory[layout.CHECKSUMS :].view(WORLD * (2 + SLOTS), -1),
        }


def expected_of(form: str) -> list[list[Any]]:
    plain = Calls(form, checksums=False)
    return [plain.call() for _ in range(3)]


def check(expected: list[Any], results: list[Any], what: str) -> bool:
    """Whether the victim raised; what ranks returned is right, and nothing else was raised than is promised."""
    for rank, (right, got) in enumerate(zip(expected, results, strict=True)):
        if isinstance(got, Exception):
            assert type(got) is (IntegrityError if rank == VICTIM else PeerTimeout), f"{what}, rank {rank}: {got}"
        else:
            assert torch.equal(right.view(torch.int32), got.view(torch.int32)), f"{what}: rank {rank} is wrong"
    return isinstance(results[VICTIM], IntegrityError)


@each_form
def test_results_are_the_same_to_the_last_bit(form: str) -> None:
    expected, checked = expected_of(form), Calls(form)
    for right in expected:
        assert not check(right, checked.call(lambda calls: None), form)


def test_without_checksums_the_layout_is_what_it_was() -> None:
    plain, checked = (channel_layout(3, 640, 2, checksums=checksums) for checksums in (False, True))
    assert plain.CHECKSUMS == 0 and plain.rows_per_slot(32) == 20 and checked.rows_per_slot(32) == 3
    assert checked.CHECKSUMS == plain.NUM_BYTES == checked.NUM_BYTES - 3 * (2 + 2) * 3 * CHECKSUM_BYTES


@each_form
@pytest.mark.parametrize("rounds", exhaustive_but([20], [20, 400]))
def test_no_result_is_wrong_whatever_happens_to_the_memory(form: str, rounds: int) -> None:
    expected, raised = expected_of(form), 0
    for seed in range(rounds):
        rng, calls = random.Random(seed), Calls(form)
        for _ in range(rng.choice((1, 2))):
            calls.call()
        stale = calls.memory.clone()
        region = ("headers", "half", "rings", "sums")[seed % 4]

        def tamper(calls: Calls, rng: random.Random = rng, region: str = region, stale: torch.Tensor = stale) -> None:
            octets = calls.regions()[region]
            if rng.random() < 0.2:  # what lay there before
                now, calls.memory = calls.memory, stale
                octets.copy_(calls.regions()[region])
                calls.memory = now
                return
            changed = octets.flatten()
            for _ in range(rng.choice((1, 30))):
                CHANGES[0 if rng.random() < 0.5 else rng.randrange(len(CHANGES))](rng, changed)
            octets.copy_(changed.view_as(octets))

        raised += check(expected[calls.epoch], calls.call(tamper), f"{form}, seed {seed}: {region}")
    assert raised > rounds // 4


def exchange_slots(calls: Calls, slots: list[int], others: list[int]) -> None:
    """Swaps slots of the victim's, halves and rings counted in one, with their sums."""
    layout = calls.layout
    for first, stop in ((layout.HALVES, layout.CHECKSUMS), (layout.CHECKSUMS, layout.NUM_BYTES)):
        memory = calls.memory[first:stop].view(WORLD * (2 + SLOTS), -1)
        memory[slots + others] = memory[others + slots].clone()


HALF = 0 if 3 & 1 == 0 else WORLD  # the first slot of the third call's half
RING_OF_0 = 2 * WORLD
MISTAKES: dict[str, tuple[list[int], list[int]]] = {
    "halves of two sources": ([HALF], [HALF + 2]),
    "halves of two calls": ([HALF], [WORLD - HALF]),
    "slots of a ring": ([RING_OF_0], [RING_OF_0 + 1]),
    "slots of two rings": ([RING_OF_0], [RING_OF_0 + 2 * SLOTS]),
    "a slot and a half": ([RING_OF_0], [HALF]),
}


@each_form
@pytest.mark.parametrize("mistake", exhaustive_but(["slots of a ring"], MISTAKES))
def test_slots_in_each_others_place_do_not_fit(form: str, mistake: str) -> None:
    calls = Calls(form)
    for _ in range(2):
        calls.call()
    results = calls.call(lambda calls: exchange_slots(calls, *MISTAKES[mistake]))
    assert isinstance(results[VICTIM], IntegrityError), results[VICTIM]


@each_form
@pytest.mark.parametrize("part", ["half", "rings"])
def test_pieces_of_an_earlier_call_with_their_sums_do_not_fit(form: str, part: str) -> None:
    calls = Calls(form)
    calls.call()
    stale = calls.memory.clone()
    if part == "half":
        calls.call()  # the next one takes the first one's half

    def replay(calls: Calls) -> None:
        layout = calls.layout
        chosen = slice(0, 2 * WORLD) if part == "half" else slice(2 * WORLD, None)
        for begin, end in ((layout.HALVES, layout.CHECKSUMS), (layout.CHECKSUMS, layout.NUM_BYTES)):
            now, then = (memory[begin:end].view(WORLD * (2 + SLOTS), -1) for memory in (calls.memory, stale))
            now[chosen] = then[chosen]

    assert isinstance(calls.call(replay)[VICTIM], IntegrityError)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(60))
def test_a_flag_that_nobody_set_ends_the_call_or_changes_nothing(seed: int) -> None:
    rng = random.Random(seed)
    form = rng.choice([*FORMS])
    expected, calls = expected_of(form), Calls(form, timeout=0.5)
    calls.call()
    lines = rng.choice((calls.layout.HEADERS, calls.layout.TAILS, calls.layout.HEADS))
    lines += SIGNAL_LINE_BYTES * (WORLD * (lines == calls.layout.HEADERS and calls.epoch % 2 == 0))
    value, peer = rng.choice((-3, -1, 1, 1, 2, 2, 3, 2**30)), rng.choice((0, 2))

    def scribble(calls: Calls) -> None:
        calls.memory[lines + SIGNAL_LINE_BYTES * peer :][:4].view(torch.int32)[0] += value

    results = calls.call(scribble)
    for right, got in zip(expected[1], results, strict=True):
        if not isinstance(got, IntegrityError | PeerTimeout):
            assert torch.equal(right.view(torch.int32), got.view(torch.int32))


def test_the_error_names_sender_rows_and_call_and_ends_the_channel() -> None:
    calls = Calls("int8")
    calls.call()

    def flip(calls: Calls) -> None:
        calls.regions()["half"][2, 96 + 5] ^= 4

    before = time.monotonic()
    results = calls.call(flip)
    error = results[VICTIM]
    assert isinstance(error, IntegrityError) and (error.rank, error.call) == (2, 2), error
    assert error.rows == (range(1, 2),) and "call 2, pieces" in str(error) and "rows 1 ... 1 from rank 2" in str(error)
    with pytest.raises(IntegrityError, match="cannot be used any more.*earlier: rank 1 of 3") as again:
        exchange(calls.group.channels[VICTIM], torch.zeros(6, 64), [2, 2, 2], [2, 2, 2])
    assert again.value.rows == error.rows

    def again_on(rank: int, channel: Any) -> Exception:
        with pytest.raises(PeerTimeout) as caught:
            exchange(channel, torch.zeros(6, 64), [2, 2, 2], [2, 2, 2]).wait()
        return caught.value

    for told in calls.group.run(again_on, ranks=[0, 2]):  # by now, and long before their time is up
        assert isinstance(told, PeerTimeout) and told.ranks == () and "gave up too" in str(told), told
    assert time.monotonic() < before + 15


def test_a_corrupted_header_is_told_without_rows() -> None:
    calls = Calls("none")

    def flip(calls: Calls) -> None:
        calls.regions()["headers"][0, 4] ^= 1  # the count

    error = calls.call(flip)[VICTIM]
    assert isinstance(error, IntegrityError) and (error.rank, error.rows) == (0, ()) and "the header" in str(error)
