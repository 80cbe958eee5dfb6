"""What of an ExpertParallel depends on its group: the transport and its lanes."""

from __future__ import annotations

import torch

from thinwire.comm.communicator import Communicator
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


class Assembly:
    """The rounds of one group, on the transport that all its ranks can take. To make one is collective.

    Attributes:
        rounds: those of forward.
        backward: lanes for gradients, once a dispatch on the direct transport has wanted them.
        generation: of the lanes, which counts how often `rebuild` allocated them anew.
    """

    def __init__(self, config: ParallelConfig, generation: int) -> None:
        self.config, self.generation = config, generation
        self.backward: BackwardRounds | None = None
        comm, asked = config.comm, config.transport
        comm.require_same("ExpertParallel", config.settings(generation))
        self.rounds: Rounds = choose(
            "ExpertParallel", asked, comm, [], lambda: self._open(DirectRounds),
            self._staged, CapacityError,
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

    def _open(self, kind: type[DirectRounds]) -> Rounds:
        """Lanes for forward or for backward, or staged rounds. Collective."""
        config, backward = self.config, kind is BackwardRounds
        comm = config.comm
        if (why := config.why_staged(comm.size)) is not None:
            return self._staged("ExpertParallel", why)
        config = config.of_backward if backward else config
        asked, host = config.transport, None
        why_not = None if asked == "direct" else why_not_two_level(config)
        if why_not is not None and len(comm.hosts) > 1 and asked == "auto":
            why_not = f"its ranks are on several hosts, and {why_not}"
            comm.log(f"ExpertParallel: staged, as {why_not}")
        if why_not is not None and (asked == "two_level" or len(comm.hosts) > 1):
            return self._staged("ExpertParallel", why_not)
        if asked != "direct" and why_not is None:
            kind, layout = _two_level_kinds(comm)[backward], two_level_layout(config, backward)
            host = next(members for members in comm.hosts if comm.rank in members)
            reason = "the ranks of a host can map each other's memory"
        else:
            layout, reason = (
                config.lane_layout(comm.size, weight_grads=backward),
                "every rank can map every peer's memory",
            )
        reason = reason if asked == "auto" else "as asked for"

        def make(memory: SymmetricMemory, _: bool) -> Rounds:
            return kind(config, layout, memory, reason)

        size = config.lanes * layout.NUM_BYTES
        return open_direct(comm, "ExpertParallel", size, {}, make, self._staged, self.generation, host)

    def gradient_plan(
        self, d: Dispatched, wants: Wants, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> GradientPlan:
        """The way of a round's gradients."""
        if isinstance(d, StagedRound):
            return StagedPlan(d, wants)
        return DirectPlan(self._find_backward, d, wants, topk_ids, topk_weights)

    def _find_backward(self) -> BackwardRounds:
        """The lanes for backward. The first call is collective: it allocates them."""
        if self.backward is None:
            if self.rounds.closed:
                raise LaneError("backward: the ExpertParallel of this round was closed, or rebuilt, since")
            with self.config.comm.call("lanes for backward"):
                lanes = self._open(BackwardRounds)
                if not isinstance(lanes, BackwardRounds):
                    error = lanes.lack or TransportUnavailable
                    raise error(f"there are no lanes for backward: {lanes.reason}; transport='staged' needs none")
                self.backward = lanes
        return self.backward


def _two_level_kinds(comm: Communicator) -> tuple[type[DirectRounds], type[BackwardRounds]]:
    """The rounds of forward and of backward. Each pair loads kernels that ranks with the other do without."""
    if uses_triton(comm):
        from thinwire.moe.rails import RailBackward, RailRounds

        return RailRounds, RailBackward
    from thinwire.moe.two_level import TwoLevelBackward, TwoLevelRounds

    return TwoLevelRounds, TwoLevelBackward
