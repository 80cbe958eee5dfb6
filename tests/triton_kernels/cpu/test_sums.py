"""The sums of combine on the CPU against the plain-torch reference: equal to the last bit."""

from __future__ import annotations

import pytest

pytest.importorskip("numba", reason="the CPU kernels need numba")

import torch

from tests.helpers.wires import DTYPES, WIRES, assert_same_bits, magnitudes
from thinwire.triton_kernels.cpu.sums import pack_weighted_sums, sum_records
from thinwire.triton_kernels.pack import pack_rows_reference
from thinwire.triton_kernels.sums import pack_weighted_sums_reference, sum_records_reference
from thinwire.wire import WireFormat

POISON = 0xA5
HIDDENS = (1, 7, 16, 129, 257, 1500)
TERMS = (0, 3, 8)

every_wire = pytest.mark.parametrize("spec", WIRES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def some_index(rows: int, terms: int, bound: int, generator: torch.Generator) -> torch.Tensor:
    """Numbers below `bound`, a third of them -1, and one row of nothing but -1."""
    index = torch.randint(0, bound, (rows, terms), generator=generator)
    index[torch.rand(rows, terms, generator=generator) < 1 / 3] = -1
    index[:1] = -1
    return index


def packed(
    expert_out: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor, wire: WireFormat, dtype: torch.dtype
) -> torch.Tensor:
    """The records, after checking that nothing else was written."""
    size = wire.row_bytes(expert_out.shape[1], dtype)
    memory = torch.full((positions.shape[0] + 1, size + 16), POISON, dtype=torch.uint8)
    pack_weighted_sums(expert_out, positions, weights, wire, dtype, memory[:-1, :size])
    assert (memory[:-1, size:] == POISON).all() and (memory[-1] == POISON).all(), "written past a record"
    return memory[:-1, :size]


def summed(
    records: torch.Tensor, record_index: torch.Tensor, wire: WireFormat, hidden: int, dtype: torch.dtype
) -> torch.Tensor:
    """The rows, after checking that nothing else was written."""
    memory = torch.full((record_index.shape[0] + 1, hidden + 3), 7.0, dtype=dtype)
    sum_records(records, record_index, wire, memory[:-1, :hidden])
    assert (memory[:-1, hidden:] == 7.0).all() and (memory[-1] == 7.0).all(), "written past a row"
    return memory[:-1, :hidden]


def assert_same_records(
    name: str, expected: torch.Tensor, got: torch.Tensor, wire: WireFormat, hidden: int, dtype: torch.dtype
) -> None:
    if wire.quantized:
        assert torch.equal(expected, got), name
        return
    size = wire.payload_bytes(hidden, dtype)
    assert_same_bits(name, expected[:, :size].contiguous().view(dtype), got[:, :size].contiguous().view(dtype))
    assert torch.equal(expected[:, size:], got[:, size:]), f"{name}: padding"


@every_dtype
@every_wire
def test_weighted_sums(spec: str, dtype: torch.dtype) -> None:
    wire = WireFormat.parse(spec)
    generator = torch.Generator().manual_seed(3)
    for hidden in HIDDENS:
        expert_out = torch.randn(9, hidden + 1, generator=generator).to(dtype)[:, 1:]
        for terms in TERMS:
            positions = some_index(6, terms, 9, generator)
            weights = torch.randn(6, terms, generator=generator)
            for record_dtype in (dtype,) if wire.quantized else DTYPES:
                expected = pack_weighted_sums_reference(expert_out, positions, weights, wire, record_dtype)
                got = packed(expert_out, positions, weights, wire, record_dtype)
                assert_same_records(f"{spec} [{hidden}] of {terms}", expected, got, wire, hidden, record_dtype)


@pytest.mark.parametrize("spec", [spec for spec in WIRES if spec != "none"])
def test_weighted_sums_of_records_of_any_bytes(spec: str) -> None:
    wire, generator = WireFormat.parse(spec), torch.Generator().manual_seed(4)
    for hidden in HIDDENS:
        records = torch.randint(0, 256, (9, wire.row_bytes(hidden)), dtype=torch.uint8, generator=generator)
        records[4:] = pack_rows_reference(torch.randn(5, hidden, generator=generator), wire, None)
        for terms in TERMS:
            positions, weights = some_index(6, terms, 9, generator), torch.randn(6, terms, generator=generator)
            got = torch.full((6, wire.row_bytes(hidden)), POISON, dtype=torch.uint8)
            pack_weighted_sums(records, positions, weights, wire, torch.float32, got, hidden)
            expected = pack_weighted_sums_reference(records, positions, weights, wire, torch.float32, hidden)
            assert torch.equal(expected, got), f"{spec} [{hidden}] of {terms}"


@every_dtype
@every_wire
def test_weighted_sums_of_every_magnitude_with_nan_and_infinity(spec: str, dtype: torch.dtype) -> None:
    wire = WireFormat.parse(spec)
    generator = torch.Generator().manual_seed(4)
    expert_out = magnitudes(12, 150, dtype, generator)
    expert_out[2, 3], expert_out[5, 140], expert_out[7, 149] = torch.nan, torch.inf, -torch.inf
    positions = some_index(40, 4, 12, generator)
    weights = torch.rand(40, 4, generator=generator) * 4 - 2
    weights[5, 0], weights[6, 1], weights[7, 2] = torch.inf, torch.nan, 0.0
    for record_dtype in (dtype,) if wire.quantized else DTYPES:
        expected = pack_weighted_sums_reference(expert_out, positions, weights, wire, record_dtype)
        got = packed(expert_out, positions, weights, wire, record_dtype)
        assert_same_records(spec, expected, got, wire, 150, record_dtype)


@every_wire
def test_an_absent_term_spoils_nothing(spec: str) -> None:
    wire = WireFormat.parse(spec)
    expert_out = torch.full((2, 20), torch.nan)
    expert_out[1] = torch.arange(20) - 9.5
    positions, weights = torch.tensor([[-1, 1, -1]]), torch.tensor([[torch.nan, 1.0, torch.inf]])
    got = packed(expert_out, positions, weights, wire, torch.float32)
    assert torch.equal(got, pack_rows_reference(expert_out[1:], wire, None))


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_exact_records_overflow_and_quantised_sums_saturate(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    x = torch.tensor([[largest, -largest, 1.0, torch.nan]]).to(dtype)
    twice = torch.tensor([[0, 0]])
    none, int8 = WireFormat.parse("none"), WireFormat.parse("int8:row")
    record = packed(x, twice, torch.ones(1, 2), none, dtype)
    assert record[:, :8].contiguous().view(dtype)[0, :3].tolist() == [torch.inf, -torch.inf, 2.0]
    assert record[:, 6:8].contiguous().view(dtype).isnan().all()
    finite = x[:, :3]
    exact = summed(pack_rows_reference(finite, none, None), twice, none, 3, dtype)
    assert exact.tolist() == [[torch.inf, -torch.inf, 2.0]]
    saturated = summed(pack_rows_reference(finite, int8, None), twice, int8, 3, dtype)
    assert saturated.tolist() == [[largest, -largest, 0.0]]


@every_dtype
@every_wire
def test_sums_of_records(spec: str, dtype: torch.dtype) -> None:
    wire = WireFormat.parse(spec)
    generator = torch.Generator().manual_seed(5)
    for hidden in HIDDENS:
        records = pack_rows_reference(torch.randn(9, hidden, generator=generator).to(dtype), wire, None)
        for terms in TERMS:
            record_index = some_index(6, terms, 9, generator)
            for out_dtype in DTYPES if wire.quantized else (dtype,):
                expected = sum_records_reference(records, record_index, wire, hidden, out_dtype)
                got = summed(records, record_index, wire, hidden, out_dtype)
                assert_same_bits(f"{spec} [{hidden}] of {terms} to {out_dtype}", expected, got)


@every_dtype
@every_wire
def test_sums_of_records_of_every_magnitude_with_nan(spec: str, dtype: torch.dtype) -> None:
    wire = WireFormat.parse(spec)
    generator = torch.Generator().manual_seed(6)
    x = magnitudes(12, 150, dtype, generator)
    x[2, 3], x[5, 140] = torch.nan, torch.inf
    records = pack_rows_reference(x, wire, None)
    record_index = some_index(40, 4, 12, generator)
    for out_dtype in DTYPES if wire.quantized else (dtype,):
        expected = sum_records_reference(records, record_index, wire, 150, out_dtype)
        assert_same_bits(f"{spec} to {out_dtype}", expected, summed(records, record_index, wire, 150, out_dtype))


def test_a_token_without_records_is_zero_and_not_minus_zero() -> None:
    wire = WireFormat.parse("int8")
    records = pack_rows_reference(torch.full((1, 30), -0.0), wire, None)
    for index in ([[-1, -1]], [[0, -1]]):
        got = summed(records, torch.tensor(index), wire, 30, torch.float32)
        assert torch.equal(got.view(torch.int32), torch.zeros(1, 30, dtype=torch.int32))


def test_terms_are_added_in_their_order() -> None:
    wire = WireFormat.parse("none")
    x = torch.tensor([[1e8], [1.0], [-1e8]])
    for order, total in (((0, 1, 2), 0.0), ((0, 2, 1), 1.0)):
        got = packed(x, torch.tensor([order]), torch.ones(1, 3), wire, torch.float32)
        assert got[:, :4].contiguous().view(torch.float32).item() == total
        records = pack_rows_reference(x, wire, None)
        assert summed(records, torch.tensor([order]), wire, 1, torch.float32).item() == total


def test_no_rows_is_no_work() -> None:
    wire = WireFormat.parse("int8")
    empty = torch.zeros(0, 3, dtype=torch.int64)
    assert packed(torch.zeros(0, 8), empty, torch.zeros(0, 3), wire, torch.float32).shape == (0, 32)
    assert summed(torch.zeros(0, 32, dtype=torch.uint8), empty, wire, 8, torch.float32).shape == (0, 8)
