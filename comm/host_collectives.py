"""A communicator's state at one rank, and its collectives that block the host: counts, objects, settings."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import pickle
import reprlib
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.comm.call import Attachment, Call, Recorder, checked_programs
from thinwire.comm.exchange import Buffers, Exchange, Posted, Sizes, name_ranks
from thinwire.comm.groups import group_exists
from thinwire.comm.hosts import Hosts
from thinwire.comm.recorder import is_off
from thinwire.comm.resources import CpuShare, cpu_share
from thinwire.comm.result_memory import ResultMemory
from thinwire.comm.tensors import is_plain, require_dense
from thinwire.comm.threads import ThreadExchange
from thinwire.comm.work import Work
from thinwire.compiler import opaque
from thinwire.errors import ArgumentError, ConfigMismatch, CountsError, ThinwireError, TransportUnavailable
from thinwire.fields import MOST_BYTES, decode, encode
from thinwire.log import LOGGER

#: What `require_same` compares.
Setting = str | int | float | bool | None

_ABSENT = "(absent)"

_LARGEST_COUNT = 2**63 - 1
_P = ParamSpec("_P")
_T = TypeVar("_T")


_A = TypeVar("_A", bound=Attachment)


def collective(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """A communicator's method that its peers call, too. See `opaque`."""
    return opaque(method, find_recorder=lambda arguments, _: arguments[0].recorder)


@dataclass(frozen=True)
class Origin:
    """Where a communicator's rank, size and device came from, for `Communicator.explain`."""

    ranks: str
    device: str
    owns_group: bool = False
    interface: str | None = None  # for connections of groups made from this one, if one was chosen


class HostCollectives(ABC):
    """The state of a `Communicator`, and those of its collectives that block the host."""

    hosts: Hosts
    prepared: dict[object, Any]  # what operations keep for calls that differ in their tensors alone
    num_programs: int | None = None  # see `programs`
    recorder: Recorder  # for what is no call, or outlives it
    _attachments: dict[str, Attachment]
    _unfinished: list[Work[None]]  # collectives with steps that are still to be posted
    forked = False  # whether it is of the process from which this one was forked

    def _set_up(
        self,
        exchange: Exchange,
        device: torch.device,
        origin: Origin,
        group: dist.ProcessGroup | None,
        recorded: bool = True,
    ) -> None:
        self._exchange, self._device, self._origin, self._group = exchange, device, origin, group
        self._closed, self.hosts = False, (tuple(range(exchange.size)),)  # until the ranks have told theirs
        self._store: dist.Store | None = None  # of a standalone group
        self.recorder = Recorder(
            exchange.rank, exchange.size, origin.ranks, exchange.backend, exchange.timeout,
            writes=recorded and not is_off(),
        )  # fmt: skip
        exchange.recorder = self.recorder
        self._attachments, self._unfinished, self.prepared = {}, [], {}
        self.result_memory = ResultMemory(_ranks_in_all(exchange))  # the ranks of other groups may share this host, too
        _communicators.add(self)

    @cached_property
    def cpu_share(self) -> CpuShare:
        """How many threads this rank uses for the rows of a large call on the CPU."""
        return cpu_share(_ranks_in_all(self._exchange), isinstance(self._exchange, ThreadExchange))

    def log(self, text: str, level: int = logging.INFO) -> None:
        """Tells the logger of a choice, at this rank."""
        LOGGER.log(level, "rank %d of %d: %s", self.rank, self.size, text)

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
            if self._closed:
                raise ThinwireError("this communicator is closed, and its process group with it")
            raise ThinwireError("ranks that are threads of one process have no process group; see in_process")
        return self._group

    @property
    def timeout(self) -> float:
        """Seconds that a call may wait for a peer."""
        return self._exchange.timeout

    @property
    def closed(self) -> bool:
        """Whether the communicator was closed, or its process group destroyed."""
        return self._closed or (self._group is not None and self._store is None and not group_exists(self._group))

    @property
    def backend(self) -> str:
        """What moves staged rows: "gloo", "nccl" or "threads"."""
        return self._exchange.backend

    @property
    def in_process(self) -> bool:
        """Whether the ranks are threads of this process, as those of `run_ranks(mode="thread")` are."""
        return isinstance(self._exchange, ThreadExchange)

    @property
    def memory_bytes(self) -> int:
        """Bytes that this rank keeps for large results on the CPU, in use or not.

        The memory of a result without references is reused for a later result of about its size. It never exceeds twice
        the most that results took at once, in whole huge pages, nor this rank's part of a quarter of the memory that
        was available when the first result was made. The least recently used is freed first. `close` frees it, and so
        does `close` of an ExpertParallel on this communicator; a result that is still in use keeps its own.
        """
        return self.result_memory.num_bytes

    def check_device(self, name: str, tensor: Tensor) -> None:
        """Refuses a tensor on another kind of device than this communicator's; device numbers are not compared.

        Args:
            name: the caller's name for the tensor.

        Raises:
            ArgumentError: it is on another kind of device, or no plain dense tensor.
        """
        if is_plain(tensor, self._device):
            return
        if not isinstance(tensor, Tensor):
            raise ArgumentError(f"{name} is a {type(tensor).__name__}; a torch.Tensor is needed")
        # Devices are compared first: torch makes a new string each time that it is asked for a type.
        if tensor.device != self._device and tensor.device.type != self._device.type:
            raise ArgumentError(
                f"{name} lives on {tensor.device}, but this communicator's tensors live on {self._device}: "
                "move it, or make a communicator of that device, the CPU or CUDA"
            )
        require_dense(name, tensor)

    def check_exchange(self) -> None:
        """Refuses a group that cannot move this communicator's tensors: Gloo moves CPU memory only.

        Raises:
            TransportUnavailable: the group cannot; the message names the backend and the device.
        """
        if self._exchange.backend == "gloo" and self._device.type != "cpu":
            raise TransportUnavailable(
                f"rows on {self._device} cannot travel through a Gloo group, which moves CPU memory only: make a "
                "communicator over an NCCL group, or one with device='cpu'"
            )

    def post(self, sends: Buffers, receives: Buffers, label: str = "", sizes: Sizes | None = None) -> Posted:
        """Starts sending `sends[r]` to rank r and filling `receives[r]` from rank r, for every peer r.

        Both ranks of a pair know what they exchange: `sends[b]` on rank a has the length of `receives[a]` on rank b.
        Several exchanges may be pending; between two ranks they match in the order in which they were posted.

        Args:
            sends: one entry a rank, contiguous uint8 on this communicator's device; None or empty: send nothing.
            receives: likewise, filled in place. The rank's own entries are None in both.
            label: the kind of the bytes. Over Gloo and between threads, messages with different labels do not match, so
                bytes of one kind are never taken for another; NCCL has no such check.
            sizes: how much goes to each rank and comes from it, in the caller's unit. Compared like the label, as
                messages of different sizes may have the same number of bytes.

        Returns:
            A handle: call its `wait` before you read or write the buffers.

        Raises:
            ThinwireError, TransportUnavailable: an entry cannot be exchanged; nothing was sent.
            PeerTimeout: the connection to a peer is lost. No further exchange is possible over this process group.
        """
        self.require_open()
        self.settle()
        return self._exchange.post(sends, receives, label, sizes)

    def attached(self, key: str, make: Callable[[], _A] | None = None) -> _A | Any:
        """Gives what `make` returned at the first call with this key; it is closed when the communicator is.

        Without `make`: what there is, or None.

        Raises:
            ThinwireError: the communicator is closed.
        """
        if self._closed:
            self.require_open()
        if self._unfinished:  # what uses an attachment waits for peers, which may wait for these
            self.recorder.take_turn()
            try:
                self._settle_collectives()
            finally:
                self.recorder.end_turn()
        attachment = self._attachments.get(key)
        if attachment is None and make is not None:
            attachment = self._attachments[key] = make()
        return attachment

    @contextlib.contextmanager
    def programs(self, number: int | None) -> Iterator[None]:
        """Within it, kernels of collectives on a GPU have at most so many programs: fewer multiprocessors are taken.

        None: four a multiprocessor. The transport has to be direct; kernels that wait have one program in any case.

        Raises:
            ArgumentError: another number.
        """
        before, self.num_programs = self.num_programs, checked_programs(number)
        try:
            yield
        finally:
            self.num_programs = before

    def call(
        self,
        name: str,
        shape: Sequence[int] | None = None,
        dtype: object = None,
        wires: object = (),
        transport: str | None = None,
        details: tuple[Any, ...] = (),
        numbered: bool = True,
    ) -> Call:
        """Begins an operation that passed this rank's checks. Everything that peers may notice happens in this `with`
        block.

        Args:
            shape: a tensor's, as a torch.Size. Like the other arguments, it must not hold the tensor.
            wires: a wire format or several.
            transport: the one used; or the one requested, if `takes` names it later.
            details: names and values in turn: ints, text, tuples of ints, or objects that become text later.
            numbered: whether all ranks make this call.

        Raises:
            ThinwireError: the communicator has ended at this rank, or another thread is in a call; nothing was begun.
        """
        self.settle()
        return Call(self.recorder, (name, shape, dtype, wires, transport, details), numbered)

    def deliver(self, call: Call, finish: Callable[[], _T], device: torch.device, async_op: bool) -> _T | Work[_T]:
        """An operation's result: what `finish` makes on the device, or a Work whose `wait()` calls `finish`."""
        return Work((), finish, device, call.posted()) if async_op else finish()

    def settle(self) -> None:
        """Ends what is under way of earlier calls, as peers may wait for it.

        Raises:
            ThinwireError: it has ended at this rank, in a child or by an interrupt. Or another thread is in a call.
        """
        self.recorder.take_turn()
        try:
            if self._unfinished:
                self._settle_collectives()
            for attachment in self._attachments.values():
                if attachment.under_way is not None:
                    attachment.settle()
        except BaseException as error:
            try:
                self.recorder.ended_by(error)
            except BaseException as second:  # from outside, before anything has ended
                self.recorder.ended_by(second)
                raise
            raise
        finally:
            self.recorder.end_turn()

    def _settle_collectives(self) -> None:
        while self._unfinished:
            self._unfinished[0].settle()
            del self._unfinished[0]  # not before: `close` in another thread ends it

    @collective
    def barrier(self) -> None:
        """Returns once every rank has called it. Blocks the host, on CUDA too.

        Raises:
            PeerTimeout: a rank did not call it; the error names it.
        """
        with self.call("barrier"):
            self._exchange_rows(torch.zeros(self.size, 1, dtype=torch.uint8, device="cpu"), "barrier")

    @collective
    def exchange_counts(self, send_counts: Sequence[int]) -> list[int]:
        """Sends every peer its own number, and returns the numbers that the peers sent to this rank.

        One all-to-all of an int64 for each pair. On CUDA it waits for the current stream and blocks the host.

        Args:
            send_counts: `send_counts[r]` is for rank r; 0 to 2**63 - 1.

        Returns:
            `counts[r]`: the entry of rank r's list for this rank. The own entry is returned unchanged.

        Raises:
            CountsError: the list has another length, or an entry is no count; nothing was sent. Or a peer sent no
                count.
            PeerTimeout: a peer did not answer.
        """
        if not isinstance(send_counts, Sequence):
            raise CountsError(f"send_counts is a {type(send_counts).__name__}, expected a list of ints")
        counts = list(send_counts)
        if len(counts) != self.size:
            raise CountsError(f"send_counts has {len(counts)} entries, expected one for each of the {self.size} ranks")
        for peer, count in enumerate(counts):
            if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= _LARGEST_COUNT:
                raise CountsError(f"send_counts[{peer}] is {count!r}, expected an int from 0 to 2**63 - 1")
        rows = torch.tensor(counts, dtype=torch.int64, device="cpu").view(torch.uint8).view(self.size, 8)
        with self.call("exchange_counts"):
            received: list[int] = self._exchange_rows(rows, "counts").view(torch.int64).view(self.size).tolist()
            for peer, count in enumerate(received):
                if count < 0:
                    raise CountsError(f"rank {peer} sent the count {count}, expected 0 to 2**63 - 1")
            return received

    @collective
    def all_gather_object(self, obj: object) -> list[Any]:
        """Gives every rank's object, in rank order; meant for small settings. Blocks the host.

        Objects travel as pickles, and reading a pickle may run any code: every rank trusts all others. thinwire itself
            sends nothing this way; see `all_gather_data`.

        Raises:
            PeerTimeout: a peer did not answer.
            ThinwireError: a rank's object cannot be unpickled here.
            Exception: pickle's own error for an object that it does not accept; nothing was sent.
        """
        pickled = pickle.dumps(obj)
        with self.call("all_gather_object"):
            return list(map(_unpickled, range(self.size), self._gather_messages(pickled, "objects")))

    @collective
    def all_gather_data(self, value: object, shape: Any) -> list[Any]:
        """Gives every rank's value, in rank order, as data: no code of a peer is run. Blocks the host.

        Args:
            value: made of None, bool, int, float, str, lists, tuples, and dicts with str keys; at most 1 MiB as JSON.
            shape: the shape that every rank's value must have, see `thinwire.fields`.

        Returns:
            Each rank's value, with lists for tuples.

        Raises:
            ThinwireError: a rank sent another shape, or too much; that is not received.
            TypeError: this rank's value does not have the shape; nothing was sent.
            PeerTimeout: a peer did not answer.
        """
        encoded = encode(value, shape)
        with self.call("all_gather_data"):
            messages = self._gather_messages(encoded, "data", MOST_BYTES)
            return [decode(message, shape, f"rank {rank}") for rank, message in enumerate(messages)]

    def _gather_messages(self, message: bytes, label: str, most: int = _LARGEST_COUNT) -> list[bytes]:
        """Every rank's message, of at most so many bytes, in rank order."""
        lengths = self.exchange_counts([len(message)] * self.size)
        for rank, length in enumerate(lengths):
            if length > most:
                raise ThinwireError(f"rank {rank} wants to send {length} bytes of {label}; at most {most} are accepted")
        outgoing = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(self._exchange_device)
        incoming = [outgoing.new_zeros(length) for length in lengths]  # of a message that is cut short, no old bytes
        incoming[self.rank] = outgoing
        self._swap([outgoing] * self.size, incoming, label)
        return [row.cpu().numpy().tobytes() for row in incoming]

    def share_objects(self, obj: _T) -> list[_T]:
        """Gives every rank's object itself, in rank order, if ranks are threads of one process. Blocks the host.

        Raises:
            ThinwireError: the ranks are processes, see `in_process`; `all_gather_object` sends copies.
            PeerTimeout: a peer did not answer.
        """
        self.require_open()
        exchange = self._exchange
        if not isinstance(exchange, ThreadExchange):
            raise ThinwireError("ranks that are processes cannot share objects; all_gather_object sends copies")
        with self.call("share_objects"):
            return exchange.share_objects(obj)

    def require_same(self, what: str, settings: Mapping[str, Setting]) -> None:
        """Compares settings over all ranks, before they are used. Sends 32 bytes for each pair unless they differ.

        Args:
            what: the object that has these settings, for the message.
            settings: must be equal on all ranks; `1`, `1.0` and `True` are three different values.

        Raises:
            ConfigMismatch: on every rank, if settings differ; the message has each rank's value.
            ArgumentError: `settings` is no mapping, or a name or value has another type.
            ThinwireError: the settings are more than 1 MiB.
        """
        if not isinstance(settings, Mapping):
            raise ArgumentError(f"{what}: settings is {reprlib.repr(settings)}, expected a dict")
        for name, value in settings.items():
            if not isinstance(name, str) or not isinstance(value, Setting):
                raise ArgumentError(
                    f"{what}: setting {reprlib.repr(name)} is {reprlib.repr(value)}, expected a str as its name, and a "
                    "str, int, float, bool or None"
                )
        described = {"what": repr(what)} | {name: repr(value) for name, value in settings.items()}
        encode(described, {str: str})  # what could not be sent if it differed is refused before anything is
        digest = hashlib.sha256(repr(sorted(described.items())).encode()).digest()
        rows = torch.frombuffer(bytearray(digest * self.size), dtype=torch.uint8).view(self.size, len(digest))
        with self.call("require_same", details=("what", what)):
            if bool((self._exchange_rows(rows, "settings") == rows).all()):
                return
            # Every rank saw all the digests, so every rank comes here.
            raise ConfigMismatch(describe_mismatch(what, self.all_gather_data(described, {str: str})))

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "a Communicator cannot be copied or pickled, as it is one rank's place in a group: pass the object itself, "
            "or call thinwire.init() in each process; split() and init(domain=...) give others over the same ranks"
        )

    def end_by(self, error: BaseException) -> None:
        """Closes it, as an exception from outside has ended a call of which peers may know.

        To them this rank has left in the middle of a call, as if `close` had been called there.
        """
        if self.recorder.ended is None:
            self.recorder.ended = (
                f"this communicator has ended at this rank, as {type(error).__name__} came in the middle of a call: "
                "close it, and call thinwire.init() again on all ranks, or wrap another group"
            )
            self.close()

    @abstractmethod
    def close(self) -> None: ...

    def require_open(self) -> None:
        """Raises ThinwireError where it is closed, or has ended at this rank."""
        if self.recorder.ended is not None:
            raise ThinwireError(self.recorder.ended)
        if self.closed:
            raise ThinwireError("this communicator is closed: call thinwire.init() again, or wrap another group")

    @property
    def _exchange_device(self) -> torch.device:
        return self._device if self._exchange.backend == "nccl" else torch.device("cpu")

    def _exchange_rows(self, rows: Tensor, label: str) -> Tensor:
        """Row r of a CPU uint8 matrix [size, bytes] goes to rank r; row r of the result came from there."""
        outgoing = rows.to(self._exchange_device)
        incoming = outgoing.clone()
        self._swap(outgoing, incoming, label)
        return incoming.cpu()

    def _swap(self, outgoing: Iterable[Tensor], incoming: Iterable[Tensor], label: str) -> None:
        """Posts all but this rank's own entries, and blocks the host until they are there."""
        # Host calls bound their wait for peers; the caller's own kernels, queued before, must not count against it.
        if self._exchange.backend == "nccl":
            torch.cuda.current_stream(self._device).synchronize()
        sends, receives = (
            [None if peer == self.rank else row for peer, row in enumerate(rows)] for rows in (outgoing, incoming)
        )
        self.post(sends, receives, label).wait_on_host()


_communicators: weakref.WeakSet[HostCollectives] = weakref.WeakSet()  # of this process


def _leave_to_parent() -> None:
    """In a process that was just forked no call on them begins, or goes on, and `close` says nothing to peers."""
    for comm in list(_communicators):
        comm.forked = comm._closed = True
        comm.recorder.ended = comm.recorder.ended or (
            f"this communicator is of process {os.getppid()}, from which this one, {os.getpid()}, was forked: only "
            "that one can use it"
        )
        for attachment in comm._attachments.values():
            attachment.leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)


def _unpickled(rank: int, message: bytes) -> Any:
    try:
        return pickle.loads(message)
    except Exception as error:
        raise ThinwireError(
            f"rank {rank} sent an object that cannot be unpickled here: {type(error).__name__}: {error}"
        ) from error


def _ranks_in_all(exchange: Exchange) -> int:
    """How many there are, also of groups that this rank is none of."""
    if isinstance(exchange, ThreadExchange):
        return exchange.world.num_ranks
    return dist.get_world_size() if dist.is_initialized() else exchange.size


def describe_mismatch(what: str, by_rank: Sequence[Mapping[str, str]]) -> str:
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
