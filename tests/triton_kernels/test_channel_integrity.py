"""The direct all-to-all-v with checksums by Triton's kernels, interpreted: what is corrupted gives no wrong result.

`TRITON_INTERPRET=1` must be set before Triton is imported, so each test runs its checks in processes of their own.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

pytest.importorskip("triton", reason="interpreting kernels needs Triton")

import torch

from tests.helpers.tampering import CHANGES
from thinwire.comm.communicator import Communicator
from thinwire.errors import IntegrityError, PeerTimeout
from thinwire.fused.all_to_all import all_to_all_v
from thinwire.fused.channel import Channel
from thinwire.fused.direct import open_channel
from thinwire.testing import run_ranks

INTERPRETED = {"TRITON_INTERPRET": "1", "THINWIRE_BACKEND": "triton"}
#: Wire, shape of a row, bytes of a piece, and rows that a rank has for itself.
FORMS: dict[str, tuple[str, tuple[int, ...], int, int]] = {
    "int8": ("int8", (64,), 640, 13),
    "int8:row": ("int8:row", (5, 9), 640, 6),
    "two tiles with one scale": ("int8:row", (8500,), 9088, 3),
    "int4": ("int4", (300,), 640, 5),
    "none": ("none", (7,), 9088, 700),
    "flat": ("int8:32", (), 2304, 5000),
}


def _channel(comm: Communicator, form: str) -> Any:
    channel = open_channel(comm, None, FORMS[form][2], 2)
    assert isinstance(channel, Channel), channel
    return channel


def _call(comm: Communicator, form: str, seed: int) -> torch.Tensor:
    wire, tail, _, count = FORMS[form]
    x = torch.randn(count, *tail, generator=torch.Generator().manual_seed(seed))
    got = all_to_all_v(x, [count], [count], wire=wire, comm=comm, transport="direct")
    assert isinstance(got, torch.Tensor)
    return got


def _corrupted(comm: Communicator, form: str, rounds: int) -> int:
    """A rank that sends to itself, in whose memory something happens before a kernel reads it."""
    from thinwire.triton_kernels import all_to_all_v as kernels

    recv, wait = kernels.recv, kernels.wait
    with Communicator(comm.group, integrity="none") as plain:
        _channel(plain, form)
        expected = [_call(plain, form, seed) for seed in range(2)]
    raised = 0
    for seed in range(rounds):
        rng = random.Random(seed)
        with Communicator(comm.group, integrity="checksum") as part:
            channel = _channel(part, form)
            assert torch.equal(_call(part, form, 0), expected[0])
            layout, memory = channel.layout, channel.memory.local
            stale, chosen = memory.clone(), rng.choice((-1, 0, 0, 1, 2))
            half = layout.HALVES + layout.SLOT_BYTES * (channel.open_epoch() + 1 & 1)

            def change(first: int, stop: int, rng: random.Random = rng, now: Any = memory, stale: Any = stale) -> None:
                octets = now[first:stop]
                if rng.random() < 0.2:
                    octets.copy_(stale[first:stop])
                    return
                for _ in range(rng.choice((1, 30))):
                    CHANGES[0 if rng.random() < 0.5 else rng.randrange(len(CHANGES))](rng, octets)

            def hooked_wait(end: Any, reason: int, *rest: Any, chosen: int = chosen, change: Any = change) -> None:
                if reason == kernels.HEADERS and chosen == -1:
                    line = end.layout.HEADERS + 64 * (int(end.control[1]) & 1)
                    change(line + 4, line + 64)
                wait(end, reason, *rest)

            def hooked_recv(
                end: Any, out: Any, step: Any, layout: Any, flat: Any, number: int, items: int, chosen: int = chosen,
                change: Any = change, rng: random.Random = rng, half: int = half,
            ) -> None:  # fmt: skip
                if number == chosen:
                    spaces = ((half, half + end.layout.SLOT_BYTES), (end.layout.CHECKSUMS, end.layout.NUM_BYTES))
                    if number:
                        spaces = ((end.layout.RINGS, end.layout.CHECKSUMS), spaces[1])
                    change(*rng.choice(spaces))
                recv(end, out, step, layout, flat, number, items)

            kernels.recv, kernels.wait = hooked_recv, hooked_wait  # type: ignore[assignment]
            try:
                assert torch.equal(_call(part, form, 1), expected[1]), f"{form}, seed {seed}, {chosen}"
            except IntegrityError as error:
                raised += 1
                assert (error.rank, error.call, bool(error.rows)) == (0, 2, chosen >= 0), error
                assert all(0 <= rows.start < rows.stop <= FORMS[form][3] + 1023 for rows in error.rows), error
                with pytest.raises(IntegrityError, match="cannot be used any more"):
                    _call(part, form, 2)
            finally:
                kernels.recv, kernels.wait = recv, wait
    return raised


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", FORMS)
def test_no_result_is_wrong_whatever_happens_to_the_memory(form: str) -> None:
    (raised,) = run_ranks(_corrupted, 1, form, 6, env=INTERPRETED, timeout=400)
    assert raised > 1


def _between(comm: Communicator, backends: tuple[str, str]) -> None:
    os.environ["THINWIRE_BACKEND"] = backends[comm.rank]
    results = []
    for integrity in ("none", "checksum"):
        with Communicator(comm.group, timeout=250.0, integrity=integrity) as part:
            results.append([])
            generator = torch.Generator().manual_seed(comm.rank)
            open_channel(part, None, 9088, 2)
            for wire, tail, *_ in FORMS.values():
                rows = 700 if tail in ((), (7,)) else 30
                for known in (True, False):
                    counts = [[3, rows], [rows // 2, 1]]
                    x = torch.randn(sum(counts[comm.rank]), *tail, generator=generator)
                    receives = [row[comm.rank] for row in counts] if known else None
                    got = all_to_all_v(x, counts[comm.rank], receives, wire=wire, comm=part, transport="direct")
                    assert isinstance(got, torch.Tensor)
                    results[-1].append(got)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", ["numba", "triton"])
def test_results_are_the_same_with_either_kind_of_kernels_at_the_other_end(first: str) -> None:
    pytest.importorskip("numba", reason="the other rank's kernels may be numba's")
    run_ranks(_between, 2, (first, "triton"), env=INTERPRETED, timeout=280)


def _told(comm: Communicator) -> str:
    channel = _channel(comm, "int8")
    x = torch.ones(24, 64)
    work = all_to_all_v(x, [12, 12], [12, 12], comm=comm, transport="direct", async_op=True)
    if comm.rank == 1:
        half = channel.layout.HALVES + channel.layout.SLOT_BYTES * 2 * (channel.open_epoch() & 1)
        channel.memory.local[half + channel.layout.SLOT_BYTES + 100] ^= 2  # in its own row 1
    with pytest.raises(IntegrityError if comm.rank else PeerTimeout) as caught:
        work.wait()  # type: ignore[union-attr]
    if isinstance(caught.value, PeerTimeout):
        assert caught.value.ranks == ()
    else:
        assert caught.value.rows == (range(1, 2),)
    return str(caught.value)


def test_the_error_names_sender_and_rows_and_the_peer_is_told() -> None:
    told, error = run_ranks(_told, 2, env=INTERPRETED | {"THINWIRE_INTEGRITY": "checksum"}, timeout=120)
    assert "rank 1 gave up too" in told and "call 1, pieces" in error and "rows 1 ... 1 from rank 1" in error
