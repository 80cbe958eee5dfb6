"""What is compared: one implementation of an operation at one size, ready to be called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from thinwire.tools.bench.checks import Verdict
from thinwire.tools.bench.problems import Problem


class NotHere(Exception):
    """An implementation cannot take part; the message says why."""


@dataclass
class Contender:
    """One implementation, on one rank.

    Attributes:
        implementation: its name in results.
        wire: the format, or the dtype where it is not the tensors' own.
        transport: thinwire's, else None.
        call: does it all once; gives the output of each operation that it is measured as.
        judge: compares the output of an operation with the exact one.
        wire_bytes: bytes that it sends from this rank, by operation.
        poisoned: memory that `call` fills in place; set to NaN before a check.
        inputs: what `call` reads; negated in the call before a checked one, so that rows left from it are found out.
        close: gives its memory back.
        parts: what `call` calls one after the other, where each may be replaced by its CUDA graph; else empty.
    """

    implementation: str
    wire: str
    transport: str | None
    call: Callable[[], Mapping[str, torch.Tensor]]
    judge: Callable[[str, torch.Tensor], Verdict]
    wire_bytes: Mapping[str, float]
    poisoned: tuple[torch.Tensor, ...] = ()
    inputs: tuple[torch.Tensor, ...] = ()
    close: Callable[[], None] = field(default=lambda: None)
    parts: list[Callable[..., Any]] = field(default_factory=list)

    @property
    def label(self) -> str:
        return label_of(self.implementation, self.wire, self.transport)

    def poison(self) -> None:
        """So that a call which leaves memory untouched, wherever its own is, is found out. Collective."""
        for tensor in self.inputs:
            tensor.neg_()
        if self.inputs:
            self.call()
        for tensor in self.inputs:
            tensor.neg_()
        for tensor in self.poisoned:
            tensor.fill_(float("nan"))


def of_collective(
    implementation: str,
    problem: Problem,
    call: Callable[[], object],
    judge: Callable[[torch.Tensor], Verdict],
    sent_bytes: float,
    wire: str = "none",
    transport: str | None = None,
    x: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    captured: bool = False,
) -> Contender:
    """One whose `call` reads x and fills `out`, None being the problem's own, which `judge` then compares.

    `captured`: a CUDA graph can take its place.
    """
    x, filled = problem.x if x is None else x, problem.out if out is None else out

    parts = [call]

    def run() -> Mapping[str, torch.Tensor]:
        parts[0]()
        return {problem.operation: filled}

    sent = {problem.operation: sent_bytes}
    made = Contender(implementation, wire, transport, run, lambda _, got: judge(got), sent, (filled,), (x,))
    return replace(made, parts=parts) if captured else made


def label_of(implementation: str, wire: str, transport: str | None) -> str:
    """A name that no two contenders share."""
    return "/".join(part for part in (implementation, wire, transport) if part)


@dataclass
class Candidate:
    """A contender that is not made yet: making it may allocate, meet peers, or find that something is missing.

    `make` raises NotHere or TransportUnavailable, alike on all ranks.
    """

    implementation: str
    wire: str
    transport: str | None
    make: Callable[[], Contender]
