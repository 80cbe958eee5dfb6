"""Collectives of what the host holds: counts, objects, settings, or nothing at all."""

from __future__ import annotations

import hashlib
import pickle
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from thinwire.comm.exchange import Exchange, name_ranks
from thinwire.comm.threads import ThreadExchange
from thinwire.errors import ConfigMismatch, CountsError, ThinwireError

__all__ = ["HostCollectives", "Setting"]

#: What `require_same` compares.
Setting = str | int | float | bool | None

_ABSENT = "(absent)"
_LARGEST_COUNT = 2**63 - 1
_T = TypeVar("_T")


class HostCollectives(ABC):
    """The collectives of a :class:`Communicator` that block the host."""

    _exchange: Exchange
    _device: torch.device

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

    @abstractmethod
    def _settled_exchange(self) -> Exchange:
        """What messages travel through, once what was under way is done.

        Raises:
            ThinwireError: the communicator is closed.
        """

    def barrier(self) -> None:
        """Returns once every rank has called it. Blocks the host, on CUDA too.

        Raises:
            PeerTimeout: naming the ranks that did not come.
        """
        self._exchange_rows(torch.zeros(self.size, 1, dtype=torch.uint8))

    def exchange_counts(self, send_counts: Sequence[int]) -> list[int]:
        """Tells every peer a number of its own, and returns what the peers told this rank.

        One all-to-all of an int64 a pair. On CUDA it waits for the current stream and blocks the host.

        Args:
            send_counts: `send_counts[r]` is meant for rank r; 0 to 2**63 - 1.

        Returns:
            `counts[r]`, what rank r's list holds for this rank; the own entry comes back as it is.

        Raises:
            CountsError: a list of another length, or entries that are no counts; nothing was sent.
            PeerTimeout: a peer did not answer.
        """
        counts = list(send_counts)
        if len(counts) != self.size:
            raise CountsError(f"send_counts has {len(counts)} entries, expected one for each of the {self.size} ranks")
        for peer, count in enumerate(counts):
            if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= _LARGEST_COUNT:
                raise CountsError(f"send_counts[{peer}] is {count!r}, expected an int from 0 to 2**63 - 1")
        rows = torch.tensor(counts, dtype=torch.int64).view(torch.uint8).view(self.size, 8)
        received: list[int] = self._exchange_rows(rows).view(torch.int64).view(self.size).tolist()
        return received

    def all_gather_object(self, obj: object) -> list[Any]:
        """Every rank's object, in rank order; meant for small settings. Blocks the host.

        The objects travel pickled: use it among ranks that trust each other, as one job's ranks do.

        Raises:
            PeerTimeout: a peer did not answer.
            Exception: whatever pickle raises for an object that it cannot take; nothing was sent.
        """
        payload = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
        lengths = self.exchange_counts([payload.numel()] * self.size)
        memory = self._exchange_device
        outgoing = payload.to(memory)
        sends = [None if peer == self.rank else outgoing for peer in range(self.size)]
        receives = [
            None if peer == self.rank else torch.empty(length, dtype=torch.uint8, device=memory)
            for peer, length in enumerate(lengths)
        ]
        self._synchronise()
        self._settled_exchange().post(sends, receives).wait_on_host()
        return [pickle.loads((payload if row is None else row.cpu()).numpy().tobytes()) for row in receives]

    def share_objects(self, obj: _T) -> list[_T]:
        """Every rank's object itself, in rank order, where ranks are threads of one process. Blocks the host.

        Raises:
            ThinwireError: the ranks are processes, see `in_process`; `all_gather_object` sends copies.
            PeerTimeout: a peer did not answer.
        """
        exchange = self._settled_exchange()
        if not isinstance(exchange, ThreadExchange):
            raise ThinwireError("ranks that are processes cannot share objects; all_gather_object sends copies")
        return exchange.share_objects(obj)

    def require_same(self, what: str, settings: Mapping[str, Setting]) -> None:
        """Compares settings over all ranks, before anything is built on them. 32 bytes a pair unless they differ.

        Args:
            what: the thing that has these settings, for the message.
            settings: what must agree; `1`, `1.0` and `True` are three different values.

        Raises:
            ConfigMismatch: on every rank, with the settings that differ and each rank's value.
            TypeError: a value of another type.
        """
        for name, value in settings.items():
            if not isinstance(value, str | int | float | bool | None):
                raise TypeError(f"{what}: setting {name!r} is {value!r}, expected a str, int, float, bool or None")
        described = {"what": repr(what)} | {name: repr(value) for name, value in settings.items()}
        digest = hashlib.sha256(repr(sorted(described.items())).encode()).digest()
        rows = torch.frombuffer(bytearray(digest * self.size), dtype=torch.uint8).view(self.size, len(digest))
        if bool((self._exchange_rows(rows) == rows).all()):
            return
        # Every rank saw all the digests, so every rank comes here.
        raise ConfigMismatch(_describe_mismatch(what, self.all_gather_object(described)))

    @property
    def _exchange_device(self) -> torch.device:
        return self._device if self._exchange.backend == "nccl" else torch.device("cpu")

    def _synchronise(self) -> None:
        # Host calls bound their wait for peers; the caller's own kernels, queued before, must not count against it.
        if self._exchange.backend == "nccl":
            torch.cuda.current_stream(self._device).synchronize()

    def _exchange_rows(self, rows: Tensor) -> Tensor:
        """Row r of a CPU uint8 matrix [size, bytes] goes to rank r; row r of the result came from there."""
        outgoing = rows.to(self._exchange_device)
        incoming = outgoing.clone()
        self._synchronise()
        peers = [peer != self.rank for peer in range(self.size)]
        sends = [row if peer else None for row, peer in zip(outgoing, peers, strict=True)]
        receives = [row if peer else None for row, peer in zip(incoming, peers, strict=True)]
        self._settled_exchange().post(sends, receives).wait_on_host()
        return incoming.cpu()


def _describe_mismatch(what: str, by_rank: list[dict[str, str]]) -> str:
    """Which settings differ, and which ranks have which value."""
    lines = [f"{what}: the ranks' settings differ"]
    for name in dict.fromkeys(name for settings in by_rank for name in settings):
        ranks_of: dict[str, list[int]] = {}
        for rank, settings in enumerate(by_rank):
            ranks_of.setdefault(settings.get(name, _ABSENT), []).append(rank)
        if len(ranks_of) > 1:
            parts = (f"{value} on {name_ranks(ranks)}" for value, ranks in ranks_of.items())
            lines.append(f"  {name}: {'; '.join(parts)}")
    return "\n".join(lines)
