"""Quantising as it is written without a kernel for it: one torch operation after the other."""

from __future__ import annotations

import torch

from thinwire.tools.bench.contender import NotHere
from thinwire.wire import WireFormat

_SCALE_BYTES = 2


class SeparateInt8:
    """int8 with a bfloat16 scale for each group of consecutive elements, scales behind the elements of a row.

    Raises:
        NotHere: another format.
    """

    def __init__(self, wire: WireFormat) -> None:
        if wire.name != "int8" or wire.row_scale or wire.rotated:
            raise NotHere("written for int8 in groups alone")
        self.group, self.qmax = wire.group, wire.qmax

    def row_bytes(self, width: int) -> int:
        """Of an encoded row of so many elements."""
        groups = -(-width // self.group)
        return groups * (self.group + _SCALE_BYTES)

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, width] floats to uint8 [rows, row_bytes]."""
        count, width = rows.shape
        num_groups = -(-width // self.group)
        padded = torch.nn.functional.pad(rows, (0, -width % self.group)) if width % self.group else rows
        groups = padded.float().reshape(count, num_groups, self.group)
        scales = (groups.abs().amax(-1, keepdim=True) / self.qmax).bfloat16()
        quantized = (groups / scales.float().clamp_min(1e-38)).round().clamp(-self.qmax, self.qmax).to(torch.int8)
        payload = quantized.reshape(count, num_groups * self.group).view(torch.uint8)
        return torch.cat([payload, scales.reshape(count, num_groups).view(torch.uint8)], 1)

    def decode(self, encoded: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Back to [rows, width]."""
        count, groups = encoded.shape[0], -(-width // self.group)
        payload = encoded[:, : groups * self.group].contiguous().view(torch.int8)
        scales = encoded[:, groups * self.group :].contiguous().view(torch.bfloat16)
        floats = payload.view(count, groups, self.group).float() * scales.float().view(count, groups, 1)
        return floats.view(count, groups * self.group)[:, :width].to(dtype)
