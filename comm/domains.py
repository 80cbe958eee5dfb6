"""Communication domains: independent communicators over the same ranks, each with a name."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

from thinwire.comm.communicator import Communicator
from thinwire.comm.host_collectives import Attachment, Origin
from thinwire.errors import ThinwireError


class Domains:
    """The communicators that `init` made in one process, or in one thread that is a rank.

    The domain None is that of all calls that name none. The others are made from it, and end with it.
    """

    def __init__(self) -> None:
        self.by_name: dict[str | None, Communicator] = {}
        self._recent: list[Communicator] = []  # the one that init returned last comes last

    def find(self, name: str | None) -> Communicator | None:
        """The domain's communicator, if it has one that is open."""
        found = self.by_name.get(name)
        return None if found is None or found.closed else found

    def choose(self, comm: Communicator) -> Communicator:
        """Makes it what `current` returns, and returns it."""
        self._recent = [other for other in self._recent if other is not comm and not other.closed] + [comm]
        return comm

    def current(self) -> Communicator | None:
        """The one that was chosen last, of those that are open."""
        return next((comm for comm in reversed(self._recent) if not comm.closed), None)


class _Opened(Attachment):
    """What a communicator keeps of the domains that were made from it: they end with it."""

    def __init__(self) -> None:
        self.by_name: dict[str, Communicator] = {}

    def describe(self) -> str:
        names = [repr(name) + (", closed" if comm.closed else "") for name, comm in self.by_name.items()]
        return f"domains: {'; '.join(names)}"

    def close(self) -> None:
        for comm in self.by_name.values():
            comm.close()


class _OfThread(threading.local):
    domains: Domains | None = None  # in threads that are ranks


_of_process = Domains()
_of_thread = _OfThread()


def current_domains() -> Domains:
    """This thread's if it is a rank, else this process's."""
    return _of_thread.domains or _of_process


def is_rank_thread() -> bool:
    """Whether this thread is a rank, which has a communicator from the start."""
    return _of_thread.domains is not None


@contextlib.contextmanager
def rank_thread(comm: Communicator) -> Iterator[None]:
    """Makes `comm` what `init` and `default_communicator` return in this thread."""
    before, _of_thread.domains = _of_thread.domains, Domains()
    _of_thread.domains.by_name[None] = _of_thread.domains.choose(comm)
    try:
        yield
    finally:
        _of_thread.domains = before


def open_domain(world: Communicator, name: str, device: torch.device | str | None, timeout: float) -> Communicator:
    """A communicator of its own over the ranks of `world`. Collective; all ranks agree on the name already."""
    if world.in_process and device is not None and torch.device(device).type != world.device.type:
        raise ThinwireError(f"device is {device!r}, but these ranks are threads, whose tensors live on {world.device}")
    origin = Origin(f"{world._origin.ranks}; domain {name!r}", world._origin.device, owns_group=True)
    made = world._derive([tuple(range(world.size))], world.device if device is None else device, timeout, origin)
    made._origin = origin
    world.attached("domains", _Opened).by_name[name] = made
    return made
