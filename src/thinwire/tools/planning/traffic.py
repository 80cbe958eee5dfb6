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


@dataclass(frozen=True)
class RoundMemory:
    """Bytes of the messages that the rounds of all lanes allocate on rank 0 over the staged transport.

    Attributes:
        uniform_bytes: with uniform routing, without gradients.
        most_bytes: if all ranks' tokens come to this rank, and its own go to as many ranks as they have experts.
        training_bytes: `most_bytes` with gradients.
    """

    uniform_bytes: int
    most_bytes: int
    training_bytes: int


def staged_memory(settings: ParallelSettings, ranks: int, dtype: torch.dtype) -> RoundMemory:
    """What `StagedExchange` allocates: a buffer for all records that leave and one for all that arrive, own ones too.

    What arrived in dispatch is held until its round is over, beside the buffers of combine.
    """
    tokens, top_k, experts = settings.max_tokens, settings.top_k, settings.num_experts
    owned = len(expert_range(experts, ranks, 0))
    record, back = settings.message_bytes(dtype), settings.combine_wire.row_bytes(settings.hidden_size, dtype)
    tail = top_k * settings.weight_dtype.itemsize
    gradient = -(-(settings.grad_wire.row_bytes(settings.hidden_size, dtype) + tail) // 16) * 16

    def held(leave: float, arrive: float, sums: float) -> tuple[int, int]:
        forward = settings.lanes * max((leave + arrive) * record, arrive * record + sums * back)
        return math.ceil(forward), math.ceil(max(forward, settings.lanes * (leave + arrive) * gradient))

    reached = reach(experts, top_k, ranks)
    leave, arrive = tokens * sum(reached), tokens * ranks * reached[0]
    leave_most, arrive_most = tokens * min(ranks, top_k), tokens * ranks
    sums, sums_most = leave + arrive, leave_most + arrive_most
    if settings.invariant:  # a sum is one expert's
        sums = tokens * top_k * (1 + ranks * owned / experts)
        sums_most = tokens * (top_k + ranks * min(top_k, owned))
    return RoundMemory(held(leave, arrive, sums)[0], *held(leave_most, arrive_most, sums_most))
