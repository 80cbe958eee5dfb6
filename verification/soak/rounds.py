"""Runs very many direct rounds of changing shapes on real ranks, compares bits, and watches the ranks' resources.

    python -m verification.soak.rounds --rounds 100000 --json benchmarks/results/cpu/soak.json

Every ExpertParallel has other sizes and begins just before its round number wraps. Some rounds are drawn for each, with
plain torch's results, and repeated over and over, never the same twice in a row, so leftovers of an older round show.
After each, every rank counts its resident memory, its descriptors, and its mapped segments.
"""

from __future__ import annotations

import argparse
import gc
import random
import secrets
import shlex
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from benchmarks.timing import machine, write_json
from tests.helpers.files import mapped_segments, open_files, resident_bytes
from tests.helpers.wires import DTYPES, WIRES, assert_same_bits
from thinwire import testing
from thinwire.comm.communicator import Communicator
from thinwire.moe.parallel import ExpertParallel
from thinwire.testing import RankError, RanksTimeout, run_ranks
from verification.soak.schedules import Oracle, Plan, Settings

WORLD = 4
MOST_GROWTH_MIB = 8.0  # of a rank's resident memory, from the second tenth of the samples to the last
_ROUNDS_OF_ONE_EP = 1000
_DRAWN = 16  # rounds of each that are played over and over
_FIRST_EPOCHS = (-3, -500, 2**31 - 4, 2**31 - 500)


@dataclass(frozen=True)
class Sample:
    """What a rank holds, after so many rounds."""

    rounds: int
    resident_mib: float
    descriptors: int
    segments_open: int  # while the rounds were played
    segments: int  # after that


@dataclass(frozen=True)
class Drawn:
    """A round at one rank: what it passes, and what it must get."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    tokens: torch.Tensor
    expert_out: torch.Tensor
    abandons: bool
    result: torch.Tensor

    @classmethod
    def of(cls, settings: Settings, seed: str, rank: int) -> Drawn:
        """The same round on all ranks from the same seed."""
        plan = Plan.draw(settings, seed, abandons=True)
        plan = replace(plan, parts=[replace(part, reads="tokens") for part in plan.parts])
        oracle, part = Oracle(settings, plan), plan.parts[rank]
        offsets = oracle.offsets[rank]
        tokens = oracle.tokens(rank, int(offsets[-1]))
        out = torch.full(tokens.shape, torch.nan, dtype=part.output)
        for place, expert in enumerate(oracle.experts[rank]):
            rows = slice(int(offsets[place]), int(offsets[place] + oracle.counts[rank][place]))
            out[rows] = oracle.apply(expert, tokens[rows], part.output)
        return cls(
            part.x, part.ids, part.weights, tokens, out, part.end == "abandon", oracle.result(rank)
        )  # fmt: skip

    def play(self, ep: ExpertParallel, lane: int, where: str) -> None:
        """One round."""
        d = ep.dispatch(self.x, self.ids, self.weights, lane=lane)
        assert_same_bits(f"{where}: tokens", self.tokens, d.tokens)
        if self.abandons:
            d.abandon()
        else:
            assert_same_bits(f"{where}: combine", self.result, ep.combine(self.expert_out, d))


def draw_settings(rng: random.Random) -> Settings:
    """Of one ExpertParallel."""
    num_experts = rng.choice((1, 2, 5, 7, 9))
    return Settings(
        world=WORLD,
        num_experts=num_experts,
        top_k=rng.choice([top_k for top_k in (1, 2, 3, 5) if top_k <= num_experts]),
        hidden=rng.choice((1, 33, 72, 130)),
        max_tokens=rng.choice((1, 3, 6, 13)),
        wire=rng.choice(WIRES),
        combine_wire=rng.choice(WIRES),
        dtype=rng.choice((None, *DTYPES)),
        align=rng.choice((1, 1, 4)),
        lanes=rng.choice((1, 2)),
        first_epoch=rng.choice(_FIRST_EPOCHS),
    )


def run_rank(comm: Communicator, seed: int, rounds: int) -> list[Sample]:
    """One rank's rounds; gives a sample for each ExpertParallel.

    Raises:
        AssertionError: something differs from plain torch's.
    """
    torch.set_num_threads(1)
    rng, samples, played, before = random.Random(seed), list[Sample](), 0, -1
    while played < rounds:
        settings = draw_settings(rng)
        drawn = [Drawn.of(settings, f"{rng.getrandbits(64)}", comm.rank) for _ in range(_DRAWN)]
        with settings.make(comm, timeout=60.0) as ep:
            segments_open = len(mapped_segments())
            for _ in range(min(_ROUNDS_OF_ONE_EP, rounds - played)):
                before = rng.choice([number for number in range(_DRAWN) if number != before])
                drawn[before].play(ep, played % settings.lanes, f"seed {seed}, round {played}, {settings}")
                played += 1
            ep.check()
        del ep, drawn
        gc.collect()
        resident = round(resident_bytes() / 2**20, 1)
        samples.append(Sample(played, resident, len(open_files()), segments_open, len(mapped_segments())))
    return samples


def growth(by_rank: list[list[Sample]]) -> dict[str, float]:
    """By how much the ranks' figures grew, the most of any rank: from the second tenth of the samples to the last."""
    found = {}
    for name in ("resident_mib", "descriptors", "segments"):
        grown = []
        for samples in by_rank:
            tenth = max(1, len(samples) // 10)
            values = [getattr(sample, name) for sample in samples]
            grown.append(statistics.median(values[-tenth:]) - statistics.median(values[tenth : 2 * tenth] or values))
        found[name] = round(max(grown), 1)
    return found


def is_level(grown: dict[str, float], by_rank: list[list[Sample]]) -> bool:
    """Whether nothing is kept: memory within bounds, no more descriptors, all segments gone after each."""
    gone = all(sample.segments == 0 and sample.segments_open == WORLD for samples in by_rank for sample in samples)
    return grown["resident_mib"] <= MOST_GROWTH_MIB and grown["descriptors"] <= 0 and gone


def main() -> None:
    """Runs all rounds; ends with 1 if one differed, or if something grew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100_000)
    parser.add_argument("--seed", type=int, help="default: a new one")
    parser.add_argument("--json", metavar="FILE", help="where to write what was run")
    arguments = parser.parse_args()
    testing.preload("tests.helpers.warm")
    seed = secrets.randbits(31) if arguments.seed is None else arguments.seed
    start, described = time.monotonic(), machine(torch.device("cpu"))
    failure: str | None = None
    by_rank: list[list[Sample]] = []
    try:
        by_rank = run_ranks(run_rank, WORLD, seed, arguments.rounds, timeout=120.0 + 0.05 * arguments.rounds)
    except (RankError, RanksTimeout) as error:
        failure = str(error)
        print(failure, file=sys.stderr)
    seconds = round(time.monotonic() - start, 1)
    figures: dict[str, Any] = {"seed": seed, "ranks": WORLD, "seconds": seconds, "failure": failure}
    if by_rank:
        grown = growth(by_rank)
        figures |= {
            "rounds": by_rank[0][-1].rounds,
            "eps": len(by_rank[0]),
            "grown": grown,
            "level": is_level(grown, by_rank),
            "samples": [[asdict(sample) for sample in samples] for samples in by_rank],
        }
    print({name: value for name, value in figures.items() if name not in ("samples", "failure")})
    if arguments.json:
        command = shlex.join(["python", "-m", "verification.soak.rounds", *sys.argv[1:]])
        write_json(arguments.json, command=command, machine=described, **figures)
    if not figures.get("level"):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
