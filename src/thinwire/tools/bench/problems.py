"""What is to be solved: what every rank gives, what must arrive, and how far that may be off.

A problem is made alike on all ranks, which compute each other's inputs: nothing that is checked was sent by what is
checked. `size_bytes` is nccl-tests' size of a collective: the buffer of a rank, for all_gather and reduce_scatter the
one that holds all ranks' parts; of a round, a rank's tokens. `logical_bytes` is what has to leave this rank if nothing
is quantised, so that logical bytes by time is nccl-tests' bus bandwidth: the size times (n - 1) / n, for all_reduce
twice that, in all_to_all_v the rows that change ranks, and in a round a row for each token and other rank that owns one
of its experts, on each leg.

Over `none` what is moved arrives bit for bit, and sums are in float32 in ascending rank, to the last bit. A quantised
element may be off by what `thinwire.wire` promises for its scale `s`: `s * (1/2 + 2**-15)` for the integer formats,
half a unit of e4m3 for fp8; and by the last rounding to the tensor's dtype. What is summed may be off by the sum of its
summands' bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from thinwire.comm import Communicator
from thinwire.fused.partition import gathered_parts, split_parts
from thinwire.tools.bench.options import ROUND
from thinwire.tools.bench.traffic import Integers, expert_load, first_experts, rows_between, skew_of
from thinwire.wire import BLOCK, WireFormat

#: Length of the table that all values come from: prime, so that rows in a wrong place have other values.
_TABLE, _STEP = 1_048_583, 400_009
#: Elements that are compared at once, so that a check takes little memory.
_AT_ONCE = 1 << 22
_E4M3_RELATIVE, _E4M3_LEAST = 2**-4 * (1 + 2**-6), 2**-10
#: Of float32 sums and products, for each summand; more than any order of them loses.
_FLOAT32_SLACK = 2**-22


class Verdict(NamedTuple):
    """What a check found on one rank: elements outside their bound, NaN included; and the sums of squares of the
    differences to the exact result, and of that."""

    wrong: int
    error_squares: float
    squares: float


def compare(
    got: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor | float, index: torch.Tensor | None = None
) -> Verdict:
    """Compares elements with the exact ones, in float64.

    Args:
        got: [rows, ...] or flat.
        exact: of the same shape; with `index`, int64 [rows], rows of which `got` must be those.
        bound: how far each may be off, broadcast against `exact`.
    """
    rows = exact.shape[0] if index is None else index.shape[0]
    if got.shape != (rows, *exact.shape[1:]):
        return Verdict(max(rows * exact[:1].numel(), got.numel(), 1), float("nan"), 1.0)
    bounds = torch.as_tensor(bound, device=exact.device).expand(exact.shape)
    wrong, error_squares, squares = 0, 0.0, 0.0
    step = max(1, _AT_ONCE // max(1, exact[:1].numel()))
    for start in range(0, rows, step):
        part = slice(start, start + step)
        where = part if index is None else index[part]
        wanted = exact[where].double()
        difference = (got[part].double() - wanted).abs()
        wrong += int((~(difference <= bounds[where].double())).sum())
        error_squares += float(difference.square().sum())
        squares += float(wanted.square().sum())
    return Verdict(wrong, error_squares, squares)


def wire_bound(x: torch.Tensor, wire: WireFormat, counts: Sequence[int] = (), row: int = 0) -> torch.Tensor:
    """Returns how far elements may be off in float32 once they were quantised.

    `x` is [rows, width]; or flat, cut into parts of `counts` elements, and each part into rows of `row`.
    """
    if x.dim() == 1:
        parts = [F.pad(part, (0, -len(part) % row)).view(-1, row) for part in x.split(list(counts))]
        bounds = [wire_bound(rows, wire).view(-1)[:count] for rows, count in zip(parts, counts, strict=True)]
        return torch.cat(bounds)
    rows, width = x.shape
    group = wire.group or wire.columns(width)
    magnitudes = F.pad(x.float().abs(), (0, -width % group))
    if wire.rotated:  # no element exceeds the sum of its block's magnitudes
        blocks = magnitudes.view(rows, magnitudes.shape[1] // BLOCK, BLOCK)
        magnitudes = blocks.sum(-1).repeat_interleave(BLOCK, -1)
    scales = magnitudes.view(rows, magnitudes.shape[1] // group, group).amax(-1) * (1 / wire.qmax)
    scales = scales if wire.row_scale else scales.bfloat16().float()
    scales = scales.repeat_interleave(group, -1)[:, :width]
    if wire.name == "fp8":
        return torch.maximum(x.float().abs() * _E4M3_RELATIVE, scales * _E4M3_LEAST)
    return scales * (0.5 + wire.qmax * 2.0**-22)


def moved_bound(x: torch.Tensor, wire: WireFormat, counts: Sequence[int] = (), row: int = 0) -> torch.Tensor | float:
    """Returns how far elements may be off once they are rounded to their dtype, too; 0 where nothing is quantised."""
    if not wire.quantized:
        return 0.0
    error = wire_bound(x, wire, counts, row)
    return error + _rounding(x.float().abs() + error, x.dtype)


def _rounding(magnitudes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns what the last rounding to a dtype may add to results of such magnitudes."""
    return magnitudes.abs() * (torch.finfo(dtype).eps / 2)


@cache
def _table(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    drawn = torch.randn(_TABLE, generator=torch.Generator().manual_seed(1), dtype=torch.float32, device="cpu")
    return drawn.to(device, dtype)


def values(rank: int, count: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Gaussian values [count] that a rank has, the same wherever they are computed."""
    table = _table(device, dtype).roll(-(rank * _STEP % _TABLE))
    return table.repeat(-(-count // _TABLE))[:count]


class Collective:
    """A collective at one size, on one rank.

    Attributes:
        x: what this rank gives; `out` is where the result is to be left.
        rows: of this rank, which are elements but in all_to_all_v; `counted` says what they are.
        skew: rows of the busiest receiver by the mean; None where all get the same.
        logical_bytes: by operation, which here is one.
        copied: shape of the tensor that a copy for comparison has.

    Args:
        size_bytes: of all but all_to_all_v, which has `counts` [ranks, ranks], rows from rank i to rank j, and `width`
            elements of a row.
    """

    def __init__(
        self,
        comm: Communicator,
        dtype: torch.dtype,
        operation: str,
        size_bytes: int = 0,
        counts: Integers | None = None,
        width: int = 1,
    ) -> None:
        self.comm, self.dtype, self.operation, self.counts, self.width = comm, dtype, operation, counts, width
        rank, ranks = comm.rank, comm.size
        self.operations, self.counted = (operation,), "elements" if counts is None else "rows"
        self._parts: tuple[list[int], int] = ([], 0)
        self.skew: float | None = None
        if counts is not None:
            self.send_counts, self.recv_counts = counts[rank].tolist(), counts[:, rank].tolist()
            self._given = [torch.Size((rows, width)) for rows in counts.sum(1).tolist()]
            self.rows, got = self._given[rank][0], torch.Size((sum(self.recv_counts), width))
            self.size_bytes = int(counts.sum(1).max()) * width * dtype.itemsize
            logical = (self.rows - self.send_counts[rank]) * width * float(dtype.itemsize)
            self.skew = skew_of(counts.sum(0).tolist())
        else:
            elements = max(1, size_bytes // dtype.itemsize)
            share = max(1, elements // ranks)
            whole = elements if operation == "all_reduce" else share * ranks
            self.rows = share if operation == "all_gather" else whole
            got = torch.Size([share if operation == "reduce_scatter" else whole])
            self._given = [torch.Size([self.rows])] * ranks
            parts, row = split_parts(whole, ranks) if operation == "all_reduce" else gathered_parts([share] * ranks)
            self._parts = parts.counts, row
            self.size_bytes = whole * dtype.itemsize
            legs = 2 if operation == "all_reduce" else 1
            logical = legs * (ranks - 1) / ranks * self.size_bytes
            self._own = slice(rank * share, (rank + 1) * share) if operation == "reduce_scatter" else slice(None)
        self.logical_bytes, self.copied = {operation: logical}, (self.size_bytes // dtype.itemsize,)
        self.x = self._values(rank)
        self.out = self.x.new_empty(got)

    def _values(self, rank: int) -> torch.Tensor:
        """Computes what a rank gives."""
        shape = self._given[rank]
        return values(rank, shape.numel(), self.comm.device, self.dtype).view(shape)

    def wire_bytes(self, wire: WireFormat) -> float:
        """Bytes of records that leave this rank."""
        rank, others = self.comm.rank, self.comm.size - 1
        if not wire.quantized and self.operation in ("all_to_all_v", "all_gather"):
            return self.logical_bytes[self.operation]
        if self.counts is not None:
            return float((self.rows - self.send_counts[rank]) * wire.row_bytes(self.width))
        counts, row = self._parts
        rows = [-(-count // row) for count in counts]
        to_owners, to_all = sum(rows) - rows[rank], others * rows[rank]
        legs = {"all_gather": to_all, "reduce_scatter": to_owners, "all_reduce": to_owners + to_all}
        return legs[self.operation] * wire.row_bytes(row, self.dtype)

    @cached_property
    def _moved(self) -> torch.Tensor:
        """The exact result of all_to_all_v and all_gather."""
        every = [self._values(rank) for rank in range(self.comm.size)]
        if self.counts is not None:
            every = [x.split(sent)[self.comm.rank] for x, sent in zip(every, self.counts.tolist(), strict=True)]
        return torch.cat(every)

    @cached_property
    def _sums(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sums over ranks: in float64, in float32 in ascending rank, and of the magnitudes."""
        exact = torch.zeros(self.x.shape, dtype=torch.float64, device=self.x.device)
        ascending, magnitudes = exact.float(), exact.float()
        for rank in range(self.comm.size):
            x = self._values(rank)
            exact += x
            ascending += x
            magnitudes += x.abs()
        return exact, ascending, magnitudes

    def judge(self, operation: str, got: torch.Tensor, wire: WireFormat | None) -> Verdict:
        """Judges what came over a wire; None: over another library, which moves exactly, and sums in any order."""
        if operation in ("all_to_all_v", "all_gather"):
            bound = 0.0 if wire is None else moved_bound(self._moved, wire, *self._parts)
            return compare(got, self._moved, bound)
        exact, ascending, magnitudes = self._sums
        if wire is None:
            bound = _rounding(magnitudes, got.dtype) * self.comm.size
        elif wire.quantized:
            bound = magnitudes * (self.comm.size * _FLOAT32_SLACK)
            for rank in range(self.comm.size):
                bound += wire_bound(self._values(rank), wire, *self._parts)
            if operation == "all_reduce":  # the sums travel again
                bound += wire_bound(exact.float().abs() + bound, wire, *self._parts)
            bound += _rounding(exact.float().abs() + bound, self.dtype)
        else:
            found = compare(got, exact[self._own], 0.0)
            return found._replace(wrong=compare(got, ascending.to(self.dtype)[self._own], 0.0).wrong)
        return compare(got, exact[self._own], bound[self._own])


class Round:
    """A round of expert parallelism on one rank: tokens to the ranks of their experts, and weighted sums back.

    Experts multiply by a power of two of their own, which rounds nothing: a weight that went to another expert is seen.

    Attributes:
        x: this rank's tokens [tokens, hidden]; `topk_ids` and `topk_weights` [tokens, top_k] are theirs.
        first: where each rank's experts begin, and the end.
        expert_rows: rows that this rank's experts get, and `factors` [expert_rows, 1] what they multiply each by.
        between: [ranks, ranks] tokens that go from rank i to rank j; `load` [experts] rows of each expert.
        logical_bytes, copied, counted: as a collective's; `rows` are tokens here.
        skew: rows of the busiest rank's experts by the mean over ranks.
    """

    operations, counted = ROUND, "tokens"

    def __init__(self, comm: Communicator, dtype: torch.dtype, hidden: int, ids: list[Integers], experts: int) -> None:
        self.comm, self.dtype, self.hidden, self.experts, self._ids = comm, dtype, hidden, experts, ids
        rank = comm.rank
        self.rows, self.top_k = ids[rank].shape
        self.first = first_experts(experts, comm.size)
        self.x = self._tokens_of(rank)
        self.topk_ids = torch.from_numpy(ids[rank]).to(comm.device)
        generator = torch.Generator().manual_seed(rank)
        weights = torch.rand(self.rows, self.top_k, generator=generator, dtype=torch.float32, device="cpu") + 0.1
        self.topk_weights = (weights / weights.sum(1, keepdim=True)).to(comm.device)
        self.out = torch.empty_like(self.x)
        self.between, self.load = rows_between(ids, experts), expert_load(ids, experts)
        by_rank = [int(part.sum()) for part in np.split(self.load, self.first[1:-1])]
        self.expert_rows, self.skew = by_rank[rank], skew_of(by_rank)
        own = np.arange(self.first[rank], self.first[rank + 1])
        self.factors = _factors(torch.from_numpy(np.repeat(own, self.load[own])))[:, None].to(comm.device, dtype)
        self.size_bytes, row_bytes = self.x.nbytes, hidden * dtype.itemsize
        # A leg reads tokens and writes experts' rows, or the other way round; a copy reads as much as it writes.
        self.copied = max(1, (self.rows + self.expert_rows) // 2), hidden
        staying = self.between[rank, rank]
        legs = {
            "dispatch": float(self.between[rank].sum() - staying) * row_bytes,
            "combine": float(self.between[:, rank].sum() - staying) * row_bytes,
        }
        self.logical_bytes = legs | {"moe": sum(legs.values())}

    def experts_on(self, tokens: torch.Tensor) -> torch.Tensor:
        """Applies this rank's experts to their rows."""
        return tokens * self.factors

    def _tokens_of(self, rank: int) -> torch.Tensor:
        return values(rank, self.rows * self.hidden, self.comm.device, self.dtype).view(self.rows, self.hidden)

    @cached_property
    def _arriving(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All ranks' tokens, and which of them each expert row is: by expert, then source rank, then token."""
        tokens = torch.cat([self._tokens_of(rank) for rank in range(self.comm.size)])
        places = [
            np.flatnonzero((own == expert).any(1)) + rank * self.rows
            for expert in range(self.first[self.comm.rank], self.first[self.comm.rank + 1])
            for rank, own in enumerate(self._ids)
        ]
        return tokens, torch.from_numpy(np.concatenate([*places, np.empty(0, np.int64)])).to(self.comm.device)

    @cached_property
    def _weights(self) -> torch.Tensor:
        """[tokens, top_k] the factor of each of a token's experts, by its weight."""
        return self.topk_weights * _factors(self.topk_ids)

    def judge(self, operation: str, got: torch.Tensor, wire: WireFormat | None) -> Verdict:
        """Judges the experts' rows after dispatch, else the sums; `wire` as in `Collective.judge`."""
        if operation == "dispatch":
            tokens, index = self._arriving
            return compare(got, tokens, 0.0 if wire is None else moved_bound(tokens, wire), index)
        weight = self._weights.sum(1, keepdim=True)
        exact, largest = self.x.double() * weight, self.x.float().abs()
        if wire is not None and not wire.quantized:
            found = compare(got, exact, 0.0)
            return found._replace(wrong=compare(got, self._summed_in_order(), 0.0).wrong)
        row_bound = torch.zeros_like(largest)
        if wire is not None:
            row_bound += moved_bound(self.x, wire)
            # A rank's share is its weights times the row, and so are its scale and its bound; shares add up.
            row_bound += wire_bound(largest + row_bound, wire)
        magnitudes = (largest + row_bound) * weight
        bound = row_bound * weight + magnitudes * ((self.top_k + self.comm.size) * _FLOAT32_SLACK)
        return compare(got, exact, bound + _rounding(magnitudes, self.dtype))

    def _summed_in_order(self) -> torch.Tensor:
        """Products and sums in float32, in ascending expert and rank, as exact rounds have them to the last bit."""
        ids, order = self.topk_ids.sort(dim=1)
        weights = self._weights.gather(1, order)
        total = torch.zeros_like(self.x, dtype=torch.float32)
        for begin, end in zip(self.first, self.first[1:], strict=False):
            share = torch.zeros_like(total)
            for choice in range(self.top_k):
                here = (ids[:, choice] >= begin) & (ids[:, choice] < end)
                share = torch.where(here[:, None], share + weights[:, choice, None] * self.x.float(), share)
            total = total + share.to(self.dtype).float()
        return total.to(self.dtype)


def _factors(experts: torch.Tensor) -> torch.Tensor:
    """Returns the experts' factors: 1/2, 1 or 2."""
    return torch.exp2((experts % 3 - 1).float())
