"""What adapters of libraries that may be installed have in common: whether one can take part, and its experts' rows.

Rows travel once for each rank that owns an expert of theirs: repeated and sorted by expert, and summed again. That is
left to users of such libraries. Written in torch operations, without a wait for the device.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch

from thinwire.comm import Communicator
from thinwire.tools.bench.contender import NotHere

T = TypeVar("T")


def why_absent(package: str, comm: Communicator) -> str | None:
    """Why a library of kernels between GPUs cannot take part, alike on all ranks; None if nothing is known against it.

    Its package is looked for, not imported. Collective.
    """
    if not all(comm.all_gather_object(importlib.util.find_spec(package) is not None)):
        return "not installed"
    if comm.device.type != "cuda" or comm.in_process:
        return "it is for processes with a GPU each"
    return None


def on_all_ranks(comm: Communicator, step: Callable[[], T], undo: Callable[[], object] | None = None) -> T:
    """What a step of a library gives, if it succeeds on every rank. Collective.

    Args:
        comm: the ranks.
        step: may raise anything: whatever a library raises is why it does not take part.
        undo: gives back what earlier steps made. Called only if every rank failed, as it may wait for its peers.

    Raises:
        NotHere: the step failed somewhere; in the words of the first rank that it failed on.
    """
    made: list[T] = []
    own, cause = None, None
    try:
        made.append(step())
    except Exception as error:
        own, cause = _in_words(error), error
    reasons = comm.all_gather_object(own)
    failed = [rank for rank, reason in enumerate(reasons) if reason is not None]
    if not failed:
        return made[0]
    everywhere = len(failed) == comm.size
    if everywhere and undo is not None:
        undo()
    raise NotHere(f"{'' if everywhere else f'on rank {failed[0]}: '}{reasons[failed[0]]}") from cause


def _in_words(error: Exception) -> str:
    """One line; the type is told, too, as many libraries assert without a message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


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
