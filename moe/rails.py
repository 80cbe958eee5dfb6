"""Rounds over two levels on GPUs: messages of a fixed size between hosts, around the direct transport in each of them.

All hosts have as many ranks, and each rank exchanges messages with those of its place on other hosts: on every other
host one is its *forwarder* (`thinwire.comm.hosts.forwarder`), and stores into its host's memory in the sender's name.
Slots, planes and signal lines are there for all ranks of the group. So waits, routing and all that experts see are
those of `DirectRounds`. On the way back the owners of experts store float32 sums at the forwarder of the token's rank,
which keeps a *home* for every rank that it serves. `docs/protocol.md` argues why nothing is overwritten and nobody
waits in a circle.

A rank sends all of its tokens to every other host, whatever experts they are for, in a message with room for
`max_tokens`: at top-8 of 256 experts 99.6 % of tokens have one on each of 2 hosts, and 90 % on each of 4. So nobody
counts anything, the host waits for nothing, and a round may be captured in a CUDA graph. What comes is stored by
`forward_tokens` into the host's memory.

On the way back it is the same: after the wait for its own host a rank adds up that host's sums for each rank that it
serves, quantises them, and sends all with the lines in which its host's ranks say how they ended the round. These lines
are then waited for as if those ranks had written them, and only after that is the own host's share added up, so that
what poisons a lane gives NaN here as on the direct transport.

A round exchanges twice on every rank that does not fail. The network matches messages by their order alone, so each
lane counts epochs from a number of its own: in another lane's message all flags are missing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from thinwire.comm.hosts import forwarder, served_by
from thinwire.comm.memory.symmetric import SymmetricMemory
from thinwire.errors import LaneError, PeerTimeout, RoutingError
from thinwire.moe.config import ParallelConfig
from thinwire.moe.direct import DirectRounds, row_like
from thinwire.moe.dispatched import Dispatched
from thinwire.triton_kernels.forward import forward_tokens
from thinwire.triton_kernels.round_layout import COMBINE, DISPATCH, Lane, RoundLayout
from thinwire.triton_kernels.signal import (
    CONTROL_EPOCH,
    CONTROL_STATUS,
    REPORT_EPOCH,
    REPORT_PEERS,
    REPORT_PHASE,
    SIGNAL_FLAG,
    SIGNAL_LINE_BYTES,
)
from thinwire.wire import EXACT, Traffic

_EPOCH_BITS = 24  # of a lane's epochs, until one could be another's


def layout_of(config: ParallelConfig, backward: bool) -> RoundLayout:
    """The direct transport's over all ranks, with float32 sums, and a home for each rank that one serves."""
    hosts = config.comm.hosts
    layout = config.lane_layout(config.comm.size, weight_grads=backward)
    exact = RoundLayout.of(
        world=len(hosts[0]), num_experts=config.num_experts, top_k=config.top_k, hidden=config.hidden_size,
        max_tokens=config.max_tokens, wire=config.wire, combine_wire=EXACT, weight_grads=backward,
    )  # fmt: skip
    return replace(
        layout,
        SLOTS=exact.SLOTS,
        SUM_BYTES=exact.SUM_BYTES,
        WEIGHT_GRADS=layout.SUMS + exact.WEIGHT_GRADS - exact.SUMS if backward else 0,
        MEMBERS=len(hosts[0]),
        NUM_BYTES=layout.SUMS + len(hosts) * (exact.NUM_BYTES - exact.SUMS),
    )


class RailRounds(DirectRounds):
    """The legs of these rounds."""

    name = "two_level"
    sum_dtype = torch.float32

    def __init__(self, config: ParallelConfig, layout: RoundLayout, memory: SymmetricMemory, reason: str) -> None:
        super().__init__(config, layout, memory, reason)
        hosts, lanes, device = config.comm.hosts, config.lanes, self.device
        self._host = next(number for number, here in enumerate(hosts) if self.rank in here)
        self._here, self._far = hosts[self._host], [host for host in range(len(hosts)) if host != self._host]
        self._rail = [forwarder(hosts, self.rank, host) for host in range(len(hosts))]
        self.takers = takers = [forwarder(hosts, peer, self._host) for peer in range(self.world)]
        # Messages by host: tokens that come, and at the place of this one those that leave for all others.
        size = layout.MESSAGE_RECORDS + config.max_tokens * layout.RECORD_BYTES
        self._tokens = torch.zeros(lanes, len(hosts), size, dtype=torch.int8, device=device)
        # A message of sums: records, and in the room of some more the gradients of weights, and the host's lines.
        self._sum_bytes = config.combine_wire.row_bytes(config.hidden_size, config.dtype or torch.float32)
        self._grad_bytes = 4 * config.max_tokens * config.top_k if layout.WEIGHT_GRADS else 0
        beside = self._grad_bytes + len(self._here) * SIGNAL_LINE_BYTES
        rows = config.max_tokens + -(-beside // self._sum_bytes)
        shape = lanes, len(hosts), rows, self._sum_bytes
        self._sums_out, self._sums_here = (torch.zeros(shape, dtype=torch.uint8, device=device) for _ in range(2))
        tokens = torch.arange(config.max_tokens, device=device).unsqueeze(1)
        self._sums_of_tokens = tokens + rows * torch.arange(len(hosts), device=device)
        # Homes of the ranks that are served, the first of which is that of the rank itself.
        home_bytes = (layout.NUM_BYTES - layout.SUMS) // len(hosts)
        places = [served_by(hosts, taker).index(peer) for peer, taker in enumerate(takers)]
        homes = home_bytes * torch.tensor(places, device=device)
        self.lanes = [
            replace(lane, combine_wire=EXACT, home_ptrs=lane.buffer_ptrs[takers] + homes, message=message)
            for lane, message in zip(self.lanes, self._tokens[:, self._host], strict=True)
        ]
        shifts = [home_bytes * served_by(hosts, self.rank).index(rank) for rank in self._rail]
        self._homes = [
            [_home_of(lane, rank, shift) for rank, shift in zip(self._rail, shifts, strict=True)] for lane in self.lanes
        ]
        self._dtypes = [config.dtype or torch.float32] * lanes  # of the tokens of each lane's round
        for number, lane in enumerate(self.lanes):  # nobody has written to them yet
            first = (2 * number + (layout.WEIGHT_GRADS > 0)) % 128 << _EPOCH_BITS
            lane.control[CONTROL_EPOCH] += first
            lines = lane.buffer[layout.SIGNALS :][: 2 * self.world * SIGNAL_LINE_BYTES].view(torch.int32)
            lines.view(2 * self.world, -1)[:, SIGNAL_FLAG] += first
        self.finish_stream()  # as in `DirectRounds`

    def begin(
        self, lane: int, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, tag: int
    ) -> Callable[[], Dispatched]:
        """As on the direct transport; between its launches the message goes to the rails, and theirs are forwarded."""
        end, self._dtypes[lane] = super().begin(lane, x, topk_ids, topk_weights, tag), x.dtype
        forward = self._post_tokens(lane)

        def end_here() -> Dispatched:
            forward()
            return end()

        return end_here

    def _launch_each(self, *sends: Any) -> None:
        super()._launch_each(*sends)
        self._forward(self._idle_lane(), self._tokens[0], sends[0].dtype)

    def _forward(self, lane: Lane, messages: torch.Tensor, dtype: torch.dtype) -> None:
        for host in self._far:
            forward_tokens(lane, messages[host], self._rail[host], dtype, self.config.num_programs)

    def _post_tokens(self, lane: int) -> Callable[[], None]:
        messages = self._tokens[lane]
        wait = self._exchange(messages[self._host].expand_as(messages), messages, f"dispatch on lane {lane}")

        def forward() -> None:
            wait()
            self.config.comm.recorder.phase("forward")
            self._forward(self.lanes[lane], messages, self._dtypes[lane])

        return forward

    def _exchange(self, leaving: torch.Tensor, arriving: torch.Tensor, leg: str) -> Callable[[], None]:
        """Posts messages to and from other hosts, whose numbers are their places. The wait is the stream's on a GPU."""

        def by_rank(messages: torch.Tensor) -> list[torch.Tensor | None]:
            found: list[torch.Tensor | None] = [None] * self.world
            for host in self._far:
                found[self._rail[host]] = messages[host].view(-1).view(torch.uint8)
            return found

        label = f"{leg} of {self.config.num_experts} experts"
        posted = self.config.comm.post(by_rank(leaving), by_rank(arriving), label)

        def wait() -> None:
            posted.wait()
            if self.closed:  # by a signal handler, while the network was waited for
                raise LaneError("this ExpertParallel was closed while this call was under way")

        return wait

    def refuse(self, lane: int, why: int) -> None:
        """All ranks find a mismatch, also those of other hosts; on the CPU, see `ExpertParallel.refuse`."""
        super().refuse(lane, why)
        self._post_tokens(lane)()

    def _launch_combine(
        self, sends: tuple[Any, ...], dtype: torch.dtype, out: torch.Tensor, of_tokens: torch.Tensor | None
    ) -> None:
        idle, message = self._idle_lane(), torch.empty_like(self._sums_out[0, 0])
        self.kernels.send_sums(idle, *sends)
        for home in self._homes[0]:
            self._sum(replace(home, control=idle.control), dtype, message)
        config, none = self.config, torch.full_like(self._sums_of_tokens[:1], -1)
        config.combine_backend.sum_records(self._records(message, dtype), none, config.combine_wire, row_like(out))

    def _bring_home(self, lane: int, out: torch.Tensor | None, of_tokens: torch.Tensor | None) -> None:
        """Brings the host's sums to where they belong, and this rank's from all hosts, if there is `out`."""
        phase, dtype, homes = self.config.comm.recorder.phase, self._dtypes[lane], self._homes[lane]
        leaving, arriving = self._sums_out[lane], self._sums_here[lane]
        phase("wait for peers")
        with contextlib.suppress(RoutingError):  # of a rank that left the round open: the second wait finds it, too
            self._wait(lane, COMBINE)
        phase("sum for other hosts")
        for host in self._far:
            self._sum(homes[host], dtype, leaving[host])
            write_end_lines(self.lanes[lane], self._here[0], self._beside(leaving[host])[1])
        self._exchange(leaving, arriving, f"combine on lane {lane}")()
        lines = end_lines(self.lanes[lane]).view(-1, len(self._here), SIGNAL_LINE_BYTES)
        for host in self._far:
            lines[host].copy_(self._beside(arriving[host])[1])
        phase("wait for peers")
        self._wait(lane, COMBINE)
        if out is None:
            return
        phase("sum at home")
        config = self.config
        self._sum(homes[self._host], dtype, arriving[self._host])
        records = self._records(arriving.view(-1, self._sum_bytes), dtype)
        config.combine_backend.sum_records(records, self._sums_of_tokens[: len(out)], config.combine_wire, out)
        if of_tokens is not None:  # all but one host's are zero
            grads = [self._beside(message)[0] for message in arriving]
            torch.sum(torch.stack(grads)[:, : len(of_tokens)], 0, out=of_tokens)

    def _sum(self, home: Lane, dtype: torch.dtype, message: torch.Tensor) -> None:
        """Adds up this host's sums in a home, for tokens of a dtype, into the message of the home's rank."""
        config = self.config
        rows = torch.empty(config.max_tokens, config.hidden_size, dtype=torch.float32, device=self.device)
        self.kernels.sum_home(home, rows, self._beside(message)[0] if self._grad_bytes else None)
        rows = rows if config.combine_wire.quantized else rows.to(dtype)
        records = self._records(message[: config.max_tokens], dtype)
        config.combine_backend.pack_rows(rows, config.combine_wire, None, records)

    def _records(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows of a message as records of a dtype, which may be shorter."""
        return rows[:, : self.config.combine_wire.row_bytes(self.config.hidden_size, dtype)]

    def _beside(self, message: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views behind a message's records: float32 [max_tokens, top_k], and lines, uint8 [ranks of a host, bytes]."""
        behind = message[self.config.max_tokens :].view(-1)
        grads = behind[: self._grad_bytes].view(torch.float32).view(-1, self.config.top_k)
        size = len(self._here) * SIGNAL_LINE_BYTES
        return grads, behind[self._grad_bytes :][:size].view(-1, SIGNAL_LINE_BYTES)

    def timed_out(
        self, report: np.ndarray, lane: int | None = None, stuck: Collection[int] = (), advice: str = ""
    ) -> PeerTimeout:
        """As the direct transport has it, with the number of the round on its lane.

        For a rank of another host that is missing in dispatch its forwarder here is to blame, but for one that waits
        for the network itself, as it says.
        """
        report = report.copy()
        report[REPORT_EPOCH] %= 1 << _EPOCH_BITS
        to_blame, _, said = report[REPORT_PEERS:].reshape(3, self.world)
        if report[REPORT_PHASE] == DISPATCH:
            for rank, taker in enumerate(self.takers or ()):
                silent = to_blame[rank] and not said[rank]
                if silent and taker not in (rank, self.rank) and not said[taker] and taker not in stuck:
                    to_blame[rank], to_blame[taker] = 0, 1
        return super().timed_out(report, lane, stuck, advice)

    def crossing(self, d: Dispatched, phase: int) -> Traffic:
        """See `Rounds.crossing`. What is not in a record is beside them all: messages are as large in any round."""
        config, tokens, message = self.config, d._num_sent, self._tokens[0, 0]
        record_bytes = config.wire.row_bytes(config.hidden_size, d._dtype)
        if phase == COMBINE:
            tokens, message, record_bytes = config.max_tokens, self._sums_out[0, 0], self._sum_bytes
        sent = [tokens * (rank in self._rail) for rank in range(self.world)]
        return d._traffic(sent, record_bytes, len(self._far) * (message.numel() - tokens * record_bytes))

    @property
    def memory_bytes(self) -> int:
        """With the messages."""
        arriving = len(self._far) * self._tokens[:, 0].numel()  # lanes have those that leave
        return super().memory_bytes + arriving + self._sums_out.numel() + self._sums_here.numel()


def _home_of(lane: Lane, rank: int, shift: int) -> Lane:
    """Where the sums of a rank that is served here come home, as its kernel has its own."""
    layout = lane.layout
    grads = layout.WEIGHT_GRADS + shift if layout.WEIGHT_GRADS else 0
    return replace(lane, rank=rank, layout=replace(layout, SUMS=layout.SUMS + shift, WEIGHT_GRADS=grads))


def end_lines(lane: Lane) -> torch.Tensor:
    """The lines of a lane's combine phase, uint8 [world, bytes], where they are."""
    lines = lane.buffer[lane.layout.COMBINE_SIGNALS :][: lane.layout.WORLD * SIGNAL_LINE_BYTES]
    return lines.view(-1, SIGNAL_LINE_BYTES)


def write_end_lines(lane: Lane, first: int, out: torch.Tensor) -> None:
    """Copies the lines of a host's ranks, from a first one on.

    A rank whose wait has failed sends NaN. Its flag may be out already, and what it missed may have come since: so its
    own line says here that it is missing.
    """
    out.copy_(end_lines(lane)[first:][: len(out)])
    out[lane.rank - first].view(torch.int32)[SIGNAL_FLAG].sub_(lane.control[CONTROL_STATUS])
