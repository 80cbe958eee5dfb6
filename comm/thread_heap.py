"""Symmetric memory of ranks that are threads of one process: plain allocations, whose addresses all of them share."""

from __future__ import annotations

import torch

from thinwire.comm.available import available_bytes, require_available
from thinwire.comm.communicator import Communicator
from thinwire.errors import CapacityError

__all__ = ["ThreadHeap"]


class ThreadHeap:
    """Memory of ranks that are threads of one process, or of one rank alone."""

    kind = "threads"

    def __init__(self, comm: Communicator, num_bytes: int) -> None:
        self.comm, self.num_bytes = comm, num_bytes
        self.local: torch.Tensor | None = None
        self.mappings: list[torch.Tensor] = []

    def inspect(self) -> int:
        device = self.comm.device
        if device.type != "cuda":
            return available_bytes()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]

    def create(self, facts: list[int]) -> int:
        require_available(self.comm.size, self.num_bytes, min(facts), str(self.comm.device))
        try:
            self.local = torch.zeros(self.num_bytes, dtype=torch.uint8, device=self.comm.device)
        except RuntimeError as error:  # what both allocators raise; CUDA's is of a class derived from it
            raise CapacityError(
                f"rank {self.comm.rank} cannot allocate {self.num_bytes} bytes on {self.comm.device} ({error}); "
                f"{self.inspect()} bytes are available to it"
            ) from error
        if self.comm.device.type == "cuda":
            torch.cuda.current_stream(self.comm.device).synchronize()
        return self.local.data_ptr()

    def attach(self, offers: list[int]) -> list[int]:
        assert self.local is not None
        # A peer that closes first must not take its memory away from this rank's kernels.
        self.mappings = self.comm.share_objects(self.local) if self.comm.in_process else []
        return offers

    def finish(self) -> None:
        """Nothing was needed for the steps alone."""
