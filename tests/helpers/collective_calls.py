"""Calls of the direct collectives: what goes in, the launches of one rank, and what plain torch makes of it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from thinwire.triton_kernels.codec_reference import (
    dequantize_reference,
    quantize_reference,
    round_reference,
    row_reference,
    scaled_reference,
)
from thinwire.triton_kernels.collective import gather_recv, reduce, send
from thinwire.triton_kernels.leg_layout import ALL_GATHER, REDUCE_SCATTER, Endpoint, Job
from thinwire.triton_kernels.small_collective import in_one_launch
from thinwire.wire import WireFormat

ROW = 128


@dataclass(frozen=True)
class Call:
    """A call, the same on all ranks: elements of each rank's part, with as many as `gap` between parts and before.

    Of every three runs of `zeros` elements the first is zero on all ranks. With `at_once` the whole call is one launch.
    """

    op: int
    counts: tuple[int, ...]
    wire: str = "int8"
    gather_wire: str = "int8"
    dtype: torch.dtype = torch.float32
    row: int = ROW
    rows_per_chunk: int = 2
    gap: int = 0
    in_place: bool = False
    num_programs: int | None = None
    seed: int = 0
    zeros: int = 0
    out_dtype: torch.dtype | None = None
    at_once: bool = False

    @property
    def starts(self) -> list[int]:
        """Where the parts begin in the whole tensor."""
        ends = accumulate(count + self.gap for count in self.counts)
        return [end - count for end, count in zip(ends, self.counts, strict=True)]

    def job(self) -> Job:
        """What the kernels are told."""
        return Job(
            op=self.op,
            signature=(self.op, self.seed, -sum(self.counts), 2**62 + self.gap),
            parts=torch.tensor([list(self.counts), self.starts]),
            most_rows=-(-max(self.counts) // self.row),
            row=self.row,
            wire=WireFormat.parse(self.wire),
            gather_wire=WireFormat.parse(self.gather_wire),
            dtype=self.dtype,
            rows_per_chunk=self.rows_per_chunk,
            out_dtype=self.out_dtype,
        )

    def inputs(self) -> list[torch.Tensor]:
        """What each rank's whole tensor holds: of an all-gather its own part counts only."""
        generator = torch.Generator().manual_seed(self.seed)
        size = sum(self.counts) + self.gap * (len(self.counts) + 1)
        every = [(100 * torch.randn(size, generator=generator)).to(self.dtype) for _ in self.counts]
        if size > 400:  # in shorter ones NaN would hide too much
            every[-1][3], every[0][size - 1 - self.gap], every[0][7:11] = float("nan"), float("inf"), -0.0
        if self.zeros:
            for x in every:
                x[torch.arange(size) // self.zeros % 3 == 0] = 0.0
        return every

    def rows(self, x: torch.Tensor, part: int) -> torch.Tensor:
        """The rows of a part of a whole tensor, [rows, row], the last one filled up with zeros."""
        count, start = self.counts[part], self.starts[part]
        rows = torch.zeros(-(-count // self.row) * self.row, dtype=self.dtype)
        rows[:count] = x[start : start + count]
        return rows.view(-1, self.row)

    def sums(self, part: int) -> torch.Tensor:
        """Rows of the sums of a part, float32."""
        wire = WireFormat.parse(self.wire)
        total = torch.zeros(-(-self.counts[part] // self.row), wire.columns(self.row))
        for x in self.inputs():
            records = quantize_reference(self.rows(x, part), wire)
            total = total + scaled_reference(records, wire, self.row, self.dtype)
        largest, total = torch.finfo(torch.float32).max, row_reference(total, wire, self.row)
        return total.clamp(-largest, largest) if wire.quantized else total

    def gathered(self, part: int) -> torch.Tensor:
        """Records of the gathered rows of a part."""
        gather_wire, quantized = WireFormat.parse(self.gather_wire), self.wire != "none"
        if self.op == ALL_GATHER:
            return quantize_reference(self.rows(self.inputs()[part], part), gather_wire)
        sums = self.sums(part)
        if self.gather_wire == "none":
            sums = round_reference(sums, self.dtype, saturate=quantized)
        return quantize_reference(sums, gather_wire)

    def result(self, rank: int, out: torch.Tensor) -> torch.Tensor:
        """What becomes of `out`: of its elements outside of the parts nothing."""
        out = out.clone()
        if self.op == REDUCE_SCATTER:
            sums = round_reference(self.sums(rank), out.dtype, saturate=self.wire != "none")
            out[:] = sums.view(-1)[: self.counts[rank]]
            return out
        for part, (count, start) in enumerate(zip(self.counts, self.starts, strict=True)):
            rows = dequantize_reference(self.gathered(part), WireFormat.parse(self.gather_wire), self.row, self.dtype)
            out[start : start + count] = rows.reshape(-1)[:count]
        return out

    def tensors(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What a rank gives: input and output."""
        x = self.inputs()[rank]
        own = slice(self.starts[rank], self.starts[rank] + self.counts[rank])
        if self.op == ALL_GATHER:
            out = x if self.in_place else torch.full_like(x, 7)
            return x[own] if self.in_place else x[own].clone(), out
        if self.op == REDUCE_SCATTER:
            return x, x[own] if self.in_place else torch.full_like(x[own], 7, dtype=self.out_dtype)
        return x, x if self.in_place else torch.full_like(x, 7)

    def launch(self, end: Endpoint, job: Job, x: torch.Tensor, out: torch.Tensor, timeout: float, grace: float) -> None:
        """All chunks of the call on one rank's end; `timeout` and `grace` in seconds."""
        if self.at_once:
            in_one_launch(end, job, x, out, timeout, grace, self.num_programs or 1)
            return
        for chunk in range(job.num_chunks):
            send(end, job, x, chunk, self.num_programs)
            if job.op != ALL_GATHER:
                sums = out if job.op == REDUCE_SCATTER else None
                reduce(end, job, sums, chunk, timeout, grace, self.num_programs)
            if job.op != REDUCE_SCATTER:
                gather_recv(end, job, out, chunk, timeout, grace, self.num_programs)
