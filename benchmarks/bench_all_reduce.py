"""All-reduce of 1 KiB to 64 MiB a rank: thinwire's wires and transports beside Gloo's (or NCCL's) own all-reduce.

    python -m benchmarks.bench_all_reduce --device cpu --json benchmarks/results/cpu/all_reduce.json
    sudo .venv/bin/python -m benchmarks.bench_all_reduce --link --json benchmarks/results/cpu/all_reduce_link.json
    python -m benchmarks.bench_all_reduce --device cuda --ranks 2 4 8

Every rank has a bfloat16 tensor of so many bytes, and all end with the sum. All ways run in turn, round after round, in
the same processes; a time is that of the slowest rank, and quantising is within it. A way is named after its transport
and the formats of its two legs: `int8, none` quantises the summands and gathers the sums in 16 bits. Columns:

    MB         of bfloat16 in a rank's tensor
    wire MB    what a rank sends: of a ring's all-reduce for the baselines
    us         median time of a call
    x bf16     the bfloat16 baseline's time by this one's: how many times as fast
    error      relative L2, against the sum in float64

The baselines are `torch.distributed.all_reduce` of the same tensor in bfloat16, and in float32. With --link the ranks
are two hosts joined by a link of limited rate; `benchmarks/link.py` says how, and it needs root. With fewer GPUs than
ranks the ranks are threads that share the first one, and the baseline is a plain copy of the tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a file
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "src")]

import torch
import torch.distributed as dist

from benchmarks import link, timing
from thinwire.comm import Communicator
from thinwire.errors import TransportUnavailable
from thinwire.fused.all_reduce import all_reduce
from thinwire.fused.partition import split_parts
from thinwire.wire import WireFormat

WIRES = (("none", "none"), ("int8", "none"), ("int8", "int8"))
COLUMNS = {
    "where": "s",
    "ranks": "d",
    "way": "s",
    "MB": ".3f",
    "wire MB": ".3f",
    "us": ".1f",
    "x bf16": ".2f",
    "x fp32": ".2f",
    "error": ".4f",
    "goal": "s",
}
#: Ratios to Gloo's bfloat16 over a link of 1 Gbit/s, where bytes are what counts.
GOALS = {("1gbit", "staged int8, none"): 1.25, ("1gbit", "staged int8, int8"): 1.8}
GOAL_BYTES = 32 << 20  # that a tensor has at least where a goal is meant
_COPY = "copy bf16"


def measure(
    comm: Communicator, num_bytes: Sequence[int], repeats: int, sample_seconds: float, transports: Sequence[str]
) -> list[dict[str, Any]]:
    """One rank's part: for each tensor size the samples of every way, its error here and the bytes it sends."""
    return [_measure_size(comm, size, repeats, sample_seconds, transports) for size in num_bytes]


def _measure_size(
    comm: Communicator, num_bytes: int, repeats: int, sample_seconds: float, transports: Sequence[str]
) -> dict[str, Any]:
    elements = num_bytes // 2
    tensors = [torch.randn(elements, generator=torch.Generator().manual_seed(rank)) for rank in range(comm.size)]
    x = tensors[comm.rank].bfloat16().to(comm.device)
    truth = torch.zeros(elements, dtype=torch.float64)
    for tensor in tensors:
        truth += tensor.bfloat16().double()
    out = torch.empty_like(x)
    share = 2 * (comm.size - 1) / comm.size
    ways, wire_bytes = _baselines(comm, x, out), {}
    for name in ways:
        wire_bytes[name] = 0 if name == _COPY else int(share * elements * (4 if name.endswith("fp32") else 2))
    error, missing = {}, {}

    def way(transport: str, wire: str, gather_wire: str) -> Callable[[], object]:
        return lambda: all_reduce(x, out=out, wire=wire, gather_wire=gather_wire, comm=comm, transport=transport)

    for name, function in list(ways.items()):
        function()
        error[name] = _error(out, truth)
    for transport in transports:
        for wire, gather_wire in WIRES:
            name, function = f"{transport} {wire}, {gather_wire}", way(transport, wire, gather_wire)
            out.fill_(float("nan"))
            try:
                function()
            except TransportUnavailable as reason:
                missing[name] = str(reason)
                continue
            ways[name] = function
            wire_bytes[name] = _sent(comm, elements, x.dtype, wire, gather_wire)
            error[name] = _error(out, truth)
    samples = timing.interleaved_over_ranks(comm, ways, repeats, sample_seconds=sample_seconds)
    return {
        "num_bytes": num_bytes,
        "samples": samples,
        "error": error,
        "wire_bytes": wire_bytes,
        "missing": missing,
    }


def _baselines(comm: Communicator, x: torch.Tensor, out: torch.Tensor) -> dict[str, Callable[[], object]]:
    if not dist.is_initialized():  # ranks that are threads have no process group
        return {_COPY: lambda: out.copy_(x)}
    wide, narrow_out, wide_out = x.float(), out, torch.empty_like(x, dtype=torch.float32)

    def reduce(source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source)  # all-reduce works in place, and the sum of sums of sums would overflow
        dist.all_reduce(target, group=comm.group)

    backend = dist.get_backend(comm.group)
    return {
        f"{backend} bf16": lambda: reduce(x, narrow_out),
        f"{backend} fp32": lambda: reduce(wide, wide_out),
    }


def _error(out: torch.Tensor, truth: torch.Tensor) -> float:
    return float((out.double().cpu() - truth).norm() / truth.norm())


def _sent(comm: Communicator, elements: int, dtype: torch.dtype, wire: str, gather_wire: str) -> int:
    """Bytes that leave rank 0 on both legs."""
    parts, row = split_parts(elements, comm.size)
    rows = [-(-count // row) for count in parts.counts]
    leg, gather = (WireFormat.parse(name).row_bytes(row, dtype) for name in (wire, gather_wire))
    return sum(rows[1:]) * leg + (comm.size - 1) * rows[0] * gather


def figures(where: str, ranks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A line for each way from what all ranks measured with one size: medians, and ratios within the rounds."""
    samples, num_bytes = ranks[0]["samples"], ranks[0]["num_bytes"]
    narrow, wide = (list(samples) * 2)[:2] if _COPY in samples else list(samples)[:2]
    lines = []
    for name, seconds in samples.items():
        lines.append(
            {
                "where": where,
                "ranks": len(ranks),
                "way": name,
                "logical_bytes": num_bytes,
                "wire_bytes": ranks[0]["wire_bytes"][name],
                **timing.spread(seconds),
                "ratio_to_bf16": timing.median_ratio(samples[narrow], seconds),
                "ratio_to_fp32": timing.median_ratio(samples[wide], seconds),
                "error": max(rank["error"][name] for rank in ranks),
                "goal": GOALS.get((where, name)) if num_bytes >= GOAL_BYTES else None,
            }
        )
    return lines


def _columns(line: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **line,
        "MB": line["logical_bytes"] / 1e6,
        "wire MB": line["wire_bytes"] / 1e6,
        "us": line["seconds"] * 1e6,
        "x bf16": line["ratio_to_bf16"],
        "x fp32": line["ratio_to_fp32"],
        "goal": timing.verdict(line["goal"], line["ratio_to_bf16"]),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = timing.parser(__doc__, repeats=15, timeout_of="number of ranks")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--num-bytes", type=int, nargs="+", help="of a rank's bfloat16 tensor")
    parser.add_argument("--link", action="store_true", help="between two hosts, joined by a link of limited rate")
    parser.add_argument("--rate", nargs="+", default=["1gbit", "10gbit"], help="with --link: bits a second each way")
    options = parser.parse_args(arguments)
    device = timing.check_device(options.device)
    sizes = options.num_bytes or ([32 << 20] if options.link else [1 << 10, 16 << 10, 256 << 10, 4 << 20, 64 << 20])
    described = timing.machine(device)
    timing.print_machine(described)
    lines: list[dict[str, Any]] = []
    missing: dict[str, str] = {}
    if options.link:
        settings = {"num_bytes": sizes, "repeats": options.repeats, "sample_seconds": 0, "transports": ["staged"]}
        for rate in options.rate:
            try:
                results = link.run_on_two_hosts(
                    "benchmarks.bench_all_reduce:measure", settings, rate=rate, timeout=options.timeout
                )
            except link.LinkUnavailable as reason:
                print(f"skipped: {reason}")
                return
            for ranks in zip(*results, strict=True):
                lines += figures(rate, ranks)
        described["congestion_control"] = link.congestion_control()
    else:
        for size in options.ranks:
            passed = (sizes, options.repeats, options.sample_seconds, ("direct", "staged"))
            results = timing.run_over_ranks(options, measure, size, *passed)
            for ranks in zip(*results, strict=True):
                lines += figures(options.device, ranks)
                missing |= ranks[0]["missing"]
    name, table = "all_reduce_link" if options.link else "all_reduce", ([_columns(line) for line in lines], COLUMNS)
    timing.finish(options, name, described, table, lines, repeats=options.repeats, skipped=missing)


if __name__ == "__main__":
    main()
