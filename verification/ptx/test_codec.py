"""The codec as compiled for sm_90, run here: records and rows are the references', to the last bit."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="compiling kernels needs Triton")

import torch

from tests.helpers.speeds import exhaustive_but
from tests.helpers.wires import DTYPES, WIRES, assert_same_bits
from thinwire.triton_kernels import pack
from thinwire.triton_kernels.codec_reference import dequantize_reference, quantize_reference
from thinwire.wire import WireFormat
from verification.ptx.device import Device

POISON = 0xAB
BLOCK_WIRES = ["int8+h64", "int6+h64", "int10"]


def _special(rows: int, hidden: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Random rows of all magnitudes, with everything that is special among floats."""
    x = torch.randn(rows, hidden, generator=generator) * torch.logspace(-42, 37, rows)[:, None]
    x = x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
    x[1, 5], x[2, 7], x[2, 8], x[3], x[4, ::3] = float("nan"), float("inf"), float("-inf"), 0.0, -0.0
    x[5, ::2], x[5, 1::4], x[6, ::2] = torch.finfo(dtype).max, -torch.finfo(dtype).max, torch.finfo(dtype).tiny / 4
    return x


SIZES = [*((96, dtype) for dtype in DTYPES), *((hidden, torch.bfloat16) for hidden in (500, 2048, 5121))]


@pytest.mark.parametrize("hidden,dtype", exhaustive_but([(96, torch.bfloat16)], SIZES, several=True), ids=str)
@pytest.mark.parametrize("wire", exhaustive_but(["int8", "int4", "fp8", *BLOCK_WIRES], [*WIRES, *BLOCK_WIRES]))
def test_compiled_records_and_rows_are_the_references(wire: str, hidden: int, dtype: torch.dtype) -> None:
    form = WireFormat.parse(wire)
    x = _special(8, hidden, dtype, torch.Generator().manual_seed(hidden))
    expected = quantize_reference(x, form)
    whole = torch.full((len(x), expected.shape[1] + 32), POISON, dtype=torch.uint8)
    records, out = whole[:, : expected.shape[1]], torch.full((len(x), hidden + 3), 7.0, dtype=dtype)
    device = Device()
    with device.patch():
        pack.pack_rows(x, form, None, records)
        pack.unpack_rows(records, form, None, None, out[:, :hidden])
    assert torch.equal(records, expected)
    assert (whole[:, expected.shape[1] :] == POISON).all(), "bytes behind a record were written"
    assert_same_bits("rows", dequantize_reference(expected, form, hidden, dtype), out[:, :hidden])
    assert (out[:, hidden:] == 7.0).all(), "elements behind a row were written"
