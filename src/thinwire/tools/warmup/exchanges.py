"""What a rank launches in collectives and in all-to-all-v on the direct transport, on memory that is not there."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch

from thinwire.comm.memory.symmetric import SymmetricMemory
from thinwire.fused.channel import channel_layout
from thinwire.fused.collective import DirectCollectives, collective_layout
from thinwire.fused.counts import dense_segments
from thinwire.fused.device_channel import DeviceChannel
from thinwire.fused.partition import LONG_ROW, SHORT_ROW
from thinwire.octets import as_bytes
from thinwire.tools.warmup.rounds import META
from thinwire.triton_kernels import collective
from thinwire.triton_kernels.leg_layout import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, LegLayout
from thinwire.wire import WireFormat

_TIMEOUT = 1.0  # seconds; no kernel knows it before it runs


def _memory(layout: LegLayout) -> SymmetricMemory:
    buffer = torch.empty(layout.NUM_BYTES, dtype=torch.uint8, device=META)
    return SymmetricMemory("cuda", 0, buffer, [0] * layout.WORLD, [])


class _Collectives(DirectCollectives):
    """Prepares every call, whenever it is asked to."""

    def load_kernels(self, key: Hashable, launch: Callable[[], None], lane: int = 0) -> None:
        launch()

    def _require_backend(self, wires: Sequence[WireFormat]) -> None:
        """The GPU that takes them is not here."""

    def launch(self, op: int, row: int, wire: WireFormat, gather_wire: WireFormat, dtype: torch.dtype) -> None:
        """The kernels of a call whose tensors begin on a boundary of 16 bytes."""
        x = torch.empty(row, dtype=dtype, device=META)
        self._load_kernels(self.job(op, dense_segments([row] * self.world), row, wire, gather_wire, dtype), x, x)


def launch_collectives(ranks: int, wire: WireFormat, dtype: torch.dtype) -> None:
    """Kernels of all-reduce, reduce-scatter and all-gather in a wire format, and of sums that are gathered exactly."""
    layout = collective_layout(ranks, on_gpu=True)
    collectives = _Collectives(_memory(layout), layout, 0, _TIMEOUT, collective)
    exact = WireFormat.parse("none")
    for row in (SHORT_ROW, LONG_ROW):
        collectives.launch(REDUCE_SCATTER, row, wire, wire, dtype)
        collectives.launch(ALL_GATHER, row, exact, wire, dtype)
        for gather_wire in (wire, exact):
            collectives.launch(ALL_REDUCE, row, wire, gather_wire, dtype)


class _Channel(DeviceChannel):
    """As `_Collectives`."""

    def load_kernels(self, key: Hashable, launch: Callable[[], None], lane: int = 0) -> None:
        launch()

    def launch(self, x: torch.Tensor, wire: WireFormat) -> None:
        """The kernels of a call for rows of x."""
        form = self._new_row_format(x.shape[1:], x.dtype, wire)
        if form.layout is None:
            self._load_kernels(form, as_bytes(x), form.step)
        else:
            self._load_kernels(form, x, form.step // x.itemsize)


def launch_all_to_all_v(ranks: int, hidden: int, wire: WireFormat, dtype: torch.dtype) -> None:
    """Kernels of all-to-all-v for rows of so many elements in a wire format, and as they are."""
    layout = channel_layout(ranks, on_gpu=True)
    channel = _Channel(_memory(layout), layout, 0, _TIMEOUT)
    for each in (wire, WireFormat.parse("none")):
        channel.launch(torch.empty(1, hidden, dtype=dtype, device=META), each)
