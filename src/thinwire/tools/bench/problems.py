"""Collectives to be solved: what every rank sends, what must arrive, and how far that may be off.

A problem is made alike on all ranks, which compute each other's inputs: nothing that is checked was sent by what is
checked. `size_bytes` is nccl-tests' size of the operation: the buffer of a rank, for all_gather and reduce_scatter the
one that holds all ranks' parts. `logical_bytes` is what has to leave this rank if nothing is quantised: the size times
(n - 1) / n, for all_reduce twice that, and in all_to_all_v the rows that change ranks. So logical bytes by time is
nccl-tests' bus bandwidth.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache, cached_property

import torch

from thinwire.comm import Communicator
from thinwire.fused.partition import gathered_parts, split_parts
from thinwire.tools.bench import checks
from thinwire.tools.bench.checks import Verdict
from thinwire.tools.bench.traffic import Integers
from thinwire.wire import WireFormat

#: Length of the table that all values come from: prime, so that rows in a wrong place have other values.
_TABLE = 1_048_583
_STEP = 400_009


@cache
def _table(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(_TABLE, generator=torch.Generator().manual_seed(1), dtype=torch.float32, device="cpu").to(
        device, dtype
    )


def values(rank: int, count: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Gaussian values [count] that a rank has, the same wherever they are computed."""
    table, start = _table(device, dtype), rank * _STEP % _TABLE
    pieces, missing = [], count
    while missing > 0:
        pieces.append(table[start : start + missing])
        missing, start = missing - len(pieces[-1]), 0
    return torch.cat(pieces) if pieces else table[:0].clone()


class Problem(ABC):
    """One operation at one size, on one rank.

    Attributes:
        operation: its name.
        x: what this rank gives.
        out: where contenders leave the result.
        rows: of this rank, and `width` elements of each.
        skew: rows of the busiest receiver by the mean; None where all get the same.
    """

    operation: str
    x: torch.Tensor
    out: torch.Tensor
    size_bytes: int
    logical_bytes: float
    rows: int
    skew: float | None = None

    def __init__(self, comm: Communicator, dtype: torch.dtype) -> None:
        self.comm, self.dtype = comm, dtype

    def values(self, rank: int, *shape: int) -> torch.Tensor:
        """What a rank gives, in the problem's dtype."""
        return values(rank, torch.Size(shape).numel(), self.comm.device, self.dtype).view(shape)

    @abstractmethod
    def judge(self, got: torch.Tensor, wire: WireFormat) -> Verdict:
        """Of rows that travelled in a format, in its own groups."""


class AllToAll(Problem):
    """all_to_all_v: `counts[i][j]` rows from rank i to rank j."""

    operation = "all_to_all_v"

    def __init__(self, comm: Communicator, dtype: torch.dtype, counts: Integers, width: int, skew: float) -> None:
        super().__init__(comm, dtype)
        self.counts, self.width, self.skew = counts, width, skew
        self.send_counts, self.recv_counts = counts[comm.rank].tolist(), counts[:, comm.rank].tolist()
        self.rows = sum(self.send_counts)
        self.x = self.values(comm.rank, self.rows, width)
        self.out = self.x.new_empty(sum(self.recv_counts), width)
        self.size_bytes = int(counts.sum(1).max()) * width * self.x.itemsize
        self.leaving = self.rows - self.send_counts[comm.rank]
        self.logical_bytes = self.leaving * width * self.x.itemsize

    @cached_property
    def exact(self) -> torch.Tensor:
        parts = []
        for rank, counts in enumerate(self.counts.tolist()):
            before = sum(counts[: self.comm.rank])
            parts.append(self.values(rank, sum(counts), self.width)[before : before + counts[self.comm.rank]])
        return torch.cat(parts)

    def judge(self, got: torch.Tensor, wire: WireFormat) -> Verdict:
        return checks.compare(got, self.exact, moved_bound(self.exact, wire))


class AllGather(Problem):
    """all_gather of as many elements from every rank."""

    operation = "all_gather"

    def __init__(self, comm: Communicator, dtype: torch.dtype, size_bytes: int) -> None:
        super().__init__(comm, dtype)
        self.share = max(1, size_bytes // dtype.itemsize // comm.size)
        self.rows = self.share
        self.x = self.values(comm.rank, self.share)
        self.out = self.x.new_empty(comm.size * self.share)
        self.size_bytes = self.out.nbytes
        self.logical_bytes = self.x.nbytes * (comm.size - 1)

    def judge(self, got: torch.Tensor, wire: WireFormat) -> Verdict:
        exact = torch.cat([self.values(rank, self.share) for rank in range(self.comm.size)])
        parts, row = gathered_parts([self.share] * self.comm.size)
        if not wire.quantized:
            return checks.compare(got, exact, 0.0)
        error = checks.wire_bound(exact, checks.flat_scales(exact, parts.counts, row, wire), wire)
        return checks.compare(got, exact, error + checks.rounding(exact.float().abs() + error, self.dtype))


class Sum(Problem):
    """reduce_scatter and all_reduce: each rank's elements, summed."""

    #: Whether the sums travel again.
    gathers = False

    @abstractmethod
    def parts_of(self) -> tuple[list[int], int]:
        """Elements of each rank's part of the whole, and of a row."""

    def __init__(self, comm: Communicator, dtype: torch.dtype, elements: int) -> None:
        super().__init__(comm, dtype)
        self.elements = self.rows = elements
        self.x = self.values(comm.rank, elements)
        self.size_bytes = self.x.nbytes
        self.own = slice(0, elements)

    @cached_property
    def _sums(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of all elements: in float64, in float32 in ascending rank, and of the magnitudes."""
        exact = torch.zeros(self.elements, dtype=torch.float64, device=self.comm.device)
        ascending, magnitudes = exact.float(), exact.float()
        for rank in range(self.comm.size):
            x = self.values(rank, self.elements)
            exact += x
            ascending += x
            magnitudes += x.abs()
        return exact, ascending, magnitudes

    def judge(self, got: torch.Tensor, wire: WireFormat) -> Verdict:
        exact, ascending, _ = self._sums
        if wire.quantized:
            return self.judge_quantized(got, wire, *self.parts_of())
        # Sums in float32 in ascending rank, rounded once, to the last bit; the error is that to the exact sum.
        found = checks.compare(got, exact[self.own], 0.0)
        return found._replace(wrong=checks.compare(got, ascending.to(self.dtype)[self.own], 0.0).wrong)

    def judge_quantized(self, got: torch.Tensor, wire: WireFormat, counts: list[int], row: int) -> Verdict:
        """Of sums of quantised elements, in parts of so many elements, rows of so many within a part."""
        exact, _, magnitudes = self._sums
        bound = checks.float32_slack(self.comm.size, magnitudes)
        for rank in range(self.comm.size):
            x = self.values(rank, self.elements).float()
            bound += checks.wire_bound(x, checks.flat_scales(x, counts, row, wire), wire)
        largest = exact.float().abs() + bound
        if self.gathers:
            bound += checks.wire_bound(largest, checks.flat_scales(largest, counts, row, wire), wire)
            largest = exact.float().abs() + bound
        bound += checks.rounding(largest, self.dtype)
        return checks.compare(got, exact[self.own], bound[self.own])

    def judge_rounded(self, got: torch.Tensor) -> Verdict:
        """Of sums in any order, each rounded to the dtype of what came out."""
        exact, _, magnitudes = self._sums
        bound = checks.rounding(magnitudes, got.dtype) * self.comm.size
        return checks.compare(got, exact[self.own], bound[self.own])


class ReduceScatter(Sum):
    """reduce_scatter of as many elements for every rank."""

    operation = "reduce_scatter"

    def __init__(self, comm: Communicator, dtype: torch.dtype, size_bytes: int) -> None:
        self.share = max(1, size_bytes // dtype.itemsize // comm.size)
        super().__init__(comm, dtype, self.share * comm.size)
        self.out = self.x.new_empty(self.share)
        self.own = slice(comm.rank * self.share, (comm.rank + 1) * self.share)
        self.logical_bytes = self.out.nbytes * (comm.size - 1)

    def parts_of(self) -> tuple[list[int], int]:
        parts, row = gathered_parts([self.share] * self.comm.size)
        return parts.counts, row


class AllReduce(Sum):
    """all_reduce of any number of elements."""

    operation = "all_reduce"
    gathers = True

    def __init__(self, comm: Communicator, dtype: torch.dtype, size_bytes: int) -> None:
        super().__init__(comm, dtype, max(1, size_bytes // dtype.itemsize))
        self.out = torch.empty_like(self.x)
        self.logical_bytes = 2 * (comm.size - 1) / comm.size * self.x.nbytes

    def parts_of(self) -> tuple[list[int], int]:
        parts, row = split_parts(self.elements, self.comm.size)
        return parts.counts, row


def moved_bound(rows: torch.Tensor, wire: WireFormat) -> torch.Tensor | float:
    """How far rows [rows, width] may be off once they have travelled in a format, and were rounded to their dtype."""
    if not wire.quantized:
        return 0.0
    error = checks.wire_bound(rows, checks.row_scales(rows, wire), wire)
    return error + checks.rounding(rows.float().abs() + error, rows.dtype)
