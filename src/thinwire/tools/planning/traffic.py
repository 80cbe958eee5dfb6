"""How many records a token becomes, and how many bytes each leg of a round sends, before anything is sent."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import torch

from thinwire.errors import ArgumentError
from thinwire.moe.config import ParallelSettings
from thinwire.moe.routing import expert_range


def reach(num_experts: int, top_k: int, ranks: int) -> list[float]:
    """The probability, for each rank, that a token goes there, if all sets of `top_k` experts are equally likely.

    C(E - e, k) of the C(E, k) sets leave out a rank with e of E experts. The sum is the fan-out: the number of ranks
    that a token goes to, on average.

    Raises:
        ArgumentError: more experts a token than there are.

    >>> round(sum(reach(256, 8, 8)), 3), sum(reach(3, 1, 2))
    (5.295, 1.0)
    """
    if not 1 <= top_k <= num_experts:
        raise ArgumentError(f"top_k is {top_k}, expected 1 to {num_experts}, the number of experts")
    sets = math.comb(num_experts, top_k)
    owned = [len(expert_range(num_experts, ranks, rank)) for rank in range(ranks)]
    reached = {number: float(1 - Fraction(math.comb(num_experts - number, top_k), sets)) for number in set(owned)}
    return [reached[number] for number in owned]


@dataclass(frozen=True)
class Leg:
    """One leg of a round, as expected with uniform routing; bytes and rows of the rank that sends or receives most.

    Attributes:
        wire: its format.
        record_bytes: of one record.
        rows: records that leave the rank, or arrive there; `own_rows`: records that it keeps, which cross no link.
        within_bytes, between_bytes: bytes over the links within its host, and over those to other hosts.
    """

    name: str
    wire: str
    record_bytes: int
    rows: float
    own_rows: float
    within_bytes: float
    between_bytes: float

    @property
    def wire_bytes(self) -> float:
        """All bytes that leave the rank, or arrive there."""
        return self.within_bytes + self.between_bytes


def plan_traffic(
    settings: ParallelSettings, ranks: int, tokens: int, dtype: torch.dtype, transport: str, hosts: int = 1
) -> tuple[Leg, Leg]:
    """Dispatch and combine of `tokens` tokens on each rank, routed uniformly without replacement.

    Args:
        hosts: number of hosts, with ranks in contiguous blocks of one size.

    Raises:
        ArgumentError: `hosts` does not divide `ranks`; more experts a token than there are.
    """
    if hosts < 1 or ranks % hosts:
        raise ArgumentError(f"hosts is {hosts}, expected a divisor of {ranks} ranks")
    probabilities = reach(settings.num_experts, settings.top_k, ranks)
    back, each = probabilities, ranks // hosts
    if settings.invariant:
        owned = (len(expert_range(settings.num_experts, ranks, rank)) for rank in range(ranks))
        back = [settings.top_k * number / settings.num_experts for number in owned]
    legs = []
    for name, wire, records, (record_bytes, beside) in (
        ("dispatch", settings.wire, probabilities, settings.dispatch_bytes(transport, ranks, tokens, dtype)),
        ("combine", settings.combine_wire, back, settings.combine_bytes(transport, ranks, dtype)),
    ):
        # The first rank owns as many experts as any, so it receives most; who owns fewest sends most.
        most, fewest = max(records), min(records)
        rows = tokens * max(sum(records) - fewest, (ranks - 1) * most)
        rows_within = tokens * max(sum(records[-each:]) - fewest, (each - 1) * most)
        share = rows_within / rows if rows else 0.0
        beside_within = beside * (each - 1) / max(1, ranks - 1)
        within = rows * share * record_bytes + beside_within
        between = rows * (1 - share) * record_bytes + beside - beside_within
        legs.append(Leg(name, str(wire), record_bytes, rows, tokens * most, within, between))
    return legs[0], legs[1]
