"""The sums of an exchange on the CPU: put beside what travels, and compared where it is read.

What is compared is in this core's cache when it is used. The first row that does not fit ends the exchange.
`thinwire.triton_kernels.exchange_layout` says what lies where, and what seeds are made of.
"""

from __future__ import annotations

import numpy as np

from thinwire.triton_kernels.cpu.checksum import fits, put, row_sums
from thinwire.triton_kernels.cpu.compat import FINGERPRINT, device, kernel
from thinwire.triton_kernels.cpu.ir.checksum import mix
from thinwire.triton_kernels.cpu.ir.intrinsics import store_int32, store_int64
from thinwire.triton_kernels.cpu.signal import nothing, tell_stuck, write_report
from thinwire.triton_kernels.exchange_layout import (
    HEADER_CHECKSUMS,
    HEADER_NUMBER,
    HEADER_PIECES,
    REPORT_FIRST,
    REPORT_ROWS,
    REPORT_SOURCE,
)
from thinwire.triton_kernels.signal import CORRUPTED

_HEADER_BYTES = 4 * (HEADER_CHECKSUMS - HEADER_PIECES)


@device
def slot_seed(epoch, source, number):
    """The seed of what a source puts into a slot in an epoch; all int64."""
    return mix(mix(mix(np.int64(np.int32(epoch))) ^ source) ^ number)  # epochs wrap


# Kernels, as they are called in several places, and inlined nowhere.


@kernel
def put_row_sums(sums, row, num_bytes, seed, number, fingerprint=FINGERPRINT):
    """Writes the sums of row `number` of a slot, which lies at the address `row`; those of row 0 lie at `sums`."""
    put(sums + 16 * number, row_sums(row, num_bytes, seed, number))


@kernel
def row_fits(sums, row, num_bytes, seed, number, fingerprint=FINGERPRINT):
    """Whether a row fits such sums."""
    return fits(sums + 16 * number, row_sums(row, num_bytes, seed, number))


@kernel
def put_header_sums(line, epoch, source, fingerprint=FINGERPRINT):
    """Writes the sums of a header's words behind them."""
    seed = slot_seed(epoch, source, np.int64(HEADER_NUMBER))
    put(line + 4 * HEADER_CHECKSUMS, row_sums(line + 4 * HEADER_PIECES, _HEADER_BYTES, seed, 0))


@kernel
def header_fits(line, epoch, source, fingerprint=FINGERPRINT):
    """Whether a header fits its sums."""
    seed = slot_seed(epoch, source, np.int64(HEADER_NUMBER))
    return fits(line + 4 * HEADER_CHECKSUMS, row_sums(line + 4 * HEADER_PIECES, _HEADER_BYTES, seed, 0))


@device
def report_corruption(own, epoch, phase, source, first, rows):
    """Tells the peers that this rank gave up, so that they do not wait for it, and reports what of which rank did not
    fit; the memory is for the caller to poison."""
    tell_stuck(own, epoch, phase, nothing, 0)
    store_int32(own.report + 4 * REPORT_SOURCE, source)
    store_int64(own.report + 4 * REPORT_FIRST, first)
    store_int64(own.report + 4 * REPORT_ROWS, rows)
    write_report(own, CORRUPTED, epoch, phase)
