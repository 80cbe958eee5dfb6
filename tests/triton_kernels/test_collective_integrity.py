"""The direct collectives with checksums by Triton's kernels, interpreted: what is corrupted gives no wrong result.

`TRITON_INTERPRET=1` must be set before Triton is imported, so each test runs its checks in processes of their own.
"""

from __future__ import annotations

import os

import pytest

pytest.importorskip("triton", reason="interpreting kernels needs Triton")

import torch

from tests.helpers.tampered_collectives import OPERATIONS, SLOT_BYTES, VICTIM, Victim, change_at_random, two_calls
from tests.helpers.tampering import same
from thinwire.comm.communicator import Communicator
from thinwire.errors import IntegrityError, PeerTimeout
from thinwire.fused.all_gather import all_gather
from thinwire.fused.all_reduce import all_reduce
from thinwire.fused.collective import open_collectives
from thinwire.fused.reduce_scatter import reduce_scatter
from thinwire.testing import run_ranks
from thinwire.triton_kernels.exchange_layout import FIRST_LEG, HEADER_SIGNATURE, SECOND_LEG

INTERPRETED = {"TRITON_INTERPRET": "1", "THINWIRE_BACKEND": "triton"}


def _corrupted(comm: Communicator, name: str, rounds: int) -> int:
    """Calls between two ranks, in whose second one's memory something happens before a kernel reads it."""
    with Communicator(comm.group, integrity="none") as plain:
        expected, legs, raised = two_calls(plain, name), 0, 0

    def count(victim: Victim) -> None:
        nonlocal legs
        legs += 1

    with Communicator(comm.group, integrity="checksum") as part:
        assert same(expected, two_calls(part, name, count)), f"{name}: with checksums the result is another"
    for seed in range(rounds):
        with Communicator(comm.group, integrity="checksum", timeout=60.0) as part:
            try:
                tamper = change_at_random(seed, legs) if comm.rank == VICTIM else None
                assert same(expected, two_calls(part, name, tamper)), f"{name}, seed {seed}: a wrong result"
            except IntegrityError as error:
                raised += 1
                assert comm.rank == VICTIM and error.rank in (0, 1), error
                with pytest.raises(IntegrityError, match="cannot be used any more"):
                    two_calls(part, name)
            except PeerTimeout as error:
                assert comm.rank != VICTIM and error.ranks == (), error
    return raised


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", OPERATIONS)
def test_no_result_is_wrong_whatever_happens_to_the_memory(name: str) -> None:
    raised = run_ranks(_corrupted, 2, name, 8, env=INTERPRETED, timeout=400)[VICTIM]
    assert raised > 1


def _between(comm: Communicator, backends: tuple[str, str]) -> None:
    os.environ["THINWIRE_BACKEND"] = backends[comm.rank]
    results = []
    for integrity in ("none", "checksum"):
        with Communicator(comm.group, timeout=250.0, integrity=integrity) as part:
            open_collectives(part, 4 * SLOT_BYTES)
            x = torch.randn(9001, generator=torch.Generator().manual_seed(comm.rank))
            results.append([])
            for wire, gather_wire, dtype in (
                ("int8", "int8", torch.float32), ("none", "none", torch.bfloat16), ("int8:row", "none", torch.float16),
                ("int4", "int8:32", torch.bfloat16), ("fp8", "fp8", torch.float32),
            ):  # fmt: skip
                some, options = x.to(dtype), {"comm": part, "transport": "direct"}
                if dtype == torch.float16:
                    # In either rank's part; sums of these are rounded, and saturate.
                    some[5], some[6000], some[8500] = float("inf"), 60000.0, -60000.0
                results[-1] += [
                    all_reduce(some, wire=wire, gather_wire=gather_wire, **options),
                    reduce_scatter(some[:9000], wire=wire, **options),
                    all_gather(some[:3500], wire=wire, **options),
                ]
    assert same(*results)


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", ["numba", "triton"])
def test_results_are_the_same_with_either_kind_of_kernels_at_the_other_end(first: str) -> None:
    pytest.importorskip("numba", reason="the other rank's kernels may be numba's")
    run_ranks(_between, 2, (first, "triton"), env=INTERPRETED, timeout=280)


def _told(comm: Communicator, region: str) -> str:
    def flip(victim: Victim) -> None:
        if victim.epoch == 2 and victim.leg == (SECOND_LEG if region == "rows" else FIRST_LEG):
            victim.regions()[region][0, 4 * HEADER_SIGNATURE - 4] ^= 4  # the view of a line begins behind its flag

    with Communicator(comm.group, integrity="checksum") as part:
        with pytest.raises(IntegrityError if comm.rank == VICTIM else PeerTimeout) as caught:
            two_calls(part, "all_reduce", flip)
    if isinstance(caught.value, PeerTimeout):
        assert caught.value.ranks == ()
    else:
        rows = (range(1, 2),) if region == "rows" else ()
        assert (caught.value.rank, caught.value.rows, caught.value.call) == (0, rows, 2), caught.value
    return str(caught.value)


def test_the_error_names_sender_and_rows_and_the_peer_is_told() -> None:
    told, error = run_ranks(_told, 2, "rows", env=INTERPRETED, timeout=120)
    assert "rank 1 gave up too" in told and "call 2, second leg" in error and "rows 1 ... 1 from rank 0" in error


@pytest.mark.exhaustive
def test_what_a_header_says_is_compared_before_it_is_believed() -> None:
    told, error = run_ranks(_told, 2, "headers", env=INTERPRETED, timeout=120)
    assert "rank 1 gave up too" in told and "call 2, first leg" in error and "the header from rank 0" in error
