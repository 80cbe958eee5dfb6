"""One rank's end of memory in which ranks signal each other: what kernels get of it, whatever goes through it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from thinwire.triton_kernels.signal import CONTROL_WORDS, REPORT_PEERS, Launch, SignalLayout


@dataclass(frozen=True)
class End:
    """One rank's end of such memory. Its tensors are owned by whoever made them; kernels only read and write them.

    Attributes:
        layout: of every rank's symmetric buffer.
        rank: this rank.
        buffer: uint8 [NUM_BYTES], this rank's symmetric buffer, zero at first.
        buffer_ptrs: int64 [world], the address of every rank's buffer, this rank's own included, on the device.
        control: int32 [CONTROL_WORDS], zero at first, on the device.
        report: int32 [REPORT_PEERS + 3 * world], zero at first, host memory that the device can write.
        kept: what launchers look up once, for as long as the end is in use.
        find_ended: gives those of some ranks that have ended, and any that are known to be lost; the CPU's kernels ask.
    """

    layout: SignalLayout
    rank: int
    buffer: torch.Tensor
    buffer_ptrs: torch.Tensor
    control: torch.Tensor
    report: torch.Tensor
    kept: dict[object, Any] = field(default_factory=dict, init=False, repr=False)
    find_ended: Callable[[list[int]], list[int]] = field(default=lambda peers: [], kw_only=True, repr=False)

    def arguments(self) -> dict[str, Any]:
        """What Triton's kernels get of it, by the names of their parameters."""
        return {
            "buffer_ptr": self.buffer.view(torch.int8),
            "buffer_ptrs": self.buffer_ptrs,
            "control_ptr": self.control,
            "report_ptr": self.report,
            "rank": self.rank,
            "LAUNCH": Launch.of(self.layout, self.buffer_ptrs.device),
        }


def report_words(world: int) -> int:
    """int32 words of a report."""
    return REPORT_PEERS + 3 * world


def new_words(world: int, device: torch.device) -> dict[str, Any]:
    """The control block and the report of an end that has not sent anything."""
    return {
        "control": torch.zeros(CONTROL_WORDS, dtype=torch.int32, device=device),
        "report": torch.zeros(report_words(world), dtype=torch.int32, pin_memory=device.type == "cuda", device="cpu"),
    }
