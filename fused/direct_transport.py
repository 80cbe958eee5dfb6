"""One rank's end of the direct transport: what all users of peers' memory have in common."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import replace
from typing import NoReturn, TypeVar

import numpy as np
import torch

from thinwire.comm.call import Attachment
from thinwire.comm.exchange import ADVICE, Exchange, name_ranks
from thinwire.comm.groups import COMPILE_SECONDS
from thinwire.comm.memory.symmetric import SymmetricMemory
from thinwire.comm.work import without_traceback
from thinwire.errors import PeerTimeout, ThinwireError
from thinwire.triton_kernels.end import End
from thinwire.triton_kernels.leg_layout import SIGNATURE_WORDS, Endpoint, LegLayout
from thinwire.triton_kernels.signal import (
    CONTROL_EPOCH,
    CONTROL_STATUS,
    MISMATCHED,
    REPORT_EPOCH,
    REPORT_PEERS,
    REPORT_PHASE,
    REPORT_STATUS,
    RUNNING,
    SAID_LEFT,
    SAID_STUCK,
    SAID_STUCK_ON_YOU,
    SIGNAL_LINE_BYTES,
    TIMED_OUT,
    grace_of,
)

#: Seconds that peers get to say that they are stuck as well, where the ranks vote on who is lost after that.
_GRACE_BEFORE_VOTE = 0.25

#: What is said of a call that the end of its communicator has cut off.
CLOSED = "the communicator was closed while this call was under way"

#: What is said of a call that is captured, and was never made.
BEFORE_CAPTURE = "make a call like this one before a CUDA graph of it is captured, on every rank"

_E = TypeVar("_E", bound=End)
_load_lock = threading.Lock()
_GLANCE_SECONDS = 1e-4  # between two looks at how far other threads are
_CLOSED = -1  # among a rank's calls, which are counted by lane


def compiled_for(*tensors: torch.Tensor) -> tuple[Hashable, ...]:
    """What of tensors with contiguous rows Triton compiles a kernel anew for."""
    found: tuple[Hashable, ...] = ()
    for tensor in tensors:
        stride = tensor.stride()[0]  # at half the cost of stride(0)
        found += tensor.dtype, tensor.data_ptr() & 15 == 0, stride == 1 or (stride & 15 == 0, stride >= 2**31)
    return found


class DirectTransport(Attachment):
    """One rank's end of the direct transport: streams, preparation, what kernels report, and the end of it all.

    Kernels report into host memory that the host may read at any time. On the CPU it looks after each wait; on CUDA
    nothing waits for the device, so what went wrong is raised by a later call or by `check`.

    Args:
        operation: what it is for, for people.
        memory: a buffer on every rank, zero at first; closed by `close`.
        rank: this rank.
        timeout: seconds that a peer may let this rank wait. Peers then get up to a second, and no longer than that, to
            say that they are stuck as well; with voters a quarter of one. On CUDA two minutes more in a call for which
            this rank had to compile or load kernels.
        voters: see the function.

    Attributes:
        report: int32, what kernels say of a wait; set by who has it.
        calls: how far this rank has come on each lane, where peers are threads that share the device: two steps a call,
            see `load_kernels`.
        peers_calls: all ranks' `calls`, in that case.
        members, size: what the communicator calls the memory's ranks, and how many it has.
    """

    name, reason = "direct", ""  # as a `Transport`
    lack: type[ThinwireError] | None = None
    #: What a report's phases are called, and what it counts.
    phases: tuple[str, ...] = ()
    counted = "call"
    report: np.ndarray

    def __init__(
        self, operation: str, memory: SymmetricMemory, rank: int, timeout: float, voters: Exchange | None = None
    ) -> None:
        self.operation, self.memory, self.rank, self.timeout = operation, memory, rank, timeout
        self.world = self.size = memory.buffer_ptrs.numel()
        self.members: Sequence[int] = range(self.world)
        self.grace = grace_of(timeout) if voters is None else min(timeout, _GRACE_BEFORE_VOTE)
        self._voters = voters
        self._agreed: tuple[tuple[int, ...], str] | None = None
        self.device = memory.local.device
        self.on_gpu = self.device.type == "cuda"
        self.failure: ThinwireError | None = None
        self.closed = False
        if voters is not None:
            voters.add_dependent(self)
        self._thread = threading.get_ident()
        self.calls: dict[int, int] = {}
        self.peers_calls: Sequence[dict[int, int]] = ()
        self._loaded: set[Hashable] = set()
        self._loading: set[int] = set()  # lanes for whose last call kernels had to be loaded
        self._last_streams: dict[int, torch.cuda.Stream] = {}  # by lane

    @property
    def capturing(self) -> bool:
        """Whether the current stream is being captured in a CUDA graph."""
        return self.on_gpu and torch.cuda.is_current_stream_capturing()

    def take_turn(self, lane: int = 0) -> torch.cuda.Stream | None:
        """The current stream, once it waits for what the last call launched on another; on the CPU there are none.

        While a graph is captured, the order of streams is the caller's affair.

        Args:
            lane: whose last call is meant; those of others may go on meanwhile.
        """
        if not self.on_gpu:
            return None
        last = self._last_streams.get(lane)
        # A tenth of what current_stream costs, and each leg asks twice.
        if last is not None and last.cuda_stream == torch._C._cuda_getCurrentRawStream(self.device.index):
            return last
        stream = torch.cuda.current_stream(self.device)
        if not self.capturing:  # which would take in the other stream
            if last is not None:
                stream.wait_stream(last)
            self._last_streams[lane] = stream
        return stream

    def load_kernels(self, key: Hashable, launch: Callable[[], None], lane: int = 0) -> None:
        """Compiles and loads the kernels of a call, once for each key, before any of them waits for a peer.

        Loading a kernel waits for all that the device was given to do, and what it is given meanwhile waits for the
        load. Where ranks are threads that share it, some of that may be kernels that wait for each other. So a rank
        that has to load a call's kernels waits for its peers twice: before, until they have launched all calls up to
        this one, whose kernels then end by themselves; and afterwards, until they have loaded theirs, too, before its
        own begin to wait. That needs ranks to load in the same calls, as they do where the tensors' shapes, dtypes,
        strides and alignment to 16 bytes are alike; else the peers' kernels may wait until time is up. It waits for
        peers and not for its stream: a call ahead of it may wait for a rank that waits for the lock here.
        Each call comes here once, before it launches anything.

        Args:
            launch: launches them on memory that is marked as given up, where kernels do nothing; on the current stream.
            lane: of the call; those of others may be under way.

        Raises:
            ThinwireError: the current stream is being captured in a CUDA graph, which compiling and loading would end.
        """
        if not self.on_gpu:
            return
        self._loading.discard(lane)
        anew = key not in self._loaded
        self._take_step(lane)
        if anew:
            if self.capturing:
                raise ThinwireError(BEFORE_CAPTURE)
            self._loading.add(lane)
            try:
                came = self._let_peers_come(lane)
                with _load_lock:
                    launch()
            except BaseException:
                self._take_step(lane, -1)  # this call has not begun, and may be made again
                raise
            self._loaded.add(key)
        self._take_step(lane)
        if anew and came:
            self._let_peers_come(lane)

    def count_call(self, lane: int) -> None:
        """Counts a call that has no kernels to load."""
        for _ in range(2):
            self._take_step(lane)

    def _take_step(self, lane: int, step: int = 1) -> None:
        if self.peers_calls and not self.capturing:
            self.calls[lane] = self.calls.get(lane, 0) + step

    def _let_peers_come(self, lane: int) -> bool:
        """Waits for peers to come as far, and says if they did; one that does not come is for the kernels to name.

        Not in backward on CUDA: autograd has one thread a device, on which the peers' backward waits for this one's.
        """
        if not self.peers_calls or threading.get_ident() != self._thread:
            return True
        steps, limit = self.calls[lane], time.monotonic() + self.wait_seconds(lane)
        while any(calls.get(lane, 0) < steps and _CLOSED not in calls for calls in self.peers_calls):
            if time.monotonic() > limit:
                return False
            time.sleep(_GLANCE_SECONDS)
        return True

    def finish_stream(self) -> None:
        """Waits for what was launched on the current stream.

        To be called before what is there is read: where ranks are threads that share the device, one that waits in a
        copy to the host may keep the others from launching, see docs/launch.md.
        """
        if self.on_gpu:
            torch.cuda.current_stream(self.device).synchronize()

    def come_no_more(self) -> None:
        """Peers that are threads need not wait for this rank."""
        self.calls[_CLOSED] = 1

    def wait_seconds(self, lane: int = 0) -> float:
        """How long a wait of a lane's call may last: `timeout`, and longer where its kernels had to be loaded."""
        return self.timeout + (COMPILE_SECONDS if lane in self._loading else 0.0)

    # -----------------------------------------------------------------------------------------------------------------
    # What went wrong

    def find_ended(self, peers: Sequence[int]) -> list[int]:
        """Of some of the memory's ranks those whose processes have ended, and any that the ranks agree are lost."""
        if self._voters is None:
            return []
        ended = self._voters.find_ended([self.members[peer] for peer in peers])
        return [peer for peer, rank in enumerate(self.members) if rank in ended]

    def watched(self, end: _E) -> _E:
        """The end of some memory, whose kernels ask this about its peers."""
        this = weakref.ref(self)  # which has the end
        return replace(end, find_ended=lambda peers: [] if (found := this()) is None else found.find_ended(peers))

    def require_usable(self) -> None:
        """Raises what keeps this end from being used, and what kernels reported since the last call."""
        if self.closed:
            raise ThinwireError("this communicator is closed: call thinwire.init() again, or wrap another group")
        if self.failure is not None:
            raise self.failed_with(self.failure)
        if self.report[REPORT_STATUS] != RUNNING:
            self.raise_findings()

    def failed_with(self, error: ThinwireError) -> ThinwireError:
        """What later calls raise."""
        text = f"the direct transport of {self.operation} cannot be used any more, make a new communicator; earlier: "
        return _with_text(error, f"{text}{error}")

    def raise_findings(self) -> None:
        """Raises what a kernel reported, if one did: PeerTimeout, or `mismatch`."""
        status = self.report[REPORT_STATUS]
        if status == TIMED_OUT:
            self.fail(self.timed_out(self.report))
        if status == MISMATCHED:
            self.fail(self.mismatch())

    def fail(self, error: ThinwireError) -> NoReturn:
        """Raises an error after which this end is of no more use."""
        self.come_no_more()
        self.failure = without_traceback(error)
        raise error

    def timed_out(
        self, report: np.ndarray, lane: int | None = None, stuck: Collection[int] = (), advice: str = ""
    ) -> PeerTimeout:
        """What a report says of a wait that ended.

        Args:
            report: int32 [REPORT_PEERS + 3 * world].
            lane: whose report it is.
            stuck: ranks that have said elsewhere that they are stuck, too, and are not to blame.
            advice: what else there is to say.
        """
        epoch, phase = int(report[REPORT_EPOCH]), self.phases[report[REPORT_PHASE]]
        ranks, own = self.members, self.members[self.rank]
        words = report[REPORT_PEERS:].reshape(3, self.world).tolist()
        to_blame, missing, said = (dict(zip(ranks, told, strict=True)) for told in words)
        blamed = [rank for rank in ranks if to_blame[rank] and rank not in stuck]
        left = [rank for rank in ranks if said[rank] == SAID_LEFT]
        blamed = left or blamed  # whoever is silent may still have had time
        silent = [rank for rank in blamed if rank not in left]
        on_us = [rank for rank in ranks if said[rank] == SAID_STUCK_ON_YOU]
        gave_up = {*stuck, *(rank for rank in ranks if said[rank] == SAID_STUCK)} - {own, *on_us, *left}
        waited_for = [rank for rank in ranks if missing[rank]]
        late = [rank for rank in waited_for if rank not in {*blamed, *on_us, *gave_up}]
        found = []
        if silent:
            limit = f"{self.wait_seconds(lane or 0):g} s"
            found.append(f"no answer from {name_ranks(silent)} within {limit}: stuck, gone, or not in this call")
        if left:
            found.append(f"{name_ranks(left)} ended, or closed the communicator in the middle of a call")
        if on_us:
            found.append(f"{name_ranks(on_us)} waited for this rank for too long and gave up")
        if late and not found:
            found.append(f"{name_ranks(late)} answered too late")
        if gave_up:
            found.append(f"{name_ranks(sorted(gave_up))} gave up too")
        where = f"{self.counted} {epoch}" + ("" if lane is None else f" on lane {lane}")
        text = f"rank {own} of {self.size}, waiting for {name_ranks(waited_for)} in {where}, {phase}"
        lost, text = self.agree(blamed, f"{text}: {'; '.join(found)}{advice}")
        text += ADVICE if silent else ""
        return PeerTimeout(text, ranks=lost, lane=lane, epoch=epoch, phase=phase)

    def agree(self, blamed: Sequence[int], text: str) -> tuple[tuple[int, ...], str]:
        """Who is lost, by this rank's kernels and then as all agree, and the text with what there is to say of it.

        Where there are voters, the communicator's exchange is of no use after it, either.
        """
        if self._voters is None:
            return tuple(blamed), text
        if self._agreed is None:
            self._agreed = self._voters.end(blamed, text)
        return self._agreed

    def mismatch(self) -> ThinwireError:
        """What the ranks disagree on."""
        raise NotImplementedError

    # -----------------------------------------------------------------------------------------------------------------
    # What a communicator asks of it

    def check(self) -> None:
        """Waits for what was launched on the current stream, and raises what went wrong on the device."""
        self.finish_stream()
        self.require_usable()

    def leave_to_parent(self) -> None:
        """See `Attachment`."""
        self.closed = True

    def close(self) -> None:
        """Lets go of the memory. Not collective: what peers still write goes into what they have mapped themselves.

        On CUDA it waits for what the device was given to do.
        """
        if not self.closed:
            self.closed = True
            self.come_no_more()
            self.memory.close()


def _with_text(error: ThinwireError, text: str) -> ThinwireError:
    """An error of the same kind, about the same peers."""
    if isinstance(error, PeerTimeout):
        return PeerTimeout(text, ranks=error.ranks, lane=error.lane, epoch=error.epoch, phase=error.phase)
    return type(error)(text)


class LegTransport(DirectTransport):
    """One rank's end of the memory of an all-to-all-v or of the collectives. `layout` is that of each buffer."""

    #: What a slot is called, and what else is worth telling of it.
    slots, remark = "slots", ""

    def __init__(
        self,
        operation: str,
        memory: SymmetricMemory,
        layout: LegLayout,
        rank: int,
        timeout: float,
        voters: Exchange | None = None,
    ) -> None:
        super().__init__(operation, memory, rank, timeout, voters)
        self.layout = layout
        # Kernels find the second one given up and do nothing; it is for those that are only compiled and loaded.
        self._end, self._idle = (Endpoint.of(layout, rank, memory.local, memory.buffer_ptrs) for _ in range(2))
        self._end = self.watched(self._end)
        self._idle.control[CONTROL_STATUS] = TIMED_OUT
        self.report = self._end.report.numpy()
        self.finish_stream()  # what was zeroed here is used on any stream

    def describe(self) -> str:
        """One line for `Communicator.explain`."""
        failed = ", failed" if self.failure is not None or self.report[REPORT_STATUS] != RUNNING else ""
        size = self.memory.num_bytes / 2**20
        return (
            f"{self.operation}: direct, {size:.1f} MiB of symmetric memory, {self.slots} of {self.layout.SLOT_BYTES} "
            f"bytes{self.remark}{failed}"
        )

    def open_epoch(self) -> int:
        """The number of the call under way."""
        return int(self._end.control[CONTROL_EPOCH])

    def headers(self) -> list[list[int]]:
        """Every rank's header of the call: ring pieces, count, signature. On CUDA this waits for the current stream."""
        self.finish_stream()
        epoch, size = self.open_epoch(), self.world * SIGNAL_LINE_BYTES
        first = self.layout.HEADERS + (epoch & 1) * size
        words = self.memory.local[first : first + size].cpu().view(torch.int64).view(self.world, -1)
        return [[line[0] >> 32, *line[1 : 2 + SIGNATURE_WORDS]] for line in words.tolist()]  # behind the flag

    def close(self) -> None:
        """See `DirectTransport.close`."""
        super().close()
        # Endpoints would hold this rank's buffer for as long as the communicator is there.
        self._end = self._idle = replace(self._end, buffer=self._end.buffer.new_empty(0))
