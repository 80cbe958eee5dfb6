"""Sums of int8 with one scale for all: exact until they are rounded, and the same on every rank."""

from __future__ import annotations

import pytest

pytest.importorskip("numba", reason="the CPU kernels need numba")

import torch

from tests.helpers.wires import assert_same_bits, relative_error
from thinwire.comm.communicator import Communicator
from thinwire.fused.int8_reduce import int8_all_to_all_reduce
from thinwire.testing import run_ranks


def _tensors(world: int, shape: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(world)
    return [torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8) for _ in range(world)]


def _sums(comm: Communicator) -> None:
    for shape in ((1,), (5, 7), (3, 2, 33), (64, 96), (0, 4)):
        tensors = _tensors(comm.size, shape)
        total = sum(tensor.long() for tensor in tensors)
        per_channel = torch.rand(shape[-1], generator=torch.Generator().manual_seed(1)) / 100
        for scales in (0.037, torch.tensor(0.037), per_channel):
            factors = torch.as_tensor(scales, dtype=torch.float32)
            for dtype in (torch.float16, torch.bfloat16, torch.float32):
                expected = (total.float() * factors).to(dtype)
                for transport in ("direct", "staged"):
                    got = int8_all_to_all_reduce(
                        tensors[comm.rank], scales, dtype=dtype, comm=comm, transport=transport, check=True
                    )
                    assert_same_bits(f"{shape} {dtype} {transport}", expected, got)
    # The gather that the original leaves out: an error like that of one more rounding to int8.
    tensors = _tensors(comm.size, (64, 96))
    exact = sum(tensor.double() for tensor in tensors) * 0.01
    got = int8_all_to_all_reduce(tensors[comm.rank], 0.01, gather_wire="int8", comm=comm)
    assert 0.001 < relative_error(exact, got) < 0.0072
    assert all(torch.equal(other, got) for other in comm.all_gather_object(got))
    large = torch.full((4,), 127, dtype=torch.int8)
    assert int8_all_to_all_reduce(large, 1e4, comm=comm).tolist() == [65504.0] * 4, "saturated"


@pytest.mark.parametrize(("mode", "world"), (("process", 3), ("thread", 1), ("thread", 4)))
def test_sums_of_int8_are_exact_until_they_are_rounded(mode: str, world: int) -> None:
    run_ranks(_sums, world, mode=mode)
