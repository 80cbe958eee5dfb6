"""How symmetric memory is made, in steps; plain allocations, which threads of one process share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from thinwire.comm.communicator import Communicator
from thinwire.comm.resources.available import available_bytes, require_available
from thinwire.errors import CapacityError, TransportUnavailable


class StillWaiting(TransportUnavailable):
    """A rank waited for others, one of which may know more of why."""


class Heap:
    """One kind of memory: here that of ranks that are threads of one process, or of one rank alone.

    All ranks take each step before any of them takes the next.

    Attributes:
        ranks: those that map each other's buffers; of the others this one's own address stands in the table.
        local: the own buffer, once `create` has run.
        mappings: what keeps the peers' buffers at their addresses.
        fact, offer: the shapes of what `inspect` and `create` return, see `thinwire.fields`.
    """

    kind = "threads"
    fact: Any = int
    offer: Any = int

    def __init__(self, comm: Communicator, num_bytes: int, ranks: Sequence[int]) -> None:
        self.comm, self.num_bytes, self.ranks = comm, num_bytes, ranks
        self.local: torch.Tensor | None = None
        self.mappings: list[Any] = []

    @staticmethod
    def held_bytes(num_bytes: int) -> int:
        """What a rank holds for a buffer of so many bytes."""
        return num_bytes

    def inspect(self) -> Any:
        """What the ranks must know of this one before anything is allocated."""
        if self.comm.device.type != "cuda":
            return available_bytes()
        torch.cuda.empty_cache()  # what torch keeps for itself cannot be had for this
        return torch.cuda.mem_get_info(self.comm.device)[0]

    def read_fact(self, fact: Any) -> Any:
        """A rank's fact as it arrived, checked; ValueError for one that cannot be."""
        if fact < 0:
            raise ValueError(f"{fact} bytes are available to it")
        return fact

    def create(self, facts: list[Any]) -> Any:
        """Allocates the own buffer, zeroed, if all ranks' facts allow it; returns what peers need to find it."""
        require_available(len(self.ranks), self.num_bytes, self._least(facts), str(self.comm.device))
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

    def read_offer(self, offer: Any) -> Any:
        """A rank's offer as it arrived, checked; ValueError for one that cannot be."""
        return offer

    def attach(self, offers: list[Any]) -> list[int]:
        """Maps the peers' buffers and returns the addresses of all."""
        # A peer that closes first must not take its memory away from this rank's kernels.
        self.mappings = self.comm.share_objects(self.local) if self.comm.in_process else []
        return [offers[rank if rank in self.ranks else self.comm.rank] for rank in range(self.comm.size)]

    def trials(self, buffer_ptrs: list[int]) -> Sequence[Callable[[], object]]:
        """Steps that show whether what is mapped can be used; TransportUnavailable where it cannot."""
        return ()

    def _least(self, available: Sequence[int]) -> int:
        return min(available[rank] for rank in self.ranks)

    def finish(self) -> None:
        """Gives back what only the steps needed."""
