"""Which threads of a program run, and where they meet."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="the device compiles with Triton")

import numpy as np
import torch

from verification.ptx.device import Device
from verification.ptx.errors import PtxError
from verification.ptx.snippets import evaluate, kernel

SUM_OF_ODD = """
    mov.u32 {d}, 0; mov.u32 %r1, 0;
    loop: setp.ge.u32 %p1, %r1, {a}; @%p1 bra done;
    and.b32 %r2, %r1, 1; setp.eq.u32 %p2, %r2, 0; @%p2 bra even; add.u32 {d}, {d}, %r1; bra next;
    even: add.u32 {d}, {d}, 1000;
    next: add.u32 %r1, %r1, 1; bra loop;
    done: redux.sync.add.s32 %r3, {d}, -1; add.u32 {d}, {d}, %r3;
"""


def test_threads_that_part_meet_again() -> None:
    """Loops of different lengths with branches within, and behind them an instruction for whole warps."""
    rounds = np.array([number * 7 % 23 for number in range(64)], np.uint32)
    own = [sum(step if step % 2 else 1000 for step in range(count)) for count in rounds.tolist()]
    expected = [value + sum(own[number // 32 * 32 :][:32]) for number, value in enumerate(own)]
    assert evaluate(SUM_OF_ODD, rounds).tolist() == expected


def _run(body: str, threads: int = 64, seed: int = 0, warps: str = "any order") -> list[int]:
    out = torch.full((threads,), -1, dtype=torch.int32)
    start = "mov.u32 %r31, %tid.x; mul.wide.u32 %rd30, %r31, 4; add.u64 %rd10, %rd1, %rd30;"
    ptx = kernel(start + body, threads=threads, shared_bytes=1024)
    Device(seed=seed, warps=warps).launch(ptx, {"out": out})
    return out.tolist()


REVERSED = """
    mov.u32 %r6, buffer; shl.b32 %r5, %r31, 2; add.u32 %r5, %r5, %r6; st.shared.b32 [%r5], %r31; {}
    sub.u32 %r7, %ntid.x, 1; sub.u32 %r7, %r7, %r31; shl.b32 %r7, %r7, 2; add.u32 %r7, %r7, %r6;
    ld.shared.b32 %r8, [%r7]; st.global.b32 [%rd10], %r8;
"""


def test_a_barrier_makes_every_order_of_warps_alike_and_without_it_some_warp_is_late() -> None:
    expected = list(range(128))[::-1]
    assert all(_run(REVERSED.format("bar.sync 0;"), 128, seed) == expected for seed in range(8))
    assert any(_run(REVERSED.format(""), 128, seed) != expected for seed in range(8))
    assert _run(REVERSED.format(""), 128, warps="together") == expected


def test_a_late_warp_reads_what_the_first_has_stored_since() -> None:
    """All threads load a word that thread 0 then counts up: nothing but a barrier keeps warps from the new value."""
    body = (
        "ld.global.b32 %r1, [%rd2]; {} setp.eq.u32 %p1, %r31, 0; add.u32 %r2, %r1, 1; @%p1 st.global.b32 [%rd2], %r2;"
    )
    body += "mul.wide.u32 %rd30, %r31, 4; add.u64 %rd10, %rd1, %rd30; st.global.b32 [%rd10], %r1;"
    seen = {}
    for barrier in ("bar.sync 0;", ""):
        seen[barrier] = set()
        for seed in range(16):
            out, word = torch.zeros(96, dtype=torch.int32), torch.tensor([40], dtype=torch.int32)
            ptx = kernel("mov.u32 %r31, %tid.x;" + body.format(barrier), 2, 96)
            Device(seed=seed, warps="any order").launch(ptx, {"out": out, "word": word})
            seen[barrier] |= set(out.tolist())
    assert seen == {"bar.sync 0;": {40}, "": {40, 41}}


def test_programs_run_in_any_order() -> None:
    """Each takes a number; in 16 runs of three programs all six orders are seen, or nearly all."""
    orders = set()
    for seed in range(16):
        out, counter = torch.zeros(3, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        body = (
            "mov.u32 %r31, %tid.x; setp.ne.u32 %p1, %r31, 0; @%p1 ret; atom.global.relaxed.gpu.add.u32 %r1, [%rd2], 1;"
        )
        body += "mov.u32 %r2, %ctaid.x; mul.wide.u32 %rd3, %r2, 4; add.u64 %rd3, %rd3, %rd1; st.global.b32 [%rd3], %r1;"
        Device(seed=seed).launch(kernel(body, 2), {"out": out, "counter": counter}, (3,))
        orders.add(tuple(out.tolist()))
    assert all(sorted(order) == [0, 1, 2] for order in orders) and len(orders) >= 4


def test_barriers_have_numbers_and_sizes() -> None:
    half = "setp.lt.u32 %p1, %r31, 64; @%p1 bra low; bar.sync 2, 64; bra both; low: bar.sync 1, 64; both: bar.sync 0;"
    assert _run(half + "st.global.b32 [%rd10], %r31;", 128) == list(range(128))


@pytest.mark.parametrize("body,message", [
    ("setp.lt.u32 %p1, %r31, 32; @%p1 bra end; bar.sync 0; end:", "wait for ever"),
    ("setp.lt.u32 %p1, %r31, 32; @%p1 bra low; bar.sync 0; bra end; low: bar.sync 0; end:", "different places"),
    ("setp.lt.u32 %p1, %r31, 16; @%p1 bra end; bar.sync 0; end:", "not all threads of a warp"),
    ("setp.lt.u32 %p1, %r31, 32; @%p1 bra low; bar.sync 1, 64; bra end; low: bar.sync 1, 32; end:", "is for"),
    ("bar.sync 0, 96;", "wait for ever"),
    ("setp.lt.u32 %p1, %r31, 16; @%p1 bra end; bar.warp.sync -1; end:", "not all threads of a warp"),
    ("barrier.cluster.arrive;", "not built"),
])  # fmt: skip
def test_threads_that_do_not_meet_as_they_should_are_told(body: str, message: str) -> None:
    for seed in range(4):
        with pytest.raises(PtxError, match=message):
            _run(body, seed=seed)


def test_what_never_ends_is_told() -> None:
    device = Device()
    device.most_steps = 1000
    with pytest.raises(PtxError, match="no end after 1000 turns"):
        device.launch(kernel("again: ld.relaxed.gpu.global.b32 %r1, [%rd1]; bra again;"), {"x": torch.zeros(4)})


def test_nothing_begins_as_zero() -> None:
    assert set(_run("st.global.b32 [%rd10], %r1;")) == {-0x5A5A5A5B}
    assert set(_run("mov.u32 %r2, buffer; ld.shared.b32 %r1, [%r2]; st.global.b32 [%rd10], %r1;")) == {-0x5A5A5A5B}


def test_braces_have_registers_of_their_own() -> None:
    body = "mov.u32 %r1, 5; { .reg .b32 %r1; .reg .pred p; mov.u32 %r1, 7; setp.eq.u32 p, %r1, 7;"
    body += "@p st.global.b32 [%rd10], %r1; }"
    assert _run(body) == [7] * 64
    assert _run(body + "{ .reg .b64 p; mov.u64 p, 3; } st.global.b32 [%rd10], %r1;") == [5] * 64


def test_the_clock_goes_on() -> None:
    device, out = Device(), torch.zeros(2, dtype=torch.int64)
    device.clock_step = 250
    look = "mov.u64 %rd2, %globaltimer; st.global.b64 [%rd1+{}], %rd2;"
    body = look.format(0) + look.format(8)
    device.launch(kernel(body), {"out": out})
    assert int(out[1] - out[0]) == 250
