"""Findings, and programs that look for them: each prints lines of JSON."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.errors import ThinwireError

#: Lines of JSON that a program printed, and how it ended if that was not well.
Told = tuple[list[dict[str, Any]], str]
MARKS = ("ok", "info", "note", "problem")
_MOST_BETWEEN_LINES = 45.0  # seconds, of a process that compiles


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        mark: "ok"; "info": not there, or told already; "note": worth knowing; "problem": broken, and it should work.
        name: what was looked at.
        text: what was found.
        advice: what to do about it; every problem has some.
    """

    mark: str
    name: str
    text: str
    advice: str = ""

    def __post_init__(self) -> None:
        if self.mark not in MARKS:
            raise ThinwireError(f"mark is {self.mark!r}, expected one of {', '.join(MARKS)}")
        if self.mark == "problem" and not self.advice:
            raise ThinwireError(f"the problem {self.name!r} has no advice")


def judged(fine: bool, name: str, text: str, advice: str) -> Finding:
    """Returns a finding that is ok, or else a note with advice."""
    return Finding("ok", name, text) if fine else Finding("note", name, text, advice)


def gib(num_bytes: int) -> str:
    """Bytes for people.

    >>> gib(3 << 29), gib(5 << 20), gib(8192)
    ('1.5 GiB', '5.0 MiB', '8.0 KiB')
    """
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes / 1024:.1f} KiB"


def read_text(path: str | Path) -> str:
    """Returns a file's text; none where it cannot be read."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


class Process(subprocess.Popen[bytes]):
    """Shows at once what thinwire says on standard error, such as that it compiles; keeps the last line there."""

    last_shown = -math.inf  # by any of them

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        pipe = subprocess.PIPE
        super().__init__(command, env=env, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe)
        self._errors, self.stderr = self.stderr, None  # `communicate` would take them
        self._last, self._began = b"nothing", time.monotonic()
        self._shows = threading.Thread(target=self._show, name="thinwire doctor", daemon=True)
        self._shows.start()

    def _show(self) -> None:
        assert self._errors is not None
        with self._errors as lines:
            for line in lines:
                self._last = line.strip() or self._last
                if line.startswith(b"thinwire: "):
                    Process.last_shown = time.monotonic()
                    over = "\r\033[K" if sys.stderr.isatty() else ""
                    print(over + line.decode(errors="replace").rstrip(), file=sys.stderr, flush=True)

    def read_lines(self, seconds: float) -> Told:
        """Reads what it prints until it ends, or is ended: after so many seconds, but for those of compiling."""
        output, ending, limit = None, "", max(0.1, self._began + seconds - time.monotonic())
        while output is None:
            try:
                output = self.communicate(timeout=limit)[0]
            except subprocess.TimeoutExpired:
                limit = Process.last_shown + _MOST_BETWEEN_LINES - time.monotonic()
                if limit <= 0 and not ending:
                    self.kill()
                    ending = f"did not come back within {seconds:g} s and was ended"
                limit = max(limit, 1.0)
        self._shows.join()  # what it said is all shown by now, too
        if not ending and self.returncode:
            how = f"was killed by signal {-self.returncode}" if self.returncode < 0 else "failed"
            ending = f"{how}, saying: {self._last.decode(errors='replace')[:200]}"
        told = []
        for line in output.decode(errors="replace").splitlines():
            with contextlib.suppress(ValueError):  # some library's own words
                told.append(json.loads(line))
        return told, ending


def run_programs(commands: list[list[str]], seconds: float, **variables: str) -> list[Told]:
    """Runs programs at once, with these variables, and ends those that hang.

    While any of them says that it compiles, that is no time of theirs. Where one cannot be started, all end.
    """
    processes: list[Process] = []
    try:
        for command in commands:
            processes.append(Process(command, os.environ | variables))
        return [process.read_lines(seconds) for process in processes]
    except OSError as error:
        return [*(([], "") for _ in processes), ([], f"could not be started: {error.strerror}")]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
