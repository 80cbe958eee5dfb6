"""Direct collectives on compiled kernels, all ranks' launches interleaved."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from tests.helpers.collective_calls import Call
from tests.helpers.wires import assert_same_bits
from thinwire.fused.collective import collective_layout
from thinwire.triton_kernels.leg_layout import Endpoint, Job
from thinwire.triton_kernels.signal import REPORT_STATUS, RUNNING
from verification.ptx.device import Device


@dataclass
class Collectives:
    """Ends of all ranks on a device, and the calls that were queued on them.

    Attributes:
        timeout, grace: of every wait, in seconds of the device's clock.
    """

    device: Device
    ends: list[Endpoint]
    timeout: float = 1.0
    grace: float = 0.1
    calls: list[tuple[Call, list[torch.Tensor], list[torch.Tensor]]] = field(default_factory=list)

    @classmethod
    def of(cls, device: Device, world: int, slot_bytes: int = 1024) -> Collectives:
        layout = collective_layout(world, slot_bytes)
        buffers = [torch.zeros(layout.NUM_BYTES, dtype=torch.uint8) for _ in range(world)]
        buffer_ptrs = torch.tensor([buffer.data_ptr() for buffer in buffers])
        ends = [Endpoint.of(layout, rank, buffer, buffer_ptrs) for rank, buffer in enumerate(buffers)]
        register_ends(device, ends)
        return cls(device, ends)

    def queue(
        self,
        call: Call,
        absent: tuple[int, ...] = (),
        apart: tuple[int, ...] = (),
        changes: dict[int, Job] | None = None,
    ) -> list[torch.Tensor]:
        """Queues a call of all ranks but those that are absent. Returns each rank's output.

        Args:
            apart: ranks that do in several launches what others may do in one.
            changes: jobs of ranks that do something else than the call.
        """
        xs, outs = [], []
        for end in self.ends:
            x, out = call.tensors(end.rank)
            xs.append(x.clone())
            outs.append(out)
            if end.rank not in absent:
                self.device.rank = end.rank
                own = replace(call, at_once=False) if end.rank in apart else call
                job = (changes or {}).get(end.rank) or call.job()
                own.launch(end, job, x, out, self.timeout, self.grace)
        self.calls.append((call, xs, outs))
        return outs

    def check(self) -> None:
        """Compares every call with plain torch, to the last bit."""
        for end in self.ends:
            assert end.report[REPORT_STATUS] == RUNNING
        for call, _, outs in self.calls:
            for rank, out in enumerate(outs):
                _, fresh = call.tensors(rank)
                assert_same_bits(f"{call}, rank {rank}", call.result(rank, fresh), out)


def register_ends(device: Device, ends: list[Endpoint]) -> None:
    """Names all memory of the ends to the device."""
    for end in ends:
        for name, value in vars(end).items():
            if isinstance(value, torch.Tensor):
                device.register(f"rank {end.rank}'s {name}", value)
