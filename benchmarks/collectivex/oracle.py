"""Holds thinwire to the oracle of CollectiveX, InferenceX's benchmark of dispatch and combine, on CPU ranks.

    git clone https://github.com/SemiAnalysisAI/InferenceX ../InferenceX
    python -m benchmarks.collectivex.oracle --checkout ../InferenceX --json benchmarks/results/cpu/collectivex.json

Routing, tokens, experts, expectations and tolerance are the benchmark's own; its times need GPUs. The oracle checks, to
the last bit, which tokens came, their experts and weights, and their rows, as the codec gives them; and what came home,
within 8 * 2^-8 of each element (of 0.02 where it is smaller). Where sums come home quantised, it is told so
(`quantised_combine`). It runs before and after a chain of pairs without a barrier between them, whose last result is
compared with that of a pair alone, as the benchmark does. Columns:

    failed       what the oracle found wrong on any rank
    error        the largest error of an element, and of the chain's last result against a pair alone
    tolerance    the largest that is allowed
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import shlex
import subprocess
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import timing
from thinwire.comm import Communicator

COLUMNS = {
    "ranks": "d", "wires": "s", "tokens": "d", "passed": "s", "failed": "s", "error": ".4f", "chain error": ".4f",
    "tolerance": ".4f",
}  # fmt: skip
WIRES = ("none/none", "int8/none", "int8/int8")
LADDER = (1, 8, 64, 256)
#: The benchmark's workload: DeepSeek-V3's layer.
SHAPE = {"hidden": 7168, "topk": 8, "experts": 256}
_BENCH = "experimental/CollectiveX/bench"
_CHAIN = 8  # pairs


def check(comm: Communicator, checkout: str, wires: str, ladder: Sequence[int], shape: dict[str, int]) -> list[Any]:
    """One rank's part: for each number of tokens the oracle's reports, before and after a chain, and the chain's."""
    torch.set_num_threads(1)
    torch.cuda.synchronize = lambda *_: None  # nothing runs behind a CPU rank's back
    sys.path[:0] = [str(Path(checkout) / _BENCH), str(Path(__file__).parent)]
    harness, routing, adapter = (importlib.import_module(name) for name in ("ep_harness", "routing", "ep_thinwire"))
    wire, combine_wire = wires.split("/")
    args = types.SimpleNamespace(
        mode="normal", precision="bf16" if wire == "none" else "fp8", seed=67, routing="uniform", phase="decode",
        tokens_ladder=" ".join(map(str, ladder)), wire=wire, combine_wire=combine_wire, **shape,
    )  # fmt: skip
    backend = adapter.ThinwireBackend(args, comm.rank, comm.size, comm.rank, torch.device("cpu"))
    spec = backend.make_inputs(args)
    backend.create_buffer(spec)
    found = []
    for tokens in spec.ladder:
        point = spec.points[tokens]
        problem = backend.make_problem(tokens, point.topk_idx, point.topk_weights, point.activations)

        def oracle(problem: Any = problem, point: Any = point) -> Any:
            told = (
                adapter.quantised_combine(harness, backend.ep) if combine_wire != "none" else contextlib.nullcontext()
            )
            with told:
                return harness._run_expert_oracle(
                    torch, routing, backend, problem, point.global_idx, point.global_weights, comm.rank,
                    spec.experts_per_rank, comm.size, args.seed,
                )  # fmt: skip

        before = oracle()
        for _ in range(_CHAIN):
            chained = backend.run_roundtrip(problem)
        comm.barrier()
        same, chain_error = harness._chain_output_matches(chained, backend.run_roundtrip(problem))
        found.append({"before": before, "after": oracle(), "chain": same, "chain_error": chain_error})
    backend.ep.close()
    return found


def figures(ranks: int, wires: str, ladder: Sequence[int], by_rank: Sequence[list[Any]]) -> list[dict[str, Any]]:
    """A line for each number of tokens; what fails on one rank fails."""
    lines = []
    for number, tokens in enumerate(ladder):
        of_ranks = [found[number] for found in by_rank]
        reports = [point[when] for point in of_ranks for when in ("before", "after")]
        failed = {name for report in reports for name, passed in report["checks"].items() if not passed}
        failed |= {"chain"} if not all(point["chain"] for point in of_ranks) else set()
        errors = [report["max_elementwise_relative_error"] for report in reports]
        lines.append(
            {
                "ranks": ranks,
                "wires": wires,
                "tokens": tokens,
                "passed": "no" if failed or not all(report["passed"] for report in reports) else "yes",
                "failed": ", ".join(sorted(failed)),
                "error": float("nan") if None in errors else max(errors),
                "chain error": max(point["chain_error"] for point in of_ranks),
                "tolerance": reports[0]["rel_tol"],
            }
        )
    return lines


def commit_of(checkout: Path) -> str | None:
    """The commit that is checked out there; None where git does not know."""
    done = subprocess.run(["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, required=True, help="a clone of InferenceX")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--wires", nargs="+", default=WIRES, metavar="DISPATCH/COMBINE")
    parser.add_argument("--tokens", type=int, nargs="+", default=LADDER, help="on each rank")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for each pair of wires")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    options = parser.parse_args(arguments)
    checkout = options.checkout.resolve()
    if not (checkout / _BENCH / "ep_backend.py").exists():
        raise SystemExit(f"--checkout {checkout}: expected a clone of InferenceX, with {_BENCH}/ep_backend.py")
    options.device, ladder = "cpu", sorted(options.tokens)
    described = timing.machine(timing.check_device("cpu"))
    lines = []
    for ranks in options.ranks:
        for wires in options.wires:
            by_rank = timing.run_over_ranks(options, check, ranks, str(checkout), wires, ladder, SHAPE)
            lines += figures(ranks, wires, ladder, by_rank)
    command = shlex.join(["python", "-m", "benchmarks.collectivex.oracle", *(sys.argv[1:])])
    timing.print_table(lines, COLUMNS)
    if options.json:
        timing.write_json(
            options.json, benchmark="collectivex", command=command, machine=described, figures=lines, shape=SHAPE,
            inferencex=commit_of(checkout),
        )  # fmt: skip
    if any(line["passed"] != "yes" for line in lines):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
