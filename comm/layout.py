"""Layouts: which part of a tensor each rank of a named device matrix holds, and how to get from one to another.

Arithmetic only; no rank has to run. A dimension of a tensor is cut over no axis of the matrix, over one, or over
several, the first most significant. An axis that cuts nothing repeats the tensor; if the tensor is *partial* over it,
ranks along it hold summands. docs/layout.md says which operation follows from which change. Source of the rules:
MindSpore's `Layout` and its operator-level parallelism.
"""

from __future__ import annotations

import functools
import itertools
import math
import os.path
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from thinwire.comm.tensors import is_int
from thinwire.errors import LayoutError

Block = tuple[slice, ...]  # a part of a tensor: one slice of the whole a dimension


@dataclass(frozen=True)
class Layout:
    """A device matrix with a name for each axis. Rank r is at the r-th place in row-major order, last axis fastest.

    Calling it maps a tensor's dimensions to axes and returns a `TensorLayout`.

    Args:
        device_matrix: ints of at least 1; their product is the number of ranks, `size`.
        name: one for each axis, all different, none of them "None" or empty.

    Raises:
        LayoutError: a size or name is not accepted; in all methods, a rank, an axis or a shape.

    >>> Layout((8, 4, 4), name=("dp", "sp", "mp")).coordinates(77)
    {'dp': 4, 'sp': 3, 'mp': 1}
    """

    device_matrix: tuple[int, ...]
    name: tuple[str, ...]

    def __post_init__(self) -> None:
        for field in ("device_matrix", "name"):
            if not isinstance(value := getattr(self, field), tuple | list):
                raise LayoutError(f"{field} is {value!r}, expected a tuple")
            object.__setattr__(self, field, tuple(value))
        matrix, names = self.device_matrix, self.name
        if not all(is_int(size, 1) for size in matrix):
            raise LayoutError(f"device_matrix is {matrix}, expected ints of at least 1")
        named = all(isinstance(axis, str) and axis not in ("", "None") for axis in names)
        if not named or not len(matrix) == len(names) == len(set(names)):
            raise LayoutError(f'{len(matrix)} axes are named {names}, expected as many others, none "" or "None"')

    def __call__(self, *dims: str | tuple[str, ...]) -> TensorLayout:
        """A tensor's layout: for each dimension the axis that cuts it, several (most significant first) or "None"."""
        cut = tuple(() if isinstance(dim, str) and dim == "None" else self._checked(dim) for dim in dims)
        return TensorLayout(self.device_matrix, self.name, cut)

    @property
    def size(self) -> int:
        """Ranks in the matrix."""
        return math.prod(self.device_matrix)

    @functools.cached_property
    def axes(self) -> dict[str, tuple[int, int]]:
        """By name, how many ranks each axis has, and how far apart neighbours on it are, in ranks."""
        strides = [math.prod(self.device_matrix[place:]) for place in range(1, len(self.device_matrix) + 1)]
        return dict(zip(self.name, zip(self.device_matrix, strides, strict=True), strict=True))

    def coordinates(self, rank: int) -> dict[str, int]:
        """The rank's position on each axis, in the order of the matrix."""
        if not is_int(rank, 0, self.size - 1):
            raise LayoutError(f"rank is {rank!r}, expected 0 to {self.size - 1} in {self}")
        return {axis: rank // stride % size for axis, (size, stride) in self.axes.items()}

    def ranks_along(self, axes: str | Sequence[str], rank: int) -> tuple[int, ...]:
        """The ranks that differ from this one only in these axes, and this one; the first axis is most significant."""
        place, along = self.coordinates(rank), [(axis, *self.axes[axis]) for axis in self._checked(axes)]
        first = rank - sum(place[axis] * stride for axis, _, stride in along)
        steps = itertools.product(*(range(0, size * stride, stride) for _, size, stride in along))
        return tuple(first + sum(step) for step in steps)

    def groups(self, axes: str | Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """All groups of `ranks_along`, by their first rank; every rank is in one of them."""
        return tuple(dict.fromkeys(self.ranks_along(axes, rank) for rank in range(self.size)))

    def __str__(self) -> str:
        return f"Layout({', '.join(f'{axis}={size}' for axis, (size, _) in self.axes.items())})"

    def _checked(self, axes: str | Iterable[str]) -> tuple[str, ...]:
        axes = tuple(axes) if isinstance(axes, Iterable) and not isinstance(axes, str) else (axes,)
        for axis in axes:
            if axis not in self.name:
                named = ", ".join(map(repr, self.name))
                raise LayoutError(f'{axis!r} is no axis of {self}; its axes are {named}, and "None" alone is for none')
            if axes.count(axis) > 1:
                raise LayoutError(f"the axis {axis!r} is used twice, in {axes}")
        return axes


@dataclass(frozen=True)
class TensorLayout(Layout):
    """A device matrix, and how the dimensions of a tensor are cut over it; made by calling a `Layout`.

    Cuts are even: a dimension's size must be a multiple of its number of parts, as in MindSpore.

    Attributes:
        dims: for each dimension the axes that cut it, the first most significant; empty if it is not cut.
        partial_axes: the tensor is the sum of the ranks' tensors over these axes; other axes that cut nothing repeat
            it.
    """

    dims: tuple[tuple[str, ...], ...]
    partial_axes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self._checked([*itertools.chain(*self.dims), *self.partial_axes])

    def partial(self, *axes: str) -> TensorLayout:
        """The same layout, with partial sums: along `axes` each rank holds a summand of its part."""
        return replace(self, partial_axes=(*self.partial_axes, *axes))

    def reduced(self) -> TensorLayout:
        """The same layout after the sums are made: partial axes repeat the tensor."""
        return replace(self, partial_axes=())

    @property
    def cuts(self) -> tuple[int, ...]:
        """Parts of each dimension."""
        return tuple(math.prod(self.axes[axis][0] for axis in axes) for axes in self.dims)

    def shard_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of a rank's part of a tensor of this shape."""
        pairs = self._with_cuts(shape)
        for dim, (length, parts) in enumerate(pairs):
            if length % parts:
                uneven = f"dimension {dim} has {length} elements, which cannot be cut into {parts} equal parts"
                raise LayoutError(f"{uneven} as {self} asks for: pad it to a multiple of {parts}")
        return tuple(length // parts for length, parts in pairs)

    def full_shape(self, shard_shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the whole tensor, from the shape of a part; the reverse of `shard_shape`."""
        return tuple(length * parts for length, parts in self._with_cuts(shard_shape))

    def slices(self, shape: Sequence[int], rank: int) -> Block:
        """A rank's part of a tensor of this shape: one slice for each dimension."""
        parts = [self.ranks_along(axes, rank).index(rank) for axes in self.dims]
        return tuple(slice(at * n, (at + 1) * n) for at, n in zip(parts, self.shard_shape(shape), strict=True))

    def __str__(self) -> str:
        names = [f"({', '.join(axes)})" if len(axes) > 1 else (*axes, "None")[0] for axes in self.dims]
        partial = f", partial over {', '.join(self.partial_axes)}" if self.partial_axes else ""
        return f"{super().__str__()}({', '.join(names)}){partial}"

    def _with_cuts(self, shape: Sequence[int]) -> list[tuple[int, int]]:
        ints = isinstance(shape, tuple | list) and all(isinstance(length, int) and length >= 0 for length in shape)
        if not ints or len(shape) != len(self.dims):
            shown = list(shape) if isinstance(shape, tuple | list) else repr(shape)
            raise LayoutError(f"{self} is for {len(self.dims)} dimensions, but the shape is {shown}")
        return list(zip(shape, self.cuts, strict=True))


def as_tensor_layout(spec: TensorLayout | Sequence[int], size: int) -> TensorLayout:
    """A layout over `size` ranks: one as it is, or from the numbers of parts that each dimension is cut into.

    Numbers are laid over the ranks in row-major order; where there are more ranks than parts, neighbours repeat a part.
    What does not fit is a LayoutError.

    >>> print(as_tensor_layout((4, 1), 8))
    Layout(dim0=4, dim1=1, repeat=2)(dim0, dim1)
    """
    if isinstance(spec, TensorLayout):
        if spec.size != size:
            raise LayoutError(f"{spec} is for {spec.size} ranks, but there are {size}")
        return spec
    ints = isinstance(spec, tuple | list) and all(is_int(parts, 1) for parts in spec)
    if not ints or size % math.prod(spec):
        accepted = f"what a Layout returns when called, or ints of at least 1 whose product divides {size}"
        raise LayoutError(f"{spec!r} is no layout over {size} ranks: expected {accepted}")
    names = tuple(f"dim{dim}" for dim in range(len(spec)))
    return Layout((*spec, size // math.prod(spec)), (*names, "repeat"))(*names)


class Step(NamedTuple):
    """One operation of a plan.

    Attributes:
        op: "slice", "zero", "all_reduce", "reduce_scatter", "all_gather" or "all_to_all".
        groups: the ranks that work together, ascending. In a "zero" the first of each keeps its values.
        held, wanted: for each rank what it holds before and after.
        blocks: in an all_to_all, `blocks[source][target]` is what goes there, own parts included, or None.
    """

    op: str
    groups: tuple[tuple[int, ...], ...]
    held: tuple[Block, ...]
    wanted: tuple[Block, ...]
    blocks: list[list[Block | None]]

    @property
    def elements(self) -> int:
        """The most elements that a rank sends to others, an all_reduce being a reduce_scatter and an all_gather."""
        ranks, held, wanted = len(self.groups[0]), num_elements(self.held[0]), num_elements(self.wanted[0])
        if self.op == "all_to_all":
            return max(sum(map(num_elements, row)) - num_elements(row[rank]) for rank, row in enumerate(self.blocks))
        if self.op == "all_reduce":
            return 2 * held * (ranks - 1) // ranks
        return {"all_gather": held, "reduce_scatter": wanted}.get(self.op, 0) * (ranks - 1)

    def __str__(self) -> str:
        if self.op in ("slice", "zero"):
            return f"{self.op}, local"
        first = ", ".join([*map(str, self.groups[0]), *["..."] * (len(self.groups) > 1)])
        ranks = f"{len(self.groups)} x {len(self.groups[0])} ranks {first}"
        return f"{self.op} between {ranks}: a rank sends at most {self.elements} elements"


class Plan(NamedTuple):
    """How a tensor of a shape gets from one layout to another: steps in order, none if every rank has its part."""

    shape: tuple[int, ...]
    src: TensorLayout
    dst: TensorLayout
    steps: tuple[Step, ...]

    def explain(self) -> str:
        """The steps, one a line."""
        first = f"{list(self.shape)} from {self.src} to {self.dst}"
        return "\n  ".join([first, *map(str, self.steps or ("nothing to do",))])


def plan_redistribute(
    shape: Sequence[int], src: TensorLayout | Sequence[int], dst: TensorLayout | Sequence[int], size: int | None = None
) -> Plan:
    """Gives the operations that lead from one layout to another, over the same ranks. No rank has to run.

    Args:
        shape: of the whole tensor; LayoutError if the layouts do not match it or each other.
        src, dst: layouts, or numbers of parts, see `as_tensor_layout`.
        size: the number of ranks, if both are given as numbers of parts.

    >>> layout = Layout((2, 2, 2), ("dp", "sp", "mp"))
    >>> partial = layout("mp", "None").partial("sp", "dp")
    >>> print(plan_redistribute((64, 32), partial, layout(("mp", "sp", "dp"), "None")).steps[0])
    reduce_scatter between 2 x 4 ranks 0, 2, 4, 6, ...: a rank sends at most 768 elements
    """
    sizes = [spec.size for spec in (src, dst) if isinstance(spec, TensorLayout)] if size is None else [size]
    if not sizes:
        raise LayoutError(f"size must say how many ranks there are, as neither {src!r} nor {dst!r} does")
    return _plan(tuple(shape), as_tensor_layout(src, sizes[0]), as_tensor_layout(dst, sizes[0]))


@functools.lru_cache(maxsize=256)
def _plan(shape: tuple[int, ...], src: TensorLayout, dst: TensorLayout) -> Plan:
    steps: list[Step] = []
    at, after = (common := _common(src, dst)) or (src, dst)
    stays = set(at.partial_axes) & set(after.partial_axes) if common else set()
    target, reduced = _partial_over(stays, after), set(at.partial_axes) - stays

    def held(layout: TensorLayout) -> tuple[Block, ...]:
        return tuple(layout.slices(shape, rank) for rank in range(src.size))

    def take(op: str, to: TensorLayout, axes: Iterable[str]) -> None:
        nonlocal at
        groups = at.groups([axis for axis in at.name if axis in axes])
        blocks = _blocks(at, held(at), held(to)) if op == "all_to_all" else []
        steps.append(Step(op, groups, held(at), held(to), blocks))
        at = to

    wanted = held(target)
    if common and reduced:
        # Sums are scattered where `target` cuts, if the cuts that are still there leave room for those that come.
        new = [tuple(axis for axis in axes if axis in reduced) for axes in target.dims]
        scattered = set(itertools.chain(*new))
        cut = _partial_over(set(at.partial_axes) - scattered, at, new)
        if scattered and not any(length % parts for length, parts in zip(shape, cut.cuts, strict=True)):
            take("reduce_scatter", cut, scattered)
            reduced -= scattered
    if reduced:
        take("all_reduce", _partial_over(set(at.partial_axes) - reduced, at), reduced)
    if held(at) != wanted:
        shared = [len(os.path.commonprefix(pair)) for pair in zip(at.dims, target.dims, strict=True)]
        lost, gained = ([dim[n:] for dim, n in zip(each.dims, shared, strict=True)] for each in (at, target))
        gathered, moved = set(itertools.chain(*lost)), set(itertools.chain(*gained))
        if not common or gathered & moved or any(map(all, zip(lost, gained, strict=True))):
            take("all_to_all", target, at.name)
        elif moved:  # first, so that less is gathered
            take("slice", _partial_over(stays, at, gained), ())
        if held(at) != wanted:
            take("all_gather", target, gathered)
    at = target
    if target != after:
        take("zero", after, set(after.partial_axes) - stays)
    return Plan(shape, src, dst, tuple(steps))


def _partial_over(axes: set[str], layout: TensorLayout, more: Iterable[tuple[str, ...]] = ()) -> TensorLayout:
    """A layout that is partial over these axes alone, and whose dimensions are cut over more axes."""
    dims = tuple(old + new for old, new in itertools.zip_longest(layout.dims, more, fillvalue=()))
    return replace(layout, dims=dims, partial_axes=tuple(axis for axis in layout.partial_axes if axis in axes))


def _blocks(src: TensorLayout, held: Sequence[Block], wanted: Sequence[Block]) -> list[list[Block | None]]:
    """See `Step.blocks`. What several ranks hold comes from the target itself if it is one of them, else in turn."""
    found: list[list[Block | None]] = [[None] * src.size for _ in range(src.size)]
    # Summands of a sum that goes on being partial must not be mixed.
    summands = [src.ranks_along(src.partial_axes, rank).index(rank) for rank in range(src.size)]
    replicas: dict[tuple[int, str], list[int]] = {}
    for rank, block in enumerate(held):
        replicas.setdefault((summands[rank], str(block)), []).append(rank)
    turns = {key: itertools.cycle(ranks) for key, ranks in replicas.items()}
    for target, (key, ranks) in itertools.product(range(src.size), replicas.items()):
        pairs = zip(held[ranks[0]], wanted[target], strict=True)
        part = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in pairs)
        if key[0] == summands[target] and all(each.start < each.stop for each in part):
            found[target if target in ranks else next(turns[key])][target] = part
    return found


def _common(src: TensorLayout, dst: TensorLayout) -> tuple[TensorLayout, TensorLayout] | None:
    """Both over one matrix, such as (2, 2, 2) for (4, 2) and (2, 4); axes are named by strides. Or None."""
    strides = sorted({src.size, 1, *(stride for each in (src, dst) for _, stride in each.axes.values())}, reverse=True)
    if any(high % low for high, low in itertools.pairwise(strides)):
        return None
    sizes = {str(low): high // low for high, low in itertools.pairwise(strides)}

    def refine(tensor: TensorLayout) -> TensorLayout:
        def factors(axes: tuple[str, ...]) -> tuple[str, ...]:
            spans = (tensor.axes[axis] for axis in axes)
            return tuple(str(each) for size, stride in spans for each in strides if stride <= each < size * stride)

        partial = tuple(sorted(factors(tensor.partial_axes)))
        return TensorLayout(tuple(sizes.values()), tuple(sizes), tuple(map(factors, tensor.dims)), partial)

    return refine(src), refine(dst)


def num_elements(block: Block | None) -> int:
    """Elements of a block; 0 for none."""
    return 0 if block is None else math.prod(part.stop - part.start for part in block)
