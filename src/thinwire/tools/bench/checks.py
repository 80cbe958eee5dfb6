"""Whether a result is right: how far each element may be from the exact one, by the wire that it came over.

Over `none` what is moved arrives bit for bit. A quantised element may be off by what `thinwire.wire` promises for its
scale `s`: `s * (1/2 + 2**-15)` for the integer formats, half a unit of e4m3 for fp8; and by the last rounding to the
tensor's dtype. What is summed may be off by the sum of its summands' bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from thinwire.wire import BLOCK, WireFormat

#: Elements that are compared at once, so that a check takes little memory.
_AT_ONCE = 1 << 22
_E4M3_RELATIVE, _E4M3_LEAST = 2**-4 * (1 + 2**-6), 2**-10
#: Of float32 sums and products, for each summand; more than any order of them loses.
_FLOAT32_SLACK = 2**-22


class Verdict(NamedTuple):
    """What a check found on one rank.

    Attributes:
        wrong: elements outside their bound, NaN included.
        error_squares: sum of squared differences to the exact result.
        squares: sum of squares of that.
    """

    wrong: int
    error_squares: float
    squares: float


def compare(
    got: torch.Tensor,
    exact: torch.Tensor,
    bound: torch.Tensor | float,
    index: torch.Tensor | None = None,
) -> Verdict:
    """Compares elements with the exact ones, in float64.

    Args:
        got: [rows, ...] or flat.
        exact: of the same shape; with `index` any rows.
        bound: how far each may be off, broadcast against `exact`.
        index: int64 [rows], which of `exact` each row of `got` must be.
    """
    rows = exact.shape[0] if index is None else index.shape[0]
    if got.shape != (rows, *exact.shape[1:]):
        return Verdict(max(rows * exact[:1].numel(), got.numel(), 1), float("nan"), 1.0)
    bounds = torch.as_tensor(bound, device=exact.device).expand(exact.shape)
    wrong, error_squares, squares = 0, 0.0, 0.0
    step = max(1, _AT_ONCE // max(1, exact[:1].numel()))
    for start in range(0, rows, step):
        part = slice(start, start + step)
        where = part if index is None else index[part]
        wanted = exact[where].double()
        difference = (got[part].double() - wanted).abs()
        wrong += int((~(difference <= bounds[where].double())).sum())
        error_squares += float(difference.square().sum())
        squares += float(wanted.square().sum())
    return Verdict(wrong, error_squares, squares)


def row_scales(rows: torch.Tensor, wire: WireFormat) -> torch.Tensor:
    """The scale of each element of [rows, width], float32, as the wire rounds it; the most it can be, if rotated."""
    width = rows.shape[-1]
    group = wire.group or wire.columns(width)
    magnitudes = torch.nn.functional.pad(rows.float().abs(), (0, -width % group))
    if wire.rotated:  # no element exceeds the sum of its block's magnitudes
        magnitudes = (
            magnitudes.view(rows.shape[0], magnitudes.shape[1] // BLOCK, BLOCK).sum(-1).repeat_interleave(BLOCK, -1)
        )
    scales = magnitudes.view(rows.shape[0], -(-width // group), group).amax(-1) * (1 / wire.qmax)
    scales = scales if wire.row_scale else scales.bfloat16().float()
    return scales.repeat_interleave(group, -1)[:, :width]


def flat_scales(flat: torch.Tensor, counts: Sequence[int], row: int, wire: WireFormat) -> torch.Tensor:
    """The same of a flat tensor that is cut into parts, and each part into rows of so many elements."""
    parts = []
    for part in flat.split(list(counts)):
        rows = torch.nn.functional.pad(part, (0, -len(part) % row)).view(-1, row)
        parts.append(row_scales(rows, wire).view(-1)[: len(part)])
    return torch.cat(parts)


def wire_bound(magnitudes: torch.Tensor, scales: torch.Tensor, wire: WireFormat) -> torch.Tensor:
    """How far elements of such magnitudes may be off in float32, once they were quantised with these scales."""
    if wire.name == "fp8":
        return torch.maximum(magnitudes.float().abs() * _E4M3_RELATIVE, scales * _E4M3_LEAST)
    return scales * (0.5 + wire.qmax * 2.0**-22)


def rounding(magnitudes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What the last rounding to a dtype may add where results have such magnitudes."""
    return magnitudes.abs() * (torch.finfo(dtype).eps / 2)


def float32_slack(summands: int, magnitudes: torch.Tensor) -> torch.Tensor:
    """What float32 may lose over so many sums of terms whose magnitudes add up to these."""
    return magnitudes * (summands * _FLOAT32_SLACK)
