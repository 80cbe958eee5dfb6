"""Redistribute gives what the layouts say, there and back, partial sums and gradients included."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.speeds import exhaustive_but
from thinwire.comm import Communicator
from thinwire.comm.layout import Layout, TensorLayout, as_tensor_layout, plan_redistribute
from thinwire.fused.redistribute import redistribute
from thinwire.testing import run_ranks

CUBE = Layout((2, 2, 2), ("dp", "sp", "mp"))
OPS = {"slice", "zero", "all_reduce", "reduce_scatter", "all_gather", "all_to_all"}


def matrices(size: int) -> list[tuple[int, ...]]:
    """All ways to write a number as a product of factors of at least 2, in any order; and one with a factor of 1."""
    found = [()] if size == 1 else []
    for first in range(2, size + 1):
        if size % first == 0:
            found += [(first, *rest) for rest in (matrices(size // first) if size > first else [()])]
    return [*found, (size, 1)]


def random_layout(rng: random.Random, size: int, dims: int) -> TensorLayout:
    matrix = rng.choice(matrices(size))
    names = tuple(f"x{place}" for place in range(len(matrix)))
    homes: list[list[str]] = [[] for _ in range(dims + 2)]  # the dimensions, partial, repeated
    for name in rng.sample(names, len(names)):
        rng.choice(homes).append(name)
    return TensorLayout(matrix, names, tuple(map(tuple, homes[:dims])), tuple(homes[dims]))


def random_case(seed: int, size: int) -> tuple[TensorLayout, TensorLayout, tuple[int, ...]]:
    """Two layouts, and a shape that both can cut."""
    rng = random.Random(seed)
    dims = rng.randint(1, 3)
    src, dst = random_layout(rng, size, dims), random_layout(rng, size, dims)
    shape = tuple(math.lcm(a, b) * rng.randint(1, 3) for a, b in zip(src.cuts, dst.cuts, strict=True))
    return src, dst, shape


def distribute(full: np.ndarray, layout: TensorLayout, seed: int) -> list[np.ndarray]:
    """What each rank holds: its slice, or a random summand of it."""
    rng = np.random.default_rng(seed)
    held: dict[int, np.ndarray] = {}
    for group in layout.groups(layout.partial_axes):
        part = full[layout.slices(full.shape, group[0])]
        summands = [rng.integers(-50, 50, part.shape).astype(full.dtype) for _ in group[1:]]
        held |= dict(zip(group, [part - sum(summands), *summands], strict=True))
    used = {axis for axes in (*layout.dims, layout.partial_axes) for axis in axes}
    for first, *others in layout.groups([axis for axis in layout.name if axis not in used]):
        held |= dict.fromkeys(others, held[first])  # ranks that repeat a summand repeat the same one
    return [held[rank] for rank in range(layout.size)]


def collect(parts: list[np.ndarray], layout: TensorLayout, shape: tuple[int, ...]) -> np.ndarray:
    """The whole tensor, which every replica must agree on."""
    full = np.full(shape, np.nan)
    for group in layout.groups(layout.partial_axes):
        value = sum(parts[rank].astype(np.float64) for rank in group)
        place = layout.slices(shape, group[0])
        before = full[place]
        assert (np.isnan(before) | (before == value)).all(), "replicas differ"
        full[place] = value
    assert not np.isnan(full).any()
    return full


def there_and_back(
    comm: Communicator, cases: list[tuple[TensorLayout, TensorLayout, tuple[int, ...]]], wire: str, dtype: torch.dtype
) -> list[tuple[np.ndarray, np.ndarray]]:
    results = []
    for seed, (src, dst, shape) in enumerate(cases):
        full = np.random.default_rng(seed).integers(-100, 100, shape).astype(np.float64)
        x = torch.from_numpy(distribute(full, src, seed)[comm.rank]).to(dtype)
        before = x.clone()
        transport = ("auto", "staged")[seed % 2]
        there = redistribute(x, src, dst, shape=shape, wire=wire, comm=comm, transport=transport)
        assert there.shape == dst.shard_shape(shape) and there.dtype == dtype and there.is_contiguous()
        back = redistribute(there, dst, src, wire=wire, comm=comm, transport=transport)
        assert torch.equal(x, before) and back.shape == x.shape
        into = torch.full_like(there, -7)
        assert redistribute(x, src, dst, out=into, wire=wire, comm=comm) is into and torch.equal(into, there)
        assert torch.equal(x, before)
        if not src.partial_axes and wire == "none":
            assert torch.equal(back, x)
        results.append((there.double().numpy(), back.double().numpy()))
    return results


def check(
    cases: list[tuple[TensorLayout, TensorLayout, tuple[int, ...]]], size: int, mode: str, dtype: torch.dtype
) -> None:
    by_rank = run_ranks(there_and_back, size, cases, "none", dtype, mode=mode)
    for seed, (src, dst, shape) in enumerate(cases):
        full = np.random.default_rng(seed).integers(-100, 100, shape).astype(np.float64)
        for which, layout in enumerate((dst, src)):
            got = collect([results[seed][which] for results in by_rank], layout, shape)
            assert np.array_equal(got, full), plan_redistribute(shape, src, dst).explain()


@pytest.mark.parametrize("size", exhaustive_but([2, 3, 4], [1, 2, 3, 4, 6, 8]))
def test_any_pair_of_layouts_there_and_back_is_the_identity(size: int) -> None:
    seed = random.randrange(2**32)
    cases = [random_case(seed + number, size) for number in range(25)]
    print(f"seed {seed}")
    check(cases, size, "thread", torch.float32)


def test_every_operation_is_met_by_random_pairs() -> None:
    cases = [random_case(number, 8) for number in range(200)]
    assert {step.op for src, dst, shape in cases for step in plan_redistribute(shape, src, dst).steps} == OPS


@given(st.integers(0, 2**32), st.sampled_from([2, 4, 6, 8]))
@settings(deadline=None, max_examples=15, suppress_health_check=list(HealthCheck))
@pytest.mark.exhaustive
def test_any_pair_in_bfloat16_as_hypothesis_finds_them(seed: int, size: int) -> None:
    # Integers below 256 are exact in bfloat16; summands would be larger, so the source has none.
    src, dst, shape = random_case(seed, size)
    check([(src.reduced(), dst, shape), (dst.reduced(), src, shape)], size, "thread", torch.bfloat16)


@pytest.mark.exhaustive
def test_processes_agree_with_the_oracle() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    check([random_case(seed + number, 8) for number in range(12)], 8, "process", torch.float32)


KEPT = {
    "all_to_all": (CUBE("mp", "None").partial("sp"), CUBE("None", "mp").partial("sp")),
    "all_gather": (CUBE("mp", "dp").partial("sp"), CUBE("mp", "None").partial("sp")),
    "slice": (CUBE("mp", "None").partial("sp"), CUBE("mp", "dp").partial("sp")),
    "reduce_scatter": (CUBE("mp", "None").partial("sp", "dp"), CUBE("mp", "dp").partial("sp")),
    "zero": (CUBE("mp", "None").partial("sp"), CUBE("mp", "None").partial("dp", "sp")),
}


@pytest.mark.parametrize("op", KEPT)
def test_what_stays_partial_is_not_mixed_with_other_summands(op: str) -> None:
    src, dst = KEPT[op]
    assert [step.op for step in plan_redistribute((4, 8), src, dst).steps] == [op]
    check([(src, dst, (4, 8))] * 4, 8, "thread", torch.float32)


def test_integers_and_booleans_move_exactly() -> None:
    def move(comm: Communicator) -> None:
        src, dst = CUBE("mp", ("sp", "dp")), as_tensor_layout((4, 1), 8)
        for full in (torch.arange(64).view(8, 8) * 2**40, torch.arange(64).view(8, 8) % 3 == 0):
            there = redistribute(full[src.slices(full.shape, comm.rank)], src, (4, 1), wire="none", comm=comm)
            assert torch.equal(there, full[dst.slices(full.shape, comm.rank)])

    run_ranks(move, 8, mode="thread")


SUMMED = {"process": (torch.float32, torch.float64, torch.int64), "thread": (torch.float32, torch.bfloat16)}


def sum_scalars(comm: Communicator, dtypes: tuple[torch.dtype, ...]) -> list[torch.Tensor]:
    layout = Layout((2, 2), ("dp", "mp"))
    x = [torch.tensor(2**comm.rank, dtype=dtype) for dtype in dtypes]
    return [redistribute(t, layout().partial("dp"), layout(), wire="none", comm=comm) for t in x]


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_scalars_are_summed(mode: str) -> None:
    for rank, sums in enumerate(run_ranks(sum_scalars, 4, SUMMED[mode], mode=mode)):
        for total, dtype in zip(sums, SUMMED[mode], strict=True):
            assert total.dtype == dtype and total.shape == () and total == (5, 10)[rank % 2]


QUANTISED = {
    "all_to_all": (CUBE("mp", ("sp", "dp")), CUBE(("dp", "mp"), "sp"), 1),
    "all_gather": (CUBE(("mp", "dp"), "sp"), CUBE("mp", "None"), 1),
    "reduce_scatter": (CUBE("mp", "None").partial("sp", "dp"), CUBE(("mp", "sp", "dp"), "None"), 1),
    "all_reduce": (CUBE("mp", "None").partial("sp"), CUBE("mp", "None"), 2),
    "flat": (as_tensor_layout((2, 4), 8), as_tensor_layout((8, 1), 8), 1),
}


@pytest.mark.parametrize("case", QUANTISED)
def test_int8_errs_a_little_and_alike_on_all_replicas(case: str) -> None:
    src, dst, passes = QUANTISED[case]
    full = torch.randn(256, 1024, generator=torch.Generator().manual_seed(5))

    def move(comm: Communicator) -> np.ndarray:
        summands = len(src.ranks_along(src.partial_axes, comm.rank))
        x = full[src.slices(full.shape, comm.rank)] / summands
        return redistribute(x, src, dst, wire="int8", comm=comm).numpy()

    got = collect(run_ranks(move, 8, mode="thread"), dst, tuple(full.shape))
    error = np.linalg.norm(got - full.double().numpy()) / np.linalg.norm(full.double().numpy())
    assert 0.001 < error < 0.0075 * math.sqrt(passes) * 1.05


def test_repeated_calls_make_no_new_groups() -> None:
    def move(comm: Communicator) -> tuple[int, int]:
        counts = []
        for _ in range(2):
            for src, dst in itertools.permutations(
                (CUBE("mp", "sp"), CUBE("mp", "None"), CUBE(("mp", "dp"), "None")), 2
            ):
                redistribute(torch.ones(src.shard_shape((8, 8))), src, dst, wire="none", comm=comm)
            counts.append(comm.explain().count("split:"))
        return counts[0], counts[1]

    assert run_ranks(move, 8, mode="thread") == [(2, 2)] * 8


# --- gradients --------------------------------------------------------------------------------------------------------


def gradient_of_a_product(comm: Communicator, wire: str) -> list[float]:
    """Y = X W, over layouts that meet every operation on either way; errors of Y, dX and dW against one process's."""
    generator = torch.Generator().manual_seed(11)
    x, w, target = (torch.randn(*shape, generator=generator) for shape in ((16, 256), (256, 256), (16, 256)))
    x.requires_grad_()
    w.requires_grad_()
    y = x @ w
    (y * target).sum().backward()
    inputs, weights = CUBE("mp", ("sp", "dp")), CUBE(("sp", "dp"), "None")
    outputs = as_tensor_layout((4, 1), 8)
    local_x, local_w = (
        full.detach()[layout.slices(full.shape, comm.rank)].clone().requires_grad_()
        for full, layout in ((x, inputs), (w, weights))
    )
    product = local_x @ local_w  # each rank of (sp, dp) holds a summand
    local_y = redistribute(product, CUBE("mp", "None").partial("sp", "dp"), outputs, wire=wire, comm=comm)
    part = outputs.slices(y.shape, comm.rank)
    (local_y * target[part]).sum().backward()
    assert x.grad is not None and w.grad is not None and local_x.grad is not None and local_w.grad is not None
    # The weight is repeated along mp, and each rank there saw other rows: summands.
    summed = weights.partial("mp")
    local_dw = redistribute(local_w.grad, summed, weights, wire=wire, comm=comm)
    pairs = (
        (local_y, y[part]),
        (local_x.grad, x.grad[inputs.slices(x.shape, comm.rank)]),
        (local_dw, w.grad[weights.slices(w.shape, comm.rank)]),
    )
    return [((got - expected).norm() / expected.norm()).item() for got, expected in pairs]


@pytest.mark.parametrize(("wire", "least", "most"), [("none", 0.0, 1e-6), ("int8", 1e-3, 2e-2)])
def test_gradients_of_a_sharded_product_are_those_of_the_whole(wire: str, least: float, most: float) -> None:
    for errors in run_ranks(gradient_of_a_product, 8, wire, mode="thread"):
        assert all(least <= error < most for error in errors), errors


@pytest.mark.exhaustive
def test_a_gradient_that_arrives_as_summands_is_summed() -> None:
    """A weight cut by columns: each rank uses the whole input, and has a summand of its gradient."""
    layout = Layout((4,), ("tp",))
    generator = torch.Generator().manual_seed(3)
    x, w = torch.randn(8, 16, generator=generator), torch.randn(16, 12, generator=generator)

    def step(comm: Communicator) -> torch.Tensor:
        rows, columns = layout("tp", "None"), layout("None", "tp")
        local_x = x[rows.slices(x.shape, comm.rank)].clone().requires_grad_()
        everyone = layout("None", "None")
        gathered = redistribute(local_x, rows, everyone, wire="none", comm=comm, grad_layout=everyone.partial("tp"))
        (gathered @ w[columns.slices(w.shape, comm.rank)]).square().sum().backward()
        assert local_x.grad is not None
        return local_x.grad

    whole = x.clone().requires_grad_()
    (whole @ w).square().sum().backward()
    assert whole.grad is not None
    torch.testing.assert_close(torch.cat(run_ranks(step, 4, mode="thread")), whole.grad)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_empty_tensors_have_their_shape() -> None:
    def move(comm: Communicator) -> tuple[int, ...]:
        return tuple(redistribute(torch.empty(0, 4), (1, 2), (2, 1), comm=comm).shape)

    assert run_ranks(move, 2, mode="thread") == [(0, 8)] * 2
