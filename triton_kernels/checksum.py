"""Checksums, by which a receiver knows that a row is the one that was sent: two 64-bit sums for each row.

Of a row of n little-endian words of 64 bits, the last one padded with zeros, w_0 ... w_{n-1}::

    a = sum of w_i + s            b = sum of (i + 1) * w_i + t            all modulo 2**64

s and t come from the row's number and from a seed, which names the call, the sender and the kind of row. So a row of an
earlier call, or in another row's place, does not match, although it is consistent with itself. s is odd, so zeroed
memory, including zeroed sums, never matches.

a detects every change of one word, b detects swapped words. docs/reliability.md, "Integrity", says what both miss.
Nothing here is cryptographic: an attacker can make a row that matches.

The numbers of a seed are in `thinwire.triton_kernels.checksum_seed`.
"""

from __future__ import annotations

import torch

from thinwire.triton_kernels.checksum_seed import GOLDEN, STAGES
from thinwire.triton_kernels.compat import tl, triton

_GOLDEN = tl.constexpr(GOLDEN)
_SHIFT_0, _FACTOR_0 = (tl.constexpr(value) for value in STAGES[0])
_SHIFT_1, _FACTOR_1 = (tl.constexpr(value) for value in STAGES[1])
_SHIFT_2 = tl.constexpr(STAGES[2][0])
# int64 shifts its sign in; these take it out again.
_MASK_0, _MASK_1, _MASK_2 = (tl.constexpr((1 << (64 - shift)) - 1) for shift, _ in STAGES)
_BLOCK = 1024


# ---------------------------------------------------------------------------------------------------------------------
# Seeds


def _mix_reference(words: torch.Tensor) -> torch.Tensor:
    """One step of splitmix64 from each state, int64."""
    z = words + GOLDEN
    for shift, factor in STAGES:
        z = (z ^ ((z >> shift) & ((1 << (64 - shift)) - 1))) * factor  # int64 shifts its sign in
    return z


@triton.jit
def mix(word):
    """One step of splitmix64 from a state, int64."""
    z = word + _GOLDEN
    z = (z ^ ((z >> _SHIFT_0) & _MASK_0)) * _FACTOR_0
    z = (z ^ ((z >> _SHIFT_1) & _MASK_1)) * _FACTOR_1
    return z ^ ((z >> _SHIFT_2) & _MASK_2)


@triton.jit
def row_seed(seed, number):
    """s of a row; t is `mix` of it. Both int64."""
    return mix(seed ^ number) | 1


# ---------------------------------------------------------------------------------------------------------------------
# Sums


@triton.jit
def row_checksums_kernel(data_ptr, num_bytes, row_bytes, seed, first, sums_ptr, BLOCK: tl.constexpr):
    """The sums of one row, a program each."""
    row = tl.program_id(0).to(tl.int64)
    start = row * row_bytes
    size = tl.minimum(num_bytes - start, row_bytes)
    a = row_seed(seed, row + first)
    b = mix(a)
    for begin in range(0, row_bytes, BLOCK):
        offsets = begin + tl.arange(0, BLOCK)
        octets = tl.load(data_ptr + start + offsets, mask=offsets < size, other=0).to(tl.int64) & 0xFF
        words = octets << ((offsets & 7) * 8).to(tl.int64)
        placed = words * ((offsets >> 3) + 1).to(tl.int64)
        more_a, more_b = tl.sum(words), tl.sum(placed)
        a, b = a + more_a, b + more_b
    tl.store(sums_ptr + 2 * row, a)
    tl.store(sums_ptr + 2 * row + 1, b)


def row_checksums(data: torch.Tensor, row_bytes: int, seed: int, first: int, sums: torch.Tensor) -> None:
    """The sums of each row.

    Args:
        data: uint8 [bytes], contiguous; the last row may be short.
        row_bytes: of each row, at least 1.
        seed: see `seed_of`.
        first: the number of the first row.
        sums: int64 [rows, 2], contiguous: a and b of each row.
    """
    if not sums.shape[0]:
        return
    with torch.cuda.device_of(data):  # Triton launches on the current device
        row_checksums_kernel[(sums.shape[0],)](
            data.view(torch.int8), data.numel(), row_bytes, seed, first, sums, BLOCK=_BLOCK, num_warps=4
        )


def row_checksums_reference(data: torch.Tensor, row_bytes: int, seed: int, first: int) -> torch.Tensor:
    """`row_checksums` in plain torch: int64 [rows, 2]."""
    rows, row_words = -(-data.numel() // row_bytes), -(-row_bytes // 8)
    whole = data.new_zeros(rows * row_bytes)
    whole[: data.numel()] = data
    padded = data.new_zeros(rows, row_words * 8)
    padded[:, :row_bytes] = whole.view(rows, row_bytes)
    words = padded.view(torch.int64)
    factors = torch.arange(1, row_words + 1, device=data.device)
    numbers = torch.arange(first, first + rows, device=data.device)
    s = _mix_reference(seed ^ numbers) | 1
    return torch.stack((words.sum(1) + s, (words * factors).sum(1) + _mix_reference(s)), 1)
