"""Progress of a long command: on a terminal one line that changes, elsewhere a line for each stage.

The command's process shows it. Ranks are other processes, and report through a file that they append to.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import TextIO

_TURN_SECONDS = 0.1  # between looks at the file
_REPEAT_SECONDS = 4.0  # without news, elsewhere than on a terminal; then twice that, and so on
_MOST_REPEAT_SECONDS = 60.0
_WIDTH = 30


class Report:
    """A rank's end of it; it may be sent to other processes.

    Args:
        path: the file; None reports nothing.
    """

    def __init__(self, path: str | None) -> None:
        self.path = path

    def stage(self, text: str, steps: int = 0) -> None:
        """Names the current stage, and its number of steps, if they are counted."""
        self._tell(f"{steps}\t{text}")

    def now(self, text: str) -> None:
        """Names what the stage does now; where lines are written, it is told with the next repetition."""
        self._tell(f"\t{text}")

    def step(self) -> None:
        """One more step is done."""
        self._tell("")

    def _tell(self, line: str) -> None:
        if self.path is not None:
            with open(self.path, "a") as file:
                file.write(line + "\n")


#: Reports nothing.
SILENT = Report(None)


def print_over(text: str) -> None:
    """Prints to standard output; on a terminal over the line of progress, which is then written anew.

    Launchers may give ranks a terminal of their own as output, to which no progress is written.
    """
    print(("\r\033[K" if sys.stdout.isatty() and sys.stderr.isatty() else "") + text, flush=True)


class Progress:
    """Shows stages with the seconds since `began`, from a thread of its own, for as long as the block lasts.

    Args:
        out: the stream to write to.
        began: of `time.monotonic()`.
    """

    def __init__(self, out: TextIO, began: float) -> None:
        self._out, self._began = out, began
        self._moves = out.isatty()
        self._ended = contextlib.ExitStack()
        self._told: TextIO | None = None  # the ranks' file, once there is one
        self._taking = threading.Lock()
        self._text, self._now, self._steps, self._done, self._shown, self._pause = "", "", 0, 0, 0.0, _REPEAT_SECONDS
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="thinwire progress", daemon=True)

    @functools.cached_property
    def report(self) -> Report:
        """The ranks' end of it. Needs a file; where there can be none, `stage` works all the same."""
        path = Path(self._ended.enter_context(tempfile.TemporaryDirectory(prefix="thinwire-progress-"))) / "told"
        path.touch()
        self._told = self._ended.enter_context(path.open())
        return Report(str(path))

    def stage(self, text: str) -> None:
        """See `Report.stage`."""
        with self._taking:
            self._take(f"0\t{text}\n")

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()
        self._look()
        if self._moves:
            self._write("\r\033[K")
        self._ended.close()

    def _run(self) -> None:
        self._look()
        while not self._end.wait(_TURN_SECONDS):
            self._look()

    def _take(self, line: str) -> None:
        if line == "\n":
            self._done += 1
            return
        steps, _, text = line.rstrip("\n").partition("\t")
        if not steps:
            self._now = f": {text}"
            return
        self._text, self._now, self._steps, self._done, self._pause = text, "", int(steps), 0, _REPEAT_SECONDS
        if not self._moves:
            self._show(self._text)

    def _look(self) -> None:
        with self._taking:
            while self._told is not None and (line := self._told.readline()):
                self._take(line)
            self._repeat()

    def _repeat(self) -> None:
        now = time.monotonic()
        if self._moves and self._text:
            seconds = f"  {now - self._began:.0f} s"
            # Of a line that wraps, only the last row would be written over.
            room = shutil.get_terminal_size().columns - 1 - len(seconds)
            self._write("\r\033[K" + f"{self._bar()}{self._text}{self._now}"[:room] + seconds)
        elif self._text and now - self._shown >= self._pause:
            self._pause = min(2 * self._pause, _MOST_REPEAT_SECONDS)
            self._show("  still at it" + (f", {self._done} of {self._steps}" if self._steps else "") + self._now)

    def _show(self, text: str) -> None:
        self._shown = time.monotonic()
        self._write(f"[{self._shown - self._began:5.1f} s] {text}\n")

    def _bar(self) -> str:
        if not self._steps:
            return ""
        filled = _WIDTH * self._done // self._steps
        return f"[{'#' * filled}{'.' * (_WIDTH - filled)}] "

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()
