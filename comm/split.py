"""Communicators over some of a communicator's ranks: along axes of a layout, or in groups that are listed."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from thinwire.comm.communicator import Communicator, Origin
from thinwire.comm.layout import Layout, TensorLayout
from thinwire.comm.threads import ThreadExchange, ThreadWorld
from thinwire.errors import LayoutError, PeerTimeout, TransportUnavailable

__all__ = ["shared_split", "split"]

Groups = tuple[tuple[int, ...], ...]


def split(
    comm: Communicator,
    layout: Layout | TensorLayout | None = None,
    axes: str | Sequence[str] | None = None,
    *,
    groups: Sequence[Sequence[int]] | None = None,
) -> Communicator:
    """The communicator of the ranks that differ from this one only along `axes`. Collective over `comm`.

    It has the device and the timeout of `comm`. `close()` destroys its process group, unless `comm` leaves out ranks of
    `torch.distributed`'s default group: that one's name would come again with the next split, and its ranks would find
    the addresses of the old one.

    Args:
        comm: stays as it is; what goes wrong in one of the two does not touch the other.
        layout: over the ranks of `comm`.
        axes: of the layout. Ranks are numbered with the first axis counting most, see :meth:`Layout.ranks_along`.
        groups: in place of layout and axes: lists of `comm`'s ranks, every rank in one of them; ranks are numbered in
            the order of their list.

    Raises:
        LayoutError: axes, a layout or groups that do not fit.
        ConfigMismatch: ranks that asked for different groups; nothing was made.
        PeerTimeout: a rank did not take part.
        TransportUnavailable: between processes, ranks in another order than ascending, on PyTorch before 2.12.

    >>> import thinwire as tw
    >>> with tw.init() as comm:
    ...     split(comm, Layout((1, 1), ("dp", "ep")), "ep").size
    1
    """
    wanted = _groups(comm, layout, axes, groups)
    comm.require_same("split", {"groups": repr(wanted)})
    place = next(place for place, group in enumerate(wanted) if comm.rank in group)
    return _of_threads(comm, wanted[place]) if comm.in_process else _of_processes(comm, wanted, place)


def shared_split(comm: Communicator, groups: Groups) -> Communicator:
    """As `split` with these groups, but kept with `comm`: the same one at every call, closed together with `comm`.

    Only the first call is collective.
    """
    return comm.attached(f"split {groups}", lambda: _SharedSplit(split(comm, groups=groups), groups)).communicator


class _SharedSplit:
    """A communicator as an attachment of the one that it was split from."""

    def __init__(self, communicator: Communicator, groups: Groups) -> None:
        self.communicator = communicator
        self._sizes = f"{len(groups)} groups, this rank in one of {communicator.size}"

    def describe(self) -> str:
        """One line for `Communicator.explain`."""
        return f"split: {self._sizes}"

    def settle(self) -> None:
        """Nothing is under way between calls of those who share it."""

    def close(self) -> None:
        """Closes the communicator."""
        self.communicator.close()


def _groups(
    comm: Communicator,
    layout: Layout | TensorLayout | None,
    axes: str | Sequence[str] | None,
    groups: Sequence[Sequence[int]] | None,
) -> Groups:
    if groups is not None:
        if layout is not None or axes is not None:
            raise LayoutError("split takes a layout and axes, or groups, not both")
        found = tuple(tuple(group) for group in groups if len(group))
        if sorted(rank for group in found for rank in group) != list(range(comm.size)):
            raise LayoutError(
                f"the groups {list(map(list, found))} do not hold each of ranks 0 to {comm.size - 1} once"
            )
        return found
    if layout is None or axes is None:
        raise LayoutError("split needs a layout and axes, or groups")
    if layout.size != comm.size:
        raise LayoutError(f"{layout} is for {layout.size} ranks, but the communicator has {comm.size}")
    return layout.groups(axes)


def _of_threads(comm: Communicator, group: tuple[int, ...]) -> Communicator:
    """The first of each group makes the communicators of all, and the others take theirs."""
    assert isinstance(comm._exchange, ThreadExchange)
    made: list[Communicator] = []
    if comm.rank == group[0]:
        world = ThreadWorld(len(group), within=comm._exchange.world)
        made = Communicator.of_threads(world, device=comm.device, timeout=comm.timeout)
    return comm.share_objects(made)[group[0]][group.index(comm.rank)]


def _of_processes(comm: Communicator, groups: Groups, place: int) -> Communicator:
    ranks = dist.get_process_group_ranks(comm.group)
    wanted = [[ranks[rank] for rank in group] for group in groups]
    disordered = [members for members in wanted if members != sorted(members)]
    if disordered and not _keeps_order():
        raise TransportUnavailable(
            f"the process group {disordered[0]} would lose its order, as PyTorch before 2.12 sorts the ranks of a new "
            "group: name the axes in the order of the layout, or list the ranks of each group in ascending order"
        )
    covers_all = comm.size == dist.get_world_size()
    group = None
    for number, members in enumerate(wanted):
        # Where the default group is wider, its other ranks do not come here, so only members may take part.
        if covers_all or number == place:
            made = _new_group(comm, members, local=not covers_all)
            group = made if number == place else group
    origin = Origin("a split of another communicator", "as that one's", owns_group=covers_all)
    return Communicator(group, device=comm.device, timeout=comm.timeout, _origin=origin)


def _keeps_order() -> bool:
    """Whether PyTorch can make a group whose ranks do not ascend."""
    return "sort_ranks" in inspect.signature(dist.new_group).parameters


def _new_group(comm: Communicator, ranks: list[int], *, local: bool) -> dist.ProcessGroup:
    # Gloo's first connections wait so long; with NCCL it is the watchdog's time, which ends the process.
    limit = timedelta(seconds=comm.timeout * (2 if comm.device.type == "cuda" else 1))
    backend = dist.get_backend_config(comm.group)
    order: dict[str, Any] = {} if ranks == sorted(ranks) else {"sort_ranks": False}
    try:
        return dist.new_group(ranks, timeout=limit, backend=backend, use_local_synchronization=local, **order)
    except NotImplementedError as error:
        raise TransportUnavailable(f"the process group {ranks} cannot be made: {error}") from error
    except RuntimeError as error:
        raise PeerTimeout(
            f"rank {comm.rank} of {comm.size}: the process group {ranks} could not be made within "
            f"{limit.total_seconds():g} s: {error}"
        ) from error
