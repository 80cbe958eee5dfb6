"""The compiled kernels against the references on the CPU: equal to the last bit."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="compiled kernels need Triton")

import torch

from tests.helpers.wires import DTYPES, WIRES, assert_same_bits, magnitudes
from thinwire.fused.codec import dequantize, quantize
from thinwire.triton_kernels import pack, sums
from thinwire.triton_kernels.codec_reference import dequantize_reference, quantize_reference
from thinwire.wire import WireFormat

HIDDEN_SIZES = (1, 7, 127, 128, 129, 2048, 5121, 7168, 9001)


@pytest.mark.parametrize("hidden", HIDDEN_SIZES)
@pytest.mark.parametrize("spec", WIRES)
def test_the_codec_equals_the_reference(spec: str, hidden: int) -> None:
    wire = WireFormat.parse(spec)
    for dtype in DTYPES:
        x = magnitudes(64, hidden, dtype, torch.Generator().manual_seed(hidden))
        x[5, hidden // 2], x[9, hidden - 1], x[11, 0] = torch.nan, torch.inf, -0.0
        expected = quantize_reference(x, wire)
        records = torch.full_like(expected, 0xAB, device="cuda")
        pack.pack_rows(x.cuda(), wire, None, records)
        assert torch.equal(records.cpu(), expected), dtype
        for target in DTYPES if wire.quantized else (dtype,):
            out = torch.full(x.shape, 7.0, dtype=target, device="cuda")
            pack.unpack_rows(records, wire, None, None, out)
            assert_same_bits(str(target), dequantize_reference(expected, wire, hidden, target), out.cpu())


@pytest.mark.parametrize("spec", WIRES)
def test_pack_unpack_and_combine_equal_their_references(spec: str) -> None:
    wire, hidden = WireFormat.parse(spec), 5121
    x = torch.randn(40, hidden).bfloat16()
    index = torch.randint(0, 40, (33,))
    expected = pack.pack_rows_reference(x, wire, index)
    records = torch.full_like(expected, 0xAB, device="cuda")
    pack.pack_rows(x.cuda(), wire, index.cuda(), records)
    assert torch.equal(records.cpu(), expected)
    out, place = torch.full((50, hidden), 7.0).bfloat16(), torch.randperm(50)[:33]
    on_gpu = out.cuda()
    pack.unpack_rows(records, wire, None, place.cuda(), on_gpu)
    pack.unpack_rows_reference(expected, wire, None, place, out)
    assert_same_bits("unpack", out, on_gpu.cpu())
    positions, weights = torch.randint(-1, 40, (20, 8)), torch.rand(20, 8)
    packed = sums.pack_weighted_sums_reference(x, positions, weights, wire, x.dtype)
    packed_gpu = torch.full_like(packed, 0xAB, device="cuda")
    sums.pack_weighted_sums(x.cuda(), positions.cuda(), weights.cuda(), wire, x.dtype, packed_gpu)
    assert torch.equal(packed_gpu.cpu(), packed)
    record_index = torch.randint(-1, 20, (31, 4))
    home = torch.empty(31, hidden, dtype=x.dtype, device="cuda")
    sums.sum_records(packed_gpu, record_index.cuda(), wire, home)
    assert_same_bits("sum", sums.sum_records_reference(packed, record_index, wire, hidden, x.dtype), home.cpu())


def test_quantize_and_dequantize_work_on_gpu_tensors() -> None:
    x = torch.randn(3, 5, 300)
    assert_same_bits("round trip", dequantize(quantize(x, "int8")), dequantize(quantize(x.cuda(), "int8")).cpu())
