"""Biases and activation between the products of experts, in place, and of the rows that came alone::

    rows[r, n] = act(gate[r, n] + gate_bias[e, n]) * (rows[r, n] + bias[e, n])     e: the expert of row r
    rows[r, n] = act(rows[r, n] + bias[e, n])                                      without a gate

In float32, rounded once as it is stored; as in `silu.py` each operation is rounded alike on every device. Where rows
end is read on the device: there may be room for far more than came. Rows behind the last end are neither read nor
written, and whatever the ends are, nothing outside the rows and the biases is.
"""

from __future__ import annotations

from typing import Any

import torch

from thinwire.triton_kernels.compat import tl, triton
from thinwire.triton_kernels.floats import load_float32, store_float32
from thinwire.triton_kernels.signal import most_programs
from thinwire.triton_kernels.silu import exp_of_minus, silu


@triton.jit
def gelu(x):
    """x * (1 + erf(x / sqrt(2))) / 2 of float32, within 3e-7 * |x| (Abramowitz and Stegun, "Handbook", 7.1.26)."""
    magnitude = tl.abs(x)
    t = tl.div_rn(tl.full(x.shape, 1.0, tl.float32), magnitude * 0.23164189 + 1.0)
    p = (((0.5307027145 * t - 0.7265760135) * t + 0.7107068705) * t - 0.142248368) * t + 0.127414796
    tail = p * t * exp_of_minus(magnitude * magnitude * 0.5)
    return x * tl.where(x >= 0.0, 1.0 - tail, tail)


@triton.jit(do_not_specialize=["num_experts", "num_rows"])
def activate_kernel(
    rows_ptr, row_stride, bias_ptr, gate_ptr, gate_row_stride, gate_bias_ptr, ends_ptr, num_experts, num_rows,
    WIDTH: tl.constexpr, ACTIVATION: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Any number of programs, which take the rows' tiles of BLOCK columns in turn."""
    ends = tl.load(ends_ptr + tl.arange(0, EXPERTS), mask=tl.arange(0, EXPERTS) < num_experts, other=num_rows)
    stop = tl.minimum(tl.load(ends_ptr + num_experts - 1), num_rows)
    tiles: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    number = tl.program_id(0)
    while number // tiles < stop:
        row = (number // tiles).to(tl.int64)
        columns = number % tiles * BLOCK + tl.arange(0, BLOCK)
        inside = columns < WIDTH
        # The last end is above the row: whatever the others are, this is an expert.
        biases = tl.sum(tl.where(ends <= row, 1, 0)).to(tl.int64) * WIDTH + columns
        x = load_float32(rows_ptr + row * row_stride + columns, inside)
        if bias_ptr is not None:
            x += load_float32(bias_ptr + biases, inside)
        g = x if gate_ptr is None else load_float32(gate_ptr + row * gate_row_stride + columns, inside)
        if gate_bias_ptr is not None:
            g += load_float32(gate_bias_ptr + biases, inside)
        if ACTIVATION == "silu":
            g = silu(g)
        elif ACTIVATION == "gelu":
            g = gelu(g)
        elif ACTIVATION is not None:
            x = tl.clamp(x, -ACTIVATION.limit, ACTIVATION.limit, propagate_nan=tl.PropagateNan.ALL) + 1.0
            g = silu(tl.minimum(g, ACTIVATION.limit, propagate_nan=tl.PropagateNan.ALL), ACTIVATION.alpha)
        y = g if gate_ptr is None else g * x
        store_float32(rows_ptr + row * row_stride + columns, y, inside, False)
        number += tl.num_programs(0)


def activate(
    rows: torch.Tensor, bias: torch.Tensor | None, ends: torch.Tensor, activation: Any = None,
    gate: torch.Tensor | None = None, gate_bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Adds biases to experts' rows and activates them, in place, and returns them. Nothing waits for the device.

    Args:
        rows, gate: [rows, width] float32 or bfloat16 with contiguous rows, sorted by expert.
        bias, gate_bias: [experts, width].
        ends: int32 [experts], ascending, at least one: the row at which each expert's end, with its padding.
        activation: "silu", "gelu", a `ClampedSwiGLU`, which needs a gate, or None: the bias alone is added.
    """
    num_rows, width = rows.shape
    if num_rows == 0 or (bias is None and activation is None):
        return rows
    block = min(1024, max(256, triton.next_power_of_2(width)))  # no element is two threads': it is in place
    # Twice as many programs as usual, as they are small: loads of 32 KiB are then under way on a multiprocessor.
    programs = min(num_rows * -(-width // block), 2 * most_programs(rows.device))
    bias, gate_bias = (each if each is None else each.contiguous() for each in (bias, gate_bias))
    with torch.cuda.device_of(rows):  # Triton launches on the current device
        activate_kernel[(programs,)](
            rows, rows.stride(0), bias, gate, 0 if gate is None else gate.stride(0), gate_bias, ends, len(ends),
            num_rows, WIDTH=width, ACTIVATION=activation, EXPERTS=triton.next_power_of_2(len(ends)), BLOCK=block,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return rows
