"""The command line: `thinwire demo`, `thinwire inspect`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from thinwire.errors import ThinwireError
from thinwire.version import VERSION

_DEMO = """\
Splits a small trained mixture-of-experts model over CPU ranks, scores a text with it under several wire formats, and
prints what each format cost and saved. The model and the text come with the package."""

_INSPECT = """\
Compares the files that the ranks' flight recorders wrote when peers did not answer. The first line says which rank
stopped at which operation; a table of the last operations follows. A file that cannot be used is told, and left out."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0, or 2 for input that cannot be used."""
    parser = argparse.ArgumentParser(prog="thinwire", description="mixture-of-experts tokens in int8, both ways")
    parser.add_argument("--version", action="version", version=f"thinwire {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="a trained model, expert-parallel on CPU ranks", description=_DEMO)
    demo.add_argument("--ranks", type=int, default=4, help="processes to split the experts over (default 4)")
    formats = "none,int8,int8:row,int4"
    demo.add_argument("--wire", default=formats, help=f"wire formats, separated by commas (default {formats})")
    demo.add_argument("--text", type=Path, help="a text file to score instead of the packaged held-out text")
    demo.add_argument("--json", type=Path, help="also write the figures to this file")
    demo.add_argument("--timeout", type=float, default=600.0, help="seconds after which everything is ended (600)")
    inspect = commands.add_parser("inspect", help="who stopped where, by the flight recorders", description=_INSPECT)
    inspect.add_argument("files", metavar="FILE", nargs="+", help="what one rank's flight recorder wrote")
    options = parser.parse_args(arguments)
    if options.command == "inspect":
        return _inspect(options.files)
    # Imported late: --help needs no torch.
    from thinwire.demo import run_demo

    try:
        wires = [wire.strip() for wire in options.wire.split(",")]
        run_demo(options.ranks, wires, options.text, options.json, options.timeout)
    except (ThinwireError, OSError) as error:
        print(f"thinwire: error: {error}", file=sys.stderr)
        return 2
    return 0


def _inspect(files: Sequence[str]) -> int:
    from thinwire.flight import read_flight
    from thinwire.flight_report import report

    flights, status = [], 0
    for file in dict.fromkeys(files):
        try:
            flights.append(read_flight(file))
        except ThinwireError as error:
            print(f"thinwire: error: {error}", file=sys.stderr)
            status = 2
    try:
        if flights:
            print(report(flights))
    except ThinwireError as error:
        print(f"thinwire: error: {error}", file=sys.stderr)
        status = 2
    return status
