"""Who gets which token, and where it lies on arrival: the index arithmetic of a dispatch, in torch on the ids' device.

Everything is a pure function of expert ids, so both ends of a pair derive the same order without exchanging it: the
records from rank s to rank r are those tokens of s that have an expert on r, in ascending order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from thinwire.moe.routing import expert_range


def merge_repeated_experts(
    topk_ids: torch.Tensor, topk_weights: torch.Tensor, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes every expert of a token unique: the first mention keeps the sum of the weights, the others become -1.

    Integer ids and float weights [tokens, top_k] become int32 and `dtype`; weights are added in ascending k.

    >>> ids, weights = merge_repeated_experts(torch.tensor([[3, 3, -1]]), torch.tensor([[0.5, 0.25, 9.0]]))
    >>> ids.tolist(), weights.tolist()
    ([[3, -1, -1]], [[0.75, 0.0, 0.0]])
    """
    ids, weights = topk_ids.int(), topk_weights.to(dtype)
    first_mention = first_mentions(ids)
    total = torch.zeros_like(weights)
    for k in range(ids.shape[1]):
        # One target a row, so that scatter_add_ has nothing to reorder.
        total.scatter_add_(1, first_mention[:, k : k + 1], weights[:, k : k + 1])
    own = torch.arange(ids.shape[1], device=ids.device)
    kept = (first_mention == own) & (ids >= 0)
    return torch.where(kept, ids, -1), torch.where(kept, total, 0.0)


def first_mentions(topk_ids: torch.Tensor) -> torch.Tensor:
    """Where the expert of each entry of integer ids [tokens, top_k] is named first in its row: int64, of that shape."""
    return (topk_ids.unsqueeze(2) == topk_ids.unsqueeze(1)).int().argmax(2)


def owners(topk_ids: torch.Tensor, num_experts: int, world_size: int) -> torch.Tensor:
    """The rank of each expert, int64, `world_size` where there is none."""
    firsts = [expert_range(num_experts, world_size, rank).start for rank in range(1, world_size)]
    boundaries = torch.tensor(firsts, dtype=topk_ids.dtype, device=topk_ids.device)
    owner = torch.bucketize(topk_ids, boundaries, right=True)
    return torch.where(topk_ids >= 0, owner, world_size).long()


@dataclass(frozen=True)
class SendPlan:
    """The sender's side of a dispatch. On the way back, the sum that belongs to record i comes home as record i.

    Or the side at home of a combine in which each expert's row comes by itself, ordered as if it were a record.
    """

    tokens: torch.Tensor  # int64 [records], the token of each record, by destination rank, then token
    counts: list[int]  # records for each rank
    record_index: torch.Tensor  # int64 [tokens, slots], a token's records, in ascending rank, -1 behind them

    @classmethod
    def of(cls, topk_ids: torch.Tensor, num_experts: int, world_size: int) -> SendPlan:
        """The plan for ids [tokens, top_k] within -1 ... num_experts - 1. Synchronises with the host on CUDA."""
        return cls.towards(owners(topk_ids, num_experts, world_size), world_size)

    @classmethod
    def towards(cls, owner: torch.Tensor, world_size: int) -> SendPlan:
        """The plan for the ranks that each token goes to, int64 [tokens, top_k], in any order; `world_size` is none."""
        num_tokens, top_k = owner.shape
        wanted = torch.zeros(num_tokens, world_size + 1, dtype=torch.bool, device=owner.device)
        wanted.scatter_(1, owner, True)
        wanted = wanted[:, :world_size]
        by_rank = wanted.t().nonzero()
        ranks, tokens = by_rank[:, 0], by_rank[:, 1]
        ordinal = wanted.int().cumsum(1) - 1
        record_index = torch.full((num_tokens, min(top_k, world_size)), -1, dtype=torch.int64, device=owner.device)
        record_index[tokens, ordinal[tokens, ranks]] = torch.arange(tokens.shape[0], device=owner.device)
        return cls(tokens, wanted.sum(0).tolist(), record_index)

    def without(self, rank: int) -> SendPlan:
        """Leaves out the records for a rank, such as those it keeps; `record_index` counts them still."""
        first = sum(self.counts[:rank])
        tokens = torch.cat([self.tokens[:first], self.tokens[first + self.counts[rank] :]])
        return replace(self, tokens=tokens, counts=[*self.counts[:rank], 0, *self.counts[rank + 1 :]])

    @classmethod
    def of_experts(cls, topk_ids: torch.Tensor, num_experts: int, world_size: int) -> SendPlan:
        """The plan where a token has a record for each of its experts, which are different ones, in ascending id."""
        owner = owners(topk_ids, num_experts, world_size).sort(dim=1).values
        there = owner < world_size
        order = owner[there].argsort(stable=True)
        tokens, slots = there.nonzero()[order].unbind(1)
        record_index = torch.full_like(owner, -1)
        record_index[tokens, slots] = torch.arange(tokens.shape[0], device=topk_ids.device)
        return cls(tokens, torch.bincount(owner[there], minlength=world_size).tolist(), record_index)


@dataclass(frozen=True)
class ArrivalPlan:
    """The experts' side of a dispatch, for records in order of arrival (by source rank, then token)."""

    index: torch.Tensor  # int64 [entries], the record of each expert-sorted row: by expert, then record
    rows: torch.Tensor  # int64 [entries], where that row lies among rows padded to the alignment
    expert_counts: torch.Tensor  # int64 [local experts], rows of each expert, without padding
    expert_offsets: torch.Tensor  # int64 [local experts + 1], where each expert's rows begin, with padding
    positions: torch.Tensor  # int64 [records, top_k], the rows of each record in ascending expert id, -1 behind them
    weights: torch.Tensor  # [records, top_k], their weights
    rows_of_ids: torch.Tensor  # int64 [records, top_k], the rows in the order of the ids, -1 where an id is not here
    num_rows: int  # the last of expert_offsets

    @classmethod
    def of(cls, ids: torch.Tensor, weights: torch.Tensor, local_experts: range, align: int) -> ArrivalPlan:
        """The plan for the ids and weights [records, top_k] that came with the records.

        Ids that are not this rank's, whatever they are, match nothing: they never become an address. Synchronises with
        the host on CUDA.
        """
        local = ids.long() - local_experts.start
        here = (local >= 0) & (local < len(local_experts))
        entries = here.nonzero()
        expert = local[here]
        order = expert.argsort(stable=True)
        counts = torch.bincount(expert, minlength=len(local_experts))
        padded = (counts + align - 1) // align * align
        offsets = torch.nn.functional.pad(padded.cumsum(0), (1, 0))
        starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        sorted_expert = expert[order]
        rows = torch.arange(expert.shape[0], device=ids.device) - starts[sorted_expert] + offsets[sorted_expert]
        sorted_entries = entries[order]
        positions = torch.full(ids.shape, -1, dtype=torch.int64, device=ids.device)
        positions[sorted_entries[:, 0], sorted_entries[:, 1]] = rows
        ascending = torch.where(here, local, len(local_experts)).argsort(dim=1, stable=True)
        return cls(
            index=sorted_entries[:, 0].contiguous(),
            rows=rows,
            expert_counts=counts,
            expert_offsets=offsets,
            positions=positions.gather(1, ascending),
            weights=torch.where(here, weights, 0.0).gather(1, ascending),
            rows_of_ids=positions,
            num_rows=int(offsets[-1]),
        )
