"""numba's products of experts on int8 records, against plain torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("numba", reason="the kernels of the CPU need numba")

from tests.helpers.expert_rows import CASES, check_products, make_weights
from thinwire.triton_kernels.cpu.expert_gemm import expert_gemm
from thinwire.triton_kernels.expert_gemm import expert_gemm_reference
from thinwire.wire import WireFormat


def test_they_equal_the_reference_to_the_last_bit() -> None:
    check_products(expert_gemm, CASES)


def test_any_bytes_and_no_records_at_all_are_taken() -> None:
    wire, generator = WireFormat.parse("int8:32"), torch.Generator().manual_seed(4)
    offsets, weights = torch.tensor([0, 3, 5]), make_weights(70, 6, 2, gated=True)
    for count in (0, 3):
        records = torch.randint(0, 256, (count, wire.row_bytes(70)), dtype=torch.uint8, generator=generator)
        index = torch.tensor([0, 1, 2, -5, 2**62])
        got, want = torch.empty(2, 5, 6)
        expert_gemm(records, wire, index, offsets, weights, got)
        expert_gemm_reference(records, wire, index, offsets, weights, want)
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
        assert count or not got.any()
