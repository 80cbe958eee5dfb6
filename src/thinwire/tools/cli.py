"""The command line: `thinwire COMMAND`, where each command is a module of `thinwire.tools.commands`."""

from __future__ import annotations

import argparse
import difflib
import importlib
import re
import shutil
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from thinwire.errors import ThinwireError
from thinwire.version import VERSION

#: In the order in which `--help` lists them.
COMMANDS = ("demo", "bench", "doctor", "plan", "warmup", "inspect")
_WIDTH = 100
_INTERRUPTED = 128 + signal.SIGINT  # what shells say of a command that Ctrl-C ended


class _Help(argparse.RawDescriptionHelpFormatter):
    """As wide as the terminal, and no wider than people read."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=min(_WIDTH, shutil.get_terminal_size().columns) - 2)


def make_parser() -> argparse.ArgumentParser:
    """The whole command line; what is parsed has `run`, the command's, and `parser`, the command's too."""
    parser = argparse.ArgumentParser(prog="thinwire", description="mixture-of-experts tokens in int8, both ways")
    parser.add_argument("--version", action="version", version=f"thinwire {VERSION}")
    commands = parser.add_subparsers(dest="command")
    for name in COMMANDS:
        module = importlib.import_module(f"thinwire.tools.commands.{name}")
        command = commands.add_parser(name, help=module.SUMMARY, description=module.DESCRIPTION, formatter_class=_Help)
        module.add_arguments(command)
        command.set_defaults(run=module.run, parser=command)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 2 for input that cannot be used, 130 if Ctrl-C ended it."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    interrupts: list[int] = []
    try:
        with _noting_ctrl_c(interrupts):
            return _run(given)
    except (ThinwireError, OSError) as error:
        if not interrupts:
            print(f"thinwire: error: {error}", file=sys.stderr)
            return 2
    except BaseException:
        # Not only KeyboardInterrupt: an extension module that is interrupted in its import raises ImportError.
        if not interrupts:
            raise
    print("thinwire: stopped", file=sys.stderr)
    return _INTERRUPTED


@contextmanager
def _noting_ctrl_c(interrupts: list[int]) -> Iterator[None]:
    """Adds to the list when Ctrl-C is pressed, and raises KeyboardInterrupt as without it."""

    def note(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    in_main_thread = threading.current_thread() is threading.main_thread()  # others cannot set handlers
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # SIGINT is ignored in jobs that a shell started in the background
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _run(given: list[str]) -> int:
    parser = make_parser()
    typed = next((word for word in given if not word.startswith("-")), None)
    if typed is not None and typed not in COMMANDS:
        parser.error(f"{typed!r} is no command{_meant(typed, COMMANDS)}; accepted: {', '.join(COMMANDS)}")
    options, unknown = parser.parse_known_args(given, argparse.Namespace(arguments=given))
    if options.command is None:
        parser.print_help()
        return 2  # nothing was done
    if unknown:
        known = re.findall(r"--[\w-]+", options.parser.format_usage())
        options.parser.error(
            f"unrecognized arguments: {' '.join(unknown)}{_meant(unknown[0].partition('=')[0], known)}"
        )
    status: int = options.run(options)
    return status


def _meant(word: str, known: Sequence[str]) -> str:
    """A question about the most similar of the known words, if there is one."""
    similar = difflib.get_close_matches(word, known, 1)
    return f"; did you mean {similar[0]}?" if similar else ""
