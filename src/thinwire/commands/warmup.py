"""`thinwire warmup`: its options."""

from __future__ import annotations

import argparse
import os
import sys
import time

from thinwire.commands.sizes import add_sizes, check_sizes
from thinwire.errors import ArgumentError, TransportUnavailable
from thinwire.progress import Progress

SUMMARY = "compile all kernels of a configuration ahead of time"
DESCRIPTION = """\
Compiles what the ranks of an ExpertParallel will launch into the cache where they look for it, so that no rank compiles
while others wait for it: Triton's kernels for GPUs, which need not be here, or with --heap posix or threads numba's for
CPU ranks. The sizes must be those that the ranks will have: kernels know them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add_sizes(parser)
    kernels = parser.add_argument_group("the kernels")
    kernels.add_argument(
        "--arch", nargs="+", default=[], help="to compile for: sm_90 for an H100 (default: this machine's GPUs)"
    )
    kernels.add_argument("--gradients", action="store_true", help="dispatches will want gradients")
    kernels.add_argument("--jobs", type=int, default=_cores(), metavar="N", help="processes (default: one a core)")


def run(options: argparse.Namespace) -> int:
    """Compiles, and says what."""
    check_sizes(options, "jobs")
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise ArgumentError("TRITON_INTERPRET is 1, and interpreted kernels are not compiled: unset it")
    began = time.monotonic()
    with Progress(sys.stderr, began) as progress:
        progress.stage("loading torch ...")
        from thinwire.triton_kernels.compat import HAS_TRITON

        if not HAS_TRITON:
            raise TransportUnavailable("kernels for GPUs need Triton: pip install 'thinwire[triton]'")
        from thinwire.warmup.compile import cache_folder, compile_ahead
        from thinwire.warmup.launches import configuration_of
        from thinwire.warmup.report import describe
        from thinwire.warmup.target import archs_here

        configuration = configuration_of(options)
        archs = list(dict.fromkeys(options.arch)) or archs_here()
        compiled = compile_ahead([configuration], archs, options.jobs, progress.report)
    print(describe(configuration, compiled, options.jobs, time.monotonic() - began, cache_folder()))
    return 0


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
