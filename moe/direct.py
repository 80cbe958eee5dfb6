"""Rounds over the direct transport: kernels store into the peers' memory, and nothing else is called.

A lane has one round after the other; `docs/protocol.md` says why one buffer is enough. On CUDA every call here returns
when its kernels are launched, and what goes wrong on the device is raised by a later call or by `check`. On the CPU the
kernels run at once, and their waits block.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from thinwire.comm.exchange import name_ranks
from thinwire.comm.symmetric import SymmetricMemory
from thinwire.errors import IntegrityError, LaneError, PeerTimeout, RoutingError
from thinwire.fused.backend import select_round_kernels
from thinwire.fused.counts import new_rows
from thinwire.fused.transport import DirectTransport, voters
from thinwire.moe.config import ParallelConfig
from thinwire.moe.dispatched import Dispatched, Rounds, Traffic
from thinwire.moe.gradients import describe_tag
from thinwire.moe.plan import SendPlan
from thinwire.triton_kernels import signal
from thinwire.triton_kernels.round_layout import (
    CHECKED_NAMES,
    CHECKED_PLANES,
    CHECKED_SUM,
    COMBINE,
    DISPATCH,
    DTYPE_BITS,
    DTYPE_CODES,
    REFUSED,
    REPORT_BAD_IDS,
    REPORT_CHECKED,
    REPORT_ROW,
    REPORT_SOURCE,
    SIGNAL_DTYPE,
    SIGNAL_TOKENS,
    Lane,
    RoundLayout,
)


class DirectRounds(DirectTransport, Rounds):
    """Lanes over symmetric memory, of which each has `layout.NUM_BYTES`; it is closed with this object."""

    name = "direct"
    phases = ("dispatch", "combine")  # by DISPATCH and COMBINE

    def __init__(self, config: ParallelConfig, layout: RoundLayout, memory: SymmetricMemory, reason: str) -> None:
        comm = config.comm
        DirectTransport.__init__(self, "ExpertParallel", memory, comm.rank, config.peer_timeout, voters(comm))
        Rounds.__init__(self, config, reason)
        self.kernels = select_round_kernels(config.dispatch_backend)
        self.lanes = [
            Lane.of(
                layout,
                config.wire,
                config.combine_wire,
                self.rank,
                config.align,
                memory.local[number * layout.NUM_BYTES : (number + 1) * layout.NUM_BYTES],
                memory.buffer_ptrs + number * layout.NUM_BYTES,
            )
            for number in range(config.lanes)
        ]
        # The host's window on what kernels report; it may be read at any time, without asking the device.
        self._reports = [lane.report.numpy() for lane in self.lanes]
        self._views: dict[tuple[int, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}
        self._open = [False] * config.lanes
        # The leg of each lane that was begun and not waited for to the end, as an exception came in between.
        self._unfinished: list[int | None] = [None] * config.lanes
        # The lane on which a wait ended first, after which none can be used, and who said on any that it is stuck.
        self._failed: int | None = None
        self._stuck: list[bool] = [False] * self.world
        self._told_all = False  # that it ended, on every lane

    def dispatch(
        self, lane: int, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, tag: int
    ) -> Dispatched:
        """Launches the dispatch kernel, the wait for all peers, and routing. A round that is still open is closed."""
        self.raise_failure(lane)
        self.prepare((x.dtype, topk_ids.dtype), lambda: self._launch_idle(x.dtype, topk_ids.dtype))
        self._make_up(lane)
        if self._open[lane]:
            self.close_round(lane)
        tensors, weights = self.lanes[lane], topk_weights.float()
        self._unfinished[lane] = DISPATCH
        self.rounds_begun[lane] += 1
        self.kernels.send_tokens(tensors, x, topk_ids, weights, self.config.num_programs, tag)
        self._end_leg(lane, DISPATCH)
        self.kernels.route(tensors)
        self.raise_corruption(lane)
        return _DirectRound(self, lane, x)

    def views(self, lane: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Of every round of a dtype on a lane: the records, and an empty tensor of the dtype."""
        views = self._views.get((lane, dtype))
        if views is None:
            tensors = self.lanes[lane]
            with torch.inference_mode(False):
                rows = tensors.records[:, : tensors.wire.row_bytes(self.config.hidden_size, dtype)]
                views = self._views[lane, dtype] = rows, torch.empty(0, dtype=dtype, device=self.device)
        return views

    def is_open(self, lane: int) -> bool:
        return self._open[lane]

    def is_unfinished(self, lane: int) -> bool:
        return self._unfinished[lane] is not None

    def finish(self, lane: int) -> None:
        self.raise_failure(lane)
        self._make_up(lane)

    def legs_told(self, lane: int) -> int | None:
        if self.on_gpu:
            return None  # the device tells them later
        self._look_at_own_lines(lane)
        return 2 * self.rounds_begun[lane] - self._open[lane]

    def refuse(self, lane: int) -> None:
        """All ranks find a mismatch, and the next call on the lane makes up what is left of the round."""
        self.raise_failure(lane)
        self._make_up(lane)
        if self._open[lane]:
            self.close_round(lane)
        self._unfinished[lane] = DISPATCH
        self.rounds_begun[lane] += 1
        self.kernels.refuse(self.lanes[lane])

    def close_round(self, lane: int) -> None:
        """Ends the open round without sums from this rank."""
        self._make_up(lane)
        if self._open[lane]:
            self._unfinished[lane] = COMBINE
            self.kernels.close_round(self.lanes[lane])
            self._end_leg(lane, COMBINE)

    def combine(
        self,
        lane: int,
        expert_out: torch.Tensor,
        dtype: torch.dtype,
        out: torch.Tensor,
        weight_grads: torch.Tensor | None = None,
    ) -> None:
        """Launches the sums to their homes, the wait for all peers, and the sums at home."""
        self.raise_failure(lane)
        self._unfinished[lane] = COMBINE
        self.kernels.send_sums(self.lanes[lane], expert_out, dtype, self.config.num_programs, weight_grads)
        self._end_leg(lane, COMBINE)
        self.kernels.sum_home(self.lanes[lane], out)
        self.raise_corruption(lane)

    def _end_leg(self, lane: int, phase: int) -> None:
        """Waits for all peers' part of a leg of which this rank has sent its own."""
        self._open[lane] = phase == DISPATCH
        self._wait(lane, phase)
        self._unfinished[lane] = None

    def _make_up(self, lane: int) -> None:
        """Ends the wait that an exception, such as KeyboardInterrupt or a mismatch, ended before its time.

        To store for the next leg before that would put rows of two rounds side by side at a peer that is behind. The
        exception may have come before this rank had sent anything.
        """
        while (phase := self._unfinished[lane]) is not None:
            self._look_at_own_lines(lane)
            if self._open[lane] == (phase == DISPATCH):
                try:
                    self._wait(lane, phase)
                except RoutingError:
                    continue  # it is the call's that the exception ended; the round was closed, and that is waited for
            self._unfinished[lane] = None

    def _look_at_own_lines(self, lane: int) -> None:
        """After an exception: whether a round is open, and how many were begun.

        A round is open while this rank's own dispatch line is ahead of its combine line, and these lines it writes
        itself, when it sends.
        """
        if self._unfinished[lane] is None:
            return
        layout = self.lanes[lane].layout
        dispatched, combined = (
            int(self._lines(lane, lines)[self.rank, signal.SIGNAL_FLAG])
            for lines in (layout.SIGNALS, layout.COMBINE_SIGNALS)
        )
        self._open[lane] = dispatched != combined
        self.rounds_begun[lane] += (dispatched - self.rounds_begun[lane] + 1) % 2**32 - 1  # flags wrap

    def _wait(self, lane: int, phase: int) -> None:
        self.kernels.wait(self.lanes[lane], phase, self.timeout, self.grace)
        if self.on_gpu:
            return
        if self._reports[lane][signal.REPORT_STATUS] == signal.MISMATCHED:
            # Nothing was read yet, and every rank sees the mismatch: all of them close the round and go on. They do not
            # wait for it here, as a rank that refused its tokens closes it in its next call on the lane.
            error = self._mismatch(lane)
            # In this order: an exception in between leaves a lane whose next wait finds the mismatch again.
            self.lanes[lane].control[signal.CONTROL_STATUS] = signal.RUNNING
            self._reports[lane][:] = 0
            self._unfinished[lane] = COMBINE
            self.kernels.close_round(self.lanes[lane])
            self._open[lane] = False
            raise error
        self.raise_failure(lane)

    def _lines(self, lane: int, offset: int) -> torch.Tensor:
        """The signal lines that all ranks wrote at an offset, int32 [world, words], on the host."""
        lines = self.lanes[lane].buffer[offset:][: self.world * signal.SIGNAL_LINE_BYTES]
        return lines.cpu().view(torch.int32).view(self.world, -1)

    def raise_corruption(self, lane: int) -> None:
        """`raise_failure`, where kernels compare what they read with its checksums, and have done so by now."""
        if self.lanes[lane].layout.CHECKSUMS and not self.on_gpu:
            self.raise_failure(lane)

    def raise_failure(self, lane: int) -> None:
        """Raises what kernels reported on a lane.

        Raises:
            PeerTimeout: a wait ended, on this lane or another; all stay unusable until `rebuild`.
            IntegrityError: what arrived is not what was sent; the same goes for it.
            RoutingError: ranks with different dtypes, which on CUDA makes the lane unusable too; ids out of range.
        """
        if self._failed is None:
            self._look_for_end()
        if self._failed is not None:
            self._tell_all_lanes()
            raise self._end_of(self._failed)
        report = self._reports[lane]
        if self.on_gpu and report[signal.REPORT_STATUS] == signal.MISMATCHED:
            raise self._mismatch(lane)  # on the CPU the wait that found it has raised it, or the next one does
        if report[REPORT_BAD_IDS]:
            report[REPORT_BAD_IDS] = 0
            raise RoutingError(
                f"an earlier dispatch on lane {lane} had topk_ids outside of -1 ... {self.config.num_experts - 1}; "
                "they counted as none"
            )

    def _look_for_end(self) -> None:
        for lane, report in enumerate(self._reports):
            if report[signal.REPORT_STATUS] in (signal.TIMED_OUT, signal.CORRUPTED):
                if self.capturing:
                    raise self._end_of(lane)  # what follows would become a part of the graph
                self._failed = lane
                return

    def _tell_all_lanes(self) -> None:
        """Once a wait has ended, tells the peers so on every lane, and looks on every lane for what they have told.

        A rank that died may have signalled some peers and not others: these give up on one lane, and those wait for
        them on the next. Neither are to blame. Whatever ends this before its time, it is done again until it is done.
        """
        if self._told_all:
            return
        for lane, tensors in enumerate(self.lanes):
            said = self._lines(lane, tensors.layout.STUCK)[:, signal.SIGNAL_FLAG].tolist()
            self._stuck = [known or flag != 0 for known, flag in zip(self._stuck, said, strict=True)]
            if self._reports[lane][signal.REPORT_STATUS] == signal.RUNNING:
                # A wait for a signal that this rank has not given cannot but end by giving up.
                self._look_at_own_lines(lane)
                if not self._open[lane]:
                    own = self._lines(lane, tensors.layout.SIGNALS)[self.rank, signal.SIGNAL_FLAG]
                    tensors.control[signal.CONTROL_EPOCH] = own + 1
                self.kernels.wait(tensors, COMBINE if self._open[lane] else DISPATCH, 0.0, 0.0)
        self._told_all = True

    def _end_of(self, lane: int) -> PeerTimeout | IntegrityError:
        """What ended a lane, and all others with it."""
        corrupted = self._reports[lane][signal.REPORT_STATUS] == signal.CORRUPTED
        return self._corruption(lane) if corrupted else self._timeout(lane)

    def _corruption(self, lane: int) -> IntegrityError:
        report = self._reports[lane]
        epoch, phase = int(report[signal.REPORT_EPOCH]), self.phases[report[signal.REPORT_PHASE]]
        what, source, row = (int(report[word]) for word in (REPORT_CHECKED, REPORT_SOURCE, REPORT_ROW))
        whose = "this rank's" if what == CHECKED_SUM else "its"
        of = f" of {whose} token {row}" if what >= CHECKED_PLANES else ""
        _, text = self.agree(  # this rank is there, which its peers could not know otherwise
            (),
            f"rank {self.rank} of {self.world}, lane {lane}, round {epoch}, {phase}: what arrived is not what was "
            f"sent, by its checksums: the {CHECKED_NAMES[what]}{of} from rank {source}; no lane can be used any more, "
            "rebuild() makes new ones",
        )
        return IntegrityError(
            text,
            rank=source,
            rows=(range(row, row + 1),),
            call=epoch,
        )

    def _timeout(self, lane: int) -> PeerTimeout:
        report, everyone = self._reports[lane], range(self.world)
        blamed, missing, said = self.peers_in(report)
        ranks = [rank for rank in everyone if blamed[rank] and not self._stuck[rank]]
        stuck_on_us = [rank for rank in everyone if said[rank] == 2]
        epoch, phase = int(report[signal.REPORT_EPOCH]), self.phases[report[signal.REPORT_PHASE]]
        if ranks:
            reason = f"no answer from {name_ranks(ranks)} within {self.timeout:g} s"
        elif stuck_on_us:
            reason = f"{name_ranks(stuck_on_us)} waited for this rank for too long and gave up"
        else:
            reason = f"{name_ranks(missing.nonzero()[0])} answered too late, or gave up as well"
        lost, text = self.agree(
            ranks,
            f"rank {self.rank} of {self.world}, lane {lane}, round {epoch}, {phase}: {reason}; no lane can be used "
            "any more, rebuild() makes new ones",
        )
        return PeerTimeout(text, ranks=lost, lane=lane, epoch=epoch, phase=phase)

    def _mismatch(self, lane: int) -> RoutingError:
        layout = self.lanes[lane].layout
        names = {code: str(dtype) for dtype, code in DTYPE_CODES.items()}
        lines = self._lines(lane, layout.SIGNALS)
        refusing = (lines[:, SIGNAL_TOKENS] == REFUSED).nonzero()[:, 0].tolist()
        if refusing:
            return RoutingError(
                f"lane {lane}: {name_ranks(refusing)} refused what dispatch was given there, and raised why; no rank's "
                "tokens were taken, and all ranks may go on"
            )
        described = []
        for rank, (tokens, word) in enumerate(lines[:, [SIGNAL_TOKENS, SIGNAL_DTYPE]].tolist()):
            dtype = names.get(word & (1 << DTYPE_BITS) - 1, "an unknown dtype")
            described.append(f"rank {rank} {tokens} tokens of {dtype} with {describe_tag(word >> DTYPE_BITS)}")
        return RoutingError(
            f"lane {lane}: all ranks of a round need the same dtype, and at most {layout.MAX_TOKENS} tokens, and must "
            f"want the same gradients, those without tokens too; they dispatched: {', '.join(described)}"
        )

    def _launch_idle(self, dtype: torch.dtype, id_dtype: torch.dtype) -> None:
        lane = self.lanes[0]
        names = ("control", "index", "expert_counts", "expert_offsets", "positions", "weights", "scratch")
        local: dict[str, Any] = {name: torch.zeros_like(getattr(lane, name)) for name in names}
        local["control"][signal.CONTROL_STATUS] = signal.TIMED_OUT
        idle = replace(lane, report=torch.zeros_like(lane.report).pin_memory(), **local)
        row = torch.zeros(1, lane.layout.HIDDEN, dtype=dtype, device=self.device)
        ids = torch.zeros(1, lane.layout.TOP_K, dtype=id_dtype, device=self.device)
        self.kernels.send_tokens(idle, row, ids, ids.float(), self.config.num_programs)
        self.kernels.wait(idle, DISPATCH, self.timeout, self.grace)
        self.kernels.route(idle)
        self.kernels.gather(idle, row, torch.empty((), dtype=torch.bool, device=self.device))
        for out_dtype in DTYPE_CODES:
            weight_grads = idle.weights if idle.layout.WEIGHT_GRADS else None
            self.kernels.send_sums(idle, row.to(out_dtype), dtype, self.config.num_programs, weight_grads)
        self.kernels.close_round(idle)
        self.kernels.wait(idle, COMBINE, self.timeout, self.grace)
        self.kernels.sum_home(idle, row)

    @property
    def lost(self) -> tuple[int, ...] | None:
        """The ranks that the wait which ended first named."""
        if self._failed is None:
            return None
        self._tell_all_lanes()
        error = self._end_of(self._failed)
        return error.ranks if isinstance(error, PeerTimeout) else ()  # whose row it was is there, and may stay

    @property
    def memory_bytes(self) -> int:
        """Symmetric buffers and what lanes keep beside them; nothing is allocated later but results."""
        return sum(lane.memory_bytes for lane in self.lanes)

    def describe(self) -> str:
        """For `explain`."""
        size = self.memory_bytes / 2**20
        return (
            f"transport: direct ({self.reason}); lanes: {len(self.lanes)}, {size:.1f} MiB in all, {self.memory.kind} "
            f"heap, generation {self.memory.generation}; waits end after {self.timeout:g} s"
        )

    def require_usable(self) -> None:
        """Raises what kernels reported on any lane."""
        for lane in range(len(self.lanes)):
            self.raise_failure(lane)

    def close(self) -> None:
        """Gives the memory back. Tensors made from it stay readable."""
        self.lanes.clear()
        self._views.clear()
        super().close()


class _DirectRound(Dispatched):
    _rounds: DirectRounds

    def __init__(self, rounds: DirectRounds, lane: int, x: torch.Tensor) -> None:
        super().__init__(rounds, lane, x)
        self._tensors = rounds.lanes[lane]
        self._number = rounds.rounds_begun[lane]
        self.rows, self._like = rounds.views(lane, x.dtype)
        self.index = self._tensors.index
        self.expert_counts = self._tensors.expert_counts
        self.expert_offsets = self._tensors.expert_offsets

    def _read_num_rows(self) -> int:
        used = int(self.expert_offsets[-1])  # a host synchronisation on CUDA
        self._rounds.raise_failure(self.lane)
        if not 0 <= used <= self.index.shape[0]:
            raise RoutingError(
                f"expert_offsets ends with {used}, and there is room for {self.index.shape[0]} rows: somebody wrote "
                "into it; it is to be read only"
            )
        return used

    def _gather(self, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._rounds.raise_failure(self.lane)
        tokens = new_rows(self._like, capacity, (self._rounds.config.hidden_size,))
        overflow = self._like.new_empty((), dtype=torch.bool)
        self._rounds.kernels.gather(self._tensors, tokens, overflow)
        self._rounds.raise_corruption(self.lane)
        return tokens, overflow

    def _combine(self, expert_out: torch.Tensor, out: torch.Tensor) -> None:
        self._rounds.combine(self.lane, expert_out, self._dtype, out)

    def _abandon(self) -> None:
        self._rounds.close_round(self.lane)

    @property
    def dispatch_traffic(self) -> Traffic:
        self._require_latest()
        config, layout = self._rounds.config, self._tensors.layout
        words = self._tensors.buffer[layout.IDS : layout.WEIGHTS].view(torch.int32)
        of_a_rank = layout.MAX_TOKENS * layout.TOP_K
        ids = words[config.comm.rank * of_a_rank :][: self._num_sent * layout.TOP_K].view(-1, layout.TOP_K)
        counts = SendPlan.of(ids, layout.NUM_EXPERTS, layout.WORLD).counts
        to_each_peer = self._num_sent * layout.TOP_K * 8 + 4 * (1 + SIGNAL_DTYPE)
        record_bytes = config.wire.row_bytes(config.hidden_size, self._dtype)
        return self._traffic(counts, record_bytes, (layout.WORLD - 1) * to_each_peer)

    @property
    def combine_traffic(self) -> Traffic:
        self._require_latest()
        config, layout = self._rounds.config, self._tensors.layout
        sent = (self._tensors.positions[:, 0] >= 0).view(layout.WORLD, layout.MAX_TOKENS).sum(1).tolist()
        record_bytes = config.combine_wire.row_bytes(config.hidden_size, self._dtype)
        return self._traffic(sent, record_bytes, (layout.WORLD - 1) * 8)

    def _require_latest(self) -> None:
        if self._rounds.rounds_begun[self.lane] != self._number:
            raise LaneError(f"lane {self.lane} has gone on to a later round; what this one sent is not known any more")
