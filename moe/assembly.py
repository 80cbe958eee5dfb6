"""What an ExpertParallel has of its group: a transport and its lanes, and what all layers that ask for one share."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from thinwire.comm import Communicator, Group
from thinwire.comm.call import Attachment
from thinwire.comm.host_collectives import Setting
from thinwire.comm.hosts import describe
from thinwire.comm.memory.symmetric import SymmetricMemory
from thinwire.compiler import opaque
from thinwire.errors import CapacityError, LaneError, ThinwireError, TransportUnavailable
from thinwire.fields import shown
from thinwire.fused.transport import choose, open_direct, uses_triton
from thinwire.moe.config import ParallelConfig
from thinwire.moe.direct import DirectRounds
from thinwire.moe.direct_gradients import DirectPlan
from thinwire.moe.dispatched import Dispatched
from thinwire.moe.gradients import GradientPlan, Wants
from thinwire.moe.round_transport import Rounds
from thinwire.moe.staged import StagedPlan, StagedRound, StagedRounds

if TYPE_CHECKING:
    from thinwire.moe.pulled import PulledRounds

_T = TypeVar("_T")


class Assembly:
    """The rounds of one group, on the transport that all its ranks can take. To make one is collective.

    Attributes:
        rounds: those of forward.
        backward: lanes for gradients, once a dispatch on the direct transport has wanted them.
        generation: of the lanes, which counts how often `rebuild` allocated them anew.
    """

    def __init__(self, config: ParallelConfig, generation: int) -> None:
        self.config, self.generation = config, generation
        self.backward: DirectRounds | PulledRounds | None = None
        comm, asked = config.comm, config.transport
        comm.require_same("ExpertParallel", config.settings(generation))
        self.rounds: Rounds = choose("ExpertParallel", asked, comm, [], self._open, self._staged, CapacityError)
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
                self.backward = cast("DirectRounds | PulledRounds", lanes)
        return self.backward


def why_not_two_level(config: ParallelConfig) -> str | None:
    """Why a group's rounds cannot take two levels, or with "auto" do not; None: they can."""
    hosts = config.comm.hosts
    if len(hosts) == 1:
        return "its ranks are on one host"
    if config.transport == "auto" and max(map(len, hosts)) == 1:
        return "every host has one rank"
    if config.invariant:
        return "a host's sums are added up before they cross, and with invariant=True each expert's row goes home"
    if config.dispatch_backend.name == "torch":
        return "two levels need the kernels of Triton or of numba"
    if config.dispatch_backend.name == "triton":
        if config.transport == "auto":
            return "two levels of GPUs have run on none yet: ask for them with transport='two_level'"
        try:
            config.comm.check_exchange()
        except TransportUnavailable as error:
            return str(error)
        in_order = [rank for members in hosts for rank in members] == [*range(config.comm.size)]
        if not in_order or len({*map(len, hosts)}) > 1:
            return f"on GPUs every host must have as many ranks, one behind the other, and here are {describe(hosts)}"
    return None


#: Bytes of each rank's symmetric memory, and what makes rounds over it.
_Ways = tuple[int, Callable[[SymmetricMemory, bool], Rounds]]


def _ways_of_triton(config: ParallelConfig, backward: bool, reason: str, host: Sequence[int] | None) -> _Ways:
    """Rounds whose kernels store into the peers' memory; of two levels if there is a host."""
    kind, layout = DirectRounds, config.lane_layout(config.comm.size, weight_grads=backward)
    if host is not None:
        from thinwire.moe import rails

        kind, layout = rails.RailRounds, rails.layout_of(config, backward)
    return config.lanes * layout.NUM_BYTES, lambda memory, _: kind(config, layout, memory, reason)


def _ways_of_numba(config: ParallelConfig, backward: bool, reason: str, host: Sequence[int] | None) -> _Ways:
    """Rounds whose kernels read the peers' memory; of two levels if there is a host."""
    from thinwire.moe import pulled, two_level  # they load numba

    layout, ranks = config.pulled_layout(config.comm.size, weight_grads=backward), config.comm.size
    make: Callable[..., Rounds] = pulled.PulledRounds
    if host is not None:
        layout, ranks = two_level.layout_of(config, backward), max(map(len, config.comm.hosts))
        make = two_level.TwoLevelRounds
    size = pulled.shared_bytes(layout, config.lanes, ranks)
    return size, lambda memory, crowded: make(config, layout, memory, reason, crowded)


class _Made(Attachment):
    """What was made for one communicator; what was rebuilt onto its successor is known to that one.

    Attributes:
        all: which end with the communicator, unless they end before.
        shared: those of them that `shared` made, in that order.
    """

    outlives_shrink = True

    def __init__(self) -> None:
        self.all: weakref.WeakSet[Any] = weakref.WeakSet()
        self.shared: list[Any] = []

    def describe(self) -> str:
        return f"shared ExpertParallel: {sum(not ep._closed for ep in self.shared)}" if self.shared else ""

    def close(self) -> None:
        for ep in [*self.all]:
            if ep.comm.closed:  # and not rebuilt onto another group
                ep.end()  # which keeps its memory, for calls under way, until the last reference is gone
        for ep in self.shared:
            if ep.comm.closed:
                ep.close()


def ends_with(comm: Communicator, ep: Any) -> None:
    """Has an ExpertParallel closed when its communicator is."""
    comm.attached("ExpertParallel", _Made).all.add(ep)


@opaque
def shared(cls: type[_T], comm: Group, *sizes: int, **settings: Any) -> _T:
    """The group's ExpertParallel with these settings: constructed by the first call, returned by those that follow.

    All ranks of the group call this, `close` and `rebuild` in the same order, with the same arguments. Whether there is
    such an object depends on these calls alone, so either all ranks construct it, which is collective and compares what
    they passed, or none does, and nothing is sent. A rank that finds an object where others construct one gives them
    PeerTimeout.

    One with room for more tokens counts as the same.

    It belongs to all who asked: it is closed with its communicator, and who closes it before ends it for all of them;
    the next call constructs another one. One that was rebuilt after `comm.shrink()` is the one of the ranks that are
    left; one that was rebuilt onto another group is shared no longer.

    Args:
        comm: a communicator, a process group, or a DeviceMesh of one axis.
        sizes: the constructor's, and so are `settings`. Formats count as what they stand for, `wire=None` too.

    Raises:
        ThinwireError: the communicator is closed.
        TypeError, and what the constructor raises.

    >>> import thinwire as tw
    >>> with tw.init() as comm:
    ...     layers = [tw.ExpertParallel.shared(comm, 4, 2, 64, max_tokens=16, wire="none") for _ in range(2)]
    ...     layers[0] is layers[1]
    True
    """
    bound = inspect.signature(cls).bind(comm, *sizes, **settings)
    bound.apply_defaults()
    wanted = ParallelConfig.of(*bound.args[1:], **bound.kwargs, comm=comm)
    wanted.comm.require_open()
    known: _Made = wanted.comm.attached("ExpertParallel", _Made)
    known.shared = [ep for ep in known.shared if not ep._closed]
    for ep in known.shared:
        made = ep._assembly.config
        if made.max_tokens >= wanted.max_tokens and replace(made, max_tokens=wanted.max_tokens) == wanted:
            return ep
    known.shared.append(cls(*bound.args, **bound.kwargs))
    return known.shared[-1]
