"""`thinwire demo`: its options."""

from __future__ import annotations

import argparse
from pathlib import Path

SUMMARY = "a trained model, expert-parallel on CPU ranks"
DESCRIPTION = """\
Splits a small trained mixture-of-experts model over CPU ranks, scores a text with it under several wire formats, and
prints what each format cost and saved. The model and the text come with the package."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--ranks", type=int, default=4, help="processes to split the experts over (default 4)")
    formats = "none,int8,int8:row,int4"
    parser.add_argument("--wire", default=formats, help=f"wire formats, separated by commas (default {formats})")
    parser.add_argument("--text", type=Path, help="a text file to score instead of the packaged held-out text")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds after which everything is ended (600)")


def run(options: argparse.Namespace) -> int:
    """Prints the table."""
    from thinwire.demo import run_demo

    wires = [wire.strip() for wire in options.wire.split(",")]
    run_demo(options.ranks, wires, options.text, options.json, options.timeout)
    return 0
