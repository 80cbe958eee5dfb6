"""Blocks of 64 columns in plain torch: how they are rotated, and cut into bit planes. `thinwire.wire` defines both."""

from __future__ import annotations

import torch
from einops import rearrange

from thinwire.wire import BLOCK


def rotated_reference(rows: torch.Tensor, back: bool) -> torch.Tensor:
    """Rows, float [rows, columns], with each block of 64 columns rotated, or rotated back; unscaled both ways."""
    column = torch.arange(BLOCK, device=rows.device)
    odd = column & (column >> 1) & 0x15
    odd = (odd ^ odd >> 2 ^ odd >> 4) & 1
    signs = (1.0 - 2.0 * odd).to(rows.dtype)
    blocks = rearrange(rows, "rows (blocks columns) -> rows blocks columns", columns=BLOCK)
    blocks = blocks if back else blocks * signs
    for stage in range(6):
        first, second = rearrange(
            blocks, "rows blocks (outer two inner) -> two rows blocks outer inner", two=2, inner=1 << stage
        )
        blocks = rearrange(
            [first + second, first - second], "two rows blocks outer inner -> rows blocks (outer two inner)"
        )
    return rearrange(blocks * signs if back else blocks, "rows blocks columns -> rows (blocks columns)")


def planes_reference(codes: torch.Tensor, planes: tuple[int, ...]) -> torch.Tensor:
    """The bit planes, int32 [rows, bytes], of int32 codes [rows, columns]."""
    blocks, parts, taken = rearrange(codes, "rows (blocks columns) -> rows blocks columns", columns=BLOCK), [], 0
    for bits in planes:
        fields = blocks >> taken & (1 << bits) - 1
        fields = rearrange(fields, "rows blocks (parts octets) -> rows blocks octets parts", octets=8 * bits)
        places = torch.arange(0, 8, bits, dtype=torch.int32, device=codes.device)
        parts.append((fields << places).sum(-1).int().flatten(1))
        taken += bits
    return torch.cat(parts, 1)


def codes_reference(payload: torch.Tensor, planes: tuple[int, ...]) -> torch.Tensor:
    """The inverse of `planes_reference`: int32 [rows, columns] of uint8 [rows, bytes]."""
    columns, start, taken = payload.shape[1] * 8 // sum(planes), 0, 0
    codes = torch.zeros(len(payload), columns // BLOCK, BLOCK, dtype=torch.int32, device=payload.device)
    for bits in planes:
        plane = payload[:, start : start + columns * bits // 8].int()
        plane = rearrange(plane, "rows (blocks octets) -> rows blocks octets", octets=8 * bits)
        fields = torch.cat([plane >> place & (1 << bits) - 1 for place in range(0, 8, bits)], -1)
        codes, taken, start = codes | fields << taken, taken + bits, start + columns * bits // 8
    sign = 1 << taken - 1
    return rearrange((codes ^ sign) - sign, "rows blocks columns -> rows (blocks columns)")
