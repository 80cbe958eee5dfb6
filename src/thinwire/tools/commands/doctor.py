"""`thinwire doctor`: its options."""

from __future__ import annotations

import argparse

SUMMARY = "check what works on this machine, and say how to fix the rest"
DESCRIPTION = """\
Checks versions, GPUs, limits and caches, tries each kind of shared memory, and runs a round and an
all-reduce on a few ranks. The report says what works, what does not and why, and what to do about
it. Every check has its own time limit. The exit status is 1 if something that should work is
broken.

  thinwire doctor
  thinwire doctor --json findings.json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--json", metavar="FILE", help="Also write the findings to this file; with - print only that.")


def run(options: argparse.Namespace) -> int:
    """Prints the report; 1 if there is a problem."""
    from thinwire.tools.doctor.examine import examine

    return examine(options.json)
