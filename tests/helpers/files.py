"""What a process has open or mapped."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path


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


def resident_bytes() -> int:
    """How much of this process is in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def writer_of(pipe: Path) -> Iterator[None]:
    """Has somebody open a named pipe to write nothing, so that who waits for a writer does not wait for ever."""
    writer = threading.Thread(target=lambda: os.close(os.open(pipe, os.O_WRONLY)))
    writer.start()
    try:
        yield
    finally:
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        writer.join()
        os.close(reader)


def unnumbered(name: str) -> str:
    """What a tensor of a sharded layer's experts is called in a layer that has all of them, and in a checkpoint."""
    return name.partition("_of_")[0]
