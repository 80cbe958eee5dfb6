"""Headers of an exchange on the CPU: what all-to-all-v, all-reduce, reduce-scatter and all-gather do alike."""

from __future__ import annotations

import numpy as np

from thinwire.triton_kernels.cpu.compat import device
from thinwire.triton_kernels.cpu.ir.intrinsics import load_int32, load_int64, store_int32, store_int64
from thinwire.triton_kernels.exchange_layout import HEADER_COUNT, HEADER_PIECES, HEADER_SIGNATURE, SIGNATURE_WORDS

__all__ = ["header_count", "header_pieces", "same_signature", "write_header"]


@device
def write_header(line, pieces, count, signature):
    """Writes what follows the flag of a header: ring pieces, rows, and the four numbers of what the source is doing."""
    store_int32(line + 4 * HEADER_PIECES, pieces)
    store_int64(line + 4 * HEADER_COUNT, count)
    for word in range(SIGNATURE_WORDS):
        store_int64(line + 4 * HEADER_SIGNATURE + 8 * word, signature[word])


@device
def header_pieces(line):
    """Ring pieces that a header announces."""
    return np.int64(load_int32(line + 4 * HEADER_PIECES))


@device
def header_count(line):
    """Rows that a header announces."""
    return load_int64(line + 4 * HEADER_COUNT)


@device
def same_signature(line, signature):
    """Whether a header's source is doing what the signature says."""
    same = True
    for word in range(SIGNATURE_WORDS):
        same &= load_int64(line + 4 * HEADER_SIGNATURE + 8 * word) == signature[word]
    return same
