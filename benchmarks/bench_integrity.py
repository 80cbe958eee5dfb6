"""Measures `integrity="checksum"`: the checksums by themselves, and calls and rounds with and without them.

    python -m benchmarks.bench_integrity --json benchmarks/results/cpu/integrity.json

Two processes have one communicator with checksums and one without. Their calls run in turn, round after round. A time
is that of the slower rank. With checksums, "auto" is the staged transport, and without them here the direct one.
Columns:

    ms off, ms on   median time of a call
    ratio           with divided by without, within the rounds

Before the table: the speed of checksums of rows of 7168 bytes, in the cache and not.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

if not __package__:  # run as a file
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "src")]

import torch

from benchmarks import timing
from thinwire.comm import Communicator
from thinwire.comm.integrity import MODES, Rows, checksums
from thinwire.fused.all_reduce import all_reduce
from thinwire.fused.all_to_all import all_to_all_v
from thinwire.moe.parallel import ExpertParallel

COLUMNS = {"call": "s", "transport": "s", "bytes": "d", "ms off": ".3f", "ms on": ".3f", "ratio": ".3f"}
RANKS = 2
TRANSPORTS = ("staged", "auto")
_ROW, _TOP_K, _EXPERTS = 4096, 4, 16
_SUMMED = {"cached": 256 << 10, "uncached": 256 << 20}  # bytes
_RECORD = 7168


def speed_of_sums(num_bytes: int, repeats: int) -> float:
    """Bytes of rows whose sums are made in a nanosecond, in the fastest of some loops."""
    message, rows = torch.zeros(num_bytes, dtype=torch.uint8), Rows(_RECORD)
    calls = max(1, (16 << 20) // num_bytes)
    fastest = float("inf")
    for _ in range(repeats + 1):
        start = time.perf_counter_ns()
        for _ in range(calls):
            checksums(message, rows, 1)
        fastest = min(fastest, (time.perf_counter_ns() - start) / calls)
    return num_bytes / fastest


def measure(comm: Communicator, repeats: int, sample_seconds: float) -> dict[str, Any]:
    """One rank's part: the samples of every call with and without, what carried it, and a rank's bytes."""
    functions: dict[str, Callable[[], object]] = {}
    about: dict[str, tuple[str, int]] = {}
    for mode in MODES:
        part = Communicator(comm.group, timeout=comm.timeout, integrity=mode)
        for rows in (2, 64, 2048):
            x = torch.randn(rows, _ROW).bfloat16()
            for wire in ("none", "int8"):
                for operation, transport in product((all_to_all_v, all_reduce), TRANSPORTS):
                    name = f"{operation.__name__} {wire} {rows} {transport}"
                    functions[f"{name} {mode}"] = _call(operation, x, wire, part, transport)
                    about[name] = transport, x.nbytes
        for transport in TRANSPORTS:
            for tokens in (8, 512):
                x = torch.randn(tokens, _ROW).bfloat16()
                ep = ExpertParallel(part, _EXPERTS, _TOP_K, _ROW, tokens, transport=transport)
                name = f"round int8 {tokens} {transport}"
                functions[f"{name} {mode}"] = _round(ep, x)
                about[name] = transport, x.nbytes
    samples = timing.interleaved_over_ranks(comm, functions, repeats, sample_seconds=sample_seconds)
    return {"samples": samples, "about": about}


def _call(
    operation: Callable[..., object], x: torch.Tensor, wire: str, comm: Communicator, transport: str
) -> Callable[[], object]:
    return lambda: operation(x, wire=wire, comm=comm, transport=transport)


def _round(ep: ExpertParallel, x: torch.Tensor) -> Callable[[], object]:
    generator = torch.Generator().manual_seed(ep.comm.rank)
    ids = torch.rand(len(x), _EXPERTS, generator=generator).topk(_TOP_K).indices
    weights = torch.rand(len(x), _TOP_K, generator=generator)

    def run() -> None:
        d = ep.dispatch(x, ids, weights)
        ep.combine(d.tokens, d)

    return run


def figures(samples: Mapping[str, Sequence[float]], about: Mapping[str, tuple[str, int]]) -> list[dict[str, Any]]:
    """A line for each call."""
    lines = []
    for name, (transport, num_bytes) in about.items():
        off, on = (samples[f"{name} {mode}"] for mode in MODES)
        lines.append(
            {
                "call": name.removesuffix(f" {transport}"),
                "transport": transport,
                "bytes": num_bytes,
                "ms off": statistics.median(off) * 1e3,
                "ms on": statistics.median(on) * 1e3,
                "ratio": timing.median_ratio(on, off),
            }
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = timing.parser(__doc__, repeats=15, timeout_of="run")
    options = parser.parse_args(arguments)
    options.device = "cpu"
    described = timing.machine(timing.check_device("cpu"))
    timing.print_machine(described)
    speeds = {where: speed_of_sums(num_bytes, options.repeats) for where, num_bytes in _SUMMED.items()}
    print("sums of rows: " + ", ".join(f"{speed:.1f} GB/s {where}" for where, speed in speeds.items()))
    found = timing.run_over_ranks(options, measure, RANKS, options.repeats, options.sample_seconds)[0]
    lines = figures(found["samples"], found["about"])
    timing.finish(
        options, "integrity", described, (lines, COLUMNS), lines, repeats=options.repeats, sums_gb_per_second=speeds
    )


if __name__ == "__main__":
    main()
