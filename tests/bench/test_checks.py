"""Results that a wire gives pass; an element just beyond its bound, NaN, or in the wrong place does not."""

from __future__ import annotations

import pytest
import torch

from thinwire.fused.codec import dequantize, quantize
from thinwire.tools.bench import checks
from thinwire.tools.bench.baselines import SeparateInt8
from thinwire.tools.bench.problems import moved_bound, values
from thinwire.wire import WireFormat

WIRES = ["int8", "int8:64", "int8:row", "int4", "fp8"]
DEVICE = torch.device("cpu")


def _rows(dtype: torch.dtype) -> torch.Tensor:
    scales = torch.tensor([1.0, 1e-3, 50.0])[:, None]
    return (values(1, 3 * 301, DEVICE, torch.float32).view(3, 301) * scales).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", WIRES)
def test_what_a_wire_gives_is_right_and_a_little_more_is_wrong(name: str, dtype: torch.dtype) -> None:
    wire, rows = WireFormat.parse(name), _rows(dtype)
    got = dequantize(quantize(rows, wire), dtype)
    bound = moved_bound(rows, wire)
    assert isinstance(bound, torch.Tensor)
    found = checks.compare(got, rows, bound)
    assert found.wrong == 0 and 0 < found.error_squares < 0.03 * found.squares
    # A bound that nothing comes near would prove nothing.
    assert float(((got.double() - rows.double()).abs() / bound.double()).max()) > 0.7
    beyond = rows.double()
    beyond[1, 300] += 1.01 * float(bound[1, 300])
    assert checks.compare(beyond, rows, bound).wrong == 1
    got[2, 7] = float("nan")
    assert checks.compare(got, rows, bound).wrong == 1


def test_exact_rows_must_be_equal_and_of_the_right_shape() -> None:
    rows = _rows(torch.bfloat16)
    assert checks.compare(rows.clone(), rows, 0.0) == checks.Verdict(0, 0.0, float(rows.double().square().sum()))
    assert checks.compare(rows[[1, 0, 2]], rows, 0.0).wrong > 500
    assert checks.compare(rows[:2], rows, 0.0).wrong == rows.numel()
    nothing = torch.tensor([], dtype=torch.int64)
    assert checks.compare(rows[:0], rows, 0.0, nothing).wrong == 0
    assert checks.compare(rows, rows, 0.0, nothing).wrong == rows.numel()
    index = torch.tensor([2, 0, 0, 1])
    assert checks.compare(rows[index], rows, 0.0, index).wrong == 0
    assert checks.compare(rows[index], rows, 0.0, index.flip(0)).wrong > 0


@pytest.mark.parametrize("name", ["int8", "int8:row"])
def test_scales_of_a_flat_tensor_begin_anew_in_each_part_and_row(name: str) -> None:
    wire = WireFormat.parse(name)
    flat = torch.arange(1.0, 701.0)
    got = checks.flat_scales(flat, [300, 0, 400], 256, wire)
    group = wire.group or 256
    groups = [(begin, min(begin + group, end)) for begin0, end0 in ((0, 300), (300, 700))
              for row in range(begin0, end0, 256) for end in [min(row + 256, end0)]
              for begin in range(row, end, group)]  # fmt: skip
    for begin, end in groups:
        wanted = flat[end - 1] * (1 / 127)
        wanted = wanted if wire.row_scale else wanted.bfloat16().float()
        assert (got[begin:end] == wanted).all()


@pytest.mark.parametrize("width", [128, 300, 5])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_quantising_by_hand_keeps_the_wires_bound(count: int, width: int) -> None:
    wire = WireFormat.parse("int8")
    codec, rows = SeparateInt8(wire), values(0, count * width, DEVICE, torch.bfloat16).view(count, width)
    encoded = codec.encode(rows)
    assert encoded.shape == (count, codec.row_bytes(width)) and encoded.dtype == torch.uint8
    assert checks.compare(codec.decode(encoded, width, rows.dtype), rows, moved_bound(rows, wire)).wrong == 0


def test_values_of_ranks_differ_and_are_the_same_everywhere() -> None:
    one, two = (values(rank, 3_000_000, DEVICE, torch.float32) for rank in (0, 1))
    assert torch.equal(one, values(0, 3_000_000, DEVICE, torch.float32)) and len(one) == 3_000_000
    assert (one == two).sum() < 100 and (one[4096:] == one[:-4096]).sum() < 100


def test_a_rank_without_rows_has_no_scales() -> None:
    for spec in ("int8", "int8+h64", "int8:row"):
        assert checks.row_scales(torch.zeros(0, 100), WireFormat.parse(spec)).shape == (0, 100)
