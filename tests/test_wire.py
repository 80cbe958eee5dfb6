"""The record's layout and the grammar of its names."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.wires import WIRES
from thinwire.wire import FORMATS, WireFormat


@pytest.mark.parametrize(
    ("spec", "bytes_per_element"),
    [
        ("int8", 1.018),
        ("int8:row", 1.004),
        ("int8:64", 1.031),
        ("int8:32", 1.063),
        ("int4", 0.563),
        ("fp8", 1.018),
        ("int6", 0.768),
        ("int10", 1.268),
        ("int8+h64", 1.018),
        ("int6:64+h64", 0.781),
        ("int10+h64", 1.268),
        ("none", 2.0),
    ],
)
def test_bytes_per_element_at_7168_are_those_of_the_table(spec: str, bytes_per_element: float) -> None:
    wire = WireFormat.parse(spec)
    assert wire.row_bytes(7168, torch.bfloat16) / 7168 == pytest.approx(bytes_per_element, abs=6e-4)


def test_a_format_lies_at_the_place_that_is_its_number() -> None:
    assert [each.kind for each in FORMATS.values()] == [*range(len(FORMATS))]
    assert all(each.qmax <= each.bound for each in FORMATS.values())


@given(st.sampled_from(WIRES), st.integers(1, 20000), st.sampled_from([16, 32, 64, 256]))
def test_sections_are_aligned_and_do_not_overlap(spec: str, hidden: int, alignment: int) -> None:
    wire = replace(WireFormat.parse(spec), alignment=alignment)
    payload, scales = wire.payload_bytes(hidden, torch.bfloat16), wire.scales_offset(hidden, torch.bfloat16)
    end = scales + wire.num_groups(hidden) * wire.scale_bytes
    assert payload <= scales < payload + 16 and scales % 16 == 0
    assert end <= wire.row_bytes(hidden, torch.bfloat16) < end + 16 + alignment
    assert wire.row_bytes(hidden, torch.bfloat16) % alignment == 0


@pytest.mark.parametrize("spec", WIRES)
def test_a_name_survives_parsing_and_printing(spec: str) -> None:
    assert str(WireFormat.parse(spec)) == spec
    assert WireFormat.parse(WireFormat.parse(spec)) == WireFormat.parse(spec)


def test_rows_that_travel_in_blocks_are_filled_up() -> None:
    for spec, columns in (("int8", 130), ("int8+h64", 192), ("int4+h64", 192), ("int6", 192)):
        wire = WireFormat.parse(spec)
        assert wire.columns(130) == columns and wire.payload_bytes(130) == columns * FORMATS[wire.name].bits // 8
    assert repr(WireFormat.parse("int6:64+h64")) == "WireFormat(name='int6', group=64, alignment=32, rotated=True)"


def test_an_interrupt_in_the_middle_of_repr_changes_no_later_one() -> None:
    wire = WireFormat.parse("int8:64")
    text = "WireFormat(name='int8', group=64, alignment=32)"
    for at in range(1, 30):
        seen = 0

        def interrupt(frame: object, event: str, argument: object, at: int = at) -> None:
            nonlocal seen
            seen += 1
            if seen == at:
                raise KeyboardInterrupt

        with contextlib.suppress(KeyboardInterrupt):
            try:
                sys.setprofile(interrupt)
                repr(wire)
            finally:
                sys.setprofile(None)  # which is an event, too, and ends here or by what it raises
        assert repr(wire) == text, at
