"""The looks that need no ranks, each in a process of its own: one that ends it, or never returns, is a finding too.

`python -m thinwire.tools.doctor.probe NAME` prints a line for each finding.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from thinwire.tools.doctor import gpus, host, software
from thinwire.tools.doctor.finding import Finding

_MOST_BETWEEN_LINES = 45.0  # seconds, of a process that compiles
_REPORT = "please report this, with the output of: {}"
PROBES: dict[str, tuple[Callable[[], Iterator[Finding]], ...]] = {
    "software": (software.versions, software.settings, software.caches),
    "host": (host.processors, host.memory, host.limits, host.shared_memory),
    "gpus": (gpus.devices, gpus.peers, gpus.topology),
}


def look(name: str, seconds: float) -> list[Finding]:
    """What the probes of that name find within a time limit."""
    command = [sys.executable, "-m", "thinwire.tools.doctor.probe", name]
    lines, ending = run_lines(command, seconds)
    findings = [Finding(**line) for line in lines]
    if ending:
        last = f"; the last thing it told: {findings[-1].name}" if findings else ""
        advice = _REPORT.format(" ".join(["python", *command[1:]]))
        findings.append(Finding("problem", name, f"the look at it {ending}{last}", advice))
    return findings


def run_lines(command: list[str], seconds: float) -> tuple[list[dict[str, Any]], str]:
    """The lines of JSON that a program prints, and how it ended if that was not well; a hung one is killed."""
    try:
        process = Process(command)
    except OSError as error:
        return [], f"could not be started: {error.strerror}"
    return read_lines(process, seconds)


class Process(subprocess.Popen[bytes]):
    """Shows at once what thinwire says on standard error, such as that it compiles; keeps the last line there."""

    last_shown = -math.inf  # by any of them

    def __init__(self, command: list[str], env: dict[str, str] | None = None) -> None:
        pipe = subprocess.PIPE
        super().__init__(command, env=env, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe)
        self._errors, self.stderr = self.stderr, None  # `communicate` would take them
        self._last = b"nothing"
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

    def last_line(self) -> str:
        """Of one that has ended."""
        self._shows.join()
        return self._last.decode(errors="replace")


def read_lines(process: Process, seconds: float) -> tuple[list[dict[str, Any]], str]:
    """The same of one that runs. While any says that it compiles, that is no time of theirs."""
    ending, limit = "", seconds
    try:
        while True:
            try:
                output = process.communicate(timeout=limit)[0]
                break
            except subprocess.TimeoutExpired:
                limit = Process.last_shown + _MOST_BETWEEN_LINES - time.monotonic()
                if limit <= 0 and not ending:
                    process.kill()
                    ending = f"did not come back within {seconds:g} s and was ended"
                limit = max(limit, 1.0)
    finally:
        process.kill()  # where Ctrl-C ended the wait; nothing is done to one that has ended
    last = process.last_line()  # what it said is all shown by now, too
    told = []
    for line in output.decode(errors="replace").splitlines():
        try:
            told.append(json.loads(line))
        except ValueError:
            continue  # some library's own words
    if not ending and process.returncode:
        how = f"was killed by signal {-process.returncode}" if process.returncode < 0 else "failed"
        ending = f"{how}, saying: {last[:200]}"
    return told, ending


def tell(probe: Callable[[], Iterator[Finding]]) -> None:
    """Prints what a probe finds; what it raises is a finding as well."""
    try:
        for finding in probe():
            print(json.dumps(asdict(finding)), flush=True)
    except Exception as error:
        text = f"could not be looked at: {type(error).__name__}: {error}"
        advice = "see whether the command that looks works by itself; if so, please report this"
        print(json.dumps(asdict(Finding("problem", probe.__name__, text, advice))), flush=True)


if __name__ == "__main__":
    for probe in PROBES[sys.argv[1]]:
        tell(probe)
