"""Direct collectives whose memory is corrupted at one rank: what both kinds of kernels are put to.

With checksums what that rank returns is right, or it raises IntegrityError, and its peers are told.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from tests.helpers.tampering import CHANGES
from thinwire.comm.communicator import Communicator
from thinwire.fused.all_gather import all_gather
from thinwire.fused.all_reduce import all_reduce
from thinwire.fused.collective import DirectCollectives, open_collectives
from thinwire.fused.reduce_scatter import reduce_scatter
from thinwire.triton_kernels.exchange_layout import FIRST_LEG, SECOND_LEG
from thinwire.triton_kernels.signal import SIGNAL_LINE_BYTES

__all__ = ["OPERATIONS", "SLOT_BYTES", "VICTIM", "Victim", "change_at_random", "two_calls"]

VICTIM = 1
SLOT_BYTES = 4352  # one row of 4096 elements in int8, so that a call is several epochs
OPERATIONS: dict[str, Callable[..., Any]] = {
    "all_reduce": lambda comm, x: all_reduce(x, comm=comm, transport="direct"),
    "all_reduce, gathered exactly": lambda comm, x: all_reduce(
        x[:7000], wire="int4", gather_wire="none", comm=comm, transport="direct"
    ),
    "reduce_scatter": lambda comm, x: reduce_scatter(x[:12600], comm=comm, transport="direct"),
    "all_gather": lambda comm, x: all_gather(x[:3500], wire="int8:row", comm=comm, transport="direct"),
}
Tamper = Callable[["Victim"], None]


class Victim:
    """A rank, before whose kernels read what came in a leg something happens to its memory."""

    def __init__(self, end: DirectCollectives, tamper: Tamper) -> None:
        self.layout, self.memory, self.leg, self.epoch = end.layout, end.memory.local, FIRST_LEG, 0
        self.world = end.layout.WORLD
        self.stale = self.memory.clone()  # as it was a leg before
        kernels = end._kernels

        def hooked(function: Callable[..., None], second: bool) -> Callable[..., None]:
            def run(lane: Any, job: Any, *arguments: Any) -> None:
                self.leg = SECOND_LEG if second and job.op == 0 else FIRST_LEG
                self.epoch = end.open_epoch()
                if self._all_have_signalled():
                    tamper(self)
                    self.stale = self.memory.clone()
                function(lane, job, *arguments)

            return run

        end._kernels = SimpleNamespace(
            scatter=kernels.scatter, send_to_all=kernels.send_to_all,
            reduce=hooked(kernels.reduce, False), gather_recv=hooked(kernels.gather_recv, True),
        )  # fmt: skip

    @property
    def _lines(self) -> int:
        half = (self.epoch & 1) * self.world * SIGNAL_LINE_BYTES
        return self.layout.HEADERS + half if self.leg == FIRST_LEG else self.layout.TAILS

    def _all_have_signalled(self) -> bool:
        until = time.monotonic() + 30
        while time.monotonic() < until:
            flags = (
                self.memory[self._lines :][: self.world * SIGNAL_LINE_BYTES]
                .view(torch.int32)
                .view(self.world, -1)[:, 0]
            )
            if bool((flags == self.epoch).all()):
                return True
            time.sleep(1e-4)
        return False

    def regions(self, memory: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Parts of the memory that are read in this leg, of all sources; views."""
        layout, parity = self.layout, self.epoch & 1
        memory = self.memory if memory is None else memory
        halves = memory[layout.HALVES : layout.RINGS].view(2, self.world, -1)[parity]
        slots = memory[layout.RINGS : layout.CHECKSUMS].view(self.world, 2, -1)[:, parity]
        headers = memory[self._lines :][: self.world * SIGNAL_LINE_BYTES].view(self.world, -1)[:, 4:]
        sums = memory[layout.CHECKSUMS :]
        return (
            {"rows": halves, "headers": headers, "sums": sums}
            if self.leg == FIRST_LEG
            else {"rows": slots, "sums": sums}
        )


def two_calls(comm: Communicator, name: str, tamper: Tamper | None = None) -> list[torch.Tensor]:
    """The tensors of two calls at a rank; if it is the victim, `tamper` sees what it is about to read."""
    end = open_collectives(comm, SLOT_BYTES)
    assert isinstance(end, DirectCollectives), end
    if tamper is not None and comm.rank == VICTIM:
        Victim(end, tamper)
    generator = torch.Generator().manual_seed(comm.rank)
    return [OPERATIONS[name](comm, torch.randn(13000, generator=generator)) for _ in range(2)]


def change_at_random(seed: int, legs: int) -> Tamper:
    """Something that happens to the memory before one of so many legs is read."""
    rng, left = random.Random(seed), random.Random(~seed).randrange(legs)

    def tamper(victim: Victim) -> None:
        nonlocal left
        left -= 1
        if left != -1:
            return
        regions = victim.regions()
        region = rng.choice([*regions])
        octets = regions[region]
        if rng.random() < 0.2:
            octets.copy_(victim.regions(victim.stale)[region])
            return
        changed = octets.flatten()
        for _ in range(rng.choice((1, 30))):
            CHANGES[0 if rng.random() < 0.5 else rng.randrange(len(CHANGES))](rng, changed)
        octets.copy_(changed.view_as(octets))

    return tamper
