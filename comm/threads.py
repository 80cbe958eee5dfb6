"""Exchange between ranks that are threads of one process: what `run_ranks(mode="thread")` gives its ranks.

Each message is carried by whichever end posts it second, as a copy from one buffer straight into the other. Messages
match by pair, place in the sequence of their pair, length, kind of memory and label, as over Gloo: ranks that disagree
do not match, and get `thinwire.errors.PeerTimeout`.

A rank is *gone* when it closed its communicator, raised, or gave up waiting. Nobody waits for it any longer, and those
who did learn which rank began it.
"""

from __future__ import annotations

import secrets
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from thinwire.comm.agreement.boards import LOOK_SECONDS, ReportTime, verdict_at
from thinwire.comm.exchange import ADVICE, POLL_SECONDS, Exchange, Posted, Sizes, name_ranks
from thinwire.errors import PeerTimeout, ThinwireError
from thinwire.first_run import Deadline

_T = TypeVar("_T")
_OBJECT = -1  # the length of a message that is an object

# source, target, place in their sequence, bytes, kind of memory, label
_Key = tuple[int, int, int, int, str, str]


class ThreadWorld:
    """What the ranks of one group of threads share; it fails together with the world `within` which it was made.

    Attributes:
        identity: what flight recorders call their communicators.
        members, num_ranks: its ranks as the outermost world numbers them, and how many are there. Ranks that a rank
            of `within` has started, which are none of its `ranks`, are numbered by themselves.
    """

    def __init__(self, size: int, within: ThreadWorld | None = None, ranks: Sequence[int] = ()) -> None:
        self.size = size
        self.members: list[int] = [within.members[rank] for rank in ranks] if within and ranks else list(range(size))
        self.num_ranks: int = within.num_ranks if within and ranks else size
        self.identity = secrets.token_hex(8)
        self._changed = threading.Condition()
        self._half_posted: dict[_Key, _Transfer] = {}
        self._waiting: dict[int, set[int]] = {}  # who waits, and for whom
        self._gone: dict[int, _Departure] = {}
        self._missed: dict[int, frozenset[int]] = {}  # by ranks that gave up
        self._lost: frozenset[int] | None = None  # what they have agreed on
        self._inner: weakref.WeakSet[ThreadWorld] = weakref.WeakSet()
        self._failed = ""  # why all ranks' parts were ended
        self._meeting: set[int] = set()  # who has come to go on without others
        self._left: tuple[list[int], ThreadWorld] | None = None  # who goes on, and in which world
        if within is not None:
            within._inner.add(self)

    def leave(self, rank: int, *reasons: str, to_blame: Iterable[int] | None = None) -> None:
        """Ends a rank's part, and every wait for it; peers are told the reasons of the first call for the rank."""
        with self._changed:
            if rank not in self._gone:
                self._gone[rank] = _Departure(reasons, frozenset((rank,) if to_blame is None else to_blame))
                self._half_posted = {key: half for key, half in self._half_posted.items() if half.poster != rank}
                self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """Ends the part of every rank: all that wait, now or later, raise PeerTimeout at once.

        Blamed are the ranks that were not waiting for others.
        """
        with self._changed:
            stuck = [rank for rank in range(self.size) if rank not in self._gone and rank not in self._waiting]
            for rank in range(self.size):
                self.leave(rank, reason, to_blame=stuck)
            self._failed = reason
            self._changed.notify_all()
        for world in list(self._inner):
            world.fail(reason)

    def lost(self, rank: int) -> frozenset[int]:
        """The ranks that a rank blamed when it gave up."""
        with self._changed:
            return self._gone[rank].to_blame - {rank} if rank in self._gone else frozenset()

    def agree(self, rank: int, missed: Iterable[int]) -> frozenset[int]:
        """Agrees on who is lost: the same for all that ask, each with those that it misses.

        Lost is who was missed by one of them, and neither asks in time nor waits here for others.
        """
        report_time = ReportTime()
        with self._changed:
            self._missed[rank] = frozenset(missed)
            self._changed.notify_all()
            while self._lost is None:
                ended = {peer for peer, departure in self._gone.items() if peer in departure.to_blame}
                here = self._missed.keys() | self._waiting.keys() | (self._gone.keys() - ended)
                if report_time.is_over(here) or len(here | ended) == self.size:
                    named = frozenset().union(*self._missed.values(), *(gone.to_blame for gone in self._gone.values()))
                    self._lost = named - here
                    self._changed.notify_all()
                else:
                    self._changed.wait(LOOK_SECONDS)
            return self._lost

    def shrink(self, rank: int, lost: set[int], timeout: float) -> tuple[list[int], ThreadWorld]:
        """Waits for all ranks but those lost. Those that have come by then go on in a world of their own."""
        deadline = time.monotonic() + timeout
        if rank in lost:
            raise ThinwireError(
                f"rank {rank} of {self.size} is itself one of the ranks that are lost, {name_ranks(lost)}; the others "
                "go on without it"
            )
        with self._changed:
            self._meeting.add(rank)
            self._changed.notify_all()
            while self._left is None:
                if self._failed:
                    raise PeerTimeout(f"rank {rank} of {self.size}: {self._failed}")
                remaining = deadline - time.monotonic()
                if remaining <= 0 or self._meeting >= set(range(self.size)) - lost:
                    members = sorted(self._meeting - lost)
                    self._left = members, ThreadWorld(len(members), self, members)
                    self._changed.notify_all()
                else:
                    self._changed.wait(remaining)
            members, world = self._left
        if rank not in members:
            raise ThinwireError(
                f"rank {rank} of {self.size} is not among those that go on, {name_ranks(members)}: it came too late, "
                "or was named as lost"
            )
        return members, world

    def require_present(self, rank: int) -> None:
        """Raises PeerTimeout if the rank gave up before, or was given up."""
        with self._changed:
            if rank in self._gone:
                raise self._error(rank, "this group cannot be used any more, make a new one; earlier", {rank})

    def post(self, key: _Key, poster: int, end: _End) -> _Transfer:
        """Adds one end of a message, and moves it if the other end was there."""
        with self._changed:
            transfer = self._half_posted.pop(key, None)
            if transfer is None:
                transfer = self._half_posted[key] = _Transfer(*key[:2], poster, end)
                return transfer
        transfer.move(end)
        with self._changed:
            transfer.done = True
            self._changed.notify_all()
        return transfer

    def wait(self, rank: int, transfers: Sequence[_Transfer], timeout: float) -> None:
        """Until all are done. Raises PeerTimeout when time is up or when a rank that is waited for is gone."""
        deadline = Deadline(timeout)
        with self._changed:
            try:
                while missing := {transfer.other_end(rank) for transfer in transfers if not transfer.done}:
                    self._waiting[rank] = missing
                    if rank in self._gone or missing & self._gone.keys():
                        gone = {rank} if rank in self._gone else missing & self._gone.keys()
                        raise self._error(rank, f"gave up waiting for {name_ranks(missing)}", gone)
                    pause = deadline.pause
                    if not pause:
                        raise self._give_up_on_silent(rank, missing, timeout)
                    if not self._changed.wait(pause):
                        deadline.look()
            finally:
                self._waiting.pop(rank, None)

    def _error(self, rank: int, text: str, gone: set[int]) -> PeerTimeout:
        """Makes the error that `rank` raises as ranks are gone, perhaps itself. From now on it is gone, too."""
        departures = [self._gone[peer] for peer in sorted(gone)]
        reasons = tuple(dict.fromkeys(reason for departure in departures for reason in departure.reasons))
        to_blame = frozenset().union(*(departure.to_blame for departure in departures))
        self.leave(rank, *reasons, to_blame=to_blame)
        if rank in to_blame:
            reasons += (f"the others have given up rank {rank}, which is this rank",)
        return PeerTimeout(f"rank {rank} of {self.size}: {text}: {'; '.join(reasons)}", ranks=to_blame)

    def _give_up_on_silent(self, rank: int, missing: set[int], timeout: float) -> PeerTimeout:
        """Looks behind peers that themselves wait, for the ranks that do not."""
        seen: set[int] = set()
        ahead = set(missing)
        while ahead:
            peer = ahead.pop()
            seen.add(peer)
            ahead |= self._waiting.get(peer, set()) - seen
        to_blame = {peer for peer in seen if peer not in self._waiting and peer not in self._gone}
        # Who gave up a moment ago waits no longer, and has blamed whom it waited for.
        to_blame = to_blame.union(*(self._gone[peer].to_blame for peer in seen & self._gone.keys()))
        if to_blame:  # unless they are stuck as well, in memory that the ranks share
            to_blame = set(self.agree(rank, to_blame))
        text = f"no answer from {name_ranks(missing)} within {timeout:g} s: stuck, gone, or expecting another message"
        if not to_blame:
            text += "; nobody is lost: all of them wait, so they called something else, or with other sizes"
        elif to_blame != missing:
            text += f"; it was {name_ranks(to_blame)} that did not wait for others"
        text = f"rank {rank} of {self.size}: {text}"
        self.leave(rank, text, to_blame=to_blame)
        return PeerTimeout(text + ADVICE, ranks=to_blame)


class _Departure(NamedTuple):
    """Why a rank is gone: what was at the root of it, and who is to blame."""

    reasons: tuple[str, ...]
    to_blame: frozenset[int]


class _End:
    """One rank's part of a message: a uint8 tensor, or a list that holds or shall hold an object."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer
        self.stream: torch.cuda.Stream | None = None  # on which the buffer is used
        self.ready: torch.cuda.Event | None = None  # from when on it may be touched
        if isinstance(buffer, Tensor) and buffer.device.type == "cuda":
            self.stream = torch.cuda.current_stream(buffer.device)
            self.ready = self.stream.record_event()


class _Transfer:
    """One message, of which at least one end was posted."""

    def __init__(self, source: int, target: int, poster: int, end: _End) -> None:
        self.source = source
        self.target = target
        self.poster = poster
        self.done = False
        self.finished: torch.cuda.Event | None = None  # on CUDA, where `done` means that the copy is on its stream
        self._end: _End | None = end

    def other_end(self, rank: int) -> int:
        """The rank at the other end of this one's."""
        return self.source if rank == self.target else self.target

    def move(self, second: _End) -> None:
        """Copies. Called once, when the second end is there, without the world's lock."""
        first, self._end = self._end, None
        assert first is not None
        sent, received = (first, second) if self.poster == self.source else (second, first)
        if isinstance(sent.buffer, list):
            received.buffer[:] = sent.buffer
            return
        # The buffer may be an inference tensor of a thread that is in that mode; this one may not be.
        with torch.inference_mode(), torch.cuda.stream(received.stream):  # no stream: no change
            if received.stream is None or sent.ready is None:
                received.buffer.copy_(sent.buffer)
                return
            received.stream.wait_event(sent.ready)
            received.buffer.copy_(sent.buffer, non_blocking=True)
            for buffer in (sent.buffer, received.buffer):
                buffer.record_stream(received.stream)
            self.finished = received.stream.record_event()


class ThreadExchange(Exchange):
    """One rank's sends and receives. Only its own rank's thread may use it.

    On CUDA, a rank's copies into its buffers run on the stream that was current when it posted them, after what the
    sender's stream had been given until it posted. Waiting blocks the host until the peers have posted, too.
    """

    def __init__(self, world: ThreadWorld, rank: int, timeout: float, device: torch.device) -> None:
        super().__init__(rank, world.size, timeout, "threads", tuple(dict.fromkeys(("cpu", device.type))))
        self.world, self.device = world, device

    def _require_usable(self) -> None:
        self.world.require_present(self.rank)

    def share_objects(self, obj: _T) -> list[_T]:
        """Every rank's object itself, in rank order."""
        self.world.require_present(self.rank)
        sends = [None if peer == self.rank else [obj] for peer in range(self.size)]
        receives: list[list[_T] | None] = [None if peer == self.rank else [] for peer in range(self.size)]
        self.complete(self._start(sends, receives, "", ((0,) * self.size,) * 2))
        return [obj if box is None else box[0] for box in receives]

    def complete(self, posted: Posted, *, block_host: bool = False) -> None:
        deadline = time.monotonic() + self.timeout
        try:
            self.world.wait(self.rank, posted._works, self.timeout)
        except PeerTimeout as error:
            self._fail_dependents(PeerTimeout(str(error), ranks=error.ranks))
            raise
        events = {transfer: transfer.finished for transfer in posted._works if transfer.finished is not None}
        for event in events.values():
            torch.cuda.current_stream(self.device).wait_event(event)
        while block_host and (slow := [transfer for transfer, event in events.items() if not event.query()]):
            if time.monotonic() > deadline:
                peers = {transfer.other_end(self.rank) for transfer in slow}
                text = f"the copies with {name_ranks(peers)} were not done within {self.timeout:g} s"
                text = f"rank {self.rank} of {self.size}: {text}"
                self.world.leave(self.rank, text, to_blame=())
                raise PeerTimeout(text)
            time.sleep(POLL_SECONDS)
        posted._works = []

    def end(self, missed: Iterable[int], text: str) -> tuple[tuple[int, ...], str]:
        missed = tuple(missed)
        ranks, remark = verdict_at(self.rank, self.world.agree(self.rank, missed))
        text += f"; {remark}" if missed or ranks else ""
        self.world.leave(self.rank, text, to_blame=ranks)
        self._fail_dependents(PeerTimeout(text, ranks=ranks))
        return ranks, text

    @property
    def lost(self) -> Iterable[int]:
        return self.world.lost(self.rank)

    def close(self) -> None:
        # Takes back what no peer took yet; peers that wait for this rank raise PeerTimeout.
        self.world.leave(self.rank, f"rank {self.rank} of {self.size} closed its communicator, or returned")

    def _start(self, sends: Sequence[Any], receives: Sequence[Any], label: str, sizes: Sizes) -> Posted:
        posted = Posted(self)
        for step in range(1, self.size):
            peer = (self.rank + step) % self.size
            for buffer, counters, exact, pair in (
                (receives[peer], self._num_received, sizes[1], (peer, self.rank)),
                (sends[peer], self._num_sent, sizes[0], (self.rank, peer)),
            ):
                if buffer is None or (isinstance(buffer, Tensor) and not buffer.numel()):
                    continue
                described = (buffer.numel(), buffer.device.type) if isinstance(buffer, Tensor) else (_OBJECT, "cpu")
                key = (*pair, counters[peer], *described, f"{label} {exact[peer]}")
                counters[peer] += 1
                posted._works.append(self.world.post(key, self.rank, _End(buffer)))
        return posted
