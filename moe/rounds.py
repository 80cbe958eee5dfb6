"""What expert parallelism asks of a transport: rounds that are dispatched, read, and combined or abandoned."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

__all__ = ["Round", "Rounds", "Traffic"]


@dataclass(frozen=True)
class Traffic:
    """What one leg of a round sends from this rank to other ranks; rows that stay are not counted.

    Attributes:
        rows: records sent.
        logical_bytes: what the rows hold in their own dtype.
        wire_bytes: what is sent instead: records, and on the dispatch leg expert ids and router weights too.
    """

    rows: int
    logical_bytes: int
    wire_bytes: int


class Round(ABC):
    """One round at one rank. `Dispatched` says what its tensors hold."""

    dtype: torch.dtype
    num_tokens: int
    rows: torch.Tensor
    index: torch.Tensor
    expert_counts: torch.Tensor
    expert_offsets: torch.Tensor

    @abstractmethod
    def num_rows(self) -> int:
        """Rows of the experts' input with padding, on the host."""

    @abstractmethod
    def gather(self, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts' input in `capacity` rows, and whether it has more."""

    @abstractmethod
    def combine(self, expert_out: torch.Tensor, out: torch.Tensor) -> None:
        """Sends the weighted sums home, and fills `out` with what comes home here."""

    @abstractmethod
    def abandon(self) -> None:
        """Ends the round without sums from this rank."""

    @abstractmethod
    def dispatch_traffic(self) -> Traffic:
        """What this rank sent."""

    @abstractmethod
    def combine_traffic(self) -> Traffic:
        """What this rank sends back."""


class Rounds(ABC):
    """One transport's rounds.

    Attributes:
        name: the transport's.
        reason: why it was chosen.
    """

    name: str
    reason: str

    @abstractmethod
    def dispatch(self, lane: int, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> Round:
        """Begins a round on a lane, whose arguments were checked and whose last round, if open, was closed."""

    @property
    @abstractmethod
    def memory_bytes(self) -> int:
        """Bytes held between calls."""

    @abstractmethod
    def describe(self) -> str:
        """What it is and why, for `explain`."""

    @abstractmethod
    def check(self) -> None:
        """Raises what went wrong on the device since the last call."""

    @abstractmethod
    def close(self) -> None:
        """Gives back what it holds."""
