"""What of an ExpertParallel depends on its group: the transport and its lanes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from thinwire.comm.host_collectives import Setting
from thinwire.comm.memory.symmetric import SymmetricMemory
from thinwire.errors import CapacityError, LaneError, ThinwireError, TransportUnavailable
from thinwire.fields import shown
from thinwire.fused.transport import choose, open_direct, uses_triton
from thinwire.moe.config import ParallelConfig
from thinwire.moe.direct import DirectRounds
from thinwire.moe.direct_gradients import BackwardRounds, DirectPlan
from thinwire.moe.dispatched import Dispatched
from thinwire.moe.gradients import GradientPlan, Wants
from thinwire.moe.round_transport import Rounds
from thinwire.moe.staged import StagedPlan, StagedRound, StagedRounds
from thinwire.moe.two_level_lanes import two_level_layout, why_not_two_level

if TYPE_CHECKING:
    from thinwire.moe.pulled import PulledBackward, PulledRounds

    Forward = DirectRounds | PulledRounds
    Backward = BackwardRounds | PulledBackward


class Assembly:
    """The rounds of one group, on the transport that all its ranks can take. To make one is collective.

    Attributes:
        rounds: those of forward.
        backward: lanes for gradients, once a dispatch on the direct transport has wanted them.
        generation: of the lanes, which counts how often `rebuild` allocated them anew.
    """

    def __init__(self, config: ParallelConfig, generation: int) -> None:
        self.config, self.generation = config, generation
        self.backward: Backward | None = None
        comm, asked = config.comm, config.transport
        comm.require_same("ExpertParallel", config.settings(generation))
        self.rounds: Rounds = choose(
            "ExpertParallel", asked, comm, [], self._open, self._staged, CapacityError,
        )  # fmt: skip
        facts = self.facts()  # of which `open_direct` has told the first, where it was tried
        comm.log(f"ExpertParallel: {'; '.join(facts if asked == 'staged' else facts[1:])}")

    def facts(self) -> tuple[str, ...]:
        """What was chosen, and why, a line each."""
        config, backend = self.config, self.config.dispatch_backend
        return (
            self.rounds.describe(),
            f"wire: {config.wire} out, {config.combine_wire} back{' (each expert by itself)' * config.invariant}, "
            f"{config.grad_wire} for gradients",
            f"kernels: {backend.name} ({backend.reason})",
            f"experts: {config.num_experts} over {config.comm.size} ranks, here {shown(config.local_experts)}"
            f"{'' if config.expert_map is None else ', by expert_map'}",
        )

    @property
    def all_rounds(self) -> tuple[Rounds, ...]:
        """Those of forward, and if there are any those of backward."""
        return (self.rounds,) if self.backward is None else (self.rounds, self.backward)

    def _staged(self, _: str, reason: str, lack: type[ThinwireError] | None = None) -> Rounds:
        return StagedRounds(self.config, reason, lack)

    def _open(self, backward: bool = False) -> Rounds:
        """Lanes for forward or for backward, or staged rounds. Collective."""
        config = self.config
        comm = config.comm
        if (why := config.why_staged(comm.size)) is not None:
            return self._staged("ExpertParallel", why)
        config = config.of_backward if backward else config
        asked = config.transport
        why_not = None if asked == "direct" else why_not_two_level(config)
        if why_not is not None and len(comm.hosts) > 1 and asked == "auto":
            why_not = f"its ranks are on several hosts, and {why_not}"
            comm.log(f"ExpertParallel: staged, as {why_not}")
        if why_not is not None and (asked == "two_level" or len(comm.hosts) > 1):
            return self._staged("ExpertParallel", why_not)
        two_level = asked != "direct" and why_not is None
        reason = "every rank can map every peer's memory"
        if two_level:
            reason = "the ranks of a host can map each other's memory"
        reason = reason if asked == "auto" else "as asked for"
        host = next(members for members in comm.hosts if comm.rank in members) if two_level else None
        ways, kernels = (_ways_of_triton, "triton") if uses_triton(comm) else (_ways_of_numba, "numba")
        size, make = ways(config, backward, reason, host)
        settings: dict[str, Setting] = {"kernels": kernels}
        return open_direct(comm, "ExpertParallel", size, settings, make, self._staged, self.generation, host)

    def gradient_plan(
        self, d: Dispatched, wants: Wants, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> GradientPlan:
        """The way of a round's gradients."""
        if isinstance(d, StagedRound):
            return StagedPlan(d, wants)
        plan = DirectPlan
        if not isinstance(self.rounds, DirectRounds):
            from thinwire.moe.pulled import PulledPlan as plan  # it loads numba
        return plan(self._find_backward, d, wants, topk_ids, topk_weights)

    def _find_backward(self) -> Any:
        """The lanes for backward. The first call is collective: it allocates them."""
        if self.backward is None:
            if self.rounds.closed:
                raise LaneError("backward: the ExpertParallel of this round was closed, or rebuilt, since")
            with self.config.comm.call("lanes for backward"):
                lanes = self._open(backward=True)
                if isinstance(lanes, StagedRounds):
                    error = lanes.lack or TransportUnavailable
                    raise error(f"there are no lanes for backward: {lanes.reason}; transport='staged' needs none")
                self.backward = cast("Backward", lanes)
        return self.backward


#: Bytes of each rank's symmetric memory, and what makes rounds over it.
_Ways = tuple[int, Callable[[SymmetricMemory, bool], Rounds]]


def _ways_of_triton(config: ParallelConfig, backward: bool, reason: str, host: Sequence[int] | None) -> _Ways:
    """Rounds whose kernels store into the peers' memory; of two levels if there is a host."""
    kind: type[DirectRounds] = BackwardRounds if backward else DirectRounds
    layout = config.lane_layout(config.comm.size, weight_grads=backward)
    if host is not None:
        from thinwire.moe.rails import RailBackward, RailRounds

        kind, layout = RailBackward if backward else RailRounds, two_level_layout(config, backward)
    return config.lanes * layout.NUM_BYTES, lambda memory, _: kind(config, layout, memory, reason)


def _ways_of_numba(config: ParallelConfig, backward: bool, reason: str, host: Sequence[int] | None) -> _Ways:
    """Rounds whose kernels read the peers' memory; of two levels if there is a host."""
    from thinwire.moe import pulled  # it loads numba

    kind: type[PulledRounds] = pulled.PulledBackward if backward else pulled.PulledRounds
    layout = config.pulled_layout(config.comm.size, weight_grads=backward)
    if host is not None:
        from thinwire.moe import two_level

        kind = two_level.TwoLevelBackward if backward else two_level.TwoLevelRounds
        layout = two_level.layout_of(config, backward)

    def make(memory: SymmetricMemory, crowded: bool) -> Rounds:
        return kind(config, layout, memory, reason, crowded)

    ranks = config.comm.size if host is None else max(map(len, config.comm.hosts))
    return pulled.shared_bytes(layout, config.lanes, ranks), make
