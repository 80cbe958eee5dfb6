"""Measures what `invariant=True` costs: bytes and time of a combine in which each expert's row goes home by itself.

    python -m benchmarks.bench_invariant --json benchmarks/results/cpu/invariant_cost.json

Rounds of both kinds, and with the wire format `none`, run in turn on the same tokens, among processes of this host. The
experts return their rows as they came. Columns:

    plain, inv.         bytes of all sums that leave a rank, for each element of its tokens, without and with
    bf16                the same with the format `none`, without
    ms plain, ms inv.   median time of a whole round
    ratio               with divided by without, within the rounds

Below the table: such bytes as `thinwire plan` has them, on 2 and on 8 ranks.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

if not __package__:  # run as a file
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "src")]

import torch

from benchmarks import timing
from thinwire.comm import Communicator
from thinwire.moe.config import ParallelSettings
from thinwire.moe.parallel import ExpertParallel
from thinwire.tools.planning.plan import plan_traffic

COLUMNS = {
    "transport": "s", "wire": "s", "tokens": "d", "plain": ".2f", "inv.": ".2f", "bf16": ".2f", "ms plain": ".2f",
    "ms inv.": ".2f", "ratio": ".3f",
}  # fmt: skip
_HIDDEN, _TOP_K, _EXPERTS = 2048, 8, 64
_PLANNED_RANKS, _PLANNED = (2, 8), (256, 8, 7168, 128)
_WIRES = ("int8", "int8+h64")


@torch.no_grad()
def measure(comm: Communicator, repeats: int, sample_seconds: float) -> dict[str, Any]:
    """One rank's part: the samples of every kind of round, and bytes of its sums."""
    functions: dict[str, Callable[[], object]] = {}
    sent: dict[str, float] = {}
    for transport in ("direct", "staged"):
        for tokens in (16, 512):
            for wire in (*_WIRES, "none"):
                for invariant in (False, True) if wire != "none" else (False,):
                    ep = ExpertParallel(
                        comm, _EXPERTS, _TOP_K, _HIDDEN, tokens, wire=wire, transport=transport, invariant=invariant
                    )
                    name = f"{transport} {wire} {tokens} {invariant}"
                    functions[name], sent[name] = _round(ep, tokens)
    samples = timing.interleaved_over_ranks(comm, functions, repeats, sample_seconds=sample_seconds)
    return {"samples": samples, "sent": sent}


def _round(ep: ExpertParallel, tokens: int) -> tuple[Callable[[], object], float]:
    """A round, and what its combine sends for each element of the tokens here."""
    generator = torch.Generator().manual_seed(ep.comm.rank)
    x = torch.randn(tokens, _HIDDEN, generator=generator).bfloat16()
    ids = torch.rand(tokens, _EXPERTS, generator=generator).topk(_TOP_K).indices
    weights = torch.rand(tokens, _TOP_K, generator=generator)

    def run() -> None:
        d = ep.dispatch(x, ids, weights)
        ep.combine(d.tokens, d)

    d = ep.dispatch(x, ids, weights)
    sent = d.combine_traffic.wire_bytes / x.numel()
    ep.combine(d.tokens, d)
    return run, sent


def figures(by_rank: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line for each kind of round."""
    samples, sent = by_rank[0]["samples"], by_rank[0]["sent"]
    lines = []
    for name in sent:
        transport, wire, tokens, invariant = name.split()
        if wire == "none" or invariant == "True":
            continue
        other = f"{transport} {wire} {tokens} True"
        lines.append(
            {
                "transport": transport,
                "wire": wire,
                "tokens": int(tokens),
                "plain": sent[name],
                "inv.": sent[other],
                "bf16": sent[f"{transport} none {tokens} False"],
                "ms plain": statistics.median(samples[name]) * 1e3,
                "ms inv.": statistics.median(samples[other]) * 1e3,
                "ratio": timing.median_ratio(samples[other], samples[name]),
            }  # fmt: skip
        )
    return lines


def planned() -> dict[str, float]:
    """Bytes of a rank's sums for each element of its tokens, with uniform routing: none is measured."""
    experts, top_k, hidden, tokens = _PLANNED
    found = {}
    kinds = ("int8", "int8", False), ("int8, invariant", "int8", True), ("bf16", "none", False)
    for ranks, (name, wire, invariant) in product(_PLANNED_RANKS, kinds):
        settings = ParallelSettings.of(
            experts, top_k, hidden, tokens, wire=wire, combine_wire=None, grad_wire=None, transport="direct", lanes=1,
            align=1, invariant=invariant, num_programs=None, timeout=None, dtype=torch.bfloat16,
        )  # fmt: skip
        combine = plan_traffic(settings, ranks, tokens, torch.bfloat16, "direct")[1]
        found[f"{name}, {ranks} ranks"] = combine.wire_bytes / (tokens * hidden)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = timing.parser(__doc__, repeats=15, timeout_of="run")
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args(arguments)
    options.device = "cpu"
    described = timing.machine(timing.check_device("cpu"))
    timing.print_machine(described)
    by_rank = timing.run_over_ranks(options, measure, options.ranks, options.repeats, options.sample_seconds)
    lines, by_plan = figures(by_rank), planned()
    timing.finish(
        options, "invariant", described, (lines, COLUMNS), lines, ranks=options.ranks, repeats=options.repeats,
        planned_bytes_an_element=by_plan,
    )  # fmt: skip
    print("planned: " + "; ".join(f"{name}: {value:.2f}" for name, value in by_plan.items()))


if __name__ == "__main__":
    main()
