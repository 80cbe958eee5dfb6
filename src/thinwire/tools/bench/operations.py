"""Thinwire's own operations as contenders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from thinwire.fused.all_gather import all_gather
from thinwire.fused.all_reduce import all_reduce
from thinwire.fused.all_to_all import all_to_all_v
from thinwire.fused.empty import empty
from thinwire.fused.partition import gathered_parts, split_parts
from thinwire.fused.reduce_scatter import reduce_scatter
from thinwire.moe.dispatched import Dispatched
from thinwire.moe.parallel import ExpertParallel
from thinwire.tools.bench.checks import Verdict
from thinwire.tools.bench.contender import Candidate, Contender, label_of, of_collective
from thinwire.tools.bench.expert_problem import Round
from thinwire.tools.bench.problems import AllGather, AllReduce, AllToAll, Problem, ReduceScatter
from thinwire.tools.bench.timing import Laps
from thinwire.wire import WireFormat

NAME, STRAIGHT = "thinwire", "tw.empty"


def collective(problem: Problem, wire: str, transport: str) -> Candidate:
    """A collective over one wire and transport."""
    return Candidate(NAME, wire, transport, lambda: _collective(problem, wire, transport))


def straight(problem: AllToAll | AllGather) -> Candidate:
    """An exact collective into a tensor of `thinwire.empty`."""

    def make() -> Contender:
        comm, out = problem.comm, problem.out
        most = max(comm.all_gather_object(len(out)))
        memory = empty(most, *out.shape[1:], dtype=out.dtype, comm=comm)
        return replace(_collective(problem, "none", "direct", memory[: len(out)]), implementation=STRAIGHT)

    return Candidate(STRAIGHT, "none", "direct", make)


def _collective(problem: Problem, wire: str, transport: str, out: torch.Tensor | None = None) -> Contender:
    out = problem.out if out is None else out
    call, parsed = _call(problem, wire, transport, out), WireFormat.parse(wire)
    judge = partial(problem.judge, wire=parsed)
    sent, direct = sent_bytes(problem, parsed), transport == "direct"
    return of_collective(NAME, problem, call, judge, sent, wire, transport, out=out, captured=direct)


def _call(problem: Problem, wire: str, transport: str, out: torch.Tensor) -> Callable[[], object]:
    x, comm = problem.x, problem.comm
    if isinstance(problem, AllToAll):
        counts = problem.send_counts, problem.recv_counts
        return partial(all_to_all_v, x, *counts, out=out, wire=wire, comm=comm, transport=transport)
    operations = {"all_gather": all_gather, "reduce_scatter": reduce_scatter, "all_reduce": all_reduce}
    return partial(operations[problem.operation], x, out=out, wire=wire, comm=comm, transport=transport)


def sent_bytes(problem: Problem, wire: WireFormat) -> int:
    """Bytes of records that leave this rank."""
    rank, size = problem.comm.rank, problem.comm.size
    if isinstance(problem, AllToAll):
        if not wire.quantized:
            return int(problem.logical_bytes)
        return problem.leaving * wire.row_bytes(problem.width)
    if isinstance(problem, AllReduce):
        parts, row = split_parts(problem.elements, size)
    else:
        share = problem.share if isinstance(problem, ReduceScatter) else problem.rows
        parts, row = gathered_parts([share] * size)
        if not wire.quantized and problem.operation == "all_gather":
            return int(problem.logical_bytes)
    rows = [-(-count // row) for count in parts.counts]
    to_owners, to_all = sum(rows) - rows[rank], (size - 1) * rows[rank]
    legs = {"all_gather": to_all, "reduce_scatter": to_owners, "all_reduce": to_owners + to_all}
    return legs[problem.operation] * wire.row_bytes(row, problem.dtype)


def expert_round(problem: Round, wire: str, transport: str, laps: Laps) -> Candidate:
    """Dispatch and combine over one wire and transport."""
    return Candidate(NAME, wire, transport, lambda: _expert_round(problem, wire, transport, laps))


def _expert_round(problem: Round, wire: str, transport: str, laps: Laps) -> Contender:
    ep = ExpertParallel(
        problem.comm,
        problem.experts,
        problem.top_k,
        problem.hidden,
        problem.tokens,
        wire=wire,
        transport=transport,
        dtype=problem.dtype,
    )
    parsed, on_gpu = WireFormat.parse(wire), problem.x.is_cuda
    label = label_of(NAME, wire, transport)

    def dispatch() -> tuple[Dispatched, torch.Tensor]:
        d = ep.dispatch(problem.x, problem.topk_ids, problem.topk_weights)
        # Rows for experts, sorted, in one tensor; on a GPU without a wait for the host.
        return d, d.gather(problem.expert_rows)[0] if on_gpu else d.tokens

    def combine(expert_out: torch.Tensor, d: Dispatched) -> torch.Tensor:
        return ep.combine(expert_out, d, out=problem.out)

    parts: list[Callable[..., Any]] = [dispatch, problem.experts_on, combine]

    def run() -> Mapping[str, torch.Tensor]:
        laps.start()
        d, tokens = parts[0]()
        laps.end(f"{label} dispatch")
        expert_out = parts[1](tokens)
        laps.skip()
        y = parts[2](expert_out, d)
        laps.end(f"{label} combine", f"{label} moe")
        return {"dispatch": tokens, "combine": y, "moe": y}

    def judge(operation: str, got: torch.Tensor) -> Verdict:
        return (problem.judge_dispatch if operation == "dispatch" else problem.judge_combine)(got, parsed)

    d = ep.dispatch(problem.x, problem.topk_ids, problem.topk_weights)
    sent = {"dispatch": d.dispatch_traffic.wire_bytes, "combine": d.combine_traffic.wire_bytes}
    ep.combine(d.tokens, d)
    sent["moe"] = sum(sent.values())
    captured = parts if transport == "direct" else []
    return Contender(NAME, wire, transport, run, judge, sent, (problem.out,), (problem.x,), ep.close, captured)
