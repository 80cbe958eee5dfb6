"""What others send rows as, in plain torch, for a table beside thinwire's formats: errors and bytes, not speed.

Each function takes float32 [rows, hidden] to what arrives, float32. Elements and scales are as `source` has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps

import torch
from torch import Tensor
from torch.nn import functional

_E4M3_MAX, _E2M1_MAX = 448.0, 6.0
_LOG_RANGE = math.log(2.0**32)  # of LogFMT: smaller magnitudes become the smallest that it has, or zero


def _in_groups(size: int) -> Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]]:
    """The function gets [rows, groups, size], the last group filled up with zeros."""

    def made(passed: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        @wraps(passed)
        def of_rows(rows: Tensor) -> Tensor:
            groups = functional.pad(rows, (0, -rows.shape[1] % size)).unflatten(1, (-1, size))
            return passed(groups).flatten(1)[:, : rows.shape[1]]

        return of_rows

    return made


def _over(values: Tensor, scale: Tensor) -> Tensor:
    return torch.where(scale > 0, values / scale, 0.0)


def _e4m3(values: Tensor) -> Tensor:
    return values.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).float()


def _e2m1(values: Tensor) -> Tensor:
    """0, 0.5, 1, 1.5, 2, 3, 4, 6, and their negatives."""
    step = torch.where(values.abs() < 2, 0.5, torch.where(values.abs() < 4, 1.0, 2.0))
    return (torch.round(values / step) * step).clamp(-_E2M1_MAX, _E2M1_MAX)


def _amax(groups: Tensor) -> Tensor:
    return groups.abs().amax(-1, keepdim=True)


@_in_groups(128)
def _deepep_fp8(groups: Tensor) -> Tensor:
    scale = _amax(groups).clamp(min=1e-4) / _E4M3_MAX
    return _e4m3(groups / scale) * scale


def _power_of_two(groups: Tensor, exponent_of_max: int) -> Tensor:
    """2 ** (floor(log2(amax)) - exponent_of_max), which leaves some maxima above the largest element: they are cut."""
    amax = _amax(groups)
    return torch.where(amax > 0, torch.exp2(torch.frexp(amax).exponent - 1.0 - exponent_of_max), 0.0)


@_in_groups(32)
def _mxfp8(groups: Tensor) -> Tensor:
    scale = _power_of_two(groups, 8)
    return _e4m3(_over(groups, scale)) * scale


@_in_groups(32)
def _mxfp4(groups: Tensor) -> Tensor:
    scale = _power_of_two(groups, 2)
    return _e2m1(_over(groups, scale)) * scale


@_in_groups(16)
def _nvfp4(groups: Tensor) -> Tensor:
    amax = _amax(groups)
    whole = amax.amax(1, keepdim=True) / (_E4M3_MAX * _E2M1_MAX)
    scale = _e4m3(_over(amax / _E2M1_MAX, whole)) * whole
    return _e2m1(_over(groups, scale)) * scale


@_in_groups(128)
def _logfmt10(groups: Tensor) -> Tensor:
    size = groups.abs()
    logs = torch.log(size.clamp(min=torch.finfo(torch.float32).tiny))
    high = logs.amax(-1, keepdim=True)
    low = torch.where(size > 0, logs, high).amin(-1, keepdim=True).maximum(high - _LOG_RANGE)
    last = 2**9 - 2  # a bit is the sign, and one code is zero
    step = (high - low) / last
    below = _over(logs - low, step).clamp(0, last).floor()
    # The nearer of the neighbours in linear space, not in logarithms, so that errors have no bias.
    ends = [torch.exp(low + code * step) for code in (below, (below + 1).clamp(max=last))]
    nearest = torch.where(size - ends[0] <= ends[1] - size, ends[0], ends[1])
    return torch.where(size < ends[0] / 2, 0.0, nearest).copysign(groups)


@_in_groups(128)
def _spike_int8(groups: Tensor) -> Tensor:
    places = torch.cat([groups.argmin(-1, keepdim=True), groups.argmax(-1, keepdim=True)], -1)
    spikes = torch.zeros_like(groups, dtype=torch.bool).scatter(-1, places, True)
    low = groups.masked_fill(spikes, math.inf).amin(-1, keepdim=True)
    high = groups.masked_fill(spikes, -math.inf).amax(-1, keepdim=True)
    scale, zero = ((high - low) / 255).bfloat16().float(), low.bfloat16().float()
    rest = torch.round(_over(groups - zero, scale)).clamp(0, 255) * scale + zero
    return torch.where(spikes, _bfloat16(groups), rest)


def _bfloat16(rows: Tensor) -> Tensor:
    return rows.bfloat16().float()


@dataclass(frozen=True)
class FieldFormat:
    """A format of others.

    Attributes:
        passed: rows to what arrives.
        bytes_an_element: of elements and scales, without padding, and without what serves a whole row.
        source: where it is from, and what is assumed.
    """

    name: str
    passed: Callable[[Tensor], Tensor]
    bytes_an_element: float
    source: str


FIELD = (
    FieldFormat("bfloat16", _bfloat16, 2, "a cast"),
    FieldFormat(
        "LogFMT-10", _logfmt10, 10 / 8 + 4 / 128,
        "DeepSeek-AI, Insights into DeepSeek-V3, arXiv 2505.09343; both ends of a group in bfloat16 are assumed",
    ),
    FieldFormat(
        "spike int8", _spike_int8, 1 + 10 / 128,
        "FlashCommunication V2, arXiv 2508.03760; scale, zero and two extremes in bfloat16, two places in bytes",
    ),
    FieldFormat("DeepEP fp8", _deepep_fp8, 1 + 4 / 128, "DeepEP, tests/utils.py, per_token_cast_to_fp8"),
    FieldFormat("mxfp8", _mxfp8, 1 + 1 / 32, "OCP Microscaling Formats 1.0, section 6.3, e4m3"),
    FieldFormat(
        "nvfp4", _nvfp4, 1 / 2 + 1 / 16,
        "NVIDIA, Pretraining Large Language Models with NVFP4, arXiv 2509.25149; a row in place of a tensor",
    ),
    FieldFormat("mxfp4", _mxfp4, 1 / 2 + 1 / 32, "OCP Microscaling Formats 1.0, section 6.3, e2m1"),
)  # fmt: skip
