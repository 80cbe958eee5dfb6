"""What a process has open or mapped, and what it reads of checkpoints."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from thinwire.moe import checkpoint


def open_files() -> list[str]:
    """Targets of this process's descriptors. Gloo's threads may close theirs between the list and the look."""
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return links


def mapped_segments() -> set[int]:
    """The files in memory of thinwire's that this process has mapped, by their inodes."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {int(line.split()[4]) for line in lines if "memfd:thinwire" in line}


def shared_files() -> list[str]:
    """Files in /dev/shm whose names are thinwire's, or have this process's number in them, as a number of its own.

    Other programs name theirs by numbers of any kind, Open MPI and vLLM by hexadecimal ones.
    """
    own = re.compile(rf"thinwire|(?<![0-9a-zA-Z]){os.getpid()}(?![0-9a-zA-Z])")
    return [name for name in os.listdir("/dev/shm") if own.search(name) and not name.startswith("sm_segment")]


def marked(mark: str) -> list[int]:
    """Processes that have the mark in their environment, as all have that were started with it."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            running = (folder / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
            if running and mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue  # it has ended, or is another user's
    return found


def kill_marked(mark: str) -> None:
    """Kills them, and those that they start meanwhile."""
    while found := marked(mark):
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def resident_bytes() -> int:
    """How much of this process is in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def unnumbered(name: str) -> str:
    """What a tensor of a sharded layer's experts is called in a layer that has all of them, and in a checkpoint."""
    return name.partition("_of_")[0]


def record_reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Names of tensors that are read of safetensors files from now on, with the number of elements, each time."""
    record: list[tuple[str, int]] = []

    class Recording:
        """What `safe_open` gives, or `get_slice`."""

        def __init__(self, inner: Any, name: str = "") -> None:
            self.inner, self.name = inner, name

        def __getattr__(self, attribute: str) -> Any:
            return getattr(self.inner, attribute)

        def __enter__(self) -> Recording:
            return Recording(self.inner.__enter__())

        def __exit__(self, *exception: object) -> None:
            self.inner.__exit__(*exception)

        def __getitem__(self, index: Any) -> torch.Tensor:
            record.append((self.name, self.inner[index].numel()))
            return self.inner[index]

        def get_slice(self, name: str) -> Recording:
            return Recording(self.inner.get_slice(name), name)

        def get_tensor(self, name: str) -> torch.Tensor:
            record.append((name, self.inner.get_tensor(name).numel()))
            return self.inner.get_tensor(name)

    monkeypatch.setattr(checkpoint, "safe_open", lambda *args, **options: Recording(safe_open(*args, **options)))
    return record
