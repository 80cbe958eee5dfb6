"""Measures what int8 gains if the network is the limit: two hosts, joined by a link of 1, 2.5 and 10 Gbit/s.

    sudo .venv/bin/python -m benchmarks.bench_link --json benchmarks/results/cpu/link.json

The hosts are two network namespaces of this machine (see `benchmarks/link.py`), with one rank each, over Gloo. Each
rank sends the other --rows bfloat16 rows, by default 32 MiB, and receives as many; it has no rows for itself. The times
include quantising, packing, unpacking and dequantising.

`x all_to_all` compares with `torch.distributed.all_to_all_single` of the same bfloat16 rows, in the same run. Gloo's
all-to-all announces its receives only after it has begun to send, on the same connection. The second rank reads the
announcement behind all of the other's rows, so the two directions take turns. Therefore `x best bf16` compares with the
fastest way to move the rows unquantised, which is a receive posted before the send.

All of this is done --runs times, each over a new link between new ranks. Times are medians over all samples. Ratios are
medians over runs of the median within a run; in parentheses are the least and the greatest run.

`Gbit/s` is the rate at which a rank sent, without the headers of TCP and IP, which take 4.4 % of the link. Both hosts
share this machine's processors, which a link of 10 Gbit/s keeps busy by itself: more cores gain more.

The second table shows where the time goes, in ms per call, from separate calls, as the mean over ranks and runs:

    whole             from call to return
    call ... unpack   processor time of the thread that calls: before the first piece, to quantise it, to hand it to
                      Gloo, which sends what it can at once, to wait, and to dequantise
    Gloo, other       of the thread of Gloo's that sends and receives, and of one that waits on behalf of the caller's
    in line           time that the caller's and Gloo's thread were ready to run, but found no core free
    link              what the bytes take on the link, with their headers
    cores             processor time of both ranks, by the number of cores

No call can take less than either of the last two. Twice the cores would halve `cores`, except for the work that one
thread must do alone. With half the cores, a link of half the rate shows the same proportion of the two: --rate 5gbit on
two cores is 10gbit on four, at half the speed.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import link, processor_time, timing
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
    "x all_to_all": "s",
    "x best bf16": "s",
    "error": ".4f",
}
PARTS = (
    processor_time.WHOLE, processor_time.OUTSIDE, "pack", "post", "wait for peers", "unpack", processor_time.GLOO,
    processor_time.OTHER, processor_time.IN_LINE,
)  # fmt: skip
GOALS = {(rate, "thinwire int8"): goal for rate, goal in (("1gbit", 1.9), ("2.5gbit", 1.9), ("10gbit", 1.2))}
HEADERS = 1.046  # what a byte takes on the link with those of TCP, IP and Ethernet


def measure(comm: Communicator, *, rows: int, hidden: int, wires: Sequence[str], repeats: int) -> dict[str, Any]:
    """One rank's part: `rows` bfloat16 rows [hidden] to the other rank and as many from it, in every way in turn.

    Returns:
        `samples`, the seconds of every transfer on the slower rank; `wire_bytes` that a rank sends; `error`, the
        relative L2 error of what arrived here; and `account`, what `processor_time.account` says of this rank.
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
    calls = -(-repeats // 3)
    account = {name: processor_time.account(comm, function, calls) for name, function in transfers.items()}
    return {"samples": samples, "wire_bytes": wire_bytes, "error": error, "account": account}


def figures(
    rate: str, logical_bytes: int, runs: Sequence[Sequence[dict[str, Any]]], cores: int
) -> list[dict[str, Any]]:
    """A line for each way to move the rows, from what both ranks measured in each run, on so many cores.

    Times are over all runs; ratios are medians within runs, of all runs and the one in the middle.
    """
    lines = []
    for name, wire_bytes in runs[0][0]["wire_bytes"].items():
        samples = [ranks[0]["samples"] for ranks in runs]
        spread = timing.spread([seconds for run in samples for seconds in run[name]])
        to_all_to_all = [timing.median_ratio(run[COLLECTIVE], run[name]) for run in samples]
        to_best = [timing.median_ratio(run[_best(run)], run[name]) for run in samples]
        accounts = [rank["account"][name] for ranks in runs for rank in ranks]
        lines.append(
            {
                "rate": rate,
                "transfer": name,
                "logical_bytes": logical_bytes,
                "wire_bytes": wire_bytes,
                **spread,
                "wire_bits_per_second": wire_bytes * 8 / spread["seconds"],
                "ratio_to_all_to_all": statistics.median(to_all_to_all),
                "ratio_to_best_bf16": statistics.median(to_best),
                "ratios_to_all_to_all": to_all_to_all,
                "ratios_to_best_bf16": to_best,
                "error": max(rank["error"][name] for ranks in runs for rank in ranks),
                "account": _account(accounts, wire_bytes, rate, cores),
                "samples": [run[name] for run in samples],
            }
        )
    return lines


def _best(samples: dict[str, list[float]]) -> str:
    return min(EXACT, key=lambda name: statistics.median(samples[name]))


def _account(ranks: Sequence[dict[str, float]], wire_bytes: int, rate: str, cores: int) -> dict[str, float]:
    """What the second table shows, in seconds, from `processor_time.account` of all ranks."""
    taken = {name: statistics.fmean(rank.get(name, 0.0) for rank in ranks) for name in PARTS}
    in_all = 2 * sum(taken[name] for name in PARTS if name not in (processor_time.WHOLE, processor_time.IN_LINE))
    return taken | {"link": wire_bytes * 8 * HEADERS / link.bits_per_second(rate), "cores": in_all / cores}


def _columns(line: dict[str, Any]) -> dict[str, Any]:
    return {
        "link": line["rate"],
        "transfer": line["transfer"],
        "MB": line["logical_bytes"] / 1e6,
        "wire MB": line["wire_bytes"] / 1e6,
        "ms": line["seconds"] * 1e3,
        "Gbit/s": line["wire_bits_per_second"] / 1e9,
        "x all_to_all": with_spread(line["ratio_to_all_to_all"], line["ratios_to_all_to_all"]),
        "x best bf16": with_spread(line["ratio_to_best_bf16"], line["ratios_to_best_bf16"]),
        "error": line["error"],
    }


def with_spread(ratio: float, of_runs: Sequence[float]) -> str:
    """A ratio, and the least and the greatest of several runs.

    >>> with_spread(1.5, [1.42, 1.5, 1.557])
    '1.50 (1.42-1.56)'
    """
    return f"{ratio:.2f}" + (f" ({min(of_runs):.2f}-{max(of_runs):.2f})" if len(of_runs) > 1 else "")


def checked_rate(rate: str) -> str:
    try:
        link.bits_per_second(rate)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return rate


@link.or_skipped
def main(arguments: Sequence[str] | None) -> None:
    parser = timing.parser(__doc__, repeats=15)
    parser.add_argument(
        "--rate", type=checked_rate, nargs="+", default=["1gbit", "2.5gbit", "10gbit"], help="bits a second each way"
    )
    parser.add_argument("--runs", type=int, default=5, help="links and pairs of ranks, of --repeats samples each")
    parser.add_argument("--rows", type=int, default=4096, help="rows that each rank sends to the other")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--wires", nargs="+", default=["int8", "int4"], metavar="WIRE")
    options = parser.parse_args(arguments)
    described = timing.machine(timing.check_device("cpu"))
    settings = {name: getattr(options, name) for name in ("rows", "hidden", "wires", "repeats")}
    lines: list[dict[str, Any]] = []
    cores = len(os.sched_getaffinity(0))
    for rate in options.rate:
        job = "benchmarks.bench_link:measure"
        runs = [link.run_on_two_hosts(job, settings, rate=rate) for _ in range(options.runs)]
        lines += figures(rate, options.rows * options.hidden * torch.bfloat16.itemsize, runs, cores)
    described |= {"congestion_control": link.congestion_control(), "cores": cores}
    timing.print_machine(described)
    table = ([_columns(line) for line in lines], COLUMNS)
    timing.finish(options, "link", described, table, lines, repeats=options.repeats, runs=options.runs)
    print("ms a call:")
    accounts = [{name: seconds * 1e3 for name, seconds in line["account"].items()} for line in lines]
    titles = [{"at": line["rate"], "transfer": line["transfer"]} for line in lines]
    columns = {"at": "s", "transfer": "s"} | dict.fromkeys(accounts[0], ".1f")
    timing.print_table([title | account for title, account in zip(titles, accounts, strict=True)], columns)
    for line in lines:
        goal = GOALS.get((line["rate"], line["transfer"]))
        if goal is not None:
            reached = min(line["ratio_to_all_to_all"], line["ratio_to_best_bf16"])
            print(f"{line['transfer']} at {line['rate']}: {reached:.2f} x, goal {timing.verdict(goal, reached)}")


if __name__ == "__main__":
    main()
