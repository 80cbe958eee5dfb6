"""Floats of every format that kernels use, and rounding to them from what is exact, after IEEE 754 and the PTX manual.

float64 holds any value of the others exactly, and any product of two float32, so that rounding from it is the only one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from verification.ptx.errors import PtxError


@dataclass(frozen=True)
class Format:
    """A binary float: its bits, those of its fraction, its largest finite value's bits, and its canonical NaN."""

    bits: int
    fraction: int
    largest: int
    nan: int
    infinity: int | None  # None: there is none, and the codes past `largest` are NaN

    @property
    def least_exponent(self) -> int:
        """Of the unit of subnormals, as a power of two."""
        return 2 - (1 << (self.bits - self.fraction - 2)) - self.fraction

    @property
    def unsigned(self) -> type:
        return {8: np.uint8, 16: np.uint16, 32: np.uint32}[self.bits]


#: NaN as conversions give it; arithmetic on float32 gives the same.
FORMATS = {
    "f32": Format(32, 23, 0x7F7FFFFF, 0x7FFFFFFF, 0x7F800000),
    "f16": Format(16, 10, 0x7BFF, 0x7FFF, 0x7C00),
    "bf16": Format(16, 7, 0x7F7F, 0x7FFF, 0x7F80),
    "e4m3": Format(8, 3, 0x7E, 0x7F, None),
    "e5m2": Format(8, 2, 0x7B, 0x7F, 0x7C),
}


def narrow(x: np.ndarray, name: str, saturate: bool = False) -> np.ndarray:
    """float64 to the nearest in a format, half to even, as bits; `saturate` keeps what is not NaN finite."""
    form = FORMATS.get(name)
    if form is None:
        raise PtxError(f"not built: to {name}")
    _, exponent = np.frexp(np.where(np.isfinite(x), x, 0.0))
    exponent = np.where(x == 0, form.least_exponent, exponent)
    unit = np.maximum(exponent - 1 - form.fraction, form.least_exponent)
    with np.errstate(invalid="ignore", over="ignore"):
        units = np.abs(np.rint(np.ldexp(x, -unit)))
    # Units of a binade count on from the binade before, and a carry goes into the exponent.
    finite = np.isfinite(x)
    with np.errstate(invalid="ignore"):
        bits = np.where(finite, units, 0).astype(np.int64)
    bits += (unit - form.least_exponent).astype(np.int64) << form.fraction
    past = form.largest if saturate else form.nan if form.infinity is None else form.infinity
    bits = np.where((bits > form.largest) | np.isinf(x), past, bits)
    bits |= np.signbit(x).astype(np.int64) << (form.bits - 1)
    return np.where(np.isnan(x), form.nan, bits).astype(form.unsigned)


def widen(bits: np.ndarray, name: str) -> np.ndarray:
    """The bits of a format as float64."""
    form = FORMATS[name]
    if name == "f32":
        return bits.view(np.float32).astype(np.float64)
    bits = bits.astype(np.int64)
    magnitude = bits & ((1 << (form.bits - 1)) - 1)
    exponent, fraction = magnitude >> form.fraction, magnitude & ((1 << form.fraction) - 1)
    implicit = np.where(exponent > 0, 1 << form.fraction, 0)
    x = np.ldexp((fraction + implicit).astype(np.float64), np.maximum(exponent, 1) - 1 + form.least_exponent)
    if form.infinity is not None:
        x = np.where(magnitude == form.infinity, np.inf, x)
    x = np.where(magnitude > (form.largest if form.infinity is None else form.infinity), np.nan, x)
    return np.where(bits >> (form.bits - 1) == 1, -x, x)
