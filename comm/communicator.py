"""The ranks of a process group, or of one process, and what one rank keeps of its membership."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from thinwire.comm.collectives import Collectives
from thinwire.comm.exchange import PeerExchange
from thinwire.comm.flight_files import VARIABLE
from thinwire.comm.flight_recorder import RecorderOff
from thinwire.comm.groups import choose_backend, group_exists, keeps_order, member_group, new_group, with_index
from thinwire.comm.host_collectives import Attachment, Origin
from thinwire.comm.layout import Layout, TensorLayout, resolve_groups
from thinwire.comm.threads import ThreadExchange, ThreadWorld
from thinwire.errors import ThinwireError, TransportUnavailable

#: Seconds that a peer may stay silent.
DEFAULT_TIMEOUT = 30.0
_ID_BYTES = 8

Groups = tuple[tuple[int, ...], ...]


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
        timeout = _checked_timeout(timeout)
        backend, chosen, device_reason = choose_backend(group, device)
        exchange = PeerExchange(group, backend, timeout)
        self._set_up(exchange, chosen, _origin or Origin(group_source, device_reason), group)
        # Everyone meets here, so that a missing rank shows up now, and because NCCL wants all ranks in a group's first
        # exchange; later ones may leave ranks out. What rank 0 drew is what their flight recorders call it.
        drawn = torch.frombuffer(bytearray(secrets.token_bytes(_ID_BYTES) * self.size), dtype=torch.uint8)
        with self._recorder.begin("Communicator"):
            everyone = self._exchange_rows(drawn.view(self.size, _ID_BYTES), "barrier")
            self._recorder.communicator = everyone[0].numpy().tobytes().hex()

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
        timeout = _checked_timeout(timeout)
        chosen = with_index(torch.device(device))
        if chosen.type not in ("cpu", "cuda"):
            raise TransportUnavailable(f"threads cannot exchange tensors on {chosen}; accepted: the CPU, CUDA")
        communicators = []
        for rank in range(world.size):
            comm = cls.__new__(cls)
            exchange = ThreadExchange(world, rank, timeout, chosen)
            comm._set_up(exchange, chosen, Origin("the threads of one process", "as passed"), None)
            comm._recorder.communicator = world.identity
            communicators.append(comm)
        return communicators

    def split(
        self,
        layout: Layout | TensorLayout | None = None,
        axes: str | Sequence[str] | None = None,
        *,
        groups: Sequence[Sequence[int]] | None = None,
    ) -> Communicator:
        """The communicator of the ranks that differ from this one only along `axes`. Collective.

        It has this one's device and timeout; what goes wrong in one of the two does not touch the other. `close()`
        destroys its process group, unless this one leaves out ranks of `torch.distributed`'s default group: that one's
        name would come again with the next split, and its ranks would find the addresses of the old one.
        `ExpertParallel(comm.split(layout, "ep"), ...)` spreads experts over one axis of a device matrix.

        Args:
            layout: over the ranks of this communicator.
            axes: of the layout. Ranks are numbered with the first axis counting most, see :meth:`Layout.ranks_along`.
            groups: in place of layout and axes: lists of ranks, every rank in one of them; ranks are numbered in the
                order of their list.

        Raises:
            LayoutError: axes, a layout or groups that do not fit.
            ConfigMismatch: ranks that asked for different groups; nothing was made.
            PeerTimeout: a rank did not take part.
            TransportUnavailable: between processes, ranks in another order than ascending, on PyTorch before 2.12.

        >>> import thinwire as tw
        >>> with tw.init() as comm:
        ...     comm.split(Layout((1, 1), ("dp", "ep")), "ep").size
        1
        """
        wanted = resolve_groups(self.size, layout, axes, groups)
        origin = Origin("a split of another communicator", "as that one's", owns_group=not self._leaves_ranks_out)
        with self._recorder.begin("split", details=("groups", len(wanted))):
            self.require_same("split", {"groups": repr(wanted)})
            return self._derive(wanted, self._device, self.timeout, origin)

    def _derive(
        self, groups: Sequence[tuple[int, ...]], device: torch.device | str, timeout: float, origin: Origin
    ) -> Communicator:
        """The communicator of this rank's group; threads stay on this one's device, and have an origin of their own.

        Collective; all ranks agree on the groups of this communicator's ranks, which hold each rank once.
        """
        own = next(group for group in groups if self.rank in group)
        if isinstance(self._exchange, ThreadExchange):
            made: list[Communicator] = []
            if self.rank == own[0]:  # the first of each group makes the communicators of all, the others take theirs
                world = ThreadWorld(len(own), within=self._exchange.world)
                made = Communicator.of_threads(world, device=self._device, timeout=timeout)
            return self.share_objects(made)[own[0]][own.index(self.rank)]
        ranks = dist.get_process_group_ranks(self.group)
        everyone = {group: [ranks[rank] for rank in group] for group in groups}
        disordered = [members for members in everyone.values() if members != sorted(members)]
        if disordered and not keeps_order():
            raise TransportUnavailable(
                f"the process group {disordered[0]} would lose its order, as PyTorch before 2.12 sorts the ranks of "
                "a new group: name the axes in the order of the layout, or list the ranks of each group in ascending "
                "order"
            )
        # NCCL's own watchdog ends the process; it must not fire before a host call has raised PeerTimeout.
        limit = timedelta(seconds=timeout * (2 if self._exchange.backend == "nccl" else 1))
        # Where the default group is wider, its other ranks do not come here, so only members may take part.
        local = self._leaves_ranks_out
        new_groups = {
            group: new_group(members, self.group, limit, local=local)
            for group, members in everyone.items()
            if group == own or not local
        }
        try:
            return Communicator(new_groups[own], device=device, timeout=timeout, _origin=origin)
        except BaseException:
            if origin.owns_group:
                dist.destroy_process_group(new_groups[own])
            raise

    @property
    def _leaves_ranks_out(self) -> bool:
        """Whether torch.distributed's default group has ranks that are not in this one."""
        return not self.in_process and self.size < dist.get_world_size()

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
                f"  backend: {self._exchange.backend}",
                f"  process group: {owner}",
                f"  timeout: {self.timeout:g} s",
                f"  {self._recorder.describe()}",
                *(f"  {attachment.describe()}" for attachment in self._attachments.values()),
            )
        )

    def flight_recorder(self) -> Path:
        """Writes this rank's last 256 operations on this communicator to a file, and returns its path.

        PeerTimeout writes it too, and so does SIGUSR1, see :func:`init`; `thinwire inspect` compares all ranks' files.
        It holds names, sizes, dtypes and times, no data. THINWIRE_FLIGHT_RECORDER names the folder. Not collective; may
        be called from any thread, and when the communicator is closed.

        Raises:
            ThinwireError: THINWIRE_FLIGHT_RECORDER was "off" when the communicator was made.
            OSError: the folder or the file cannot be made.
        """
        if isinstance(self._recorder, RecorderOff):
            raise ThinwireError(f'{VARIABLE} was "off" when this communicator was made; expected a folder, or no value')
        return self._recorder.write("asked for")

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
        self._recorder.close()
        if self._origin.owns_group and self._group is not None and group_exists(self._group):
            dist.destroy_process_group(self._group)

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        backend = self._exchange.backend
        return f"Communicator(rank={self.rank}, size={self.size}, device='{self._device}', backend={backend!r})"


class _SharedSplit(Attachment):
    """A communicator as an attachment of the one that it was split from."""

    def __init__(self, communicator: Communicator, groups: Groups) -> None:
        self.communicator, self.groups = communicator, groups

    def describe(self) -> str:
        return f"split: {len(self.groups)} groups, this rank in one of {self.communicator.size}"

    def close(self) -> None:
        self.communicator.close()


def shared_split(comm: Communicator, groups: Groups) -> Communicator:
    """As `comm.split`, but only the first call with these groups makes one; closed together with `comm`."""
    return comm.attached(f"split {groups}", lambda: _SharedSplit(comm.split(groups=groups), groups)).communicator


def _checked_timeout(timeout: float | None) -> float:
    timeout = DEFAULT_TIMEOUT if timeout is None else timeout
    if not 0 < timeout < float("inf"):
        raise ThinwireError(f"timeout is {timeout!r}, expected a finite number of seconds above 0")
    return float(timeout)
