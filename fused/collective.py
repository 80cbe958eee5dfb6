"""The direct transport of all-reduce, reduce-scatter and all-gather: memory, jobs, and what is launched when.

Memory, legs and epochs are described in `thinwire.triton_kernels.exchange_layout`. Numba's kernels and Triton's have
the same launchers, so this file serves both. A call longer than a slot goes in chunks, one epoch each.

*Ranks that disagree* all learn it in the same epoch. On the CPU, where the host looks after each wait, all of them
raise `ConfigMismatch` and may go on. On CUDA nothing waits for the device: outputs are filled with NaN, the error is
raised by the next call or by `check`, and the memory is of no more use, as after a timeout.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import NoReturn

import torch

from thinwire.comm.communicator import Communicator
from thinwire.comm.symmetric import SymmetricMemory
from thinwire.errors import CapacityError, ConfigMismatch, PeerTimeout, ThinwireError
from thinwire.fused.backend import select_backend
from thinwire.fused.counts import Segments
from thinwire.fused.partition import describe_signature, signature_of
from thinwire.fused.transport import DirectTransport, Refusal, open_direct, uses_triton
from thinwire.triton_kernels.exchange_layout import (
    ALL_GATHER,
    ALL_REDUCE,
    HEADER_SIGNATURE,
    REDUCE_SCATTER,
    SIGNATURE_WORDS,
    Endpoint,
    ExchangeLayout,
    Job,
)
from thinwire.triton_kernels.signal import (
    CONTROL_EPOCH,
    CONTROL_STATUS,
    MAX_WORLD,
    REPORT_EPOCH,
    REPORT_PEERS,
    REPORT_STATUS,
    RUNNING,
    SIGNAL_LINE_BYTES,
    TIMED_OUT,
)
from thinwire.wire import WireFormat

__all__ = ["DirectCollectives", "open_collectives"]

_KEY = "collectives"
_SLOTS = 2  # of a ring: the second leg's, by parity
#: Of a slot, and of all of a rank's memory; on a GPU three launches should not cost more than what they move.
_SLOT_BYTES, _MOST_BYTES = 1 << 20, 64 << 20
_GPU_SLOT_BYTES, _GPU_MOST_BYTES = 4 << 20, 256 << 20
_MOST_JOBS = 1024  # that are remembered


def open_collectives(
    comm: Communicator, slot_bytes: int | None = None, wires: Sequence[WireFormat] = ()
) -> DirectCollectives | Refusal:
    """What the communicator's direct collectives work with, or why there is none. Made at the first call, by all ranks.

    Args:
        comm: closes it when it is closed.
        slot_bytes: see `collective_layout`; looked at in the first call only. On CUDA None means 4 MiB, or less in a
            large group.
        wires: what the call at hand wants to send.

    Raises:
        TransportUnavailable: no backend can quantise for these wires, on any transport. Raised before peers are asked.
        ConfigMismatch: ranks that asked for different layouts, or run different versions.
        PeerTimeout: a peer did not take part.
    """
    for wire in wires:
        if wire.quantized:
            select_backend(comm.device, wire)
    return comm.attached(_KEY, lambda: _open(comm, slot_bytes))


def collective_layout(world: int, slot_bytes: int | None = None, on_gpu: bool = False) -> ExchangeLayout:
    """The layout of the collectives' memory, before anything is allocated.

    Args:
        world: ranks, at most 72.
        slot_bytes: of one slot, a multiple of 128; None means 1 MiB, 4 MiB on a GPU, or less in a large group.

    Raises:
        CapacityError: for another number.

    >>> collective_layout(8).SLOT_BYTES, collective_layout(72).SLOT_BYTES
    (1048576, 232960)
    """
    if not 1 <= world <= MAX_WORLD:
        raise CapacityError(f"a group of {world} ranks; the direct collectives take 1 to {MAX_WORLD}")
    if slot_bytes is None:
        wanted, memory = (_GPU_SLOT_BYTES, _GPU_MOST_BYTES) if on_gpu else (_SLOT_BYTES, _MOST_BYTES)
        slot_bytes = ExchangeLayout.slot_bytes_within(memory, world, _SLOTS, wanted)
    return ExchangeLayout.of(world, slot_bytes, _SLOTS)


def _open(comm: Communicator, slot_bytes: int | None) -> DirectCollectives | Refusal:
    try:
        layout = collective_layout(comm.size, slot_bytes, comm.device.type == "cuda")
    except CapacityError as error:
        return Refusal(_KEY, str(error))

    num_programs = _num_programs(comm)

    def make(memory: SymmetricMemory) -> DirectCollectives:
        kernels: ModuleType
        if uses_triton(comm):
            from thinwire.triton_kernels import collective as kernels
        else:
            from thinwire.triton_kernels.cpu import collective as kernels
        return DirectCollectives(memory, layout, comm.rank, comm.timeout, kernels, num_programs)

    return open_direct(comm, _KEY, layout.NUM_BYTES, {"slot_bytes": layout.SLOT_BYTES}, make)


def _num_programs(comm: Communicator) -> int | None:
    """Programs of a launch: None, as many as are good, unless ranks share a GPU and could keep each other out of it."""
    if comm.device.type != "cuda":
        return None
    from thinwire.triton_kernels.exchange import programs_on_shared_gpu

    own = platform.node(), str(torch.cuda.get_device_properties(comm.device).uuid)
    ranks = comm.all_gather_object(own).count(own)
    return programs_on_shared_gpu(comm.device, ranks) if ranks > 1 else None


class DirectCollectives(DirectTransport):
    """The memory, the kernels and the state of one communicator's direct collectives, at one rank.

    Args:
        memory, rank, timeout: see `DirectTransport`.
        layout: of each buffer.
        kernels: the module with the launchers.
        num_programs: of each launch on a GPU; None means enough to fill it.
    """

    phases = ("first leg", "second leg")

    def __init__(
        self,
        memory: SymmetricMemory,
        layout: ExchangeLayout,
        rank: int,
        timeout: float,
        kernels: ModuleType,
        num_programs: int | None = None,
    ) -> None:
        super().__init__(_KEY, memory, rank, timeout)
        self.layout = layout
        self._kernels, self._num_programs = kernels, num_programs
        self.lane = Endpoint.of(layout, rank, memory.local, memory.buffer_ptrs)
        # Kernels that find this status do nothing; it is for those that only have to be compiled and loaded.
        self._idle = Endpoint.of(layout, rank, memory.local, memory.buffer_ptrs)
        self._idle.control[CONTROL_STATUS] = TIMED_OUT
        self.report = self.lane.report.numpy()
        self._jobs: dict[tuple[object, ...], Job] = {}
        self._captured: dict[int, Job] = {}  # whose parts graphs go on reading, by identity
        if self.on_gpu:
            torch.cuda.current_stream(self.device).synchronize()  # what was zeroed here is used on any stream

    def job(
        self, op: int, parts: Segments, row: int, wire: WireFormat, gather_wire: WireFormat, dtype: torch.dtype
    ) -> Job:
        """What the kernels know of a call. On CUDA the first one like it copies a few words to the device.

        Args:
            op: ALL_REDUCE, REDUCE_SCATTER or ALL_GATHER.
            parts: elements of every rank's part.
            row: elements of a row.

        Raises:
            CapacityError: a row's record is longer than a slot.
            ThinwireError: the first call like it is being captured in a CUDA graph.
        """
        key = (op, *parts.counts, row, wire, gather_wire, dtype)
        job = self._jobs.get(key)
        if job is None:
            if self.capturing:
                raise ThinwireError("make a call like this one before a CUDA graph of it is captured")
            if len(self._jobs) >= _MOST_JOBS:
                if self.on_gpu:
                    torch.cuda.synchronize(self.device)  # kernels may still read the parts that go
                self._jobs.clear()
            with torch.inference_mode(False):
                job = self._jobs[key] = self._new_job(op, parts, row, wire, gather_wire, dtype)
        elif self.capturing:
            self._captured[id(job)] = job
        return job

    def _new_job(
        self, op: int, parts: Segments, row: int, wire: WireFormat, gather_wire: WireFormat, dtype: torch.dtype
    ) -> Job:
        record = max(leg.row_bytes(row, dtype) for leg in (wire, gather_wire))
        if record > self.layout.SLOT_BYTES:
            raise CapacityError(
                f"a record of {row} elements takes {record} bytes as {wire!r} or {gather_wire!r}, and a slot of the "
                f"direct transport holds {self.layout.SLOT_BYTES}: pass transport='staged', or a smaller alignment"
            )
        name = str(dtype).removeprefix("torch.")
        return Job(
            op=op,
            signature=signature_of(op, parts, row, name, wire, gather_wire),
            parts=torch.tensor([parts.counts, parts.displs], dtype=torch.int64, device=self.device),
            most_rows=-(-max(parts.counts) // row),
            row=row,
            wire=wire,
            gather_wire=gather_wire,
            dtype=dtype,
            rows_per_chunk=self.layout.SLOT_BYTES // record,
        )

    def run(self, job: Job, x: torch.Tensor, out: torch.Tensor) -> None:
        """One whole call. On CUDA it is launched on the current stream, and nothing is waited for.

        Args:
            job: of this object's.
            x: 1-D, contiguous: the whole tensor, or this rank's part for ALL_GATHER.
            out: 1-D, contiguous: the whole tensor, or this rank's part for REDUCE_SCATTER. It may be x (or, where one
                is the whole tensor and the other a part, the place of the part in it).

        Raises:
            ConfigMismatch: ranks that called something else. On CUDA a later call raises it.
            PeerTimeout: a peer did not answer within the communicator's timeout. On CUDA a later call raises it.
            ThinwireError: an earlier call failed, or the communicator is closed.
        """
        self.require_usable()
        x, out = x.detach(), out.detach()
        self._prepare(job, x, out)
        self.take_turn()
        done = False
        try:
            for chunk in range(job.num_chunks):
                self._launch(self.lane, job, x, out, chunk)
                if not self.on_gpu:
                    self.raise_findings()
            done = True
            if not out.is_inference():
                torch.autograd.graph.increment_version(out)  # kernels write where autograd does not see it
        except (PeerTimeout, ConfigMismatch):
            done = True  # all ranks know where they stand
            raise
        finally:
            if not done and self.failure is None:
                # Nobody knows which legs were taken; to go on could put one call's rows into another.
                self.failure = ThinwireError("a collective was interrupted half-way")

    def _launch(self, lane: Endpoint, job: Job, x: torch.Tensor, out: torch.Tensor, chunk: int) -> None:
        kernels, programs, times = self._kernels, self._num_programs, (self.timeout, self.grace)
        if job.op == ALL_GATHER:
            kernels.send_to_all(lane, job, x, chunk, programs)
        else:
            kernels.scatter(lane, job, x, chunk, programs)
            kernels.reduce(lane, job, None if job.op == ALL_REDUCE else out, chunk, *times, programs)
            if not self.on_gpu and self.report[REPORT_STATUS] != RUNNING:
                return
        if job.op != REDUCE_SCATTER:
            kernels.gather_recv(lane, job, out, chunk, *times, programs)

    def _prepare(self, job: Job, x: torch.Tensor, out: torch.Tensor) -> None:
        aligned = x.data_ptr() % 16 == 0, out.data_ptr() % 16 == 0

        def launch() -> None:
            room = torch.empty(out.numel() + 16, dtype=out.dtype, device=out.device)
            first = 0 if aligned[1] else 1
            self._launch(self._idle, job, x, room[first : first + out.numel()], 0)

        self.prepare((job.op, job.row, job.wire, job.gather_wire, job.dtype, *aligned), launch)

    def refuse(self, error: ThinwireError) -> NoReturn:
        """On the CPU the host looks after each wait: all ranks have found it in the same epoch, and may go on."""
        if self.on_gpu:
            self.fail(error)
        self.lane.report.zero_()
        self.lane.control[CONTROL_STATUS] = RUNNING
        raise error

    def mismatch(self) -> ConfigMismatch:
        """What each rank was doing. No peer has gone on to this half's next epoch."""
        world = self.world
        first = self.layout.HEADERS + (int(self.lane.control[CONTROL_EPOCH]) & 1) * world * SIGNAL_LINE_BYTES
        words = self.memory.local[first : first + world * SIGNAL_LINE_BYTES].cpu().view(torch.int64).view(world, -1)
        first = HEADER_SIGNATURE // 2
        calls = [describe_signature(line) for line in words[:, first : first + SIGNATURE_WORDS].tolist()]
        lines = [f"in call {self.report[REPORT_EPOCH]} the ranks do different things:"]
        lines += [f"  rank {self.rank}: {calls[self.rank]}"]
        for peer in range(world):
            if self.report[REPORT_PEERS + peer]:
                lines.append(
                    f"  rank {peer}: {calls[peer]}" + ", divided otherwise" * (calls[peer] == calls[self.rank])
                )
        return ConfigMismatch("\n".join(lines))

    def close(self) -> None:
        """See `DirectTransport.close`."""
        super().close()
        # Endpoints would hold this rank's buffer for as long as the communicator is there.
        self.lane = self._idle = replace(self.lane, buffer=self.lane.buffer.new_empty(0))

    def details(self) -> str:
        """What is worth telling of the memory."""
        return f"slots of {self.layout.SLOT_BYTES} bytes"
