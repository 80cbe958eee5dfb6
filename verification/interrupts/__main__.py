"""Interrupts rank 0 of two at many places in every kind of call, and makes the same call again.

Either the call is completed, or the communicator ends at that rank and its peer names it. No rank ever gets a wrong
result. `python -m verification.interrupts --samples 12 --json benchmarks/results/cpu/interrupts.json` runs all of it.
"""

from __future__ import annotations

import argparse
import random
import secrets
import shlex
import sys
import time
from collections import Counter

import torch

from tests.helpers.runs import machine, write_json
from thinwire import testing
from thinwire.comm.communicator import Communicator
from thinwire.testing import run_ranks
from verification.interrupts.calls import KINDS, PLACES, judge, trial, was_slow

TRANSPORTS = ("direct", "staged")
TRIES = 3  # of a trial that a busy machine has spoilt before its interrupt


def run_rank(
    comm: Communicator, places: list[str], kinds: list[str], samples: int, seed: int
) -> dict[str, Counter[str]]:
    """On every rank how trials ended, by place, transport and kind."""
    found: dict[str, Counter[str]] = {}
    for place in PLACES:
        if place.name not in places:
            continue
        for transport in TRANSPORTS:
            for _ in range(TRIES):
                _, events = trial(comm, place, transport, "an event", 1e9, seed)
                (events, *_) = comm.all_gather_data(events, int)
                if events:
                    break
            for kind in kinds:
                seen = found[f"{place.name}, {transport}, {kind}"] = Counter()
                for sample in range(samples):
                    rng = random.Random(f"{seed} {place.name} {transport} {kind} {sample}")
                    at = rng.randint(1, events) if kind.startswith("an event") else 0.01 * rng.random() ** 2
                    for _ in range(TRIES):
                        outcomes, _ = trial(comm, place, transport, kind, at, seed + sample)
                        told = comm.all_gather_data(outcomes, [str])
                        if not was_slow(told):
                            break
                    verdict = judge(told)
                    seen[verdict if verdict in ("right", "ended", "told") else f"WRONG at {at}: {verdict}"] += 1
    return found


def main() -> None:
    """Runs what was chosen; ends with 1 if anything came of it that must not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=12, help="of each place, transport and kind")
    parser.add_argument("--seed", type=int, help="default: a new one")
    parser.add_argument("--only", default="", help="places with this in their names")
    parser.add_argument("--json", help="where to write what was run")
    arguments = parser.parse_args()
    seed = secrets.randbits(31) if arguments.seed is None else arguments.seed
    places = [place.name for place in PLACES if arguments.only in place.name]
    testing.preload(
        "tests.helpers.warm"
    )  # or the first trials of a fresh clone would compile for longer than they may wait
    started, found = time.monotonic(), Counter[str]()
    cells: dict[str, dict[str, int]] = {}
    for place in places:
        results = run_ranks(run_rank, 2, [place], list(KINDS), arguments.samples, seed, timeout=3600)[0]
        for cell, seen in results.items():
            cells[cell] = dict(seen)
            found.update("wrong" if key.startswith("WRONG") else key for key in seen.elements())
            for key in seen:
                if key.startswith("WRONG"):
                    print(f"{cell}: {key}", file=sys.stderr, flush=True)
        print(f"{place}: so far {dict(found)}", flush=True)
    if arguments.json:
        write_json(
            arguments.json,
            command=shlex.join(["python", "-m", "verification.interrupts", *sys.argv[1:]]),
            machine=machine(torch.device("cpu")),
            seed=seed,
            seconds=round(time.monotonic() - started, 1),
            trials=sum(found.values()),
            outcomes=dict(found),
            cells=cells,
        )
    if found["wrong"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
