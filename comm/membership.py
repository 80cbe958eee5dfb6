"""One rank's membership in a group: its place, its device, what is kept with it, and whether it is still open."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.comm.exchange import Exchange
from thinwire.comm.groups import group_exists
from thinwire.comm.threads import ThreadExchange
from thinwire.comm.work import Work
from thinwire.errors import ThinwireError, TransportUnavailable

__all__ = ["Attachment", "Membership", "Origin"]


class Attachment(Protocol):
    """What may be kept with a communicator: something with a line for `explain`, and an end.

    `settle` ends what is under way, and raises nothing; it comes before anything else travels. Otherwise a rank could
    wait here for a peer that waits for the rest of what this rank sends it.
    """

    def describe(self) -> str: ...

    def settle(self) -> None: ...

    def close(self) -> None: ...


_A = TypeVar("_A", bound=Attachment)


@dataclass(frozen=True)
class Origin:
    """Where a communicator's rank, size and device came from, for :meth:`Communicator.explain`."""

    ranks: str
    device: str
    owns_group: bool = False


class Membership:
    """What :class:`Communicator` knows of itself, and what its collectives are built on."""

    def _set_up(
        self, exchange: Exchange, device: torch.device, origin: Origin, group: dist.ProcessGroup | None
    ) -> None:
        self._exchange = exchange
        self._device = device
        self._origin = origin
        self._group = group
        self._backend = exchange.backend
        self._timeout = exchange.timeout
        self._closed = False
        self._attachments: dict[str, Attachment] = {}
        self._unfinished: list[Work[None]] = []  # collectives with steps that are still to be posted

    @property
    def rank(self) -> int:
        """This process's place in the group (or this thread's), 0 to size - 1."""
        return self._exchange.rank

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return self._exchange.size

    @property
    def device(self) -> torch.device:
        """Where this rank's tensors live."""
        return self._device

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group itself.

        Raises:
            ThinwireError: the ranks are threads of one process, which have none.
        """
        if self._group is None:
            raise ThinwireError("ranks that are threads of one process have no process group; see in_process")
        return self._group

    @property
    def timeout(self) -> float:
        """Seconds that a call may wait for a peer."""
        return self._timeout

    @property
    def closed(self) -> bool:
        """Whether the communicator was closed, or its process group destroyed."""
        return self._closed or (self._group is not None and not group_exists(self._group))

    @property
    def in_process(self) -> bool:
        """Whether the ranks are threads of this process, as those of `run_ranks(mode="thread")` are."""
        return isinstance(self._exchange, ThreadExchange)

    def check_device(self, name: str, tensor: Tensor) -> None:
        """Refuses a tensor on another kind of device than this communicator's; device numbers are not looked at.

        Args:
            name: what the caller knows the tensor by.

        Raises:
            TransportUnavailable: naming the tensor and both devices, or what it is if it is no tensor.
        """
        if not isinstance(tensor, Tensor):
            raise TransportUnavailable(f"{name} is a {type(tensor).__name__}; a torch.Tensor is needed")
        if tensor.device.type != self._device.type:
            raise TransportUnavailable(
                f"{name} lives on {tensor.device}, but this communicator's tensors live on {self._device}: "
                f"move it, or make a communicator with device={tensor.device.type!r}"
            )

    def check_exchange(self) -> None:
        """Refuses a group that cannot move this communicator's tensors: Gloo moves CPU memory only.

        Raises:
            TransportUnavailable: naming the backend and the device.
        """
        if self._backend == "gloo" and self._device.type != "cpu":
            raise TransportUnavailable(
                f"rows on {self._device} cannot travel through a Gloo group, which moves CPU memory only: make a "
                "communicator over an NCCL group, or one with device='cpu'"
            )

    @overload
    def attached(self, key: str, make: Callable[[], _A]) -> _A: ...

    @overload
    def attached(self, key: str) -> Attachment | None: ...

    def attached(self, key: str, make: Callable[[], Attachment] | None = None) -> Attachment | None:
        """What `make` returned at the first call with this key; closed when the communicator is.

        Without `make`: what there is, or None.

        Raises:
            ThinwireError: the communicator is closed.
        """
        if self._closed:
            self._require_open()
        if self._unfinished:  # what uses an attachment waits for peers, which may wait for these
            self._settle_collectives()
        attachment = self._attachments.get(key)
        if attachment is None and make is not None:
            attachment = self._attachments[key] = make()
        return attachment

    def _require_open(self) -> None:
        if self.closed:
            raise ThinwireError("this communicator is closed: call thinwire.init() again, or wrap another group")

    def _settle_collectives(self) -> None:
        unfinished, self._unfinished = self._unfinished, []
        for work in unfinished:
            work.settle()

    def _settle(self) -> None:
        self._settle_collectives()
        for attachment in self._attachments.values():
            attachment.settle()
