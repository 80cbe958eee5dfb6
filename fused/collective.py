"""The direct transport of all-reduce, reduce-scatter and all-gather: memory, jobs, and what is launched when.

Memory and legs are described in `thinwire.triton_kernels.leg_layout`. A call longer than a slot goes in chunks. CPU
ranks pull instead, see `thinwire.fused.pulled_legs`; what is said of the CPU here is of Triton's interpreter.

*Ranks that disagree* all learn it in the same leg. On the CPU all raise `ConfigMismatch` and may go on. On CUDA
outputs are filled with NaN, the next call or `check` raises it, and the memory is of no more use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from thinwire.comm.call import Recorder
from thinwire.comm.communicator import Communicator
from thinwire.comm.exchange import Exchange
from thinwire.comm.host_collectives import Setting
from thinwire.comm.memory.symmetric import SymmetricMemory
from thinwire.errors import CapacityError, ConfigMismatch, ThinwireError
from thinwire.fused.backend import select_backend
from thinwire.fused.call import CollectiveCall, flat, in_memory
from thinwire.fused.counts import Segments
from thinwire.fused.direct_transport import BEFORE_CAPTURE, CLOSED, LegTransport
from thinwire.fused.partition import describe_mismatch, describe_signature, longest_record, signature_of
from thinwire.fused.staged_collective import StagedCollectives
from thinwire.fused.transport import Staged, open_direct, uses_triton
from thinwire.triton_kernels import collective as kernels
from thinwire.triton_kernels.launch import kept
from thinwire.triton_kernels.leg_layout import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    Endpoint,
    Job,
    LegLayout,
)
from thinwire.triton_kernels.signal import (
    CONTROL_STATUS,
    MAX_WORLD,
    MISMATCHED,
    REPORT_EPOCH,
    REPORT_PEERS,
    REPORT_STATUS,
    RUNNING,
)
from thinwire.triton_kernels.small_collective import in_one_launch, programs_at_once
from thinwire.wire import WireFormat

if TYPE_CHECKING:
    from thinwire.fused.pulled_legs import PulledLegs

KEY = "collectives"  # under which a communicator keeps them
#: Of a slot, and of all of a rank's memory; on a GPU launches should not cost more than what they move.
_SLOT_BYTES, _MOST_BYTES = 1 << 20, 64 << 20
_GPU_SLOT_BYTES, _GPU_MOST_BYTES = 4 << 20, 256 << 20
_MOST_JOBS = 1024  # that are remembered


def open_collectives(
    comm: Communicator, slot_bytes: int | None = None, wires: Sequence[WireFormat] = ()
) -> DirectCollectives | PulledLegs | StagedCollectives:
    """What carries out the communicator's collectives, direct if it can be. Made at the first call, by all ranks.

    Args:
        slot_bytes: see `collective_layout`; looked at in the first call only.
        wires: what the call at hand wants to send.

    Raises:
        TransportUnavailable: no backend can quantise for these wires, on any transport. Raised before peers are asked.
        ConfigMismatch, PeerTimeout: see `open_direct`.
    """

    _require_backend(comm.device, wires)
    if not uses_triton(comm):
        from thinwire.fused.pulled_legs import open_legs  # here, as loading numba takes a while

        legs = open_legs(comm)
        return StagedCollectives.instead_of(KEY, legs) if isinstance(legs, Staged) else legs

    def new() -> DirectCollectives | StagedCollectives:
        try:
            layout = collective_layout(comm.size, slot_bytes, comm.device.type == "cuda")
        except CapacityError as error:
            return StagedCollectives(KEY, str(error))

        def make(memory: SymmetricMemory, _: bool) -> DirectCollectives:
            ends = memory, layout, comm.rank, comm.timeout
            return DirectCollectives(*ends, comm.voters, comm.recorder)

        settings: dict[str, Setting] = {"kernels": "triton", "slot_bytes": layout.SLOT_BYTES}
        return open_direct(comm, KEY, layout.NUM_BYTES, settings, make, StagedCollectives)

    return comm.attached(KEY, new)


def _require_backend(device: torch.device, wires: Sequence[WireFormat]) -> None:
    for wire in wires:
        if wire.quantized:
            select_backend(device, wire)


def collective_layout(world: int, slot_bytes: int | None = None, on_gpu: bool = False) -> LegLayout:
    """The layout of the collectives' memory, before anything is allocated. Slots are of a multiple of 128 bytes.

    Raises:
        CapacityError: for another number of bytes, or too many ranks.

    >>> collective_layout(8).SLOT_BYTES, collective_layout(72).SLOT_BYTES
    (1048576, 465920)
    """
    if not 1 <= world <= MAX_WORLD:
        raise CapacityError(f"a group of {world} ranks; the direct collectives take 1 to {MAX_WORLD}")
    if slot_bytes is None:
        wanted, memory = (_GPU_SLOT_BYTES, _GPU_MOST_BYTES) if on_gpu else (_SLOT_BYTES, _MOST_BYTES)
        slot_bytes = LegLayout.slot_bytes_within(memory, world, 0, wanted)
    return LegLayout.of(world, slot_bytes, slots=0)


class DirectCollectives(LegTransport):
    """The memory and the state of one communicator's direct collectives by Triton's kernels, at one rank.

    Args:
        recorder: what is told of phases.
    """

    phases, counted = ("rows", "sums"), "leg"
    _num_programs: int | None = None  # of the call under way

    def __init__(
        self,
        memory: SymmetricMemory,
        layout: LegLayout,
        rank: int,
        timeout: float,
        voters: Exchange | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__(KEY, memory, layout, rank, timeout, voters)
        self._phase = (recorder or Recorder(rank, layout.WORLD, KEY, "", timeout, writes=False)).phase
        self._words = self.report.data  # the same, of which a word is read sooner
        self._jobs: dict[tuple[object, ...], Job] = {}
        self._captured: dict[int, Job] = {}  # whose parts graphs go on reading, by identity

    def job(
        self,
        op: int,
        parts: Segments,
        row: int,
        wire: WireFormat,
        gather_wire: WireFormat,
        dtype: torch.dtype,
        out_dtype: torch.dtype | None = None,
        signature: tuple[int, int, int, int] | None = None,
    ) -> Job:
        """What the kernels know of a call, see `Job`. On CUDA the first like it copies a few words to the device.

        Args:
            signature: of the call that this is a part of, if it is one; that is what ranks then compare.

        Raises:
            CapacityError: a row's record is longer than a slot.
            TransportUnavailable: no backend can quantise for these wires.
            ThinwireError: the first call like it is being captured in a CUDA graph.
        """
        key = (op, *parts.counts, *parts.displs, row, wire, gather_wire, dtype, out_dtype, signature)
        job = self._jobs.get(key)
        if job is None:
            if self.capturing:
                raise ThinwireError(BEFORE_CAPTURE)
            if len(self._jobs) >= _MOST_JOBS:
                if self.on_gpu:
                    torch.cuda.synchronize(self.device)  # kernels may still read the parts that go
                self._jobs.clear()
                self._end.kept.clear()
            self._require_backend((wire, gather_wire))
            record = longest_record(row, dtype, (wire, gather_wire), self.layout.SLOT_BYTES)
            with torch.inference_mode(False):
                device_parts = torch.tensor([parts.counts, parts.displs], dtype=torch.int64, device=self.device)
            job = self._jobs[key] = Job(
                op=op,
                signature=signature or signature_of(op, parts, row, dtype, wire, gather_wire),
                parts=device_parts,
                most_rows=-(-max(parts.counts) // row),
                row=row,
                wire=wire,
                gather_wire=gather_wire,
                dtype=dtype,
                rows_per_chunk=self.layout.rows_per_slot(record),
                out_dtype=out_dtype,
            )
        return job

    def _require_backend(self, wires: Sequence[WireFormat]) -> None:
        _require_backend(self.device, wires)

    def begin(self, comm: Communicator, call: CollectiveCall, x: torch.Tensor, out: torch.Tensor) -> None:
        """The whole call, of any dense x; see `StagedCollectives.begin`."""
        if call.job is None:
            call.job = self.job(call.op, call.parts, call.row, call.wires[0], call.wires[-1], call.dtype)
        self._num_programs = comm.num_programs
        self.run(call.job, x if in_memory(x) else flat(x.detach()), out)

    def run(self, job: Job, x: torch.Tensor, out: torch.Tensor) -> None:
        """One whole call. On CUDA it is launched on the current stream, and nothing is waited for.

        Args:
            x: contiguous: the whole tensor, or this rank's part for ALL_GATHER.
            out: likewise: the whole tensor, or this rank's part for REDUCE_SCATTER. It may be x (or, where one
                is the whole tensor and the other a part, the place of the part in it).

        Raises:
            ConfigMismatch: ranks that called something else. On CUDA a later call raises this and PeerTimeout.
        """
        self.require_usable()
        x, out = x.detach().view(-1), out.detach().view(-1)
        at_once = kept(self._end, programs_at_once, job) if self.on_gpu else 0
        if self.on_gpu:
            if self.capturing:
                self._captured[id(job)] = job
            self._load_kernels(job, x, out, at_once)
            self.take_turn()
        for chunk in range(job.num_chunks):
            self._launch(self._end, job, x, out, chunk, at_once)
            if not self.on_gpu and self._words[REPORT_STATUS] != RUNNING:
                self.raise_findings()

    def _launch(self, lane: Endpoint, job: Job, x: torch.Tensor, out: torch.Tensor, chunk: int, at_once: int) -> None:
        times, programs = (self.wait_seconds(), self.grace), self._num_programs
        if at_once:
            self._phase("in one launch")
            return in_one_launch(lane, job, x, out, *times, min(at_once, programs or at_once))
        self._phase("quantise and store")
        kernels.send(lane, job, x, chunk, programs)
        if job.op != ALL_GATHER:
            self._phase("wait for peers, and sum")
            kernels.reduce(lane, job, None if job.op == ALL_REDUCE else out, chunk, *times, programs)
            if not self.on_gpu and self.report[REPORT_STATUS] != RUNNING:
                return
        if job.op != REDUCE_SCATTER:
            self._phase("wait for peers, and unpack")
            kernels.gather_recv(lane, job, out, chunk, *times, programs)

    def _load_kernels(self, job: Job, x: torch.Tensor, out: torch.Tensor, at_once: int) -> None:
        def launch() -> None:
            # Poisoned memory gives NaN, so that rows would be written; of none nothing is.
            self._launch(self._idle, replace(job, most_rows=0), x, out.new_empty(16), 0, at_once)

        self.load_kernels((job.op, job.row, job.wire, job.gather_wire, job.dtype, job.out_dtype, at_once > 0), launch)

    def raise_findings(self) -> None:
        """On the CPU the host looks after each wait: all ranks have found a mismatch in one leg, and may go on."""
        if self.closed:
            raise ThinwireError(CLOSED)
        if self.on_gpu or self.report[REPORT_STATUS] != MISMATCHED:
            return super().raise_findings()
        error = self.mismatch()
        self._end.report.zero_()
        self._end.control[CONTROL_STATUS] = RUNNING
        raise error

    def mismatch(self) -> ConfigMismatch:
        """What each rank was doing. No peer has gone on to this half's next leg."""
        headers = self.headers()
        calls = [describe_signature(signature) for _, _, *signature in headers]
        wrong = [peer for peer in range(self.world) if self.report[REPORT_PEERS + peer]]
        told = describe_mismatch(self.members, self.rank, calls, wrong)
        return ConfigMismatch(f"in leg {self.report[REPORT_EPOCH]} {told}")
