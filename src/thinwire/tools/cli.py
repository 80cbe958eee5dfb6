"""The command line: `thinwire COMMAND`, where each command is a module of `thinwire.tools.commands`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from thinwire.errors import ThinwireError
from thinwire.version import VERSION

#: In the order in which `--help` lists them.
COMMANDS = ("demo", "bench", "report", "doctor", "plan", "warmup", "inspect")


def make_parser() -> argparse.ArgumentParser:
    """The whole command line; what is parsed has `run`, the command's."""
    parser = argparse.ArgumentParser(prog="thinwire", description="mixture-of-experts tokens in int8, both ways")
    parser.add_argument("--version", action="version", version=f"thinwire {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in COMMANDS:
        module = importlib.import_module(f"thinwire.tools.commands.{name}")
        command = commands.add_parser(
            name,
            help=module.SUMMARY,
            description=module.DESCRIPTION,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0, or 2 for input that cannot be used."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = make_parser().parse_args(given, argparse.Namespace(arguments=given))
    try:
        status: int = options.run(options)
    except (ThinwireError, OSError) as error:
        print(f"thinwire: error: {error}", file=sys.stderr)
        return 2
    return status
