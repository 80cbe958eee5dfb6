"""A step that every rank of a group takes: it succeeds on all of them, or all raise. And where a checkpoint is made."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.comm.hosts import system_name
from thinwire.errors import ArgumentError, CheckpointError
from thinwire.fields import MOST_TEXT

if TYPE_CHECKING:
    from thinwire.comm.communicator import Communicator


def together(comm: Communicator | None, what: str, step: Callable[[], str]) -> str:
    """What the step returned on rank 0; without a group, here. Collective.

    Raises:
        CheckpointError: it failed on another rank, which could not do `what`. A rank on which it failed raises why.
    """
    done, error = "", None
    try:
        done = step()
        if len(done) > MOST_TEXT:
            raise CheckpointError(f"a path of {len(done)} characters; at most {MOST_TEXT} can be sent to peers")
    except Exception as raised:
        if comm is None:
            raise
        error = raised
    if comm is None:
        return done
    why = None if error is None else f"{type(error).__name__}: {error}"[:MOST_TEXT]
    told = comm.all_gather_data((done, why), (str, str | None))
    if error is not None:
        raise error
    for rank, (_, why) in enumerate(told):
        if why is not None:
            raise CheckpointError(f"rank {rank} could not {what}: {why}")
    first: str = told[0][0]
    return first


def agree_on_path(comm: Communicator | None, path: object) -> Path:
    """The absolute path that all ranks give. Collective.

    Raises:
        ArgumentError: what is given is no path; on other ranks, a CheckpointError.
        ConfigMismatch: on all ranks, where they give different ones.
    """

    def absolute() -> str:
        if not isinstance(path, str | os.PathLike):
            raise ArgumentError(f"path is a {type(path).__name__}, expected a str or a path")
        return os.path.abspath(os.fsdecode(path))

    together(comm, "take its path", absolute)
    if comm is not None:
        comm.require_same("a checkpoint", {"path": absolute()})
    return Path(absolute())


def unfinished_folder(target: Path) -> tempfile.TemporaryDirectory[str]:
    """A new folder beside a checkpoint, which only this user may enter. Those of killed processes of this host go.

    In the target's own folder, others may be able to put a link where a file of a known name is about to be.
    """
    start = f".unfinished-{hashlib.sha256(system_name().encode()).hexdigest()[:8]}-"
    for left in target.parent.glob(f"{start}*"):
        if not Path("/proc", left.name.removeprefix(start).partition("-")[0]).exists():
            shutil.rmtree(left, ignore_errors=True)
    return tempfile.TemporaryDirectory(prefix=f"{start}{os.getpid()}-", dir=target.parent)
