"""Lanes of ranks on several hosts: what rounds over two levels have in common, however tokens cross.

Each rank has a *forwarder* on every other host (`thinwire.comm.hosts.forwarder`). What it sends there goes to that rank
through the process group, and the forwarder stores it into its host's memory in the sender's name: slots, planes and
signal lines are there for all ranks of the group. So waits, routing and all that experts see are those of
`DirectRounds`, whose lanes these are.

On the way back the owners store float32 sums at the forwarder of the token's rank, which keeps a *home* for every rank
that it serves, and adds them up in ascending rank before one record a token crosses. `docs/protocol.md` argues why
nothing is overwritten and nobody waits in a circle.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from thinwire.comm.hosts import Hosts, describe, forwarder
from thinwire.comm.memory.symmetric import SymmetricMemory
from thinwire.errors import LaneError, PeerTimeout, TransportUnavailable
from thinwire.moe.config import ParallelConfig
from thinwire.moe.direct import DirectRound, DirectRounds
from thinwire.moe.plan import SendPlan
from thinwire.triton_kernels.round_layout import RoundLayout
from thinwire.triton_kernels.signal import REPORT_PEERS, REPORT_PHASE
from thinwire.wire import Traffic, WireFormat

EXACT = WireFormat.parse("none")


def served_by(hosts: Hosts, rank: int) -> list[int]:
    """The ranks whose rows a rank takes to its host, itself first."""
    here = next(number for number, members in enumerate(hosts) if rank in members)
    everyone = (peer for members in hosts for peer in members)
    return sorted(
        (peer for peer in everyone if forwarder(hosts, peer, here) == rank), key=lambda peer: (peer != rank, peer)
    )


def why_not_two_level(config: ParallelConfig) -> str | None:
    """What keeps a group's rounds from two levels; None if nothing does."""
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


def two_level_layout(config: ParallelConfig, weight_grads: bool) -> RoundLayout:
    """The direct transport's over all ranks, with float32 sums, and a home for each rank that one serves."""
    hosts = config.comm.hosts
    layout = config.lane_layout(config.comm.size, weight_grads=weight_grads)
    exact = RoundLayout.of(
        world=max(map(len, hosts)), num_experts=config.num_experts, top_k=config.top_k, hidden=config.hidden_size,
        max_tokens=config.max_tokens, wire=config.wire, combine_wire=EXACT, weight_grads=weight_grads,
    )  # fmt: skip
    home_bytes = exact.NUM_BYTES - exact.SUMS
    homes = max(len(served_by(hosts, rank)) for rank in range(config.comm.size))
    return replace(
        layout,
        SLOTS=exact.SLOTS,
        SUM_BYTES=exact.SUM_BYTES,
        WEIGHT_GRADS=layout.SUMS + exact.WEIGHT_GRADS - exact.SUMS if weight_grads else 0,
        MEMBERS=len(hosts[0]) if config.dispatch_backend.name == "triton" else 0,
        NUM_BYTES=layout.SUMS + homes * home_bytes,
    )


class TwoLevelLanes(DirectRounds):
    """A rank's lanes, with homes.

    Attributes:
        served: the ranks whose rows this one takes to its host, itself first.
        takers: of each rank of the group, which rank of this host takes its rows here.
        forwarded_phases: those in which forwarders signal in the name of other hosts' ranks.
        home_bytes: of each home; the first is this rank's own, from `RoundLayout.SUMS` on.
    """

    name = "two_level"
    forwarded_phases: tuple[int, ...]

    def __init__(self, config: ParallelConfig, layout: RoundLayout, memory: SymmetricMemory, reason: str) -> None:
        hosts, size = config.comm.hosts, config.comm.size
        self.served = served_by(hosts, config.comm.rank)
        super().__init__(config, layout, memory, reason)
        self.host = next(number for number, members in enumerate(hosts) if self.rank in members)
        self.takers = takers = [forwarder(hosts, peer, self.host) for peer in range(size)]
        homes = torch.tensor(
            [served_by(hosts, taker).index(peer) for peer, taker in enumerate(takers)], device=self.device
        )
        most = max(len(served_by(hosts, rank)) for rank in range(size))
        self.home_bytes = (layout.NUM_BYTES - layout.SUMS) // most
        self.lanes = [
            replace(lane, home_ptrs=lane.buffer_ptrs[takers] + homes * self.home_bytes) for lane in self.lanes
        ]

    def as_floats(self, expert_out: torch.Tensor) -> torch.Tensor:
        """Experts' rows; those that are records in `combine_wire` as float32, as sums are float32 here."""
        if expert_out.dtype != torch.uint8:
            return expert_out
        rows = expert_out.new_empty(len(expert_out), self.config.hidden_size, dtype=torch.float32)
        self.config.combine_backend.unpack_rows(expert_out, self.config.combine_wire, None, None, rows)
        return rows

    def require_not_closed(self) -> None:
        """LaneError after `close`, which a signal handler may have called while the network was waited for."""
        if self.closed:
            raise LaneError("this ExpertParallel was closed while this call was under way")

    def timed_out(
        self, report: np.ndarray, lane: int | None = None, stuck: Collection[int] = (), advice: str = ""
    ) -> PeerTimeout:
        """As the direct transport has it; for a missing rank of another host its forwarder here is to blame.

        But for one that waits for the network itself, as it says.
        """
        to_blame, _, said = report[REPORT_PEERS:].reshape(3, self.world)
        if report[REPORT_PHASE] in self.forwarded_phases:
            for rank, taker in enumerate(self.takers):
                silent = to_blame[rank] and not said[rank]
                if silent and taker not in (rank, self.rank) and not said[taker] and taker not in stuck:
                    to_blame[rank], to_blame[taker] = 0, 1
        return super().timed_out(report, lane, stuck, advice)

    def describe(self) -> str:
        """For `explain`."""
        return f"{super().describe()}; hosts: {describe(self.config.comm.hosts)}"


class TwoLevelTraffic(DirectRound):
    """What a round of two levels sends: to ranks of its host, and to other hosts."""

    _rounds: Any  # with `host` and `takers`

    @property
    def dispatch_traffic(self) -> Traffic:
        """What went to the host's ranks, and to other hosts; see `Dispatched`."""
        self._require_latest()
        config, members = self._rounds.config, len(self._rounds.config.comm.hosts[self._rounds.host])
        counts = SendPlan.of(self._sent_ids(), config.num_experts, config.comm.size).counts
        near = self._traffic(counts, *config.dispatch_bytes("direct", members, self._num_sent, self._dtype))
        return _added(near, self._far_dispatch())

    @property
    def combine_traffic(self) -> Traffic:
        """The float32 sums for this host's forwarders, and the records for other hosts."""
        self._require_latest()
        sums = (self._tensors.positions[:, 0] >= 0).view(self._tensors.layout.WORLD, -1).sum(1).tolist()
        by_taker = [0] * len(sums)
        for taker, count in zip(self._rounds.takers, sums, strict=True):
            by_taker[taker] += count
        return _added(self._traffic(by_taker, self._tensors.layout.SUM_BYTES), self._far_combine())

    def _far_dispatch(self) -> Traffic:
        raise NotImplementedError

    def _far_combine(self) -> Traffic:
        raise NotImplementedError


def _added(one: Traffic, other: Traffic) -> Traffic:
    parts = (one.rows, other.rows), (one.logical_bytes, other.logical_bytes), (one.wire_bytes, other.wire_bytes)
    return Traffic(*map(sum, parts))
