"""`thinwire plan`: its options."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from thinwire.errors import ArgumentError
from thinwire.files import write_file
from thinwire.tools.commands.sizes import add_sizes, check_sizes
from thinwire.tools.planning.model import GPUS, LINKS, chosen_model, find_gpu

SUMMARY = "predict memory, bytes and times of an ExpertParallel"
DESCRIPTION = """\
Predicts the memory of each rank, the bytes of each leg, and the legs' times, before an
ExpertParallel exists. Times come from a model of latency and bandwidth: those of the GPU's link, of
the named link or, with --fit, those fitted to the results of `thinwire bench --json`. It starts no
rank and needs no GPU.

  thinwire plan --model deepseek-v3 --ranks 8 --max-tokens 4096 --gpu h100"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add_sizes(parser, need_ranks=False)
    add = parser.add_argument_group("the machine").add_argument
    add("--gpu", metavar="NAME", help=f"Print the share of this card's memory, take its link: {', '.join(GPUS)}.")
    add("--link", metavar="NAME", help=f"Connect the ranks of a host by this link: {', '.join(LINKS)}.")
    add("--alpha", type=float, metavar="US", help="Take this latency in microseconds instead of the link's.")
    add("--beta", type=float, metavar="GB/S", help="Take these GB/s in one direction instead of the link's.")
    add("--efficiency", type=float, metavar="SHARE", help="Reach this share of beta (the link's; 1 with --beta).")
    add("--hosts", default="1", metavar="N", help="Spread the ranks over so many hosts (1), or, as 2x8, over 2 of 8 "
        "ranks, and count what crosses between hosts on one level and on two.")  # fmt: skip
    rules = "uniform, zipf:S, hot:SHARE, maxvio:V, or demo, the packaged model's with its text"
    add("--routing", metavar="RULE", help=f"Count what crosses with this routing: {rules} (uniform).")
    add(
        "--expert-map",
        type=Path,
        metavar="FILE",
        help="Count it with this JSON list of the rank that owns each expert.",
    )
    add("--inter-link", metavar="NAME", help="Connect each rank to other hosts by this link, one of those above.")
    add("--fit", type=Path, metavar="FILE", help="Fit times to this file of `thinwire bench --json`.")
    parser.add_argument("--sweep", action="store_true", help="Also print a line for each of 2, 4 ... 256 ranks.")
    parser.add_argument("--json", metavar="FILE", help="Also write the plan to this file; - prints nothing else.")


def run(options: argparse.Namespace) -> int:
    """Prints the plan."""
    crosses = _read_hosts(options) or options.routing is not None or options.expert_map is not None
    check_sizes(options, "hosts")
    link = options.link
    if options.gpu is not None:
        card = find_gpu(options.gpu)
        if options.fit is None and options.beta is None and (options.hosts == 1 or options.inter_link is not None):
            link = link or card.link
    model = chosen_model(link, options.alpha, options.beta, options.efficiency, options.hosts, options.inter_link)
    if options.fit is not None and model is not None and not options.sweep:
        raise ArgumentError("fit and a link were given, expected one of them, or --sweep, which uses the link")
    import torch

    from thinwire.tools.bench.results import read_results
    from thinwire.tools.planning.crossing import count_crossings
    from thinwire.tools.planning.plan import FittedModel, Request, make_plan, sweep
    from thinwire.tools.planning.report import describe, describe_hosts, describe_sweep, describe_times

    request = Request(
        options.ranks, options.experts, options.top_k, options.hidden, options.max_tokens, options.wire,
        options.combine_wire, options.grad_wire, options.transport, options.lanes, options.align,
        options.invariant, options.heap, options.hosts, getattr(torch, options.dtype),
    )  # fmt: skip
    used = model if options.fit is None else FittedModel.of(request, read_results(options.fit))
    planned = make_plan(request, used)
    content = planned.as_json() | {"gpu": None if options.gpu is None else vars(card)}
    texts = [describe(planned, options.gpu)]
    if crosses:
        crossings = count_crossings(request, options.routing or "uniform", options.expert_map)
        texts.append(describe_hosts(crossings, request))
        content["crossings"] = asdict(crossings)
    if used is not None:
        texts.append(describe_times(planned, used))
    else:
        by = "--inter-link" if options.gpu is not None else "--gpu, --link, --beta or --fit"
        texts.append(f"time: not predicted; {by} would say by what")
    if options.sweep:
        plans = sweep(request, model)
        texts.append(describe_sweep(plans))
        content["sweep"] = [each.as_json() for each in plans]
    if options.json != "-":
        print("\n\n".join(texts))
    if options.json is not None:
        text = json.dumps(content, indent=1, allow_nan=False)
        if options.json == "-":
            print(text)
        else:
            write_file(options.json, f"{text}\n".encode())
    return 0


def _read_hosts(options: argparse.Namespace) -> bool:
    """Puts both numbers of --hosts, as 2x8, into hosts and ranks; whether there are two."""
    given, (hosts, by, each) = options.hosts, options.hosts.partition("x")
    if not hosts.isdecimal() or bool(by) != each.isdecimal():
        raise ArgumentError(f"hosts is {given!r}, expected a number, or those of hosts and of each one's ranks, as 2x8")
    options.hosts, ranks = int(hosts), int(hosts) * int(each) if by else options.ranks
    if ranks is None or options.ranks not in (None, ranks):
        raise ArgumentError(f"ranks is {options.ranks} with hosts {given}, expected their product, or --hosts as 2x8")
    options.ranks = ranks
    return bool(by)
