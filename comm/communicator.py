"""The ranks of a process group, or of one process, and what one rank keeps of its membership."""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from thinwire.comm.agreement.meeting import gloo_over
from thinwire.comm.agreement.standby import Standby, join, resolve_quorum
from thinwire.comm.call import Attachment
from thinwire.comm.environment import environment_problem, require_usable
from thinwire.comm.exact import Collectives
from thinwire.comm.exchange import Exchange, PeerExchange, name_ranks
from thinwire.comm.groups import (
    DEFAULT_TIMEOUT,
    as_device,
    choose_backend,
    endless_in_children,
    group_exists,
    groups_to_make,
    keeps_order,
    limit_of_group,
    member_group,
    new_group,
    renew_default_group,
    standalone_group,
    timeout_of,
    with_index,
)
from thinwire.comm.host_collectives import Origin, describe_mismatch
from thinwire.comm.hosts import describe, host_name, hosts_of
from thinwire.comm.layout import Layout
from thinwire.comm.recorder import VARIABLE
from thinwire.comm.tensors import require_seconds
from thinwire.comm.threads import ThreadExchange, ThreadWorld
from thinwire.errors import ArgumentError, ConfigMismatch, PeerTimeout, ThinwireError, TransportUnavailable
from thinwire.log import LOGGER
from thinwire.triton_kernels.cpu import BACKEND_VARIABLE
from thinwire.version import VERSION
from thinwire.wire import WIRE_VERSION

_T = TypeVar("_T")


class Settings(NamedTuple):
    """Settings that `init` takes, and that communicators hand on to those made from them."""

    device: torch.device | str | None = None
    timeout: float | None = None
    quorum: str | None = None


class Communicator(Collectives):
    """Exact exchanges between the ranks of a process group, or (see `of_threads`) between threads of one process.

    The constructor is collective over the group: it returns once every rank has called it. Calls on one communicator
    must come in the same order on all ranks, and from one thread at a time.

    Args:
        group: a process group that this rank belongs to; None means the default group of `torch.distributed`.
        device: where this rank's tensors live. None means CUDA's current device when the group has NCCL and CUDA is
            available, else the CPU. A CUDA device over a Gloo group may compare settings and synchronise, but
            `post` then takes CPU memory only.
        timeout: seconds that a call may wait for a peer; None means the process group's own limit, which is 600 for
            NCCL and 1800 for Gloo if whoever made it does not say.
        quorum: which ranks may go on when others are lost. "majority": more than half of those whose processes are not
            known to have ended, so that the two halves of a cut network do not both go on. "any": any two, or one alone
            if at most one other may be alive. None means "any". It has no effect on ranks that are threads.

    Attributes:
        hosts: the ranks of each host, such as ((0, 1), (2, 3)). THINWIRE_HOST names a rank's, else its system does.

    Raises:
        ArgumentError: `quorum` is unknown; or, on every rank, an environment variable of thinwire's is unusable on some
            rank, which the message names.
        ConfigMismatch: on every rank, if ranks differ in `quorum`, or in the version of the library or of its wire
            formats.
        ThinwireError: there is no process group, or this rank is not in it.
        TransportUnavailable: the group has neither Gloo nor NCCL for the device.
        PeerTimeout: another rank did not call the constructor in time.
    """

    _successor: Communicator | None = None  # what `shrink` has made of it
    _standby: Standby | None = None  # between processes
    _num_derived = 0  # groups made over the store of a standalone one
    _give_back: weakref.finalize[Any, PeerExchange] | None = None  # which destroys its process group
    _renews_default = False  # whether its group is the default one, and made by `init`
    _is_standalone = False  # whether its group is its own, unknown to torch.distributed

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | str | None = None,
        timeout: float | None = None,
        quorum: str | None = None,
        _origin: Origin | None = None,
        _store: dist.Store | None = None,
    ) -> None:
        group_source = "torch.distributed's default group" if group is None else "the process group that was passed"
        checked = require_seconds("timeout", DEFAULT_TIMEOUT if timeout is None else timeout)
        problem, self.quorum = environment_problem(), resolve_quorum(quorum)
        if group is not None and _store is not None:  # a standalone group
            backend, chosen, device_reason = "gloo", torch.device(device or "cpu"), "as passed"
        else:
            group = member_group(group)
            backend, chosen, device_reason = choose_backend(group, device)
        if timeout is None and not (_origin is not None and _origin.owns_group):
            checked = timeout_of(group, backend)
        exchange = PeerExchange(endless_in_children(group), backend, checked)
        self._set_up(exchange, chosen, _origin or Origin(group_source, device_reason), group, recorded=problem is None)
        self._store, self._is_standalone = _store, _store is not None
        self._renews_default = self._origin.owns_group and group is dist.group.WORLD
        if self._origin.owns_group and backend == "gloo" and _store is None:
            # Of the exchange, as works that are under way hold that one, and not this.
            self._give_back = weakref.finalize(exchange, _destroy, group, os.getpid())
            self._give_back.atexit = False
        # Everyone meets here, so that a missing rank shows up now, and because NCCL wants all ranks in a group's first
        # exchange; later ones may leave ranks out.
        own = {"quorum": self.quorum, "thinwire": VERSION, "wire_version": WIRE_VERSION}
        settings = {name: repr(value) for name, value in own.items()}
        own_host = host_name()

        def gather(value: object, shape: Any) -> list[Any]:
            of_ranks = self.all_gather_data([problem, settings, own_host, value], (str | None, {str: str}, str, shape))
            problems, told, names, values = zip(*of_ranks, strict=True)
            require_usable(problems)
            if any(others != settings for others in told):
                raise ConfigMismatch(describe_mismatch("Communicator", told))
            self.hosts = hosts_of(names)
            return list(values)

        try:
            if self.size == 1:
                require_usable([problem])
            with self.recorder.begin("Communicator"):
                if self.size > 1:
                    self._standby = Standby.open(self.rank, gather, checked, self.quorum)
                    exchange.agree, exchange.find_ended = self._standby.agree, self._standby.find_ended
                self.recorder.communicator = secrets.token_hex(8) if self._standby is None else self._standby.name
            self._log_facts()
        except BaseException:
            exchange.close()
            raise
        self.recorder.end = weakref.WeakMethod(self.end_by)

    @classmethod
    def of_threads(
        cls,
        world: ThreadWorld,
        *,
        device: torch.device | str = "cpu",
        timeout: float | None = None,
        quorum: str | None = None,
    ) -> list[Communicator]:
        """Communicators of ranks that are threads of this process, without torch.distributed. Does not wait.

        `run_ranks(mode="thread")` makes them; each is for one thread.

        Args:
            world: the state that the ranks share; made for them alone.
            device: where the tensors of all ranks live: "cpu", or one GPU.
            timeout: seconds that a call may wait for a peer; None means 600.
            quorum: see the constructor.

        >>> from thinwire.comm.threads import ThreadWorld
        >>> Communicator.of_threads(ThreadWorld(2))[1]
        Communicator(rank=1, size=2, device='cpu', backend='threads')
        """
        checked = require_seconds("timeout", DEFAULT_TIMEOUT if timeout is None else timeout)
        if (problem := environment_problem()) is not None:
            raise ArgumentError(problem)
        chosen = with_index(as_device(device))
        if chosen.type not in ("cpu", "cuda"):
            raise TransportUnavailable(f"threads cannot exchange tensors on {chosen}; accepted: the CPU, CUDA")
        communicators = []
        for rank in range(world.size):
            comm = cls.__new__(cls)
            comm.quorum = resolve_quorum(quorum)
            exchange = ThreadExchange(world, rank, checked, chosen)
            comm._set_up(exchange, chosen, Origin("the threads of one process", "as passed"), None)
            comm.recorder.communicator, comm.recorder.end = world.identity, weakref.WeakMethod(comm.end_by)
            comm._log_facts()
            communicators.append(comm)
        return communicators

    def split(
        self,
        layout: Layout | None = None,
        axes: str | Sequence[str] | None = None,
        *,
        groups: Sequence[Sequence[int]] | None = None,
    ) -> Communicator:
        """The communicator of the ranks that differ from this one only along `axes`. Collective.

        It has this one's device, timeout and quorum; errors in one do not affect the other. `close()`
        destroys its process group, and over Gloo so does dropping the last reference. Ranks must do either at the same
        place of their program, as torch names some groups by how many there are. If this one leaves out ranks of
        `torch.distributed`'s default group, the process group is kept, as the next split would reuse its store keys.
        `ExpertParallel(comm.split(layout, "ep"), ...)` spreads experts over one axis of a device matrix.

        Args:
            layout: over the ranks of this communicator.
            axes: of the layout. Ranks are numbered with the first axis counting most, see `Layout.ranks_along`.
            groups: instead of layout and axes: lists of ranks, with every rank in one of them. Ranks are numbered in
                the order of their list.

        Raises:
            LayoutError: axes, layout or groups do not fit this communicator.
            ConfigMismatch: ranks asked for different groups; nothing was made.
            PeerTimeout: a rank did not take part.
            TransportUnavailable: a group's ranks do not ascend, between processes, on PyTorch before 2.12.

        >>> import thinwire as tw
        >>> with tw.init() as comm:
        ...     comm.split(Layout((1, 1), ("dp", "ep")), "ep").size
        1
        """
        wanted = groups_to_make(self.size, layout, axes, groups)
        origin = Origin(
            "a split of another communicator",
            "as that one's",
            owns_group=not self._leaves_ranks_out,
            interface=self._origin.interface,
        )
        with self.call("split", details=("groups", len(wanted))):
            self.require_same("split", {"groups": repr(wanted)})
            made = self._derive(wanted, self.settings, origin)
            self._exchange_rows(torch.zeros(self.size, 1, dtype=torch.uint8, device="cpu"), "split")
            return made  # nobody leaves, and takes the store along, before all groups are made

    @property
    def settings(self) -> Settings:
        """The settings of communicators that are made from this one."""
        return Settings(self._device, self.timeout, self.quorum)

    def _derive(self, groups: Sequence[tuple[int, ...]], settings: Settings, origin: Origin) -> Communicator:
        """The communicator of this rank's group; threads stay on this one's device, and have an origin of their own.

        Collective; all ranks agree on the groups of this communicator's ranks, which hold each rank once.
        """
        own = next(group for group in groups if self.rank in group)
        if isinstance(self._exchange, ThreadExchange):
            made: list[Communicator] = []
            if self.rank == own[0]:  # the first of each group makes the communicators of all, the others take theirs
                world = ThreadWorld(len(own), self._exchange.world, own)
                made = Communicator.of_threads(world, **settings._replace(device=self._device)._asdict())
            return self.share_objects(made)[own[0]][own.index(self.rank)]
        if self._store is not None:
            return self._derive_standalone(own, settings, origin)
        ranks = dist.get_process_group_ranks(self.group)
        everyone = {group: [ranks[rank] for rank in group] for group in groups}
        disordered = [members for members in everyone.values() if members != sorted(members)]
        if disordered and not keeps_order():
            raise TransportUnavailable(
                f"the process group {disordered[0]} would lose its order, as PyTorch before 2.12 sorts the ranks of "
                "a new group: name the axes in the order of the layout, or list the ranks of each group in ascending "
                "order"
            )
        limit = limit_of_group(self._exchange.backend, settings.timeout or self.timeout)
        # Where the default group is wider, its other ranks do not come here, so only members may take part.
        local = self._leaves_ranks_out

        def make() -> dict[tuple[int, ...], dist.ProcessGroup]:
            return {
                group: new_group(members, self.group, limit, local=local)
                for group, members in everyone.items()
                if group == own or not local
            }

        with gloo_over(origin.interface):  # NCCL goes by the thread's device
            on_nccl = self._exchange.backend == "nccl"
            new_groups = make() if on_nccl else self._join(make, own, settings.timeout)
        try:
            return Communicator(new_groups[own], **settings._asdict(), _origin=origin)
        except BaseException:
            if origin.owns_group:
                _destroy(new_groups[own], os.getpid())
            raise

    def _derive_standalone(self, own: tuple[int, ...], settings: Settings, origin: Origin) -> Communicator:
        assert self._store is not None
        self._num_derived += 1
        store = dist.PrefixStore(f"{self._num_derived} {own}", self._store)
        place, limit = own.index(self.rank), limit_of_group("gloo", settings.timeout or self.timeout)
        with gloo_over(origin.interface):
            group = self._join(lambda: standalone_group(store, place, len(own), limit), own, settings.timeout)
        return Communicator(group, **settings._asdict(), _origin=origin, _store=store)

    def _join(self, make: Callable[[], _T], ranks: Sequence[int], timeout: float | None) -> _T:
        """Makes a group together with other ranks; PeerTimeout at once if one of them ends meanwhile."""

        def look() -> None:
            ended = self._exchange.find_ended(ranks)
            if ended:
                text = f"{name_ranks(ended)} ended while a group of {name_ranks(ranks)} was made"
                raise PeerTimeout(f"rank {self.rank} of {self.size}: {text}", ranks=ended)

        return join(make, self.timeout if timeout is None else timeout, name_ranks(ranks), look)

    @property
    def voters(self) -> Exchange | None:
        """The exchange through which ranks vote on who is lost once a kernel has given up; None where they do not."""
        standby = self._standby  # of processes
        # On CUDA hosts learn of it when they next ask, each at its own time: a vote would take for lost who asks late.
        return self._exchange if self.device.type == "cpu" and (standby is None or standby.can_agree) else None

    @property
    def _latest(self) -> Communicator | None:
        """This one, or what `shrink` has made of it, whichever is open; None if that was closed."""
        if self._successor is not None:
            return self._successor._latest
        return None if self.closed else self

    @property
    def _leaves_ranks_out(self) -> bool:
        """Whether torch.distributed's default group has ranks that are not in this one."""
        return not self.in_process and self._store is None and self.size < dist.get_world_size()

    def shrink(self, lost: Iterable[int] | None = None) -> Communicator:
        """Gives a communicator of the remaining ranks, and closes this one. Collective over the remaining ranks.

        Ranks are renumbered in their order, and settings stay. It leaves out lost ranks, and ranks that do not come
        within twice the timeout (another rank may notice that much later that something is wrong). It does not wait for
        a rank whose process has ended. Another call returns the same communicator. If that one loses a rank, shrink it
        in turn.

        If `thinwire.init` made this one's process group, the new group replaces it as `torch.distributed`'s default
        group, and all other groups of `torch.distributed` end. Otherwise the new group is for this communicator alone,
        and functions of `torch.distributed` do not know it. In both cases `thinwire.init()` then returns the new
        communicator instead of this one.

        Args:
            lost: ranks of this communicator not to wait for, such as a PeerTimeout's `ranks`. None means the ranks that
                this communicator's own PeerTimeout named, if it raised one.

        Raises:
            ArgumentError: `lost` is not None or ranks of this communicator.
            ThinwireError: it is closed; this rank is one of `lost`; or the others go on without it.
            PeerTimeout: another rank was lost meanwhile, or too few have met to go on, see `quorum`. Call it again.
            TransportUnavailable: the group is over NCCL, and `init` did not make it.

        >>> import thinwire as tw
        >>> with tw.init() as comm:
        ...     comm.shrink() is comm  # alone, there is nobody to lose
        True
        """
        if self._successor is not None:
            return self._successor
        if self._closed:
            self.require_open()
        left_out = self._lost_ranks(lost)
        if self.size == 1:
            return self
        exchange = self._exchange
        if isinstance(exchange, ThreadExchange):
            members, world = exchange.world.shrink(self.rank, left_out, 2 * self.timeout)
            comms = Communicator.of_threads(world, **self.settings._asdict())
            made = comms[members.index(self.rank)]
        else:
            made = self._shrink_group(left_out)
        self._successor = made
        for key in [key for key, attachment in self._attachments.items() if attachment.outlives_shrink]:
            made._attachments[key] = self._attachments.pop(key)
        self.close()
        return made

    def _lost_ranks(self, lost: Iterable[int] | None) -> set[int]:
        if lost is None:
            return set(self._exchange.lost)
        ranks = list(lost) if isinstance(lost, Iterable) else None
        if ranks is None or any(type(rank) is not int or not 0 <= rank < self.size for rank in ranks):
            raise ArgumentError(
                f"lost is {lost!r}, expected None or ranks of this communicator, ints from 0 to {self.size - 1}"
            )
        return set(ranks)

    def _shrink_group(self, lost: set[int]) -> Communicator:
        backend = self._exchange.backend
        limit = limit_of_group(backend, self.timeout)
        if backend == "nccl" and not self._renews_default:
            raise TransportUnavailable(
                "over NCCL only a communicator whose process group thinwire.init made can be shrunk; make a new group, "
                "and a communicator of it"
            )
        assert self._standby is not None
        meeting = self._standby.meet(lost, 2 * self.timeout)
        place, size = meeting.members.index(self.rank), len(meeting.members)
        origin = Origin(
            f"{self._origin.ranks}; shrunk from {self.size} ranks to {name_ranks(meeting.members)}",
            self._origin.device,
            owns_group=True,
            interface=self._origin.interface,
        )
        made: Communicator | None = None
        problem: ThinwireError | None = None
        kept = self.settings._asdict()
        try:
            if self._renews_default:
                if backend == "nccl":
                    self.group.abort()  # kernels that wait for the lost would keep it from ending
                with gloo_over(origin.interface):
                    meeting.make(lambda store: renew_default_group(store, backend, place, size, limit, self._device))
                made = Communicator(**kept, _origin=origin)
            else:
                with gloo_over(origin.interface):
                    store, group = meeting.make(lambda store: (store, standalone_group(store, place, size, limit)))
                made = Communicator(group, **kept, _origin=origin, _store=store)
        except ThinwireError as error:
            problem = error
        if not meeting.confirm(made is not None) or made is None:
            if made is not None:
                made.close()
            raise PeerTimeout(
                f"rank {self.rank} of {self.size}: another rank was lost while {name_ranks(meeting.members)} were "
                f"about to go on; call shrink() again ({problem or 'it could not make the new group'})"
            )
        atexit.register(made._close_all)
        return made

    def _log_facts(self) -> None:
        if LOGGER.isEnabledFor(logging.INFO):
            facts = self._facts()
            self.log("; ".join(facts[:-1]))
            self.log(facts[-1], logging.DEBUG)

    def _facts(self) -> list[str]:
        """The lines of `explain` about the ranks and how they reach each other."""
        owner = "made by init, destroyed by close()" if self._origin.owns_group else "the caller's"
        if self._is_standalone:
            owner = "its own, unknown to torch.distributed, ended by close()"
        if self.in_process:
            owner = "none, the ranks are threads of this process"
        shares_rows = self._device.type == "cpu" and (os.environ.get(BACKEND_VARIABLE) or "numba") == "numba"
        return [
            f"rank and size: from {self._origin.ranks}",
            f"device: {self._device}, {self._origin.device}",
            f"backend: {self._exchange.backend}",
            *([f"hosts: {describe(self.hosts)}"] if len(self.hosts) > 1 else []),
            f"process group: {owner}",
            f"timeout: {self.timeout:g} s",
            f"quorum: {self.quorum}",
            *([f"threads for rows of a large call: {self.cpu_share}"] if shares_rows else []),
            *([f"memory of results: {kept / 2**20:.0f} MiB kept"] if (kept := self.result_memory.num_bytes) else []),
            *([] if self._standby is None else [self._standby.describe()]),
            self.recorder.describe(),
        ]

    def explain(self) -> str:
        """Says what was chosen and why, one fact a line."""
        first = f"communicator: rank {self.rank} of {self.size}" + (", closed" if self.closed else "")
        attached = (attachment.describe() for attachment in self._attachments.values())
        return "\n  ".join([first, *self._facts(), *filter(None, attached)])

    def flight_recorder(self) -> Path:
        """Writes this rank's last 256 operations on this communicator to a file, and returns its path.

        PeerTimeout writes this file too, and so does SIGUSR1, see `init`. `thinwire inspect` compares all ranks' files.
        The file holds names, sizes, dtypes and times, no data. THINWIRE_FLIGHT_RECORDER names the folder. Not
        collective; may be called from any thread, and after the communicator was closed.

        Raises:
            ThinwireError: THINWIRE_FLIGHT_RECORDER was "off" when the communicator was made.
            OSError: the folder or the file cannot be made.
        """
        if not self.recorder.writes:
            raise ThinwireError(f'{VARIABLE} was "off" when this communicator was made; expected a folder, or no value')
        return self.recorder.write("asked for")

    def close(self) -> None:
        """Ends use of the communicator; destroys the process group if `init` made it. May be called again.

        A signal handler or another thread may call it while a call of a CPU rank waits. That call then raises
        ThinwireError, and peers that still need this rank for it get a PeerTimeout that names it, of direct ones at
        once.

        An exception from outside that ends a call, such as a KeyboardInterrupt, also closes the communicator: peers may
        have made that call already, and would take a second try for the next call. Over Gloo the wait cannot be
        cancelled: until its timeout, arriving data may still fill its tensors, which are kept alive until then.
        """
        if self._closed:
            return
        self._closed = True
        self.result_memory.close()
        for attachment in self._attachments.values():
            attachment.close()
        for work in self._unfinished:
            work.give_up(
                ThinwireError("this communicator was closed while a collective was under way, before its wait()")
            )
        self._exchange.close()
        self.recorder.close()
        if self._give_back is not None:
            self._give_back()
        elif self._origin.owns_group and self._group is not None and self._store is None:
            _destroy(self._group, os.getpid())
        if self._origin.owns_group or self._store is not None:
            # Gloo's listener and its thread end with the last reference, and `init` keeps what `shrink` has closed.
            self._group = self._store = None

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *exception: object) -> None:
        """Closes it, and what `shrink` has made of it."""
        self._close_all()

    def _close_all(self) -> None:
        self.close()
        if self._successor is not None:
            self._successor._close_all()

    def __repr__(self) -> str:
        return f"Communicator(rank={self.rank}, size={self.size}, device='{self._device}', backend={self.backend!r})"


def _destroy(group: dist.ProcessGroup, process: int) -> None:
    # In a process that was forked it is the parent's.
    if os.getpid() == process and group_exists(group):
        dist.destroy_process_group(group)


class Child(Attachment):
    """A communicator as an attachment of the one that it was made from, with which it ends; `text` is for `explain`."""

    def __init__(self, communicator: Communicator, text: str) -> None:
        self.communicator, self.text = communicator, text

    def describe(self) -> str:
        return self.text + ", closed" * self.communicator.closed

    def close(self) -> None:
        self.communicator._close_all()


def shared_split(comm: Communicator, groups: tuple[tuple[int, ...], ...]) -> Communicator:
    """Splits a communicator at the first call with these groups, and gives that split at later ones."""

    def split() -> Child:
        made = comm.split(groups=groups)
        return Child(made, f"split: {len(groups)} groups, this rank in one of {made.size}")

    return comm.attached(f"split {groups}", split).communicator
