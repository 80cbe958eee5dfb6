"""Packing and unpacking on the CPU against the plain-torch reference: equal to the last bit."""

from __future__ import annotations

import pytest

pytest.importorskip("numba", reason="the CPU kernels need numba")

import torch

from tests.helpers.wires import DTYPES, WIRES, assert_same_bits, magnitudes
from thinwire.triton_kernels.cpu.pack import pack_rows, unpack_rows
from thinwire.triton_kernels.pack import pack_rows_reference, unpack_rows_reference
from thinwire.wire import WireFormat

POISON = 0xA5
INDICES = {"in order": None, "chosen": [3, 0, 0, 6], "reversed": [6, 5, 4, 3, 2, 1, 0], "one": [2], "none": []}

every_wire = pytest.mark.parametrize("spec", WIRES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def index_of(name: str) -> torch.Tensor | None:
    numbers = INDICES[name]
    return None if numbers is None else torch.tensor(numbers, dtype=torch.int64)


def poisoned(rows: int, row_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    memory = torch.full((rows + 1, row_bytes + 16), POISON, dtype=torch.uint8)
    return memory[:rows, :row_bytes], memory


@every_dtype
@every_wire
def test_packing_gathers_and_quantises(spec: str, dtype: torch.dtype) -> None:
    wire = WireFormat.parse(spec)
    generator = torch.Generator().manual_seed(0)
    for hidden in (1, 1025):
        x = magnitudes(7, hidden + 2, dtype, generator)[:, 1:-1]
        for name in INDICES:
            expected = pack_rows_reference(x, wire, index_of(name))
            records, memory = poisoned(*expected.shape)
            pack_rows(x, wire, index_of(name), records)
            assert torch.equal(records, expected), (hidden, name)
            assert (memory[:-1, expected.shape[1] :] == POISON).all() and (memory[-1] == POISON).all()


def test_packing_takes_as_many_rows_as_there_are_records() -> None:
    wire = WireFormat.parse("int8")
    x = torch.randn(7, 150)
    records, memory = poisoned(3, wire.row_bytes(150))
    pack_rows(x, wire, None, records)
    assert torch.equal(records, pack_rows_reference(x[:3], wire, None))
    assert (memory[-1] == POISON).all()


@every_dtype
@every_wire
@pytest.mark.parametrize(
    ("record_index", "row_index"),
    [(None, None), ([4, 4, 0, 2], None), (None, [6, 0, 3, 1, 5]), ([4, 4, 0], [2, 0, 5]), ([], []), ([], None)],
    ids=str,
)
def test_unpacking_dequantises_into_place(
    record_index: list[int] | None, row_index: list[int] | None, spec: str, dtype: torch.dtype
) -> None:
    wire = WireFormat.parse(spec)
    chosen = None if record_index is None else torch.tensor(record_index, dtype=torch.int64)
    placed = None if row_index is None else torch.tensor(row_index, dtype=torch.int64)
    for hidden in (1, 1025):
        records = pack_rows_reference(torch.randn(5, hidden).to(dtype), wire, None)
        memory = torch.full((8, hidden + 3), 7.0, dtype=dtype)
        expected = memory.clone()
        unpack_rows(records, wire, chosen, placed, memory[:7, :hidden])
        unpack_rows_reference(records, wire, chosen, placed, expected[:7, :hidden])
        assert_same_bits(f"{spec} [{hidden}]", expected, memory)  # rows that are not named, and guards, included


@every_wire
def test_an_index_may_be_a_column_of_a_table(spec: str) -> None:
    wire = WireFormat.parse(spec)
    table = torch.tensor([[1, 9], [0, 9], [2, 9]])
    x = torch.randn(3, 40)
    records = torch.zeros(3, wire.row_bytes(40, x.dtype), dtype=torch.uint8)
    pack_rows(x, wire, table[:, 0], records)
    assert torch.equal(records, pack_rows_reference(x, wire, table[:, 0]))
    out, expected = torch.zeros(3, 40), torch.zeros(3, 40)
    unpack_rows(records, wire, table[:, 0], table[:, 0], out)
    unpack_rows_reference(records, wire, table[:, 0], table[:, 0], expected)
    assert torch.equal(out, expected)


def test_records_are_aligned_to_16_bytes_at_least() -> None:
    wire = WireFormat("int8", 128, alignment=16)
    x = torch.randn(4, 130)
    stride = wire.row_bytes(130) + 16
    memory = torch.full((4 * stride + 16,), POISON, dtype=torch.uint8)
    records = memory[16:].view(4, stride)[:, : wire.row_bytes(130)]
    pack_rows(x, wire, None, records)
    assert torch.equal(records, pack_rows_reference(x, wire, None))
    out = torch.zeros(4, 130)
    unpack_rows(records, wire, None, None, out)
    expected = torch.zeros(4, 130)
    unpack_rows_reference(records, wire, None, None, expected)
    assert torch.equal(out, expected)
