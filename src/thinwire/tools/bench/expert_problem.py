"""A round of expert parallelism to be solved: tokens to the ranks of their experts, and weighted sums back.

Experts multiply by a power of two of their own, which rounds nothing: a weight that went to another expert is seen.

`size_bytes` are a rank's tokens in their dtype. `logical_bytes` is what has to leave the rank on a leg if nothing is
quantised: a token once for each other rank that owns one of its experts, whatever the number of them there; and as many
sums on the way back.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch

from thinwire.comm import Communicator
from thinwire.tools.bench import checks
from thinwire.tools.bench.checks import Verdict
from thinwire.tools.bench.problems import moved_bound, values
from thinwire.tools.bench.traffic import Integers, expert_load, first_experts, rows_between, skew_of
from thinwire.wire import WireFormat


class Round:
    """A round on one rank.

    Attributes:
        x: this rank's tokens [tokens, hidden]; `topk_ids` and `topk_weights` [tokens, top_k] are theirs.
        first: where each rank's experts begin, and the end.
        expert_rows: rows that this rank's experts get, and `factors` [expert_rows, 1] what they multiply each by.
        between: [ranks, ranks] tokens that go from rank i to rank j; `load` [experts] rows of each expert.
        leaving: tokens that go to other ranks, once for each; `arriving` those that come from other ranks.
        skew: rows of the busiest rank's experts by the mean over ranks.
    """

    def __init__(self, comm: Communicator, dtype: torch.dtype, hidden: int, ids: list[Integers], experts: int) -> None:
        self.comm, self.dtype, self.hidden = comm, dtype, hidden
        self.all_ids, self.experts = ids, experts
        self.tokens, self.top_k = ids[comm.rank].shape
        self.first = first_experts(experts, comm.size)
        self.x = self._tokens_of(comm.rank)
        self.topk_ids = torch.from_numpy(ids[comm.rank]).to(comm.device)
        generator = torch.Generator().manual_seed(comm.rank)
        weights = torch.rand(self.tokens, self.top_k, generator=generator, dtype=torch.float32, device="cpu") + 0.1
        self.topk_weights = (weights / weights.sum(1, keepdim=True)).to(comm.device)
        self.out = torch.empty_like(self.x)
        self.between = rows_between(ids, experts)
        self.load = expert_load(ids, experts)
        by_rank = [int(part.sum()) for part in np.split(self.load, self.first[1:-1])]
        self.expert_rows, self.skew = by_rank[comm.rank], skew_of(by_rank)
        local = np.arange(self.first[comm.rank], self.first[comm.rank + 1])
        expert_of_row = torch.from_numpy(np.repeat(local, self.load[local]))
        self.factors = _factors(expert_of_row)[:, None].to(comm.device, dtype)
        row_bytes = hidden * dtype.itemsize
        self.size_bytes = self.tokens * row_bytes
        staying = self.between[comm.rank, comm.rank]
        self.leaving = int(self.between[comm.rank].sum() - staying)
        self.arriving = int(self.between[:, comm.rank].sum() - staying)
        legs = {"dispatch": self.leaving * row_bytes, "combine": self.arriving * row_bytes}
        self.logical_bytes = legs | {"moe": sum(legs.values())}

    def experts_on(self, tokens: torch.Tensor) -> torch.Tensor:
        """What the experts here make of their rows."""
        return tokens * self.factors

    def _tokens_of(self, rank: int) -> torch.Tensor:
        return values(rank, self.tokens * self.hidden, self.comm.device, self.dtype).view(self.tokens, self.hidden)

    @cached_property
    def _arriving(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All ranks' tokens, and which of them each expert row is: by expert, then source rank, then token."""
        tokens = torch.cat([self._tokens_of(rank) for rank in range(self.comm.size)])
        places = [
            np.flatnonzero((own == expert).any(1)) + rank * self.tokens
            for expert in range(self.first[self.comm.rank], self.first[self.comm.rank + 1])
            for rank, own in enumerate(self.all_ids)
        ]
        return tokens, torch.from_numpy(np.concatenate([*places, np.empty(0, np.int64)])).to(self.comm.device)

    def judge_dispatch(self, got: torch.Tensor, wire: WireFormat) -> Verdict:
        """Of the rows of this rank's experts."""
        tokens, index = self._arriving
        return checks.compare(got, tokens, moved_bound(tokens, wire), index)

    @cached_property
    def _weights(self) -> torch.Tensor:
        """[tokens, top_k] the factor of each of a token's experts, by its weight."""
        return self.topk_weights * _factors(self.topk_ids) * (self.topk_ids >= 0)

    @cached_property
    def _weight(self) -> torch.Tensor:
        return self._weights.sum(1, keepdim=True)

    @property
    def _exact(self) -> torch.Tensor:
        return self.x.double() * self._weight

    def judge_combine(self, got: torch.Tensor, wire: WireFormat) -> Verdict:
        """Of weighted sums that were made where the experts are, and once more at home."""
        if not wire.quantized:
            # Products and sums in float32, in ascending expert and rank, to the last bit.
            found = checks.compare(got, self._exact, 0.0)
            return found._replace(wrong=checks.compare(got, self._summed_in_order(), 0.0).wrong)
        return self.judge_quantized(got, wire)

    def judge_quantized(self, got: torch.Tensor, wire: WireFormat) -> Verdict:
        """Of weighted sums of rows that were quantised on both legs, whether before or after they were summed."""
        largest = self.x.float().abs()
        bound = torch.as_tensor(moved_bound(self.x, wire), device=self.x.device)
        # A rank's share is its weights times the row, and so are its scale and its bound; shares add up to the weight.
        bound = bound + checks.wire_bound(largest + bound, checks.row_scales(largest + bound, wire), wire)
        return self._compare(got, bound)

    def judge_rounded(self, got: torch.Tensor) -> Verdict:
        """Of weighted sums of exact rows in any order, in float32."""
        return self._compare(got, torch.zeros_like(self.x, dtype=torch.float32))

    def _compare(self, got: torch.Tensor, row_bound: torch.Tensor) -> Verdict:
        magnitudes = (self.x.float().abs() + row_bound) * self._weight
        bound = row_bound * self._weight + checks.float32_slack(self.top_k + self.comm.size, magnitudes)
        return checks.compare(got, self._exact, bound + checks.rounding(magnitudes, self.dtype))

    def _summed_in_order(self) -> torch.Tensor:
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
    """What experts of such numbers multiply by: 1/2, 1 or 2."""
    return torch.exp2((experts % 3 - 1).float())
