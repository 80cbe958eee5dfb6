"""Process groups of `torch.distributed`: whether one exists, its backends, its tensors' device, and new ones.

A *standalone* group has Gloo and a store of its own, and `torch.distributed` does not know it.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import reprlib
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from thinwire.comm.layout import Layout
from thinwire.comm.tensors import MOST_SECONDS
from thinwire.errors import ArgumentError, LayoutError, PeerTimeout, ThinwireError, TransportUnavailable

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_T = TypeVar("_T")

#: Seconds that ranks wait for each other, unless a caller or a process group says otherwise.
DEFAULT_TIMEOUT = 600.0
#: Seconds more that peers get in a call whose kernels a rank on CUDA had to compile or load, as they may have to, too.
COMPILE_SECONDS = 120.0

_with_threads: weakref.WeakSet[Any] = weakref.WeakSet()


def endless_in_children(served: _T) -> _T:
    """A group or store itself. In processes forked from this one it never ends, as that would wait for its threads."""
    _with_threads.add(served)
    return served


def _make_endless() -> None:
    for served in list(_with_threads):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(served))  # a name of Python's ends with the interpreter


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_make_endless)


def member_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group, or the default one for None; ThinwireError where this rank belongs to none."""
    if not dist.is_initialized():
        raise ThinwireError("torch.distributed is not initialised: call thinwire.init(), or pass a process group")
    group = dist.group.WORLD if group is None else group
    # torch.distributed.new_group gives ranks that are no members a placeholder that is no group.
    if not isinstance(group, dist.ProcessGroup) or not group_exists(group):
        raise ThinwireError(f"{group!r} is no process group that this rank belongs to; only members may wrap a group")
    return group


def group_of(group: dist.ProcessGroup | DeviceMesh) -> tuple[dist.ProcessGroup, str | None]:
    """A process group, or that of a DeviceMesh of one axis, and the mesh's type of device.

    Raises:
        ArgumentError: neither, or a mesh of several axes.
        ThinwireError: this rank is not in it.
    """
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(group, DeviceMesh):
        if not isinstance(group, dist.ProcessGroup):
            is_short = group is None or isinstance(group, str | int | float)
            shown = repr(group) if is_short else f"a {type(group).__name__}"
            raise ArgumentError(
                f"comm is {shown}, expected a Communicator, such as thinwire.init() returns, a process group "
                "of torch.distributed, or a DeviceMesh of one axis"
            )
        return member_group(group), None
    if group.ndim != 1:
        names = group.mesh_dim_names
        raise ArgumentError(
            f"comm is a DeviceMesh of {group.ndim} axes, {names or tuple(group.shape)}, expected one of one axis: "
            + (f"choose it by name, such as mesh[{names[-1]!r}]" if names else "name its axes, and choose one")
        )
    if group.get_coordinate() is None:
        raise ThinwireError(f"this rank is not in {group!r}; only members may pass a mesh")
    return member_group(group.get_group()), group.device_type


def group_exists(group: dist.ProcessGroup) -> bool:
    """Whether the group was not destroyed since, alone or with all of torch.distributed."""
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError):
        return False
    return True


def backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """Device type to backend, such as {"cpu": "gloo", "cuda": "nccl"}."""
    pairs = (part.partition(":") for part in dist.get_backend_config(group).split(","))
    return {device: backend for device, _, backend in pairs}


def with_index(device: torch.device) -> torch.device:
    """The device itself; for "cuda" without a number, the current one."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def as_device(device: object) -> torch.device:
    """A device from what callers pass; or ArgumentError."""
    try:
        return torch.device(device)  # type: ignore[call-overload]
    except (RuntimeError, TypeError, ValueError) as error:
        raise ArgumentError(f"device is {device!r}, expected a torch.device or its name: {error}") from None


def timeout_of(group: dist.ProcessGroup, backend: str) -> float:
    """Seconds that a process group's own calls wait."""
    found = group._get_backend(torch.device("cuda" if backend == "nccl" else "cpu"))
    found = getattr(found, "wrapped_pg", found)  # as TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it
    return min(float(found.options._timeout.total_seconds()), MOST_SECONDS)


def limit_of_group(backend: str, timeout: float) -> timedelta:
    """What a group gets as its own limit, over which calls wait for `timeout` seconds.

    NCCL's watchdog ends the process once something has been queued for so long. So that is longer than two waits, one
    behind the other, of kernels that were compiled for it and gave their peers a second more, and no less than torch's
    own default, as the caller's collectives count as well.
    """
    if backend != "nccl":
        return timedelta(seconds=timeout)
    return timedelta(seconds=max(DEFAULT_TIMEOUT, 2 * (timeout + COMPILE_SECONDS + 1.0)))


def choose_backend(group: dist.ProcessGroup, device: torch.device | str | None) -> tuple[str, torch.device, str]:
    """Of what the group has, "nccl" or "gloo", the device of its tensors, and why that one; or TransportUnavailable."""
    backends = backends_of(group)
    has_nccl = backends.get("cuda") == "nccl"
    if device is not None:
        chosen, reason = with_index(as_device(device)), "as passed"
    elif not has_nccl:
        chosen, reason = torch.device("cpu"), "as the process group has no NCCL"
    elif not torch.cuda.is_available():
        chosen, reason = torch.device("cpu"), "as CUDA is not available"
    else:
        chosen, reason = with_index(torch.device("cuda")), "CUDA's current device, as the group has NCCL"
    if chosen.type == "cuda" and has_nccl:
        return "nccl", chosen, reason
    if chosen.type in ("cpu", "cuda") and backends.get("cpu") == "gloo":
        return "gloo", chosen, reason
    raise TransportUnavailable(
        f"a process group with {backends} cannot serve {chosen}; accepted: gloo for the CPU, nccl (or gloo) for CUDA"
    )


def keeps_order() -> bool:
    """Whether PyTorch can make a group whose ranks do not ascend."""
    return "sort_ranks" in inspect.signature(dist.new_group).parameters


def new_group(ranks: list[int], like: dist.ProcessGroup, limit: timedelta, *, local: bool) -> dist.ProcessGroup:
    """A process group of some ranks, with the backends of another one.

    Args:
        ranks: of torch.distributed's default group, in the new one's order.
        like: the other group, which this rank belongs to.
        limit: for Gloo's first connections; with NCCL it is the watchdog's time, which ends the process.
        local: only the members call this; else all ranks of the default group do.
    """
    backend = dist.get_backend_config(like)
    order: dict[str, Any] = {} if ranks == sorted(ranks) else {"sort_ranks": False}
    try:
        return dist.new_group(ranks, timeout=limit, backend=backend, use_local_synchronization=local, **order)
    except NotImplementedError as error:
        raise TransportUnavailable(f"the process group {ranks} cannot be made: {error}") from error
    except RuntimeError as error:
        raise PeerTimeout(
            f"rank {dist.get_rank(like)} of {dist.get_world_size(like)}: the process group {ranks} could not be made "
            f"within {limit.total_seconds():g} s: {error}"
        ) from error


def standalone_group(store: dist.Store, rank: int, size: int, limit: timedelta) -> dist.ProcessGroup:
    """A standalone group; returns once all of its ranks have called this, or raises a RuntimeError.

    Args:
        store: that all of them share, for this group alone.
        limit: for the first connections.
    """
    group = dist.ProcessGroup(store, rank, size)
    gloo = dist.ProcessGroup.BackendType.GLOO
    group._register_backend(torch.device("cpu"), gloo, dist.ProcessGroupGloo(store, rank, size, limit))
    group._set_default_backend(gloo)
    return group


def renew_default_group(
    store: dist.Store, backend: str, rank: int, size: int, limit: timedelta, device: torch.device
) -> None:
    """Puts a new default group in the place of the old one; `torch.distributed`'s other groups end with that."""
    if not dist.is_initialized():
        # An attempt before has failed here. torch counts it in names of groups, which all ranks have to give alike; the
        # count begins anew when a default group ends.
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()
    bound = device if backend == "nccl" else None
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit, device_id=bound)


def groups_to_make(
    size: int,
    layout: Layout | None,
    axes: str | Sequence[str] | None,
    groups: Sequence[Sequence[int]] | None,
) -> tuple[tuple[int, ...], ...]:
    """Groups in which each of `size` ranks is once, along axes of a layout or as listed; or LayoutError."""
    if (groups is None) == (layout is None or axes is None) or (groups is not None and (layout or axes) is not None):
        raise LayoutError("split takes a layout and axes, or groups: pass one of these")
    if groups is None:
        if not isinstance(layout, Layout):
            raise LayoutError(f"layout is {reprlib.repr(layout)}, expected a Layout, or what one returns when called")
        if layout.size != size:
            raise LayoutError(f"{layout} is for {layout.size} ranks, but the communicator has {size}")
        assert axes is not None
        return layout.groups(axes)
    lists = isinstance(groups, Sequence) and all(isinstance(group, Sequence) for group in groups)
    if not lists or not all(type(rank) is int for group in groups for rank in group):
        raise LayoutError(f"groups is {reprlib.repr(groups)}, expected lists of ranks, ints from 0 to {size - 1}")
    found = tuple(tuple(group) for group in groups if len(group))
    if sorted(rank for group in found for rank in group) != list(range(size)):
        raise LayoutError(f"the groups {list(map(list, found))} do not hold each of ranks 0 to {size - 1} once")
    return found
