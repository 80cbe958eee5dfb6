"""`thinwire plan`: its options."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from thinwire.errors import ArgumentError
from thinwire.files import write_file
from thinwire.tools.commands.sizes import add_sizes, check_sizes

SUMMARY = "predict memory, bytes and times of an ExpertParallel"
DESCRIPTION = """\
Predicts the memory of each rank (to the byte), the bytes of each leg, and the legs' times, before an ExpertParallel
exists. Times come from a model of latency and bandwidth: those of the named link or, with --fit, those fitted to the
results of `thinwire bench --json`. Starts no rank and needs no GPU."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add_sizes(parser)
    machine = parser.add_argument_group("the machine")
    machine.add_argument("--link", help="link between the GPUs of a host, such as nvlink4 or pcie5")
    machine.add_argument("--alpha", type=float, metavar="US", help="latency in microseconds, instead of the link's")
    machine.add_argument("--beta", type=float, metavar="GB/S", help="GB/s in one direction, instead of the link's")
    machine.add_argument("--efficiency", type=float, help="share of beta that is reached (the link's; 1 with --beta)")
    machine.add_argument("--hosts", type=int, default=1, metavar="N", help="hosts that the ranks are spread over (1)")
    machine.add_argument("--inter-link", help="link of each rank to other hosts, such as ib400")
    machine.add_argument("--fit", type=Path, metavar="FILE", help="fit times to this file of `thinwire bench --json`")
    parser.add_argument("--sweep", action="store_true", help="also a line for each of 2, 4 ... 256 ranks")
    parser.add_argument("--json", metavar="FILE", help="also write the plan to this file; - prints nothing else")


def run(options: argparse.Namespace) -> int:
    """Prints the plan."""
    from thinwire.tools.planning.model import chosen_model

    check_sizes(options, "hosts")
    model = chosen_model(
        options.link, options.alpha, options.beta, options.efficiency, options.hosts, options.inter_link
    )
    if options.fit is not None and model is not None and not options.sweep:
        raise ArgumentError("fit and a link were given, expected one of them, or --sweep, which uses the link")
    import torch

    from thinwire.tools.bench.results import read_results
    from thinwire.tools.planning.plan import Request, fits_for, make_plan, sweep
    from thinwire.tools.planning.report import describe, describe_fit, describe_sweep, describe_times

    request = Request(
        options.ranks, options.experts, options.top_k, options.hidden, options.max_tokens, options.wire,
        options.combine_wire, options.grad_wire, options.transport, options.lanes, options.align,
        options.invariant, options.heap, options.hosts, getattr(torch, options.dtype),
    )  # fmt: skip
    results = None if options.fit is None else read_results(options.fit)
    fits = None if results is None else fits_for(request, results)
    planned = make_plan(request, model, fits)
    content = planned.as_json()
    texts = [describe(planned)]
    if results is not None and fits is not None:
        texts.append(describe_fit(planned, fits, results))
        content["fits"] = {
            name: vars(fit)
            | {"beta": fit.beta if math.isfinite(fit.beta) else None, "points": [vars(point) for point in fit.points]}
            for name, fit in fits.items()
        }
    elif model is not None:
        texts.append(describe_times(planned, model))
    else:
        texts.append("time: not predicted; --link, --beta or --fit say by what")
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
