"""Programmatic dependent launches: which kernels of a rank overlap, what a wait orders, and what nothing does."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from typing import Any

import pytest

pytest.importorskip("triton", reason="the device compiles with Triton")

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from verification.ptx.device import Device
from verification.ptx.errors import PtxError
from verification.ptx.rounds import Rounds
from verification.ptx.snippets import kernel

TRIGGER, WAIT = "griddepcontrol.launch_dependents;", "griddepcontrol.wait;"
STORE, LOAD = "st.global.b32 [%rd1], 5;", "ld.global.b32 %r4, [%rd1];"
PROGRAM = "mov.u32 %r6, %ctaid.x; setp.eq.u32 %p3, %r6, 0;"  # %p3: this is program 0
SEEDS = pytest.mark.parametrize("seed", range(4))


def _tell(flag: int) -> str:
    return f"st.release.gpu.global.b32 [%rd2+{4 * flag}], 1;"


def _look(flag: int, order: str = "acquire") -> str:
    """Waits until a flag is 1."""
    load = f"ld.{order}.gpu.global.b32 %r3, [%rd2+{4 * flag}];"
    return f"again_{flag}: {load} setp.ne.u32 %p2, %r3, 1; @%p2 bra again_{flag};"


def _run(
    *bodies: str, seed: int = 0, normal: tuple[int, ...] = (), programs: int = 1, at_once: bool = False,
    all_threads: bool = False,
) -> list[str]:  # fmt: skip
    """The kinds of race between kernels of one rank, of thread 0 alone, all behind the first programmatic but `normal`.

    %rd1 and %rd2 are zeros: data, and flags. Nothing in place of a body is a function of the host.
    """
    device = Device(races=True, seed=seed, warps=("together", "any order")[seed % 2])
    device.most_steps = 600
    data, flags = torch.zeros(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    first = f"mov.u32 %r31, %tid.x; setp.eq.u32 %p1, %r31, 0; {'' if all_threads else '@!%p1 ret;'} {PROGRAM}"
    for number, body in enumerate(bodies):
        if not body:
            device.call(lambda: None)
            continue
        ptx = kernel(f"{first}\n{body}", 2, 64, name=f"kernel_{number}")
        programmatic = number > 0 and number not in normal
        device.launch(ptx, {"data": data, "flags": flags}, (programs,), 0, not at_once, programmatic)
    device.run_queued()
    return sorted(kind for kind, *_ in device.races.found)


@SEEDS
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("primary", [STORE + TRIGGER, TRIGGER + STORE, STORE])
def test_what_the_primary_stored_is_known_behind_a_wait_alone(primary: str, at_once: bool, seed: int) -> None:
    """Its trigger orders nothing, not even what is in front of it; nor does its end, if the secondary begins then."""
    races = _run(primary, LOAD, seed=seed, at_once=at_once)
    assert races in (["write-read"], ["read-write"])
    assert _run(primary, WAIT + LOAD, seed=seed, at_once=at_once) == []
    assert _run(primary, LOAD, normal=(1,), seed=seed, at_once=at_once) == []


@SEEDS
def test_what_the_primary_still_reads_may_not_be_overwritten(seed: int) -> None:
    assert _run(TRIGGER + LOAD, STORE + WAIT, seed=seed) in (["write-read"], ["read-write"])
    assert _run(LOAD + TRIGGER, STORE + WAIT, seed=seed) in (["write-read"], ["read-write"])
    assert _run(TRIGGER + LOAD, WAIT + STORE, seed=seed) == []


@SEEDS
def test_both_run_at_once_and_a_flag_orders_them(seed: int) -> None:
    """The primary ends only if the secondary has begun."""
    primary, secondary = TRIGGER + STORE + _tell(0) + _look(1), "{}" + LOAD + _tell(1)
    assert _run(primary, secondary.format(_look(0)), seed=seed) == []
    assert _run(primary, secondary.format(_look(0, "relaxed")), seed=seed) == ["write-read"]


@SEEDS
@pytest.mark.parametrize("host", [False, True])
def test_the_first_may_still_run_behind_a_second_that_did_not_wait(host: bool, seed: int) -> None:
    """It ends only if the third has begun, which is not programmatic."""
    assert _run(TRIGGER + _look(1), TRIGGER, *[""] * host, _tell(1), normal=(2 + host,), seed=seed) == []
    with pytest.raises(PtxError, match="no end after"):
        _run(TRIGGER + _look(1), TRIGGER + WAIT, *[""] * host, _tell(1), normal=(2 + host,), seed=seed)


@SEEDS
def test_without_a_programmatic_launch_or_a_trigger_they_do_not(seed: int) -> None:
    with pytest.raises(PtxError, match="no end after"):
        _run(TRIGGER + _look(1), _tell(1), normal=(1,), seed=seed)
    with pytest.raises(PtxError, match="no end after"):
        _run(_look(1), _tell(1), seed=seed)
    with pytest.raises(PtxError, match="no end after"):
        _run(TRIGGER + _look(1), WAIT + _tell(1), seed=seed)


@SEEDS
def test_programs_trigger_at_their_end_at_the_latest_and_all_have_to(seed: int) -> None:
    ends = f"@!%p3 ret; {TRIGGER}{_look(1)}"
    assert _run(ends, f"@!%p3 ret; {_tell(1)}", programs=3, seed=seed) == []
    with pytest.raises(PtxError, match="no end after"):
        _run(f"@%p3 {TRIGGER}{_look(1)}", f"@!%p3 ret; {_tell(1)}", programs=3, seed=seed)


@SEEDS
def test_a_trigger_of_any_thread_counts_and_a_wait_for_who_executes_it(seed: int) -> None:
    assert _run(f"@!%p1 ret; {TRIGGER}{_look(1)}", f"@%p1 {_tell(1)}", seed=seed, all_threads=True) == []
    primary = "@!%p1 ret;" + STORE
    assert _run(primary, f"@%p1 {WAIT}{LOAD}", seed=seed, all_threads=True) == ["write-read"]
    assert _run(primary, f"@%p1 {WAIT} bar.sync 0; {LOAD}", seed=seed, all_threads=True) == []


@SEEDS
@pytest.mark.parametrize("last", ["programmatic", "normal", "behind the host"])
def test_the_third_knows_of_the_first_what_the_second_waited_for(last: str, seed: int) -> None:
    """Though nothing of the third runs before the second has ended."""

    def races(second: str) -> list[str]:
        host, normal = [""] * (last == "behind the host"), (2,) * (last == "normal")
        third = LOAD if last == "normal" else WAIT + LOAD
        return _run(TRIGGER + STORE + _tell(0), second, *host, third, normal=normal, seed=seed)

    assert races(TRIGGER) in (["write-read"], ["read-write"])
    assert races(WAIT + TRIGGER) == races(TRIGGER + WAIT) == []
    assert races(TRIGGER + _look(0)) == []  # by the flag
    assert races(TRIGGER + _look(0, "relaxed")) in (["write-read"], ["read-write"])


@SEEDS
def test_a_wait_ends_when_the_primary_has_ended(seed: int) -> None:
    """All programs of it, which store long after they have triggered."""
    device = Device(seed=seed, warps=("together", "any order")[seed % 2])
    data, out = torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    place = "mov.u32 %r1, %ctaid.x; mul.wide.u32 %rd3, %r1, 4; add.u64 %rd4, %rd1, %rd3; add.u64 %rd5, %rd2, %rd3;"
    device.launch(
        kernel(f"{place}{TRIGGER}{'fence.acq_rel.gpu;' * 40} st.global.b32 [%rd4], 5;", 2, 64),
        {"data": data, "out": out}, (3,), queued=True,
    )  # fmt: skip
    copy = "ld.global.b32 %r4, [%rd4]; st.global.b32 [%rd5], %r4;"
    for body in (TRIGGER + WAIT + copy, WAIT + copy.replace("%r4;", "%r4; red.global.add.u32 [%rd5], 2;")):
        device.launch(kernel(place + body, 2, 32), {"data": data, "out": out}, (3,), 0, True, True)
    device.run_queued()
    assert out.tolist() == [69] * 3  # each of 32 threads adds 2 to 5


@SEEDS
def test_what_is_in_front_of_launches_that_overlap_is_known_to_all(seed: int) -> None:
    assert _run(STORE, TRIGGER, TRIGGER + LOAD, LOAD, normal=(1,), seed=seed) == []
    assert _run(STORE, "", TRIGGER + LOAD, LOAD, seed=seed) == []
    assert _run(STORE, TRIGGER, LOAD, seed=seed) in (["write-read"], ["read-write"])


def test_threads_of_launches_that_have_ended_make_room() -> None:
    device, data = Device(races=True), torch.zeros(64, dtype=torch.int32)
    sizes = []
    for _ in range(4):
        for programmatic, body in ((False, TRIGGER + STORE), (True, TRIGGER + WAIT), (True, WAIT + STORE)):
            ptx = kernel(f"mov.u32 %r31, %tid.x; setp.eq.u32 %p1, %r31, 0; @!%p1 ret; {body}", 1, 64)
            device.launch(ptx, {"data": data}, (1,), 0, True, programmatic)
        device.run_queued()
        sizes.append(len(device.races._rank_of))
    assert not device.races.found and sizes == [3 * 64] * 4


def test_metered_launches_follow_each_other_and_the_instructions_cost_nothing() -> None:
    device, data = Device(metered=True), torch.zeros(64, dtype=torch.int32)
    for body in (TRIGGER + WAIT + LOAD + STORE, LOAD + STORE):
        device.launch(kernel(body), {"data": data}, (2,), 0, True, True)
    device.run_queued()
    with_, without = device.meters
    assert with_.cycles == without.cycles and with_.instructions == without.instructions
    device.most_steps = 600
    for body in (TRIGGER + _look(1), _tell(1)):
        device.launch(kernel(body, 2), {"data": data, "flags": data}, (1,), 0, True, True)
    with pytest.raises(PtxError, match="no end after"):
        device.run_queued()


def test_other_actions_are_not_built() -> None:
    with pytest.raises(PtxError, match="not built: griddepcontrol.other"):
        _run("griddepcontrol.other;")


@triton.jit
def _write(x, value, BLOCK: tl.constexpr):
    gdc_launch_dependents()
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + place, place + value)


@triton.jit
def _copy(x, out, BLOCK: tl.constexpr, WAITS: tl.constexpr):
    if WAITS:
        gdc_wait()
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + place, tl.load(x + place))


@pytest.mark.parametrize("waits", [True, False])
def test_kernels_of_triton(waits: bool) -> None:
    device = Device(races=True)
    x, out = torch.zeros(256, dtype=torch.int32), torch.zeros(256, dtype=torch.int32)
    with device.patch(queued=True):
        _write[(2,)](x, 3, BLOCK=128)
        _copy[(2,)](x, out, BLOCK=128, WAITS=waits, launch_pdl=True)
    device.run_queued()
    assert bool(device.races.found) != waits
    if waits:
        assert out.tolist() == list(range(3, 259))


class _Programmatic(Device):
    """Every launch is programmatic, triggers as soon as it can, and waits."""

    def launch(self, ptx: str, *args: Any) -> None:
        head, begin, body = ptx.partition("$L__func_begin0:")
        super().launch(f"{head}{begin}{TRIGGER}{WAIT}{body}", *args[:-1], True)


@pytest.mark.parametrize("waits", [True, False])
def test_a_round_whose_kernels_all_wait_is_as_without(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not waits:
        monkeypatch.setitem(globals(), "WAIT", "")
    device = _Programmatic(ranks=2, races=True, warps="any order")
    with device.patch(queued=True):
        rounds = Rounds.of(device, 2)
        rounds.queue()
        with nullcontext() if waits else suppress(PtxError):  # as what a kernel takes for an index may be none yet
            device.run_queued()
    if waits:
        rounds.check()
    assert bool(device.races.found) != waits
