"""SiLU, x / (1 + exp(-x)), in float32 and the same bits in every backend.

A library's exp differs between torch, numba, Triton's interpreter and each GPU, and what is quantised afterwards would
differ by whole steps. So it is made of additions, multiplications and one division, each rounded by itself::

    y = -min(|x|, 87)      n = round_half_even(y / log 2)      r = y - n log 2, log 2 in two parts
    exp(y) = 2**n * (1 + r + r**2 * p(r))         p: a polynomial of degree 5 (Cephes' expf)
    silu(x) = x * (1 if x >= 0 else exp(y)) / (1 + exp(y))

From -87 on it is within 3e-7 of the exact value, relatively; below it is x * exp(-87), about 1e-36, instead of less.
"""

from __future__ import annotations

import torch

from thinwire.triton_kernels.compat import tl, triton
from thinwire.triton_kernels.floats import ROUND_MAGIC, SIGNLESS

LOWEST = 87.0
LOG2_E = 1.44269502162933349609375  # float32 values, all of them
LOG_2_HIGH, LOG_2_LOW = 0.693359375, -2.12194440e-4
POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
MAGIC, MAGIC_BITS = 12582912.0, 0x4B400000

_LOWEST, _LOG2_E = tl.constexpr(LOWEST), tl.constexpr(LOG2_E)
_LOG_2_HIGH, _LOG_2_LOW = tl.constexpr(LOG_2_HIGH), tl.constexpr(LOG_2_LOW)
_P0, _P1, _P2, _P3, _P4, _P5 = (tl.constexpr(coefficient) for coefficient in POLYNOMIAL)
_MAGIC_BITS = tl.constexpr(MAGIC_BITS)


@triton.jit
def exp_of_minus(magnitude):
    """exp(-magnitude) of float32 from 0 to 87, and of 87 for others. Launchers pass `enable_fp_fusion=False`."""
    y = 0.0 - tl.where(magnitude < _LOWEST, magnitude, _LOWEST)
    n = (y * _LOG2_E + ROUND_MAGIC).to(tl.int32, bitcast=True) - _MAGIC_BITS
    whole = n.to(tl.float32)
    r = (y - whole * _LOG_2_HIGH) - whole * _LOG_2_LOW
    p = ((((_P0 * r + _P1) * r + _P2) * r + _P3) * r + _P4) * r + _P5
    return ((p * (r * r) + r) + 1.0) * ((n + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def silu(x):
    """SiLU of float32."""
    e = exp_of_minus((x.to(tl.int32, bitcast=True) & SIGNLESS).to(tl.float32, bitcast=True))
    return x * tl.div_rn(tl.where(x >= 0.0, 1.0, e), 1.0 + e)


def silu_reference(x: torch.Tensor) -> torch.Tensor:
    """SiLU of a float32 tensor, in plain torch."""
    y = -torch.where(x.abs() < LOWEST, x.abs(), LOWEST)
    n = (y * LOG2_E + MAGIC).view(torch.int32) - MAGIC_BITS
    whole = n.float()
    r = (y - whole * LOG_2_HIGH) - whole * LOG_2_LOW
    p = POLYNOMIAL[0] * r
    for coefficient in POLYNOMIAL[1:-1]:
        p = (p + coefficient) * r
    p = p + POLYNOMIAL[-1]
    e = ((p * (r * r) + r) + 1.0) * ((n + 127) << 23).view(torch.float32)
    return x * (torch.where(x >= 0, 1.0, e) / (1.0 + e))
