"""Times small calls on CPU ranks: when calls follow one another, and when one comes alone.

    python -m benchmarks.bench_small --json benchmarks/results/cpu/small.json

The calls are one row of 4096 bfloat16 to each rank, rounds of 1 and 16 tokens of as many elements, and all-reduce of 1
KiB, in turn with a copy of the row and gloo's all-reduce. One rank waits for nobody, so its time is that of Python and
the kernels. A time is that of the slowest rank. Columns:

    ranks, mode    processes or threads
    us             median time of a call, of many that follow one another
    quartile       the lowest quartile of the same: its time if nothing else needs the cores
    alone          median time of one call after a barrier, by itself, with cold caches
    copies         us divided by the time of the copy of the row, within the rounds
"""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a file
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "src")]

import torch
import torch.distributed as dist

from benchmarks import timing
from thinwire.comm import Communicator
from thinwire.fused.all_to_all import all_to_all_v
from thinwire.fused.ops import all_reduce
from thinwire.moe.parallel import ExpertParallel
from thinwire.testing import run_ranks

COLUMNS = {
    "ranks": "d", "mode": "s", "call": "s", "us": ".1f", "quartile": ".1f", "alone": ".1f", "copies": ".1f",
}  # fmt: skip
#: Microseconds that calls of two ranks may take, of those that follow one another.
GOALS = {
    "all_to_all_v none, counts, out": 25,
    "all_to_all_v int8, counts, out": 25,
    "all_to_all_v none": 35,
    "all_to_all_v int8": 35,
    "round, 16 tokens": 250,
}
HIDDEN, EXPERTS, TOP_K = 4096, 8, 2
_COPY = "copy of a row"


def calls_of(comm: Communicator) -> dict[str, Callable[[], object]]:
    """What is timed, by name."""
    x = torch.ones(comm.size, HIDDEN, dtype=torch.bfloat16)
    out, counts = torch.empty_like(x), [1] * comm.size
    calls: dict[str, Callable[[], object]] = {_COPY: lambda: out[:1].copy_(x[:1])}
    for wire in ("none", "int8"):
        exchange = functools.partial(all_to_all_v, x, wire=wire, comm=comm, transport="direct")
        calls[f"all_to_all_v {wire}, counts, out"] = functools.partial(
            exchange, send_counts=counts, recv_counts=counts, out=out
        )
        calls[f"all_to_all_v {wire}"] = exchange
    ep = ExpertParallel(comm, EXPERTS, TOP_K, HIDDEN, 64, transport="direct")
    for tokens in (1, 16):
        calls[f"round, {tokens} tokens"] = _round(ep, tokens)
    summands = torch.ones(256)
    for wire in ("none", "int8"):
        calls[f"all_reduce {wire}, 1 KiB"] = functools.partial(
            all_reduce, summands, wire=wire, comm=comm, transport="direct"
        )
    if not comm.in_process and dist.is_initialized():
        calls["gloo's all_reduce, 1 KiB"] = functools.partial(dist.all_reduce, summands.clone(), group=comm.group)
    return calls


def _round(ep: ExpertParallel, tokens: int) -> Callable[[], object]:
    x = torch.ones(tokens, HIDDEN, dtype=torch.bfloat16)
    topk_ids = torch.arange(tokens * TOP_K).view(tokens, TOP_K) % EXPERTS
    topk_weights = torch.full((tokens, TOP_K), 1 / TOP_K)

    def run() -> None:
        d = ep.dispatch(x, topk_ids, topk_weights)
        ep.combine(d.tokens, d)

    return run


@torch.no_grad()
def measure(comm: Communicator, repeats: int, sample_seconds: float) -> dict[str, timing.Times]:
    """One rank's part: samples of every call, among others of its kind and alone."""
    torch.set_num_threads(1)
    calls = calls_of(comm)
    return {
        "among": timing.interleaved_over_ranks(comm, calls, repeats, sample_seconds=sample_seconds),
        "alone": timing.interleaved_over_ranks(comm, calls, 4 * repeats, sample_seconds=0),
    }


def figures(ranks: int, mode: str, samples: dict[str, timing.Times]) -> list[dict[str, Any]]:
    """A line for each call."""
    among, alone = samples["among"], samples["alone"]
    return [
        {
            "ranks": ranks,
            "mode": mode,
            "call": name,
            "us": statistics.median(taken) * 1e6,
            "quartile": statistics.quantiles(taken, n=4, method="inclusive")[0] * 1e6,
            "alone": statistics.median(alone[name]) * 1e6,
            "copies": timing.median_ratio(taken, among[_COPY]),
            "goal": GOALS.get(name) if ranks == 2 else None,
        }
        for name, taken in among.items()
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = timing.parser(__doc__, repeats=25, timeout_of="run")
    parser.add_argument("--ranks", default="1,2", help="numbers of ranks (1,2)")
    parser.add_argument("--mode", default="process,thread", help="of process, thread (both)")
    options = parser.parse_args(arguments)
    described = timing.machine(timing.check_device("cpu"))
    timing.print_machine(described)
    lines: list[dict[str, Any]] = []
    for mode in options.mode.split(","):
        for ranks in map(int, options.ranks.split(",")):
            passed = options.repeats, options.sample_seconds
            found = run_ranks(measure, ranks, *passed, mode=mode, device="cpu", timeout=options.timeout)[0]
            lines += figures(ranks, mode, found)
    timing.finish(options, "small", described, (lines, COLUMNS), lines, repeats=options.repeats)
    for line in lines:
        if line["goal"] is not None:
            verdict = "reached" if line["quartile"] <= line["goal"] else "not reached"
            print(f"{line['call']}, {line['mode']}: at most {line['goal']} us, {verdict}")


if __name__ == "__main__":
    main()
