"""The ranks of a process group, or of one process: exact exchanges in bounded time, and comparison of settings."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.comm.collectives import Collectives
from thinwire.comm.exchange import PeerExchange, Pending
from thinwire.comm.groups import backends_of, choose_backend, choose_device, group_exists, member_group, with_index
from thinwire.comm.membership import Origin
from thinwire.comm.settings import Setting, describe_mismatch, describe_settings, digest_of
from thinwire.comm.threads import ThreadExchange, ThreadWorld
from thinwire.errors import ConfigMismatch, CountsError, ThinwireError, TransportUnavailable

if TYPE_CHECKING:
    from thinwire.comm.layout import Layout, TensorLayout

__all__ = ["DEFAULT_TIMEOUT", "Communicator", "Origin", "Setting"]

#: Seconds that a peer may stay silent.
DEFAULT_TIMEOUT = 30.0

_LARGEST_COUNT = 2**63 - 1
_T = TypeVar("_T")


class Communicator(Collectives):
    """Exact exchanges between the ranks of a process group, or (see `of_threads`) between threads of one process.

    The constructor is collective over the group: it returns once every rank has called it. Calls on one communicator
    must come in the same order on all ranks, and from one thread at a time.

    Args:
        group: a process group that this rank belongs to; None means the default group of `torch.distributed`.
        device: where this rank's tensors live. None means CUDA's current device when the group has NCCL and CUDA is
            available, else the CPU. A CUDA device over a Gloo group may compare settings and synchronise, but
            :meth:`post` then takes CPU memory only.
        timeout: seconds that a call may wait for a peer; None means 30.

    Raises:
        ThinwireError: there is no process group, or this rank is not in it.
        TransportUnavailable: the group has neither Gloo nor NCCL for the device.
        PeerTimeout: another rank did not call the constructor in time.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | str | None = None,
        timeout: float | None = None,
        _origin: Origin | None = None,
    ) -> None:
        group_source = "torch.distributed's default group" if group is None else "the process group that was passed"
        group = member_group(group)
        timeout = _checked_timeout(DEFAULT_TIMEOUT if timeout is None else timeout)
        backends = backends_of(group)
        chosen, device_reason = choose_device(device, backends)
        exchange = PeerExchange(group, choose_backend(chosen, backends), timeout)
        self._set_up(exchange, chosen, _origin or Origin(group_source, device_reason), group)
        # Everyone meets here, so that a missing rank shows up now, and because NCCL wants all ranks in a group's first
        # exchange; later ones may leave ranks out.
        self.barrier()

    @classmethod
    def of_threads(
        cls, world: ThreadWorld, *, device: torch.device | str = "cpu", timeout: float | None = None
    ) -> list[Communicator]:
        """Communicators of ranks that are threads of this process, without torch.distributed. Waits for nobody.

        `run_ranks(mode="thread")` makes them; each is for one thread.

        Args:
            world: what the ranks share; made for them alone.
            device: where the tensors of all ranks live: "cpu", or one GPU.
            timeout: seconds that a call may wait for a peer; None means 30.

        >>> from thinwire.comm.threads import ThreadWorld
        >>> Communicator.of_threads(ThreadWorld(2))[1]
        Communicator(rank=1, size=2, device='cpu', backend='threads')
        """
        timeout = _checked_timeout(DEFAULT_TIMEOUT if timeout is None else timeout)
        chosen = with_index(torch.device(device))
        if chosen.type not in ("cpu", "cuda"):
            raise TransportUnavailable(f"threads cannot exchange tensors on {chosen}; accepted: the CPU, CUDA")
        communicators = []
        for rank in range(world.size):
            comm = cls.__new__(cls)
            exchange = ThreadExchange(world, rank, timeout, chosen)
            comm._set_up(exchange, chosen, Origin("the threads of one process", "as passed"), None)
            communicators.append(comm)
        return communicators

    def post(self, sends: Sequence[Tensor | None], receives: Sequence[Tensor | None], label: str = "") -> Pending:
        """Starts sending `sends[r]` to rank r and filling `receives[r]` from rank r, for every peer r.

        Both ranks of a pair know what they exchange: `sends[b]` on rank a has the length of `receives[a]` on rank b.
        Several exchanges may be under way; between two ranks they match in the order in which they were posted.

        Args:
            sends: one entry a rank, contiguous uint8 on this communicator's device; None or empty: send nothing.
            receives: likewise, filled in place. The rank's own entries are None in both.
            label: what the bytes are. Over Gloo and between threads, ranks that give different labels do not match, so
                that bytes of one kind are never taken for another; NCCL has no such check.

        Returns:
            What to wait for before the buffers are read or written.

        Raises:
            ThinwireError, TransportUnavailable: entries that cannot be exchanged; nothing was sent.
            PeerTimeout: the connection to a peer is lost. No further exchange is possible over this process group.
        """
        self._require_open()
        self._settle()
        return self._exchange.post(sends, receives, label)

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
        self.post(sends, receives).wait_on_host()
        return [pickle.loads((payload if row is None else row.cpu()).numpy().tobytes()) for row in receives]

    def share_objects(self, obj: _T) -> list[_T]:
        """Every rank's object itself, in rank order, where ranks are threads of one process. Blocks the host.

        Raises:
            ThinwireError: the ranks are processes, see `in_process`; `all_gather_object` sends copies.
            PeerTimeout: a peer did not answer.
        """
        self._require_open()
        if not isinstance(self._exchange, ThreadExchange):
            raise ThinwireError("ranks that are processes cannot share objects; all_gather_object sends copies")
        self._settle()
        return self._exchange.share_objects(obj)

    def require_same(self, what: str, settings: Mapping[str, Setting]) -> None:
        """Compares settings over all ranks, before anything is built on them. 32 bytes a pair unless they differ.

        Args:
            what: the thing that has these settings, for the message.
            settings: what must agree; `1`, `1.0` and `True` are three different values.

        Raises:
            ConfigMismatch: on every rank, with the settings that differ and each rank's value.
            TypeError: a value of another type.
        """
        described = describe_settings(what, settings)
        digest = digest_of(described)
        rows = torch.frombuffer(bytearray(digest * self.size), dtype=torch.uint8).view(self.size, len(digest))
        if bool((self._exchange_rows(rows) == rows).all()):
            return
        # Every rank saw all the digests, so every rank comes here.
        raise ConfigMismatch(describe_mismatch(what, self.all_gather_object(described)))

    def split(
        self,
        layout: Layout | TensorLayout | None = None,
        axes: str | Sequence[str] | None = None,
        *,
        groups: Sequence[Sequence[int]] | None = None,
    ) -> Communicator:
        """The communicator of the ranks that differ from this one only along `axes`; see `thinwire.comm.split.split`.

        Collective. `ExpertParallel(comm.split(layout, "ep"), ...)` spreads experts over one axis of a device matrix.
        """
        from thinwire.comm.split import split  # which needs this file

        return split(self, layout, axes, groups=groups)

    def explain(self) -> str:
        """What was chosen, and why, one fact a line."""
        owner = "made by init, destroyed by close()" if self._origin.owns_group else "the caller's"
        if self._group is None:
            owner = "none, the ranks are threads of this process"
        return "\n".join(
            (
                f"communicator: rank {self.rank} of {self.size}" + (", closed" if self.closed else ""),
                f"  rank and size: from {self._origin.ranks}",
                f"  device: {self._device}, {self._origin.device}",
                f"  backend: {self._backend}",
                f"  process group: {owner}",
                f"  timeout: {self._timeout:g} s",
                *(f"  {attachment.describe()}" for attachment in self._attachments.values()),
            )
        )

    def close(self) -> None:
        """Ends use of the communicator; destroys the process group if `init` made it. May be called again."""
        if self._closed:
            return
        self._closed = True
        for attachment in self._attachments.values():
            attachment.close()
        for work in self._unfinished:
            work.give_up(
                ThinwireError("this communicator was closed while a collective was under way, before its wait()")
            )
        self._exchange.close()
        if self._origin.owns_group and self._group is not None and group_exists(self._group):
            dist.destroy_process_group(self._group)

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Communicator(rank={self.rank}, size={self.size}, device='{self._device}', backend={self._backend!r})"

    @property
    def _exchange_device(self) -> torch.device:
        return self._device if self._backend == "nccl" else torch.device("cpu")

    def _synchronise(self) -> None:
        # Host calls bound their wait for peers; the caller's own kernels, queued before, must not count against it.
        if self._backend == "nccl":
            torch.cuda.current_stream(self._device).synchronize()

    def _exchange_rows(self, rows: Tensor) -> Tensor:
        """Row r of a CPU uint8 matrix [size, bytes] goes to rank r; row r of the result came from there."""
        self._require_open()
        outgoing = rows.to(self._exchange_device)
        incoming = outgoing.clone()
        self._synchronise()
        peers = [peer != self.rank for peer in range(self.size)]
        sends = [row if peer else None for row, peer in zip(outgoing, peers, strict=True)]
        receives = [row if peer else None for row, peer in zip(incoming, peers, strict=True)]
        self.post(sends, receives).wait_on_host()
        return incoming.cpu()


def _checked_timeout(timeout: float) -> float:
    if not 0 < timeout < float("inf"):
        raise ThinwireError(f"timeout is {timeout!r}, expected a finite number of seconds above 0")
    return float(timeout)
