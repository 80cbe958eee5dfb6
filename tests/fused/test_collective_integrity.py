"""Direct collectives with checksums: what is corrupted in a rank's memory gives an error, never a wrong result."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("numba", reason="the direct transport of CPU ranks needs numba")

import torch

from tests.helpers.speeds import exhaustive_but
from tests.helpers.tampered_collectives import (
    OPERATIONS,
    SLOT_BYTES,
    VICTIM,
    Tamper,
    Victim,
    change_at_random,
    two_calls,
)
from tests.helpers.tampering import run_threads, same
from thinwire.comm.communicator import Communicator
from thinwire.errors import IntegrityError, PeerTimeout
from thinwire.fused.all_reduce import all_reduce
from thinwire.fused.collective import DirectCollectives, collective_layout, open_collectives
from thinwire.triton_kernels.exchange_layout import FIRST_LEG, SECOND_LEG

WORLD = 3
each_operation = pytest.mark.parametrize("name", OPERATIONS)


def results_of(name: str, integrity: str, tamper: Tamper | None = None) -> list[Any]:
    """Two calls on each rank: the tensors of both, or what was raised."""

    return run_threads(WORLD, lambda comm: two_calls(comm, name, tamper), integrity=integrity)


def check(expected: list[Any], results: list[Any], what: str) -> bool:
    """Whether the victim raised; what ranks returned is right, and nothing else was raised than is promised."""
    for rank, (right, got) in enumerate(zip(expected, results, strict=True)):
        if isinstance(got, Exception):
            kind = IntegrityError if rank == VICTIM else PeerTimeout
            assert type(got) is kind, f"{what}: rank {rank} raised {type(got).__name__}: {got}"
            assert isinstance(got, IntegrityError) or got.ranks == (), got
        else:
            assert same(right, got), f"{what}: rank {rank} has a wrong result"
    return isinstance(results[VICTIM], IntegrityError)


@each_operation
def test_results_are_the_same_to_the_last_bit(name: str) -> None:
    legs: list[int] = []
    checked = results_of(name, "checksum", lambda victim: legs.append(victim.leg))
    assert not check(results_of(name, "none"), checked, name)
    assert {*legs} == ({FIRST_LEG, SECOND_LEG} if name.startswith("all_reduce") else {FIRST_LEG}) and len(legs) > 2


def test_without_checksums_the_layout_is_what_it_was() -> None:
    plain, checked = (collective_layout(3, 4352, checksums=checksums) for checksums in (False, True))
    assert plain.CHECKSUMS == 0 and checked.CHECKSUMS == plain.NUM_BYTES < checked.NUM_BYTES


@each_operation
@pytest.mark.parametrize("rounds", exhaustive_but([8], [8, 300]))
def test_no_result_is_wrong_whatever_happens_to_the_memory(name: str, rounds: int) -> None:
    expected, legs, raised = results_of(name, "none"), 0, 0

    def count(victim: Victim) -> None:
        nonlocal legs
        legs += 1

    results_of(name, "checksum", count)
    for seed in range(rounds):
        raised += check(expected, results_of(name, "checksum", change_at_random(seed, legs)), f"{name}, seed {seed}")
    assert raised > rounds // 4


@each_operation
def test_rows_of_an_earlier_epoch_or_another_source_with_their_sums_do_not_fit(name: str) -> None:
    for swaps in (True, False):
        seen: list[torch.Tensor] = []

        def misplace(victim: Victim, swaps: bool = swaps, seen: list[torch.Tensor] = seen) -> None:
            first, memory, layout = victim.leg == FIRST_LEG, victim.memory, victim.layout
            if first == name.startswith("all_reduce"):
                return  # of two legs the second
            seen.append(memory[layout.HALVES :].clone())
            if len(seen) < 3:
                return
            if not swaps:  # of two epochs before, the same rows
                memory[layout.HALVES :] = seen[-3]
                return
            for begin, end in ((layout.HALVES, layout.CHECKSUMS), (layout.CHECKSUMS, layout.NUM_BYTES)):
                slots = memory[begin:end].view(4 * WORLD, -1)
                slots[: 2 * WORLD] = slots[: 2 * WORLD].view(2, WORLD, -1).flip(1).reshape(2 * WORLD, -1)
                slots[2 * WORLD :] = slots[2 * WORLD :].view(WORLD, 2, -1).flip(0).reshape(2 * WORLD, -1)

        results = results_of(name, "checksum", misplace)
        assert len(seen) >= 3 and isinstance(results[VICTIM], IntegrityError), (swaps, results[VICTIM])


def test_the_error_names_sender_rows_and_call_and_ends_the_collectives() -> None:
    def flip(victim: Victim) -> None:
        if victim.epoch == 2 and victim.leg == SECOND_LEG:
            victim.regions()["rows"][0, 5] ^= 4

    def work(comm: Communicator) -> Any:
        end = open_collectives(comm, SLOT_BYTES)
        assert isinstance(end, DirectCollectives)
        if comm.rank != VICTIM:
            with pytest.raises(PeerTimeout) as told:
                for _ in range(3):
                    all_reduce(torch.ones(17000), comm=comm, transport="direct")
            return told.value.ranks
        Victim(end, flip)
        with pytest.raises(IntegrityError) as caught:
            all_reduce(torch.ones(17000), comm=comm, transport="direct")
        with pytest.raises(IntegrityError, match="cannot be used any more.*earlier: rank 1 of 3"):
            all_reduce(torch.ones(1), comm=comm, transport="direct")
        assert "call 2, second leg" in str(caught.value) and ", failed" in comm.explain()
        return caught.value.rank, caught.value.rows, caught.value.call

    assert run_threads(WORLD, work, integrity="checksum") == [(), (0, (range(1, 2),), 2), ()]
