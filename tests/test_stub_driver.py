"""The stub of CUDA's driver: what it writes down is what Triton was asked to launch."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="launching kernels needs Triton")

import torch
import triton
import triton.language as tl

from tests.helpers.stub_driver import STREAM, Launched, needs_stub, stub_driver
from thinwire.comm.communicator import Communicator
from thinwire.testing import run_ranks

pytestmark = needs_stub


@triton.jit(do_not_specialize=["count"])
def _fill(out_ptr, value, count, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    tl.store(out_ptr + places, value, mask=places < count)


def _launches(comm: Communicator) -> tuple[int, list[Launched]]:
    out = torch.zeros(32, dtype=torch.int32)
    with stub_driver() as stub:
        first = stub.num_launches
        _fill[(5, 2)](out, 7, 3, BLOCK=16, num_warps=2)
        stub.stream, stub.device = STREAM + 1, 1
        _fill[(1,)](out[1:], 7, 2**40, BLOCK=16)
        launched = stub.launched(first)
    assert not out.any()
    return out.data_ptr(), launched


def test_a_launch_is_written_down_as_it_was_asked_for_and_not_made() -> None:
    address, (first, second) = run_ranks(_launches, 1)[0]
    assert (first.name, first.grid, first.threads, first.stream, first.device) == ("_fill", (5, 2, 1), 64, STREAM, 0)
    assert first.parameters[:3] == (address, 7, 3)
    assert (second.grid, second.threads, second.stream, second.device) == ((1, 1, 1), 128, STREAM + 1, 1)
    assert second.parameters[:3] == (address + 4, 7, 2**40)
    assert first.function != second.function  # of other specialisations
