"""Loads, stores, atomics and copies; and that what is out of bounds or misaligned is told with the tensor's name."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("triton", reason="the device compiles with Triton")

import torch

from verification.ptx.device import Device
from verification.ptx.errors import PtxError
from verification.ptx.snippets import kernel

TID = "mov.u32 %r31, %tid.x; mul.wide.u32 %rd30, %r31, 16; add.u64 %rd10, %rd1, %rd30; add.u64 %rd11, %rd2, %rd30;"


def _launch(body: str, *tensors: torch.Tensor, threads: int = 32, shared: int = 0, grid: int = 1) -> None:
    arguments = {f"tensor {number}": tensor for number, tensor in enumerate(tensors)}
    Device(races=True).launch(kernel(TID + body, len(tensors), threads, shared), arguments, (grid,))


@pytest.mark.parametrize("hint", ["", ".L1::no_allocate", ".cg", ".cs", ".L1::evict_last.L2::128B"])
@pytest.mark.parametrize(
    "shape", ["b8", "b16", "b32", "b64", "v2.b16", "v2.b32", "v4.b32", "v2.b64", "v4.b16", "v4.b8"]
)
def test_bytes_are_copied_in_every_width(shape: str, hint: str) -> None:
    count = int(shape[1]) if shape[0] == "v" else 1
    bits = int(shape.rsplit("b", 1)[1])
    name = {8: "%rs", 16: "%rs", 32: "%r", 64: "%rd"}[bits]
    registers = ", ".join(f"{name}{number + 12}" for number in range(count))
    source = torch.randint(0, 256, (32, 16), dtype=torch.uint8)
    for space in ("global", "shared"):
        out = torch.zeros_like(source)
        through = f"st.global{hint}.{shape} [%rd11], {{{registers}}};"
        if space == "shared":
            address = "shl.b32 %r30, %r31, 4; mov.u32 %r29, buffer; add.u32 %r30, %r30, %r29;"
            through = (
                f"{address} st.shared.{shape} [%r30], {{{registers}}}; ld.shared.{shape} {{{registers}}}, [%r30];"
                + through
            )
        _launch(f"ld.global{hint}.{shape} {{{registers}}}, [%rd10]; {through}", source, out, shared=512)
        copied = count * bits // 8
        assert torch.equal(out[:, :copied], source[:, :copied]) and not out[:, copied:].any()


@pytest.mark.parametrize("kind,dtype", [("s8", np.int8), ("u8", np.uint8), ("s16", np.int16), ("u16", np.uint16)])
def test_narrow_loads_extend_into_wider_registers(kind: str, dtype: type) -> None:
    source = torch.randint(0, 256, (32, 16), dtype=torch.uint8)
    out = torch.zeros(32, 2, dtype=torch.int64)
    _launch(f"ld.global.{kind} %r1, [%rd10]; st.global.b32 [%rd11], %r1; ld.global.{kind} %rd3, [%rd10];"
            "st.global.b64 [%rd11+8], %rd3;", source, out)  # fmt: skip
    expected = source.numpy().view(dtype)[:, 0].astype(np.int64)
    assert (out[:, 1].numpy() == expected).all()
    assert ((out[:, 0].numpy() & 0xFFFFFFFF).astype(np.uint32) == expected.astype(np.uint32)).all()


def test_offsets_and_predicates_of_accesses() -> None:
    source, out = torch.arange(128, dtype=torch.int32).view(32, 4), torch.full((32, 4), -1, dtype=torch.int32)
    _launch("setp.lt.u32 %p1, %r31, 7; mov.u32 %r1, 99; @%p1 ld.global.b32 %r1, [%rd10+8];"
            "setp.ne.u32 %p2, %r31, 3; @%p2 st.global.b32 [ %rd11 + 4 ], { %r1 };", source, out)  # fmt: skip
    expected = torch.full((32, 4), -1, dtype=torch.int32)
    expected[:, 1] = 99
    expected[:7, 1] = source[:7, 2]
    expected[3, 1] = -1
    assert torch.equal(out, expected)
    # Nobody looks at the addresses of those who do not take part.
    _launch("setp.eq.u32 %p1, %r31, 40; mov.u64 %rd5, 3; @%p1 ld.global.b32 %r1, [%rd5];", source, out)


OPERATIONS = {
    "add.u32": lambda old, x: (old + x) % 2**32, "exch.b32": lambda old, x: x,
    "add.u64": lambda old, x: (old + x) % 2**64,
}  # fmt: skip


@pytest.mark.parametrize("name", list(OPERATIONS))
def test_atomics_are_one_after_the_other(name: str) -> None:
    """Each thread gets what the one before it left, whatever their order; distinct words are each their own."""
    width = int(name[-2:]) // 8
    register = {4: "%r", 8: "%rd"}[width]
    values = torch.randint(0, 2**31, (32,), dtype=torch.int64)
    word, before = torch.tensor([5, 0]), torch.zeros(32, 2, dtype=torch.int64)
    body = f"mul.wide.u32 %rd20, %r31, 8; add.u64 %rd20, %rd20, %rd3; ld.global.b{8 * width} {register}5, [%rd20];"
    _launch(f"{body} atom.global.{name} {register}6, [%rd1], {register}5; st.global.b{8 * width} [%rd11], {register}6;",
            word, before, values)  # fmt: skip
    current, left = 5, list(range(32))
    seen = before[:, 0].tolist()
    for _ in range(32):
        thread = next(one for one in left if seen[one] == current)
        left.remove(thread)
        current = OPERATIONS[name](current, int(values[thread]))
    assert int(word[0]) == current
    words = torch.arange(64) * 3
    _launch(f"{body} red.relaxed.gpu.global.{name} [%rd10], {register}5;" if "exch" not in name else
            f"{body} atom.global.{name} _, [%rd10], {register}5;", words, before, values)  # fmt: skip
    expected = [OPERATIONS[name](6 * thread, int(values[thread])) for thread in range(32)]
    assert words[::2].tolist() == expected


def test_compare_and_swap_stores_where_it_finds_what_it_expects() -> None:
    word, out = torch.tensor([7, 0]), torch.zeros(32, 2, dtype=torch.int64)
    _launch("add.u32 %r5, %r31, 7; add.u32 %r6, %r31, 8; atom.global.relaxed.gpu.cas.b32 %r7, [%rd1], %r5, %r6;"
            "st.global.b32 [%rd11], %r7;", word, out)  # fmt: skip
    assert int(word[0]) == 39 and out[:, 0].tolist() == list(range(7, 39))


def test_asynchronous_copies_arrive_when_they_are_waited_for() -> None:
    """Two groups of 16 bytes a thread, and one of zeros; behind a wait for all but one the first has arrived."""
    source, out = torch.randint(1, 2**31, (32, 4), dtype=torch.int32), torch.zeros(32, 8, dtype=torch.int32)
    body = """
        mad.wide.u32 %rd11, %r31, 32, %rd2; shl.b32 %r5, %r31, 5; mov.u32 %r6, buffer; add.u32 %r5, %r5, %r6;
        mov.u32 %r9, 7;
        st.shared.b32 [%r5], %r9; st.shared.b32 [%r5+16], %r9; setp.lt.u32 %p1, %r31, 5; selp.u32 %r8, 0, 16, %p1;
        cp.async.cg.shared.global [ %r5 + 0 ], [ %rd10 + 0 ], 0x10, %r8; cp.async.commit_group;
        cp.async.ca.shared.global [%r5+16], [%rd10], 8; cp.async.commit_group; ld.shared.b32 %r1, [%r5];
        cp.async.wait_group 1; ld.shared.b32 %r2, [%r5]; ld.shared.b32 %r3, [%r5+16]; cp.async.wait_group 0;
        ld.shared.b32 %r4, [%r5+16]; st.global.v4.b32 [%rd11], {%r1, %r2, %r3, %r4};
    """
    _launch(body, source, out, shared=1024)
    expected = source[:, 0].clone()
    expected[:5] = 0
    assert out[:, 0].tolist() == out[:, 2].tolist() == [7] * 32
    assert torch.equal(out[:, 1], expected) and torch.equal(out[:, 3], source[:, 0])


def test_parameters_are_extended_by_the_type_that_reads_them() -> None:
    out = torch.zeros(2, dtype=torch.int64)
    ptx = kernel("ld.param.s32 %rd5, [snippet_1]; st.global.b64 [%rd1], %rd5; ld.param.u16 %r5, [snippet_1];"
                 "cvt.u64.u32 %rd5, %r5; st.global.b64 [%rd1+8], %rd5;", 2)  # fmt: skip
    Device().launch(ptx, {"out": out, "number": -3})
    assert out.tolist() == [-3, 2**16 - 3]


@pytest.mark.parametrize("line,message", [
    ("ld.global.b32 %r1, [%rd10+512];", "ld of 4 bytes out of bounds: weights.*which has 512 bytes"),
    ("st.global.b32 [%rd10+-16], %r31;", "st of 4 bytes out of bounds: weights-0x10"),
    ("atom.global.add.u32 %r1, [%rd10+512], 1;", "atom of 4 bytes out of bounds: weights"),
    ("@%p1 ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd10+8];", "ld of 16 bytes misaligned: weights.0x8"),
    ("st.global.b64 [%rd10+4], %rd10;", "st of 8 bytes misaligned: weights.0x4"),
    ("mov.u64 %rd9, 8; ld.global.b8 %rs1, [%rd9];", "out of bounds"),
    ("mov.u32 %r5, 256; ld.shared.b32 %r1, [%r5];", r"ld of 4 bytes out of bounds: shared memory.0x100.*256 bytes"),
    ("mov.u32 %r5, 2; st.shared.b32 [%r5], %r31;", "misaligned: shared memory.0x2"),
])  # fmt: skip
def test_an_access_that_does_not_fit_names_the_tensor_and_the_place(line: str, message: str) -> None:
    with pytest.raises(PtxError, match=f"{message}.*; snippet#"):
        first = "setp.eq.u32 %p1, %r31, 0;"
        Device().launch(
            kernel(TID + first + line, 2, shared_bytes=256), {"weights": torch.zeros(128), "x": torch.zeros(128)}
        )


def test_a_launcher_that_is_given_too_short_a_tensor_is_found_out() -> None:
    from thinwire.triton_kernels import pack
    from thinwire.wire import WireFormat

    # In the middle of memory that the device is not told of: no other tensor is what a wrong row hits, or the nearest.
    wire, surroundings = WireFormat.parse("int8"), bytearray(3 * 4096)
    x = torch.frombuffer(surroundings, dtype=torch.bfloat16, offset=4096, count=2 * 96).view(2, 96)
    assert x.untyped_storage().nbytes() == 2 * 96 * 2
    records = torch.zeros(2, wire.row_bytes(96, x.dtype), dtype=torch.uint8)
    device = Device()
    with device.patch(), pytest.raises(PtxError, match="out of bounds: x_ptr.*pack_kernel#"):
        pack.pack_rows(x, wire, torch.tensor([0, 5]), records)


@pytest.mark.parametrize(
    "line",
    [
        "ld.acquire.global.b32 %r1, [%rd10];",
        "ld.local.b32 %r1, [%rd10];",
        "st.global.gpu.b32 [%rd10], %r1;",
        "atom.global.add.f32 %r1, [%rd10], %r1;",
        "cp.async.bulk.shared.global [%r1], [%rd10], 16;",
        "tex.1d.v4.f32 %r1, [%rd10];",
    ],
)
def test_what_is_not_built_is_refused(line: str) -> None:
    with pytest.raises(PtxError, match="not built|without"):
        Device().launch(kernel(TID + line, 2), {"x": torch.zeros(128), "y": torch.zeros(128)})
