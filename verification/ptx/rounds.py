"""Rounds of the direct transport on compiled kernels, all ranks' launches interleaved: nobody waits for a phase to end.

`tests.helpers.rounds` takes all ranks through a round phase by phase and looks at each step. Here ranks run ahead of
each other as far as the protocol lets them, and only what comes out at the end is compared with plain torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from tests.helpers.rounds import Tokens, arrivals, check_results, home_weight_grads, make_lanes
from tests.helpers.wires import assert_same_bits
from thinwire.moe.plan import ArrivalPlan
from thinwire.moe.received import experts_of
from thinwire.triton_kernels import combine, dispatch, permute
from thinwire.triton_kernels.codec_reference import dequantize_reference, quantize_reference
from thinwire.triton_kernels.launch import kept
from thinwire.triton_kernels.list_records import lane_of_records, list_records
from thinwire.triton_kernels.round_layout import COMBINE, DISPATCH, Lane
from thinwire.triton_kernels.signal import REPORT_STATUS, RUNNING
from verification.ptx.device import Device


@dataclass
class Round:
    """What one round takes and gives, a list of each rank's."""

    tokens: list[Tokens]
    closing: tuple[int, ...]
    weight_grads: list[torch.Tensor]
    gathered: list[torch.Tensor]
    results: list[torch.Tensor]
    home: list[torch.Tensor]
    by_record: bool


@dataclass
class Rounds:
    """Lanes of all ranks on a device, and the rounds that were queued on them.

    Attributes:
        timeout, grace: of every wait, in seconds of the device's clock.
        num_programs: of the kernels that send.
    """

    device: Device
    lanes: list[Lane]
    experts: torch.Tensor
    seed: int = 0
    num_programs: int | None = 2
    timeout: float = 1.0
    grace: float = 0.1
    rounds: list[Round] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        device: Device,
        world: int,
        *,
        num_experts: int = 4,
        top_k: int = 2,
        hidden: int = 64,
        max_tokens: int = 3,
        wire: str = "int8",
        weight_grads: bool = False,
        invariant: bool = False,
        seed: int = 0,
        num_programs: int | None = 2,
    ) -> Rounds:
        lanes = make_lanes(
            world, num_experts, top_k, hidden, max_tokens, wire, weight_grads=weight_grads, invariant=invariant
        )
        for lane in lanes:
            for name, value in vars(lane).items():
                if isinstance(value, torch.Tensor):
                    device.register(f"rank {lane.rank}'s {name}", value)
        experts = torch.randn(num_experts, hidden, generator=torch.Generator().manual_seed(seed))
        return cls(device, lanes, experts, seed, num_programs)

    def queue(
        self,
        closing: tuple[int, ...] = (),
        absent: tuple[int, ...] = (),
        dtype: torch.dtype = torch.bfloat16,
        counts: tuple[int, ...] | None = None,
        by_record: bool = False,
    ) -> Round:
        """Queues a round of all ranks but those that are absent.

        Args:
            closing: ranks that close the round instead of sending sums.
            counts: tokens of each rank; None: other ones in each round, none among them.
            by_record: experts get a row for each record, and weight themselves.
        """
        layout = self.lanes[0].layout
        generator = torch.Generator().manual_seed(100 * self.seed + len(self.rounds))
        counts = counts or tuple(
            (layout.MAX_TOKENS + rank - len(self.rounds)) % (layout.MAX_TOKENS + 1) for rank in range(layout.WORLD)
        )
        tokens = [
            Tokens.random(count, layout.HIDDEN, layout.TOP_K, layout.NUM_EXPERTS, dtype, generator) for count in counts
        ]
        round_ = Round(
            tokens,
            closing,
            [torch.randn(lane.weights.shape, generator=generator) for lane in self.lanes],
            [torch.full((lane.index.shape[0], layout.HIDDEN), 5.0, dtype=dtype) for lane in self.lanes],
            [torch.full_like(mine.x, 7.0) for mine in tokens],
            [torch.full(mine.ids.shape, 7.0) for mine in tokens],
            by_record,
        )
        for lane in self.lanes:
            if lane.rank not in absent:
                self.device.rank = lane.rank
                self._queue_rank(lane, round_)
        self.rounds.append(round_)
        return round_

    def _queue_rank(self, lane: Lane, round_: Round) -> None:
        rank, gathered = lane.rank, round_.gathered[lane.rank]
        mine, dtype = round_.tokens[rank], gathered.dtype
        grads = lane.layout.WEIGHT_GRADS > 0
        dispatch.send_tokens(lane, mine.x, mine.ids, mine.weights, self.num_programs)
        dispatch.wait(lane, DISPATCH, self.timeout, self.grace)
        permute.route(lane)
        of_rows = lane
        if round_.by_record:
            of_rows, shape = kept(lane, lane_of_records), (len(gathered), lane.layout.TOP_K)
            ids, weights, source = torch.full(shape, 7), torch.full(shape, 7.0), torch.full((len(gathered), 2), 7)
            list_records(lane, ids, weights, source)
            permute.gather(of_rows, gathered, torch.tensor(False), True)
            self.device.call(lambda: self._apply_by_record(lane, gathered, ids, weights))
        else:
            permute.gather(lane, gathered, torch.tensor(False))
            self.device.call(lambda: self._apply_experts(lane, gathered))
        if rank in round_.closing:
            dispatch.close_round(lane)
        else:
            combine.send_sums(of_rows, gathered, dtype, self.num_programs, round_.weight_grads[rank] if grads else None)
        dispatch.wait(lane, COMBINE, self.timeout, self.grace)
        combine.sum_home(lane, round_.results[rank], round_.home[rank] if grads else None)

    def _apply_experts(self, lane: Lane, rows: torch.Tensor) -> None:
        """The experts' work, on the stream, in place."""
        used = int(lane.expert_offsets[-1])
        rows[:used] = self._scaled(lane, rows[:used], lane.expert_offsets, lane.expert_counts)

    def _apply_by_record(self, lane: Lane, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """Each record's experts, weighted, in place; zero where there is none."""
        scales = self.experts[lane.layout.first_expert(lane.rank) + ids.clamp(min=0)] * (ids >= 0).unsqueeze(2)
        rows.copy_(rows.float() * (scales * weights.unsqueeze(2)).sum(1))

    def _scaled(self, lane: Lane, rows: torch.Tensor, offsets: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        scales = torch.zeros(rows.shape)
        first = lane.layout.first_expert(lane.rank)
        for expert, (start, count) in enumerate(zip(offsets.tolist(), counts.tolist(), strict=False)):
            scales[start : start + count] = self.experts[first + expert]
        return (rows.float() * scales).to(rows.dtype)

    def check(self) -> None:
        """Compares every round with plain torch, to the last bit."""
        for lane in self.lanes:
            assert lane.report[REPORT_STATUS] == RUNNING
        for round_ in self.rounds:
            plans, outputs = [], []
            for lane in self.lanes:
                slots, plan, rows = arrivals(lane, round_.tokens)
                if round_.by_record:
                    rows = dequantize_reference(
                        quantize_reference(rows, lane.wire), lane.wire, rows.shape[1], rows.dtype
                    )
                    self._apply_by_record(lane, rows, experts_of(plan.positions, plan.expert_offsets), plan.weights)
                    positions = torch.full_like(plan.positions, -1)
                    positions[:, 0] = torch.arange(len(rows))
                    plan = replace(plan, positions=positions, weights=torch.ones_like(plan.weights))
                plans.append((slots, plan))
                outputs.append(rows if round_.by_record else self._expert_out(lane, plan, rows))
            check_results(self.lanes, round_.tokens, plans, outputs, round_.results, round_.closing)
            if self.lanes[0].layout.WEIGHT_GRADS:
                expected = home_weight_grads(self.lanes, round_.tokens, round_.weight_grads, round_.closing)
                for came, got in zip(expected, round_.home, strict=True):
                    assert_same_bits("weight gradients", came.nan_to_num(0.0), got)

    def _expert_out(self, lane: Lane, plan: ArrivalPlan, rows: torch.Tensor) -> torch.Tensor:
        """What this rank's experts make of the rows that it gets, [rows, hidden] in the order of the lane's index."""
        hidden, out = lane.layout.HIDDEN, torch.zeros(plan.num_rows, lane.layout.HIDDEN, dtype=rows.dtype)
        records = quantize_reference(rows, lane.wire)
        out[plan.rows] = dequantize_reference(records, lane.wire, hidden, rows.dtype)[plan.index]
        return self._scaled(lane, out, plan.expert_offsets, plan.expert_counts)
