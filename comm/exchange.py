"""Non-blocking exchange of bytes with every peer, in bounded time: what an exchange is, and that of a process group.

What the two backends of process groups do, and what follows from it:

- **Gloo** matches a message to a receive by peer and tag only. One that is longer than the receive ends the receiving
  *process* (an uncaught C++ exception in Gloo's own thread), one that is shorter fills part of the buffer and reports
  success. The tag of every message here is therefore made from its length, its place in the sequence of its pair and
  what the caller says it is: ranks that disagree do not match, and both get
  `thinwire.errors.PeerTimeout`. A wait that times out closes the connections to all peers, so nothing can be
  exchanged afterwards. A lost connection is reported at once, and leaves those to the other peers alone; the rank
  that finds it ends these as well, as peers may be waiting for it. So a rank that gave up looks to its peers like one
  that died, and who is lost they have to agree on. What a wait was given as its limit stays, while a peer may compile
  for longer: so waits get none, and at the `Deadline` another one, for a message that nobody sends, times out. A
  receive that begins in the moment in which its peer closes the connection is lost by Gloo: its wait never ends, so
  it is left behind a few seconds after the deadline, with its thread and its buffers.
- **NCCL** ignores tags and puts a batch on a stream of its own; `Posted.wait` orders the current stream after it.
"""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.comm.call import Recorder
from thinwire.comm.waiting import Waiter, Waiting, first_line, is_timeout
from thinwire.errors import PeerTimeout, ThinwireError, TransportUnavailable
from thinwire.first_run import Deadline

#: One entry a rank.
Buffers = Sequence[Tensor | None]
#: Of what goes to each rank, and of what comes from there.
Sizes = tuple[Sequence[int], Sequence[int]]

#: What a PeerTimeout ends with whose limit was reached.
ADVICE = "; pass timeout= to tw.init (or Communicator, ExpertParallel) if a rank may be away for longer"
POLL_SECONDS = 20e-6
_UNENDING_SECONDS = 1e9
_LOSS_GRACE = 0.5  # seconds that the others get once one connection is lost
_SHORTEST_WAIT = timedelta(milliseconds=1)  # Gloo counts whole milliseconds and takes 0 for "the group's own timeout"


def _message_tag(sequence: int, num_bytes: int, label: str) -> int:
    """A tag of 31 bits. The odd multiplier makes lengths that differ by less than 2 GiB differ in their tags."""
    return (num_bytes * 0x9E3779B1 + sequence * 0x85EBCA77 + zlib.crc32(label.encode()) + 0x7457) & 0x7FFFFFFF


_NO_MESSAGE = _message_tag(1 << 30, 1, "nobody sends it")


class Posted:
    """A pending exchange, made by `Communicator.post`. Call `wait` before touching its buffers.

    The communicator keeps the buffers alive until then, even if this object is dropped.
    """

    def __init__(self, exchange: Exchange, buffers: Buffers = (), peers: Sequence[int] = ()) -> None:
        self._exchange = exchange
        self._buffers = buffers
        self._peers = peers
        # Of process groups: (peer, work), on NCCL one work for all, whose rank means nothing. Of threads: transfers.
        self._works: list[Any] = []
        self._lost: dict[int, RuntimeError] = {}  # peers whose connection broke, and how that was reported
        self._dropped = False  # the communicator was closed before the end of it
        self._waiting: Waiting | None = None
        self._awaited = -1  # the peer whose work is waited for

    def wait(self) -> None:
        """Waits until every send and receive of this exchange is done. Calling it again does nothing.

        On CUDA this orders the current stream after the exchange and returns at once.

        Raises:
            PeerTimeout: a peer did not do its part within the communicator's timeout, or its connection was lost.
            ThinwireError: another thread is in a call on the communicator; or it was closed, or has ended at this rank,
                as by an exception from outside in this wait.
        """
        self._end(block_host=False)

    def wait_on_host(self) -> None:
        """Waits, and blocks the host on CUDA too, for at most the communicator's timeout."""
        self._end(block_host=True)

    def _end(self, block_host: bool) -> None:
        recorder = self._exchange.recorder
        recorder.take_turn()
        try:
            self._exchange.complete(self, block_host=block_host)
        except BaseException as error:
            try:
                recorder.ended_by(error)
            except BaseException as second:  # from outside, before anything has ended
                recorder.ended_by(second)
                raise
            raise
        finally:
            recorder.end_turn()


class Dependent(Protocol):
    """A transport that fails together with an exchange, though its bytes go other ways."""

    failure: ThinwireError | None


class Exchange(ABC):
    """Sends and receives of one rank; how they travel is its own affair. Failed once, it is of no use any more.

    Not thread-safe. Both ranks of a pair must post in the same order.

    Args:
        rank, size: this rank's place, and ranks in all.
        timeout: seconds that a wait on the host may last.
        backend: its name, for people and for what depends on it.
        device_types: whose memory it moves.
    """

    recorder: Recorder  # the communicator's
    #: Gives those of some ranks whose processes have ended, as far as can be seen, and any that all agree are lost.
    find_ended: Callable[[Iterable[int]], list[int]] = staticmethod(lambda ranks: [])

    def __init__(self, rank: int, size: int, timeout: float, backend: str, device_types: Sequence[str]) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self.backend, self._device_types = backend, device_types
        self._num_sent, self._num_received = [0] * size, [0] * size
        self._dependents: weakref.WeakSet[Dependent] = weakref.WeakSet()

    def add_dependent(self, dependent: Dependent) -> None:
        """Has it fail with this exchange: once ranks have failed to meet here, they are out of step everywhere."""
        self._dependents.add(dependent)

    def _fail_dependents(self, failure: PeerTimeout) -> None:
        """`failure`: without a traceback, which would hold callers' tensors."""
        for dependent in list(self._dependents):
            dependent.failure = dependent.failure or failure

    def post(self, sends: Buffers, receives: Buffers, label: str = "", sizes: Sizes | None = None) -> Posted:
        """Starts the exchange described at `Communicator.post`."""
        self._require_usable()
        for name, buffers in (("sends", sends), ("receives", receives)):
            self._check_buffers(name, buffers)
        return self._start(sends, receives, label, sizes or ((0,) * self.size,) * 2)

    @abstractmethod
    def end(self, missed: Iterable[int], text: str) -> tuple[tuple[int, ...], str]:
        """Ends this exchange, as the rank misses some, here or in memory that ranks share.

        Gives who is lost, the same on all ranks that do so, and the text with what there is to say of it.
        """

    @abstractmethod
    def _require_usable(self) -> None:
        """Raises PeerTimeout if it failed before."""

    @abstractmethod
    def _start(self, sends: Buffers, receives: Buffers, label: str, sizes: Sizes) -> Posted: ...

    @abstractmethod
    def complete(self, posted: Posted, *, block_host: bool = False) -> None:
        """Ends `posted`; see `Posted.wait`."""

    @property
    @abstractmethod
    def lost(self) -> Iterable[int]:
        """The ranks that were named when it failed."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of what nobody waited for; a wait over Gloo that an exception has ended holds its buffers longer."""

    def _check_buffers(self, name: str, buffers: Buffers) -> None:
        if len(buffers) != self.size:
            raise ThinwireError(f"{name} has {len(buffers)} entries, expected one for each of the {self.size} ranks")
        if buffers[self.rank] is not None:
            raise ThinwireError(f"{name}[{self.rank}] is this rank's own entry; expected None, copy it locally")
        for peer, buffer in enumerate(buffers):
            if buffer is None:
                continue
            if buffer.dtype != torch.uint8 or not buffer.is_contiguous():
                layout = "contiguous" if buffer.is_contiguous() else "strided"
                raise ThinwireError(f"{name}[{peer}] is {layout} {buffer.dtype}, expected contiguous torch.uint8")
            if buffer.device.type not in self._device_types:
                carrier = "an exchange between threads" if self.backend == "threads" else self.backend
                moved = " and ".join(self._device_types)
                raise TransportUnavailable(
                    f"{name}[{peer}] lives on {buffer.device}, but {carrier} moves {moved} memory only"
                )


class PeerExchange(Exchange):
    """Sends and receives of one process group, any that this rank is a member of, over `"gloo"` or `"nccl"`.

    Attributes:
        agree: gives the ranks that are lost, for those that this rank misses, and what there is to say of it; the same
            ranks on all that ask. None: a rank names those that it misses itself.
        failure: why it is of no more use.
    """

    agree: Callable[[Iterable[int]], tuple[tuple[int, ...], str]] | None = None

    def __init__(self, group: dist.ProcessGroup, backend: str, timeout: float) -> None:
        device_types = ("cuda" if backend == "nccl" else "cpu",)
        super().__init__(group.rank(), group.size(), timeout, backend, device_types)
        self._group: dist.ProcessGroup | None = group
        self._outstanding: dict[Posted, None] = {}
        self._waiter = Waiter()
        self.failure: PeerTimeout | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group; ThinwireError when another thread or a signal handler has closed this meanwhile."""
        if self._group is None:
            raise ThinwireError("this communicator was closed while an exchange began")
        return self._group

    def _require_usable(self) -> None:
        if self.failure is not None:
            raise PeerTimeout(
                f"this process group cannot be used any more, make a new one; earlier: {self.failure}",
                ranks=self.failure.ranks,
            )

    def _start(self, sends: Buffers, receives: Buffers, label: str, sizes: Sizes) -> Posted:
        # Rank r begins with its right-hand neighbour, so that the ranks do not all write to rank 0 first.
        peers = [(self.rank + step) % self.size for step in range(1, self.size)]
        active = [peer for peer in peers if _num_bytes(sends[peer]) or _num_bytes(receives[peer])]
        posted = Posted(self, [*sends, *receives], active)
        if active:
            self._outstanding[posted] = None
            if self.backend == "nccl":
                self._start_batch(posted, sends, receives)
            else:
                self._start_each(posted, sends, receives, label, sizes)
        return posted

    def _start_each(self, posted: Posted, sends: Buffers, receives: Buffers, label: str, sizes: Sizes) -> None:
        # Receives first: a send whose receive is known at the other end starts at once.
        for counters, buffers, exact, receiving in (
            (self._num_received, receives, sizes[1], True),
            (self._num_sent, sends, sizes[0], False),
        ):
            for peer in posted._peers:
                buffer = buffers[peer]
                if buffer is None or not buffer.numel():
                    continue
                tag = _message_tag(counters[peer], buffer.numel(), f"{label} {exact[peer]}")
                counters[peer] += 1
                try:
                    # The group's own methods also serve a group that torch.distributed does not know.
                    work = (self.group.recv if receiving else self.group.send)([buffer], peer, tag)
                except RuntimeError as error:
                    # The connection broke earlier. The other peers still get their part: none of them shall take this
                    # rank for the one that was lost.
                    posted._lost.setdefault(peer, error)
                    continue
                posted._works.append((peer, work))
        if posted._lost:
            self._complete_each(posted)

    def _start_batch(self, posted: Posted, sends: Buffers, receives: Buffers) -> None:
        operations = []
        for peer in posted._peers:
            for function, buffer in ((dist.irecv, receives[peer]), (dist.isend, sends[peer])):
                if buffer is not None and buffer.numel():
                    operations.append(dist.P2POp(function, buffer, group=self.group, group_peer=peer))
        try:
            with torch.cuda.device(operations[0].tensor.device):  # NCCL goes by the current device
                works = dist.batch_isend_irecv(operations)
        except dist.DistError as error:
            raise self._fail(f"the exchange with {name_ranks(posted._peers)} failed", {self.rank: error}) from error
        posted._works = [(self.rank, work) for work in works]

    def complete(self, posted: Posted, *, block_host: bool = False) -> None:
        if posted._dropped:
            raise ThinwireError("the communicator was closed while this exchange was under way, before its wait()")
        if posted not in self._outstanding:
            return
        if self.failure is not None:
            raise PeerTimeout(
                f"this exchange was given up with its process group: {self.failure}", ranks=self.failure.ranks
            )
        if self.backend == "nccl":
            self._complete_batch(posted, block_host)
        else:
            self._complete_each(posted)
        if posted._dropped:  # by another thread or a signal handler
            raise ThinwireError("the communicator was closed while this exchange was under way")
        self._outstanding.pop(posted, None)
        posted._buffers, posted._works, posted._waiting = (), [], None

    def _complete_each(self, posted: Posted) -> None:
        posted._waiting = Waiting(functools.partial(self._wait_each, posted), Deadline(self.timeout), self._expire)
        silent = posted._waiting.result(self._waiter)
        if posted._dropped:
            return  # which has ended the wait
        if silent is None:
            silent = {
                posted._awaited: RuntimeError("its connection is closed, of which Gloo's wait has taken no notice")
            }
        if posted._lost:
            self._expire()  # peers may wait for this rank's part of a call, which does not come
            raise self._fail(
                f"lost the connection to {name_ranks(posted._lost)}, which ended or gave up waiting",
                posted._lost,
                posted._lost,
            )
        if silent:
            raise self._fail(
                f"no answer from {name_ranks(silent)} within {self.timeout:g} s: stuck, gone, or expecting another "
                "number of bytes",
                silent,
                silent,
                ADVICE,
            )

    def _expire(self) -> None:
        if self._group is not None:  # else this was closed meanwhile, which has seen to it
            _expire(self._group)

    def _wait_each(self, posted: Posted) -> dict[int, RuntimeError]:
        """Waits for all works; gives the peers that did not answer in time, and notes those that were lost."""
        deadline = time.monotonic() + (_LOSS_GRACE if posted._lost else _UNENDING_SECONDS)
        buffers = posted._buffers  # Gloo may fill them for as long as this lasts, also when `close` has let go of them
        silent: dict[int, RuntimeError] = {}
        for peer, work in posted._works:
            if peer in posted._lost:
                continue
            posted._awaited = peer
            try:
                work.wait(max(timedelta(seconds=deadline - time.monotonic()), _SHORTEST_WAIT))
            except RuntimeError as error:
                if is_timeout(error):
                    # Gloo has closed every connection by now. What had completed still says so, and the rest fails at
                    # once, so going on tells who had not answered.
                    silent.setdefault(peer, error)
                else:
                    posted._lost[peer] = error
                    deadline = min(deadline, time.monotonic() + _LOSS_GRACE)
        del buffers
        return silent

    def _complete_batch(self, posted: Posted, block_host: bool) -> None:
        deadline = time.monotonic() + self.timeout
        try:
            while block_host and not all(work.is_completed() for _, work in posted._works):
                if time.monotonic() > deadline:
                    raise self._fail(
                        f"the exchange with {name_ranks(posted._peers)} was not done within {self.timeout:g} s: "
                        "at least one of them is stuck, gone, or expecting another number of bytes",
                        {},
                        advice=ADVICE,
                    )
                time.sleep(POLL_SECONDS)
            for _, work in posted._works:
                work.wait()
        except dist.DistError as error:
            raise self._fail(f"the exchange with {name_ranks(posted._peers)} failed", {self.rank: error}) from error

    def _fail(
        self, reason: str, errors: dict[int, RuntimeError], ranks: Iterable[int] = (), advice: str = ""
    ) -> PeerTimeout:
        """The error of a group that is of no use from now on. `ranks` are missed here; NCCL does not say who is."""
        cause = next(iter(errors.values()), None)
        text = f"rank {self.rank} of {self.size}: {reason}" + (f" ({first_line(cause)})" if cause else "")
        ranks, text = self.end(ranks, text)
        failure = PeerTimeout(text + advice, ranks=ranks)
        failure.__cause__ = cause
        return failure

    def end(self, missed: Iterable[int], text: str) -> tuple[tuple[int, ...], str]:
        ranks = tuple(missed)
        if self.agree is not None and self.backend != "nccl":
            missed, (ranks, remark) = ranks, self.agree(ranks)
            text += f"; {remark}" if missed or ranks else ""
        self.failure = self.failure or PeerTimeout(text, ranks=ranks)
        self._fail_dependents(self.failure)
        return ranks, text

    @property
    def lost(self) -> Iterable[int]:
        return () if self.failure is None else self.failure.ranks

    def close(self) -> None:
        for posted in self._outstanding:
            posted._dropped = True
            if posted._waiting is not None and not posted._waiting.done:  # an exception has ended the call only
                posted._waiting.end_later(functools.partial(_expire, self.group))
            posted._buffers, posted._works, posted._waiting = (), [], None
        self._outstanding.clear()
        self._waiter.close()
        self._group = None  # where torch.distributed does not know it, its connections end with it


def _expire(group: dist.ProcessGroup) -> None:
    """Ends all waits under way: one that times out closes the connections to all peers."""
    for peer in {*range(group.size())} - {group.rank()}:
        with contextlib.suppress(RuntimeError):  # it times out, or this peer's connection is lost
            group.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], peer, _NO_MESSAGE).wait(_SHORTEST_WAIT)


def _num_bytes(buffer: Tensor | None) -> int:
    return 0 if buffer is None else buffer.numel()


def name_ranks(ranks: Iterable[int]) -> str:
    """ "rank 3" or "ranks 1, 3"."""
    names = sorted(ranks)
    return f"rank{'s' if len(names) > 1 else ''} {', '.join(map(str, names))}"
