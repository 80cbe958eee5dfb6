"""Measures what two levels gain where hosts of several ranks are joined by a link of 1 and of 10 Gbit/s.

    sudo .venv/bin/python -m benchmarks.bench_two_level --json benchmarks/results/cpu/two_level.json

The hosts are two network namespaces of this machine (see `benchmarks/link.py`), with --ranks-per-host ranks each.
A round is a dispatch of --host-tokens bfloat16 tokens a host to --top-k of --experts experts, drawn evenly, which give
back what they get, and the combine. `fp8, none` sends the tokens in fp8 and the sums back in bfloat16. The collectives
are of --mebibytes MiB of bfloat16 a rank.

Ways to do the same take turns in the same ranks, a sample of each in every round. Times are medians over all samples,
each of the slowest rank, from call to return: quantising, packing and what is handed to experts are part of them.
`x int8` compares with one level of the same operation in int8, `x bf16` with one level that sends bfloat16: for rounds
thinwire's format `none`, for collectives torch.distributed over Gloo. Ratios are medians over --runs runs of the median
within a run; in parentheses are the least and the greatest run. Each run has a new link between new ranks. `tokens` is
the part of a round in which a rank makes its experts' rows of what came, which no link limits: the last lines also say
what is gained without it.

The other columns are from calls of their own, between barriers:

    link MB     what a host sent in a call: the bytes that its interface counted, less 66 bytes of headers for each
                packet counted (of Ethernet, IP, and TCP with a time stamp), so what TCP carried
    predicted   MB that a host must send. Of a round, from the routing: a message for each token and place with its
                experts, and a record back; a place is another host for two levels, and a rank of another host for one.
                Of a collective, a record for each row and rank that it goes to
    off         how much more than that was sent, in per cent
    link share  of what the link can carry without headers, which take 4.4 % of it
    cores       processor time of all ranks by time and cores; what the kernel does for packets is partly not in there
    machine     the same of all that ran on this machine meanwhile, the kernel included

Both hosts share this machine's processors: where `machine` is near 1 these limit, and not the link. All ways of rounds
are there at once: with 8192 tokens a host 2 ranks a host take about 8 GB of memory, 4 ranks 12 GB.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import thinwire as tw
from benchmarks import link, timing
from benchmarks.bench_link import HEADERS, checked_rate, with_spread
from thinwire.comm import Communicator
from thinwire.fused.partition import gathered_parts, split_parts
from thinwire.moe.routing import expert_range
from thinwire.wire import WireFormat

ROUND, ALL_REDUCE, ALL_GATHER = OPERATIONS = ("round", "all_reduce", "all_gather")
ONE_LEVEL, TWO_LEVELS, ONE_LEVEL_BF16, OTHERS, GLOO = (
    "one level int8", "two levels int8", "one level none", "two levels fp8, none", "gloo bf16",
)  # fmt: skip
TRANSPORTS = {"one": "staged", "two": "two_level"}  # by the first word of a way
WIRES = {ONE_LEVEL: ("int8", "int8"), TWO_LEVELS: ("int8", "int8"), ONE_LEVEL_BF16: ("none", "none"),
         OTHERS: ("fp8", "none")}  # fmt: skip
WAYS = {ROUND: (ONE_LEVEL, ONE_LEVEL_BF16, TWO_LEVELS, OTHERS), ALL_REDUCE: (ONE_LEVEL, GLOO, TWO_LEVELS),
        ALL_GATHER: (ONE_LEVEL, GLOO, TWO_LEVELS)}  # fmt: skip
PARTS = ("dispatch", "tokens", "combine")
LEGS = ": legs"  # dispatch and combine alone
#: By ranks of a host: what rounds of two levels in int8 are to gain at 1 Gbit/s, over int8 and over bfloat16.
GOALS = {2: (1.7, 3.0), 4: (1.8, 3.5)}
COLUMNS = {
    "link": "s", "ranks": "s", "operation": "s", "way": "s", "ms": ".0f", "dispatch": "s", "tokens": "s",
    "combine": "s", "link MB": ".1f", "predicted": "s", "off": "s", "link share": ".2f", "cores": ".2f",
    "machine": ".2f", "x int8": "s", "x bf16": "s", "error": ".4f",
}  # fmt: skip
HEADER_BYTES = 66
#: PyTorch 2.13 has a new name for it, and warns of the old one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_METERS = ("bytes", "packets", "rank", "machine", "seconds")


@torch.no_grad()
def measure(
    comm: Communicator, *, operations: Sequence[str], ways: Sequence[str], repeats: int, **sizes: int
) -> dict[str, dict[str, Any]]:
    """One rank's part, in every way in turn.

    Returns:
        For each operation `samples`, the seconds of every call on the slowest rank; `meters`, what a call took of link
        and processors; `error`, the relative L2 error here; and `predicted`, what each host must send.
    """
    measured = {}
    for operation in operations:
        chosen = [way for way in WAYS[operation] if way in ways]
        measured[operation] = (
            _measure_rounds(comm, chosen, repeats, **sizes)
            if operation == ROUND
            else _measure_collective(comm, operation, chosen, repeats, sizes["mebibytes"])
        )
    return measured


def _measure_rounds(
    comm: Communicator,
    ways: Sequence[str],
    repeats: int,
    *,
    tokens: int,
    hidden: int,
    experts: int,
    top_k: int,
    **_: int,
) -> dict[str, Any]:
    all_ids = [_routing(rank, tokens, experts, top_k)[0] for rank in range(comm.size)]
    ids, weights = _routing(comm.rank, tokens, experts, top_k)
    x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(comm.rank)).bfloat16()
    laps, rounds, error, predicted = timing.Laps(comm.device), {}, {}, {}
    parallel = {
        way: tw.ExpertParallel(
            comm, experts, top_k, hidden, tokens, wire=WIRES[way][0], combine_wire=WIRES[way][1],
            transport=TRANSPORTS[way.split()[0]], dtype=torch.bfloat16,
        )
        for way in ways
    }  # fmt: skip

    def round_of(way: str) -> Callable[[], torch.Tensor]:
        ep = parallel[way]

        def run() -> torch.Tensor:
            laps.start()
            d = ep.dispatch(x, ids, weights)
            laps.end(f"{way}: dispatch")
            outputs = d.tokens
            laps.end(f"{way}: tokens")
            y = ep.combine(outputs, d)
            laps.end(f"{way}: combine", whole=way)
            return y

        return run

    for way in ways:
        rounds[way] = round_of(way)
        error[way] = timing.relative_error(rounds[way](), x)  # the weights of a token add up to 1
        there, back = (WireFormat.parse(wire).row_bytes(hidden, x.dtype) for wire in WIRES[way])
        messages = crossings(all_ids, comm.hosts, experts, by_host=way.startswith("two"))
        # A host sends its tokens' messages, and records back to those of the other; kernels need a multiple of 16.
        message_bytes = -(-(there + 8 * top_k + 4) // 16) * 16
        predicted[way] = [
            own * message_bytes + other * back for own, other in zip(messages, messages[::-1], strict=True)
        ]
    samples = timing.interleaved_over_ranks(comm, rounds, repeats, sample_seconds=0, laps=laps)
    for way in ways:
        there_and_back = zip(samples[f"{way}: dispatch"], samples[f"{way}: combine"], strict=True)
        samples[way + LEGS] = [sum(legs) for legs in there_and_back]
    meters = {way: _metered(comm, run, -(-repeats // 3)) for way, run in rounds.items()}
    for ep in parallel.values():
        ep.close()
    return {"samples": samples, "meters": meters, "error": error, "predicted": predicted}


def _routing(rank: int, tokens: int, experts: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of a rank's tokens, and their weights."""
    generator = torch.Generator().manual_seed(rank)
    ids = torch.rand(tokens, experts, generator=generator).topk(top_k, 1).indices.int()
    weights = torch.rand(tokens, top_k, generator=generator)
    return ids, weights / weights.sum(1, keepdim=True)


def crossings(ids: Sequence[torch.Tensor], hosts: Sequence[Sequence[int]], experts: int, *, by_host: bool) -> list[int]:
    """How many messages each host sends: one for each token and other host, or rank there, that owns its experts.

    >>> ids = [torch.tensor([[0, 3], [2, 3]]), torch.tensor([[0, 1]]), torch.tensor([[0, 1]]), torch.tensor([[2, 3]])]
    >>> [crossings(ids, ((0, 1), (2, 3)), 4, by_host=by_host) for by_host in (True, False)]
    [[2, 1], [3, 2]]
    """
    sent = []
    for members in hosts:
        places = [
            (number if by_host else rank) for rank in range(len(ids)) for number, of in enumerate(hosts) if rank in of
        ]
        owned = [len(expert_range(experts, len(ids), rank)) for rank in range(len(ids))]
        place_of = torch.tensor(places).repeat_interleave(torch.tensor(owned))
        elsewhere = torch.ones(len(ids), dtype=torch.bool)
        elsewhere[[places[rank] for rank in members]] = False
        own = torch.cat([ids[rank] for rank in members]).long()
        reached = torch.zeros(len(own), len(ids), dtype=torch.bool).scatter_(1, place_of[own], True)
        sent.append(int((reached & elsewhere).sum()))
    return sent


def _measure_collective(
    comm: Communicator, operation: str, ways: Sequence[str], repeats: int, mebibytes: int
) -> dict[str, Any]:
    def input_of(rank: int) -> torch.Tensor:
        return torch.randn(mebibytes << 19, generator=torch.Generator().manual_seed(rank)).bfloat16()

    x = input_of(comm.rank)
    zeros, joined = torch.zeros_like(x), torch.empty(comm.size * len(x), dtype=x.dtype)
    if operation == ALL_REDUCE:
        wanted = torch.stack([input_of(rank)[:1024].float() for rank in range(comm.size)]).sum(0)
    else:
        wanted = input_of(comm.size - 1)[-1024:]

    def calls(way: str) -> Callable[[], Any]:
        if way == GLOO and operation == ALL_REDUCE:
            return lambda: dist.all_reduce(zeros, group=comm.group)  # in place, so that sums do not grow
        if way == GLOO:
            return lambda: _all_gather(joined, x, group=comm.group)
        transport = TRANSPORTS[way.split()[0]]
        if operation == ALL_REDUCE:
            return lambda: tw.all_reduce(x, wire="int8", comm=comm, transport=transport)
        return lambda: tw.all_gather(x, wire="int8", comm=comm, transport=transport)

    functions, error = {way: calls(way) for way in ways}, dict.fromkeys(ways, 0.0)
    for way in ways:
        if way != GLOO:
            y = functions[way]()
            error[way] = timing.relative_error(y[:1024] if operation == ALL_REDUCE else y[-1024:], wanted)
            del y
    samples = timing.interleaved_over_ranks(comm, functions, repeats, sample_seconds=0)
    meters = {way: _metered(comm, function, -(-repeats // 3)) for way, function in functions.items()}
    elements, predicted = len(x), {}
    for way in ways:
        if way != GLOO:
            by_host = way.startswith("two")
            predicted[way] = collective_bytes(operation, elements, comm.hosts, by_host=by_host)
    return {"samples": samples, "meters": meters, "error": error, "predicted": predicted}


def collective_bytes(operation: str, elements: int, hosts: Sequence[Sequence[int]], *, by_host: bool) -> list[int]:
    """What each host sends in int8 to the ranks of others, or to those at the same place there.

    >>> [collective_bytes(ALL_REDUCE, 4 * 4096, ((0, 1), (2, 3)), by_host=by_host) for by_host in (True, False)]
    [[16640, 16640], [33280, 33280]]
    """
    world = sum(map(len, hosts))
    parts, row = split_parts(elements, world) if operation == ALL_REDUCE else gathered_parts([elements] * world)
    rows, sent = [-(-count // row) for count in parts.counts], []
    for members in hosts:
        records = 0
        for place, rank in enumerate(members):
            others = (other[place : place + 1] if by_host else other for other in hosts if other != members)
            for peer in itertools.chain.from_iterable(others):
                records += rows[rank] + (rows[peer] if operation == ALL_REDUCE else 0)
        sent.append(records * WireFormat.parse("int8").row_bytes(row, torch.bfloat16))
    return sent


def _metered(comm: Communicator, function: Callable[[], object], calls: int) -> dict[str, float]:
    """What a call takes, the mean over some. Collective."""
    comm.barrier()
    before = _meters()
    comm.barrier()  # nobody sends before all have looked
    for _ in range(calls):
        function()
    comm.barrier()
    return {name: (after - before[name]) / calls for name, after in _meters().items()}


def _meters() -> dict[str, float]:
    """What this host sent so far, and seconds of this rank's processor time, of all cores' while busy, and of time."""
    devices = dict(line.split(":") for line in Path("/proc/net/dev").read_text().splitlines()[2:])
    counts = next(counts for name, counts in devices.items() if name.strip() == link.INTERFACE).split()
    ticks = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    busy = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")  # all but idle and waiting for a disk
    values = (int(counts[8]), int(counts[9]), time.process_time(), busy, time.perf_counter())
    return dict(zip(_METERS, values, strict=True))


def figures(
    rate: str, ranks_per_host: int, runs: Sequence[Sequence[dict[str, Any]]], cores: int
) -> list[dict[str, Any]]:
    """A line for each operation and way, from what all ranks measured in each run."""
    lines = []
    for operation, of_first in runs[0][0].items():
        samples = [ranks[0][operation]["samples"] for ranks in runs]
        for way in of_first["error"]:
            meters = [[rank[operation]["meters"][way] for rank in ranks] for ranks in runs]
            spread = timing.spread([seconds for run in samples for seconds in run[way]])
            # Of each host, as its first rank saw it.
            sent = [[m["bytes"] - HEADER_BYTES * m["packets"] for m in ranks[::ranks_per_host]] for ranks in meters]
            payload = statistics.median(statistics.fmean(hosts) for hosts in sent)
            available = [ranks[0]["seconds"] * cores for ranks in meters]
            in_ranks = [sum(rank["rank"] for rank in ranks) for ranks in meters]
            line = {
                "rate": rate,
                "ranks_per_host": ranks_per_host,
                "operation": operation,
                "way": way,
                **spread,
                "interface_bytes": statistics.median(ranks[0]["bytes"] for ranks in meters),
                "payload_bytes": payload,
                "predicted_bytes": statistics.fmean(of_first["predicted"][way]) if way != GLOO else None,
                "link_share": payload * 8 * HEADERS / spread["seconds"] / link.bits_per_second(rate),
                "cores": statistics.median(taken / most for taken, most in zip(in_ranks, available, strict=True)),
                "machine": statistics.median(
                    ranks[0]["machine"] / most for ranks, most in zip(meters, available, strict=True)
                ),
                "error": max(rank[operation]["error"][way] for ranks in runs for rank in ranks),
                "samples": [run[way] for run in samples],
            }
            for part in PARTS if operation == ROUND else ():
                line[part] = statistics.median(seconds for run in samples for seconds in run[f"{way}: {part}"])
            for name, baseline in (("int8", ONE_LEVEL), ("bf16", ONE_LEVEL_BF16 if operation == ROUND else GLOO)):
                for of, part in (("ratios", ""), ("legs_ratios", LEGS)):
                    compared = [(run[baseline + part], run[way + part]) for run in samples if baseline + part in run]
                    line[f"{of}_to_{name}"] = [timing.median_ratio(*pair) for pair in compared]
            lines.append(line)
    return lines


def _columns(line: dict[str, Any]) -> dict[str, Any]:
    predicted = line["predicted_bytes"]
    columns = {
        "link": line["rate"],
        "ranks": f"2x{line['ranks_per_host']}",
        "operation": line["operation"],
        "way": line["way"],
        "ms": line["seconds"] * 1e3,
        "link MB": line["payload_bytes"] / 1e6,
        "predicted": f"{predicted / 1e6:.1f}" if predicted else "",
        "off": f"{(line['payload_bytes'] / predicted - 1) * 100:+.2f}" if predicted else "",
        "link share": line["link_share"],
        "cores": line["cores"],
        "machine": line["machine"],
        "error": line["error"],
    }
    columns |= {part: f"{line[part] * 1e3:.0f}" if part in line else "" for part in PARTS}
    for name in ("int8", "bf16"):
        ratios = line[f"ratios_to_{name}"]
        columns[f"x {name}"] = with_spread(statistics.median(ratios), ratios) if ratios else ""
    return columns


@link.or_skipped
def main(arguments: Sequence[str] | None) -> None:
    parser = timing.parser(__doc__, repeats=7)
    parser.add_argument(
        "--rate", type=checked_rate, nargs="+", default=["1gbit", "10gbit"], help="bits a second each way"
    )
    parser.add_argument("--ranks-per-host", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--runs", type=int, default=3, help="links and sets of ranks, of --repeats samples each")
    for name, size in {"host-tokens": 8192, "hidden": 4096, "experts": 64, "top-k": 8, "mebibytes": 32}.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=OPERATIONS)
    every = sorted({way for ways in WAYS.values() for way in ways})
    parser.add_argument("--ways", nargs="+", choices=every, default=every)
    options = parser.parse_args(arguments)
    described = timing.machine(timing.check_device("cpu"))
    cores = len(os.sched_getaffinity(0))
    described |= {"congestion_control": link.congestion_control(), "cores": cores}
    names = ("host_tokens", "hidden", "experts", "top_k", "mebibytes", "operations", "ways", "repeats")
    settings = {name: getattr(options, name) for name in names}
    lines: list[dict[str, Any]] = []
    for ranks_per_host in options.ranks_per_host:
        sizes = settings | {"tokens": options.host_tokens // ranks_per_host}
        for rate in options.rate:
            on_hosts = partial(link.run_on_two_hosts, rate=rate, timeout=1800, ranks_per_host=ranks_per_host)
            runs = [on_hosts("benchmarks.bench_two_level:measure", sizes) for _ in range(options.runs)]
            lines += figures(rate, ranks_per_host, runs, cores)
    timing.print_machine(described)
    table = ([_columns(line) for line in lines], COLUMNS)
    timing.finish(options, "two_level", described, table, lines, **settings, runs=options.runs)
    for line in lines:
        if (line["rate"], line["operation"], line["way"]) == ("1gbit", ROUND, TWO_LEVELS):
            for name, goal in zip(("int8", "bf16"), GOALS.get(line["ranks_per_host"], ()), strict=False):
                if ratios := line[f"ratios_to_{name}"]:
                    ratio, legs = statistics.median(ratios), statistics.median(line[f"legs_ratios_to_{name}"])
                    where = f"2x{line['ranks_per_host']} at 1gbit, to one level {name}"
                    print(f"{where}: {ratio:.2f} x, goal {timing.verdict(goal, ratio)}; without tokens {legs:.2f} x")


if __name__ == "__main__":
    main()
