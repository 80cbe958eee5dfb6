"""The sums of rows on the CPU: equal to `thinwire.triton_kernels.checksum`, whose docstring says what they are."""

from __future__ import annotations

import torch

from thinwire.triton_kernels.checksum_seed import CHECKSUM_BYTES
from thinwire.triton_kernels.cpu.compat import kernel
from thinwire.triton_kernels.cpu.ir.checksum import mix, sum_words
from thinwire.triton_kernels.cpu.ir.intrinsics import load_int64, store_int64


@kernel
def row_checksums_kernel(data, num_bytes, row_bytes, seed, first, sums):
    """The sums of each row at the address `data`, the last of which may be short, to the address `sums`."""
    for start in range(0, num_bytes, row_bytes):
        row = start // row_bytes
        a = sums + CHECKSUM_BYTES * row
        b = a + 8
        sum_words(data + start, min(row_bytes, num_bytes - start), a)
        s = mix(seed ^ (row + first)) | 1
        store_int64(a, load_int64(a) + s)
        store_int64(b, load_int64(b) + mix(s))


def row_checksums(data: torch.Tensor, row_bytes: int, seed: int, first: int, sums: torch.Tensor) -> None:
    """`thinwire.triton_kernels.checksum.row_checksums` for CPU tensors. Raises TransportUnavailable without numba."""
    row_checksums_kernel(data.data_ptr(), data.numel(), row_bytes, seed, first, sums.data_ptr())
