"""Layouts: which part of a tensor each rank of a named device matrix holds. Arithmetic only; no rank has to run.

A dimension of a tensor is cut over no axis of the matrix, over one, or over several, the first most significant. An
axis that cuts nothing repeats the tensor. If the tensor is *partial* over the axis, ranks along it hold summands:

>>> layout = Layout((2, 2, 2), ("dp", "sp", "mp"))
>>> a = layout("mp", ("sp", "dp"))
>>> [a.slices((2, 4), rank) for rank in (0, 4, 2, 6)]  # the first row; ranks 1, 5, 3, 7 hold the second
[(slice(0, 1, None), slice(0, 1, None)), (slice(0, 1, None), slice(1, 2, None)), \
(slice(0, 1, None), slice(2, 3, None)), (slice(0, 1, None), slice(3, 4, None))]

Source: MindSpore's `Layout` and its operator-level parallelism, of which these are the rules.
"""

from __future__ import annotations

import functools
import itertools
import math
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from thinwire.errors import LayoutError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

_UNCUT = "None"
_REPEAT = "repeat"


@dataclass(frozen=True)
class Layout:
    """A device matrix with a name for each axis. Rank r is at the r-th place in row-major order, last axis fastest.

    Calling it maps a tensor's dimensions to axes and returns a `TensorLayout`.

    Args:
        device_matrix: ints of at least 1; their product is the number of ranks, `size`.
        name: one for each axis, all different, none of them "None" or empty.

    Raises:
        LayoutError: a size or name is not accepted.

    >>> Layout((8, 4, 4), name=("dp", "sp", "mp")).coordinates(77)
    {'dp': 4, 'sp': 3, 'mp': 1}
    """

    device_matrix: tuple[int, ...]
    name: tuple[str, ...]

    def __post_init__(self) -> None:
        for field in ("device_matrix", "name"):
            value = getattr(self, field)
            if not isinstance(value, tuple | list):
                raise LayoutError(f"{field} is {value!r}, expected a tuple")
            object.__setattr__(self, field, tuple(value))
        for size in self.device_matrix:
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise LayoutError(f"device_matrix {self.device_matrix} holds {size!r}, expected ints of at least 1")
        if len(self.name) != len(self.device_matrix):
            raise LayoutError(
                f"device_matrix {self.device_matrix} has {len(self.device_matrix)} axes, but {len(self.name)} names "
                f"were given: {self.name}"
            )
        for axis in self.name:
            if not isinstance(axis, str) or axis in ("", _UNCUT):
                raise LayoutError(f'an axis is named {axis!r}, expected a str other than "" and "None"')
        if len(set(self.name)) != len(self.name):
            raise LayoutError(f"the axis names {self.name} are not all different")

    def __call__(self, *dims: str | tuple[str, ...]) -> TensorLayout:
        """The layout of a tensor with `len(dims)` dimensions.

        Args:
            dims: for each dimension the axis that cuts it, a tuple of axes, of which the first counts most, or "None".

        Raises:
            LayoutError: an axis that is unknown or used twice, or "None" among others.
        """
        return TensorLayout(self, tuple(self._axes_of(dim) for dim in dims))

    @property
    def size(self) -> int:
        """Ranks in the matrix."""
        return math.prod(self.device_matrix)

    def axis_size(self, axis: str) -> int:
        """Ranks along an axis."""
        self._require_axis(axis)
        return self.device_matrix[self.name.index(axis)]

    def coordinates(self, rank: int) -> dict[str, int]:
        """The rank's position on each axis, in the order of the matrix.

        Raises:
            LayoutError: no such rank.
        """
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.size:
            raise LayoutError(f"rank is {rank!r}, expected 0 to {self.size - 1} in {self}")
        found: dict[str, int] = {}
        for axis, size in zip(reversed(self.name), reversed(self.device_matrix), strict=True):
            rank, found[axis] = divmod(rank, size)
        return {axis: found[axis] for axis in self.name}

    def rank_at(self, coordinates: dict[str, int]) -> int:
        """The rank at a position, the reverse of `coordinates`."""
        rank = 0
        for axis, size in zip(self.name, self.device_matrix, strict=True):
            rank = rank * size + coordinates[axis]
        return rank

    def ranks_along(self, axes: str | Sequence[str], rank: int) -> tuple[int, ...]:
        """The ranks that differ from this one only in these axes, itself included; the first axis is most significant.

        Raises:
            LayoutError: there is no such rank, or an axis is unknown or named twice.

        >>> Layout((2, 2, 2), ("dp", "sp", "mp")).ranks_along(("sp", "dp"), 5)
        (1, 5, 3, 7)
        """
        axes = self._checked_axes(axes)
        place = self.coordinates(rank)
        indices = itertools.product(*(range(self.axis_size(axis)) for axis in axes))
        return tuple(self.rank_at(place | dict(zip(axes, there, strict=True))) for there in indices)

    def groups(self, axes: str | Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """All groups of `ranks_along`, by their first rank; every rank is in one of them.

        >>> Layout((2, 2), ("dp", "mp")).groups("dp")
        ((0, 2), (1, 3))
        """
        return tuple(dict.fromkeys(self.ranks_along(axes, rank) for rank in range(self.size)))

    def device_mesh(self, device_type: str = "cpu") -> DeviceMesh:
        """The same matrix as a DeviceMesh of torch.distributed, over its ranks 0 to size - 1. Collective.

        Args:
            device_type: "cpu" or "cuda".
        """
        import torch
        from torch.distributed.device_mesh import DeviceMesh

        ranks = torch.arange(self.size, device="cpu").view(self.device_matrix)
        return DeviceMesh(device_type, ranks, mesh_dim_names=self.name)

    def __str__(self) -> str:
        axes = (f"{axis}={size}" for axis, size in zip(self.name, self.device_matrix, strict=True))
        return f"Layout({', '.join(axes)})"

    def _axes_of(self, dim: str | tuple[str, ...]) -> tuple[str, ...]:
        if not isinstance(dim, str | tuple | list) or not dim:
            raise LayoutError(f'a dimension is mapped to {dim!r}, expected an axis, a tuple of axes, or "None"')
        if dim == _UNCUT:
            return ()
        if not isinstance(dim, str) and _UNCUT in dim:
            raise LayoutError(f'"None" stands for a dimension that is not cut, but {dim!r} names it among axes')
        return self._checked_axes(dim)

    def _checked_axes(self, axes: str | Iterable[str]) -> tuple[str, ...]:
        if not isinstance(axes, Iterable):
            raise LayoutError(f"axes is {axes!r}, expected the name of an axis, or a tuple of names")
        axes = (axes,) if isinstance(axes, str) else tuple(axes)
        for axis in axes:
            self._require_axis(axis)
        if len(set(axes)) != len(axes):
            raise LayoutError(f"the axes {axes} are not all different")
        return axes

    def _require_axis(self, axis: str) -> None:
        if not isinstance(axis, str) or axis not in self.name:
            raise LayoutError(f"{axis!r} is no axis of {self}; its axes are {', '.join(map(repr, self.name))}")


@dataclass(frozen=True)
class TensorLayout:
    """How the dimensions of a tensor are cut over a device matrix; made by calling a `Layout`.

    Cuts are even: a dimension's size must be a multiple of its number of parts, as in MindSpore.

    Attributes:
        layout: the matrix.
        dims: for each dimension the axes that cut it, the first most significant; empty if it is not cut.
        partial_axes: the tensor is the sum of the ranks' tensors over these axes; other axes that cut nothing repeat
            it.
    """

    layout: Layout
    dims: tuple[tuple[str, ...], ...]
    partial_axes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        used: dict[str, str] = {}
        roles = [(axis, f"dimension {dim}") for dim, axes in enumerate(self.dims) for axis in axes]
        for axis, role in [*roles, *((axis, "partial sums") for axis in self.partial_axes)]:
            self.layout._require_axis(axis)
            if axis in used:
                raise LayoutError(f"the axis {axis!r} is used twice: for {used[axis]} and for {role}")
            used[axis] = role

    def partial(self, *axes: str) -> TensorLayout:
        """The same layout, with partial sums: along `axes` each rank holds a summand of its part.

        Raises:
            LayoutError: an axis is unknown, cuts a dimension, or is named twice.
        """
        return TensorLayout(self.layout, self.dims, (*self.partial_axes, *axes))

    def reduced(self) -> TensorLayout:
        """The same layout after the sums are made: partial axes repeat the tensor."""
        return TensorLayout(self.layout, self.dims)

    @property
    def size(self) -> int:
        """Ranks in the matrix."""
        return self.layout.size

    @property
    def cuts(self) -> tuple[int, ...]:
        """Parts of each dimension."""
        return tuple(math.prod(self.layout.axis_size(axis) for axis in axes) for axes in self.dims)

    def shard_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of a rank's part of a tensor of this shape.

        Raises:
            LayoutError: the number of dimensions is another, or a size is not a multiple of its number of parts.

        >>> Layout((2, 3), ("dp", "mp"))("mp", "None").shard_shape((12, 5))
        (4, 5)
        """
        self._require_dims(shape)
        for dim, (length, parts) in enumerate(zip(shape, self.cuts, strict=True)):
            if length % parts:
                raise LayoutError(
                    f"dimension {dim} has {length} elements, which cannot be cut into {parts} equal parts as {self} "
                    f"asks for: pad it to a multiple of {parts}"
                )
        return tuple(length // parts for length, parts in zip(shape, self.cuts, strict=True))

    def full_shape(self, shard_shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the whole tensor, from the shape of a part; the reverse of `shard_shape`.

        Raises:
            LayoutError: another number of dimensions.
        """
        self._require_dims(shard_shape)
        return tuple(length * parts for length, parts in zip(shard_shape, self.cuts, strict=True))

    def slices(self, shape: Sequence[int], rank: int) -> tuple[slice, ...]:
        """A rank's part of a tensor of this shape: one slice for each dimension.

        Raises:
            LayoutError: as `shard_shape`; or there is no such rank.
        """
        place = self.layout.coordinates(rank)
        found = []
        for length, axes in zip(self.shard_shape(shape), self.dims, strict=True):
            part = functools.reduce(lambda part, axis: part * self.layout.axis_size(axis) + place[axis], axes, 0)
            found.append(slice(part * length, (part + 1) * length))
        return tuple(found)

    def coordinates(self, rank: int) -> dict[str, int]:
        """See `Layout.coordinates`."""
        return self.layout.coordinates(rank)

    def ranks_along(self, axes: str | Sequence[str], rank: int) -> tuple[int, ...]:
        """See `Layout.ranks_along`."""
        return self.layout.ranks_along(axes, rank)

    def groups(self, axes: str | Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """See `Layout.groups`."""
        return self.layout.groups(axes)

    def placements(self) -> tuple[Placement, ...]:
        """The same layout for DTensor: a Shard, Replicate or Partial for each axis of the matrix.

        Raises:
            LayoutError: a dimension is cut over several axes in another order than the matrix has them. In DTensor the
                earlier axis of the mesh is always most significant.
        """
        from torch.distributed.tensor import Partial, Replicate, Shard

        for dim, axes in enumerate(self.dims):
            # An axis of one rank cuts nothing, wherever it is named.
            places = [self.layout.name.index(axis) for axis in axes if self.layout.axis_size(axis) > 1]
            if places != sorted(places):
                raise LayoutError(
                    f"DTensor cannot express {self}: dimension {dim} is cut over {axes}, while DTensor takes the axes "
                    f"of a mesh in their order, here {self.layout.name}: use a Layout that has them in that order"
                )
        shards: dict[str, Placement] = {axis: Shard(dim) for dim, axes in enumerate(self.dims) for axis in axes}
        partial: dict[str, Placement] = {axis: Partial("sum") for axis in self.partial_axes}
        found = shards | partial
        return tuple(found.get(axis, Replicate()) for axis in self.layout.name)

    def __str__(self) -> str:
        names = (axes[0] if len(axes) == 1 else f"({', '.join(axes)})" for axes in self.dims)
        dims = ", ".join(name if axes else _UNCUT for name, axes in zip(names, self.dims, strict=True))
        partial = f", partial over {', '.join(self.partial_axes)}" if self.partial_axes else ""
        return f"{self.layout}({dims}){partial}"

    def _require_dims(self, shape: Sequence[int]) -> None:
        ints = isinstance(shape, tuple | list) and all(isinstance(length, int) and length >= 0 for length in shape)
        if not ints or len(shape) != len(self.dims):
            shown = list(shape) if isinstance(shape, tuple | list) else repr(shape)
            raise LayoutError(f"{self} is for {len(self.dims)} dimensions, but the shape is {shown}")


def as_tensor_layout(spec: TensorLayout | Sequence[int], size: int) -> TensorLayout:
    """A layout over `size` ranks: one as it is, or from the numbers of parts that each dimension is cut into.

    Plain numbers are laid over the ranks in row-major order, the last dimension fastest. Where there are more ranks
    than parts, each part is repeated on neighbouring ranks: the matrix has a last axis "repeat". What does not fit is a
    LayoutError.

    Source: MindSpore's operator-level parallelism: `OperatorInfo` puts the repeated calculation behind the last
    dimension of the device matrix.

    >>> layout = as_tensor_layout((4, 1), 8)
    >>> print(layout, [layout.slices((4, 4), rank)[0].start for rank in range(8)])
    Layout(dim0=4, dim1=1, repeat=2)(dim0, dim1) [0, 0, 1, 1, 2, 2, 3, 3]
    """
    if isinstance(spec, TensorLayout):
        if spec.size != size:
            raise LayoutError(f"{spec} is for {spec.size} ranks, but there are {size}")
        return spec
    if not isinstance(spec, tuple | list):
        raise LayoutError(f"{spec!r} is no layout: expected what a Layout returns when called, or a tuple of ints")
    for parts in spec:
        if isinstance(parts, bool) or not isinstance(parts, int) or parts < 1:
            raise LayoutError(f"the strategy {tuple(spec)} holds {parts!r}, expected ints of at least 1")
    parts = math.prod(spec)
    if size % parts:
        raise LayoutError(f"the strategy {tuple(spec)} makes {parts} parts, which does not divide {size} ranks")
    names = tuple(f"dim{dim}" for dim in range(len(spec)))
    layout = Layout((*spec, size // parts), (*names, _REPEAT))
    return layout(*names)


def resolve_groups(
    size: int,
    layout: Layout | TensorLayout | None,
    axes: str | Sequence[str] | None,
    groups: Sequence[Sequence[int]] | None,
) -> tuple[tuple[int, ...], ...]:
    """Groups in which each of `size` ranks is once, along axes of a layout or as listed; or LayoutError."""
    if groups is not None:
        if layout is not None or axes is not None:
            raise LayoutError("split takes a layout and axes, or groups, not both")
        lists = isinstance(groups, Sequence) and all(isinstance(group, Sequence) for group in groups)
        if not lists or not all(type(rank) is int for group in groups for rank in group):
            raise LayoutError(f"groups is {reprlib.repr(groups)}, expected lists of ranks, ints from 0 to {size - 1}")
        found = tuple(tuple(group) for group in groups if len(group))
        if sorted(rank for group in found for rank in group) != list(range(size)):
            raise LayoutError(f"the groups {list(map(list, found))} do not hold each of ranks 0 to {size - 1} once")
        return found
    if layout is None or axes is None:
        raise LayoutError("split needs a layout and axes, or groups")
    if not isinstance(layout, Layout | TensorLayout):
        raise LayoutError(f"layout is {reprlib.repr(layout)}, expected a Layout, or what one returns when called")
    if layout.size != size:
        raise LayoutError(f"{layout} is for {layout.size} ranks, but the communicator has {size}")
    return layout.groups(axes)
