"""A small part of the matrix; `python -m tests.ahead_of_time.matrix` is the whole."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="compiling kernels needs Triton")

import triton
import triton.language as tl

from tests.ahead_of_time.harness import Launch, compile_launch, inspect
from tests.ahead_of_time.matrix import KERNELS, Case, check, compile_case


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_int8_kernels_neither_spill_nor_fuse_and_move_wide_words(kernel: str, target: str) -> None:
    case = Case(kernel, "int8", 7168, target)
    report = compile_case(case)
    assert not check(case, report), report


@pytest.mark.parametrize("wire", ["int8:row", "int4", "fp8", "none"])
def test_every_wire_compiles_for_a_row_that_is_no_multiple_of_anything(wire: str) -> None:
    case = Case("pack_weighted_sums", wire, 5121, "sm_90")
    report = compile_case(case)
    assert report.spills == 0 and report.fused == 0, report


@pytest.mark.parametrize("target", ["sm_120", "gfx942"])
@pytest.mark.parametrize("kernel", ["quantize", "pack_weighted_sums"])
def test_one_scale_for_a_row_of_several_tiles_stays_within_a_programs_means(kernel: str, target: str) -> None:
    case = Case(kernel, "int8:row", 50000, target)
    report = compile_case(case)
    assert not check(case, report), report


@triton.jit
def _multiply_add(x_ptr, y_ptr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    tl.store(y_ptr + columns, tl.load(x_ptr + columns) * 3.0 + tl.load(y_ptr + columns))


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_the_matrix_would_see_a_fused_multiply_add(target: str) -> None:
    import torch

    x = torch.zeros(1024)
    fused = compile_launch(Launch(_multiply_add, {"x_ptr": x, "y_ptr": x, "BLOCK": 1024}), target)
    separate = compile_launch(
        Launch(_multiply_add, {"x_ptr": x, "y_ptr": x, "BLOCK": 1024}, {"enable_fp_fusion": False}), target
    )
    assert inspect(separate, target).fused == 0
    assert inspect(fused, target).fused > 0
