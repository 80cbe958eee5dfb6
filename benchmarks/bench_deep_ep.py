"""Measures what DeepEP's API over thinwire costs beside `ExpertParallel`, for the same tokens and routing.

    python -m benchmarks.bench_deep_ep --json benchmarks/results/cpu/deep_ep.json

A pair is a dispatch, with its layout, and a combine of the rows that came, one for each token and rank. Experts return
them as they came. Both run in turn among processes of this host, and so does the pair of a plan that was made before.
Columns:

    ms pair    median time of `ExpertParallel`'s dispatch, records and combine(weighted=True)
    ms deep_ep, ms plan    of DeepEP's calls; of `ExchangePlan.there` and `back`
    ratio      deep_ep's by ExpertParallel's, within the rounds, and the plan's
    MiB pair, MiB deep_ep  what rank 0's resident memory grew by at most while it made this and ran it three times, in
        processes of its own
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import timing
from thinwire.comm import Communicator
from thinwire.fused.exchange_plan import ExchangePlan
from thinwire.integrations import deep_ep
from thinwire.moe.parallel import ExpertParallel

COLUMNS = {
    "wire": "s", "tokens": "d", "ms pair": ".2f", "ms deep_ep": ".2f", "ratio": ".3f", "ms plan": ".2f",
    "ratio plan": ".3f", "MiB pair": ".1f", "MiB deep_ep": ".1f",
}  # fmt: skip
_HIDDEN, _TOP_K, _EXPERTS = 2048, 8, 64
_WAYS = "pair", "deep_ep", "plan"


@torch.no_grad()
def measure(comm: Communicator, wires: Sequence[str], tokens: Sequence[int], repeats: int) -> dict[str, list[float]]:
    """One rank's part: samples of every way."""
    samples: dict[str, list[float]] = {}
    for wire in wires:
        for count in tokens:
            functions = {f"{wire} {count} {name}": run for name, run in _pairs(comm, wire, count).items()}
            samples |= timing.interleaved_over_ranks(comm, functions, repeats, sample_seconds=0.0)
    return samples


@torch.no_grad()
def peak(comm: Communicator, wire: str, tokens: int, way: str) -> float:
    """MiB of resident memory that one way adds at most to a process of its own, whose kernels are compiled."""
    _pairs(comm, wire, 8)[way]()
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the most resident memory counts from now on
    run = _pairs(comm, wire, tokens, (way,))[way]
    for _ in range(3):
        run()
    return _status("VmHWM") - before


def _pairs(comm: Communicator, wire: str, tokens: int, ways: Sequence[str] = _WAYS) -> dict[str, Callable[[], object]]:
    generator = torch.Generator().manual_seed(comm.rank)
    x = torch.randn(tokens, _HIDDEN, generator=generator).bfloat16()
    ids = torch.rand(tokens, _EXPERTS, generator=generator).topk(_TOP_K).indices
    weights = torch.rand(tokens, _TOP_K, generator=generator)
    ep = ExpertParallel(comm, _EXPERTS, _TOP_K, _HIDDEN, tokens, wire=wire) if "pair" in ways else None
    deep_ep.install(wire=wire)
    buffer = deep_ep.Buffer(comm.group)

    def pair() -> None:
        assert ep is not None
        d = ep.dispatch(x, ids, weights)
        _ = d.record_ids, d.record_weights
        ep.combine(d.records, d, weighted=True)

    def through_api() -> None:
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, _EXPERTS)
        recv, _, _, _, handle, _ = buffer.dispatch(
            x, topk_idx=ids, topk_weights=weights, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
        )  # fmt: skip
        assert handle is not None
        buffer.combine(recv, handle)

    in_rank = buffer.get_dispatch_layout(ids, _EXPERTS)[3]
    made = ExchangePlan(in_rank.t().nonzero()[:, 1], in_rank.sum(0), comm, num_rows=tokens)

    def plan() -> None:
        there: Any = made.there(x, wire=wire)
        made.back(there, wire=wire)

    return dict(zip(_WAYS, (pair, through_api, plan), strict=True))


def _status(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def figures(samples: dict[str, list[float]], memory: dict[str, float]) -> list[dict[str, Any]]:
    """A line for each format and number of tokens."""
    lines = []
    for name in samples:
        wire, tokens, way = name.split()
        if way != "pair":
            continue
        pair, api, plan = (samples[f"{wire} {tokens} {each}"] for each in _WAYS)
        lines.append(
            {
                "wire": wire,
                "tokens": int(tokens),
                "ms pair": statistics.median(pair) * 1e3,
                "ms deep_ep": statistics.median(api) * 1e3,
                "ratio": timing.median_ratio(api, pair),
                "ms plan": statistics.median(plan) * 1e3,
                "ratio plan": timing.median_ratio(plan, pair),
                "MiB pair": memory[name],
                "MiB deep_ep": memory[f"{wire} {tokens} deep_ep"],
            }
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = timing.parser(__doc__, repeats=25, timeout_of="run")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--wires", default="int8,none", help="by commas")
    parser.add_argument("--tokens", default="128,4096", help="of each rank, by commas")
    options = parser.parse_args(arguments)
    options.device = "cpu"
    described = timing.machine(timing.check_device("cpu"))
    timing.print_machine(described)
    wires, tokens = options.wires.split(","), [int(each) for each in options.tokens.split(",")]
    by_rank = timing.run_over_ranks(options, measure, options.ranks, wires, tokens, options.repeats)
    memory = {}
    for name in by_rank[0]:
        wire, count, way = name.split()
        if way in _WAYS[:2]:
            memory[name] = timing.run_over_ranks(options, peak, options.ranks, wire, int(count), way)[0]
    lines = figures(by_rank[0], memory)
    timing.finish(
        options, "deep_ep", described, (lines, COLUMNS), lines, ranks=options.ranks, repeats=options.repeats
    )  # fmt: skip


if __name__ == "__main__":
    main()
