"""The direct transport of CPU ranks of one host: each writes into its own memory, and the peers read it there.

`thinwire.triton_kernels.cpu.lines` is how they tell each other what is ready, and `docs/protocol.md`, "Pulling", the
argument. Kernels pack, unpack and sum; the host waits, in `PulledTransport.await_peers`.
"""

from __future__ import annotations

import weakref

import numpy as np

from thinwire.comm.call import Recorder
from thinwire.comm.exchange import Exchange
from thinwire.comm.memory.symmetric import SymmetricMemory
from thinwire.comm.shared import Board
from thinwire.errors import ThinwireError
from thinwire.fused.direct_transport import CLOSED, DirectTransport
from thinwire.triton_kernels.signal import REPORT_EPOCH, REPORT_PEERS, REPORT_PHASE


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
        """Waits for peers' lines or acknowledgements, see `Board.wait`.

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
