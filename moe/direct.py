"""Rounds over the direct transport: kernels store into the peers' memory, and nothing else is called.

A lane has one round after the other; `docs/protocol.md` says why one buffer is enough. On CUDA every call here returns
when its kernels are launched, and what goes wrong on the device is raised by a later call or by `check`. Where Triton
interprets them on the CPU, kernels run at once, and their waits block. CPU ranks have `thinwire.moe.pulled`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from thinwire.compiler import opaque
from thinwire.errors import LaneError, RoutingError
from thinwire.fused.counts import new_rows
from thinwire.fused.direct_transport import compiled_for
from thinwire.moe.direct_lanes import DirectLanes, Lanes, RoundKernels
from thinwire.moe.dispatched import Dispatched
from thinwire.moe.plan import SendPlan
from thinwire.moe.received import Arrived, Records, check_capacity
from thinwire.triton_kernels import signal
from thinwire.triton_kernels.launch import kept
from thinwire.triton_kernels.list_records import lane_of_records, list_records
from thinwire.triton_kernels.round_layout import COMBINE, DISPATCH, DTYPE_CODES, Lane
from thinwire.wire import Traffic


class DirectRounds(DirectLanes):
    """The legs of rounds on these lanes."""

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
            return self._round(lane, x)

        return end

    def _launch_each(self, *sends: Any) -> None:
        launch_each(self.kernels, self._idle_lane(), *sends)

    def _round(self, lane: int, x: torch.Tensor) -> Dispatched:
        return DirectRound(self, lane, x)

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
        self._wait(lane, COMBINE)

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
        phase = self.config.comm.recorder.phase
        of_experts, of_tokens = weight_grads or (None, None)
        sends = expert_out, dtype, self.config.num_programs, of_experts, as_they_are

        def launch_idle() -> None:
            idle = self._idle_lane()
            self.kernels.send_sums(idle, *sends)
            row = row_like(out)
            grads = None if of_tokens is None else of_tokens.new_empty(1, of_tokens.shape[1])
            self.kernels.sum_home(idle, row, grads)

        if self.on_gpu:
            self.load_kernels((dtype, as_they_are, *compiled_for(expert_out, out)), launch_idle, lane)
            self.take_turn(lane)
        phase("sum, quantise and store")
        self.kernels.send_sums(tensors or self.lanes[lane], *sends)
        self._open[lane] = False

        def end() -> None:
            phase("wait for peers")
            self._wait(lane, COMBINE)
            phase("sum at home")
            self.kernels.sum_home(self.lanes[lane], out, of_tokens)

        return end

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
        config, layout = self._rounds.config, self._tensors.layout
        counts = SendPlan.of(self._sent_ids(), layout.NUM_EXPERTS, layout.WORLD).counts
        return self._traffic(counts, *config.dispatch_bytes("direct", layout.WORLD, self._num_sent, self._dtype))

    @property
    def combine_traffic(self) -> Traffic:
        self._require_latest()
        config, layout = self._rounds.config, self._tensors.layout
        sums = self._tensors.positions if layout.INVARIANT else self._tensors.positions[:, :1]
        sent = (sums >= 0).view(layout.WORLD, -1).sum(1).tolist()
        return self._traffic(sent, *config.combine_bytes("direct", layout.WORLD, self._dtype))

    def _sent_ids(self) -> torch.Tensor:
        """The ids that this rank stored, int32 [tokens, top_k]."""
        layout = self._tensors.layout
        words = self._tensors.buffer[layout.IDS : layout.WEIGHTS].view(torch.int32)
        of_a_rank = layout.MAX_TOKENS * layout.TOP_K
        return words[self._rounds.rank * of_a_rank :][: self._num_sent * layout.TOP_K].view(-1, layout.TOP_K)

    def _require_latest(self) -> None:
        if self._rounds.rounds_begun[self.lane] != self._number:
            raise LaneError(f"lane {self.lane} has gone on to a later round; what this one sent is not known any more")
