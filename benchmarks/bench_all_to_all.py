"""All-to-all of 1 row to 64 MB a rank: thinwire's transports beside the process group's own all-to-all.

    python -m benchmarks.bench_all_to_all --device cpu --json benchmarks/results/cpu/all_to_all.json
    python -m benchmarks.bench_all_to_all --device cuda --ranks 2 4 8

Every rank has --rows bfloat16 rows, which it deals out evenly to all ranks, itself included; what does not divide goes
to the ranks after its own, so that a single row always changes ranks. All transfers run in turn, round after round, in
the same processes; a time is that of the slowest rank, and quantising is within it. Columns:

    MB         of bfloat16 that leave a rank; rows that stay are not counted
    wire MB    what is sent instead
    us         median time of a call
    GB/s       MB in that time
    x bf16     the baseline's time by this one's: how many times as fast
    error      relative L2, of all rows that arrive

The baseline is `torch.distributed.all_to_all_single` of the same bfloat16 rows, over Gloo on CPUs and NCCL on GPUs.
With fewer GPUs than ranks the ranks are threads that share the first one, and the baseline is a plain copy of the rows.
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

from benchmarks import timing
from thinwire.comm import Communicator
from thinwire.errors import TransportUnavailable
from thinwire.fused.all_to_all import all_to_all_v
from thinwire.wire import WireFormat

TRANSFERS = (("direct", "none"), ("direct", "int8"), ("staged", "none"), ("staged", "int8"))
COLUMNS = {
    "ranks": "d",
    "rows": "d",
    "transfer": "s",
    "MB": ".3f",
    "wire MB": ".3f",
    "us": ".1f",
    "GB/s": ".2f",
    "x bf16": ".2f",
    "error": ".4f",
    "goal": "s",
}
GOAL_HIDDEN = 4096
#: Ratios to Gloo's bfloat16, of two ranks on a CPU, by rows a rank and transfer.
GOALS = {
    (1, "direct none"): 10.0,
    (1, "direct int8"): 10.0,
    (64, "direct none"): 3.0,
    (64, "direct int8"): 1.5,
    (4096, "direct none"): 2.0,
    (4096, "direct int8"): 1.3,
}


def deal(rows: int, size: int, rank: int) -> list[int]:
    """How many of its `rows` a rank sends to each of `size` ranks.

    >>> deal(1, 2, 0), deal(1, 2, 1), deal(7, 3, 1)
    ([0, 1], [1, 0], [2, 2, 3])
    """
    return [rows // size + ((peer - rank - 1) % size < rows % size) for peer in range(size)]


def measure(
    comm: Communicator, rows: Sequence[int], hidden: int, repeats: int, sample_seconds: float
) -> list[dict[str, Any]]:
    """One rank's part: for each number of rows the samples of every transfer, its error here and the bytes it sends."""
    return [_measure_rows(comm, number, hidden, repeats, sample_seconds) for number in rows]


def _measure_rows(comm: Communicator, rows: int, hidden: int, repeats: int, sample_seconds: float) -> dict[str, Any]:
    send_counts = deal(rows, comm.size, comm.rank)
    recv_counts = [deal(rows, comm.size, source)[comm.rank] for source in range(comm.size)]
    generator = torch.Generator().manual_seed(1000 * rows + comm.rank)
    x = torch.randn(rows, hidden, generator=generator).bfloat16().to(comm.device)
    out = x.new_empty(sum(recv_counts), hidden)
    leaving = (rows - send_counts[comm.rank]) * hidden
    transfers = _baselines(comm, x, out, send_counts, recv_counts)
    wire_bytes = {name: leaving * (4 if name.endswith("fp32") else 2) for name in transfers}
    baseline = next(iter(transfers))
    transfers[baseline]()
    truth, error, missing = out.clone(), {}, {}

    def transfer(transport: str, wire: str) -> Callable[[], object]:
        return lambda: all_to_all_v(x, send_counts, recv_counts, out=out, wire=wire, comm=comm, transport=transport)

    for transport, wire in TRANSFERS:
        name, function = f"{transport} {wire}", transfer(transport, wire)
        out.fill_(float("nan"))
        try:
            function()
        except TransportUnavailable as reason:
            missing[name] = str(reason)
            continue
        transfers[name] = function
        wire_bytes[name] = leaving // hidden * WireFormat.parse(wire).row_bytes(hidden, x.dtype)
        if baseline != _COPY:
            error[name] = timing.relative_error(out, truth)
    samples = timing.interleaved_over_ranks(comm, transfers, repeats, sample_seconds=sample_seconds)
    return {
        "rows": rows,
        "samples": samples,
        "error": error,
        "logical_bytes": leaving * 2,
        "wire_bytes": wire_bytes,
        "missing": missing,
    }


_COPY = "copy bf16"


def _baselines(
    comm: Communicator, x: torch.Tensor, out: torch.Tensor, send_counts: list[int], recv_counts: list[int]
) -> dict[str, Callable[[], object]]:
    if not dist.is_initialized():  # ranks that are threads have no process group
        return {_COPY: lambda: out.copy_(x)}
    backend, wide, wide_out = dist.get_backend(comm.group), x.float(), out.float()
    return {
        f"{backend} bf16": lambda: dist.all_to_all_single(out, x, recv_counts, send_counts, group=comm.group),
        f"{backend} fp32": lambda: dist.all_to_all_single(wide_out, wide, recv_counts, send_counts, group=comm.group),
    }


def figures(size: int, hidden: int, device: str, ranks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A line for each transfer from what all ranks measured with one number of rows: medians, ratios within rounds."""
    samples, rows = ranks[0]["samples"], ranks[0]["rows"]
    baseline = next(iter(samples))
    lines = []
    for name, seconds in samples.items():
        goals = GOALS if (size, hidden, device) == (2, GOAL_HIDDEN, "cpu") else {}
        lines.append(
            {
                "ranks": size,
                "rows": rows,
                "hidden": hidden,
                "transfer": name,
                "logical_bytes": ranks[0]["logical_bytes"],
                "wire_bytes": ranks[0]["wire_bytes"][name],
                **timing.spread(seconds),
                "baseline": baseline,
                "ratio": timing.median_ratio(samples[baseline], seconds),
                "error": max((rank["error"][name] for rank in ranks if name in rank["error"]), default=0.0),
                "goal": goals.get((rows, name)),
            }
        )
    return lines


def _columns(line: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **line,
        "MB": line["logical_bytes"] / 1e6,
        "wire MB": line["wire_bytes"] / 1e6,
        "us": line["seconds"] * 1e6,
        "GB/s": line["logical_bytes"] / line["seconds"] / 1e9,
        "x bf16": line["ratio"],
        "goal": timing.verdict(line["goal"], line["ratio"]),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = timing.parser(__doc__, repeats=21, timeout_of="number of ranks")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 512, 4096, 8192], help="rows of a rank")
    parser.add_argument("--hidden", type=int, default=4096)
    options = parser.parse_args(arguments)
    device = timing.check_device(options.device)
    described = timing.machine(device)
    timing.print_machine(described)
    lines: list[dict[str, Any]] = []
    missing: dict[str, str] = {}
    for size in options.ranks:
        sizes = (options.rows, options.hidden, options.repeats, options.sample_seconds)
        results = timing.run_over_ranks(options, measure, size, *sizes)
        for ranks in zip(*results, strict=True):
            lines += figures(size, options.hidden, options.device, ranks)
            missing |= ranks[0]["missing"]
    table = ([_columns(line) for line in lines], COLUMNS)
    timing.finish(options, "all_to_all", described, table, lines, repeats=options.repeats, skipped=missing)


if __name__ == "__main__":
    main()
