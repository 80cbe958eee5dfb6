"""A plan of one ExpertParallel before it exists: memory, records and bytes of each leg, and predicted seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from thinwire.errors import ArgumentError
from thinwire.moe.config import ParallelSettings
from thinwire.moe.memory import MemoryPlan, plan_memory
from thinwire.moe.routing import expert_range
from thinwire.tools.bench.results import Measured
from thinwire.tools.planning.model import Leg, Link, Model, seconds_over
from thinwire.wire import WireFormat

RANKS_SWEPT = (2, 4, 8, 16, 32, 64, 128, 256)

# ---------------------------------------------------------------------------------------------------------------------
# Bytes of a round


def reach(num_experts: int, top_k: int, ranks: int) -> list[float]:
    """The probability, for each rank, that a token goes there, if all sets of `top_k` experts are equally likely.

    C(E - e, k) of the C(E, k) sets leave out a rank with e of E experts. The sum is the fan-out: the number of ranks
    that a token goes to, on average. ArgumentError for more experts a token than there are.

    >>> round(sum(reach(256, 8, 8)), 3), sum(reach(3, 1, 2))
    (5.295, 1.0)
    """
    if not 1 <= top_k <= num_experts:
        raise ArgumentError(f"top_k is {top_k}, expected 1 to {num_experts}, the number of experts")
    sets = math.comb(num_experts, top_k)
    owned = owned_by(num_experts, ranks)
    reached = {number: float(1 - Fraction(math.comb(num_experts - number, top_k), sets)) for number in set(owned)}
    return [reached[number] for number in owned]


def owned_by(num_experts: int, ranks: int) -> list[int]:
    """Experts of each rank, in contiguous blocks."""
    return [len(expert_range(num_experts, ranks, rank)) for rank in range(ranks)]


def plan_traffic(
    settings: ParallelSettings, ranks: int, tokens: int, dtype: torch.dtype, transport: str, hosts: int = 1
) -> tuple[Leg, Leg]:
    """Dispatch and combine of `tokens` tokens on each rank, routed uniformly without replacement.

    Ranks are on `hosts` hosts in contiguous blocks of one size. ArgumentError where that does not divide them.
    """
    if hosts < 1 or ranks % hosts:
        raise ArgumentError(f"hosts is {hosts}, expected a divisor of {ranks} ranks")
    probabilities = reach(settings.num_experts, settings.top_k, ranks)
    back, each = probabilities, ranks // hosts
    if settings.invariant:
        back = [settings.top_k * number / settings.num_experts for number in owned_by(settings.num_experts, ranks)]
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
    """Counts what `StagedExchange` allocates: a buffer each for all records that leave and arrive, own ones included.

    What arrived in dispatch is held until its round is over, beside the buffers of combine.
    """
    tokens, top_k, experts = settings.max_tokens, settings.top_k, settings.num_experts
    owned = owned_by(experts, ranks)[0]
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


# ---------------------------------------------------------------------------------------------------------------------
# Times that were measured


@dataclass(frozen=True)
class FittedModel:
    """Predicts legs by what `thinwire bench` measured of them: a line for each leg and wire format.

    Attributes:
        links: by a leg's name and wire format, with alpha and beta of the line.
        source, ranks, hosts: of the results.
    """

    links: Mapping[tuple[str, str], Link]
    source: str
    ranks: int
    hosts: int

    def seconds(self, leg: Leg) -> float | None:
        """Predicts one leg; None where it was not measured."""
        link = self.links.get((leg.name, leg.wire))
        return None if link is None else seconds_over(link, leg.wire_bytes)

    @classmethod
    def of(cls, request: Request, results: Measured) -> FittedModel:
        """Fits thinwire's figures over the request's transport, with uniform routing.

        Raises:
            ArgumentError: a leg has no two sizes; the message lists what has. Or the request is invariant.
        """
        if request.invariant:
            raise ArgumentError("fit and invariant were given, expected one of them: measured were ordinary rounds")
        transport = request.memory().transport
        usable = {key: points for key, points in results.points.items() if len({size for size, _ in points}) > 1}
        links = {
            (name, wire): fit_link(points)
            for (name, implementation, wire, *way), points in usable.items()
            if (implementation, *way) == ("thinwire", transport, "uniform")
        }
        for leg in request.legs(transport):
            if (leg.name, leg.wire) not in links:
                wanted = f"{leg.name} thinwire {leg.wire} {transport} uniform"
                there = "; ".join(" ".join(map(str, key)) for key in usable if key[:2] == (leg.name, "thinwire"))
                raise ArgumentError(f"{results.source}: no two sizes to fit {wanted} by; it has: {there or 'none'}")
        return cls(links, results.source, results.ranks, results.hosts)


def fit_link(points: Sequence[tuple[float, float]]) -> Link:
    """The alpha >= 0 and 1 / beta >= 0 with the least squares of relative residuals.

    Args:
        points: bytes and seconds, with at least two different numbers of bytes.
    """
    num_bytes, seconds = np.array(sorted(points)).T
    # Divided by what was measured, each point is one equation: alpha / t + bytes / (beta t) = 1.
    ones, slopes = 1 / seconds, num_bytes / seconds
    (alpha, inverse), *_ = np.linalg.lstsq(np.stack((ones, slopes), 1), np.ones(len(points)), rcond=None)
    # Where the best line has a negative part, the best without one lies on the border.
    if alpha < 0:
        alpha, inverse = 0.0, slopes.sum() / (slopes @ slopes)
    elif inverse < 0:
        alpha, inverse = ones.sum() / (ones @ ones), 0.0
    residuals = (alpha + inverse * num_bytes) / seconds - 1
    span = f"{len(points)} sizes from {num_bytes[0]:,.0f} to {num_bytes[-1]:,.0f} bytes"
    off = f"at most {100 * abs(residuals).max():.1f} % off"
    return Link(float(alpha), float(1 / inverse) if inverse > 0 else math.inf, 1.0, f"{span}, {off}")


# ---------------------------------------------------------------------------------------------------------------------
# The plan


@dataclass(frozen=True)
class Request:
    """The configuration to plan; names are those of ExpertParallel's arguments.

    Attributes:
        heap: see `plan_memory`.
        hosts: number of hosts, with ranks spread evenly; with more than one, records travel through the process group.
        dtype: the tokens'.
    """

    ranks: int
    experts: int
    top_k: int
    hidden: int
    max_tokens: int
    wire: str | None = None
    combine_wire: str | None = None
    grad_wire: str = "none"
    transport: str = "auto"
    lanes: int = 1
    align: int = 1
    invariant: bool = False
    heap: str = "cuda"
    hosts: int = 1
    dtype: torch.dtype = torch.bfloat16

    def memory(self, rank: int = 0) -> MemoryPlan:
        """Plans a rank's memory."""
        if self.hosts > 1 and self.transport == "direct":
            raise ArgumentError(f"transport is 'direct' over {self.hosts} hosts, expected one host, or 'staged'")
        arguments = self._arguments("staged" if self.hosts > 1 else self.transport)
        plan = plan_memory(self.ranks, *self._sizes, rank=rank, heap=self.heap, **arguments)
        spread = f"ranks of {self.hosts} hosts do not share memory"
        return replace(plan, reason=spread) if self.hosts > 1 else plan

    def legs(self, transport: str, wire: str | WireFormat | None = None) -> tuple[Leg, Leg]:
        """Dispatch and combine; or ordinary ones with `wire` on both instead of their own."""
        settings = self.settings(transport, wire)
        return plan_traffic(settings, self.ranks, self.max_tokens, self.dtype, transport, self.hosts)

    def round_memory(self) -> RoundMemory:
        """Counts the bytes of a rank's messages over the staged transport."""
        return staged_memory(self.settings("staged"), self.ranks, self.dtype)

    def settings(self, transport: str, wire: str | WireFormat | None = None) -> ParallelSettings:
        """Checks the settings of a round over that transport; with `wire`, of an ordinary one with it on both legs."""
        arguments = self._arguments(transport)
        if wire is not None:
            arguments |= {"wire": wire, "combine_wire": wire, "invariant": False}
        return ParallelSettings.of(*self._sizes, **arguments, num_programs=None, timeout=None)

    @property
    def _sizes(self) -> tuple[int, int, int, int]:
        return self.experts, self.top_k, self.hidden, self.max_tokens

    def _arguments(self, transport: str) -> dict[str, Any]:
        named = ("wire", "combine_wire", "grad_wire", "lanes", "align", "invariant", "dtype")
        return {name: getattr(self, name) for name in named} | {"transport": transport}


@dataclass(frozen=True)
class Planned:
    """A plan.

    Attributes:
        fan_out: ranks that a token goes to, on average, its own included.
        plain: the same legs with the wire format `none`.
        seconds: predicted for each leg and each plain leg; None where a model says nothing.
        round_memory: of the staged transport; None on the direct one, which holds its memory between calls.
    """

    request: Request
    memory: MemoryPlan
    fan_out: float
    legs: tuple[Leg, Leg]
    plain: tuple[Leg, Leg]
    seconds: tuple[float | None, ...]
    round_memory: RoundMemory | None

    @property
    def held_bytes(self) -> tuple[int, int]:
        """The most that a rank allocates, without gradients and with them."""
        if self.round_memory is not None:
            return self.round_memory.most_bytes, self.round_memory.training_bytes
        return self.memory.forward_bytes, self.memory.training_bytes

    def as_json(self) -> dict[str, Any]:
        """Returns the content of `--json`."""
        legs = [
            {name: getattr(leg, name) for name in Leg.__dataclass_fields__}
            | {"wire_bytes": leg.wire_bytes, "wire_bytes_of_none": plain.wire_bytes, "predicted_seconds": seconds}
            for leg, plain, seconds in zip(self.legs, self.plain, self.seconds, strict=False)
        ]
        memory = vars(self.memory) | {
            "forward_bytes": self.memory.forward_bytes,
            "training_bytes": self.memory.training_bytes,
            "round": self.round_memory and vars(self.round_memory),
        }
        request = vars(self.request) | {"dtype": str(self.request.dtype).removeprefix("torch.")}
        return {"settings": request, "memory": memory, "fan_out": self.fan_out, "legs": legs}


def make_plan(request: Request, model: Model | FittedModel | None) -> Planned:
    """A plan, with times if there is a model.

    Raises:
        ArgumentError, RoutingError, WireFormatError, TransportUnavailable: an argument cannot be planned, and is named.
    """
    memory = request.memory()
    legs, plain = request.legs(memory.transport), request.legs(memory.transport, "none")
    seconds = tuple(None if model is None else model.seconds(leg) for leg in (*legs, *plain))
    fan_out = sum(reach(request.experts, request.top_k, request.ranks))
    round_memory = request.round_memory() if memory.transport == "staged" else None
    return Planned(request, memory, fan_out, legs, plain, seconds, round_memory)


def sweep(request: Request, model: Model | None) -> list[Planned]:
    """Plans for other numbers of ranks, as many on a host as in the request; by a model alone, if there is one.

    Raises:
        ArgumentError: the hosts do not divide the ranks, or the model has no link between hosts.
    """
    each = request.ranks // request.hosts
    plans = []
    for ranks in RANKS_SWEPT:
        hosts = max(1, ranks // each) if request.hosts > 1 else 1
        if ranks <= request.experts and ranks % hosts == 0:
            of_hosts = model if hosts > 1 or model is None else replace(model, between=None)
            plans.append(make_plan(replace(request, ranks=ranks, hosts=hosts), of_hosts))
    return plans
