"""Products of experts on int8 records: plain torch against float64, and Triton's interpreter against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.helpers.expert_rows import CASES, check_products, make_rows, make_weights
from tests.helpers.speeds import exhaustive_but
from thinwire.comm.communicator import Communicator
from thinwire.testing import run_ranks
from thinwire.triton_kernels.codec_reference import scaled_reference
from thinwire.triton_kernels.expert_gemm import _integer_products, expert_gemm, expert_gemm_reference
from thinwire.triton_kernels.int8_weights import Int8Weights
from thinwire.triton_kernels.silu import silu_reference
from thinwire.wire import WireFormat


def _dequantised(weights: Int8Weights) -> torch.Tensor:
    """The weights that they encode, float32 [experts, inward, channels]."""
    return ((weights.payload * weights.scales.unsqueeze(2))[:, :, : weights.inward]).transpose(1, 2)


def test_silu_is_within_its_bound() -> None:
    x = torch.cat([torch.linspace(-87, 90, 100_001), torch.randn(10_000) * 3])
    exact = x.double() / (1 + torch.exp(-x.double()))
    assert ((silu_reference(x).double() - exact).abs() <= 3e-7 * exact.abs()).all()
    odd = silu_reference(torch.tensor([-200.0, -torch.inf, torch.inf, torch.nan, 0.0]))
    assert -1e-34 < odd[0] < 0 and odd[2] == torch.inf and odd[3].isnan() and odd[4] == 0


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}x{case[2]}")
def test_the_reference_is_the_product_of_what_records_and_weights_stand_for(case: tuple) -> None:
    spec, inward, outward, counts, align = case
    wire = WireFormat.parse(spec)
    records, index, offsets = make_rows(wire, inward, counts, align)
    weights = make_weights(inward, outward, len(counts), gated=False)
    out = torch.zeros(len(index), outward)  # where nothing is written
    expert_gemm_reference(records, wire, index, offsets, weights, out)
    rows = scaled_reference(records[:11], wire, inward, torch.float32).double()
    for row, record in enumerate(index.tolist()):
        expert = int((offsets[1:] <= row).sum())
        if expert == len(counts) or not 0 <= record < 11:
            assert not out[row].any()
            continue
        exact = rows[record] @ _dequantised(weights)[expert].double()
        bound = rows[record].abs() @ _dequantised(weights)[expert].double().abs() * 2**-20
        assert exact.isnan().all() if record == 5 else ((out[row] - exact).abs() <= bound).all()


@pytest.mark.parametrize("columns", [1, 1023, 1024, 1025, 5000])
def test_products_of_integers_are_exact_whatever_bytes_came(columns: int) -> None:
    x, w = torch.randint(-128, 128, (2, 9, columns), generator=torch.Generator().manual_seed(columns))
    x[0], w[:2] = -128, torch.tensor([[-128], [127]])  # the largest sums, and odd ones near them
    x[1:4, 0] = torch.tensor([-127, 1, 0])
    assert torch.equal(_integer_products(x.float(), w.float()), (x @ w.T).float())


def test_no_records_and_odd_indices_and_offsets_are_taken() -> None:
    wire, weights = WireFormat.parse("int8:32"), make_weights(70, 6, 2, gated=False)
    for count in (0, 3):
        records = make_rows(wire, 70, (1,), 1)[0][:count]
        out, index = torch.full((5, 6), 7.0), torch.tensor([0, 1, 2, -5, 2**62])
        expert_gemm_reference(records, wire, index, torch.tensor([-2, 9, 3]), weights, out)
        assert not out[count:].any() and bool(out.any()) == bool(count)


class _DividesAsOnCuda(TorchFunctionMode):
    """Divides by a number as torch does on CUDA, where it multiplies by its reciprocal."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        divides = function in (torch.Tensor.__truediv__, torch.Tensor.div, torch.div)
        if divides and isinstance(args[1], float | int):
            return args[0] * torch.tensor(1.0, dtype=args[0].dtype).div(torch.tensor(args[1], dtype=args[0].dtype))
        return function(*args, **(kwargs or {}))


def test_weights_are_the_same_where_division_by_a_number_is_not_exact() -> None:
    generator = torch.Generator().manual_seed(3)
    w = torch.randn(2, 40, 300, generator=generator)
    here = Int8Weights.of(w)
    with _DividesAsOnCuda():
        assert not torch.equal(w / 127, w / torch.tensor(127.0)), "the mode changes nothing"
        there = Int8Weights.of(w)
    assert torch.equal(here.scales, there.scales) and torch.equal(here.payload, there.payload)


def test_weights_are_within_half_a_step() -> None:
    w = torch.randn(3, 20, 7)
    q = Int8Weights.of(w)
    assert Int8Weights.of(torch.randn(3, 32, 7)).payload.is_contiguous()
    assert q.payload.shape == (3, 7, 32) and not q.payload[:, :, 20:].any()
    assert ((_dequantised(q) - w).abs() <= q.scales.unsqueeze(1) * (0.5 + 1e-5)).all()


def _interpreted(comm: Communicator, cases: tuple) -> None:
    check_products(expert_gemm, cases)


@pytest.mark.parametrize(
    "cases", exhaustive_but([CASES[:1]], [CASES[:1], CASES[1:]]), ids=lambda cases: str(len(cases))
)
def test_the_interpreted_kernel_equals_the_reference_to_the_last_bit(cases: tuple) -> None:
    pytest.importorskip("triton", reason="interpreting kernels needs Triton")
    run_ranks(_interpreted, 1, cases, env={"TRITON_INTERPRET": "1"}, timeout=300)
