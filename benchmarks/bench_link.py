"""What int8 gains where the network is the limit: two hosts, joined by a link of 1 and of 10 Gbit/s.

    sudo .venv/bin/python -m benchmarks.bench_link --json benchmarks/results/cpu/link.json

The hosts are two network namespaces of this machine (`benchmarks/link.py` says how), a rank each, over Gloo. Each rank
sends the other --rows bfloat16 rows, 32 MiB of them if nothing else is said, and receives as many; rows for itself it
has none. Quantising, packing, unpacking and dequantising are within the times.

`x all_to_all` compares with `torch.distributed.all_to_all_single` of the same bfloat16 rows, in the same run. Gloo's
all-to-all announces what it will receive only after it has begun to send, on the same connection: whichever rank comes
second hears of it behind all the other's rows, and the two directions take turns. So `x best bf16` compares with the
fastest way to move the rows unquantised instead, which is a receive posted before the send.

`Gbit/s` is what a rank sent in a second, without the headers of TCP and IP, which take 4.4 % of the link. Both hosts
share this machine's processors, which a link of 10 Gbit/s keeps busy by itself: more cores, more gain.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a file
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "src")]

import torch
import torch.distributed as dist

from benchmarks import link, timing
from thinwire.comm import Communicator
from thinwire.fused.all_to_all import all_to_all_v
from thinwire.wire import WireFormat

COLLECTIVE = "all_to_all_single bf16"
EXACT = ("isend, irecv bf16", "thinwire none")
COLUMNS = {
    "link": "s",
    "transfer": "s",
    "MB": ".1f",
    "wire MB": ".1f",
    "ms": ".1f",
    "Gbit/s": ".3f",
    "x all_to_all": ".2f",
    "x best bf16": ".2f",
    "error": ".4f",
}
GOALS = {("1gbit", "thinwire int8"): 1.9}


def measure(comm: Communicator, *, rows: int, hidden: int, wires: Sequence[str], repeats: int) -> dict[str, Any]:
    """One rank's part: `rows` bfloat16 rows [hidden] to the other rank and as many from it, in every way in turn.

    Returns:
        `samples`, the seconds of every transfer on the slower rank; `wire_bytes` that a rank sends; and `error`, the
        relative L2 error of what arrived here.
    """
    other = 1 - comm.rank
    counts = [0, 0]
    counts[other] = rows
    x = torch.randn(rows, hidden, generator=torch.Generator().manual_seed(comm.rank)).bfloat16()
    out = torch.empty_like(x)

    def send_and_receive() -> None:
        works = [dist.irecv(out, other, group=comm.group), dist.isend(x, other, group=comm.group)]
        for work in works:
            work.wait()

    def transfer(wire: str) -> Callable[[], object]:
        return lambda: all_to_all_v(x, counts, counts, out=out, wire=wire, comm=comm, transport="staged")

    transfers: dict[str, Callable[[], object]] = {
        COLLECTIVE: lambda: dist.all_to_all_single(out, x, counts, counts, group=comm.group),
        EXACT[0]: send_and_receive,
        EXACT[1]: transfer("none"),
    }
    wire_bytes = dict.fromkeys(transfers, x.nbytes)
    for wire in wires:
        transfers[f"thinwire {wire}"] = transfer(wire)
        wire_bytes[f"thinwire {wire}"] = rows * WireFormat.parse(wire).row_bytes(hidden, x.dtype)
    sent = torch.randn(rows, hidden, generator=torch.Generator().manual_seed(other)).bfloat16()
    error = {}
    for name, function in transfers.items():
        out.fill_(float("nan"))
        function()
        error[name] = timing.relative_error(out, sent)
    samples = timing.interleaved_over_ranks(comm, transfers, repeats, sample_seconds=0)
    return {"samples": samples, "wire_bytes": wire_bytes, "error": error}


def figures(rate: str, logical_bytes: int, ranks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line for each way to move the rows: medians, and ratios within the rounds."""
    samples = ranks[0]["samples"]
    best = min(EXACT, key=lambda name: statistics.median(samples[name]))
    lines = []
    for name, seconds in samples.items():
        median, wire_bytes = statistics.median(seconds), ranks[0]["wire_bytes"][name]
        lines.append(
            {
                "rate": rate,
                "transfer": name,
                "logical_bytes": logical_bytes,
                "wire_bytes": wire_bytes,
                **timing.spread(seconds),
                "wire_bits_per_second": wire_bytes * 8 / median,
                "ratio_to_all_to_all": timing.median_ratio(samples[COLLECTIVE], seconds),
                "ratio_to_best_bf16": timing.median_ratio(samples[best], seconds),
                "error": max(rank["error"][name] for rank in ranks),
                "samples": seconds,
            }
        )
    return lines


def _columns(line: dict[str, Any]) -> dict[str, Any]:
    return {
        **line,
        "link": line["rate"],
        "MB": line["logical_bytes"] / 1e6,
        "wire MB": line["wire_bytes"] / 1e6,
        "ms": line["seconds"] * 1e3,
        "Gbit/s": line["wire_bits_per_second"] / 1e9,
        "x all_to_all": line["ratio_to_all_to_all"],
        "x best bf16": line["ratio_to_best_bf16"],
    }


def _checked_rate(rate: str) -> str:
    try:
        link.burst_bytes(rate)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return rate


def main(arguments: Sequence[str] | None = None) -> None:
    parser = timing.parser(__doc__, repeats=15)
    parser.add_argument(
        "--rate", type=_checked_rate, nargs="+", default=["1gbit", "10gbit"], help="bits a second each way"
    )
    parser.add_argument("--rows", type=int, default=4096, help="rows that each rank sends to the other")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--wires", nargs="+", default=["int8", "int4"], metavar="WIRE")
    options = parser.parse_args(arguments)
    described = timing.machine(timing.check_device("cpu"))
    settings = {name: getattr(options, name) for name in ("rows", "hidden", "wires", "repeats")}
    lines: list[dict[str, Any]] = []
    for rate in options.rate:
        try:
            ranks = link.run_on_two_hosts("benchmarks.bench_link:measure", settings, rate=rate)
        except link.LinkUnavailable as reason:
            print(f"skipped: {reason}")
            return
        lines += figures(rate, options.rows * options.hidden * torch.bfloat16.itemsize, ranks)
    described["congestion_control"] = link.congestion_control()
    timing.print_machine(described)
    table = ([_columns(line) for line in lines], COLUMNS)
    timing.finish(options, "link", described, table, lines, repeats=options.repeats)
    for line in lines:
        goal = GOALS.get((line["rate"], line["transfer"]))
        if goal is not None:
            reached = min(line["ratio_to_all_to_all"], line["ratio_to_best_bf16"])
            print(f"{line['transfer']} at {line['rate']}: {reached:.2f} x, goal {timing.verdict(goal, reached)}")


if __name__ == "__main__":
    main()
