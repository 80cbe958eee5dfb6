"""A plan of one ExpertParallel before it exists: memory, records and bytes of each leg, and predicted seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from thinwire.errors import ArgumentError
from thinwire.moe.config import ParallelSettings
from thinwire.moe.memory import MemoryPlan, plan_memory
from thinwire.moe.routing import expert_range
from thinwire.tools.bench.results import Results
from thinwire.tools.planning.model import Leg, Model
from thinwire.wire import WireFormat

RANKS_SWEPT = (2, 4, 8, 16, 32, 64, 128, 256)
_Measured = tuple[str, str, str, str | None, str | None]

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
    """What `StagedExchange` allocates: a buffer for all records that leave and one for all that arrive, own ones too.

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
class Point:
    """What was measured: bytes that leave a rank, on average, and the median of seconds of the slowest rank."""

    wire_bytes: float
    seconds: float


@dataclass(frozen=True)
class Fit:
    """What fits the points of one operation, implementation, wire, transport and routing best.

    Attributes:
        alpha: seconds.
        beta: bytes a second; infinite if more bytes take no longer.
        points: the measured points, by bytes.
        residuals: for each, (fitted - measured) / measured.
        r2: 1 - squares of the residuals in seconds / squares of the distances from their mean; 1 if all are equal.
    """

    alpha: float
    beta: float
    points: tuple[Point, ...]
    residuals: tuple[float, ...]
    r2: float

    def seconds(self, num_bytes: float) -> float:
        """Of a leg with so many bytes."""
        return self.alpha + num_bytes / self.beta


def fit_points(points: Sequence[Point]) -> Fit:
    """The alpha >= 0 and 1 / beta >= 0 with the least squares of relative residuals.

    ArgumentError for fewer than two different numbers of bytes.
    """
    if len({point.wire_bytes for point in points}) < 2:
        raise ArgumentError(f"{len(points)} points with one number of bytes, expected at least two different ones")
    points = sorted(points, key=lambda point: point.wire_bytes)
    num_bytes, seconds = (np.array([getattr(point, name) for point in points]) for name in ("wire_bytes", "seconds"))
    # Divided by what was measured, each point is one equation: alpha / t + bytes / (beta t) = 1.
    ones, slopes = 1 / seconds, num_bytes / seconds
    (alpha, inverse), *_ = np.linalg.lstsq(np.stack((ones, slopes), 1), np.ones(len(points)), rcond=None)
    # Where the best line has a negative part, the best without one lies on the border.
    if alpha < 0:
        alpha, inverse = 0.0, slopes.sum() / (slopes @ slopes)
    elif inverse < 0:
        alpha, inverse = ones.sum() / (ones @ ones), 0.0
    fitted = alpha + inverse * num_bytes
    spread = ((seconds - seconds.mean()) ** 2).sum()
    return Fit(
        float(alpha),
        float(1 / inverse) if inverse > 0 else float("inf"),
        tuple(points),
        tuple(((fitted - seconds) / seconds).tolist()),
        float(1 - ((fitted - seconds) ** 2).sum() / spread) if spread else 1.0,
    )


def fit_results(results: Results) -> dict[_Measured, Fit]:
    """Fits by operation, implementation, wire, transport and routing; leaves out those measured at one size only."""
    groups: dict[_Measured, list[Point]] = {}
    for figure in results.figures:
        key = figure.operation, figure.implementation, figure.wire, figure.transport, figure.routing
        if figure.median is not None:  # a wrong result has none
            groups.setdefault(key, []).append(Point(figure.wire_bytes, figure.median))
    usable = {key: group for key, group in groups.items() if len({point.wire_bytes for point in group}) > 1}
    return {key: fit_points(group) for key, group in usable.items()}


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
        """Of a rank."""
        if self.hosts > 1 and self.transport == "direct":
            raise ArgumentError(f"transport is 'direct' over {self.hosts} hosts, expected one host, or 'staged'")
        plan = plan_memory(
            self.ranks, self.experts, self.top_k, self.hidden, self.max_tokens, rank=rank, heap=self.heap,
            wire=self.wire, combine_wire=self.combine_wire, grad_wire=self.grad_wire,
            transport="staged" if self.hosts > 1 else self.transport, lanes=self.lanes, align=self.align,
            invariant=self.invariant, dtype=self.dtype,
        )  # fmt: skip
        spread = f"ranks of {self.hosts} hosts do not share memory"
        return replace(plan, reason=spread) if self.hosts > 1 else plan

    def legs(self, transport: str, wire: str | WireFormat | None = None) -> tuple[Leg, Leg]:
        """Dispatch and combine; or ordinary ones with `wire` on both instead of their own."""
        settings = self.settings(transport, wire)
        return plan_traffic(settings, self.ranks, self.max_tokens, self.dtype, transport, self.hosts)

    def round_memory(self) -> RoundMemory:
        """Of a rank, over the staged transport."""
        return staged_memory(self.settings("staged"), self.ranks, self.dtype)

    def settings(self, transport: str, wire: str | WireFormat | None = None) -> ParallelSettings:
        """Of a round over that transport; with `wire`, an ordinary one with it on both legs."""
        return ParallelSettings.of(
            self.experts, self.top_k, self.hidden, self.max_tokens, wire=wire or self.wire,
            combine_wire=wire or self.combine_wire, grad_wire=self.grad_wire, transport=transport, lanes=self.lanes,
            align=self.align, invariant=self.invariant and wire is None, num_programs=None, timeout=None,
            dtype=self.dtype,
        )  # fmt: skip


@dataclass(frozen=True)
class Planned:
    """A plan.

    Attributes:
        fan_out: ranks that a token goes to, on average, its own included.
        plain: the same legs with the wire format `none`.
        seconds: predicted for each leg and each plain leg; None without a model for it.
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
        """For `--json`."""
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


def make_plan(request: Request, model: Model | None, fits: dict[str, Fit] | None = None) -> Planned:
    """A plan by a model, or by fits of the legs of that name; those of plain legs are then not known.

    Raises:
        ArgumentError, RoutingError, WireFormatError, TransportUnavailable: an argument cannot be planned, and is named.
    """
    memory = request.memory()
    legs, plain = request.legs(memory.transport), request.legs(memory.transport, "none")
    seconds: tuple[float | None, ...]
    if fits is not None:
        seconds = (*(fits[leg.name].seconds(leg.wire_bytes) for leg in legs), None, None)
    elif model is not None:
        seconds = tuple(model.seconds(leg) for leg in (*legs, *plain))
    else:
        seconds = (None,) * 4
    fan_out = sum(reach(request.experts, request.top_k, request.ranks))
    round_memory = request.round_memory() if memory.transport == "staged" else None
    return Planned(request, memory, fan_out, legs, plain, seconds, round_memory)


def fits_for(request: Request, results: Results) -> dict[str, Fit]:
    """The fits that predict the request's legs: thinwire's, of this wire and transport, with uniform routing.

    Raises:
        ArgumentError: there is none for a leg; the message lists the existing ones. Or the request is invariant.
    """
    if request.invariant:
        raise ArgumentError("fit and invariant were given, expected one of them: what was measured are ordinary rounds")
    fits, memory = fit_results(results), request.memory()
    found = {}
    for leg in request.legs(memory.transport):
        wanted = leg.name, "thinwire", leg.wire, memory.transport, "uniform"
        if wanted not in fits:
            there = "; ".join(" ".join(map(str, key)) for key in fits if key[:2] == wanted[:2]) or "nothing of it"
            raise ArgumentError(f"{results.source}: no two sizes to fit {' '.join(wanted)} by; it has: {there}")
        found[leg.name] = fits[wanted]
    return found


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
