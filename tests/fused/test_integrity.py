"""`integrity="checksum"` on the staged transport: what is corrupted on its way gives an error, never a wrong result."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("numba", reason="ranks of the CPU need numba")

import torch

from tests.helpers.speeds import exhaustive_but
from tests.helpers.tampering import CHANGES, Arrival, run_threads, same, tamper_with
from thinwire.comm.communicator import Communicator
from thinwire.errors import IntegrityError, PeerTimeout
from thinwire.fused.all_gather import all_gather, all_gather_v
from thinwire.fused.all_reduce import all_reduce
from thinwire.fused.all_to_all import all_to_all_v
from thinwire.fused.int8_reduce import int8_all_to_all_reduce
from thinwire.fused.redistribute import redistribute
from thinwire.fused.reduce_scatter import reduce_scatter
from thinwire.moe.parallel import ExpertParallel

WORLD, VICTIM = 3, 1
COUNTS = [[2, 5, 0], [1, 3, 40], [6, 9, 2]]


def values(comm: Communicator, call: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(10 * comm.rank + call))


def moe_round(comm: Communicator, call: int) -> list[torch.Tensor]:
    with ExpertParallel(comm, 7, 2, 72, 9, transport="staged", wire="int8") as ep:
        x, ids = values(comm, call, 9, 72), torch.arange(18).view(9, 2) * (comm.rank + call + 1) % 7
        d = ep.dispatch(x, ids, x[:, :2].abs())
        return [d.tokens, ep.combine(d.tokens * 2, d)]


def rows_of(comm: Communicator, call: int, wire: str, known: bool) -> list[torch.Tensor]:
    sends, receives = COUNTS[comm.rank], [row[comm.rank] for row in COUNTS]
    x = values(comm, call, sum(sends), 200)
    return [tensor_of(all_to_all_v(x, sends, receives if known else None, wire=wire, comm=comm, transport="staged"))]


def tensor_of(result: object) -> torch.Tensor:
    assert isinstance(result, torch.Tensor)
    return result


def layouts(comm: Communicator, call: int) -> list[torch.Tensor]:
    return [redistribute(values(comm, call, 6, 40), (WORLD, 1), (1, 1), comm=comm, transport="staged")]


def exactly(comm: Communicator, call: int) -> list[torch.Tensor]:
    x, told = values(comm, call, 300), [call + comm.rank, "a setting"]
    comm.all_reduce(x)
    counts = comm.exchange_counts([call + 5 * comm.rank] * WORLD)
    assert comm.all_gather_data(told, [int | str]) == [[call + rank, "a setting"] for rank in range(WORLD)]
    return [x, torch.tensor(counts)]


def staged(function: Callable[..., object], *shape: int, **options: Any) -> Callable[..., list[torch.Tensor]]:
    def run(comm: Communicator, call: int) -> list[torch.Tensor]:
        return [tensor_of(function(values(comm, call, *shape), comm=comm, transport="staged", **options))]

    return run


OPERATIONS: dict[str, Callable[[Communicator, int], list[torch.Tensor]]] = {
    "dispatch and combine": moe_round,
    "all_to_all_v int8": lambda comm, call: rows_of(comm, call, "int8", True),
    "all_to_all_v none": lambda comm, call: rows_of(comm, call, "none", False),
    "all_reduce int8": staged(all_reduce, 9000),
    "all_reduce none": staged(all_reduce, 5000, wire="none"),
    "all_gather": staged(all_gather, 5, 300, wire="int4"),
    "all_gather_v": staged(all_gather_v, 5, 300),
    "reduce_scatter": staged(reduce_scatter, 6, 500, wire="fp8"),
    "int8_all_to_all_reduce": lambda comm, call: [
        int8_all_to_all_reduce(values(comm, call, 8, 50).to(torch.int8), 0.5, comm=comm, transport="staged")
    ],
    "redistribute": layouts,
    "exactly": exactly,
}
each_operation = pytest.mark.parametrize("name", OPERATIONS)


def results_of(name: str, integrity: str, tampers: Callable[[list[Arrival]], None] | None = None) -> list[Any]:
    """Two calls of an operation on each rank: the tensors of both, or what was raised."""

    def work(comm: Communicator) -> list[torch.Tensor]:
        if tampers is not None and comm.rank == VICTIM:
            tamper_with(comm, tampers)
        return [tensor for call in (1, 2) for tensor in OPERATIONS[name](comm, call)]

    return run_threads(WORLD, work, integrity=integrity)


@each_operation
def test_results_are_the_same_to_the_last_bit(name: str) -> None:
    labels: list[str] = []
    checked = results_of(name, "checksum", lambda seen: labels.append(seen[-1].label))
    for expected, got in zip(results_of(name, "none"), checked, strict=True):
        assert same(expected, got)
    sums = [label for label in labels if label.startswith("checksums of ")]
    assert len(sums) * 2 == len(labels) > 0, "some messages have no sums"


@each_operation
@pytest.mark.parametrize("rounds", exhaustive_but([12], [12, 200]))
def test_no_result_is_wrong_whatever_happens_to_a_message(name: str, rounds: int) -> None:
    expected, arrivals = results_of(name, "none"), 0

    def count(seen: list[Arrival]) -> None:
        nonlocal arrivals
        arrivals += 1

    results_of(name, "checksum", count)
    raised = 0
    for seed in range(rounds):
        rng = random.Random(seed)
        chosen = rng.randrange(arrivals)

        def tamper(seen: list[Arrival], rng: random.Random = rng, chosen: int = chosen) -> None:
            octets = seen[-1].octets
            if len(seen) - 1 == chosen:
                CHANGES[chosen % len(CHANGES) if rng.random() < 0.5 else 0](rng, octets)

        results = results_of(name, "checksum", tamper)
        raised += check(expected, results, f"{name}, seed {seed}")
    assert raised > rounds // 2


def check(expected: list[Any], results: list[Any], what: str) -> bool:
    """Whether the victim raised; what ranks returned is right, and nothing else was raised than is promised."""
    for rank, (right, got) in enumerate(zip(expected, results, strict=True)):
        if isinstance(got, Exception):
            kind = IntegrityError if rank == VICTIM else PeerTimeout
            assert type(got) is kind, f"{what}: rank {rank} raised {type(got).__name__}: {got}"
        else:
            assert same(right, got), f"{what}: rank {rank} has a wrong result"
    return isinstance(results[VICTIM], IntegrityError)


@each_operation
def test_a_message_of_an_earlier_call_is_no_message_of_this_one(name: str) -> None:
    expected, replaced = results_of(name, "none"), 0

    def replay(seen: list[Arrival]) -> None:
        nonlocal replaced
        new = seen[-1]
        for old in seen[:-1]:
            if old[:2] == new[:2] and old.octets.numel() == new.octets.numel():
                if not torch.equal(old.octets, new.octets):
                    replaced += 1
                new.octets.copy_(old.octets)
                return

    results = results_of(name, "checksum", replay)
    assert replaced and check(expected, results, name)


def test_messages_of_two_peers_are_not_taken_for_each_other() -> None:
    expected = results_of("all_gather", "none")

    def swap(seen: list[Arrival]) -> None:
        if len(seen) % 2 == 0:
            new = seen[-1].octets.clone()
            assert seen[-2].peer != seen[-1].peer
            seen[-1].octets.copy_(seen[-2].octets)
            # The first of the two was copied when it had come: its receiver's own bytes are reached through the list.
            first[0].copy_(new)
        first[:] = [seen[-1].octets]

    first: list[torch.Tensor] = []
    assert check(expected, results_of("all_gather", "checksum", swap), "swapped")


def test_the_error_names_sender_rows_and_call_and_ends_the_communicator() -> None:
    def work(comm: Communicator) -> Any:
        def tamper(seen: list[Arrival]) -> None:
            if seen[-1].label.startswith("all_to_all_v") and seen[-1].peer == 2:
                seen[-1].octets.view(9, -1)[4, 3] ^= 1

        if comm.rank == VICTIM:
            tamper_with(comm, tamper)
            with pytest.raises(IntegrityError) as caught:
                rows_of(comm, 1, "int8", True)
            error = caught.value
            assert (error.rank, error.call) == (2, 0) and error.rows == (range(0, 9),), error
            assert "rows 0 ... 8 from rank 2; in all_to_all_v" in str(error)
            with pytest.raises(IntegrityError, match="cannot be used any more.*earlier: rank 1 of 3"):
                comm.barrier()
            return "raised"
        rows_of(comm, 1, "int8", True)
        with pytest.raises(PeerTimeout):
            comm.barrier()
        return "told"

    results = run_threads(WORLD, work, integrity="checksum")
    assert results == ["told", "raised", "told"], results


def test_long_rows_are_named_one_by_one() -> None:
    def work(comm: Communicator) -> Any:
        def tamper(seen: list[Arrival]) -> None:
            if seen[-1].label.startswith("all_to_all_v"):
                rows = seen[-1].octets.view(6, -1)
                rows[1, 5] ^= 1
                rows[4:, -1] ^= 128

        x = torch.ones(12, 2048)
        if comm.rank == 0:
            tamper_with(comm, tamper)
            with pytest.raises(IntegrityError) as caught:
                all_to_all_v(x, [6, 6], [6, 6], wire="none", comm=comm, transport="staged")
            return caught.value.rows
        return all_to_all_v(x, [6, 6], [6, 6], wire="none", comm=comm, transport="staged") is None

    assert run_threads(2, work, integrity="checksum") == [(range(1, 2), range(4, 6)), False]
