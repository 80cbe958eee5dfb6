"""From one tensor layout to another: which operations, between which ranks, on which blocks. Arithmetic only.

Both device matrices are refined to one whose axes are factors of theirs, such as (2, 2, 2) for (4, 2) and (2, 4). On it
every axis cuts a dimension, repeats, or is partial, before and after, and the change names the operation:

| before | after | operation |
|---|---|---|
| partial | cuts | reduce_scatter |
| partial | repeats | all_reduce |
| cuts, as the least of its dimension's axes | repeats | all_gather |
| repeats | cuts, behind its dimension's other axes | slice, local |
| repeats or cuts | partial | zero, local: one rank keeps the values |
| any other cut | another one | all_to_all |

Matrices without a common refinement, such as (2, 3) and (3, 2), always take the all_to_all, behind an all_reduce of
what is partial.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from thinwire.comm.layouts.layout import Layout, TensorLayout, as_tensor_layout
from thinwire.errors import LayoutError

#: A part of a tensor: one slice of the whole a dimension.
Block = tuple[slice, ...]


@dataclass(frozen=True)
class Step:
    """One operation of a plan.

    Attributes:
        op: "slice", "zero", "all_reduce", "reduce_scatter", "all_gather" or "all_to_all".
        shape: of the whole tensor.
        src, dst: its layouts before and after.
        axes: of `src.layout`; ranks that differ only in these work together. All ranks do in an all_to_all.
    """

    op: str
    shape: tuple[int, ...]
    src: TensorLayout
    dst: TensorLayout
    axes: tuple[str, ...] = ()

    @functools.cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that work together, ascending; none where nothing travels."""
        if self.op in ("slice", "zero"):
            return ()
        if self.op == "all_to_all":
            return (tuple(range(self.src.size)),)
        return self.src.groups([axis for axis in self.src.layout.name if axis in self.axes])

    @functools.cached_property
    def held(self) -> tuple[Block, ...]:
        """For each rank what it holds before the step."""
        return tuple(self.src.slices(self.shape, rank) for rank in range(self.src.size))

    @functools.cached_property
    def wanted(self) -> tuple[Block, ...]:
        """For each rank what it holds after the step."""
        return tuple(self.dst.slices(self.shape, rank) for rank in range(self.src.size))

    def group_of(self, rank: int) -> tuple[int, ...]:
        """The group that a rank works in."""
        return next(group for group in self.groups if rank in group)

    def keeps(self, rank: int) -> bool:
        """In a "zero": whether the rank is the one that keeps its values."""
        place = self.dst.coordinates(rank)
        return all(place[axis] == 0 for axis in self.axes)

    @functools.cached_property
    def blocks(self) -> tuple[tuple[Block | None, ...], ...]:
        """In an all_to_all: `blocks[source][target]`, None where they exchange nothing. Own parts are blocks, too.

        What several ranks hold comes from the target itself if it is one of them, else from the one that sends least so
        far, of several the nearest.
        """
        size = self.src.size
        found: list[list[Block | None]] = [[None] * size for _ in range(size)]
        sent = [0] * size
        # Summands of a sum that goes on being partial must not be mixed.
        places = [self.src.coordinates(rank) for rank in range(size)]
        summands = [[place[axis] for axis in self.src.partial_axes] for place in places]
        for target in range(size):
            sources: dict[tuple[tuple[int, int], ...], list[int]] = {}
            for source in range(size):
                if summands[source] == summands[target]:
                    sources.setdefault(tuple((part.start, part.stop) for part in self.held[source]), []).append(source)
            for replicas in sources.values():
                block = _intersection(self.held[replicas[0]], self.wanted[target])
                if block is not None:
                    source = min(replicas, key=lambda rank: (rank != target, sent[rank], abs(rank - target), rank))
                    found[source][target] = block
                    sent[source] += num_elements(block) * (source != target)
        return tuple(tuple(row) for row in found)

    @property
    def elements(self) -> int:
        """The most elements that a rank sends to others, an all_reduce being a reduce_scatter and an all_gather."""
        if not self.groups:
            return 0
        if self.op == "all_to_all":
            return max(
                sum(num_elements(block) for target, block in enumerate(row) if target != source)
                for source, row in enumerate(self.blocks)
            )
        ranks = len(self.groups[0])
        before, after = (math.prod(layout.shard_shape(self.shape)) for layout in (self.src, self.dst))
        if self.op == "all_gather":
            return before * (ranks - 1)
        return after * (ranks - 1) if self.op == "reduce_scatter" else 2 * before * (ranks - 1) // ranks

    def __str__(self) -> str:
        if not self.groups:
            return f"{self.op}, local"
        ranks = f"{len(self.groups)} x {len(self.groups[0])} ranks {', '.join(map(str, self.groups[0]))}"
        more = ", ..." if len(self.groups) > 1 else ""
        return f"{self.op} between {ranks}{more}: a rank sends at most {self.elements} elements"


@dataclass(frozen=True)
class RedistributePlan:
    """What `plan_redistribute` found.

    Attributes:
        shape: of the whole tensor.
        src, dst: its layouts before and after.
        steps: in order; empty if every rank has its part already.
    """

    shape: tuple[int, ...]
    src: TensorLayout
    dst: TensorLayout
    steps: tuple[Step, ...]

    def explain(self) -> str:
        """The steps, one a line."""
        lines = [f"{list(self.shape)} from {self.src} to {self.dst}"]
        return "\n".join((*lines, *(f"  {step}" for step in self.steps or ("nothing to do",))))


def plan_redistribute(
    shape: Sequence[int], src: TensorLayout | Sequence[int], dst: TensorLayout | Sequence[int], size: int | None = None
) -> RedistributePlan:
    """Gives the operations that lead from one layout to another. No rank has to run.

    Args:
        shape: of the whole tensor.
        src, dst: layouts over the same number of ranks, or numbers of parts, see `as_tensor_layout`.
        size: the number of ranks; only needed if both are given as numbers of parts.

    Raises:
        LayoutError: the layouts do not match the shape or each other.

    >>> layout = Layout((2, 2, 2), ("dp", "sp", "mp"))
    >>> partial = layout("mp", "None").partial("sp", "dp")
    >>> print(plan_redistribute((64, 32), partial, layout(("mp", "sp", "dp"), "None")).steps[0])
    reduce_scatter between 2 x 4 ranks 0, 2, 4, 6, ...: a rank sends at most 768 elements
    >>> [step.op for step in plan_redistribute((64, 32), layout("mp", ("sp", "dp")), (4, 1)).steps]
    ['all_to_all']
    """
    for spec in (src, dst):
        size = spec.size if size is None and isinstance(spec, TensorLayout) else size
    if size is None:
        raise LayoutError(f"size must say how many ranks there are, as neither {src!r} nor {dst!r} does")
    src, dst = as_tensor_layout(src, size), as_tensor_layout(dst, size)
    return _plan(tuple(shape), src, dst)


@functools.lru_cache(maxsize=256)
def _plan(shape: tuple[int, ...], src: TensorLayout, dst: TensorLayout) -> RedistributePlan:
    src.shard_shape(shape)
    dst.shard_shape(shape)
    common = common_layouts(src, dst)
    if common is not None:
        path = _Path(shape, common[0])
        target = _without_partial(common[1], set(common[1].partial_axes) - set(path.at.partial_axes))
        _sum(path, target)
    else:
        path, target = _Path(shape, src), dst.reduced()
        if src.partial_axes:
            path.take("all_reduce", src.reduced(), src.partial_axes)
    _move(path, target, aligned=common is not None)
    after = dst if common is None else common[1]
    if target.partial_axes != after.partial_axes:
        path.at = target
        path.take("zero", after, [axis for axis in after.partial_axes if axis not in target.partial_axes])
    return RedistributePlan(shape, src, dst, tuple(path.steps))


class _Path:
    """The steps so far, and the layout that they lead to."""

    def __init__(self, shape: tuple[int, ...], at: TensorLayout) -> None:
        self.shape, self.at = shape, at
        self.steps: list[Step] = []

    def take(self, op: str, to: TensorLayout, axes: Iterable[str] = ()) -> None:
        self.steps.append(Step(op, self.shape, self.at, to, tuple(axes)))
        self.at = to


def _sum(path: _Path, target: TensorLayout) -> None:
    """Makes the sums that `target` no longer has as partial, scattering them where it cuts."""
    before = path.at
    reduced = {axis for axis in before.partial_axes if axis not in target.partial_axes}
    scattered = [tuple(axis for axis in axes if axis in reduced) for axes in target.dims]
    dims = tuple(axes + more for axes, more in zip(before.dims, scattered, strict=True))
    axes = tuple(axis for more in scattered for axis in more)
    if axes:
        after = TensorLayout(before.layout, dims, _without_partial(before, axes).partial_axes)
        # Cuts that are still there and those that come may be too many together.
        if all(length % parts == 0 for length, parts in zip(path.shape, after.cuts, strict=True)):
            path.take("reduce_scatter", after, axes)
            reduced -= set(axes)
    if reduced:
        path.take("all_reduce", _without_partial(path.at, reduced), sorted(reduced))


def _move(path: _Path, target: TensorLayout, *, aligned: bool) -> None:
    """Changes the cuts. `aligned`: the two are over one matrix that has no axes of one rank."""
    before = path.at
    held = [before.slices(path.shape, rank) for rank in range(before.size)]
    wanted = [target.slices(path.shape, rank) for rank in range(before.size)]
    if held == wanted:
        return
    if all(_intersection(*pair) == pair[1] for pair in zip(held, wanted, strict=True)):
        path.take("slice", target)
        return
    if aligned:
        kept, lost, gained = zip(*map(_split_axes, before.dims, target.dims), strict=True)
        gathered = {axis for axes in lost for axis in axes}
        moved = {axis for axes in gained for axis in axes}
        if not gathered & moved and not any(a and b for a, b in zip(lost, gained, strict=True)):
            if moved:
                # First, so that less is gathered.
                dims = tuple(a + b + c for a, b, c in zip(kept, lost, gained, strict=True))
                path.take("slice", TensorLayout(before.layout, dims, before.partial_axes))
            path.take("all_gather", target, sorted(gathered))
            return
    path.take("all_to_all", target)


def _split_axes(
    before: tuple[str, ...], after: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """What both begin with, and what follows in each."""
    kept = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False)))
    return before[:kept], before[kept:], after[kept:]


def _without_partial(layout: TensorLayout, axes: Collection[str]) -> TensorLayout:
    partial = tuple(axis for axis in layout.partial_axes if axis not in axes)
    return TensorLayout(layout.layout, layout.dims, partial)


def common_layouts(src: TensorLayout, dst: TensorLayout) -> tuple[TensorLayout, TensorLayout] | None:
    """Both over one matrix, whose axes are factors of theirs and have at least two ranks; None if there is none.

    >>> a, b = Layout((4, 2), ("x", "y"))("x", "y"), Layout((2, 4), ("u", "v"))("v", "None")
    >>> print(*common_layouts(a, b), sep="; ")
    Layout(x.0=2, x.1=2, y=2)((x.0, x.1), y); Layout(x.0=2, x.1=2, y=2)((x.1, y), None)
    """
    strides = sorted({*_strides(src.layout), *_strides(dst.layout)})
    if any(high % low for low, high in itertools.pairwise(strides)):
        return None
    names: dict[int, str] = {}
    for axis, parts in _factors(src.layout, strides).items():
        names |= {stride: axis if len(parts) == 1 else f"{axis}.{place}" for place, stride in enumerate(parts)}
    matrix = {low: high // low for low, high in itertools.pairwise(strides)}
    layout = Layout(tuple(matrix[stride] for stride in reversed(matrix)), tuple(names[s] for s in reversed(matrix)))

    def refine(tensor: TensorLayout) -> TensorLayout:
        factors = _factors(tensor.layout, strides)

        def axes(coarse: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(names[stride] for axis in coarse for stride in factors[axis])

        dims = tuple(axes(dim) for dim in tensor.dims)
        return TensorLayout(layout, dims, tuple(sorted(axes(tensor.partial_axes))))

    return refine(src), refine(dst)


def _strides(layout: Layout) -> list[int]:
    """How far apart neighbours on each axis are, in ranks, and the size."""
    return [math.prod(layout.device_matrix[place:]) for place in range(len(layout.device_matrix) + 1)]


def _factors(layout: Layout, strides: list[int]) -> dict[str, list[int]]:
    """For each axis the strides that it spans, widest first."""
    bounds = _strides(layout)
    return {
        axis: [stride for stride in reversed(strides) if low <= stride < high]
        for axis, (high, low) in zip(layout.name, itertools.pairwise(bounds), strict=True)
    }


def _intersection(a: Block, b: Block) -> Block | None:
    """What both cover, or None."""
    found = tuple(slice(max(p.start, q.start), min(p.stop, q.stop)) for p, q in zip(a, b, strict=True))
    return None if any(part.start >= part.stop for part in found) else found


def num_elements(block: Block | None) -> int:
    """Elements of a block; 0 for none."""
    return 0 if block is None else math.prod(part.stop - part.start for part in block)
