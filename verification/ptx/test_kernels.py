"""Kernels that move rows without waiting, as compiled code that runs here; and that every kernel could.

Kernels that wait for other ranks, or programs, are in the tests beside this one.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("triton", reason="compiling kernels needs Triton")

import torch

from tests.helpers.expert_rows import CASES, check_products, make_rows, make_weights
from tests.helpers.speeds import exhaustive_but
from tests.helpers.wires import WIRES, assert_same_bits
from tests.triton_kernels.test_interpreted import _check_combine, _combine_records, _pack_and_unpack
from thinwire.triton_kernels.expert_gemm import expert_gemm, expert_gemm_reference
from thinwire.wire import WireFormat
from verification.ahead_of_time.matrix import Case, cases, compiled_case
from verification.ptx.block import CONTROL, Block
from verification.ptx.device import Device
from verification.ptx.memory import GlobalMemory
from verification.ptx.program import parse
from verification.ptx.state import State


def _check_decodes(case: Case) -> None:
    compiled = compiled_case(case)
    program = parse(compiled.asm["ptx"])
    arguments = dict.fromkeys((name for name, _ in program.parameters), 0)
    memory, nowhere = GlobalMemory(), (0, 0, 0)
    state = State(program, arguments, nowhere, (1, 1, 1), memory, compiled.metadata.shared, None, None, int)
    block = Block(state)
    for instruction in program.code:
        if instruction.name not in CONTROL or "warp" in instruction.opcode:
            block.decode(instruction)


@pytest.mark.parametrize("kernel", ["send_tokens", "gate_and_up"])
def test_every_instruction_of_a_kernel_is_understood(kernel: str) -> None:
    _check_decodes(Case(kernel, "int8", 7168, "sm_90"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kernel", sorted({case.kernel for case in cases()}))
def test_every_instruction_of_every_kernel_is_understood(kernel: str) -> None:
    for case in cases():
        if case.kernel == kernel and case.target == "sm_90":
            _check_decodes(case)


@pytest.fixture
def device() -> Iterator[Device]:
    """What is launched runs on it, and none of it races."""
    device = Device(races=True, warps="any order")
    with device.patch():
        yield device
    assert not device.races.found


@pytest.mark.exhaustive
def test_packed_and_unpacked_rows_are_the_references(device: Device) -> None:
    _pack_and_unpack(None)


@pytest.mark.parametrize("wire", exhaustive_but(["int8:64"], WIRES))
def test_weighted_sums_and_sums_of_records_are_the_references(device: Device, wire: str) -> None:
    _check_combine(wire, 150)


@pytest.mark.exhaustive
def test_sums_of_records_of_any_bytes_are_the_references(device: Device) -> None:
    _combine_records(None)


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}x{case[2]}")
def test_products_of_experts_are_the_references(case: tuple, target: str) -> None:
    """The second case has enough rows for the products of four warps on sm_90; sm_80 has those of one."""
    device = Device(target)
    with device.patch():
        check_products(expert_gemm, [case])


@pytest.mark.parametrize(
    "case", exhaustive_but([CASES[2]], CASES[:4]), ids=lambda case: f"{case[0]}-{case[1]}x{case[2]}"
)
def test_products_of_experts_do_not_race(case: tuple) -> None:
    wire, inward, outward, counts, align = case
    records, index, offsets = make_rows(WireFormat.parse(wire), inward, counts, align)
    weights = make_weights(inward, outward, len(counts), gated=True)
    got, expected = torch.full((2, len(index), outward), 7.0)
    device = Device(races=True, warps="any order")
    with device.patch():
        expert_gemm(records, WireFormat.parse(wire), index, offsets, weights, got)
    assert not device.races.found
    expert_gemm_reference(records, WireFormat.parse(wire), index, offsets, weights, expected)
    assert_same_bits("products", expected, got)
