"""The time of programs: what follows from the latencies of single instructions, and what was measured on an H100."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the device compiles with Triton")

import torch
import triton

from benchmarks.latency import meter_round
from verification.ptx import latencies
from verification.ptx.device import Device
from verification.ptx.errors import PtxError
from verification.ptx.snippets import kernel

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def _cycles(body: str, threads: int = 32, programs: int = 1, words: torch.Tensor | None = None) -> float:
    """Of the longest program of a kernel; %rd1 points to `words`, by default zeros, and %rd10 to one of the thread."""
    device = Device(metered=True)
    body = "mov.u32 %r31, %tid.x; shl.b32 %r31, %r31, 2; cvt.u64.u32 %rd9, %r31; add.u64 %rd10, %rd1, %rd9;" + body
    words = torch.zeros(1 << 16, dtype=torch.int64) if words is None else words
    device.launch(kernel(body, 1, threads, 8192), {"words": words}, (programs,))
    return max(device.meters[-1].cycles.values())


def _each(body: str, threads: int = 32) -> float:
    """Cycles of one more repetition of `body`, behind 8; its result, %r1, is stored."""
    times = [_cycles("mov.u32 %r1, 0;" + body * count + "st.global.b32 [%rd10], %r1;", threads) for count in (8, 16)]
    return (times[1] - times[0]) / 8


def test_what_depends_on_a_result_waits_for_it_and_nothing_else_does() -> None:
    assert _each("add.u32 %r1, %r1, 1;") == pytest.approx(4, abs=0.1)
    assert _each("mul.lo.u64 %rd2, %rd2, %rd2; cvt.u32.u64 %r1, %rd2;") == pytest.approx(14, abs=0.1)
    independent = "add.u32 %r2, %r1, 1; add.u32 %r3, %r1, 2; mov.u32 %r4, %r3;"  # one is issued in a cycle
    assert _cycles(independent * 40) - _cycles(independent * 20) == pytest.approx(40, abs=1)


def test_a_load_is_near_once_its_sector_was_loaded_and_nothing_was_acquired_since() -> None:
    chain = "ld.global.b32 %r2, [%rd2+{}]; cvt.u64.u32 %rd3, %r2; add.u64 %rd2, %rd2, %rd3;"

    def took(*loads: str) -> float:
        return _cycles("mov.u64 %rd2, %rd1;" + "".join(loads) + "st.global.b32 [%rd2], %r2;")

    one, sum_of_address = took(chain.format(0)), 8
    assert took(chain.format(0), chain.format(16)) - one == pytest.approx(latencies.L1 + sum_of_address, abs=3)
    assert took(chain.format(0), chain.format(32)) - one == pytest.approx(latencies.L2 + sum_of_address, abs=3)
    assert took(chain.format(0), "fence.acq_rel.cta;", chain.format(16)) - one > latencies.L2


def test_what_does_not_fit_into_the_cache_comes_from_memory() -> None:
    load = "ld.global.b32 %r1, [%rd1]; st.global.b32 [%rd10], %r1;"
    large = torch.empty(latencies.L2_BYTES // 8 + 1, dtype=torch.int64)
    assert _cycles(load, words=large) - _cycles(load) == pytest.approx(latencies.HBM - latencies.L2, abs=1)


def test_a_branch_waits_for_its_predicate_and_what_follows_for_the_branch() -> None:
    adds = "add.u32 %r2, %r2, 1;" * 50
    load, decide = "ld.global.b32 %r1, [%rd1];", "setp.eq.u32 %p1, %r1, 0;"
    beside = _cycles(load + decide + adds + "@%p1 st.global.b32 [%rd10], %r2;")
    behind = _cycles(load + decide + "@%p1 bra next; next:" + adds + "st.global.b32 [%rd10], %r2;")
    assert behind - beside == pytest.approx(200 + latencies.BRANCH, abs=5)


def test_a_block_ends_where_a_branch_leads_though_nobody_comes_from_there() -> None:
    load, use = "ld.global.b32 %r1, [%rd1];", "add.u32 %r1, %r1, 1;"
    body = load + use + "{} ld.global.b32 %r2, [%rd1+128]; st.global.b32 [%rd10], %r2; ret; bra next;"
    apart = _cycles(body.format("next:")) - _cycles("bra next; next:" + body.replace("bra next;", "").format(""))
    assert apart > latencies.L2 - 50


def test_a_load_stays_behind_a_store_in_front_of_it() -> None:
    load, store = "ld.global.b32 %r{}, [%rd1+{}];", "st.global.b32 [%rd10+1024], %r1;"
    ends = "add.u32 %r3, %r1, %r2; st.global.b32 [%rd10], %r3;"
    behind = _cycles(load.format(1, 0) + store + load.format(2, 128) + ends)
    beside = _cycles(load.format(1, 0) + load.format(2, 128) + store + ends)
    assert behind - beside == pytest.approx(latencies.L2, abs=5)


def test_who_does_not_load_waits_for_no_memory() -> None:
    body = "setp.eq.u32 %p1, %r31, 9; mov.u32 %r1, 7; @{}%p1 ld.global.b32 %r1, [%rd1]; st.global.b32 [%rd10], %r1;"
    assert _cycles(body.format("!")) - _cycles(body.format("")) > latencies.L2 - 5


def test_a_register_that_is_not_written_has_waited_for_the_predicate() -> None:
    body = (
        "mov.u32 %r2, 7; ld.global.b32 %r1, [%rd1]; setp.ne.u32 %p1, %r1, 0; {} add.u32 %r2, %r2, 1;"
        + 20 * "add.u32 %r2, %r2, 1;"
        + "st.global.b32 [%rd10], %r2;"
    )
    waits, goes_on = (_cycles(body.format(predicate)) for predicate in ("@%p1", ""))
    assert waits - goes_on > 80


def test_a_store_is_waited_for_by_nothing_but_a_fence_and_its_data_by_the_end_of_a_block() -> None:
    store = "st.global.b32 [%rd10], %r1;"
    assert _cycles(store * 2) - _cycles(store) < 3
    fences = [_cycles(store + f"fence.acq_rel.{scope};") - _cycles(store) for scope in ("gpu", "sys")]
    assert fences == pytest.approx([latencies.FENCES["gpu"], latencies.FENCES["sys"]], abs=3)


def test_a_barrier_takes_the_latest_warp() -> None:
    late = "setp.lt.u32 %p1, %r31, 128; @!%p1 bra meet;" + "add.u32 %r1, %r1, 1;" * 100 + "meet: {} {}"
    meets, parts = (_cycles(late.format(barrier, "add.u32 %r1, %r1, 1;" * 100), 64) for barrier in ("bar.sync 0;", ""))
    assert 900 > meets > 800  # the other warp would be done with its second hundred at 400
    assert meets - parts == pytest.approx(latencies.BARRIER + 2 * latencies.BARRIER_WARP, abs=4)


def test_a_path_is_what_the_last_of_its_warps_waited_for() -> None:
    """Warp 0 adds a hundred times, warp 1 waits for it and then for a load."""
    body = "mov.u32 %r31, %tid.x; mov.u32 %r1, %tid.x; setp.ge.u32 %p1, %r31, 32; @%p1 bra meet;"
    body += "add.u32 %r1, %r1, 1;" * 100 + "st.global.b32 [%rd1], %r1; meet: bar.sync 0; @!%p1 ret;"
    body += "ld.global.b32 %r2, [%rd1]; st.global.b32 [%rd1], %r2;"
    device = Device(metered=True)
    device.launch(kernel(body, 1, 64), {"words": torch.zeros(64, dtype=torch.int64)})
    launch = device.meters[0]
    (adds, added), (load, loads), *_ = launch.path.items()
    assert "st.global.b32 [%rd1], %r2" in load and "st.global.b32 [%rd1], %r1" in adds
    assert loads == pytest.approx(latencies.L2, abs=5) and added == pytest.approx(400, abs=25)
    assert sum(launch.path.values()) == pytest.approx(launch.cycles[0], abs=2)


def test_another_programs_flag_is_seen_after_it_was_stored() -> None:
    body = """
        mov.u32 %r1, %ctaid.x; setp.ne.u32 %p1, %r1, 0; @%p1 bra look;
        mov.u32 %r2, 1; st.release.sys.global.b32 [%rd1], %r2; ret;
        look: ld.acquire.sys.global.b32 %r3, [%rd1]; setp.eq.u32 %p2, %r3, 0; @%p2 bra look;
    """
    least = latencies.FENCES["sys"] + latencies.FLIGHT
    assert least < _cycles(body, programs=2) < least + 3 * latencies.STRONG_LOAD


@pytest.mark.parametrize("what,threads,body", [
    ("atom.add.acq_rel.gpu", 1, "atom.acq_rel.gpu.global.add.u32 %r1, [%rd1], %r1;"),
    ("atom.add.relaxed.gpu", 1, "atom.relaxed.gpu.global.add.u32 %r1, [%rd1], %r1;"),
    ("atom.add.acq_rel.sys", 1, "atom.acq_rel.sys.global.add.u32 %r1, [%rd1], %r1;"),
    ("ld.acquire.sys", 1, "ld.acquire.sys.global.b32 %r1, [%rd1];"),
    ("store and fence.acq_rel.sys, 1 thread", 1, "st.global.b32 [%rd1], %r2; fence.acq_rel.sys;"),
    ("store and fence.acq_rel.gpu, 1 thread", 1, "st.global.b32 [%rd1], %r2; fence.acq_rel.gpu;"),
    ("store and fence.acq_rel.sys, 256 threads", 256, "{lines} st.global.b32 [%rd8], %r2; fence.acq_rel.sys;"),
    ("store and fence.acq_rel.gpu, 256 threads", 256, "{lines} st.global.b32 [%rd8], %r2; fence.acq_rel.gpu;"),
    ("barrier of 128 threads", 128, "bar.sync 0;"),
    ("barrier of 512 threads", 512, "bar.sync 0;"),
    ("barrier of 1024 threads", 1024, "bar.sync 0;"),
    ("load from shared memory", 32, "shl.b32 %r5, %r1, 2; ld.shared.b32 %r1, [%r5]; and.b32 %r1, %r1, 31;"),
    ("exchange through shared memory, 256 threads", 256,
     "st.shared.b32 [%r31], %r1; bar.sync 0; ld.shared.b32 %r1, [%r31+4]; bar.sync 0;"),
])  # fmt: skip
def test_times_are_those_that_were_measured(what: str, threads: int, body: str) -> None:
    measured = float(
        re.search(rf"^{re.escape(what)}: (\d+) cycles$", (RESULTS / "h100/latency.txt").read_text(), re.M)[1]
    )
    body = body.format(lines="mul.wide.u32 %rd7, %r31, 32; add.u64 %rd8, %rd1, %rd7;")
    if threads == 1:
        body = f"setp.eq.u32 %p1, %r31, 0; {' '.join('@%p1 ' + each + ';' for each in body.split(';')[:-1])}"
    assert _each(body, max(32, threads)) == pytest.approx(measured, rel=0.1)


def test_a_product_has_no_time() -> None:
    with pytest.raises(PtxError, match="no latency is known"):
        _cycles("cp.async.wait_all;")


def test_the_file_of_a_round_has_the_times_of_this_code() -> None:
    """Those of kernels that move no rows, of 128 tokens; `python -m benchmarks.latency` writes it."""
    kept = json.loads((RESULTS / "latency.json").read_text())
    if kept["machine"]["triton"] != triton.__version__:
        pytest.skip(f"the file is of Triton {kept['machine']['triton']}")
    small = ("wait_kernel", "count_kernel", "place_kernel")
    found = [(each.kernel, max(each.cycles.values())) for each, _ in meter_round(128, few=1) if each.kernel in small]
    lines = [
        (line["kernel"], line["cycles"])
        for line in kept["figures"]
        if (line["tokens"], line["wire"], line["machine"]) == (128, "int8", "8 x H100") and line["kernel"] in small
    ]
    assert [kernel for kernel, _ in found] == [kernel for kernel, _ in lines] and len(found) == 4
    # Where tensors begin changes how many lines their stores touch.
    assert [cycles for _, cycles in found] == pytest.approx([cycles for _, cycles in lines], rel=0.02)
