"""A whole plan: memory, bytes and predicted seconds of one ExpertParallel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from thinwire.errors import ArgumentError
from thinwire.moe.config import ParallelSettings
from thinwire.moe.memory import MemoryPlan, plan_memory
from thinwire.tools.bench.results import Results
from thinwire.tools.planning.fit import Fit, fit_results
from thinwire.tools.planning.model import Model
from thinwire.tools.planning.traffic import Leg, RoundMemory, plan_traffic, reach, staged_memory
from thinwire.wire import WireFormat

RANKS_SWEPT = (2, 4, 8, 16, 32, 64, 128, 256)


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
