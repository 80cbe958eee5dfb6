"""The direct transport of all-reduce, reduce-scatter and all-gather: memory, jobs, and what is launched when.

Memory, legs and epochs are described in `thinwire.triton_kernels.exchange_layout`. Numba's kernels and Triton's have
the same launchers, so this file serves both. A call longer than a slot goes in chunks, one epoch each.

*Ranks that disagree* all learn it in the same epoch. On the CPU, where the host looks after each wait, all of them
raise `ConfigMismatch` and may go on. On CUDA nothing waits for the device: outputs are filled with NaN, the error is
raised by the next call or by `check`, and the memory is of no more use, as after a timeout.
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Sequence
from types import ModuleType

import torch

from thinwire.comm.communicator import Communicator, Setting
from thinwire.comm.symmetric import SymmetricMemory
from thinwire.errors import CapacityError, ConfigMismatch, PeerTimeout, ThinwireError
from thinwire.fused.backend import select_backend
from thinwire.fused.channel import timeout_error
from thinwire.fused.counts import Segments
from thinwire.fused.partition import describe_signature, signature_of
from thinwire.fused.streams import StreamTurns
from thinwire.fused.transport import Refusal, open_direct, uses_triton
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
    MISMATCHED,
    REPORT_EPOCH,
    REPORT_PEERS,
    REPORT_STATUS,
    RUNNING,
    SIGNAL_LINE_BYTES,
    TIMED_OUT,
    grace_of,
)
from thinwire.wire import WireFormat

__all__ = ["DirectCollectives", "open_collectives"]

_KEY = "collectives"
_PHASES = ("first leg", "second leg")
_SLOTS = 2  # of a ring: the second leg's, by parity
#: Of a slot, and of all of a rank's memory; on a GPU three launches should not cost more than what they move.
_SLOT_BYTES, _MOST_BYTES = 1 << 20, 64 << 20
_GPU_SLOT_BYTES, _GPU_MOST_BYTES = 4 << 20, 256 << 20
_MOST_JOBS = 1024  # that are remembered
_prepare_lock = threading.Lock()


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
    settings: dict[str, Setting] = {"slot_bytes": layout.SLOT_BYTES}

    def make(memory: SymmetricMemory) -> DirectCollectives:
        kernels: ModuleType
        if uses_triton(comm):
            from thinwire.triton_kernels import collective as kernels
        else:
            from thinwire.triton_kernels.cpu import collective as kernels
        return DirectCollectives(memory, layout, comm.rank, comm.timeout, kernels, _num_programs(comm))

    return open_direct(comm, _KEY, layout.NUM_BYTES, settings, make)


def _num_programs(comm: Communicator) -> int | None:
    """Programs of a launch: None, as many as are good, unless ranks share a GPU and could keep each other out of it."""
    if comm.device.type != "cuda":
        return None
    from thinwire.triton_kernels.exchange import programs_on_shared_gpu

    own = platform.node(), str(torch.cuda.get_device_properties(comm.device).uuid)
    ranks = comm.all_gather_object(own).count(own)
    return programs_on_shared_gpu(comm.device, ranks) if ranks > 1 else None


class DirectCollectives:
    """The memory, the kernels and the state of one communicator's direct collectives, at one rank.

    Args:
        memory: a buffer of `layout.NUM_BYTES` on every rank, zero at first; closed by `close`.
        layout: of each buffer.
        rank: this rank.
        timeout: seconds that a peer may let this rank wait.
        kernels: the module with the launchers.
        num_programs: of each launch on a GPU; None means enough to fill it.
    """

    def __init__(
        self,
        memory: SymmetricMemory,
        layout: ExchangeLayout,
        rank: int,
        timeout: float,
        kernels: ModuleType,
        num_programs: int | None = None,
    ) -> None:
        self.layout, self.rank, self.timeout = layout, rank, timeout
        self.grace = grace_of(timeout)
        self._memory, self._kernels, self._num_programs = memory, kernels, num_programs
        self._device = memory.local.device
        self._on_gpu = self._device.type == "cuda"
        self.lane = Endpoint.of(layout, rank, memory.local, memory.buffer_ptrs)
        # Kernels that find this status do nothing; it is for those that only have to be compiled and loaded.
        self._idle = Endpoint.of(layout, rank, memory.local, memory.buffer_ptrs)
        self._idle.control[CONTROL_STATUS] = TIMED_OUT
        self._report = self.lane.report.numpy()  # the host's window on what kernels report
        self._turns = StreamTurns(self._device)
        self._jobs: dict[tuple[object, ...], Job] = {}
        self._captured: dict[int, Job] = {}  # whose parts graphs go on reading, by identity
        self._prepared: set[tuple[object, ...]] = set()
        self._failure: ThinwireError | None = None
        self._closed = False
        if self._on_gpu:
            torch.cuda.current_stream(self._device).synchronize()  # what was zeroed here is used on any stream

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
            if self._turns.capturing:
                raise ThinwireError("make a call like this one before a CUDA graph of it is captured")
            if len(self._jobs) >= _MOST_JOBS:
                if self._on_gpu:
                    torch.cuda.synchronize(self._device)  # kernels may still read the parts that go
                self._jobs.clear()
            with torch.inference_mode(False):
                job = self._jobs[key] = self._new_job(op, parts, row, wire, gather_wire, dtype)
        elif self._turns.capturing:
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
            parts=torch.tensor([parts.counts, parts.displs], dtype=torch.int64, device=self._device),
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
        self._require_usable()
        x, out = x.detach(), out.detach()
        self._prepare(job, x, out)
        self._turns.take()
        done = False
        try:
            for chunk in range(job.num_chunks):
                self._launch(self.lane, job, x, out, chunk)
                if not self._on_gpu:
                    self._raise_findings()
            done = True
            if not out.is_inference():
                torch.autograd.graph.increment_version(out)  # kernels write where autograd does not see it
        except (PeerTimeout, ConfigMismatch):
            done = True  # all ranks know where they stand
            raise
        finally:
            if not done and self._failure is None:
                # Nobody knows which legs were taken; to go on could put one call's rows into another.
                self._failure = ThinwireError("a collective was interrupted half-way")

    def _launch(self, lane: Endpoint, job: Job, x: torch.Tensor, out: torch.Tensor, chunk: int) -> None:
        kernels, programs, times = self._kernels, self._num_programs, (self.timeout, self.grace)
        if job.op == ALL_GATHER:
            kernels.send_to_all(lane, job, x, chunk, programs)
        else:
            kernels.scatter(lane, job, x, chunk, programs)
            kernels.reduce(lane, job, None if job.op == ALL_REDUCE else out, chunk, *times, programs)
            if not self._on_gpu and self._report[REPORT_STATUS] != RUNNING:
                return
        if job.op != REDUCE_SCATTER:
            kernels.gather_recv(lane, job, out, chunk, *times, programs)

    def _prepare(self, job: Job, x: torch.Tensor, out: torch.Tensor) -> None:
        """Compiles and loads all kernels of a call before any of them waits for a peer.

        Loading code may wait for the whole device. Where ranks share one, that would be for a rank that waits for this
        one. It is done on a stream of its own: ahead on the current one there may be a call that waits for a rank that
        waits for this lock.
        """
        aligned = x.data_ptr() % 16 == 0, out.data_ptr() % 16 == 0
        key = (job.op, job.row, job.wire, job.gather_wire, job.dtype, *aligned)
        if key in self._prepared or not self._on_gpu or self._turns.capturing:
            return
        stream = torch.cuda.Stream(self._device)
        with _prepare_lock, torch.cuda.stream(stream):
            room = torch.empty(out.numel() + 16, dtype=out.dtype, device=out.device)
            first = 0 if aligned[1] else 1
            self._launch(self._idle, job, x, room[first : first + out.numel()], 0)
            stream.synchronize()
        self._prepared.add(key)

    # -----------------------------------------------------------------------------------------------------------------
    # What went wrong

    def _require_usable(self) -> None:
        if self._closed:
            raise ThinwireError("this communicator is closed: call thinwire.init() again, or wrap another group")
        if self._failure is None:
            self._raise_findings()
            return
        text = f"the direct collectives of this communicator cannot be used any more, make a new one: {self._failure}"
        if isinstance(self._failure, PeerTimeout):
            failure = self._failure
            raise PeerTimeout(text, ranks=failure.ranks, epoch=failure.epoch, phase=failure.phase)
        raise type(self._failure)(text)

    def _raise_findings(self) -> None:
        """Raises what a kernel reported, if one did."""
        status = self._report[REPORT_STATUS]
        if status == TIMED_OUT:
            failure, raised = (
                timeout_error(self._report, self.rank, self.layout.WORLD, self.timeout, _PHASES) for _ in range(2)
            )
            self._failure = failure  # not the one that is raised: its traceback would hold the tensors
            raise raised
        if status == MISMATCHED:
            error = ConfigMismatch(self._describe_mismatch())
            if self._on_gpu:
                self._failure = ConfigMismatch(str(error))
            else:
                self.lane.report.zero_()
                self.lane.control[CONTROL_STATUS] = RUNNING
            raise error

    def _describe_mismatch(self) -> str:
        """What each rank was doing. No peer has gone on to this half's next epoch."""
        world = self.layout.WORLD
        first = self.layout.HEADERS + (int(self.lane.control[CONTROL_EPOCH]) & 1) * world * SIGNAL_LINE_BYTES
        words = self._memory.local[first : first + world * SIGNAL_LINE_BYTES].cpu().view(torch.int64).view(world, -1)
        signatures = words[:, HEADER_SIGNATURE // 2 : HEADER_SIGNATURE // 2 + SIGNATURE_WORDS].tolist()
        wrong = self._report[REPORT_PEERS : REPORT_PEERS + world].tolist()
        lines = [f"in call {self._report[REPORT_EPOCH]} the ranks do different things:"]
        lines += [f"  rank {self.rank}: {describe_signature(signatures[self.rank])}"]
        for peer in range(world):
            if wrong[peer]:
                alike = describe_signature(signatures[peer]) == describe_signature(signatures[self.rank])
                lines.append(
                    f"  rank {peer}: {describe_signature(signatures[peer])}{', divided otherwise' if alike else ''}"
                )
        return "\n".join(lines)

    def check(self) -> None:
        """Waits for what was launched on the current stream, and raises what went wrong on the device.

        Raises:
            ConfigMismatch, PeerTimeout: see `run`.
        """
        if self._on_gpu:
            torch.cuda.current_stream(self._device).synchronize()
        self._require_usable()

    def settle(self) -> None:
        """Calls are over when they return: there is nothing under way."""

    def describe(self) -> str:
        """One line for `Communicator.explain`."""
        failed = self._failure is not None or self._report[REPORT_STATUS] != RUNNING
        return (
            f"{_KEY}: direct, {self.layout.NUM_BYTES / 2**20:.1f} MiB of symmetric memory, slots of "
            f"{self.layout.SLOT_BYTES} bytes" + (", failed" if failed else "")
        )

    def close(self) -> None:
        """Lets go of the memory. Not collective. On CUDA it waits for what the device was given to do."""
        if not self._closed:
            self._closed = True
            self._memory.close()
