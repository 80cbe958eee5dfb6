"""Rounds over two levels on GPUs: each rank and those of its place on other hosts exchange messages of a fixed size.

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
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from thinwire.comm.memory.symmetric import SymmetricMemory
from thinwire.errors import PeerTimeout, RoutingError
from thinwire.fused.direct_transport import compiled_for
from thinwire.moe.config import ParallelConfig
from thinwire.moe.direct import row_like
from thinwire.moe.direct_gradients import BackwardRounds
from thinwire.moe.dispatched import Dispatched
from thinwire.moe.two_level_lanes import EXACT, TwoLevelLanes, TwoLevelTraffic
from thinwire.triton_kernels.forward import forward_tokens
from thinwire.triton_kernels.launch import kept
from thinwire.triton_kernels.round_layout import COMBINE, DISPATCH, Lane, RoundLayout
from thinwire.triton_kernels.signal import CONTROL_EPOCH, CONTROL_STATUS, REPORT_EPOCH, SIGNAL_FLAG, SIGNAL_LINE_BYTES
from thinwire.wire import Traffic

_EPOCH_BITS = 24  # of a lane's epochs, until one could be another's


class RailRounds(TwoLevelLanes):
    """The legs of these rounds."""

    forwarded_phases = (DISPATCH,)

    def __init__(self, config: ParallelConfig, layout: RoundLayout, memory: SymmetricMemory, reason: str) -> None:
        super().__init__(config, layout, memory, reason)
        hosts, lanes, device = config.comm.hosts, config.lanes, self.device
        far = [number for number in range(len(hosts)) if number != self.host]
        self._rails = dict(zip(self.served[1:], far, strict=True))  # who serves this rank there, and whom it serves
        self._members = hosts[self.host]
        size = layout.MESSAGE_RECORDS + config.max_tokens * layout.RECORD_BYTES
        leaving, *arriving = (torch.zeros(lanes, size, dtype=torch.int8, device=device) for _ in hosts)
        self._tokens_here = dict(zip(self._rails, arriving, strict=True))
        # A message of sums: records, and in the room of some more the gradients of weights, and the host's lines.
        self._sum_bytes = config.combine_wire.row_bytes(config.hidden_size, config.dtype or torch.float32)
        self._grad_bytes = 4 * config.max_tokens * config.top_k if layout.WEIGHT_GRADS else 0
        beside = self._grad_bytes + len(self._members) * SIGNAL_LINE_BYTES
        rows = config.max_tokens + -(-beside // self._sum_bytes)
        shape = lanes, len(hosts), rows, self._sum_bytes
        self._sums_out, self._sums_here = (torch.zeros(shape, dtype=torch.uint8, device=device) for _ in range(2))
        tokens = torch.arange(config.max_tokens, device=device).unsqueeze(1)
        self._sums_of_tokens = tokens + rows * torch.arange(len(hosts), device=device)
        self.lanes = [replace(lane, message=message) for lane, message in zip(self.lanes, leaving, strict=True)]
        self._ends = [kept(lane, _with_exact_sums) for lane in self.lanes]
        self._homes = [
            {rank: self._home_of(lane, place) for place, rank in enumerate(self.served)} for lane in self._ends
        ]
        self._dtypes = [config.dtype or torch.float32] * lanes  # of the tokens of each lane's round
        for number, lane in enumerate(self.lanes):  # nobody has written to them yet
            first = (2 * number + isinstance(self, BackwardRounds)) % 128 << _EPOCH_BITS
            lane.control[CONTROL_EPOCH] += first
            lines = lane.buffer[layout.SIGNALS :][: 2 * self.world * SIGNAL_LINE_BYTES].view(torch.int32)
            lines.view(2 * self.world, -1)[:, SIGNAL_FLAG] += first
        self.finish_stream()  # as in `DirectLanes`

    def _home_of(self, lane: Lane, place: int) -> Lane:
        """Where the sums of a rank that is served here come home, as its kernel has its own."""
        layout, shift = lane.layout, place * self.home_bytes
        grads = layout.WEIGHT_GRADS + shift if layout.WEIGHT_GRADS else 0
        layout = replace(layout, SUMS=layout.SUMS + shift, WEIGHT_GRADS=grads)
        return replace(lane, rank=self.served[place], layout=layout)

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

    def _round(self, lane: int, x: torch.Tensor) -> Dispatched:
        return _Round(self, lane, x)

    def _launch_each(self, *sends: Any) -> None:
        super()._launch_each(*sends)
        for rank, message in self._tokens_here.items():
            forward_tokens(self._idle_lane(), message[0], rank, sends[0].dtype, self.config.num_programs)

    def _launch_combine(self, expert_out: torch.Tensor, dtype: torch.dtype, out: torch.Tensor) -> None:
        config, idle, rows = self.config, replace(self._idle_lane(), combine_wire=EXACT), self._empty_sums()[:1]
        grads = idle.weights if idle.layout.WEIGHT_GRADS else None
        self.kernels.send_sums(idle, expert_out, torch.float32, config.num_programs, grads)
        for home in self._homes[0].values():
            self.kernels.sum_home(replace(home, control=idle.control), rows, None if grads is None else grads[:1])
        records = torch.empty_like(self._sums_out[0, 0, :1])[:, : self._row_bytes(dtype)]
        config.combine_backend.pack_rows(self._rounded(rows, dtype), config.combine_wire, None, records)
        none = torch.full_like(self._sums_of_tokens[:1], -1)
        config.combine_backend.sum_records(records, none, config.combine_wire, row_like(out))

    def _empty_sums(self) -> torch.Tensor:
        return torch.empty(self.config.max_tokens, self.config.hidden_size, dtype=torch.float32, device=self.device)

    def _rounded(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return rows if self.config.combine_wire.quantized else rows.to(dtype)

    def _row_bytes(self, dtype: torch.dtype) -> int:
        return self.config.combine_wire.row_bytes(self.config.hidden_size, dtype)

    def _post_tokens(self, lane: int) -> Callable[[], None]:
        tensors, arriving = self.lanes[lane], {rank: here[lane] for rank, here in self._tokens_here.items()}
        wait = self._exchange(dict.fromkeys(arriving, tensors.message), arriving, f"dispatch on lane {lane}")

        def forward() -> None:
            wait()
            self.config.comm.recorder.phase("forward")
            for rank, message in arriving.items():
                forward_tokens(tensors, message, rank, self._dtypes[lane], self.config.num_programs)

        return forward

    def _exchange(
        self, sends: Mapping[int, torch.Tensor | None], receives: Mapping[int, torch.Tensor], leg: str
    ) -> Callable[[], None]:
        """Bytes to and from the rails. What is returned waits: on a GPU the stream does."""
        comm = self.config.comm

        def by_rank(given: Mapping[int, torch.Tensor | None]) -> list[torch.Tensor | None]:
            found = [given.get(rank) for rank in range(comm.size)]
            return [None if buffer is None else buffer.view(-1).view(torch.uint8) for buffer in found]

        posted = comm.post(by_rank(sends), by_rank(receives), f"{leg} of {self.config.num_experts} experts")

        def wait() -> None:
            posted.wait()
            self.require_not_closed()

        return wait

    def refuse(self, lane: int, why: int) -> None:
        """All ranks find a mismatch, also those of other hosts; on the CPU, see `ExpertParallel.refuse`."""
        super().refuse(lane, why)
        self._post_tokens(lane)()

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
        """Launches float32 sums to their homes on this host; the wait brings them to where they belong."""
        self.raise_failure(lane)
        config, (of_experts, of_tokens) = self.config, weight_grads or (None, None)
        expert_out = self.as_floats(expert_out)
        if self.on_gpu:
            key = "combine", dtype, *compiled_for(expert_out, out)
            self.load_kernels(key, lambda: self._launch_combine(expert_out, dtype, out), lane)
        self.take_turn(lane)
        config.comm.recorder.phase("sum and store")
        end = kept(self.lanes[lane] if tensors is None else tensors, _with_exact_sums)
        self.kernels.send_sums(end, expert_out, torch.float32, config.num_programs, of_experts)
        self._open[lane] = False
        return lambda: self._bring_home(lane, out, of_tokens)

    def close_round(self, lane: int, end: int) -> None:
        self.raise_failure(lane)
        if self.on_gpu:
            self.count_call(lane)
        self.take_turn(lane)
        self.kernels.close_round(self.lanes[lane], end)
        self._open[lane] = False
        self._bring_home(lane, None, None)

    def _bring_home(self, lane: int, out: torch.Tensor | None, of_tokens: torch.Tensor | None) -> None:
        phase = self.config.comm.recorder.phase
        phase("wait for peers")
        with contextlib.suppress(RoutingError):  # of a rank that left the round open: the second wait finds it, too
            self._wait(lane, COMBINE)
        phase("sum for other hosts")
        hosts, lines = self.config.comm.hosts, end_lines(self.lanes[lane])
        for rank, host in self._rails.items():
            self._sum(lane, rank, self._sums_out[lane, host])
            write_end_lines(self.lanes[lane], self._members[0], self._beside(self._sums_out[lane, host])[1])
        self._exchange_sums(lane)
        for host in self._rails.values():
            lines[hosts[host][0] :][: len(hosts[host])].copy_(self._beside(self._sums_here[lane, host])[1])
        phase("wait for peers")
        self._wait(lane, COMBINE)
        if out is None:
            return
        phase("sum at home")
        config, own = self.config, self._sums_here[lane, self.host]
        self._sum(lane, self.rank, own)
        records = self._sums_here[lane].view(-1, self._sum_bytes)[:, : self._row_bytes(self._dtypes[lane])]
        config.combine_backend.sum_records(records, self._sums_of_tokens[: len(out)], config.combine_wire, out)
        if of_tokens is not None:  # all but one host's are zero
            grads = [self._beside(sums)[0] for sums in self._sums_here[lane]]
            torch.sum(torch.stack(grads)[:, : len(of_tokens)], 0, out=of_tokens)

    def _sum(self, lane: int, rank: int, message: torch.Tensor) -> None:
        """Adds up this host's sums of a rank that is served here, into its message."""
        config, dtype, rows = self.config, self._dtypes[lane], self._empty_sums()
        self.kernels.sum_home(self._homes[lane][rank], rows, self._beside(message)[0] if self._grad_bytes else None)
        records = message[: config.max_tokens, : self._row_bytes(dtype)]
        config.combine_backend.pack_rows(self._rounded(rows, dtype), config.combine_wire, None, records)

    def _beside(self, message: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What is behind a message's records: float32 [max_tokens, top_k], and lines, uint8 [members, bytes]."""
        behind = message[self.config.max_tokens :].view(-1)
        grads = behind[: self._grad_bytes].view(torch.float32).view(-1, self.config.top_k)
        size = len(self._members) * SIGNAL_LINE_BYTES
        return grads, behind[self._grad_bytes :][:size].view(-1, SIGNAL_LINE_BYTES)

    def _exchange_sums(self, lane: int) -> None:
        leaving, arriving = (
            {rank: sums[lane, host] for rank, host in self._rails.items()} for sums in (self._sums_out, self._sums_here)
        )
        self._exchange(leaving, arriving, f"combine on lane {lane}")()

    def timed_out(
        self, report: np.ndarray, lane: int | None = None, stuck: Collection[int] = (), advice: str = ""
    ) -> PeerTimeout:
        """See `TwoLevelLanes`; with the number of the round on its lane."""
        report = report.copy()
        report[REPORT_EPOCH] %= 1 << _EPOCH_BITS
        return super().timed_out(report, lane, stuck, advice)

    @property
    def memory_bytes(self) -> int:
        """With the messages."""
        messages = [self._sums_out, self._sums_here, *self._tokens_here.values()]
        return super().memory_bytes + sum(message.numel() for message in messages)


def _with_exact_sums(lane: Lane) -> Lane:
    """The lane on which sums are float32: one for all rounds, to be `kept`, as it keeps launchers itself."""
    return replace(lane, combine_wire=EXACT)


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


class RailBackward(RailRounds, BackwardRounds):
    """Those on which gradients travel."""


class _Round(TwoLevelTraffic):
    _rounds: RailRounds

    def _far_dispatch(self) -> Traffic:
        rounds = self._rounds
        sent = [self._num_sent * (rank in rounds._rails) for rank in range(rounds.world)]
        record_bytes = rounds.config.wire.row_bytes(rounds.config.hidden_size, self._dtype)
        room = sum(message[0].numel() for message in rounds._tokens_here.values())
        return self._traffic(sent, record_bytes, room - sum(sent) * record_bytes)

    def _far_combine(self) -> Traffic:
        rounds = self._rounds
        sent = [rounds.config.max_tokens * (rank in rounds._rails) for rank in range(rounds.world)]
        beside = len(rounds._rails) * rounds._sums_out[0, 0].numel() - sum(sent) * rounds._sum_bytes
        return self._traffic(sent, rounds._sum_bytes, beside)
