"""`thinwire warmup`: its options."""

from __future__ import annotations

import argparse
import os
import sys
import time

from thinwire.errors import ArgumentError, TransportUnavailable
from thinwire.tools.commands.sizes import add_sizes, check_sizes
from thinwire.tools.progress import Progress

SUMMARY = "compile all kernels of a configuration ahead of time"
DESCRIPTION = """\
Compiles the kernels of an ExpertParallel into the cache where ranks look for them, so that no rank
compiles while others wait for it. These are Triton's kernels, for GPUs that need not be on this
machine, or, with --heap posix or threads, numba's for CPU ranks. Pass the sizes that the ranks
will have: Triton's kernels depend on them.

  thinwire warmup --ranks 8 --experts 256 --top-k 8 --hidden 7168 --max-tokens 4096 --arch sm_90
  thinwire warmup --ranks 4 --experts 8 --top-k 2 --hidden 256 --max-tokens 64 --heap posix"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add_sizes(parser)
    kernels = parser.add_argument_group("the kernels")
    arch = "Compile for these GPUs, such as sm_90 for H100 (default: this machine's)."
    kernels.add_argument("--arch", nargs="+", default=[], help=arch)
    kernels.add_argument("--gradients", action="store_true", help="Also compile the kernels of backward.")
    int8 = "Also compile those of tw.Int8Experts with N elements between products."
    kernels.add_argument("--int8-experts", type=int, default=0, metavar="N", help=int8)
    collectives = "Also compile all-reduce, reduce-scatter and all-gather."
    kernels.add_argument("--collectives", action="store_true", help=collectives)
    rows = "Also compile all-to-all-v of rows as long as tokens."
    kernels.add_argument("--all-to-all-v", action="store_true", help=rows)
    jobs = "Use this many processes (default: one a core)."
    kernels.add_argument("--jobs", type=int, default=_cores(), metavar="N", help=jobs)


def run(options: argparse.Namespace) -> int:
    """Compiles, and says what."""
    check_sizes(options, "jobs")
    if options.int8_experts < 0:
        raise ArgumentError(f"int8_experts is {options.int8_experts}, expected an int of at least 0")
    on_cpu = options.heap in ("posix", "threads")
    if not on_cpu and options.heap != "cuda":
        raise ArgumentError(f"heap is {options.heap!r}, expected one of cuda, posix, threads")
    if on_cpu and options.arch:
        raise ArgumentError(f"arch is {' '.join(options.arch)} and heap {options.heap}, which is for CPU ranks")
    if not on_cpu and os.environ.get("TRITON_INTERPRET") == "1":
        raise ArgumentError("TRITON_INTERPRET is 1, and interpreted kernels are not compiled: unset it")
    with Progress(sys.stderr, time.monotonic()) as progress:
        progress.stage("loading torch ...")
        text = _for_cpu(progress) if on_cpu else _for_gpus(options, progress)
    print(text)
    return 0


def _for_gpus(options: argparse.Namespace, progress: Progress) -> str:
    from thinwire.triton_kernels.compat import HAS_TRITON

    if not HAS_TRITON:
        raise TransportUnavailable("kernels for GPUs need Triton: pip install triton; for CPU ranks pass --heap posix")
    from thinwire.tools.warmup.compile import archs_here, compile_ahead, describe
    from thinwire.tools.warmup.configuration import Configuration

    began, configuration = time.monotonic(), Configuration.of(options)
    archs = list(dict.fromkeys(options.arch)) or archs_here()
    compiled = compile_ahead([configuration], archs, options.jobs, progress.report)
    took = f"in {time.monotonic() - began:.1f} s by {options.jobs} processes"
    return f"{configuration.describe()}\n\n{describe(compiled, took)}"


def _for_cpu(progress: Progress) -> str:
    from thinwire.triton_kernels.cpu import HAS_NUMBA

    if not HAS_NUMBA:
        raise TransportUnavailable("kernels for CPU ranks need numba: pip install numba")
    from thinwire.tools.warmup.cpu import compile_for_cpu

    progress.stage("numba's kernels, by one process")
    return compile_for_cpu()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
