"""The library's calls on ranks that are threads, each of whose launches runs as PTX while the others' do."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="compiling kernels needs Triton")

import torch

import thinwire as tw
from tests.helpers.wires import assert_same_bits
from thinwire.comm.communicator import Communicator
from thinwire.testing import run_ranks
from verification.ptx.standin import stand_in


def _calls(comm: Communicator, transport: str) -> list[torch.Tensor]:
    x = torch.randn(5, 70, generator=torch.Generator().manual_seed(comm.rank)).bfloat16()
    rows = tw.all_to_all_v(x, [2, 3], wire="int8", comm=comm, transport=transport)
    summed = tw.all_reduce(x, wire="int8", comm=comm, transport=transport)
    assert isinstance(rows, torch.Tensor)
    return [rows, summed]


@pytest.mark.exhaustive
def test_both_transports_give_the_same_bits() -> None:
    with stand_in() as device:
        direct = run_ranks(_calls, 2, "direct", mode="thread")
    assert device.launches["recv_rows_kernel"] == 2 and device.launches["reduce_kernel"] >= 2
    staged = run_ranks(_calls, 2, "staged", mode="thread")
    for ours, theirs in zip(direct, staged, strict=True):
        for number, (got, expected) in enumerate(zip(ours, theirs, strict=True)):
            assert_same_bits(f"call {number}", expected, got)
