"""The Triton kernels, run by Triton's interpreter, against the plain-torch references: equal to the last bit.

`TRITON_INTERPRET=1` must be set before Triton is imported, so each test runs its checks in a process of its own.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="interpreting kernels needs Triton")

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.wires import DTYPES, WIRES, assert_same_bits, magnitudes
from thinwire.comm.communicator import Communicator
from thinwire.testing import run_ranks
from thinwire.triton_kernels import pack, sums
from thinwire.triton_kernels.codec_reference import dequantize_reference, quantize_reference
from thinwire.wire import WireFormat

INTERPRETED = {"TRITON_INTERPRET": "1"}
POISON = 0xAB


def _poisoned_records(rows: int, row_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Records with guard bytes behind each row, and the whole."""
    whole = torch.full((rows, row_bytes + 32), POISON, dtype=torch.uint8)
    return whole[:, :row_bytes], whole


def _check_codec(spec: str, x: torch.Tensor) -> None:
    wire = WireFormat.parse(spec)
    expected = quantize_reference(x, wire)
    records, whole = _poisoned_records(*expected.shape)
    pack.pack_rows(x, wire, None, records)
    assert torch.equal(records, expected), f"records of {spec} {x.dtype} {list(x.shape)}"
    assert (whole[:, expected.shape[1] :] == POISON).all(), "bytes behind a record were written"
    for dtype in DTYPES if wire.quantized else (x.dtype,):
        out = torch.full((x.shape[0], x.shape[1] + 3), 7.0, dtype=dtype)
        pack.unpack_rows(records, wire, None, None, out[:, : x.shape[1]])
        rows = dequantize_reference(expected, wire, x.shape[1], dtype)
        assert_same_bits(f"{spec} to {dtype}", rows, out[:, :-3], any_nan=not wire.quantized)
        assert (out[:, -3:] == 7.0).all(), "elements behind a row were written"


def _codec_properties(comm: Communicator) -> None:
    @settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(
        st.sampled_from(WIRES),
        st.one_of(st.sampled_from([1, 7, 127, 128, 129]), st.integers(1, 400)),
        st.integers(0, 3),
        st.sampled_from(DTYPES),
        st.integers(0, 2**31),
        st.lists(st.tuples(st.integers(0, 2000), st.sampled_from([float("nan"), float("inf"), -float("inf"), -0.0]))),
    )
    def check(
        spec: str, hidden: int, rows: int, dtype: torch.dtype, seed: int, planted: list[tuple[int, float]]
    ) -> None:
        x = magnitudes(max(rows, 1), hidden, dtype, torch.Generator().manual_seed(seed))[:rows]
        for position, value in planted if rows else ():
            x.view(-1)[position % x.numel()] = value
        _check_codec(spec, x)

    check()


def _codec_of_long_rows(comm: Communicator) -> None:
    generator = torch.Generator().manual_seed(5)
    for spec in WIRES:
        for hidden in (4096, 7168, 9001):  # the last takes two tiles
            _check_codec(spec, magnitudes(2, hidden, torch.bfloat16, generator))


def _pack_and_unpack(comm: Communicator) -> None:
    x = torch.randn(7, 150).bfloat16()
    row_index = torch.tensor([6, 0, 0, 3])
    for spec in WIRES:
        wire = WireFormat.parse(spec)
        expected = pack.pack_rows_reference(x, wire, row_index)
        records, whole = _poisoned_records(*expected.shape)
        pack.pack_rows(x, wire, row_index, records)
        assert torch.equal(records, expected) and (whole[:, expected.shape[1] :] == POISON).all(), spec
        for record_index, target in ((None, None), (torch.tensor([2, 2]), None), (None, torch.tensor([5, 1, 0, 2]))):
            got = torch.full((8, 150), 7.0, dtype=x.dtype)
            want = got.clone()
            pack.unpack_rows(records, wire, record_index, target, got)
            pack.unpack_rows_reference(records, wire, record_index, target, want)
            assert_same_bits(spec, want, got)
        hostile = torch.randint(0, 256, records.shape, dtype=torch.uint8)
        got, want = torch.empty(2, len(hostile), 150, dtype=x.dtype)
        pack.unpack_rows(hostile, wire, None, None, got)
        pack.unpack_rows_reference(hostile, wire, None, None, want)
        assert_same_bits(f"{spec}, any bytes", want, got)


def _combine(comm: Communicator) -> None:
    for spec in WIRES:
        _check_combine(spec, 150)
    for spec in ("int8:row", "int8:row+h64"):
        _check_combine(spec, 9001)  # two tiles, so two passes
    _check_combine_of_records("int8+h64", 150)


def _check_combine(spec: str, hidden: int) -> None:
    generator = torch.Generator().manual_seed(1)
    wire = WireFormat.parse(spec)
    for source, target in ((torch.bfloat16, torch.bfloat16), (torch.float32, torch.float16)):
        expert_out = torch.randn(9, hidden, generator=generator).to(source)
        expert_out[8, 3], expert_out[8, 4] = torch.inf, torch.nan
        positions = torch.tensor([[0, 3, 5], [2, -1, -1], [-1, -1, -1], [8, 1, -1]])
        weights = torch.rand(4, 3, generator=generator)
        expected = sums.pack_weighted_sums_reference(expert_out, positions, weights, wire, target)
        records, whole = _poisoned_records(*expected.shape)
        sums.pack_weighted_sums(expert_out, positions, weights, wire, target, records)
        if wire.quantized:
            assert torch.equal(records, expected), spec
        else:  # which NaN a sum gives is the hardware's affair
            rows = [dequantize_reference(r, wire, hidden, target) for r in (expected, records)]
            assert_same_bits(spec, *rows)
            assert torch.equal(records[:, hidden * target.itemsize :], expected[:, hidden * target.itemsize :])
        assert (whole[:, expected.shape[1] :] == POISON).all(), spec
        record_index = torch.tensor([[0, 1, 3], [2, -1, -1], [-1, -1, -1]])
        out = torch.full((3, hidden), 7.0, dtype=target)
        sums.sum_records(records, record_index, wire, out)
        assert_same_bits(spec, sums.sum_records_reference(expected, record_index, wire, hidden, target), out)


def _combine_records(comm: Communicator) -> None:
    for spec, hidden in [(spec, 150) for spec in WIRES if spec != "none"] + [("int8:row", 9001), ("int8", 9001)]:
        _check_combine_of_records(spec, hidden)


def _check_combine_of_records(spec: str, hidden: int) -> None:
    """Records of any bytes are added up as what they stand for."""
    generator, wire = torch.Generator().manual_seed(1), WireFormat.parse(spec)
    rows = torch.randint(0, 256, (9, wire.row_bytes(hidden)), dtype=torch.uint8, generator=generator)
    rows[4:] = quantize_reference(torch.randn(5, hidden, generator=generator), wire)
    positions = torch.tensor([[0, 3, 5], [4, 7, 6], [2, -1, -1], [-1, -1, -1], [8, 5, -1]])
    weights = torch.rand(5, 3, generator=generator)
    records, _ = _poisoned_records(5, wire.row_bytes(hidden))
    sums.pack_weighted_sums(rows, positions, weights, wire, torch.bfloat16, records, hidden)
    expected = sums.pack_weighted_sums_reference(rows, positions, weights, wire, torch.bfloat16, hidden)
    assert torch.equal(records, expected), spec


def test_the_codec_equals_the_reference() -> None:
    run_ranks(_codec_properties, 1, env=INTERPRETED, timeout=300)


@pytest.mark.exhaustive
def test_the_codec_equals_the_reference_on_long_rows() -> None:
    run_ranks(_codec_of_long_rows, 1, env=INTERPRETED, timeout=300)


def test_pack_and_unpack_equal_their_references() -> None:
    run_ranks(_pack_and_unpack, 1, env=INTERPRETED, timeout=300)


def test_combine_equals_its_reference() -> None:
    run_ranks(_combine, 1, env=INTERPRETED, timeout=300)


@pytest.mark.exhaustive
def test_combine_of_records_equals_the_reference() -> None:
    run_ranks(_combine_records, 1, env=INTERPRETED, timeout=300)
