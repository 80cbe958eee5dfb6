"""What peers write is believed within bounds: no word leads out of the tensors, hangs, or ends the process.

Calls run in a process of their own, between pages that nobody may touch (`tests/helpers/guarded.py`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba", reason="the direct transport of CPU ranks needs numba")

import torch

from tests.helpers.channels import send_rows
from tests.helpers.guarded import PAGE, guarded
from thinwire.comm.communicator import Communicator
from thinwire.errors import CapacityError, CountsError, PeerTimeout, ThinwireError
from thinwire.fused.channel import RecvBuffer, channel_layout
from thinwire.fused.counts import new_rows, receive_segments, send_segments
from thinwire.testing import RankError, run_ranks
from thinwire.wire import WireFormat
from verification.corruption.__main__ import Report, Worker
from verification.corruption.words import INT32, INT64, TIMEOUT, memories

WORLD = 3
INTERPRETED = {"TRITON_INTERPRET": "1", "THINWIRE_BACKEND": "triton"}
#: Words of a header: bytes from its flag on, and how long they are.
HEADER_WORDS = {"pieces": (4, 4), "count": (8, 8), "signature": (16, 8), "shape": (40, 8)}


def _touch(comm: Communicator, offset: int, first: bool) -> int:
    x = guarded([100], first=first)
    address = x.data_ptr() + offset
    import ctypes

    return ctypes.c_uint8.from_address(address).value


@pytest.mark.parametrize(("offset", "first"), [(100, False), (-1, True)])
def test_the_pages_around_a_tensor_end_whoever_touches_them(offset: int, first: bool) -> None:
    assert PAGE >= 4096
    assert run_ranks(_touch, 1, 0, first) == [0]
    with pytest.raises(RankError, match="SIGSEGV|signal 11|-11"):
        run_ranks(_touch, 1, offset, first)


class Lied:
    """Rank 0's channel, on which ranks 1 and 2 have begun a call, and the words that rank 0 will read."""

    def __init__(self, wire: str, tail: tuple[int, ...], triton: bool) -> None:
        from thinwire.fused.device_channel import DeviceChannel
        from thinwire.fused.host_channel import HostChannel

        self.layout = channel_layout(WORLD, 1280, 2)
        self.tail, self.wire = torch.Size(tail), WireFormat.parse(wire)
        self.channels: list[Any] = [
            (DeviceChannel if triton else HostChannel)(memory, self.layout, rank, TIMEOUT)
            for rank, memory in enumerate(memories(self.layout.NUM_BYTES))
        ]
        self.buffer = self.channels[0].memory.local
        self.unfinished = [self.send(rank, False, False) for rank in (1, 2)]

    def send(self, rank: int, known: bool, wait: bool) -> Any:
        def place(counts: list[int]) -> RecvBuffer:
            segments = receive_segments(counts, None, None)
            # Where there is memory for it, more than a peer can fill: it only has to be counted.
            small = segments.rows * max(1, self.tail.numel()) < 2**20
            rows = guarded((segments.rows, *self.tail), torch.float32) if small else None
            return RecvBuffer(segments, new_rows(torch.empty(0), segments.rows, self.tail) if rows is None else rows)

        x = guarded((WORLD * 4, *self.tail), torch.float32, fill=0x3F)
        sends = send_segments([4] * WORLD, None, len(x))
        placed = place([4] * WORLD) if known else None
        return send_rows(self.channels[rank], x, self.tail, sends, placed, place, self.wire, wait=wait)

    def word(self, lines: int, peer: int, offset: int, size: int) -> torch.Tensor:
        """One word of a line, to be written."""
        start = lines + 64 * peer + offset
        return self.buffer[start : start + size].view(torch.int32 if size == 4 else torch.int64)


def _lies_in_headers(comm: Communicator, triton: bool, values: int) -> int:
    count = 0
    for wire, tail in (("none", (64,)), ("int8", (64,)), ("int8", ()), ("none", (0,)), ("none", ())):
        for name, (offset, size) in HEADER_WORDS.items():
            for value in (INT32 if size == 4 else INT64)[:values]:
                for known in (False, True):
                    lied = Lied(wire, tail, triton)
                    word = lied.word(lied.layout.HEADERS + 64 * WORLD, 1, offset, size)
                    if int(word[0]) == value:
                        continue  # the truth
                    word[0] = value
                    told = (wire, tail, name, value, known)
                    try:
                        taken = lied.send(0, known, True).wait()
                    except (CountsError, CapacityError, PeerTimeout) as error:
                        assert "rank 1" in str(error) or isinstance(error, CapacityError), (told, error)
                        assert name != "count" or str(value) in str(error), (told, error)
                    else:  # another number of rows that takes one piece is no lie that anybody can know
                        assert name == "count" and not known and len(taken) == value + 8, told
                    count += 1
    return count


def test_a_header_that_cannot_be_is_told_with_its_rank() -> None:
    assert run_ranks(_lies_in_headers, 1, False, 99, timeout=120)[0] > 400


@pytest.mark.exhaustive
def test_a_header_that_cannot_be_is_told_with_its_rank_by_tritons_kernels() -> None:
    assert run_ranks(_lies_in_headers, 1, True, 2, env=INTERPRETED, timeout=400)[0] > 25


def _lies_in_rings(comm: Communicator, triton: bool, values: int) -> int:
    """A header that announces many pieces, and tails and heads that say that they are there, or taken."""
    for lines in ("TAILS", "HEADS"):
        for value in INT32[:values]:
            lied = Lied("none", (64,), triton)
            lied.word(lied.layout.HEADERS + 64 * WORLD, 1, 4, 4)[0] = 2**31 - 2
            lied.word(getattr(lied.layout, lines), 1, 0, 4)[0] = value
            with pytest.raises((CountsError, PeerTimeout)):
                lied.send(0, False, True).wait()
            failure = lied.channels[0].failure
            assert failure is None or isinstance(failure, ThinwireError)
    return 1


def test_a_ring_that_says_too_much_is_not_followed_for_ever() -> None:
    run_ranks(_lies_in_rings, 1, False, 99, timeout=60)


@pytest.mark.exhaustive
def test_a_ring_that_says_too_much_is_not_followed_for_ever_by_tritons_kernels() -> None:
    run_ranks(_lies_in_rings, 1, True, 99, env=INTERPRETED, timeout=200)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kernels", "rounds"),
    [("numba", 3000), ("triton", 25)],
)
def test_random_corruption_ends_in_a_result_or_a_named_error(kernels: str, rounds: int, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    command = [sys.executable, "-m", "verification.corruption", "--rounds", str(rounds), "--kernels", kernels]
    done = subprocess.run([*command, "--json", str(path)], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(path.read_text())
    assert report["rounds"] == report["in_time"] == report["returned"] + report["raised_named_errors"] == rounds
    assert not any(report[kind] for kind in ("crashed", "hung", "out_of_bounds", "late", "unexpected", "failures"))
    wanted = {"CountsError", "PeerTimeout", "RoutingError", "ConfigMismatch"} if rounds > 1000 else {"PeerTimeout"}
    assert report["outcomes"].keys() >= wanted


@pytest.mark.exhaustive
def test_a_run_goes_on_where_it_ended_whatever_the_commit(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    for rounds in (2, 7):
        command = [sys.executable, "-m", "verification.corruption", "--rounds", str(rounds), "--seed", "40"]
        subprocess.run(
            [*command, "--processes", "2", "--json", str(path)], check=True, capture_output=True, timeout=300
        )
        report = json.loads(path.read_text())
        assert report["rounds"] == rounds
        report["runs"][0]["commit"] = "0123456789ab"
        path.write_text(json.dumps(report))
    assert [run["rounds"] for run in report["runs"]] == [2, 5]
    alone = tmp_path / "alone.json"
    command = [sys.executable, "-m", "verification.corruption", "--rounds", "7", "--seed", "40", "--json", str(alone)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    assert json.loads(alone.read_text())["cases"].keys() == report["cases"].keys()


@pytest.mark.exhaustive
def test_a_worker_that_ends_in_a_case_is_told_and_followed_by_another() -> None:
    worker = Worker("numba")
    try:
        os.kill(worker._process.pid, signal.SIGSEGV)
        worker._process.wait()
        report = Report(1, "numba", None)
        report.add(1, *worker.run(1))
        report.add(2, *worker.run(2))
    finally:
        worker.close()
    assert report.outcomes["out_of_bounds"] == 1 == len(report.failures) and report.done == 2, report.content()
