"""The lanes of the direct transport as one rank sees them: their state, and what kernels reported of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from thinwire.comm.memory.symmetric import SymmetricMemory, held_bytes
from thinwire.errors import PeerTimeout, RoutingError
from thinwire.fused.direct_transport import DirectTransport
from thinwire.moe.config import ParallelConfig
from thinwire.moe.gradients import describe_tag
from thinwire.moe.round_transport import Rounds, left_open, refused_by
from thinwire.triton_kernels import combine, dispatch, permute, signal
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


def lanes_bytes(layout: RoundLayout, lanes: int, rank: int, align: int, heap: str) -> int:
    """What `DirectLanes.memory_bytes` will be of lanes that are not allocated yet.

    Args:
        layout: of each lane.
        rank: whose; ranks may own different numbers of experts.
        heap: "cuda", or of ranks whose kernels are interpreted "posix" or "threads".
    """
    return held_bytes(heap, lanes * layout.NUM_BYTES, layout.WORLD) + lanes * Lane.bytes_beside(layout, rank, align)


class Lanes(DirectTransport, Rounds):
    """Rounds on lanes over memory that peers reach; it is closed with this object.

    Attributes:
        lanes: this rank's ends, each with its `layout`.
    """

    name = "direct"
    phases, counted = ("dispatch", "combine"), "round"  # by DISPATCH and COMBINE
    tagged_by = "layer"
    lanes: list[Any]
    _views: dict[tuple[int, torch.dtype], dict[str, torch.Tensor]]

    def begin_rounds(self, config: ParallelConfig, reason: str) -> None:
        """Sets what rounds need beside the transport; for `__init__`."""
        Rounds.__init__(self, config, reason)
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

    def mismatch_of(self, lane: int, refusals: Mapping[int, int], told: Mapping[int, tuple[int, int]]) -> RoutingError:
        """Says what ranks disagree on.

        Args:
            refusals: why ranks refused what they were given.
            told: of each rank the number of its tokens, and the word of their dtype and tag.
        """
        if refusals:
            return RoutingError(f"lane {lane}: {refused_by(refusals)}")
        names, described = {code: str(dtype) for dtype, code in DTYPE_CODES.items()}, []
        for rank, (tokens, word) in told.items():
            dtype = names.get(word & (1 << DTYPE_BITS) - 1, "an unknown dtype")
            wanted = describe_tag(word >> DTYPE_BITS, self.tagged_by)
            described.append(f"rank {rank} {tokens} tokens of {dtype} with {wanted}")
        return RoutingError(
            f"lane {lane}: all ranks of a round need the same dtype and {self.tagged_by}, at most "
            f"{self.lanes[lane].layout.MAX_TOKENS} tokens, and must want the same gradients, those without tokens too; "
            f"they dispatched: {', '.join(described)}"
        )

    @property
    def memory_bytes(self) -> int:
        """The ranks' memory, and what lanes and kernels keep beside it; nothing is allocated later but results."""
        raise NotImplementedError

    def describe(self) -> str:
        """For `explain`."""
        size = self.memory_bytes / 2**20
        return (
            f"transport: {self.name} ({self.reason}); lanes: {len(self.lanes)}, {size:.1f} MiB in all, "
            f"{self.memory.kind} heap, generation {self.memory.generation}; waits end after {self.timeout:g} s"
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


class DirectLanes(Lanes):
    """Lanes over symmetric memory, of which each has `layout.NUM_BYTES`."""

    def __init__(self, config: ParallelConfig, layout: RoundLayout, memory: SymmetricMemory, reason: str) -> None:
        comm = config.comm
        DirectTransport.__init__(self, "ExpertParallel", memory, comm.rank, config.peer_timeout, comm.voters)
        self.begin_rounds(config, reason)
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
        lines = self._lines(lane, self.lanes[lane].layout.SIGNALS)
        said = lines[:, [SIGNAL_TOKENS, SIGNAL_DTYPE]].tolist()
        told = {rank: (tokens, word) for rank, (tokens, word) in enumerate(said)}
        refusals = {rank: word >> DTYPE_BITS for rank, (tokens, word) in told.items() if tokens == REFUSED}
        return self.mismatch_of(lane, refusals, told)

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
