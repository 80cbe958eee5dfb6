"""Random rounds with `invariant=True` on 1 to 8 ranks: however tokens and experts are spread, the same bits.

    python -m verification.soak.invariant --programs 10000 --json benchmarks/results/cpu/invariant.json

A program is drawn from its number: sizes, formats, tokens with their experts. It runs with several numbers of ranks,
which share its tokens at random, in one or more dispatches, on either transport. All results are compared by their
hashes, also with what plain torch gives. A failure names the program's number, which `--first` begins with.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import shlex
import sys
import time
from collections import Counter
from dataclasses import dataclass

import torch

from benchmarks.timing import machine, write_json
from tests.helpers.wires import DTYPES, WIRES, integer_view
from thinwire.comm.communicator import Communicator
from thinwire.moe.parallel import ExpertParallel
from thinwire.moe.plan import merge_repeated_experts
from thinwire.testing import run_ranks
from thinwire.triton_kernels.codec_reference import dequantize_reference, quantize_reference
from thinwire.triton_kernels.sums import pack_weighted_sums_reference, sum_records_reference
from thinwire.wire import WireFormat

MOST_RANKS = 8
BATCH = 50  # programs of a group of ranks


@dataclass(frozen=True)
class Program:
    """What all ranks know."""

    number: int
    num_experts: int
    top_k: int
    hidden: int
    tokens: int  # of all ranks together
    wires: tuple[str, str]
    dtype: torch.dtype
    output: torch.dtype  # of the experts' rows

    @classmethod
    def draw(cls, number: int) -> Program:
        """The program of a number."""
        rng = random.Random(f"program {number}")
        top_k = rng.choice((1, 2, 3, 4, 8, 9))
        experts = rng.randint(top_k, 24)
        hidden = rng.choice((1, 17, 64, 96, 200, 320))
        wires = rng.choice(WIRES), rng.choice(WIRES)
        dtype = rng.choice((torch.float32, *DTYPES))  # the others round most differences away
        return cls(number, experts, top_k, hidden, rng.randint(0, 20), wires, dtype, rng.choice(DTYPES))

    def rows(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """All tokens, and their experts and router weights: some none, some repeated."""
        generator = torch.Generator().manual_seed(self.number)
        x = torch.randn(self.tokens, self.hidden, generator=generator) * 10 ** torch.randn(
            self.tokens, 1, generator=generator
        )
        ids = torch.rand(self.tokens, self.num_experts, generator=generator).argsort(1)[:, : self.top_k]
        if ids.shape[1] < self.top_k or self.number % 5 == 0:  # with repeats
            ids = torch.randint(self.num_experts, (self.tokens, self.top_k), generator=generator)
        ids[torch.rand(ids.shape, generator=generator) < 0.1] = -1
        # Terms of one magnitude have sums that are exact in float32, whatever their order.
        spread = 10 ** (1.5 * torch.randn(ids.shape, generator=generator))
        return x.to(self.dtype), ids, spread * torch.randn(ids.shape, generator=generator)

    def experts(self, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """What the experts `ids` [rows] make of `rows`: of each row by itself, as batch-invariant kernels do."""
        factor = (1 + ids.float() / 7)[:, None]
        return (rows.float() * factor + rows.float().roll(1, 1) / factor).to(self.output)

    def expected(self) -> torch.Tensor:
        """The result in plain torch, of which no rank is known."""
        x, ids, weights = self.rows()
        ids, weights = merge_repeated_experts(ids, weights)
        order = torch.where(ids < 0, self.num_experts, ids).argsort(dim=1, stable=True)
        ids, weights = ids.gather(1, order).flatten(), weights.gather(1, order).flatten()
        out, back = (WireFormat.parse(wire) for wire in self.wires)
        arrived = dequantize_reference(quantize_reference(x, out), out, self.hidden, self.dtype)
        made = self.experts(arrived.repeat_interleave(self.top_k, 0), ids)
        places = torch.where(ids < 0, -1, torch.arange(len(ids)))
        records = pack_weighted_sums_reference(made, places[:, None], weights[:, None], back, self.dtype)
        return sum_records_reference(records, places.view(-1, self.top_k), back, self.hidden, self.dtype)

    def play(self, comm: Communicator, transport: str) -> torch.Tensor:
        """This rank's part: the results of its tokens, which are side by side."""
        x, ids, weights = self.rows()
        rng = random.Random(f"share {self.number} {comm.size} {transport}")
        bounds = [0, *sorted(rng.randint(0, self.tokens) for _ in range(comm.size - 1)), self.tokens]
        begin, end = bounds[comm.rank : comm.rank + 2]
        dispatches = rng.randint(1, 3)
        align, lanes = rng.choice((1, 4)), rng.randint(1, 2)
        wire, combine_wire = self.wires
        with ExpertParallel(
            comm, self.num_experts, self.top_k, self.hidden, max(1, self.tokens), wire=wire, combine_wire=combine_wire,
            transport=transport, invariant=True, align=align, lanes=lanes,
        ) as ep:  # fmt: skip
            results = [x[:0]]
            for number in range(dispatches):
                size = -(-(end - begin) // dispatches)
                part = slice(min(end, begin + number * size), min(end, begin + (number + 1) * size))
                d = ep.dispatch(x[part], ids[part], weights[part], lane=number % lanes)
                experts = torch.where(d.expert_ids < 0, 0, d.expert_ids + ep.local_experts.start)
                results.append(ep.combine(self.experts(d.tokens, experts), d))
        return torch.cat(results)


def play_all(comm: Communicator, numbers: list[int]) -> list[torch.Tensor]:
    """One rank of programs."""
    found = []
    for number in numbers:
        transport = random.Random(f"transport {number} {comm.size}").choice(("direct", "staged"))
        found.append(Program.draw(number).play(comm, transport))
    return found


def hash_of(result: torch.Tensor) -> str:
    """Of all its bits."""
    return hashlib.sha256(integer_view(result).numpy().tobytes()).hexdigest()


def run_programs(numbers: list[int], worlds: list[int], mode: str = "thread", env: dict[str, str] | None = None) -> int:
    """Runs each program with each number of ranks; returns how many runs there were.

    Raises:
        AssertionError: a result has other bits; the program is named.
    """
    wanted = [hash_of(Program.draw(number).expected()) for number in numbers]
    for world in worlds:
        by_rank = run_ranks(play_all, world, numbers, mode=mode, env=env, timeout=600.0)
        for number, want, parts in zip(numbers, wanted, zip(*by_rank, strict=True), strict=True):
            assert hash_of(torch.cat(parts)) == want, f"{world} ranks give other bits: {Program.draw(number)}"
    return len(numbers) * len(worlds)


def main() -> None:
    """The command of this file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--programs", type=int, default=1000, metavar="N", help="how many (1000)")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first (0)")
    parser.add_argument("--json", metavar="FILE", help="where to write what was run")
    options = parser.parse_args()
    begun, runs, by_world = time.monotonic(), 0, Counter[int]()
    for first in range(options.first, options.first + options.programs, BATCH):
        numbers = list(range(first, min(first + BATCH, options.first + options.programs)))
        worlds = random.Random(f"worlds {first}").sample(range(1, MOST_RANKS + 1), 3)
        runs += run_programs(numbers, worlds)
        by_world.update({world: len(numbers) for world in worlds})
    seconds = round(time.monotonic() - begun, 1)
    print(f"{options.programs} programs, {runs} runs on 1 to {MOST_RANKS} ranks in {seconds:g} s: all bits alike")
    if options.json:
        command = f"python -m verification.soak.invariant {shlex.join(sys.argv[1:])}"
        write_json(
            options.json, command=command, machine=machine(torch.device("cpu")), programs=options.programs,
            first=options.first, runs=runs, runs_by_ranks=dict(sorted(by_world.items())), seconds=seconds,
        )  # fmt: skip


if __name__ == "__main__":
    main()
