"""How a process joins the others: `init`, the communicators it makes, and the default one."""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from thinwire.comm.agreement import meeting
from thinwire.comm.agreement.meeting import INTERFACE_VARIABLE, Unmet, World
from thinwire.comm.agreement.standby import resolve_quorum
from thinwire.comm.call import Attachment
from thinwire.comm.communicator import Child, Communicator, Settings
from thinwire.comm.groups import DEFAULT_TIMEOUT, as_device, backends_of, group_of, limit_of_group, member_group
from thinwire.comm.host_collectives import Origin
from thinwire.comm.hosts import LOOPBACK, interface_of
from thinwire.comm.launch.launchers import ALONE, RankInfo, discover
from thinwire.comm.launch.rank_table import RankTable
from thinwire.comm.recorder import is_off, write_all
from thinwire.comm.resources import CpuShare, cpu_share
from thinwire.comm.tensors import require_seconds
from thinwire.comm.waiting import call_within, first_line
from thinwire.compiler import Recorder, opaque
from thinwire.errors import PeerTimeout, ThinwireError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: What operations take as `comm`.
Group: TypeAlias = "Communicator | dist.ProcessGroup | DeviceMesh"

_P = ParamSpec("_P")
_T = TypeVar("_T")


class _WritesOnSignal(Attachment):
    """SIGUSR1 writes the flight recorders' files until the world that `init` made is closed.

    Python runs handlers in the main thread, between its own steps: waits of the direct transport, of threads and of
    Gloo let it, one within NCCL does not before it ends.
    """

    outlives_shrink = True  # or the signal would end the process from then on

    def __init__(self) -> None:
        signal.signal(signal.SIGUSR1, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # What goes wrong here must not come up in the midst of the caller's own code.
        try:
            told = "\n".join(f"thinwire: flight recorder written to {path}" for path in write_all("SIGUSR1"))
        except Exception as error:
            told = f"thinwire: the flight recorder could not be written: {type(error).__name__}: {error}"
        with contextlib.suppress(OSError):
            os.write(2, f"{told}\n".encode(errors="replace"))

    def describe(self) -> str:
        return "SIGUSR1: writes the flight recorder"

    def close(self) -> None:
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGUSR1) == self._handle:
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # ends the process again


class Domains:
    """The communicators that `init` made in one process, or in one thread that is a rank, and those of other groups.

    The domain None is that of all calls that name none. The others are made from it, and end with it.
    """

    def __init__(self) -> None:
        self.by_name: dict[str | None, Communicator] = {}
        self._of_groups: list[tuple[dist.ProcessGroup, Communicator]] = []
        self._recent: list[Communicator] = []  # the one that init returned last comes last

    def find(self, name: str | None) -> Communicator | None:
        """The domain's communicator, if it has one that is open."""
        found = self.by_name.get(name)
        return None if found is None else found._latest

    def choose(self, comm: Communicator) -> Communicator:
        """Makes it what `current` returns, and returns it."""
        self._recent = [other for other in self._recent if other._latest not in (None, comm)] + [comm]
        return comm

    def current(self) -> Communicator | None:
        """The one that was chosen last, of those that are open."""
        return next((latest for comm in reversed(self._recent) if (latest := comm._latest)), None)

    def of_group(self, group: dist.ProcessGroup, device: str | None) -> Communicator:
        """The communicator of a process group, and of a type of device, if one is given; made where it was not yet."""
        world = self.find(None)
        for its_group, comm in [*([] if world is None else [(world._group, world)]), *self._of_groups]:
            latest = comm._latest
            if its_group is group and latest is not None and device in (None, latest.device.type):
                return latest
        self._of_groups = [(other, comm) for other, comm in self._of_groups if comm._latest is not None]
        like = self.current()
        kept = {} if like is None else like.settings._asdict()
        made = Communicator(group, **{**kept, "device": device})
        atexit.register(made._close_all)
        self._of_groups.append((group, made))
        return made


class _OfThread(threading.local):
    domains: Domains | None = None  # in threads that are ranks


_of_process, _of_thread = Domains(), _OfThread()


def current_domains() -> Domains:
    """This thread's if it is a rank, else this process's."""
    return _of_thread.domains or _of_process


@contextlib.contextmanager
def rank_thread(comm: Communicator) -> Iterator[None]:
    """Makes `comm` what `init` and `default_communicator` return in this thread."""
    before, _of_thread.domains = _of_thread.domains, Domains()
    _of_thread.domains.by_name[None] = _of_thread.domains.choose(comm)
    try:
        yield
    finally:
        _of_thread.domains = before


def init(
    *,
    rank: int | None = None,
    world_size: int | None = None,
    rank_table: RankTable | Mapping[str, object] | str | os.PathLike[str] | None = None,
    domain: str | None = None,
    device: torch.device | str | None = None,
    timeout: float | None = None,
    meeting_timeout: float = DEFAULT_TIMEOUT,
    quorum: str | None = None,
) -> Communicator:
    """Joins the other ranks and returns a communicator over all of them, the default one from now on. Collective.

    Rank and size come from a rank table if one is passed, else from the arguments, else from a `torch.distributed` that
    is initialised already (whose process group is then used, and left alone by `close()`), else from `discover`.
    The backend is Gloo for the CPU and NCCL for CUDA. A world of one meets nobody and needs no address. A group made
    here is destroyed by `close()`, or at the end of the process.

    Each *domain* has its own communicator over the same ranks. Calls in one do not affect calls in another, and a
    domain with a lost rank can be closed while others go on. A second call with the same domain returns the same
    communicator; to change its settings, close it first. All domains are made from the communicator of calls without a
    domain, which is made first if needed; `init().close()` closes it and ends them all. All ranks open domains in the
    same order. Ranks that open different ones at the same time, or pass different rank tables, get ConfigMismatch.

    In a thread of `run_ranks(mode="thread")`, calls without a domain return that rank's communicator.

    If it is called in the main thread and SIGUSR1 has its default action, that signal writes the flight recorders of
    all open communicators, see `Communicator.flight_recorder`, until the communicator of calls without a domain is
    closed. Other handlers are not replaced. During a wait within NCCL the files are written when the wait ends.

    Args:
        rank, world_size: both or neither; they need MASTER_ADDR and MASTER_PORT in the environment. With a rank table
            `rank` alone is enough.
        rank_table: path or content of a file that lists the ranks and their devices; see `discover` and
            `thinwire.comm.launch.rank_table`.
        domain: a name.
        device: None means the rank table's if there is one, else `cuda:LOCAL_RANK`, when CUDA is available, else the
            CPU. It becomes CUDA's current device. "cuda" without a number means the same device.
        timeout: seconds that a call may wait for a peer, from now on. None means 600, or the limit of the process group
            if that is there already. On CUDA, PyTorch ends a process whose stream has been waiting for a peer for more
            than twice as long, and four minutes.
        meeting_timeout: seconds to wait here until all ranks have come and are connected.
        quorum: "any" or "majority", see `Communicator`. None means "any"; for a domain it means the setting of calls
            without one.

    Raises:
        ThinwireError: an argument or environment variable is missing or unusable, and is named; or rank 0 cannot listen
            at the place to meet.
        RankTableError: the table, or its entry for this rank, is unusable.
        ArgumentError: `quorum` is unknown.
        ConfigMismatch: ranks differ in the domain, quorum or rank table.
        PeerTimeout: the other ranks did not arrive in time.
    """
    if domain is not None and (not isinstance(domain, str) or not domain.strip()):
        raise ThinwireError(f"domain is {domain!r}, expected None or a name, a string that is not empty")
    if timeout is not None:
        require_seconds("timeout", timeout)
    meeting_timeout = require_seconds("meeting_timeout", meeting_timeout)
    if device is not None:
        as_device(device)
    resolve_quorum(quorum)
    table = None
    if rank_table is not None:
        table = RankTable.load(rank_table)
        world_size = table.size if world_size is None else world_size
    domains, wanted = current_domains(), Settings(device, timeout, quorum)
    found = domains.find(domain)
    if found is not None:
        _require_compatible(found, rank, world_size, wanted)
        return domains.choose(found)
    world = domains.find(None)
    made = world is None
    if world is None:
        if _of_thread.domains is not None:
            raise ThinwireError("this rank is a thread, and its communicator is closed; it cannot get another one")
        world = _join(rank, world_size, table, wanted, meeting_timeout)
    else:
        _require_compatible(world, rank, world_size, Settings())
    try:
        digest = None if table is None else hashlib.sha256(repr(table.entries).encode()).hexdigest()[:16]
        world.require_same("thinwire.init", {"domain": domain, "rank_table": digest})
    except BaseException:
        if made:
            world.close()
        raise
    domains.by_name[None] = world
    in_main_thread = threading.current_thread() is threading.main_thread()
    if made and in_main_thread and not is_off() and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        world.attached("SIGUSR1", _WritesOnSignal)
    if domain is None:
        return domains.choose(world)
    opened = _open_domain(world, domain, wanted)
    if not opened.in_process:
        atexit.register(opened._close_all)  # before the world, see below
    domains.by_name[domain] = opened
    return domains.choose(opened)


def current_cpu_share() -> CpuShare:
    """The share of cores for calls to which no communicator is passed; see `cpu_share`."""
    comm = current_domains().current()
    if comm is not None:
        return comm.cpu_share
    return cpu_share(dist.get_world_size() if dist.is_initialized() else None)


def default_communicator() -> Communicator:
    """The communicator that `init` returned last, of those that are open.

    In a thread that is a rank, it is that rank's until `init` returns another one there.

    Raises:
        ThinwireError: there is none, or it was closed.
    """
    found = current_domains().current()
    if found is None:
        raise ThinwireError("there is no default communicator: call thinwire.init() first, or pass comm=")
    return found


def communicator_or_default(comm: Group | None) -> Communicator:
    """The communicator for a call's `comm=`; see `as_communicator`."""
    return default_communicator() if comm is None else as_communicator(comm)


def on_communicator(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Marks a function that all ranks of `comm`, a keyword of its, call. See `opaque`."""
    return opaque(function, find_recorder=_recorder_of)


def _recorder_of(_: object, named: dict[str, Any]) -> Recorder:
    comm = named.get("comm")
    found = comm if type(comm) is Communicator else communicator_or_default(comm)
    return found.recorder


def as_communicator(comm: Group) -> Communicator:
    """A communicator itself, or that of a process group or of a DeviceMesh of one axis.

    A group has one communicator: that of `init` if it wraps this group, else one that is made when the group is first
        passed, collectively over it, with the timeout of the default communicator if there is one. It
        ends with the process or the group. If it was shrunk, its group stands for the remaining ranks.

    Raises:
        ArgumentError: it is something else, or a mesh of several axes.
        ThinwireError: this rank is not in the group.
        TransportUnavailable, PeerTimeout, ConfigMismatch: as `Communicator`, when it is made.
    """
    return comm if isinstance(comm, Communicator) else current_domains().of_group(*group_of(comm))


def _join(
    rank: int | None, world_size: int | None, table: RankTable | None, wanted: Settings, meeting_timeout: float
) -> Communicator:
    """The communicator of the domain None."""
    device = wanted.device
    if dist.is_initialized():
        for name, passed, present in (
            ("rank", rank, dist.get_rank()),
            ("world_size", world_size, dist.get_world_size()),
        ):
            if passed not in (None, present):
                raise ThinwireError(
                    f"{name}={passed} was passed, but torch.distributed is initialised already with {name} {present}"
                )
        info = origin = None
        if table is not None:
            info = discover({}, rank=dist.get_rank(), rank_table=table)
            backends = backends_of(member_group(None))
            if device is None and backends.get("cuda") == "nccl" and torch.cuda.is_available():
                device = "cuda"
            origin = Origin(f"torch.distributed's default group, and {info.source}", "as the rank table says")
        chosen = _choose_device(device, info)[0] if device is not None else None
        return Communicator(**wanted._replace(device=chosen)._asdict(), _origin=origin)
    info = discover(os.environ, rank=rank, world_size=world_size, rank_table=table)
    chosen_device, reason = _choose_device(device, info)
    if info.source == ALONE and not hasattr(sys, "ps1"):  # which there is where somebody types, as in a notebook
        _say_alone()
    interface = _make_group(info, chosen_device, wanted.timeout or DEFAULT_TIMEOUT, meeting_timeout)
    try:
        origin = Origin(info.source, reason, owns_group=True, interface=interface)
        world = Communicator(**wanted._replace(device=chosen_device)._asdict(), _origin=origin)
    except BaseException:
        dist.destroy_process_group()
        raise
    # A process that exits with Gloo's threads running may be aborted by their destructors.
    atexit.register(world._close_all)
    return world


def _open_domain(world: Communicator, name: str, wanted: Settings) -> Communicator:
    """A communicator of its own over the ranks of `world`. Collective; all ranks agree on the name already."""
    device = wanted.device
    if world.in_process and device is not None and torch.device(device).type != world.device.type:
        raise ThinwireError(
            f"device is {str(device)!r}, but these ranks are threads, whose tensors live on {world.device}"
        )
    of_world = world._origin
    origin = Origin(
        f"{of_world.ranks}; domain {name!r}", of_world.device, owns_group=True, interface=of_world.interface
    )
    settings = Settings(
        world.device if device is None else device, wanted.timeout or world.timeout, wanted.quorum or world.quorum
    )
    made = world._derive([tuple(range(world.size))], settings, origin)
    made._origin = origin
    child = Child(made, f"domain: {name!r}")
    if world.closed:  # by a signal handler or another thread
        child.close()
        world.require_open()
    world._attachments[f"domain {name}"] = child
    return made


def _require_compatible(comm: Communicator, rank: int | None, world_size: int | None, asked: Settings) -> None:
    device = None if asked.device is None else torch.device(asked.device)
    numbered = device is not None and device.index is not None
    settings: tuple[tuple[str, object, object], ...] = (
        ("rank", rank, comm.rank),
        ("world_size", world_size, comm.size),
        ("device", device and str(device), str(comm.device) if numbered else comm.device.type),
        ("quorum", asked.quorum, comm.quorum),
        ("timeout", asked.timeout, comm.timeout),
    )
    differing = [f"{name}={wanted!r}" for name, wanted, present in settings if wanted not in (None, present)]
    if differing:
        raise ThinwireError(
            f"init was called before and gave {comm!r}; close() that one before asking for {', '.join(differing)}"
        )


def _choose_device(device: torch.device | str | None, info: RankInfo | None) -> tuple[torch.device, str]:
    reason = "as passed"
    if device is not None:
        chosen = torch.device(device)
    elif not torch.cuda.is_available():
        chosen, reason = torch.device("cpu"), "as CUDA is not available"
    else:
        chosen, reason = torch.device("cuda"), "as CUDA is available"
    if chosen.type != "cuda":
        return chosen, reason
    if (count := torch.cuda.device_count()) <= (chosen.index or 0):
        visible = f"{count} visible, cuda:0 to cuda:{count - 1}" if count else "visible: pass device='cpu', or none"
        raise ThinwireError(
            f"device is {str(device)!r}, and {'that is none of the' if count else 'no GPU is'} {visible}"
        )
    if chosen.index is None and info is not None:
        chosen = torch.device("cuda", _local_index(info))
        reason += "" if info.device_id is None else ", and the rank table says which"
    if chosen.index is not None:
        torch.cuda.set_device(chosen)
    return chosen, reason


def _local_index(info: RankInfo) -> int:
    count = torch.cuda.device_count()
    if info.local_rank is None and count > 1 and info.size > 1:
        raise ThinwireError(
            f"rank and size come from {info.source}, which does not say which of the {count} GPUs is this rank's: "
            "set LOCAL_RANK, or pass device="
        )
    index = info.device_id if info.device_id is not None else info.local_rank or 0
    if count == 1 and info.size > 1:
        return 0  # launchers that show each rank its own GPU alone
    if index >= count:
        wanted = f"local rank {index}" if info.device_id is None else f"device {index} of the rank table"
        raise ThinwireError(f"{wanted} has no GPU of its own: {count} visible; pass device='cuda:N', or fewer ranks")
    return index


@functools.cache  # once in a process
def _say_alone() -> None:
    print(
        "thinwire: one rank, as no launcher was found: torchrun --nproc-per-node N starts N; "
        "init(rank=0, world_size=1) says that one is meant",
        file=sys.stderr,
        flush=True,
    )


#: Of this process, as of all ranks, for each its own names in the store.
_groups_over_agent = itertools.count()


def _make_group(info: RankInfo, device: torch.device, timeout: float, meeting_timeout: float) -> str | None:
    """Makes the default group, and gives the network interface of its connections, if one is known."""
    on_cuda = device.type == "cuda"
    backend = "nccl" if on_cuda else "gloo"
    end = time.monotonic() + meeting_timeout

    def left() -> timedelta:
        return timedelta(seconds=max(0.001, end - time.monotonic()))

    world = None
    try:
        world = _meet(info, left)

        def make() -> None:
            with torch.cuda.device(device) if on_cuda else contextlib.nullcontext():
                dist.init_process_group(
                    backend,
                    store=world.store,
                    rank=info.rank,
                    world_size=info.size,
                    timeout=limit_of_group(backend, max(timeout, meeting_timeout)),
                    device_id=device if on_cuda else None,
                )

        with meeting.gloo_over(world.interface):
            call_within(left().total_seconds(), make, world.look)
        return world.interface
    except (Unmet, TimeoutError, RuntimeError) as error:  # stores raise DistError, Gloo's first connections a plain one
        host, port = info.address or (LOOPBACK, None)
        place = "alone" if info.size == 1 else f"on this host, for {info.job}" if port is None else f"at {host}:{port}"
        reason = first_line(error) if isinstance(error, RuntimeError) else str(error)
        if world is not None and not isinstance(error, Unmet):
            interface = f"{INTERFACE_VARIABLE}={os.environ.get(INTERFACE_VARIABLE) or world.interface or ''}"
            if info.size == 1:
                reason += "; PyTorch needs a network interface that is up: `ip link set lo up`"
            else:
                reason += f"; is the network interface, {interface}, up, and do all ranks reach this one by it?"
        raise PeerTimeout(
            f"rank {info.rank} of {info.size}, from {info.source}, could not meet the others {place} "
            f"(limit {meeting_timeout:g} s): {reason}",
            ranks=error.missing if isinstance(error, Unmet) else (),
        ) from None


def _meet(info: RankInfo, left: Callable[[], timedelta]) -> World:
    """Finds the other ranks, within the time that is left."""
    if info.size == 1:
        return World(dist.HashStore(), interface_of(LOOPBACK), {})
    if info.address is None:
        return meeting.meet(meeting.store_of_job(info.job, info.rank, left()), info.rank, info.size, left())
    host, port = info.address
    store: dist.Store
    # Where torchrun's agent has a store, all ranks are its clients, and how it listens is the agent's affair.
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # It has the names of groups that this process has left, such as Gloo's addresses of theirs.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        own = f"thinwire attempt {attempt} group {next(_groups_over_agent)}"
        store = dist.PrefixStore(own, meeting.reach(host, port, left()))
    else:
        store = meeting.store_at(host, port, info.rank, left())
    return meeting.meet(store, info.rank, info.size, left(), host)
