"""Rounds of CPU ranks of one host: each stores into its own memory, and reads the peers'.

A lane is one channel of lines; `docs/protocol.md`, "Pulling", says why one place for everything is enough. The kernels
run at once, and the host waits between them, in `PulledTransport.await_peers`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from thinwire.comm.memory.symmetric import SymmetricMemory
from thinwire.errors import LaneError, PeerTimeout, RoutingError, ThinwireError
from thinwire.fused.pulled import Board, PulledTransport
from thinwire.moe.config import ParallelConfig
from thinwire.moe.direct import DirectRound, Lanes
from thinwire.moe.direct_gradients import DirectPlan
from thinwire.moe.dispatched import Dispatched
from thinwire.moe.round_transport import disagreement, left_open
from thinwire.triton_kernels.cpu import rounds
from thinwire.triton_kernels.cpu.lane import REFUSED, PulledLane, PulledLayout
from thinwire.triton_kernels.cpu.lines import board_bytes
from thinwire.triton_kernels.round_layout import (
    ABANDONED,
    COMBINE,
    DISPATCH,
    DTYPE_BITS,
    DTYPE_CODES,
    LEFT_OPEN,
    WITH_SUMS,
    aligned,
)
from thinwire.wire import WireFormat

#: Positions and weights of a round's rows; None: the lane's.
Terms = tuple[torch.Tensor, torch.Tensor] | tuple[None, None]

_ADVICE = "; no lane can be used any more, rebuild() makes new ones"
CLOSED = "this ExpertParallel was closed while this call was under way"


def shared_bytes(layout: PulledLayout, lanes: int, ranks: int) -> int:
    """Bytes of each rank's shared memory: the board of so many ranks, and the lanes."""
    return aligned(board_bytes(ranks, lanes)) + lanes * layout.NUM_BYTES


class PulledRounds(PulledTransport, Lanes):
    """Lanes in shared memory, and the legs of rounds on them.

    Args:
        layout: of each lane.
        memory: of `shared_bytes`.
        crowded: whether there are more ranks than cores.
        host: the ranks of the group that share memory, ascending; None means all.
        takers: for each rank of the group, which rank has its part in its memory, and where among its parts; None: each
            rank has its own.
        combine_wire, sum_dtype: of sums, where these are not the config's and the tokens'.

    Attributes:
        kernels: what has those of `thinwire.triton_kernels.cpu.rounds`.
    """

    def __init__(
        self,
        config: ParallelConfig,
        layout: PulledLayout,
        memory: SymmetricMemory,
        reason: str,
        crowded: bool,
        host: Sequence[int] | None = None,
        takers: Sequence[tuple[int, int]] | None = None,
        combine_wire: WireFormat | None = None,
        sum_dtype: torch.dtype | None = None,
    ) -> None:
        comm = config.comm
        members = list(range(comm.size) if host is None else host)
        place = members.index(comm.rank)
        PulledTransport.__init__(
            self, "ExpertParallel", memory.among(members), place, config.peer_timeout, comm.voters, config.lanes,
            crowded,
        )  # fmt: skip
        self.begin_rounds(config, reason, backward=layout.WEIGHT_GRADS > 0)
        self.members, self.size = members, comm.size
        self.kernels: Any = rounds
        self._everyone = self.everyone.ctypes.data
        first = aligned(self.board.num_bytes)
        heaps, own = memory.buffer_ptrs + first, memory.local[first:]
        taker, places = zip(*(takers or [(rank, 0) for rank in range(comm.size)]), strict=True)
        self.lanes = []
        for number in range(config.lanes):
            lane_ptrs = heaps + number * layout.NUM_BYTES
            self.lanes.append(
                PulledLane(
                    layout,
                    config.wire,
                    combine_wire or config.combine_wire,
                    comm.rank,
                    config.align,
                    self.board.address,
                    number,
                    own[number * layout.NUM_BYTES : (number + 1) * layout.NUM_BYTES],
                    lane_ptrs,
                    lane_ptrs[list(taker)] + torch.tensor(places, device="cpu") * layout.PART_BYTES,
                    torch.tensor(members, device="cpu"),
                    sum_dtype,
                )
            )
        self._gave_up = False  # in a wait of its own

    # -----------------------------------------------------------------------------------------------------------------
    # Legs

    def begin(
        self, lane: int, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, tag: int
    ) -> Callable[[], Dispatched]:
        """Puts the tokens into this rank's memory. The wait for all peers routes theirs."""
        held = self._begin_leg(lane)
        phase, word = self.config.comm.recorder.phase, DTYPE_CODES[x.dtype] | tag << DTYPE_BITS
        phase("quantise and store")
        self.rounds_begun[lane] += 1
        self.kernels.send_tokens(self.lanes[lane], x, topk_ids.contiguous(), topk_weights.float().contiguous(), word)
        self._open[lane] = True
        del held
        return lambda: self._arrive(lane, x, word)

    def _begin_leg(self, lane: int) -> Board:
        """Waits as is due, and gives what keeps the memory mapped, whoever closes it meanwhile."""
        self.raise_failure(lane)
        held = self.board
        if self._due[lane] is not None:
            self._finish_due(lane)
        return held

    def _arrive(self, lane: int, x: torch.Tensor, word: int) -> Dispatched:
        """Waits for all ranks, and routes what they have; or ends the round, where one says something else."""
        phase = self.config.comm.recorder.phase
        phase("wait for peers")
        held = self._await(lane, DISPATCH)
        phase("routing")
        if not self.kernels.route(self.lanes[lane], x.dtype, word):
            error = self._mismatch(lane)
            self._drop(lane)
            raise error
        del held
        return PulledRound(self, lane, x)

    def refuse(self, lane: int, why: int) -> None:
        """All ranks find a mismatch; what is left of the round is due before the next leg on the lane."""
        held = self._begin_leg(lane)
        self.rounds_begun[lane] += 1
        self.kernels.tell(self.lanes[lane], REFUSED - why)
        self._open[lane], self._due[lane] = True, DISPATCH
        del held

    def close_round(self, lane: int, end: int) -> None:
        held = self._begin_leg(lane)
        self.kernels.tell(self.lanes[lane], end)
        self._open[lane] = False
        self._bring_home(lane, end, None, None)()
        del held

    def begin_combine(
        self,
        lane: int,
        expert_out: torch.Tensor,
        dtype: torch.dtype,
        out: torch.Tensor,
        grads: tuple[torch.Tensor | None, torch.Tensor] | None = None,
        terms: Terms = (None, None),
        as_they_are: bool = False,
    ) -> Callable[[], None]:
        """Puts the sums into this rank's memory. The wait for all peers adds up those of this rank's tokens.

        Args:
            grads: of router weights: float32, of each row's, and what becomes those of this rank's tokens.
            terms: positions and weights in place of the lane's.
            as_they_are: records, as `send_sums` has it.
        """
        held = self._begin_leg(lane)
        phase, (of_rows, of_tokens) = self.config.comm.recorder.phase, grads or (None, None)
        phase("sum, quantise and store")
        self.kernels.send_sums(self.lanes[lane], expert_out, dtype, *terms, of_rows, as_they_are)
        self._open[lane] = False
        del held
        return self._bring_home(lane, WITH_SUMS, out, of_tokens)

    def _bring_home(
        self, lane: int, end: int, out: torch.Tensor | None, of_tokens: torch.Tensor | None
    ) -> Callable[[], None]:
        """The rest of a leg in which this rank has told its host how it ends the round. The wait fills `out`, if any.

        Args:
            end: ABANDONED, WITH_SUMS or LEFT_OPEN.
        """
        phase = self.config.comm.recorder.phase

        def sum_at_home() -> None:
            phase("wait for peers")
            held = self._await(lane, COMBINE)
            if out is None:
                self.kernels.take(self.lanes[lane])
                return
            phase("sum at home")
            if self.kernels.sum_home(self.lanes[lane], out, of_tokens):
                said = self.lanes[lane].said
                raise left_open(lane, (said == LEFT_OPEN).nonzero()[:, 0].tolist())
            del held

        return sum_at_home

    def _drop(self, lane: int) -> None:
        """Ends a round of which nothing was read. The wait for the others is left to the next leg.

        A rank that refused its tokens ends the round in its next call on the lane, too.
        """
        self.kernels.tell(self.lanes[lane], ABANDONED)
        self._open[lane], self._due[lane] = False, COMBINE

    def _finish_due(self, lane: int) -> None:
        if self._due[lane] == DISPATCH:
            self._await(lane, DISPATCH)
            self.kernels.take(self.lanes[lane])
            self._drop(lane)
        self._await(lane, COMBINE)
        self.kernels.take(self.lanes[lane])
        self._due[lane] = None

    def _hold(self) -> Board:
        """What keeps the memory mapped, whoever closes it meanwhile; LaneError once it is closed."""
        if self._board is None:
            raise LaneError(CLOSED)
        return self._board

    def _await(self, lane: int, phase: int) -> Board:
        """Waits for the next line of every rank; gives what keeps the memory mapped."""
        held = self._hold()
        try:
            self.await_peers(lane, self._everyone, self.rounds_begun[lane], phase, lane, _ADVICE)
        except PeerTimeout:
            self._gave_up = True
            raise
        except ThinwireError:
            if self.closed:
                raise LaneError(CLOSED) from None
            raise
        return held

    # -----------------------------------------------------------------------------------------------------------------
    # What went wrong

    def raise_failure(self, lane: int) -> None:
        """Raises PeerTimeout after a wait that ended, on this lane or another, or elsewhere in the group."""
        if self.failure is not None:
            raise self.failed_with(self.failure)

    def failed_with(self, error: ThinwireError) -> ThinwireError:
        """Repeats an error of a wait of its own; wraps any other."""
        if isinstance(error, PeerTimeout) and self._gave_up:
            return PeerTimeout(str(error), ranks=error.ranks, lane=error.lane, epoch=error.epoch, phase=error.phase)
        return super().failed_with(error)

    def _mismatch(self, lane: int) -> RoutingError:
        tensors = self.lanes[lane]
        words = {rank: int(tensors.said[rank]) for rank in self.members}
        refusals = {rank: REFUSED - word for rank, word in words.items() if word < 0}
        told = {rank: (int(tensors.counts[rank]), word) for rank, word in words.items()}
        return disagreement(lane, refusals, told, self.tagged_by, tensors.layout.MAX_TOKENS)

    @property
    def lost(self) -> tuple[int, ...] | None:
        """The ranks that a wait of its own named."""
        return self.failure.ranks if self._gave_up and isinstance(self.failure, PeerTimeout) else None

    def require_usable(self) -> None:
        """Raises what keeps the lanes from being used."""
        self.raise_failure(0)

    # -----------------------------------------------------------------------------------------------------------------

    @property
    def memory_bytes(self) -> int:
        """Shared memory, and what lanes keep beside it; nothing is allocated later but results."""
        layout = self.lanes[0].layout
        beside = PulledLane.bytes_beside(layout, self.config.comm.rank, self.config.align)
        return self.memory.memory_bytes + len(self.lanes) * beside


class PulledRound(DirectRound):
    """A round on such a lane: its records are in the peers' memory, and what was routed in the lane's own tensors."""

    _rounds: PulledRounds  # type: ignore[assignment]
    _tensors: PulledLane

    @functools.cached_property
    def rows(self) -> torch.Tensor:  # type: ignore[override]
        """A copy of the records that came, made when it is first asked for."""
        self._require_open()
        held = self._rounds.board
        records = self._rounds.kernels.copy_records(self._tensors, self._dtype)
        del held
        return records

    def _unpack(self, chosen: torch.Tensor) -> torch.Tensor:
        _ = self._terms_of_records  # so that combine finds them
        used = self._arrived.number.clamp(max=len(chosen))
        return self._gather_from(self._tensors, len(chosen), True, chosen, used)[0]

    def _gather_from(
        self, tensors: Any, capacity: int, zero_tail: bool, *chosen: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._rounds.raise_failure(self.lane)
        held = self._rounds.board  # which keeps the memory mapped
        made = super()._gather_from(tensors, capacity, zero_tail, *chosen)
        del held
        return made

    def _begin_combine(self, expert_out: torch.Tensor, out: torch.Tensor, weighted: bool) -> Callable[[], None]:
        if self._rounds.takers is not None:
            expert_out = self._rounds.config.as_floats(expert_out)
        terms: Terms = self._terms_of_records if weighted else (None, None)
        as_they_are = weighted and expert_out.dtype == torch.uint8
        return self._rounds.begin_combine(self.lane, expert_out, self._dtype, out, None, terms, as_they_are)

    @functools.cached_property
    def _terms_of_records(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions and weights as they are where each record has one row, of weight 1."""
        tensors = self._tensors
        terms = tensors.kept.get("records")
        if terms is None:
            terms = tensors.kept["records"] = torch.full_like(tensors.positions, -1), torch.ones_like(tensors.weights)
        positions: torch.Tensor = terms[0]
        positions[:, 0] = self._arrived.rows
        return positions, terms[1]

    def _sent_ids(self) -> torch.Tensor:
        return self._tensors.part()["ids"][: self._num_sent]


class PulledPlan(DirectPlan):
    """The way of a round's gradients. Those of router weights travel in the order of a record's rows, without ids."""

    def _keep_ids(self, tensors: PulledLane) -> None:  # type: ignore[override]
        return

    def _of_experts(self, tensors: PulledLane, dots: torch.Tensor | None) -> torch.Tensor | None:  # type: ignore[override]
        if dots is not None and dots.dtype != torch.float32:
            raise RoutingError(f"weight_grads is {dots.dtype}; accepted: torch.float32")
        return None if dots is None else dots.contiguous()
