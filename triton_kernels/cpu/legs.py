"""Headers of legs on the CPU: what all-to-all-v, all-reduce, reduce-scatter and all-gather do alike."""

from __future__ import annotations

import numpy as np

from thinwire.triton_kernels.cpu.compat import device
from thinwire.triton_kernels.cpu.ir.atomics import store_release
from thinwire.triton_kernels.cpu.ir.intrinsics import load_int32, load_int64, store_int32, store_int64
from thinwire.triton_kernels.leg_layout import HEADER_COUNT, HEADER_PIECES, HEADER_SIGNATURE, SIGNATURE_WORDS


@device
def signature_of(own):
    """The four numbers that say what this rank is doing; `own` is a call's words or a job's numbers."""
    return own.signature0, own.signature1, own.signature2, own.signature3


@device
def publish_header(line, leg, own, pieces, count):
    """Writes a header: ring pieces, rows, the four numbers that say what the source is doing, and the flag."""
    store_int32(line + 4 * HEADER_PIECES, pieces)
    store_int64(line + 4 * HEADER_COUNT, count)
    signature = signature_of(own)
    for word in range(SIGNATURE_WORDS):
        store_int64(line + 4 * HEADER_SIGNATURE + 8 * word, signature[word])
    store_release(line, leg)


@device
def publish_tail(line, tail):
    """Tells a peer how many pieces this rank has ever put into its ring there."""
    store_release(line, tail)


@device
def publish_head(line, head):
    """Tells a peer how many pieces this rank has ever taken from its ring here."""
    store_release(line, head)


@device
def header_pieces(line):
    """Ring pieces that a header announces."""
    return np.int64(load_int32(line + 4 * HEADER_PIECES))


@device
def header_count(line):
    """Rows that a header announces."""
    return load_int64(line + 4 * HEADER_COUNT)


@device
def same_signature(line, own):
    """Whether a header's source is doing what this rank does."""
    same, signature = True, signature_of(own)
    for word in range(SIGNATURE_WORDS):
        same &= load_int64(line + 4 * HEADER_SIGNATURE + 8 * word) == signature[word]
    return same
