"""What warps do together, against definitions written here lane by lane."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("triton", reason="the device compiles with Triton")

import numpy as np
import torch

from verification.ptx.device import Device
from verification.ptx.errors import PtxError
from verification.ptx.snippets import evaluate, kernel

VALUES = np.random.default_rng(1).integers(0, 2**32, 64, np.uint32)


def _shuffled(mode: str, lane: int, by: int, bounds: int) -> tuple[int, bool]:
    """The manual's pseudocode: which lane is read, and whether it is in range."""
    clamp, segment = bounds & 31, bounds >> 8 & 31
    most = lane & segment | clamp & ~segment & 31
    least = lane & segment
    if mode == "up":
        source = lane - by
        inside = source >= most
    else:
        source = {"down": lane + by, "bfly": lane ^ by, "idx": least | by & ~segment & 31}[mode]
        inside = source <= most
    return (source if inside else lane), inside


@pytest.mark.parametrize("mode,bounds", [("up", 0), ("down", 31), ("bfly", 31), ("idx", 31), ("up", 0x1800),
                                         ("down", 0x181F), ("bfly", 0x1C1F), ("idx", 0x181F)])  # fmt: skip
def test_shuffles_read_another_lane(mode: str, bounds: int) -> None:
    for by in (0, 1, 2, 5, 16, 31):
        line = f"shfl.sync.{mode}.b32 {{d}}|%p1, {{a}}, {by}, {bounds}, -1;"
        got = evaluate(line, VALUES).tolist()
        inside = evaluate(f"{line} selp.u32 {{d}}, 1, 0, %p1;", VALUES).tolist()
        for thread in range(64):
            source, valid = _shuffled(mode, thread % 32, by, bounds)
            assert got[thread] == VALUES[thread // 32 * 32 + source], (mode, by, thread)
            assert inside[thread] == valid


def test_reductions_are_of_a_warp() -> None:
    warps = VALUES.reshape(2, 32)
    for kind, name, expected in (
        ("s32", "add", warps.sum(1, dtype=np.uint32)), ("u32", "max", warps.max(1)), ("u32", "min", warps.min(1)),
        ("s32", "max", warps.view(np.int32).max(1).view(np.uint32)),
        ("s32", "min", warps.view(np.int32).min(1).view(np.uint32)),
        ("b32", "and", np.bitwise_and.reduce(warps, 1)), ("b32", "or", np.bitwise_or.reduce(warps, 1)),
        ("b32", "xor", np.bitwise_xor.reduce(warps, 1)),
    ):  # fmt: skip
        got = evaluate(f"redux.sync.{name}.{kind} {{d}}, {{a}}, -1;", VALUES)
        assert got.tolist() == np.repeat(expected, 32).tolist(), name


def test_members_are_those_who_come() -> None:
    half = "setp.lt.u32 %p1, %r31, 16; @%p1 redux.sync.add.s32 {d}, {a}, 0x0000FFFF; @!%p1 mov.u32 {d}, 0;"
    ones = np.ones(32, np.uint32)
    assert evaluate(half, ones).tolist() == [16] * 16 + [0] * 16
    for line in ("redux.sync.add.s32 {d}, {a}, 0xFFFF;", half.replace("0x0000FFFF", "-1"),
                 "setp.lt.u32 %p1, %r31, 16; @%p1 shfl.sync.bfly.b32 {d}, {a}, 1, 31, -1;"):  # fmt: skip
        with pytest.raises(PtxError, match="not the threads that it names"):
            evaluate(line, ones)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_matrices_go_to_shared_memory_and_back(count: int, transposed: bool) -> None:
    """Rows lie in an order of their own; a lane's element is where the manual's picture has it."""
    order = random.Random(2).sample(range(32), 8 * count)
    rows = torch.tensor(order + [0] * (32 - len(order)), dtype=torch.int32)
    octets = torch.arange(512, dtype=torch.int16)  # 32 rows of 16 bytes
    out = torch.zeros(32, count, dtype=torch.int32)
    names = ", ".join(f"%r{10 + number}" for number in range(count))
    stores = "".join(f"st.global.b32 [%rd9+{4 * number}], %r{10 + number};" for number in range(count))
    trans = ".trans" * transposed
    load = f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{names}}}, [%r7];"
    store = f"stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%r7+512], {{{names}}};"
    body = f"""
        mov.u32 %r31, %tid.x; mul.wide.u32 %rd5, %r31, 4; mul.wide.u32 %rd6, %r31, 16; mov.u32 %r6, buffer;
        add.u64 %rd7, %rd1, %rd6; ld.global.v4.b32 {{%r1, %r2, %r3, %r4}}, [%rd7];
        shl.b32 %r5, %r31, 4; add.u32 %r8, %r5, %r6; st.shared.v4.b32 [%r8], {{%r1, %r2, %r3, %r4}}; bar.sync 0;
        add.u64 %rd8, %rd2, %rd5; ld.global.b32 %r9, [%rd8]; shl.b32 %r7, %r9, 4; add.u32 %r7, %r7, %r6;
        {load} mad.wide.u32 %rd9, %r31, {4 * count}, %rd3; {stores}
        {store} bar.sync 0; ld.shared.v4.b32 {{%r1, %r2, %r3, %r4}}, [%r8+512];
        add.u64 %rd7, %rd4, %rd6; st.global.v4.b32 [%rd7], {{%r1, %r2, %r3, %r4}};
    """
    back, device = torch.zeros(256, dtype=torch.int16), Device(races=True)
    source = octets[:256].clone()
    device.launch(kernel(body, 4, 32, 1024), {"source": source, "rows": rows, "out": out, "back": back})
    halves = out.view(torch.int16).view(32, count, 2)
    for lane in range(32):
        for number in range(count):
            for half in range(2):
                row, column = lane // 4, lane % 4 * 2 + half
                if transposed:
                    row, column = column, row
                assert halves[lane, number, half] == source[8 * order[8 * number + row] + column]
    for row in order:
        assert torch.equal(back.view(32, 8)[row], source.view(32, 8)[row])


def test_a_product_of_a_warp_is_that_of_its_fragments() -> None:
    """A [16, 32], B [32, 8] and C [16, 8] are handed out as the manual's pictures have it."""
    generator = torch.Generator().manual_seed(1)
    a = torch.randint(-128, 128, (16, 32), generator=generator)
    b = torch.randint(-128, 128, (32, 8), generator=generator)
    c = torch.randint(-(2**31), 2**31, (16, 8), generator=generator)
    c[0] = 2**31 - 1
    registers = torch.zeros(32, 10, dtype=torch.int32)
    for lane in range(32):
        group, within = lane // 4, lane % 4
        parts = []
        for number in range(4):
            columns = [within * 4 + i + 16 * (number // 2) for i in range(4)]
            parts.append([int(a[group + 8 * (number % 2), column]) for column in columns])
        for number in range(2):
            parts.append([int(b[within * 4 + i + 16 * number, group]) for i in range(4)])
        for number, part in enumerate(parts):
            registers[lane, number] = int.from_bytes(bytes(x & 255 for x in part), "little", signed=True)
        for number in range(4):
            registers[lane, 6 + number] = c[group + 8 * (number // 2), within * 2 + number % 2]
    loads = "".join(f"ld.global.b32 %r{number}, [%rd5+{4 * number}];" for number in range(10))
    stores = "".join(f"st.global.b32 [%rd6+{4 * number}], %r{20 + number};" for number in range(4))
    for saturates in (True, False):
        body = f"""
            mov.u32 %r31, %tid.x; mad.wide.u32 %rd5, %r31, 40, %rd1; mad.wide.u32 %rd6, %r31, 16, %rd2; {loads}
            mma.sync.aligned.m16n8k32.row.col{".satfinite" * saturates}.s32.s8.s8.s32
                {{%r20, %r21, %r22, %r23}}, {{%r0, %r1, %r2, %r3}}, {{%r4, %r5}}, {{%r6, %r7, %r8, %r9}}; {stores}
        """
        out = torch.zeros(32, 4, dtype=torch.int32)
        Device().launch(kernel(body, 2), {"registers": registers, "out": out})
        exact = a @ b + c
        expected = exact.clamp(-(2**31), 2**31 - 1) if saturates else (exact + 2**31) % 2**32 - 2**31
        assert not torch.equal(exact, expected)
        for lane in range(32):
            for number in range(4):
                row, column = lane // 4 + 8 * (number // 2), lane % 4 * 2 + number % 2
                assert out[lane, number] == expected[row, column]


@pytest.mark.parametrize("swizzle", [0, 1, 2, 3], ids=["none", "128", "64", "32"])
def test_a_product_of_four_warps_reads_shared_memory_by_its_descriptors(swizzle: int) -> None:
    """D [64, 16] = A [64, 32] B [32, 16] + D, from matrices that are laid out byte by byte as the manual has it."""
    generator = torch.Generator().manual_seed(swizzle)
    a = torch.randint(-128, 128, (64, 32), generator=generator)
    b = torch.randint(-128, 128, (16, 32), generator=generator)  # by columns
    run = {0: 16, 1: 128, 2: 64, 3: 32}[swizzle]  # bytes of a row that are together

    def place(row: int, column: int, leading: int, stride: int) -> int:
        if not swizzle:
            return row // 8 * stride + column // 16 * leading + row % 8 * 16 + column % 16
        address = row // 8 * stride + row % 8 * run + column
        chunk, line = address // 16 % (run // 16), address // 128 % (run // 16)
        return address - chunk * 16 + (chunk ^ line) * 16

    leading, stride = (8 * 16, 2 * 8 * 16) if not swizzle else (16, 8 * run)
    shared, second = torch.zeros(16384, dtype=torch.int8), 8192
    for matrix, start in ((a, 0), (b, second)):
        for row in range(len(matrix)):
            for column in range(32):
                shared[start + place(row, column, leading, stride)] = matrix[row, column].to(torch.int8)
    descriptor = leading // 16 << 16 | stride // 16 << 32 | swizzle << 62
    registers = [f"%r{number}" for number in range(8)]
    stores = "".join(f"st.global.b32 [%rd6+{4 * number}], {name};" for number, name in enumerate(registers))
    fill = "".join(f"mov.u32 {name}, {number + 1};" for number, name in enumerate(registers))
    product = f"wgmma.mma_async.sync.aligned.m64n16k32.s32.s8.s8 {{{', '.join(registers)}}}, %rd7, %rd8"
    body = f"""
        mov.u32 %r31, %tid.x; mul.wide.u32 %rd9, %r31, 16; mov.u32 %r30, buffer; shl.b32 %r29, %r31, 4; mov.u32 %r28, 0;
        add.u32 %r29, %r29, %r30; add.u64 %rd9, %rd9, %rd1;
        again: ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%rd9]; st.shared.v4.b32 [%r29], {{%r10, %r11, %r12, %r13}};
        add.u32 %r29, %r29, 2048; add.u64 %rd9, %rd9, 2048; add.u32 %r28, %r28, 1; setp.lt.u32 %p1, %r28, 8;
        @%p1 bra again; bar.sync 0; {fill} mad.wide.u32 %rd6, %r31, 32, %rd2;
        mov.u64 %rd7, {descriptor}; mov.u64 %rd8, {descriptor | second // 16};
        wgmma.fence.sync.aligned; {product}, 0; {product}, 1; wgmma.commit_group.sync.aligned;
        wgmma.wait_group.sync.aligned 0; {stores}
    """
    out = torch.zeros(128, 8, dtype=torch.int32)
    device = Device(races=True)
    device.launch(kernel(body, 2, 128, 16384), {"source": shared, "out": out})
    assert not device.races.found
    expected = 2 * (a @ b.T)
    for thread in range(128):
        for number in range(8):
            row = thread // 32 * 16 + thread % 32 // 4 + 8 * (number // 2 % 2)
            assert out[thread, number] == expected[row, thread % 4 * 2 + number % 2 + 8 * (number // 4)]
