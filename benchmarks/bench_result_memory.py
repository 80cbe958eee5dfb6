"""Measures memory of results: dispatch with `d.tokens`, and combine, in memory that is kept, new, and torch's own.

    python -m benchmarks.bench_result_memory --json benchmarks/results/cpu/result_memory.json

Two processes, in int8. Rounds in each kind of memory run in turn, in one run. A time is that of the slower rank. Every
result is dropped before the next call. Columns:

    memory      kept: an earlier result's, as from the second call on; new: as in the first; torch: torch's allocator
    MiB         of the call's result
    ms          median time of a call
    share       time of a plain copy of the result into used memory, divided by the call's, within rounds
    faults      page faults in a call, median

A virtual machine may return freed pages to its host after seconds (free page reporting, in blocks of huge pages).
Getting them back from the host takes many times as long as the kernel takes to zero them. Pages that torch frees one by
one go there too, so rounds in torch's memory make new memory slower, at the same number of faults. --memory kept new
leaves those rounds out.
"""

from __future__ import annotations

import resource
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a file
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "src")]

import torch

from benchmarks import timing
from thinwire.comm import Communicator
from thinwire.comm.result_memory import ResultMemory
from thinwire.moe.parallel import ExpertParallel

COLUMNS = {
    "tokens": "d",
    "transport": "s",
    "call": "s",
    "memory": "s",
    "MiB": ".1f",
    "ms": ".2f",
    "share": ".3f",
    "faults": ".0f",
}
RANKS = 2
TRANSPORTS = ("direct", "staged")
MEMORIES = ("kept", "new", "torch")
CALLS = ("dispatch and d.tokens", "combine")
_EXPERTS = 64


class _Faults:
    """Page faults of the parts of a call, counted where its laps end."""

    def __init__(self) -> None:
        self.counts: dict[str, list[int]] = {}
        self._before = 0

    def start(self) -> None:
        self._before = _page_faults()

    def end(self, part: str) -> None:
        now = _page_faults()
        self.counts.setdefault(part, []).append(now - self._before)
        self._before = now


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@torch.no_grad()
def measure(
    comm: Communicator, tokens: int, hidden: int, top_k: int, repeats: int, memories: Sequence[str]
) -> dict[str, Any]:
    """One rank's part, for one number of tokens: samples, faults and bytes of every call."""
    laps, faults = timing.Laps(comm.device), _Faults()
    functions: dict[str, Callable[[], None]] = {}
    generator = torch.Generator().manual_seed(comm.rank)
    x = torch.randn(tokens, hidden, generator=generator).bfloat16()
    ids = torch.rand(tokens, _EXPERTS, generator=generator).argsort(1)[:, :top_k].contiguous()
    weights = torch.rand(tokens, top_k, generator=generator)
    num_bytes = {CALLS[1]: x.nbytes}
    expert_out = x
    for transport in TRANSPORTS:
        for memory in memories:
            part = Communicator(comm.group, timeout=comm.timeout)
            if memory == "torch":
                part.result_memory = ResultMemory(least_bytes=1 << 62)
            ep = ExpertParallel(part, _EXPERTS, top_k, hidden, tokens, wire="int8", transport=transport)
            if expert_out is x:
                expert_out = ep.dispatch(x, ids, weights).tokens.clone()
                num_bytes[CALLS[0]] = expert_out.nbytes
            name = f"{transport} {memory}"
            functions[name] = _round(ep, (x, ids, weights), expert_out, memory == "new", (laps, faults), name)
    targets = torch.ones_like(expert_out), torch.ones_like(x)

    def copy() -> None:
        laps.start()
        for call, target, source in zip(CALLS, targets, (expert_out, x), strict=True):
            target.copy_(source)
            laps.end(f"copy {call}")

    functions["copy"] = copy
    samples = timing.interleaved_over_ranks(comm, functions, repeats, sample_seconds=0, laps=laps)
    medians = {part: statistics.median(counts[-repeats:]) for part, counts in faults.counts.items()}
    everyone = comm.all_gather_object(medians)
    return {
        "samples": samples,
        "faults": {part: max(told[part] for told in everyone) for part in medians},
        "bytes": num_bytes,
    }


def _round(
    ep: ExpertParallel,
    sent: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    expert_out: torch.Tensor,
    anew: bool,
    watches: tuple[timing.Laps, _Faults],
    name: str,
) -> Callable[[], None]:
    def run() -> None:
        if anew:
            ep.comm.result_memory.clear()
        for watch in watches:
            watch.start()
        d = ep.dispatch(*sent)
        tokens = d.tokens
        for watch in watches:
            watch.end(f"{name} {CALLS[0]}")
        y = ep.combine(expert_out, d)
        for watch in watches:
            watch.end(f"{name} {CALLS[1]}")
        del tokens, y

    return run


def figures(found: Mapping[str, Any], tokens: int, memories: Sequence[str] = MEMORIES) -> list[dict[str, Any]]:
    """A line for each call in each memory."""
    lines = []
    for transport in TRANSPORTS:
        for call in CALLS:
            for memory in memories:
                part = f"{transport} {memory} {call}"
                lines.append(
                    {
                        "tokens": tokens,
                        "transport": transport,
                        "call": call,
                        "memory": memory,
                        "MiB": found["bytes"][call] / 2**20,
                        "ms": statistics.median(found["samples"][part]) * 1e3,
                        "share": timing.median_ratio(found["samples"][f"copy {call}"], found["samples"][part]),
                        "faults": found["faults"][part],
                    }
                )
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = timing.parser(__doc__, repeats=7, timeout_of="number of tokens")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 8192])
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--memory", nargs="+", choices=MEMORIES, default=list(MEMORIES), help="kinds that take turns")
    options = parser.parse_args(arguments)
    options.device = "cpu"
    described = timing.machine(timing.check_device("cpu"))
    timing.print_machine(described)
    lines = []
    for tokens in options.tokens:
        passed = tokens, options.hidden, options.top_k, options.repeats, options.memory
        lines += figures(timing.run_over_ranks(options, measure, RANKS, *passed)[0], tokens, options.memory)
    settings = {"hidden": options.hidden, "top_k": options.top_k, "repeats": options.repeats}
    timing.finish(options, "result memory", described, (lines, COLUMNS), lines, **settings)


if __name__ == "__main__":
    main()
