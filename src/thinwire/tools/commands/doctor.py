"""`thinwire doctor`: its options."""

from __future__ import annotations

import argparse

SUMMARY = "what is here, what works, and what to do about the rest"
DESCRIPTION = """\
Looks at versions, GPUs, limits and caches, tries each kind of shared memory, runs a round and an all-reduce on a few
ranks, and says what works, what does not and why, and what to do about it. Every look has a time limit of its own.
The exit status is 1 if something is broken that should work."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--json", metavar="FILE", help="also write the findings to this file; - prints nothing else")


def run(options: argparse.Namespace) -> int:
    """Prints the report; 1 if there is a problem."""
    from thinwire.tools.doctor.examine import examine

    return examine(options.json)
