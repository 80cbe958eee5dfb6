"""Rows that travel once for each rank that owns an expert of theirs: repeated and sorted by expert, and summed again.

What libraries that send such rows leave to their users. Written in torch operations, without a wait for the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class ExpertRows(NamedTuple):
    """Rows of experts, by ascending expert.

    Attributes:
        source: int64 [rows], which received row each one is.
        weights: float32 [rows, 1], the weight of that token's expert.
    """

    source: torch.Tensor
    weights: torch.Tensor


def by_expert(ids: torch.Tensor, weights: torch.Tensor, place: torch.Tensor, rows: int) -> ExpertRows:
    """The rows of a rank's experts, by expert, and within one by place.

    Args:
        ids: [received, top_k] this rank's experts, negative for those that are elsewhere.
        weights: float32 [received, top_k].
        place: int64 [received], different ones below `received`: the order within an expert.
        rows: how many ids are not negative.
    """
    absent = torch.iinfo(torch.int64).max
    keys = torch.where(ids >= 0, ids.long() * len(ids) + place[:, None], absent)
    order = keys.flatten().argsort()[:rows]
    return ExpertRows(order // ids.shape[1], weights.flatten()[order, None])


def summed(expert_out: torch.Tensor, rows: ExpertRows, received: int) -> torch.Tensor:
    """Weighted sums of what experts made of each received row, in float32 and then rounded: [received, hidden].

    Args:
        expert_out: [rows, hidden].
        rows: of `by_expert`.
        received: how many rows there are; those without an expert here become zero.
    """
    total = torch.zeros(received, expert_out.shape[1], device=expert_out.device, dtype=torch.float32)
    return total.index_add_(0, rows.source, expert_out * rows.weights).to(expert_out.dtype)
