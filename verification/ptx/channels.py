"""The channel of all-to-all-v on compiled kernels: the library's own host code queues, and ranks' launches interleave.

As on a GPU the host never looks: with the receive counts given it launches all steps of a call at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

import torch

from thinwire.comm.memory.symmetric import SymmetricMemory
from thinwire.fused.channel import FLAT_ROW, RecvBuffer, Transfer, channel_layout
from thinwire.fused.counts import Segments
from thinwire.fused.device_channel import DeviceChannel, Route
from thinwire.triton_kernels.codec_reference import dequantize_reference, quantize_reference
from thinwire.triton_kernels.signal import REPORT_STATUS, RUNNING
from thinwire.wire import WireFormat
from verification.ptx.collectives import register_ends
from verification.ptx.device import Device


@dataclass
class Channels:
    """A channel of each rank on a device, and what is to come of the calls that were queued on them."""

    device: Device
    channels: list[DeviceChannel]
    expected: list[tuple[str, torch.Tensor, torch.Tensor]] = field(default_factory=list)

    @classmethod
    def of(
        cls, device: Device, world: int, piece_bytes: int = 640, pieces: int = 2, timeout: float = 1.0
    ) -> Channels:  # fmt: skip
        layout = channel_layout(world, piece_bytes, pieces)
        buffers = [torch.zeros(layout.NUM_BYTES, dtype=torch.uint8) for _ in range(world)]
        addresses = [buffer.data_ptr() for buffer in buffers]
        channels = []
        for rank, buffer in enumerate(buffers):
            memory = SymmetricMemory("threads", 0, buffer, addresses, [])
            channels.append(DeviceChannel(memory, layout, rank, timeout))
            channels[-1].always_looks = False
        register_ends(device, [channel._end for channel in channels])
        return cls(device, channels)

    def queue(
        self,
        counts: list[list[int]],
        tail: tuple[int, ...],
        dtype: torch.dtype,
        spec: str,
        absent: tuple[int, ...] = (),
        halfway: tuple[int, ...] = (),
        expects: dict[tuple[int, int], int] | None = None,
    ) -> list[torch.Tensor]:
        """Queues a call of all ranks but those that are absent. Returns each rank's output.

        Args:
            counts: rows, or elements of a 1-D tensor, from each rank to each.
            tail: the shape of a row.
            halfway: ranks that send their first pieces, and do no more.
            expects: what a rank (first) takes for the count of a source (second), where that is not what is sent.
        """
        wire, generator = WireFormat.parse(spec), torch.Generator().manual_seed(len(self.expected))
        inputs = [(100 * torch.randn(sum(row), *tail, generator=generator)).to(dtype) for row in counts]
        starts = [[end - count for end, count in zip(accumulate(row), row, strict=True)] for row in counts]
        outs = []
        for rank, channel in enumerate(self.channels):
            received = [row[rank] for row in counts]
            received = [(expects or {}).get((rank, source), count) for source, count in enumerate(received)]
            ends = zip(accumulate(received), received, strict=True)
            # One row apart, which nobody may write.
            places = [end - count + number for number, (end, count) in enumerate(ends)]
            out = torch.full((sum(received) + len(received), *tail), 7).to(dtype)
            expected = out.clone()
            for source, x in enumerate(inputs):
                rows = x[starts[source][rank] :][: counts[source][rank]]
                expected[places[source] :][: len(rows)] = through(rows, wire)
            self.expected.append((f"{spec} {dtype} {tail} at rank {rank}", expected, out))
            outs.append(out)
            if rank in absent:
                continue
            form = channel.row_format(torch.Size(tail), dtype, wire)
            sends = Segments(counts[rank], starts[rank])
            step = inputs[rank].stride(0) * dtype.itemsize
            self.device.rank = rank
            receives = Segments(received, places)
            route = Route(form, step, sends)
            channel.send(Transfer(channel, route, inputs[rank], RecvBuffer(receives, out)), wait=rank not in halfway)
        return outs

    def check(self) -> None:
        """Compares every call's output with what plain torch gives, to the last byte."""
        for channel in self.channels:
            assert channel.report[REPORT_STATUS] == RUNNING
        for name, expected, got in self.expected:
            differs = expected.contiguous().view(-1).view(torch.uint8) != got.view(-1).view(torch.uint8)
            assert not differs.any(), f"{name}: {int(differs.sum())} bytes differ, first {differs.nonzero()[0]}"


def through(x: torch.Tensor, wire: WireFormat) -> torch.Tensor:
    """What rows, or elements of a 1-D tensor, are on arrival."""
    if not wire.quantized or not x.numel():
        return x
    rows = x
    if x.dim() == 1:
        rows = x.new_zeros(-(-len(x) // FLAT_ROW) * FLAT_ROW)
        rows[: len(x)] = x
        rows = rows.view(-1, FLAT_ROW)
    rows = rows.flatten(1)
    back = dequantize_reference(quantize_reference(rows, wire), wire, rows.shape[1], x.dtype)
    return back.view(-1)[: x.numel()].view(x.shape)
