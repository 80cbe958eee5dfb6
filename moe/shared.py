"""What a communicator knows of its ExpertParallels: it ends them, and gives the same to all layers that ask for one."""

from __future__ import annotations

import inspect
import weakref
from dataclasses import replace
from typing import Any, TypeVar

from thinwire.comm import Communicator, Group
from thinwire.comm.call import Attachment
from thinwire.compiler import opaque
from thinwire.moe.config import ParallelConfig

_T = TypeVar("_T")


class _Made(Attachment):
    """What was made for one communicator; what was rebuilt onto its successor is known to that one.

    Attributes:
        all: which end with the communicator, unless they end before.
        shared: those of them that `shared` made, in that order.
    """

    outlives_shrink = True

    def __init__(self) -> None:
        self.all: weakref.WeakSet[Any] = weakref.WeakSet()
        self.shared: list[Any] = []

    def describe(self) -> str:
        return f"shared ExpertParallel: {sum(not ep._closed for ep in self.shared)}" if self.shared else ""

    def close(self) -> None:
        for ep in [*self.all]:
            if ep.comm.closed:  # and not rebuilt onto another group
                ep.end()  # which keeps its memory, for calls under way, until the last reference is gone
        for ep in self.shared:
            if ep.comm.closed:
                ep.close()


def ends_with(comm: Communicator, ep: Any) -> None:
    """Has an ExpertParallel closed when its communicator is."""
    comm.attached("ExpertParallel", _Made).all.add(ep)


def _serves(made: ParallelConfig, wanted: ParallelConfig) -> bool:
    return made.max_tokens >= wanted.max_tokens and replace(made, max_tokens=wanted.max_tokens) == wanted


@opaque
def shared(cls: type[_T], comm: Group, *sizes: int, **settings: Any) -> _T:
    """The group's ExpertParallel with these settings: constructed by the first call, returned by those that follow.

    All ranks of the group call this, `close` and `rebuild` in the same order, with the same arguments. Whether there is
    such an object depends on these calls alone, so either all ranks construct it, which is collective and compares what
    they passed, or none does, and nothing is sent. A rank that finds an object where others construct one gives them
    PeerTimeout.

    One with room for more tokens counts as the same.

    It belongs to all who asked: it is closed with its communicator, and who closes it before ends it for all of them;
    the next call constructs another one. One that was rebuilt after `comm.shrink()` is the one of the ranks that are
    left; one that was rebuilt onto another group is shared no longer.

    Args:
        comm: a communicator, a process group, or a DeviceMesh of one axis.
        sizes: the constructor's, and so are `settings`. Formats count as what they stand for, `wire=None` too.

    Raises:
        ThinwireError: the communicator is closed.
        TypeError, and what the constructor raises.

    >>> import thinwire as tw
    >>> with tw.init() as comm:
    ...     layers = [tw.ExpertParallel.shared(comm, 4, 2, 64, max_tokens=16, wire="none") for _ in range(2)]
    ...     layers[0] is layers[1]
    True
    """
    bound = inspect.signature(cls).bind(comm, *sizes, **settings)
    bound.apply_defaults()
    wanted = ParallelConfig.of(*bound.args[1:], **bound.kwargs, comm=comm)
    wanted.comm.require_open()
    known: _Made = wanted.comm.attached("ExpertParallel", _Made)
    known.shared = [ep for ep in known.shared if not ep._closed]
    found = next((ep for ep in known.shared if _serves(ep._assembly.config, wanted)), None)
    if found is None:
        found = cls(*bound.args, **bound.kwargs)
        known.shared.append(found)
    return found
