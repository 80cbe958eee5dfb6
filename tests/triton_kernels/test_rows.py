"""Tiles of rows that begin and end at any element, against slices of the tensor.

They run by Triton's interpreter, for which `TRITON_INTERPRET=1` must be set before Triton is imported, in a process of
their own; and as compiled code, where a wide access to a place that is not aligned is an error.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

pytest.importorskip("triton", reason="interpreting kernels needs Triton")

import torch
import triton
import triton.language as tl

from tests.helpers.wires import DTYPES, assert_same_bits
from thinwire.comm import Communicator
from thinwire.testing import run_ranks
from thinwire.triton_kernels.record import RecordLayout
from thinwire.triton_kernels.rows import load_row_tile, row_length, store_row_tile
from thinwire.wire import WireFormat
from verification.ptx.device import Device

HIDDEN = 480  # a tile of 512, of which a thread of one warp has 32 bytes


@triton.jit(do_not_specialize=["left"], do_not_specialize_on_alignment=["x_ptr", "y_ptr"])
def _copy(x_ptr, y_ptr, whole_ptr, left, LAYOUT: tl.constexpr):
    """A row into another, and with what is past its end into a whole one."""
    length = row_length(left, LAYOUT)
    elements = load_row_tile(x_ptr, length, 0, LAYOUT)
    store_row_tile(y_ptr, elements, length, 0, LAYOUT)
    columns = tl.arange(0, LAYOUT.GROUP)
    tl.store(whole_ptr + columns, tl.reshape(elements, (LAYOUT.GROUP,)))


def _every_start_and_length(comm: Communicator | None, dtypes: Sequence[torch.dtype] = DTYPES) -> None:
    for dtype in dtypes:
        layout = RecordLayout.of(WireFormat.parse("none"), HIDDEN, dtype)
        x = (torch.arange(2 * HIDDEN) % 251 + 1).to(dtype)
        for start in (0, 1, 4, 8):
            for left in (1, 7, 8, 33, HIDDEN, HIDDEN + 1):
                y, whole = torch.full_like(x, -1), torch.full((layout.GROUP,), -1, dtype=dtype)
                target = 8 if left % 2 else 3
                _copy[(1,)](x[start:], y[target:], whole, left, LAYOUT=layout, num_warps=1)
                length = min(left, HIDDEN)
                expected = torch.full_like(x, -1)
                expected[target : target + length] = x[start : start + length]
                assert_same_bits(f"{dtype}, {length} elements from {start} to {target}", expected, y)
                filled = torch.zeros_like(whole)
                filled[:length] = x[start : start + length]
                assert_same_bits(f"{dtype}, a row of {length} elements, filled up", filled, whole)


@pytest.mark.exhaustive
def test_rows_that_begin_and_end_anywhere_are_copied_and_nothing_beside_them() -> None:
    run_ranks(_every_start_and_length, 1, env={"TRITON_INTERPRET": "1"}, timeout=60)


def test_compiled_code_copies_them_too_and_makes_no_wide_access_that_is_not_aligned() -> None:
    with Device(warps="any order").patch():
        _every_start_and_length(None, (torch.bfloat16,))
