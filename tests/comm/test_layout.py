"""Layouts hold what the named device matrix says, rank by rank, and the operation follows from the change."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.comm.layout import Layout, TensorLayout, as_tensor_layout, plan_redistribute

CUBE = Layout((2, 2, 2), name=("dp", "sp", "mp"))


def test_the_documented_picture_rank_by_rank() -> None:
    names = np.array([["a0", "a1", "a2", "a3"], ["a4", "a5", "a6", "a7"]])
    a = CUBE("mp", ("sp", "dp"))
    held = [names[a.slices((2, 4), rank)].item() for rank in range(8)]
    assert held == ["a0", "a4", "a2", "a6", "a1", "a5", "a3", "a7"]
    assert [held[rank] for rank in (0, 4, 2, 6)] == ["a0", "a1", "a2", "a3"]
    # A strategy of plain numbers lays the same tensor out in the order of the ranks.
    plain = as_tensor_layout((2, 4), 8)
    assert [names[plain.slices((2, 4), rank)].item() for rank in range(8)] == [f"a{rank}" for rank in range(8)]


def test_128_devices_need_no_process() -> None:
    layout = Layout((8, 4, 4), name=("dp", "sp", "mp"))
    assert layout.size == 128 and layout.coordinates(77) == {"dp": 4, "sp": 3, "mp": 1}
    x = layout("dp", ("sp", "mp"))
    assert x.cuts == (8, 16) and x.shard_shape((4096, 7168)) == (512, 448)
    assert x.slices((4096, 7168), 77) == (slice(2048, 2560), slice(13 * 448, 14 * 448))
    assert x.ranks_along("dp", 77) == tuple(range(13, 128, 16))
    assert sorted(rank for group in x.groups(("sp", "mp")) for rank in group) == list(range(128))
    assert [step.op for step in plan_redistribute((4096, 7168), x, (128, 1)).steps] == ["all_to_all"]


def test_ranks_along_several_axes_come_with_the_first_axis_counting_most() -> None:
    assert CUBE.ranks_along(("sp", "dp"), 5) == (1, 5, 3, 7)
    assert CUBE.ranks_along(("dp", "sp"), 5) == (1, 3, 5, 7)
    assert CUBE.ranks_along((), 5) == (5,)
    assert CUBE.groups("mp") == ((0, 1), (2, 3), (4, 5), (6, 7))


def test_a_strategy_with_fewer_parts_than_ranks_repeats_each_part_on_neighbours() -> None:
    layout = as_tensor_layout((1, 2), 6)
    assert [layout.slices((5, 4), rank)[1].start for rank in range(6)] == [0, 0, 0, 2, 2, 2]
    assert as_tensor_layout(layout, 6) is layout


@st.composite
def tensor_layouts(draw: st.DrawFn, max_size: int = 24) -> TensorLayout:
    matrix = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4).filter(lambda m: math.prod(m) <= max_size))
    names = [f"x{place}" for place in range(len(matrix))]
    layout = Layout(tuple(matrix), tuple(names))
    homes = [draw(st.integers(0, 3)) for _ in names]  # dimension 0 or 1, partial, or repeated
    order = draw(st.permutations(range(len(names))))
    dims = [tuple(names[place] for place in order if homes[place] == dim) for dim in (0, 1, 2)]
    return TensorLayout(layout.device_matrix, layout.name, (dims[0], dims[1]), dims[2])


@given(tensor_layouts())
@settings(deadline=None)
def test_parts_tile_the_tensor_and_are_repeated_evenly(layout: TensorLayout) -> None:
    shape = tuple(parts * extra for parts, extra in zip(layout.cuts, (3, 1), strict=True))
    covered = np.zeros(shape, dtype=int)
    for rank in range(layout.size):
        part = layout.slices(shape, rank)
        assert covered[part].shape == layout.shard_shape(shape)
        covered[part] += 1
    assert (covered == layout.size // math.prod(layout.cuts)).all()
    assert layout.full_shape(layout.shard_shape(shape)) == shape


CHOICES = {
    "nothing": (CUBE("mp", ("sp", "dp")), CUBE("mp", ("sp", "dp")), []),
    "the same in other words": (CUBE(("dp", "sp"), "mp"), (4, 2), []),
    "cut what is repeated": (CUBE("mp", "None"), CUBE(("mp", "sp"), "dp"), ["slice"]),
    "gather": (CUBE(("mp", "sp"), "dp"), CUBE("mp", "None"), ["all_gather"]),
    "gather here, cut there": (CUBE("mp", "None"), CUBE("None", "sp"), ["slice", "all_gather"]),
    "another dimension": (CUBE("mp", "None"), CUBE("None", "mp"), ["all_to_all"]),
    "another order": (CUBE(("mp", "sp"), "None"), CUBE(("sp", "mp"), "None"), ["all_to_all"]),
    "gather what counts most": (CUBE(("mp", "sp"), "None"), CUBE("sp", "None"), ["all_to_all"]),
    "sum and repeat": (CUBE("mp", "None").partial("sp", "dp"), CUBE("mp", "None"), ["all_reduce"]),
    "sum and cut": (CUBE("mp", "None").partial("sp", "dp"), CUBE(("mp", "sp", "dp"), "None"), ["reduce_scatter"]),
    "sum and cut two dimensions": (
        CUBE("mp", "None").partial("sp", "dp"),
        CUBE(("mp", "dp"), "sp"),
        ["reduce_scatter"],
    ),
    "sum, cut one and repeat one": (
        CUBE("mp", "None").partial("sp", "dp"),
        CUBE(("mp", "dp"), "None"),
        ["reduce_scatter", "all_reduce"],
    ),
    "sum and cut, in front": (
        CUBE("mp", "None").partial("sp", "dp"),
        CUBE(("sp", "dp", "mp"), "None"),
        ["reduce_scatter", "all_to_all"],
    ),
    "stay partial": (CUBE("mp", "None").partial("sp"), CUBE("None", "None").partial("sp"), ["all_gather"]),
    "become partial": (CUBE("mp", "None"), CUBE("mp", "None").partial("sp"), ["zero"]),
}


@pytest.mark.parametrize("case", CHOICES)
def test_the_operation_follows_from_the_change(case: str) -> None:
    src, dst, ops = CHOICES[case]
    plan = plan_redistribute((64, 32), src, dst)
    assert [step.op for step in plan.steps] == ops
    assert all(op in plan.explain() for op in ops or ["nothing to do"])


def test_a_sum_that_cannot_be_scattered_evenly_on_the_way_is_repeated_first() -> None:
    plan = plan_redistribute((4, 64), CUBE("mp", "None").partial("sp", "dp"), CUBE(("sp", "dp"), "mp"))
    assert [step.op for step in plan.steps] == ["all_reduce", "all_to_all"]


def test_blocks_come_from_the_rank_itself_or_from_replicas_in_turn() -> None:
    plan = plan_redistribute((8, 8), CUBE("mp", "None"), CUBE("None", "mp"))
    (step,) = plan.steps
    for target in range(8):
        assert sum(row[target] is not None for row in step.blocks) == 2
        assert step.blocks[target][target] is not None
    sent = [
        sum(block is not None for place, block in enumerate(row) if place != rank)
        for rank, row in enumerate(step.blocks)
    ]
    assert sent == [1] * 8 and step.elements == 16
