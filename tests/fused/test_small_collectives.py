"""Which collectives go in one launch, on a GPU that is not there."""

from __future__ import annotations

import os
from unittest import mock

import pytest

pytest.importorskip("triton", reason="launching kernels needs Triton")

import torch

import thinwire as tw
from tests.helpers.collective_calls import Call
from tests.helpers.stub_driver import StubDriver, needs_stub, stub_driver
from thinwire.comm.communicator import Communicator
from thinwire.fused.all_to_all import open_channel
from thinwire.fused.collective import DirectCollectives, open_collectives
from thinwire.fused.device_channel import DeviceChannel
from thinwire.testing import run_ranks
from thinwire.triton_kernels import LAUNCHES_VARIABLE
from thinwire.triton_kernels.leg_layout import ALL_REDUCE
from thinwire.triton_kernels.small_collective import programs_that_fit

pytestmark = needs_stub
RANKS = 8


def _launches(comm: Communicator, stub: StubDriver) -> dict[str, int]:
    """Of calls at the first rank, whose peers do nothing but meet it."""
    collectives, channel = open_collectives(comm), open_channel(comm)
    if comm.rank:
        return {}
    assert isinstance(collectives, DirectCollectives) and isinstance(channel, DeviceChannel)
    for end in (collectives, channel):
        end.on_gpu, end.peers_calls = True, ()
    channel.always_looks = False

    def grids(op: str, kib: int) -> list[tuple[int, int, int]]:
        x = torch.zeros(kib * 512, dtype=torch.bfloat16)
        counts = [[len(x)] + [0] * (RANKS - 1)] * 2 if op == "all_to_all_v" else []
        for _ in range(2):  # the first loads the kernels, too, and goes through Triton
            first = stub.num_launches
            getattr(tw, op)(x, *counts, wire="int8", comm=comm, transport="direct")
            launched = stub.launched(first)
            # The GPU starts all programs of one launch, which wait for each other, or none.
            assert all(launch.cooperative == (launch.name == "small_kernel") for launch in launched)
        return [launch.grid for launch in launched]

    def count(op: str, kib: int) -> int:
        return len(grids(op, kib))

    found = {f"{op} of {kib} KiB": count(op, kib) for op in ("all_reduce", "reduce_scatter") for kib in (4, 256, 1024)}
    found |= {f"all_gather of {kib} KiB": count("all_gather", kib) for kib in (32, 512)}
    with torch.profiler.profile():
        found["profiled"] = count("all_reduce", 4)
    with comm.programs(2):
        found["on few multiprocessors"] = max(grid[0] for grid in grids("all_reduce", 256))
        del os.environ[LAUNCHES_VARIABLE]
        for op in ("all_reduce", "all_to_all_v"):
            found[f"{op} on few multiprocessors"] = max(grid[0] for grid in grids(op, 1024))
    assert max(grid[0] for grid in grids("all_reduce", 1024)) == 3  # as of tensors on a CPU
    found["by default"] = count("all_reduce", 8)
    return found


def test_little_data_goes_in_one_launch_if_it_was_asked_for() -> None:
    variables = {"THINWIRE_BACKEND": "triton", "TRITON_INTERPRET": "1", LAUNCHES_VARIABLE: "one"}
    with stub_driver() as stub, mock.patch.dict(os.environ, variables):
        found = run_ranks(_launches, RANKS, stub, mode="thread", timeout=300)[0]
    assert found == {
        "all_reduce of 4 KiB": 1, "all_reduce of 256 KiB": 1, "all_reduce of 1024 KiB": 5,
        "reduce_scatter of 4 KiB": 1, "reduce_scatter of 256 KiB": 1, "reduce_scatter of 1024 KiB": 3,
        "all_gather of 32 KiB": 1, "all_gather of 512 KiB": 3, "profiled": 1, "by default": 5,
        "on few multiprocessors": 2, "all_reduce on few multiprocessors": 2, "all_to_all_v on few multiprocessors": 2,
    }  # fmt: skip


@pytest.mark.parametrize(("multiprocessors", "programs"), [(132, [8, 16, 16, 0]), (12, [8, 12, 0, 0]), (1, [0] * 4)])
def test_a_launch_has_no_more_programs_than_multiprocessors(multiprocessors: int, programs: list[int]) -> None:
    jobs = [Call(ALL_REDUCE, (128 * rows,) * RANKS, rows_per_chunk=9).job() for rows in (1, 2, 4, 5)]
    assert [programs_that_fit(job, RANKS, multiprocessors) for job in jobs] == programs
