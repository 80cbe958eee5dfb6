"""`thinwire bench`: its options."""

from __future__ import annotations

import argparse
import importlib.util
import shlex
from pathlib import Path

from thinwire.errors import ArgumentError
from thinwire.tools.bench.options import BASELINES, DEFAULT_RANKS, DTYPES, OPERATIONS, TRANSPORTS, Settings

SUMMARY = "time and check collectives and expert rounds, beside other libraries"
DESCRIPTION = f"""\
Times operations in turn with other ways to move the same bytes, and checks every result. Operations, all by default:
{", ".join(OPERATIONS)}.
moe is a whole round. Under torchrun, mpirun or srun it joins the launcher's ranks; otherwise it starts processes on
this host. docs/benchmarks.md explains the columns. The exit status is 1 if a result was wrong."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add, default = parser.add_argument, Settings()
    add("operations", metavar="OPERATION", nargs="*", help="some of those above")
    add("-b", "--begin", default="64K", metavar="BYTES", help="smallest buffer of a rank, such as 8 or 64K (64K)")
    add("-e", "--end", default="1M", metavar="BYTES", help="largest buffer of a rank, such as 4M or 1G (1M)")
    add("-f", "--factor", type=float, default=16.0, help="factor from one size to the next (16)")
    add(
        "-n",
        "--iterations",
        type=int,
        default=default.iterations,
        help=f"samples of each ({default.iterations})",
    )
    add("-w", "--warmup", type=int, default=default.warmup, help=f"calls before the samples ({default.warmup})")
    seconds = default.sample_seconds
    add("--sample-seconds", type=float, default=seconds, help=f"repeat shorter calls for so long ({seconds:g})")
    add("-c", "--check", type=int, choices=(0, 1), default=1, help="0: do not check results (1)")
    add("--tokens", default="16,256", metavar="N,...", help="tokens of a rank in rounds (16,256)")
    add("--wire", default="none,int8", metavar="WIRE,...", help="wire formats (none,int8)")
    add(
        "--transport",
        default="direct,staged",
        metavar="NAME,...",
        help=f"{', '.join(TRANSPORTS)} (both)",
    )
    add("--hidden", type=int, default=default.hidden, help=f"elements of a token or row ({default.hidden})")
    add("--experts", type=int, default=default.experts, help=f"experts in all ({default.experts})")
    add("--top-k", type=int, default=default.top_k, help=f"experts of a token ({default.top_k})")
    add("--dtype", choices=DTYPES, default=default.dtype, help=f"dtype of the tensors ({default.dtype})")
    routings = "uniform, zipf:S, hot:SHARE, matrix:FILE (rows from rank i to j, CSV or .npy)"
    add("--routing", default="uniform", metavar="ROUTING,...", help=f"{routings} (uniform)")
    add("--baselines", default="all", metavar="NAME,...", help=f"all, none, or some of {', '.join(BASELINES)} (all)")
    add("--ranks", type=int, help=f"processes to start without a launcher ({DEFAULT_RANKS})")
    add("--device", choices=("cpu", "cuda"), help="default: cuda if there is a GPU, else cpu")
    add(
        "--link",
        metavar="RATE",
        help="rate of a link between hosts, such as 10Gbit; only recorded in the results",
    )
    add("--timeout", type=float, default=default.timeout, help=f"seconds for everything ({default.timeout:g})")
    add("--json", type=Path, metavar="FILE", help="also write all figures to this file")
    add("--plot", type=Path, metavar="FOLDER", help="also draw them, into this folder")


def run(options: argparse.Namespace) -> int:
    """Prints the table; 1 if a result was wrong, or nothing was measured."""
    settings = Settings.of(options)
    if options.json is not None and str(options.json) == "-":
        raise ArgumentError("--json - is no file, expected a path: the table goes to standard output")
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ArgumentError(f"--plot {options.plot} needs matplotlib: pip install matplotlib")

    from thinwire.tools.bench.launch import run_bench

    return run_bench(settings, shlex.join(["thinwire", *options.arguments]), options.json, options.plot)
