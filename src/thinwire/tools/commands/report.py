"""`thinwire report`: its options."""

from __future__ import annotations

import argparse
from pathlib import Path

SUMMARY = "pictures and a page of what a benchmark measured"
DESCRIPTION = """\
Draws what `thinwire bench --json FILE` wrote, one picture a question, and writes one page, report.html, that holds all
of it: the machine, the command, every figure, the pictures, and what was skipped. The page needs no network and runs no
script. Runs of several files stand one below the other, never in one picture. Needs matplotlib, the extra `bench`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("files", metavar="FILE", type=Path, nargs="+", help="what `thinwire bench --json` wrote")
    parser.add_argument("--output", metavar="FOLDER", type=Path, required=True, help="where to, made if need be")


def run(options: argparse.Namespace) -> int:
    """Reads all files before anything is written, and prints the names of what was."""
    from thinwire.tools.bench.report import write_reports
    from thinwire.tools.bench.results import read_results

    for path in write_reports([read_results(file) for file in options.files], options.output):
        print(path)
    return 0
