"""A small part of the matrix; `python -m verification.ahead_of_time.matrix` is the whole."""

from __future__ import annotations

import re
from dataclasses import replace
from unittest import mock

import pytest

pytest.importorskip("triton", reason="compiling kernels needs Triton")

import triton
import triton.language as tl

from tests.helpers.rounds import make_lanes
from tests.helpers.speeds import exhaustive_but
from thinwire.triton_kernels import SCOPE_VARIABLE, SCOPES, arrive_scope, dispatch, signal
from verification.ahead_of_time.harness import Launch, compile_launch, inspect, inspect_signals, record_launches
from verification.ahead_of_time.matrix import (
    COLLECTIVE_KERNELS,
    COLLECTIVE_ROWS,
    CONTROL_KERNELS,
    EXPERT_KERNELS,
    KERNELS,
    LEG_WAITS,
    PUBLISHERS,
    RECORD_KERNELS,
    TWO_LEVEL_KERNELS,
    Case,
    check,
    check_signals,
    check_tensor_cores,
    compile_case,
    compiled_case,
    launch_of,
)

TARGETS = ("sm_80", "sm_90", "gfx942")


def _row_length(kernel: str) -> int:
    return COLLECTIVE_ROWS[-1] if kernel in COLLECTIVE_KERNELS else 7168


@pytest.mark.parametrize("target", exhaustive_but(["sm_90"], TARGETS))
@pytest.mark.parametrize("kernel", exhaustive_but(["quantize", "send_tokens", "reduce"], KERNELS))
def test_int8_kernels_neither_spill_nor_fuse_and_move_wide_words(kernel: str, target: str) -> None:
    case = Case(kernel, "int8", _row_length(kernel), target)
    report = compile_case(case)
    assert not check(case, report), report


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("wire", ["int8", "none"])
@pytest.mark.parametrize("kernel", TWO_LEVEL_KERNELS)
def test_kernels_of_two_levels_do_not_spill_either(kernel: str, wire: str, target: str) -> None:
    case = Case(kernel, wire, 7168, target)
    report = compile_case(case)
    assert not check(case, report), report
    assert not (kernel in PUBLISHERS and target.startswith("sm_") and check_signals(case))


@pytest.mark.parametrize("target", exhaustive_but(["sm_90"], ["sm_80", "sm_90", "sm_100", "gfx942"]))
@pytest.mark.parametrize("kernel", exhaustive_but(["gate_and_up"], EXPERT_KERNELS))
def test_products_of_experts_are_int8_on_tensor_cores_and_do_not_spill(kernel: str, target: str) -> None:
    gate = kernel.startswith("gate")
    case = Case(kernel, "int8" if gate else "int8:64", 7168 if gate else 2048, target)
    report = compile_case(case)
    assert not check(case, report) + check_tensor_cores(case), report


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("wire", ["int8", "none"])
@pytest.mark.parametrize("kernel", ["send_sums", "sum_home"])
def test_sums_that_bring_gradients_of_router_weights_do_not_spill_either(kernel: str, wire: str, target: str) -> None:
    case = Case(kernel, wire, 7168, target, backward=True)
    report = compile_case(case)
    assert not check(case, report), report
    assert not (kernel in PUBLISHERS and target.startswith("sm_") and check_signals(case))


@pytest.mark.parametrize("target", exhaustive_but(["sm_90"], TARGETS))
def test_single_rows_of_experts_do_not_spill_either(target: str) -> None:
    for kernel in ("send_sums", "sum_home"):
        case = Case(kernel, "int8", 7168, target, invariant=True)
        report = compile_case(case)
        assert not check(case, report), report


@pytest.mark.parametrize("rows", exhaustive_but(["as they are"], ["records", "as they are"]))
@pytest.mark.parametrize("target", exhaustive_but(["sm_90"], TARGETS))
def test_experts_rows_that_are_records_do_not_spill_either(rows: str, target: str) -> None:
    for kernel in RECORD_KERNELS[: 2 - (rows == "as they are")]:
        case = Case(kernel, "int8", 7168, target, rows=rows)
        report = compile_case(case)
        assert not check(case, report), report
        assert not (kernel in PUBLISHERS and target.startswith("sm_") and check_signals(case))


@pytest.mark.exhaustive
@pytest.mark.parametrize("wire", ["int8:row", "int4", "none"])
@pytest.mark.parametrize("kernel", COLLECTIVE_KERNELS)
def test_collectives_of_other_wires_neither_spill_nor_fuse_and_move_wide_words(kernel: str, wire: str) -> None:
    case = Case(kernel, wire, COLLECTIVE_ROWS[0], "sm_90")
    report = compile_case(case)
    assert not check(case, report) and not (kernel in PUBLISHERS and check_signals(case)), report


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
@pytest.mark.parametrize("kernel", CONTROL_KERNELS)
def test_kernels_that_route_and_wait_do_not_spill(kernel: str, target: str) -> None:
    case = Case(kernel, "int8", 7168, target)
    report = compile_case(case)
    assert not check(case, report), report


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("kernel", PUBLISHERS)
def test_a_publication_is_one_fence_behind_a_barrier(kernel: str, target: str) -> None:
    assert not check_signals(Case(kernel, "int8", _row_length(kernel), target))


@pytest.mark.parametrize("kernel", ["wait_dispatch", "wait_combine", *LEG_WAITS])
def test_a_wait_reads_flags_in_acquire_order_at_system_scope(kernel: str) -> None:
    assert inspect_signals(compiled_case(Case(kernel, "int8", _row_length(kernel), "sm_90"))).acquires >= 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("wire", ["int8:row", "int4", "fp8", "none"])
def test_every_wire_compiles_for_a_row_that_is_no_multiple_of_anything(wire: str) -> None:
    for kernel in ("pack_weighted_sums", "send_tokens"):
        report = compile_case(Case(kernel, wire, 5121, "sm_90"))
        assert report.spills == 0 and report.fused == 0, (kernel, report)


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", ["sm_120", "gfx942"])
@pytest.mark.parametrize("kernel", ["quantize", "pack_weighted_sums"])
def test_one_scale_for_a_row_of_several_tiles_stays_within_a_programs_means(kernel: str, target: str) -> None:
    case = Case(kernel, "int8:row", 50000, target)
    report = compile_case(case)
    assert not check(case, report), report


def test_a_word_at_another_place_is_compiled_anew() -> None:
    launch = record_launches(dispatch.close_round, make_lanes(2, 4, 2, 64, 8)[0])[0]
    moved = replace(launch.arguments["ROUND"], EPOCH=5)
    other = Launch(launch.kernel, launch.arguments | {"ROUND": moved}, launch.options)
    assert compile_launch(launch, "sm_90").asm["ptx"] != compile_launch(other, "sm_90").asm["ptx"]


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


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_programs_arrive_at_the_scope_that_the_environment_names(target: str, scope: str) -> None:
    """And nothing else of the code is another."""
    with mock.patch.dict("os.environ", {SCOPE_VARIABLE: scope}), mock.patch.object(signal, "_scope", arrive_scope):
        signal._launch.cache_clear()
        launch = launch_of(Case("send_tokens", "int8", 2048, target))
    signal._launch.cache_clear()
    ptx = _code(launch, target)
    assert re.findall(r"\batom\.\S*?(\w+)\.acq_rel\b", ptx) == [scope]
    plain = replace(launch, arguments=launch.arguments | {"LAUNCH": replace(launch.arguments["LAUNCH"], SCOPE="gpu")})
    assert ptx.replace(f"{scope}.acq_rel", "gpu.acq_rel") == _code(plain, target)


def _code(launch: Launch, target: str) -> str:
    """The PTX, without what names the files that it was compiled from: Triton's cache may be that of another folder."""
    return str(compile_launch(launch, target).asm["ptx"]).partition("\t.file")[0]


@triton.jit
def _publish_one_by_one(flags_ptr, x_ptr, BARRIER: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    tl.store(x_ptr + columns, columns.to(tl.float32))
    if BARRIER:
        tl.debug_barrier()
    for peer in tl.static_range(4):
        tl.atomic_xchg(flags_ptr + peer, 1, sem="release", scope="sys")


@pytest.mark.parametrize("barrier", [True, False])
def test_the_checks_would_see_a_fence_for_each_peer_and_a_missing_barrier(barrier: bool) -> None:
    import torch

    arguments = {"flags_ptr": torch.zeros(4, dtype=torch.int32), "x_ptr": torch.zeros(1024), "BLOCK": 1024}
    signals = inspect_signals(compile_launch(Launch(_publish_one_by_one, arguments | {"BARRIER": barrier}), "sm_80"))
    assert signals.system_fences == signals.exchanges == 4
    if triton.__version__ < "3.9":  # later versions put a barrier before a release themselves
        assert signals.after_barrier == barrier
