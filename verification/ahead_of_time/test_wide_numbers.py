"""Numbers that may pass 2**31: what a launch brings by value, and where things lie in a rank's memory."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton", reason="compiling kernels needs Triton")

from thinwire.fused.collective import collective_layout
from verification.ahead_of_time.harness import compile_launch
from verification.ahead_of_time.matrix import COLLECTIVE_ROWS, Case, launch_of

#: Kernels that take times, counts or displacements.
KERNELS = ("wait_dispatch", "wait_headers", "wait_room", "wait_first_leg", "wait_second_leg", "note", "scatter")


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_number_past_32_bits_is_no_kernel_of_its_own(kernel: str) -> None:
    launch = launch_of(Case(kernel, "int8", COLLECTIVE_ROWS[-1], "sm_90"))
    wide = [
        parameter
        for parameter in launch.kernel.params
        if re.fullmatch(r"\w+_ns|[a-d]\d|unit|per_piece|signature_\d", parameter.name)
    ]
    assert wide and {parameter.annotation_type for parameter in wide} == {"i64"}


def test_a_half_of_more_than_2_gib_is_addressed_in_64_bits() -> None:
    launch = launch_of(Case("reduce", "int8", COLLECTIVE_ROWS[-1], "sm_90"))
    slot_bytes = 1 << 29
    launch.arguments["LEGS"] = collective_layout(8, slot_bytes)
    text = compile_launch(launch, "sm_90").asm["ttir"]
    assert f"{slot_bytes} : i64" in text
    assert not re.findall(rf"\b{slot_bytes} : i32", text)
