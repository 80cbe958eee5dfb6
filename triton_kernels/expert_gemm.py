"""Experts' products on received records, in int8 as they lie: no dequantised copy of the tokens exists.

    y[r, n] = scale_w[e, n] * sum over groups g, ascending, of scale_x[t, g] * sum of q_x[t, k] * q_w[e, n, k]
              t = index[r], e the expert of row r, k the columns of group g

The inner sum is an int32 sum on tensor cores, without a rounding. It is exact in float32 as well for groups up to 1024:
1024 * 128 * 127 < 2**24; with one scale for a row it is rounded once. Then there is one rounded product and one
rounded sum for each group, in their order, from +0.0, and one product with the channel's scale. So every backend gives
the same bits, and against exact arithmetic on the same integers and scales the error of y is at most

    (groups + 2) * 2**-24 * scale_w * sum over g of |scale_x * inner sum|        to first order

A product with weights that have a gate, or that ask for it, ends with SiLU (`silu.py`, the same bits everywhere too),
and may quantise its rows again as it stores them: a tile is as wide as a group, so that a group's largest magnitude is
found in the tile. The next product then reads those records by this same kernel.

One program makes a tile of rows of one expert. Which tile it is it finds from `expert_offsets`, on the device; there
are as many programs as any offsets can ask for, and those that are left store nothing. Padding of an expert, and an
index that names no record, is a row of zeros.
"""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange

from thinwire.triton_kernels.codec import encode_tile, group_amax
from thinwire.triton_kernels.codec_reference import quantize_reference, round_reference
from thinwire.triton_kernels.compat import tl, triton
from thinwire.triton_kernels.floats import store_float32
from thinwire.triton_kernels.int8_weights import Int8Weights, require_int8_sums
from thinwire.triton_kernels.record import RecordLayout
from thinwire.triton_kernels.signal import register_limit
from thinwire.triton_kernels.silu import silu, silu_reference
from thinwire.wire import WireFormat

#: How rows are quantised between two products; its group is the width of a tile.
INNER_WIRE = WireFormat.parse("int8:64")
#: Products of two int8 values whose sums float32 holds: 1024 * 128 * 128 is 2**24.
_EXACT_TERMS = 1024
_FEW_ROWS = 16  # of an expert: a tile then has as many, the fewest that tensor cores take


@triton.jit
def tile_rows(expert_offsets_ptr, num_experts, tile, num_rows, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Which rows a tile has: its expert, its first row, where its rows end, and whether they are an expert's."""
    experts = tl.arange(0, EXPERTS)
    known = experts < num_experts
    starts = tl.load(expert_offsets_ptr + experts, mask=known, other=0).to(tl.int32)
    ends = tl.load(expert_offsets_ptr + experts + 1, mask=known, other=0).to(tl.int32)
    tiles = (tl.maximum(ends - starts, 0) + (BLOCK_M - 1)) // BLOCK_M
    after = tl.cumsum(tiles, axis=0)
    before = after - tiles
    mine = tl.where(tile >= before, tl.where(tile < after, 1, 0), 0)
    expert, total = tl.sum(mine * experts), tl.sum(tiles)
    first, last = tl.sum(mine * (starts + (tile - before) * BLOCK_M)), tl.sum(mine * ends)
    return expert, first, tl.minimum(last, num_rows), tile < total  # behind them 0, 0 and 0


@triton.jit
def row_scales(base, group, there, RECORD: tl.constexpr):
    """A group's scale in each of several records, float32; 0 where there is none."""
    if RECORD.ROW_SCALE:
        return tl.load((base + RECORD.SCALES_OFFSET).to(tl.pointer_type(tl.float32)), mask=there, other=0.0)
    else:
        scales = (base + RECORD.SCALES_OFFSET).to(tl.pointer_type(tl.int16))
        return (tl.load(scales + group, mask=there, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["num_records", "num_experts", "num_rows"])
def expert_gemm_kernel(
    records_ptr,
    record_stride,
    num_records,
    index_ptr,  # int64, or None for 0, 1, 2, ...
    expert_offsets_ptr,
    num_experts,
    weights_ptr,
    weight_scales_ptr,
    out_ptr,
    out_row_stride,
    num_rows,
    RECORD: tl.constexpr,
    WIDTH: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATE: tl.constexpr,
    OUT: tl.constexpr,  # the layout of the records that are stored, or None
    EXPERTS: tl.constexpr,
    STEPS: tl.constexpr,  # of a group
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program (tile of rows, tile of columns), the latter first."""
    column_tiles: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    column_tile = tl.program_id(0) % column_tiles
    expert, first, last, found = tile_rows(
        expert_offsets_ptr, num_experts, tl.program_id(0) // column_tiles, num_rows, EXPERTS, BLOCK_M
    )
    rows = first + tl.arange(0, BLOCK_M)
    live = tl.where(rows >= 0, rows < last, False)  # users see the offsets, and may have written into them
    columns = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < WIDTH
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if found:
        record = rows.to(tl.int64)
        if index_ptr is not None:
            record = tl.load(index_ptr + rows, mask=live, other=-1)
        there = tl.where(live, tl.where(record >= 0, tl.where(record < num_records, 1, 0), 0), 0) > 0
        base = tl.multiple_of(records_ptr + tl.where(there, record, 0) * record_stride, [16])
        k = tl.arange(0, BLOCK_K)
        channel = expert.to(tl.int64) * (WIDTH * (1 + GATED)) + columns
        gate_weights = weights_ptr + channel * RECORD.SCALES_OFFSET
        weights = gate_weights + GATED * WIDTH * RECORD.SCALES_OFFSET
        for group in range(RECORD.NUM_GROUPS):
            # Each in its own registers only until the group ends.
            sums = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
            gate_sums = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
            for step in range(STEPS):
                at = (group * STEPS + step) * BLOCK_K + k
                # Multiples of 16, so that loads stay 16 bytes wide. Past the row's end the weights are zero.
                short = at < RECORD.SCALES_OFFSET
                x = tl.load(base[:, None] + at[None, :], mask=there[:, None] & short[None, :], other=0)
                mask = inside[None, :] & short[:, None]
                w = tl.load(weights[None, :] + at[:, None], mask=mask, other=0)
                sums = tl.dot(x, w, sums, out_dtype=tl.int32)
                if GATED:
                    w = tl.load(gate_weights[None, :] + at[:, None], mask=mask, other=0)
                    gate_sums = tl.dot(x, w, gate_sums, out_dtype=tl.int32)
            scales = row_scales(base, group, there, RECORD)[:, None]
            acc += sums.to(tl.float32) * scales
            if GATED:
                gate += gate_sums.to(tl.float32) * scales
        acc = acc * tl.load(weight_scales_ptr + channel + GATED * WIDTH, mask=inside, other=0.0)[None, :]
        if GATED:
            gate = gate * tl.load(weight_scales_ptr + channel, mask=inside, other=0.0)[None, :]
            acc = silu(gate) * acc
        elif ACTIVATE:
            acc = silu(acc)
    out_rows = out_ptr + rows.to(tl.int64) * out_row_stride
    if OUT is None:
        store_float32(out_rows[:, None] + columns[None, :], acc, live[:, None] & inside[None, :], False)
    else:
        payload, scale_bits = encode_tile(acc, group_amax(acc, OUT), OUT)
        mask = live[:, None] & (columns < OUT.SCALES_OFFSET)[None, :]
        tl.store(tl.multiple_of(out_rows, [16])[:, None] + columns[None, :], payload, mask=mask)
        scales = (out_rows + OUT.SCALES_OFFSET).to(tl.pointer_type(tl.int16))
        tl.store(scales + column_tile, scale_bits.to(tl.int16), mask=live)


def expert_gemm(
    records: torch.Tensor,
    wire: WireFormat,
    index: torch.Tensor | None,
    expert_offsets: torch.Tensor,
    weights: Int8Weights,
    out: torch.Tensor,
    out_wire: WireFormat | None = None,
) -> None:
    """One product of all experts. Nothing waits for the device.

    Args:
        records: uint8 [records, row_bytes] of `weights.inward` elements in `wire`; the row stride is a multiple of 16.
        wire: int8, which `require_int8_sums` accepts.
        index: int64 [rows], the record of each row, sorted by expert; any other number stands for a row of zeros. None:
            row r is record r.
        expert_offsets: integer [experts + 1], the row at which each expert begins, and the end of the last.
        weights: of the experts.
        out: [rows, weights.width] float32, float16 or bfloat16 with contiguous rows; or, with `out_wire`, uint8
            [rows, row_bytes], of which pad bytes may be left as they are. Rows behind the last expert's are left.
        out_wire: INNER_WIRE: the rows are quantised. None: they are floats.

    Raises:
        WireFormatError: see `require_int8_sums`.
    """
    require_int8_sums(wire, weights.inward)
    num_rows, num_experts = out.shape[0], weights.payload.shape[0]
    if num_rows == 0:
        return
    few = num_rows <= _FEW_ROWS * num_experts
    record = RecordLayout.of(wire, weights.inward, torch.float32)
    block_k = min(128, record.GROUP)
    block_m, block_n = _FEW_ROWS if few else 64, INNER_WIRE.group if weights.gated or out_wire else 128
    num_warps = 8 if weights.gated and not few else 4  # a gate has sums of its own
    columns = -(-weights.width // block_n)
    tiles = -(-num_rows // block_m) + num_experts
    stored: Any = None if out_wire is None else RecordLayout.of(out_wire, weights.width, torch.float32)
    with torch.cuda.device_of(out):  # Triton launches on the current device
        expert_gemm_kernel[(tiles * columns,)](
            records.view(torch.int8), records.stride(0), records.shape[0], index, expert_offsets, num_experts,
            weights.payload, weights.scales, out if stored is None else out.view(torch.int8), out.stride(0), num_rows,
            RECORD=record, WIDTH=weights.width, GATED=weights.gated, ACTIVATE=weights.activate, OUT=stored,
            EXPERTS=1 << max(0, num_experts - 1).bit_length(),
            STEPS=-(-record.SCALES_OFFSET // block_k) if record.ROW_SCALE else record.GROUP // block_k,
            BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=num_warps, num_stages=3,
            enable_fp_fusion=False, **register_limit(out.device, num_warps, programs=1),
        )  # fmt: skip


def expert_gemm_reference(
    records: torch.Tensor,
    wire: WireFormat,
    index: torch.Tensor | None,
    expert_offsets: torch.Tensor,
    weights: Int8Weights,
    out: torch.Tensor,
    out_wire: WireFormat | None = None,
) -> None:
    """`expert_gemm` in plain torch, which CPU tensors take. It reads the offsets, and so waits for a device."""
    require_int8_sums(wire, weights.inward)
    hidden, groups = weights.inward, wire.num_groups(weights.inward)
    group, start = wire.group or hidden, wire.scales_offset(weights.inward)
    scales = records[:, start : start + groups * wire.scale_bytes].contiguous()
    scales = scales.view(torch.float32 if wire.row_scale else torch.bfloat16).float()
    payload = records[:, :hidden].view(torch.int8)
    scales, payload = (torch.nn.functional.pad(rows, (0, 0, 0, 1)) for rows in (scales, payload))  # a row of zeros
    bounds = expert_offsets.tolist()
    for expert, (first, last) in enumerate(zip(bounds, bounds[1:], strict=False)):
        first, last = max(first, 0), min(last, len(out))
        if last <= first:
            continue
        named = torch.arange(first, last, device=out.device) if index is None else index[first:last]
        named = torch.where((named >= 0) & (named < len(records)), named, len(records))
        x, s, w = payload[named].float(), scales[named], weights.payload[expert, :, :hidden].float()
        acc = torch.zeros(last - first, len(w), dtype=torch.float32, device=out.device)
        for number in range(groups):
            part = slice(number * group, (number + 1) * group)
            acc += _integer_products(x[:, part], w[:, part]).mul_(s[:, number : number + 1])
        acc *= weights.scales[expert]
        if weights.gated:
            gate, other = rearrange(acc, "rows (two columns) -> two rows columns", two=2)
            acc = silu_reference(gate) * other
        elif weights.activate:
            acc = silu_reference(acc)
        if out_wire is None:
            out[first:last] = round_reference(acc, out.dtype, saturate=False)
        else:
            out[first:last] = quantize_reference(acc, out_wire)


def _integer_products(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """``x @ w.T`` of int8 values that are held as float32: the exact sums, each rounded to float32 once.

    float32 holds every sum of `_EXACT_TERMS` products, in whatever order a library adds them up. `torch._int_mm` is no
    way to them: on CPUs without instructions for int8 it saturates.
    """
    parts = zip(x.split(_EXACT_TERMS, dim=1), w.split(_EXACT_TERMS, dim=1), strict=True)
    first, *others = (part @ channels.T for part, channels in parts)
    return sum((other.int() for other in others), first.int()).float() if others else first
