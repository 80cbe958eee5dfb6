"""The command line: `thinwire demo`."""

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
    options = parser.parse_args(arguments)
    # Imported late: --help needs no torch.
    from thinwire.demo import run_demo

    try:
        wires = [wire.strip() for wire in options.wire.split(",")]
        run_demo(options.ranks, wires, options.text, options.json, options.timeout)
    except (ThinwireError, OSError) as error:
        print(f"thinwire: error: {error}", file=sys.stderr)
        return 2
    return 0
