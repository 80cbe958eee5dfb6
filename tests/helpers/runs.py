"""Files that the runs of a proof add up in: what came of all of them, and of each its commit, and how much it was."""

from __future__ import annotations

import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import commit, machine, write_json

__all__ = ["Runs"]


class Runs:
    """A file of results, and the run under way, which may add to what others have left there.

    A run that goes on where one of the same commit and command ended becomes one with it.

    Args:
        module: what is run.
        path: the file; None where nothing is kept.
        adds: whether what the file holds is kept; else it is written anew.
        settings: entries of the file, without which runs cannot be added up.

    Attributes:
        stored: what the file held; empty if there was none, or if it is written anew.
        own: what is said of the run under way.

    Raises:
        SystemExit: the file has other settings, or does not say of which runs it is.
    """

    def __init__(self, module: str, path: Path | None, adds: bool, **settings: Any) -> None:
        self.path, self.settings, self.stored = path, settings, dict[str, Any]()
        if adds and path is not None and path.exists():
            self.stored = json.loads(path.read_text())
            found = {name: self.stored.get(name) for name in settings}
            if "runs" not in self.stored:
                raise SystemExit(f"{path} does not say of which runs it is, so nothing can be added; name another file")
            if found != settings:
                raise SystemExit(f"{path} holds runs of {found}, and this one is of {settings}; name another file")
        self._machine, self._start = machine(torch.device("cpu")), time.monotonic()
        command = shlex.join(["python", "-m", module, *sys.argv[1:]])
        self.own: dict[str, Any] = {"commit": commit(), "command": command, "load": self._machine["load"]}

    def all(self, **amount: int) -> list[dict[str, Any]]:
        """Every run, last the one under way, of which so much has been run.

        >>> Runs("tests.it", None, adds=False).all(rounds=3)[-1]["rounds"]
        3
        """
        amount["seconds"] = round(time.monotonic() - self._start)
        before, last = list(self.stored.get("runs", ())), self.own | amount
        if before and all(before[-1][name] == last[name] for name in ("commit", "command")):
            last = before.pop()
            last = last | {name: last[name] + value for name, value in amount.items()}
        return [*before, last]

    def write(self, amount: dict[str, int], **content: Any) -> None:
        """Writes what has come of all runs; `amount` is how much of this one."""
        if self.path is not None:
            origin = {"commit": self.own["commit"], "command": self.own["command"], "machine": self._machine}
            write_json(self.path, **origin, **self.settings, runs=self.all(**amount), **content)
