"""About how much memory a problem takes, so that one that does not fit is skipped and not killed."""

from __future__ import annotations

from pathlib import Path

import torch

#: Of what is free, for all ranks that share it.
_SHARE = 0.5
#: A check has sums of all elements in float64 and three times in float32, next to the tensors that contenders keep.
_OF_A_COLLECTIVE = 16
#: Copies of the rows of experts that contenders hold at once, and bytes of a check for each element of all tokens.
_ROW_COPIES, _CHECKED_BYTES = 6, 20


def of_collective(size_bytes: int) -> int:
    """Bytes that a rank needs for a buffer of so many."""
    return _OF_A_COLLECTIVE * size_bytes


def of_round(tokens: int, hidden: int, top_k: int, ranks: int, itemsize: int) -> int:
    """Bytes that a rank needs for a round, where experts get equally many rows."""
    return tokens * hidden * (_ROW_COPIES * top_k * itemsize + _CHECKED_BYTES * ranks)


def why_too_large(needed: int, ranks: int, device: torch.device) -> str | None:
    """Why so many bytes on each of so many ranks are too many for the memory that they share; None if they fit."""
    free = _free(device)
    if needed * ranks <= _SHARE * free:
        return None
    return f"needs about {needed * ranks / 2**20:.0f} MiB, and {free / 2**20:.0f} MiB are free"


def _free(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024
