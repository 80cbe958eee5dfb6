"""A step that every rank of a group takes: it succeeds on all of them, or all raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from thinwire.comm.shaped_json import MOST_TEXT
from thinwire.errors import CheckpointError

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
