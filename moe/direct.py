"""Rounds over the direct transport: kernels store into the peers' memory, and nothing else is called.

A lane has one round after the other; `docs/protocol.md` says why one buffer is enough. On CUDA every call here returns
when its kernels are launched, and what goes wrong on the device is raised by a later call or by `check`. Where Triton
interprets them on the CPU, kernels run at once, and their waits block. CPU ranks have `thinwire.moe.pulled`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from thinwire.comm.hosts import describe
from thinwire.comm.memory.symmetric import SymmetricMemory
from thinwire.compiler import opaque
from thinwire.errors import LaneError, PeerTimeout, RoutingError
from thinwire.fused.counts import new_rows
from thinwire.fused.direct_transport import DirectTransport, compiled_for
from thinwire.moe.config import ParallelConfig
from thinwire.moe.dispatched import Dispatched
from thinwire.moe.plan import SendPlan
from thinwire.moe.received import Arrived, Records, check_capacity
from thinwire.moe.round_transport import Rounds, disagreement, left_open, named_legs
from thinwire.triton_kernels import combine, dispatch, permute, signal
from thinwire.triton_kernels.launch import kept
from thinwire.triton_kernels.list_records import lane_of_records, list_records
from thinwire.triton_kernels.round_layout import (
    COMBINE,
    DISPATCH,
    DTYPE_BITS,
    DTYPE_CODES,
    LEFT_OPEN,
    REFUSED,
    REPORT_BAD_IDS,
    REPORT_LEFT_OPEN,
    SIGNAL_DTYPE,
    SIGNAL_END,
    SIGNAL_TOKENS,
    Lane,
    RoundLayout,
)
from thinwire.wire import Traffic


class Lanes(DirectTransport, Rounds):
    """Rounds on lanes over memory that peers reach; it is closed with this object.

    Attributes:
        lanes: this rank's ends, each with its `layout`.
    """

    name = "direct"
    counted = "round"
    lanes: list[Any]
    _views: dict[tuple[int, torch.dtype], dict[str, torch.Tensor]]

    def begin_rounds(self, config: ParallelConfig, reason: str, backward: bool) -> None:
        """Sets what rounds need beside the transport; for `__init__`."""
        Rounds.__init__(self, config, reason)
        self.phases, self.tagged_by = named_legs(backward)
        self._views = {}
        self._open = [False] * config.lanes
        # Of each lane the wait that is due before its next leg, of what was refused here or closed for a mismatch.
        self._due: list[int | None] = [None] * config.lanes

    def is_open(self, lane: int) -> bool:
        return self._open[lane] and self._due[lane] is None

    def views(self, lane: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Gives what every round of a dtype on a lane has: like what others are made, nothing and a bool []."""
        views = self._views.get((lane, dtype))
        if views is None:
            with torch.inference_mode(False):
                views = {
                    "_nothing": torch.empty(0, dtype=dtype, device=self.device),
                    "_flag": self.memory.local[0].view(torch.bool),
                } | self.views_of_lane(lane, dtype)
            self._views[lane, dtype] = views
        return views

    def views_of_lane(self, lane: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Gives what else rounds have that lies in the lane's memory."""
        return {}

    @property
    def memory_bytes(self) -> int:
        """The ranks' memory, and what lanes and kernels keep beside it; nothing is allocated later but results."""
        raise NotImplementedError

    def describe(self) -> str:
        """For `explain`."""
        memory, size = self.memory, self.memory_bytes / 2**20
        hosts = "" if self.takers is None else f"; hosts: {describe(self.config.comm.hosts)}"
        return (
            f"transport: {self.name} ({self.reason}); lanes: {len(self.lanes)}, {size:.1f} MiB in all, {memory.kind} "
            f"heap, generation {memory.generation}; waits end after {self.timeout:g} s{hosts}"
        )

    def close(self) -> None:
        """Gives the memory back. Tensors made from it stay readable. A CPU rank's wait in another thread ends."""
        super().close()
        self.lanes.clear()
        self._views.clear()


@dataclass(frozen=True)
class RoundKernels:
    """The launchers of a round's kernels, in the order in which a round calls them."""

    send_tokens: Callable[..., None] = dispatch.send_tokens
    wait: Callable[..., None] = dispatch.wait
    route: Callable[..., None] = permute.route
    gather: Callable[..., None] = permute.gather
    send_sums: Callable[..., None] = combine.send_sums
    close_round: Callable[..., None] = dispatch.close_round
    sum_home: Callable[..., None] = combine.sum_home
    refuse: Callable[..., None] = dispatch.refuse  # in place of send_tokens


class DirectRounds(Lanes):
    """Lanes over symmetric memory, of which each has `layout.NUM_BYTES`, and the legs of rounds on them."""

    sum_dtype: torch.dtype | None = None  # of sums as they travel within a host; None: the tokens'

    def __init__(self, config: ParallelConfig, layout: RoundLayout, memory: SymmetricMemory, reason: str) -> None:
        comm = config.comm
        DirectTransport.__init__(self, "ExpertParallel", memory, comm.rank, config.peer_timeout, comm.voters)
        self.begin_rounds(config, reason, backward=layout.WEIGHT_GRADS > 0)
        self.kernels = RoundKernels()
        self.lanes = [
            self.watched(
                Lane.of(
                    layout,
                    config.wire,
                    config.combine_wire,
                    self.rank,
                    config.align,
                    memory.local[number * layout.NUM_BYTES : (number + 1) * layout.NUM_BYTES],
                    memory.buffer_ptrs + number * layout.NUM_BYTES,
                )
            )
            for number in range(config.lanes)
        ]
        self.finish_stream()  # what was filled here is used on any stream
        # The host's window on what kernels report; it may be read at any time, without asking the device.
        self._reports = [lane.report.numpy() for lane in self.lanes]
        self._words = [report.data for report in self._reports]  # the same, of which a word is read sooner
        # The lane on which a wait ended first, after which none can be used, and who said on any that it is stuck.
        self._failed: int | None = None
        self._stuck: list[bool] = [False] * self.world
        self._told_all = False  # that it ended, on every lane

    # -----------------------------------------------------------------------------------------------------------------
    # Legs

    def begin(
        self, lane: int, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, tag: int
    ) -> Callable[[], Dispatched]:
        """Launches the dispatch kernel, then the wait for all peers, and routing."""
        self.raise_failure(lane)
        phase = self.config.comm.recorder.phase
        # Contiguous, as their kernel takes them: what is prepared is for the memory that it gets.
        tensors, topk_ids, weights = self.lanes[lane], topk_ids.contiguous(), topk_weights.float().contiguous()
        sends = x, topk_ids, weights, self.config.num_programs
        if self.on_gpu:
            self.load_kernels(
                (*compiled_for(x), topk_ids.dtype, topk_ids.data_ptr() & 15 == 0, weights.data_ptr() & 15 == 0),
                lambda: self._launch_each(*sends),
                lane,
            )
            self.take_turn(lane)
        if self._due[lane] is not None:
            self._wait_for_due(lane)
        phase("quantise and store")
        self.rounds_begun[lane] += 1
        self.kernels.send_tokens(tensors, *sends, tag)
        self._open[lane] = True

        def end() -> Dispatched:
            phase("wait for peers")
            self._wait(lane, DISPATCH)
            phase("routing")
            self.kernels.route(tensors)
            if self.on_gpu:  # they may be saved in a graph
                torch.autograd.graph.increment_version((tensors.expert_counts, tensors.expert_offsets))
            return DirectRound(self, lane, x)

        return end

    def _launch_each(self, *sends: Any) -> None:
        launch_each(self.kernels, self._idle_lane(), *sends)

    def views_of_lane(self, lane: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        tensors = self.lanes[lane]
        return {"rows": tensors.records[:, : tensors.wire.row_bytes(self.config.hidden_size, dtype)]}

    def refuse(self, lane: int, why: int) -> None:
        """All ranks find a mismatch; what is left of the round is due before the next leg on the lane."""
        self.raise_failure(lane)
        self._wait_for_due(lane)
        self.rounds_begun[lane] += 1
        self.kernels.refuse(self.lanes[lane], why)
        self._open[lane], self._due[lane] = True, DISPATCH

    def close_round(self, lane: int, end: int) -> None:
        self.raise_failure(lane)
        if self.on_gpu:
            self.count_call(lane)
        self.take_turn(lane)
        self.kernels.close_round(self.lanes[lane], end)
        self._open[lane] = False
        self._bring_home(lane, None, None)

    def begin_combine(
        self,
        lane: int,
        expert_out: torch.Tensor,
        dtype: torch.dtype,
        out: torch.Tensor,
        weight_grads: tuple[torch.Tensor, torch.Tensor] | None = None,
        tensors: Lane | None = None,
        as_they_are: bool = False,
    ) -> Callable[[], None]:
        """Launches the sums to their homes, then the wait for all peers, and the sums at home.

        `weight_grads`: what `send_sums` sends, and what `sum_home` fills. `tensors`: the lane with other positions and
        weights. `as_they_are`: records, as `send_sums` has it.
        """
        self.raise_failure(lane)
        of_experts, of_tokens = weight_grads or (None, None)
        sends = expert_out, self.sum_dtype or dtype, self.config.num_programs, of_experts, as_they_are
        if self.on_gpu:
            key = dtype, as_they_are, *compiled_for(expert_out, out)
            self.load_kernels(key, lambda: self._launch_combine(sends, dtype, out, of_tokens), lane)
            self.take_turn(lane)
        self.config.comm.recorder.phase("sum, quantise and store")
        self.kernels.send_sums(tensors or self.lanes[lane], *sends)
        self._open[lane] = False
        return lambda: self._bring_home(lane, out, of_tokens)

    def _launch_combine(
        self, sends: tuple[Any, ...], dtype: torch.dtype, out: torch.Tensor, of_tokens: torch.Tensor | None
    ) -> None:
        """Launches the kernels of a combine of tokens of a dtype once, on a lane on which they do nothing."""
        idle = self._idle_lane()
        self.kernels.send_sums(idle, *sends)
        grads = None if of_tokens is None else of_tokens.new_empty(1, of_tokens.shape[1])
        self.kernels.sum_home(idle, row_like(out), grads)

    def _bring_home(self, lane: int, out: torch.Tensor | None, of_tokens: torch.Tensor | None) -> None:
        """Waits for all peers' sums, or ends of the round; adds up those of this rank's tokens if there is `out`."""
        phase = self.config.comm.recorder.phase
        phase("wait for peers")
        self._wait(lane, COMBINE)
        if out is not None:
            phase("sum at home")
            self.kernels.sum_home(self.lanes[lane], out, of_tokens)

    def _wait_for_due(self, lane: int) -> None:
        """To store for the next leg before that would put rows of two rounds side by side at a peer that is behind."""
        if self._due[lane] == DISPATCH:
            with contextlib.suppress(RoutingError):  # of what was refused here; the round is closed with it
                self._wait(lane, DISPATCH)
        if self._due[lane] == COMBINE:
            self._wait(lane, COMBINE)
            self._due[lane] = None

    def _wait(self, lane: int, phase: int) -> None:
        """Waits for all peers' part of a leg, and raises what that found; on CUDA the next call raises it."""
        self.take_turn(lane)
        self.kernels.wait(self.lanes[lane], phase, self.wait_seconds(lane), self.grace)
        if self.on_gpu:
            return
        if self._reports[lane][signal.REPORT_STATUS] == signal.MISMATCHED:
            # Nothing was read yet, and every rank sees the mismatch: all of them close the round and go on. They do not
            # wait for it here, as a rank that refused its tokens closes it in its next call on the lane.
            error = self._mismatch(lane)
            self.lanes[lane].control[signal.CONTROL_STATUS] = signal.RUNNING
            self._reports[lane][:] = 0
            self.kernels.close_round(self.lanes[lane])
            self._open[lane], self._due[lane] = False, COMBINE
            raise error
        self.raise_failure(lane)

    def _idle_lane(self) -> Lane:
        """One on which kernels do nothing, as it is marked as given up."""
        lane = self.lanes[0]
        names = ("control", "index", "expert_counts", "expert_offsets", "positions", "weights", "scratch")
        local: dict[str, Any] = {name: torch.zeros_like(getattr(lane, name)) for name in names}
        local["control"][signal.CONTROL_STATUS].fill_(signal.TIMED_OUT)  # to assign it would wait for the stream
        return replace(lane, **local)

    # -----------------------------------------------------------------------------------------------------------------
    # What went wrong

    def _lines(self, lane: int, offset: int) -> torch.Tensor:
        """The signal lines that all ranks wrote at an offset, int32 [world, words], on the host."""
        lines = self.lanes[lane].buffer[offset:][: self.world * signal.SIGNAL_LINE_BYTES]
        return lines.cpu().view(torch.int32).view(self.world, -1)

    def raise_failure(self, lane: int) -> None:
        """Raises what kernels reported on a lane.

        Raises:
            PeerTimeout: a wait ended, on this lane or another; all stay unusable until `rebuild`.
            RoutingError: ranks with different dtypes, which on CUDA makes the lane unusable too; ids out of range.
        """
        if self._failed is None:
            if self.failure is not None:  # ranks have failed to meet elsewhere
                raise self.failed_with(self.failure)
            for report in self._words:
                if report[signal.REPORT_STATUS]:  # not RUNNING
                    self._look_for_end()
                    break
        if self._failed is not None:
            self._tell_all_lanes()
            raise self._timeout(self._failed)
        report = self._words[lane]
        if self.on_gpu and report[signal.REPORT_STATUS] == signal.MISMATCHED:
            raise self._mismatch(lane)  # on the CPU the wait that found it has raised it, or the next one does
        if report[REPORT_LEFT_OPEN]:
            ranks = [report[REPORT_LEFT_OPEN] - 1]
            if not self.on_gpu:  # where lines may be of a later round by now
                ends = self._lines(lane, self.lanes[lane].layout.COMBINE_SIGNALS)[:, SIGNAL_END]
                ranks = (ends == LEFT_OPEN).nonzero()[:, 0].tolist()
            report[REPORT_LEFT_OPEN] = 0
            raise left_open(lane, ranks)
        if report[REPORT_BAD_IDS]:
            report[REPORT_BAD_IDS] = 0
            raise RoutingError(
                f"an earlier dispatch on lane {lane} had topk_ids outside of -1 ... {self.config.num_experts - 1}; "
                "they counted as none"
            )

    def _look_for_end(self) -> None:
        for lane, report in enumerate(self._words):
            if report[signal.REPORT_STATUS] == signal.TIMED_OUT:
                if self.capturing:
                    raise self._timeout(lane)  # what follows would become a part of the graph
                self._failed = lane
                self.come_no_more()
                return

    def _tell_all_lanes(self) -> None:
        """Once a wait has ended, tells the peers so on every lane, and looks on every lane for what they have told.

        A rank that died may have signalled some peers and not others: these give up on one lane, and those wait for
        them on the next. Neither are to blame.
        """
        if self._told_all:
            return
        for lane, tensors in enumerate(self.lanes):
            said = self._lines(lane, tensors.layout.STUCK)[:, signal.SIGNAL_FLAG].tolist()
            self._stuck = [known or flag != 0 for known, flag in zip(self._stuck, said, strict=True)]
            if self._reports[lane][signal.REPORT_STATUS] == signal.RUNNING:
                # A wait for a signal that this rank has not given cannot but end by giving up.
                if not self._open[lane]:
                    own = self._lines(lane, tensors.layout.SIGNALS)[self.rank, signal.SIGNAL_FLAG]
                    tensors.control[signal.CONTROL_EPOCH] = own + 1
                self.kernels.wait(tensors, COMBINE if self._open[lane] else DISPATCH, 0.0, 0.0)
        self._told_all = True

    def _timeout(self, lane: int) -> PeerTimeout:
        stuck = [rank for rank, known in enumerate(self._stuck) if known]
        advice = "; no lane can be used any more, rebuild() makes new ones"
        return self.timed_out(self._reports[lane], lane, stuck, advice)

    def _mismatch(self, lane: int) -> RoutingError:
        layout = self.lanes[lane].layout
        told = self._lines(lane, layout.SIGNALS)[:, [SIGNAL_TOKENS, SIGNAL_DTYPE]].tolist()
        refusals = {rank: word >> DTYPE_BITS for rank, (tokens, word) in enumerate(told) if tokens == REFUSED}
        return disagreement(lane, refusals, dict(enumerate(told)), self.tagged_by, layout.MAX_TOKENS)

    @property
    def lost(self) -> tuple[int, ...] | None:
        """The ranks that the wait which ended first named."""
        if self._failed is None:
            return None
        self._tell_all_lanes()
        return self._timeout(self._failed).ranks

    @property
    def memory_bytes(self) -> int:
        """Symmetric memory, and what lanes and their kernels keep beside it; nothing is allocated later but results."""
        beside = sum(lane.memory_bytes - lane.buffer.numel() for lane in self.lanes)
        return self.memory.memory_bytes + beside

    def require_usable(self) -> None:
        """Raises what kernels reported on any lane."""
        for lane in range(len(self.lanes)):
            self.raise_failure(lane)


def row_like(out: torch.Tensor) -> torch.Tensor:
    """A row like those of `out`, which itself may still be read: of the same stride and alignment to 16 bytes."""
    room, stride, first = out.shape[1], out.stride(0), int(out.data_ptr() % 16 != 0)
    return out.new_empty(room + 1).as_strided((1, room), (stride, 1), first)


def launch_each(
    kernels: RoundKernels,
    lane: Lane,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    num_programs: int | None,
) -> None:
    """Launches each kernel of a round of such tokens once, on a lane on which they do nothing, as it has given up."""
    row = torch.zeros(1, lane.layout.HIDDEN, dtype=x.dtype, device=x.device)
    weight_grads, home_grads = None, None
    if lane.layout.WEIGHT_GRADS:
        weight_grads, home_grads = lane.weights, row.new_zeros(1, lane.layout.TOP_K, dtype=torch.float32)
    kernels.send_tokens(lane, x, topk_ids, topk_weights, num_programs)
    kernels.wait(lane, DISPATCH, 0.0, 0.0)
    kernels.route(lane)
    kernels.gather(lane, row, torch.empty((), dtype=torch.bool, device=x.device))
    list_records(lane, lane.positions[:0], lane.weights[:0], lane.positions[:0])  # Triton's alone, which GPUs have
    for out_dtype in DTYPE_CODES:
        kernels.send_sums(lane, row.to(out_dtype), x.dtype, num_programs, weight_grads)
    kernels.close_round(lane)
    kernels.wait(lane, COMBINE, 0.0, 0.0)
    kernels.sum_home(lane, row, home_grads)


@torch.inference_mode(False)
def sources_of_slots(lane: Any) -> torch.Tensor:
    """Each slot's source rank, and its token's number there: int64 [slots, 2]."""
    slots = torch.arange(lane.positions.shape[0], device=lane.positions.device)
    most = max(1, lane.layout.MAX_TOKENS)
    return torch.stack((slots // most, slots % most), 1)


class DirectRound(Dispatched):
    """A round on a lane of the direct transport: what kernels routed there, in the lane's own tensors."""

    _rounds: DirectRounds
    _nothing: torch.Tensor
    _flag: torch.Tensor

    def __init__(self, rounds: Lanes, lane: int, x: torch.Tensor) -> None:
        super().__init__(rounds, lane, x)
        self._tensors = rounds.lanes[lane]
        self._number = rounds.rounds_begun[lane]
        vars(self).update(rounds.views(lane, x.dtype))
        self.index = self._tensors.index
        counts, offsets = self._tensors.expert_counts, self._tensors.expert_offsets
        # On a GPU kernels of a graph that is replayed read those of the lane.
        self.expert_counts = counts if rounds.on_gpu else counts.clone()
        self.expert_offsets = offsets if rounds.on_gpu else offsets.clone()

    def _read_num_rows(self) -> int:
        if self._rounds.on_gpu:
            self._rounds.finish_stream()
            used = int(self.expert_offsets[-1])
        else:
            known = self._tensors.kept
            if "offsets" not in known:
                known["offsets"] = self._tensors.expert_offsets.numpy().data  # of which a word is read sooner
            used = known["offsets"][-1]
        self._rounds.raise_failure(self.lane)
        if not 0 <= used <= self.index.shape[0]:
            raise RoutingError(
                f"expert_offsets ends with {used}, and there is room for {self.index.shape[0]} rows: somebody wrote "
                "into it; it is to be read only"
            )
        return used

    def _read_arrived(self) -> Arrived:
        tensors = self._tensors
        weights = tensors.weights.masked_fill(tensors.positions < 0, 0.0)
        return Arrived(tensors.positions, weights, kept(tensors, sources_of_slots))

    def _gather(self, capacity: int, zero_tail: bool) -> tuple[torch.Tensor, torch.Tensor]:
        return self._gather_from(self._tensors, capacity, zero_tail)

    def _unpack(self, chosen: torch.Tensor) -> torch.Tensor:
        tensors = self._lane_of_records  # for the kernel that gathers rows for experts, which looks at positions
        tensors.expert_offsets[-1] = self._arrived.number.clamp(max=len(chosen))
        return self._gather_from(tensors, len(chosen), True)[0]

    @functools.cached_property
    def _lane_of_records(self) -> Lane:
        """The lane whose rows are the records that came, in their order."""
        tensors = kept(self._tensors, lane_of_records)
        tensors.positions[:, :1] = self._arrived.rows.unsqueeze(1)
        return tensors

    def _gather_from(
        self, tensors: Any, capacity: int, zero_tail: bool, *chosen: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._rounds.raise_failure(self.lane)
        config = self._rounds.config
        tokens = new_rows(self._nothing, capacity, (config.hidden_size,), memory=config.comm.result_memory)
        overflow = torch.empty_like(self._flag)  # at half the cost of asking for a dtype
        self._rounds.kernels.gather(tensors, tokens, overflow, zero_tail, *chosen)
        return tokens, overflow

    def _begin_combine(self, expert_out: torch.Tensor, out: torch.Tensor, weighted: bool) -> Callable[[], None]:
        if self._rounds.takers is not None:
            expert_out = self._rounds.config.as_floats(expert_out)
        tensors = self._lane_of_records if weighted else None
        as_they_are = weighted and expert_out.dtype == torch.uint8
        return self._rounds.begin_combine(self.lane, expert_out, self._dtype, out, None, tensors, as_they_are)

    @opaque
    def gather_records(self, capacity: int) -> Records:
        """As `Dispatched` has it; in two launches with Triton's kernels, unless a gradient is wanted."""
        if self._rounds.config.dispatch_backend.name != "triton" or self._wants_gradients:
            return super().gather_records(capacity)
        self._require_open()
        check_capacity(capacity, self._row_bytes)
        lane, top_k = self._tensors, self._tensors.layout.TOP_K
        shapes = (lane.positions, top_k), (lane.weights, top_k), (lane.positions, 2)
        ids, weights, source = (new_rows(like, capacity, (columns,)) for like, columns in shapes)
        list_records(lane, ids, weights, source)
        self._lane_of_records = kept(lane, lane_of_records)
        tokens, overflow = self._gather_from(self._lane_of_records, capacity, True)
        self._record_capacity = capacity
        return Records(tokens, ids, weights, source, overflow)

    @property
    def dispatch_traffic(self) -> Traffic:
        self._require_latest()
        rounds, layout = self._rounds, self._tensors.layout
        near = layout.WORLD if rounds.takers is None else len({*rounds.takers})
        counts = SendPlan.of(self._sent_ids(), layout.NUM_EXPERTS, layout.WORLD).counts
        sizes = rounds.config.dispatch_bytes("direct", near, self._num_sent, self._dtype)
        return self._traffic(counts, *sizes) + rounds.crossing(self, DISPATCH)

    @property
    def combine_traffic(self) -> Traffic:
        self._require_latest()
        rounds, layout = self._rounds, self._tensors.layout
        sums = self._tensors.positions if layout.INVARIANT else self._tensors.positions[:, :1]
        sent = (sums >= 0).view(layout.WORLD, -1).sum(1).tolist()
        sizes = rounds.config.combine_bytes("direct", layout.WORLD, self._dtype)
        if rounds.takers is not None:  # who add the host's sums up before they cross
            of_ranks = list(zip(rounds.takers, sent, strict=True))
            sent = [sum(count for taker, count in of_ranks if taker == rank) for rank in range(layout.WORLD)]
            sizes = layout.SUM_BYTES, 0
        return self._traffic(sent, *sizes) + rounds.crossing(self, COMBINE)

    def _sent_ids(self) -> torch.Tensor:
        """The ids that this rank stored, int32 [tokens, top_k]."""
        layout = self._tensors.layout
        words = self._tensors.buffer[layout.IDS : layout.WEIGHTS].view(torch.int32)
        of_a_rank = layout.MAX_TOKENS * layout.TOP_K
        return words[self._rounds.rank * of_a_rank :][: self._num_sent * layout.TOP_K].view(-1, layout.TOP_K)

    def _require_latest(self) -> None:
        if self._rounds.rounds_begun[self.lane] != self._number:
            raise LaneError(f"lane {self.lane} has gone on to a later round; what this one sent is not known any more")
