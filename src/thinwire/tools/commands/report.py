"""`thinwire report`: its options."""

from __future__ import annotations

import argparse
from pathlib import Path

SUMMARY = "draw a benchmark's results, on one page"
DESCRIPTION = """\
Draws the results of `thinwire bench --json FILE`, and writes one page, report.html: who was fastest
at which sizes, pictures, every figure, the machine and the command. The page needs no network and
runs no script. Runs of several files appear one below the other, never in one picture. It needs
matplotlib.

  thinwire report results.json --output figures"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("files", metavar="FILE", type=Path, nargs="+", help="Read these files of `thinwire bench`.")
    parser.add_argument(
        "--output",
        metavar="FOLDER",
        type=Path,
        required=True,
        help="Write the page and its pictures into this folder, which is created if it is missing.",
    )


def run(options: argparse.Namespace) -> int:
    """Reads all files before anything is written, and prints the names of what was."""
    from thinwire.tools.bench.report import write_reports
    from thinwire.tools.bench.results import read_results

    for path in write_reports([read_results(file) for file in options.files], options.output):
        print(path)
    return 0
