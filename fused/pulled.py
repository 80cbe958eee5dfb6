"""The direct transport of CPU ranks of one host: each writes into its own memory, and the peers read it there.

`thinwire.triton_kernels.cpu.lines` is how they tell each other what is ready, and `docs/protocol.md`, "Pulling", the
argument. Kernels pack, unpack and sum; the host waits, here alone. A wait looks for some microseconds, then sleeps, a
slice at a time. Between slices Python's signal handlers run, and this looks whether the time is up, a peer has ended or
the peers are at work (`thinwire.first_run`).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence

import numpy as np

from thinwire.comm.call import Recorder
from thinwire.comm.exchange import Exchange
from thinwire.comm.memory.symmetric import SymmetricMemory
from thinwire.errors import ThinwireError
from thinwire.first_run import Deadline
from thinwire.fused.direct_transport import CLOSED, DirectTransport
from thinwire.triton_kernels.cpu import lines
from thinwire.triton_kernels.signal import REPORT_EPOCH, REPORT_PEERS, REPORT_PHASE

#: Looks before a rank gives way: some microseconds. Where ranks outnumber cores, a peer may need this one.
_LOOKS, _LOOKS_IF_CROWDED = 200, 1
#: The longest sleep: within this time a rank notices a signal, or that a peer's process has ended.
SLICE_SECONDS = 0.05


class Board:
    """One rank's lines to and from its peers, on so many channels.

    Attributes:
        address: of the words that kernels take (`lines.board_words`).
        looks: how often a rank looks before it gives way to others.
        late: int64 [world], which peers were late at the last look.
    """

    def __init__(self, memory: SymmetricMemory, rank: int, channels: int, crowded: bool) -> None:
        self.world, self.rank = memory.buffer_ptrs.numel(), rank
        self._mapped = memory.held()  # for as long as anyone has this, as a call under way does
        self._heaps = memory.buffer_ptrs.numpy()
        self._words = lines.board_words(self._heaps.ctypes.data, self.world, rank, channels)
        self.address = self._words.ctypes.data
        first = len(lines.FIELDS)
        self.late = self._words[first : first + self.world]
        self.looks = _LOOKS_IF_CROWDED if crowded else _LOOKS
        self._local = memory.local

    @property
    def num_bytes(self) -> int:
        """Bytes of the memory that the board takes; what follows is the caller's."""
        return lines.board_bytes(self.world, int(self._words[3]))

    def look(self, channel: int, wanted: int, timeout: float) -> bool:
        """Polls, then sleeps once, for SLICE_SECONDS at most: the first part of a wait, see `wait`."""
        sleep_ns = int(1e9 * min(timeout, SLICE_SECONDS))
        return bool(lines.wait_kernel(self.address, channel, wanted, self.looks, sleep_ns) == lines.ARRIVED)

    def wait(
        self,
        channel: int,
        wanted: int,
        timeout: float,
        find_ended: Callable[[Sequence[int]], Sequence[int]],
        is_over: Callable[[], bool],
    ) -> bool:
        """Waits for lines or for acknowledgements, after `look`; gives whether all are there.

        If not, `late` says which peers are missing.

        Args:
            wanted: address of an int64 for each peer: 0 for its next line, a number of this rank's lines that it shall
                have taken, or -1 for nothing.
            timeout: seconds.
            find_ended: gives those of some ranks whose processes have ended.
            is_over: whether this rank has let go of the memory meanwhile.
        """
        # The kernel may have been compiled or loaded in `look`, which is no time of the peers'.
        deadline = Deadline(timeout, time.monotonic() + max(timeout - SLICE_SECONDS, 0.0))
        ended = lines.LATE
        while ended == lines.LATE and not is_over():
            asked = np.flatnonzero(self.late).tolist()
            if gone := find_ended(asked):
                # It may have done its part before it ended.
                ended = lines.wait_kernel(self.address, channel, wanted, 0, 0)
                # One that was not asked about is lost by the ranks' vote.
                if ended != lines.LATE or self.late[gone].any() or not {*gone} <= {*asked}:
                    break
                continue
            pause = deadline.pause
            if not pause:
                return False
            if deadline.look():
                continue
            pause = min(pause, SLICE_SECONDS)
            ended = lines.wait_kernel(self.address, channel, wanted, 0, int(1e9 * pause))
        return bool(ended == lines.ARRIVED)

    def give_up(
        self, seconds: float, find_ended: Callable[[Sequence[int]], Sequence[int]]
    ) -> tuple[list[int], list[int], list[int]]:
        """Tells the peers that this rank has given up, and gives the late ones so long to say the same.

        Gives for each peer whether it is to blame, whether it was late, and what it said, see `said`.
        """
        late = self.late.astype(bool).tolist()
        lines.end_kernel(self.address, lines.GAVE_UP)
        limit = time.monotonic() + seconds
        while True:
            said = self.said()
            for peer in find_ended([peer for peer in range(self.world) if late[peer] and not said[peer]]):
                said[peer] = lines.LEFT  # it will say nothing more
            silent = [late[peer] and not said[peer] for peer in range(self.world)]
            if not any(silent) or time.monotonic() > limit:
                blamed = [late[peer] and said[peer] in (0, lines.LEFT) for peer in range(self.world)]
                return [*map(int, blamed)], [*map(int, late)], said
            time.sleep(min(0.01, seconds))

    def said(self) -> list[int]:
        """Reads what each peer has said: 0 for nothing, GAVE_UP, one more if it waited for this rank, or LEFT."""
        first = lines.LINE_BYTES
        words = self._local[first : first + self.world * lines.LINE_BYTES].numpy().view(np.int32).reshape(-1, 16)
        known = {0: 0, lines.GAVE_UP: lines.GAVE_UP, lines.LEFT: lines.LEFT}
        return [known.get(flag, 0) + (flag == lines.GAVE_UP and on_us != 0) for flag, on_us in words[:, :2].tolist()]

    def next_lines(self, channel: int) -> list[list[int]]:
        """The seven numbers of each rank's next line on a channel, which must be there."""
        first = len(lines.FIELDS) + (2 + 2 * channel) * self.world
        taken = self._words[first : first + self.world] % lines.RING
        start = lines.first_line(self.world, int(self._words[3]), channel)
        size = self.world * lines.RING * lines.LINE_BYTES
        ring = self._local[start : start + size].numpy().view(np.int64).reshape(self.world, lines.RING, -1)
        numbers: list[list[int]] = ring[np.arange(self.world), taken, 1:].tolist()
        return numbers

    def leave(self) -> None:
        """Tells the peers that this rank will put and take no more lines."""
        self.late.fill(0)
        lines.end_kernel(self.address, lines.LEFT)


class PulledTransport(DirectTransport):
    """One rank's end of memory that peers read; see `DirectTransport`.

    Args:
        channels: how many kinds of lines there are, each with an order of its own.
        crowded: whether there are more ranks than cores.
        recorder: is told when this rank waits.

    Attributes:
        everyone: int64 [world]; its address stands for the next line of every rank, see `await_peers`.
    """

    def __init__(
        self,
        operation: str,
        memory: SymmetricMemory,
        rank: int,
        timeout: float,
        voters: Exchange | None,
        channels: int,
        crowded: bool,
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__(operation, memory, rank, timeout, voters)
        self._board: Board | None = Board(memory, rank, channels, crowded)
        self._recorder = recorder
        self.everyone = np.zeros(self.world, np.int64)
        this = weakref.ref(self)  # a wait in another thread has the board alone
        self._find = lambda peers: [] if (found := this()) is None else found.find_ended(peers)
        self._is_over = lambda: (found := this()) is None or found.closed

    @property
    def board(self) -> Board:
        """This rank's lines. A call under way holds it, and with it the memory, past `close` too."""
        if self._board is None:
            raise ThinwireError(CLOSED)
        return self._board

    def await_peers(
        self, channel: int, wanted: int, number: int, phase: int, lane: int | None = None, advice: str = ""
    ) -> None:
        """Waits for peers' lines or acknowledgements, see `Board.wait`; who has ended, `boards.has_ended` finds.

        Args:
            number, phase: of the call and its phase, for people.
            lane: of the call, if it has one.
            advice: what else an error says.

        Raises:
            PeerTimeout: one did not come in time, has ended, left or given up; this memory is of no more use.
            ThinwireError: the communicator was closed meanwhile.
        """
        board = self.board
        if board.look(channel, wanted, self.timeout):
            return
        if self._recorder is not None:
            self._recorder.phase("wait for peers")
        if board.wait(channel, wanted, self.timeout, self._find, self._is_over):
            if self._recorder is not None:
                self._recorder.phase("go on")
            return
        if self.closed:
            raise ThinwireError(CLOSED)
        report = np.zeros(REPORT_PEERS + 3 * self.world, np.int32)
        report[REPORT_EPOCH], report[REPORT_PHASE] = number % 2**31, phase
        report[REPORT_PEERS:] = [number for row in board.give_up(self.grace, self._find) for number in row]
        self.fail(self.timed_out(report, lane, advice=advice))

    def require_usable(self) -> None:
        """See `DirectTransport.require_usable`."""
        if self.closed:
            raise ThinwireError("this communicator is closed: call thinwire.init() again, or wrap another group")
        if self.failure is not None:
            raise self.failed_with(self.failure)

    def close(self) -> None:
        """See `DirectTransport.close`. Peers that wait for this rank learn of it; a wait under way here ends."""
        if not self.closed:
            super().close()
            board, self._board = self._board, None
            if board is not None and self.failure is None:  # else it has said so
                board.leave()
