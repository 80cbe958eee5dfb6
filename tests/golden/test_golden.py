"""The bytes of every format are committed: whoever changes them must raise the wire's version."""

from __future__ import annotations

import json

import pytest
import torch

from tests.golden.make_golden import HIDDEN, PATH, golden_records, golden_row
from tests.helpers.wires import WIRES, assert_same_bits
from thinwire.fused.codec import quantize
from thinwire.triton_kernels.codec_reference import dequantize_reference
from thinwire.wire import WIRE_VERSION, WireFormat

GOLDEN = json.loads(PATH.read_text())


def test_the_committed_bytes_are_of_this_wire_version() -> None:
    assert GOLDEN["wire_version"] == WIRE_VERSION


def test_the_reference_writes_the_committed_bytes() -> None:
    assert golden_records() == GOLDEN["records"]


@pytest.mark.parametrize("spec", WIRES)
def test_quantize_writes_the_committed_bytes(spec: str) -> None:
    for name, x in (("float32", golden_row()), ("bfloat16", golden_row().bfloat16())):
        assert quantize(x, spec).records.numpy().tobytes().hex() == GOLDEN["records"][f"{spec} {name}"]


def test_int8_bytes_can_be_worked_out_by_hand() -> None:
    record = torch.tensor(list(bytes.fromhex(GOLDEN["records"]["int8:row float32"])), dtype=torch.uint8)
    row = golden_row()[0]
    scale = float(record[80:84].clone().view(torch.float32))
    assert scale == float(row.abs().max() * torch.tensor(1 / 127))
    expected = [round(value / scale) for value in row.double().tolist()]  # Python rounds half to even, too
    assert record[:HIDDEN].view(torch.int8).tolist() == expected
    assert record[HIDDEN:80].tolist() == [0] * 3 and record[84:].tolist() == [0] * 12


def test_none_holds_the_elements_themselves() -> None:
    record = torch.tensor([list(bytes.fromhex(GOLDEN["records"]["none float32"]))], dtype=torch.uint8)
    assert_same_bits(
        "none", golden_row(), dequantize_reference(record, WireFormat.parse("none"), HIDDEN, torch.float32)
    )
