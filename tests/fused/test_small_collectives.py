"""Which collectives go in one launch, on a GPU that is not there."""

from __future__ import annotations

import os
from unittest import mock

import pytest

pytest.importorskip("triton", reason="launching kernels needs Triton")

import torch

import thinwire as tw
from tests.helpers.stub_driver import StubDriver, needs_stub, stub_driver
from thinwire.comm.communicator import Communicator
from thinwire.fused.collective import DirectCollectives, open_collectives
from thinwire.testing import run_ranks
from thinwire.triton_kernels import LAUNCHES_VARIABLE

pytestmark = needs_stub
RANKS = 8


def _launches(comm: Communicator, stub: StubDriver) -> dict[str, int]:
    """Of calls at the first rank, whose peers do nothing but meet it."""
    collectives = open_collectives(comm)
    if comm.rank:
        return {}
    assert isinstance(collectives, DirectCollectives)
    collectives.on_gpu, collectives.peers_calls = True, ()

    def count(op: str, kib: int) -> int:
        x = torch.zeros(kib * 512, dtype=torch.bfloat16)
        for _ in range(2):  # the first loads the kernels, too
            first = stub.num_launches
            getattr(tw, op)(x, wire="int8", comm=comm, transport="direct")
        return stub.num_launches - first

    found = {f"{op} of {kib} KiB": count(op, kib) for op in ("all_reduce", "reduce_scatter") for kib in (4, 256, 1024)}
    found |= {f"all_gather of {kib} KiB": count("all_gather", kib) for kib in (32, 512)}
    with mock.patch.object(collectives._recorder, "track", mock.Mock()):
        found["traced"] = count("all_reduce", 4)
    with mock.patch.dict(os.environ, {LAUNCHES_VARIABLE: "several"}):
        found["by choice"] = count("all_reduce", 8)
    return found


def test_little_data_goes_in_one_launch_and_more_in_several() -> None:
    with stub_driver() as stub, mock.patch.dict(os.environ, {"THINWIRE_BACKEND": "triton", "TRITON_INTERPRET": "1"}):
        found = run_ranks(_launches, RANKS, stub, mode="thread", timeout=300)[0]
    assert found == {
        "all_reduce of 4 KiB": 1, "all_reduce of 256 KiB": 1, "all_reduce of 1024 KiB": 5,
        "reduce_scatter of 4 KiB": 1, "reduce_scatter of 256 KiB": 1, "reduce_scatter of 1024 KiB": 3,
        "all_gather of 32 KiB": 1, "all_gather of 512 KiB": 3, "traced": 1, "by choice": 5,
    }  # fmt: skip
