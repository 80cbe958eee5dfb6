"""`thinwire bench`: its options."""

from __future__ import annotations

import argparse
import importlib.util
import shlex
from pathlib import Path

from thinwire.errors import ArgumentError
from thinwire.tools.bench.options import (
    BASELINES,
    DEFAULT_FACTOR,
    DEFAULT_RANKS,
    DTYPES,
    OPERATIONS,
    TRANSPORTS,
    Settings,
)

SUMMARY = "time and check collectives and expert rounds, beside other libraries"
DESCRIPTION = f"""\
Times operations in turn with other ways to move the same bytes, and checks every result. The
operations are {", ".join(OPERATIONS[:-1])}
and {OPERATIONS[-1]}, which is a whole round; all of them by default.

Under torchrun, mpirun or srun it joins the launcher's ranks. Otherwise it starts processes on this
host. docs/benchmarks.md explains the columns. The exit status is 1 if a result was wrong.

  thinwire bench all_reduce -b 64K -e 16M -f 4
  thinwire bench moe --tokens 1,128,4096 --hidden 7168 --experts 256 --json results.json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add, default = parser.add_argument, Settings()
    add("operations", metavar="OPERATION", nargs="*", help="Measure only these operations.")
    add("-b", "--begin", default="64K", metavar="BYTES", help="Start with buffers of this size, such as 8K (64K).")
    add("-e", "--end", default="1M", metavar="BYTES", help="End with buffers of at most this size, such as 4M (1M).")
    add("-f", "--factor", type=float, help=f"Multiply each size by this to get the next one ({DEFAULT_FACTOR:g}).")
    add("-i", "--increment", metavar="BYTES", help="Add so many bytes to each size instead of multiplying it.")
    iterations, warmup, seconds = default.iterations, default.warmup, default.sample_seconds
    add("-n", "--iterations", type=int, default=iterations, help=f"Take so many samples ({iterations}).")
    add("-w", "--warmup", type=int, default=warmup, help=f"Call so often before the samples ({warmup}).")
    add("--sample-seconds", type=float, default=seconds, help=f"Repeat a short call for so long ({seconds:g}).")
    add("-c", "--check", type=int, choices=(0, 1), default=1, help="Check results (1), or do not (0).")
    add("--tokens", default="16,256", metavar="N,...", help="Measure rounds of so many tokens of a rank (16,256).")
    add(
        "--wire",
        default="none,int8,int8+h64",
        metavar="WIRE,...",
        help="Measure these wire formats (none,int8,int8+h64).",
    )
    names = ",".join(TRANSPORTS)
    add("--transport", default=names, metavar="NAME,...", help=f"Measure these transports ({names}).")
    add("--hidden", type=int, default=default.hidden, help=f"Give a token or row so many elements ({default.hidden}).")
    add("--experts", type=int, default=default.experts, help=f"Spread so many experts over ranks ({default.experts}).")
    add("--top-k", type=int, default=default.top_k, help=f"Send a token to so many experts ({default.top_k}).")
    add("--dtype", choices=DTYPES, default=default.dtype, help=f"Make tensors of this dtype ({default.dtype}).")
    add(
        "--routing",
        default="uniform",
        metavar="ROUTING,...",
        help="Route rows by these rules: uniform, zipf:S, hot:SHARE or maxvio:V (uniform).",
    )
    names = ", ".join(BASELINES)
    add("--baselines", default="all", metavar="NAME,...", help=f"Compare with all, none, or some of {names} (all).")
    add("--ranks", type=int, help=f"Start so many processes, where no launcher did ({DEFAULT_RANKS}).")
    add("--device", choices=("cpu", "cuda"), help="Run there; by default on cuda if there is a GPU, else on cpu.")
    add("--timeout", type=float, default=default.timeout, help=f"Stop after so many seconds ({default.timeout:g}).")
    add("--json", type=Path, metavar="FILE", help="Also write all figures to this file.")
    add("--plot", type=Path, metavar="FOLDER", help="Also draw them, into this folder.")


def run(options: argparse.Namespace) -> int:
    """Prints the table; 1 if a result was wrong, or nothing was measured."""
    settings = Settings.of(options)
    if options.json is not None and str(options.json) == "-":
        raise ArgumentError("--json - is no file, expected a path: the table goes to standard output")
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ArgumentError(f"--plot {options.plot} needs matplotlib: pip install matplotlib")

    from thinwire.tools.bench.session import run_bench

    return run_bench(settings, shlex.join(["thinwire", *options.arguments]), options.json, options.plot)
