"""`thinwire inspect`: its options."""

from __future__ import annotations

import argparse
import sys

from thinwire.errors import ThinwireError

SUMMARY = "say which rank stopped where, from the flight recorders' files"
DESCRIPTION = """\
Compares the files that the ranks' flight recorders wrote when peers did not answer. The first line
says which rank stopped at which operation; a table of the last operations follows. A file that
cannot be used is named and left out.

  thinwire inspect rank0.json rank1.json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("files", metavar="FILE", nargs="+", help="This is the file of one rank's flight recorder.")


def run(options: argparse.Namespace) -> int:
    """Prints the report of all files that can be used; 2 if one cannot."""
    from thinwire.flight import read_flight
    from thinwire.tools.flight_report import report

    flights, status = [], 0
    for file in dict.fromkeys(options.files):
        try:
            flights.append(read_flight(file))
        except ThinwireError as error:
            print(f"thinwire: error: {error}", file=sys.stderr)
            status = 2
    if flights:
        print(report(flights))
    return status
