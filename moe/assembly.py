"""What of an ExpertParallel depends on its group: the transport and its lanes, allocated and enlarged."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch

from thinwire.comm.communicator import Communicator
from thinwire.comm.exchange import name_ranks
from thinwire.comm.memory.symmetric import SymmetricMemory
from thinwire.comm.tensors import is_int
from thinwire.errors import CapacityError, LaneError, ThinwireError, TransportUnavailable
from thinwire.fields import shown
from thinwire.fused.transport import choose, open_direct, uses_triton
from thinwire.moe.config import ParallelConfig
from thinwire.moe.direct import DirectRounds
from thinwire.moe.direct_gradients import BackwardRounds, DirectPlan
from thinwire.moe.dispatched import Dispatched
from thinwire.moe.gradients import GradientPlan, Wants
from thinwire.moe.legs import Started
from thinwire.moe.round_transport import Rounds
from thinwire.moe.staged import StagedPlan, StagedRound, StagedRounds
from thinwire.moe.two_level_lanes import two_level_layout, why_not_two_level

_Kind = TypeVar("_Kind", bound=DirectRounds)


class Assembly:
    """The rounds of one group, on the transport that all its ranks can take. To make one is collective.

    Attributes:
        rounds: those of forward.
        backward: lanes for gradients, once a dispatch on the direct transport has wanted them.
        generation: of the lanes, which counts how often they were allocated.
    """

    def __init__(self, config: ParallelConfig, generation: int) -> None:
        self.config, self.generation = config, generation
        self.backward: BackwardRounds | None = None
        comm, asked = config.comm, config.transport
        comm.require_same("ExpertParallel", config.settings(generation))
        self.rounds: Rounds = choose(
            "ExpertParallel", asked, comm, [], lambda: self._open(DirectRounds, config, generation),
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

    def _open(self, kind: type[DirectRounds], config: ParallelConfig, generation: int, begun: int = 0) -> Rounds:
        """Lanes for forward or for backward, whose rounds go on from a number; or staged rounds. Collective."""
        comm, backward = config.comm, kind is BackwardRounds
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
            return kind(config, layout, memory, reason, begun)

        size = config.lanes * layout.NUM_BYTES
        return open_direct(comm, "ExpertParallel", size, {}, make, self._staged, generation, host)

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
                error = "there are no lanes for backward", "transport='staged' needs none"
                self.backward = self._require(BackwardRounds, error, self.config, self.generation)
        return self.backward

    def make_room(self, need: int) -> None:
        """`ExpertParallel.ensure_capacity`. All that peers store into the old lanes is stored when they come here."""
        rounds, comm, room = self.rounds, self.config.comm, self.config.max_tokens
        if comm.device.type == "cuda":
            torch.cuda.synchronize(comm.device)
        in_use = [(lane, isinstance(use, Started)) for lane, use in enumerate(rounds.open_rounds) if use is not None]
        begun = max(rounds.rounds_begun) % 2**31
        told = comm.all_gather_data((need, *(in_use or [(-1, False)])[0], begun), (int, int, bool, int))
        for rank, (asked, _, _, number) in enumerate(told):
            if not is_int(asked, 0) or not is_int(number, 0):
                raise ThinwireError(f"rank {rank} asks for {asked} tokens, after {number} rounds; each is below 2**31")
        most = max(asked for asked, *_ in told)
        if most <= room:
            return
        users: dict[str, list[int]] = {}
        for rank, (_, lane, started, _) in enumerate(told):
            if lane >= 0:
                what = "what was started is not finished" if started else "a round is open"
                users.setdefault(f"on lane {lane} {what} at", []).append(rank)
        if users:
            raise LaneError(
                f"room for {most} tokens a rank instead of {room} is made while no lane is in use, and "
                f"{'; '.join(f'{what} {name_ranks(ranks)}' for what, ranks in users.items())}: combine, finish or "
                "abandon first, or call ensure_capacity before the first dispatch"
            )
        config = replace(self.config, max_tokens=most)
        if isinstance(rounds, DirectRounds):
            self._replace_lanes(config, max(number for *_, number in told))
        else:
            self.config = rounds.config = config

    def _replace_lanes(self, config: ParallelConfig, begun: int) -> None:
        generation, before = self.generation + 1, self.config.max_tokens
        error = f"no room for {config.max_tokens} tokens a rank", f"lanes are as before, for {before}"
        forward = self._require(DirectRounds, error, config, generation, begun)
        old = self.all_rounds
        if self.backward is not None:
            try:
                backward = self._require(BackwardRounds, error, config, generation)
            except BaseException:
                forward.close()
                raise
            self.backward.successor = backward
            self.backward = backward
        self.generation, self.rounds, self.config = generation, forward, config
        for lanes in old:
            lanes.close()
        config.comm.log(f"lanes grew: room for {config.max_tokens} tokens a rank instead of {before}")

    def _require(
        self, kind: type[_Kind], without: tuple[str, str], config: ParallelConfig, generation: int, begun: int = 0
    ) -> _Kind:
        """As `_open`; raises where there are none: what is missing, and what to do or what holds."""
        lanes = self._open(kind, config, generation, begun)
        if not isinstance(lanes, kind):
            error = lanes.lack or TransportUnavailable
            raise error(f"{without[0]}: {lanes.reason}; {without[1]}")
        return lanes


def _two_level_kinds(comm: Communicator) -> tuple[type[DirectRounds], type[BackwardRounds]]:
    """The rounds of forward and of backward. Each pair loads kernels that ranks with the other do without."""
    if uses_triton(comm):
        from thinwire.moe.rails import RailBackward, RailRounds

        return RailRounds, RailBackward
    from thinwire.moe.two_level import TwoLevelBackward, TwoLevelRounds

    return TwoLevelRounds, TwoLevelBackward
