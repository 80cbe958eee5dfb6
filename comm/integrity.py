"""Detects corrupted data: the option `integrity`, and the checksums of messages through an exchange.

Each *block* has a checksum: whole rows of a message, as many as fit `BLOCK_BYTES`, and at least one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple

import torch

from thinwire.errors import ArgumentError
from thinwire.triton_kernels.cpu import HAS_NUMBA

#: What `integrity=` accepts.
MODES = ("none", "checksum")
VARIABLE = "THINWIRE_INTEGRITY"

BLOCK_BYTES = 4096


class Rows(NamedTuple):
    """The rows of a message, for errors that name a part of it.

    Attributes:
        num_bytes: of a row; 1 if the message has no rows.
        first: the number of its first row.
    """

    num_bytes: int = 1
    first: int = 0

    @property
    def block_bytes(self) -> int:
        """Bytes that share a checksum."""
        return self.num_bytes * max(1, BLOCK_BYTES // self.num_bytes)

    def name(self, blocks: Iterable[int], message_bytes: int) -> tuple[range, ...]:
        """The rows of blocks of one message, as stretches, ascending."""
        per_block, total = self.block_bytes // self.num_bytes, -(-message_bytes // self.num_bytes)
        stretches: list[range] = []
        for block in blocks:
            start, stop = self.first + block * per_block, self.first + min((block + 1) * per_block, total)
            if stretches and stretches[-1].stop == start:
                start = stretches.pop().start
            stretches.append(range(start, stop))
        return tuple(stretches)


def resolve_integrity(integrity: str | None) -> str:
    """The mode; for None the environment's, else "none".

    Raises:
        ArgumentError: the argument or the environment variable is no mode.
    """
    value, source = integrity, "integrity"
    if integrity is None:
        value, source = os.environ.get(VARIABLE) or MODES[0], f"{VARIABLE} in the environment"
    if not isinstance(value, str) or value not in MODES:
        raise ArgumentError(f"{source} is {value!r}, expected one of: {', '.join(MODES)}")
    return value


def checksums(message: torch.Tensor, rows: Rows, seed: int) -> torch.Tensor:
    """The checksums of a message's blocks, uint8 [blocks * 16], on the message's device, by the kernel available there.

    Args:
        message: uint8 [bytes], contiguous.
        seed: see `thinwire.triton_kernels.checksum_seed.seed_of`.
    """
    block_bytes, on_cpu = rows.block_bytes, message.device.type == "cpu"
    # In here, not above: loading numba or Triton takes a while, and most ranks do without them.
    if on_cpu and not HAS_NUMBA:
        from thinwire.triton_kernels.checksum import row_checksums_reference

        sums = row_checksums_reference(message, block_bytes, seed, rows.first)
    else:
        if on_cpu:
            from thinwire.triton_kernels.cpu.checksum import row_checksums
        else:
            from thinwire.triton_kernels.checksum import row_checksums
        sums = message.new_empty(-(-message.numel() // block_bytes), 2, dtype=torch.int64)
        row_checksums(message, block_bytes, seed, rows.first, sums)
    return sums.view(-1).view(torch.uint8)


def differing_blocks(sums: torch.Tensor, others: torch.Tensor) -> list[int]:
    """The numbers of blocks with different checksums, as `checksums` gives them. Waits for the device."""
    if torch.equal(sums, others):
        return []
    pairs = (found.view(torch.int64).view(-1, 2) for found in (sums, others))
    differs: torch.Tensor = torch.ne(*pairs).any(1)
    return differs.nonzero()[:, 0].tolist()
