"""Libraries that may be installed: whether one can take part, and what it says where it cannot."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TypeVar

from thinwire.comm import Communicator
from thinwire.tools.bench.contender import NotHere

T = TypeVar("T")


def why_absent(package: str, comm: Communicator) -> str | None:
    """Why a library of kernels between GPUs cannot take part, alike on all ranks; None if nothing is known against it.

    Its package is looked for, not imported. Collective.
    """
    if not all(comm.all_gather_object(importlib.util.find_spec(package) is not None)):
        return "not installed"
    if comm.device.type != "cuda" or comm.in_process:
        return "it is for processes with a GPU each"
    return None


def on_all_ranks(comm: Communicator, step: Callable[[], T], undo: Callable[[], object] | None = None) -> T:
    """What a step of a library gives, if it succeeds on every rank. Collective.

    Args:
        comm: the ranks.
        step: may raise anything: whatever a library raises is why it does not take part.
        undo: gives back what earlier steps made. Called only if every rank failed, as it may wait for its peers.

    Raises:
        NotHere: the step failed somewhere; in the words of the first rank that it failed on.
    """
    made: list[T] = []
    own, cause = None, None
    try:
        made.append(step())
    except Exception as error:
        own, cause = _in_words(error), error
    reasons = comm.all_gather_object(own)
    failed = [rank for rank, reason in enumerate(reasons) if reason is not None]
    if not failed:
        return made[0]
    everywhere = len(failed) == comm.size
    if everywhere and undo is not None:
        undo()
    raise NotHere(f"{'' if everywhere else f'on rank {failed[0]}: '}{reasons[failed[0]]}") from cause


def _in_words(error: Exception) -> str:
    """One line; the type is told, too, as many libraries assert without a message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
