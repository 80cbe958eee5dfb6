"""The race detector on programs of a few lines: what orders is no race, and what does not is one, in every schedule."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="the device compiles with Triton")

import torch

from verification.ptx.device import Device
from verification.ptx.snippets import kernel

FIRST = "setp.eq.u32 %p1, %r31, 0; mov.u32 %r2, 1;"  # %p1: this is thread 0
TID = "mov.u32 %r31, %tid.x; mul.wide.u32 %rd30, %r31, 4;"


def _run(*bodies: str, ranks: list[int] | None = None, threads: int = 64, seed: int = 0, shared: int = 0) -> list[str]:
    """The kinds of race between kernels that are launched together, each on a rank of its own or as `ranks` says.

    %rd1 and %rd2 are zeros: 4096 bytes of data, and flags. Thread numbers are in %r31, four times as much in %rd30.
    """
    ranks = list(range(len(bodies))) if ranks is None else ranks
    data, flags = torch.zeros(1024, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    device = Device(ranks=max(ranks) + 1, races=True, seed=seed, warps=("together", "any order")[seed % 2])
    for number, (device.rank, body) in enumerate(zip(ranks, bodies, strict=True)):
        ptx = kernel(f"{TID}{FIRST}\n{body}", 2, threads, shared, f"kernel_{number}")
        device.launch(ptx, {"data": data, "flags": flags}, queued=True)
    device.run_queued()
    return sorted(kind for kind, *_ in device.races.found)


def _spin(load: str) -> str:
    """Waits until a flag is 1, thread by thread; the load has {d} for its destination."""
    return f"again: {load.format(d='%r3')} setp.ne.u32 %p2, %r3, 1; @%p2 bra again;"


STORE = "st.global.b32 [%rd1], 5;"
LOAD = "ld.global.b32 %r4, [%rd1];"
PUBLICATIONS = {
    "st.release.sys": ("st.release.sys.global.b32 [%rd2], %r2;", "ld.acquire.sys.global.b32 {d}, [%rd2];", True),
    "atom": ("atom.global.sys.release.exch.b32 %r5, [%rd2], 1;",
             "atom.global.sys.acquire.add.u32 {d}, [%rd2], 0;", True),
    "acq_rel": ("atom.acq_rel.sys.global.add.u32 %r5, [%rd2], 1;", "atom.acq_rel.sys.add.u32 {d}, [%rd2], 0;", True),
    "red": ("red.release.sys.global.add.u32 [%rd2], 1;", "ld.acquire.sys.global.b32 {d}, [%rd2];", True),
    "fences": ("fence.acq_rel.sys; st.relaxed.sys.global.b32 [%rd2], 1;",
               "ld.relaxed.sys.global.b32 {d}, [%rd2]; fence.acq_rel.sys;", True),
    "membar and volatile": ("membar.sys; st.volatile.global.b32 [%rd2], 1;",
                            "ld.volatile.global.b32 {d}, [%rd2]; membar.sys;", True),
    "a fence of one GPU": ("fence.acq_rel.gpu; st.relaxed.sys.global.b32 [%rd2], 1;",
                           "ld.relaxed.sys.global.b32 {d}, [%rd2]; fence.acq_rel.sys;", False),
    "no fence behind": ("fence.acq_rel.sys; st.relaxed.sys.global.b32 [%rd2], 1;",
                        "ld.relaxed.sys.global.b32 {d}, [%rd2];", False),
    "a fence behind the store": ("st.relaxed.sys.global.b32 [%rd2], 1; fence.acq_rel.sys;",
                                 "ld.acquire.sys.global.b32 {d}, [%rd2];", False),
    "no release": ("st.relaxed.sys.global.b32 [%rd2], 1;", "ld.acquire.sys.global.b32 {d}, [%rd2];", False),
    "no acquire": ("st.release.sys.global.b32 [%rd2], 1;", "ld.relaxed.sys.global.b32 {d}, [%rd2];", False),
}  # fmt: skip


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", list(PUBLICATIONS))
def test_a_release_and_the_acquire_that_observes_it_order_two_ranks(name: str, seed: int) -> None:
    publish, look, ordered = PUBLICATIONS[name]
    races = _run(f"@!%p1 ret; {STORE}{publish}", f"@!%p1 ret; {_spin(look)}{LOAD}", seed=seed)
    assert races == ([] if ordered else ["write-read"])


@pytest.mark.parametrize("publish,look", [("gpu", "sys"), ("sys", "gpu"), ("gpu", "gpu"), ("cta", "sys")])
def test_a_scope_without_the_other_thread_orders_nothing(publish: str, look: str) -> None:
    writer = f"@!%p1 ret; {STORE} st.release.{publish}.global.b32 [%rd2], 1;"
    reader = f"@!%p1 ret; {_spin(f'ld.acquire.{look}.global.b32 {{d}}, [%rd2];')}{LOAD}"
    assert "write-read" in _run(writer, reader)
    if "cta" in (publish, look):
        return
    # Within a GPU the scope of a GPU is enough.
    data, flags = torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    device = Device(races=True)
    both = f"mov.u32 %r6, %ctaid.x; setp.eq.u32 %p3, %r6, 0; @%p3 bra writer; {reader} ret; writer: {writer}"
    device.launch(kernel(TID + FIRST + both, 2), {"data": data, "flags": flags}, (2,))
    assert not device.races.found


def test_a_weak_flag_is_a_race_itself() -> None:
    writer = f"@!%p1 ret; {STORE} st.global.b32 [%rd2], 1;"
    races = _run(writer, f"@!%p1 ret; {_spin('ld.acquire.sys.global.b32 {d}, [%rd2];')}{LOAD}")
    assert races == ["write-read", "write-read"]


def test_strong_accesses_of_different_sizes_race() -> None:
    one = "@!%p1 ret; st.relaxed.sys.global.b32 [%rd2], 1;"
    assert _run(one, "@!%p1 ret; ld.relaxed.sys.global.b32 %r3, [%rd2];") == []
    assert len(_run(one, "@!%p1 ret; ld.relaxed.sys.global.b64 %rd5, [%rd2];")) == 1
    assert len(_run(one, "@!%p1 ret; ld.global.b32 %r3, [%rd2];")) == 1


def test_strong_accesses_need_each_others_scopes() -> None:
    one = "@!%p1 ret; st.relaxed.{}.global.b32 [%rd2], 1;"
    assert _run(one.format("sys"), one.format("sys")) == []
    assert _run(one.format("gpu"), one.format("sys")) == ["write-write"]
    assert _run(one.format("gpu"), one.format("gpu")) == ["write-write"]
    assert _run(one.format("gpu"), one.format("gpu"), ranks=[0, 0]) == []


def test_a_strong_access_does_not_hide_a_weak_one_before_it() -> None:
    writer = "@!%p1 ret; st.global.b32 [%rd1], 1; st.relaxed.sys.global.b32 [%rd1], 2;"
    writer += "st.relaxed.sys.global.b32 [%rd2], 1;"
    look = _spin("ld.relaxed.sys.global.b32 {d}, [%rd2];")
    assert _run(writer, f"@!%p1 ret; {look} ld.relaxed.sys.global.b32 %r4, [%rd1];") == ["write-read"]


@pytest.mark.parametrize("seed", range(4))
def test_what_comes_behind_a_release_is_not_released(seed: int) -> None:
    writer = f"@!%p1 ret; st.release.sys.global.b32 [%rd2], 1; {STORE}"
    reader = f"@!%p1 ret; {_spin('ld.acquire.sys.global.b32 {d}, [%rd2];')}{LOAD}"
    assert len(_run(writer, reader, seed=seed)) == 1


def test_a_compare_that_fails_releases_nothing() -> None:
    writer = f"@!%p1 ret; {STORE} atom.release.sys.global.cas.b32 %r5, [%rd2], {{}}, 9;"
    writer += "st.relaxed.sys.global.b32 [%rd2+4], 1;"
    reader = f"@!%p1 ret; {_spin('ld.relaxed.sys.global.b32 {d}, [%rd2+4];')}"
    reader += f"ld.acquire.sys.global.b32 %r4, [%rd2]; {LOAD}"
    assert _run(writer.format(0), reader) == []
    assert _run(writer.format(77), reader) == ["write-read"]


@pytest.mark.parametrize("barrier", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_one_thread_publishes_for_all_behind_a_barrier_alone(barrier: bool, seed: int) -> None:
    writer = f"add.u64 %rd5, %rd1, %rd30; st.global.b32 [%rd5], 5; {'bar.sync 0;' * barrier}"
    writer += "@%p1 st.release.sys.global.b32 [%rd2], %r2;"
    reader = f"@!%p1 bra meet; {_spin('ld.acquire.sys.global.b32 {d}, [%rd2];')} meet: bar.sync 0;"
    reader += "add.u64 %rd5, %rd1, %rd30; ld.global.b32 %r4, [%rd5];"
    assert _run(writer, reader, seed=seed) == ([] if barrier else ["write-read"])


@pytest.mark.parametrize("middle,ordered", [
    ("atom.relaxed.sys.global.add.u32 %r5, [%rd2], 1;", True), ("st.relaxed.sys.global.b32 [%rd2], 2;", False),
    ("atom.relaxed.sys.global.cas.b32 %r5, [%rd2], 77, 9;", True),
], ids=["add", "store", "a compare that fails"])  # fmt: skip
def test_read_modify_writes_keep_a_release_observable(middle: str, ordered: bool) -> None:
    until = "ld.relaxed.sys.global.b32 %r3, [%rd2]; setp.ne.u32 %p2, %r3, {}; @%p2 bra {};"
    writer = f"@!%p1 ret; {STORE} st.release.sys.global.b32 [%rd2], 1;"
    between = f"@!%p1 ret; before: {until.format(1, 'before')} {middle} st.relaxed.sys.global.b32 [%rd2+4], 1;"
    reader = "@!%p1 ret; after: ld.relaxed.sys.global.b32 %r3, [%rd2+4]; setp.ne.u32 %p2, %r3, 1; @%p2 bra after;"
    reader += f"ld.acquire.sys.global.b32 %r3, [%rd2]; {LOAD}"
    assert _run(writer, between, reader) == ([] if ordered else ["write-read"])


def test_a_weak_store_hides_what_was_released_there() -> None:
    writer = f"@!%p1 ret; {STORE} st.release.sys.global.b32 [%rd2], 1; st.global.b32 [%rd2], 1;"
    assert _run(writer, f"@!%p1 ret; {_spin('ld.acquire.sys.global.b32 {d}, [%rd2];')}{LOAD}").count("write-read") == 2


def test_what_is_known_is_handed_on() -> None:
    first = f"@!%p1 ret; {STORE} st.release.sys.global.b32 [%rd2], 1;"
    second = f"@!%p1 ret; {_spin('ld.acquire.sys.global.b32 {d}, [%rd2];')} st.release.sys.global.b32 [%rd2+4], 1;"
    third = f"@!%p1 ret; {_spin('ld.acquire.sys.global.b32 {d}, [%rd2+4];')}{LOAD}"
    assert _run(first, second, third) == []
    assert _run(first, second.replace("acquire", "relaxed"), third) == ["write-read"]


def test_kernels_of_one_rank_are_ordered_and_those_of_two_are_not() -> None:
    one, other = f"@!%p1 ret; {STORE}", f"setp.eq.u32 %p1, %r31, 40; @!%p1 ret; {STORE}"
    assert _run(one, other, ranks=[0, 0]) == []
    assert _run(one, other, ranks=[0, 1]) == ["write-write"]
    # What one kernel of a rank has acquired, all that come after know.
    writer = f"@!%p1 ret; {STORE} st.release.sys.global.b32 [%rd2], 1;"
    wait = f"@!%p1 ret; {_spin('ld.acquire.sys.global.b32 {d}, [%rd2];')}"
    assert _run(writer, wait, LOAD, ranks=[0, 1, 1]) == []
    assert len(_run(writer, LOAD, wait, ranks=[0, 1, 1])) == 1


@pytest.mark.parametrize("late", range(4))
def test_no_reader_is_forgotten(late: int) -> None:
    """All warps read a word; all but one, and then all, meet before thread 0 stores there."""
    threads = f"shr.u32 %r5, %r31, 5; setp.eq.u32 %p4, %r5, {late}; setp.eq.u32 %p1, %r31, {32 * (late == 0)};"
    body = f"{threads} {LOAD} @%p4 bra past; bar.sync 1, 96; @%p1 st.global.b32 [%rd1], 6; past: bar.sync 0;"
    assert _run(body, threads=128) == ["read-write"]
    assert _run(f"{LOAD} bar.sync 0; @%p1 st.global.b32 [%rd1], 6;", threads=128) == []
    # Readers of the same word in the warp that stores count, too.
    assert _run(f"{LOAD} @%p1 st.global.b32 [%rd1], 6;", threads=32) == ["read-write"]
    assert _run(f"{LOAD} bar.warp.sync -1; @%p1 st.global.b32 [%rd1], 6;", threads=32) == []


def test_a_later_reader_does_not_hide_an_earlier_one() -> None:
    early = f"@!%p1 ret; {LOAD} st.relaxed.sys.global.b32 [%rd2], 1;"
    reader = (
        f"@!%p1 ret; {_spin('ld.relaxed.sys.global.b32 {d}, [%rd2];')}{LOAD} st.release.sys.global.b32 [%rd2+4], 1;"
    )
    writer = f"@!%p1 ret; {_spin('ld.acquire.sys.global.b32 {d}, [%rd2+4];')}{STORE}"
    assert _run(early, reader, writer) == ["read-write"]


def test_threads_that_store_the_same_bits_by_one_instruction_do_not_race() -> None:
    assert _run("st.global.b32 [%rd1], %r2;") == []
    assert _run("st.global.b32 [%rd1], %r31;", threads=32) == ["write-write"]
    assert _run("shr.u32 %r5, %r31, 5; st.global.b32 [%rd1], %r5;") == ["write-write"]
    assert _run("st.global.b32 [%rd1], %r2;", "st.global.b32 [%rd1], %r2;") == ["write-write"]
    assert _run("@%p1 st.global.b32 [%rd1], %r2; @!%p1 st.global.b32 [%rd1], %r2;") == ["write-write"]


OTHER_WARP = "xor.b32 %r5, %r31, 32; shl.b32 %r5, %r5, 2; mov.u32 %r6, buffer; add.u32 %r5, %r5, %r6;"
MINE = "shl.b32 %r7, %r31, 2; mov.u32 %r6, buffer; add.u32 %r7, %r7, %r6;"


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("meet,ordered", [
    ("bar.sync 0;", True), ("bar.sync 3, 64;", True), ("", False), ("bar.warp.sync -1;", False),
    ("fence.acq_rel.cta;", False), ("shfl.sync.bfly.b32 %r9, %r7, 1, 31, -1;", False),
])  # fmt: skip
def test_barriers_alone_order_shared_memory(meet: str, ordered: bool, seed: int) -> None:
    body = f"{MINE}{OTHER_WARP} st.shared.b32 [%r7], %r31; {meet} ld.shared.b32 %r8, [%r5];"
    assert bool(_run(body, seed=seed, shared=256)) != ordered
    # And the other way round: what is read may not be overwritten yet.
    body = f"{MINE}{OTHER_WARP} st.shared.b32 [%r7], 0; bar.sync 0; ld.shared.b32 %r8, [%r5]; {meet}"
    assert bool(_run(f"{body} st.shared.b32 [%r7], 1;", seed=seed, shared=256)) != ordered


def test_lanes_of_a_warp_meet_at_its_barrier() -> None:
    neighbour = "xor.b32 %r5, %r31, 1; shl.b32 %r5, %r5, 2; mov.u32 %r6, buffer; add.u32 %r5, %r5, %r6;"
    body = f"{MINE}{neighbour} st.shared.b32 [%r7], %r31; bar.warp.sync -1; ld.shared.b32 %r8, [%r5];"
    assert _run(body, shared=256) == []
    assert _run(body.replace("bar.warp.sync -1;", ""), shared=256) == ["write-read"]


def test_programs_do_not_share_their_shared_memory() -> None:
    device = Device(races=True)
    body = f"{TID}{MINE} st.shared.b32 [%r7], %r31; ld.shared.b32 %r8, [%r7];"
    device.launch(kernel(body, 1, 64, 256), {"data": torch.zeros(4)}, (3,))
    assert not device.races.found


def test_an_asynchronous_copy_needs_its_wait_and_a_barrier() -> None:
    copy = "shl.b32 %r7, %r31, 4; mov.u32 %r6, buffer; add.u32 %r7, %r7, %r6; mul.wide.u32 %rd5, %r31, 16;"
    copy += "add.u64 %rd5, %rd1, %rd5; cp.async.cg.shared.global [%r7], [%rd5], 16, 16; cp.async.commit_group;"
    other = "xor.b32 %r5, %r31, 32; shl.b32 %r5, %r5, 4; mov.u32 %r6, buffer; add.u32 %r5, %r5, %r6;"
    read = "ld.shared.b32 %r8, [%r5];"
    assert _run(f"{copy}{other} cp.async.wait_group 0; bar.sync 0; {read}", shared=1024) == []
    assert _run(f"{copy}{other} bar.sync 0; cp.async.wait_group 0; {read}", shared=1024)
    assert _run(f"{copy}{other} cp.async.wait_group 0; {read}", shared=1024)
    # Nor may it be issued while another thread may still read what it writes.
    fill = "shl.b32 %r7, %r31, 4; mov.u32 %r6, buffer; add.u32 %r7, %r7, %r6; st.shared.b32 [%r7], 0; bar.sync 0;"
    done = "bar.sync 0; cp.async.wait_group 0;"
    assert _run(f"{fill}{other}{read} bar.sync 0; {copy}{done}", shared=1024) == []
    assert _run(f"{fill}{other}{read}{copy}{done}", shared=1024)


def test_a_message_names_the_places_and_the_word() -> None:
    data = torch.zeros(4, dtype=torch.int32)
    device = Device(ranks=2, races=True)
    for device.rank in range(2):
        device.launch(kernel("st.global.b32 [%rd1+4], 1;", name=f"of_{device.rank}"), {"counts": data}, queued=True)
    device.run_queued()
    (message,) = device.races.found.values()
    assert "counts+0x4" in message and "of_0#" in message and "of_1#" in message and "st.global.b32" in message
