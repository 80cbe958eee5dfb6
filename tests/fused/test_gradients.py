"""Backward of all-to-all-v and the collectives, against the same written in plain torch over all ranks' tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.helpers.speeds import exhaustive_but
from thinwire import all_gather, all_gather_v, all_reduce, all_to_all_v, reduce_scatter
from thinwire.comm.communicator import Communicator
from thinwire.testing import run_ranks

pytest.importorskip("numba", reason="CPU ranks need numba")

SIZE, ROW = 3, 5
COUNTS = [[2, 0, 3], [1, 4, 0], [0, 2, 2]]  # rows of rank r for rank s
DISPLS = [[0, 0, 1], [5, 0, 0], [0, 1, 2]]  # rows that are sent twice, and some that are not sent
ROWS = [2, 0, 4]  # of all_gather_v


def _segments(x: torch.Tensor, rank: int) -> list[torch.Tensor]:
    return [x[displ : displ + count] for count, displ in zip(COUNTS[rank], DISPLS[rank], strict=True)]


def _received(rank: int) -> list[int]:
    return [counts[rank] for counts in COUNTS]


def _placed(parts: list[torch.Tensor]) -> torch.Tensor:
    """With two rows that nobody sends before each part."""
    return torch.cat([torch.cat([part.new_zeros(2, *part.shape[1:]), part]) for part in parts])


def _recv_displs(rank: int) -> list[int]:
    counts = _received(rank)
    return [2 * (peer + 1) + sum(counts[:peer]) for peer in range(SIZE)]


Case = tuple[tuple[int, ...], Callable[..., torch.Tensor], Callable[[list[torch.Tensor], int], torch.Tensor]]

#: The shape of a rank's x, the operation, and what it gives a rank in plain torch from all ranks' x.
CASES: dict[str, Case] = {
    "all_reduce": ((7, ROW), all_reduce, lambda xs, rank: sum(xs[1:], xs[0])),
    "all_gather": ((4, ROW), all_gather, lambda xs, rank: torch.cat(xs)),
    "reduce_scatter": ((6, ROW), reduce_scatter, lambda xs, rank: sum(xs[1:], xs[0])[2 * rank : 2 * rank + 2]),
    "all_to_all": ((6, ROW), all_to_all_v, lambda xs, rank: torch.cat([x[2 * rank : 2 * rank + 2] for x in xs])),
    "all_to_all_v": (
        (7, ROW),
        lambda x, comm, **options: all_to_all_v(x, COUNTS[comm.rank], comm=comm, **options),
        lambda xs, rank: torch.cat(
            [x.split([*COUNTS[source], 7 - sum(COUNTS[source])])[rank] for source, x in enumerate(xs)]
        ),
    ),
    "all_to_all_v with displacements": (
        (6, ROW),
        lambda x, comm, **options: all_to_all_v(
            x, COUNTS[comm.rank], _received(comm.rank), send_displs=DISPLS[comm.rank],
            recv_displs=_recv_displs(comm.rank), comm=comm, **options,
        ),
        lambda xs, rank: _placed([_segments(x, source)[rank] for source, x in enumerate(xs)]),
    ),
    "all_to_all_v of elements": (
        (6,),
        lambda x, comm, **options: all_to_all_v(
            x, COUNTS[comm.rank], _received(comm.rank), send_displs=DISPLS[comm.rank], comm=comm, **options
        ),
        lambda xs, rank: torch.cat([_segments(x, source)[rank] for source, x in enumerate(xs)]),
    ),
    "all_gather_v": (
        (-1, ROW),
        lambda x, comm, **options: all_gather_v(x, ROWS if options["wire"] == "none" else None, comm=comm, **options),
        lambda xs, rank: torch.cat(xs),
    ),
}  # fmt: skip


def _inputs(shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(len(shape) + shape[0])
    shapes = [(ROWS[rank], *shape[1:]) if shape[0] < 0 else shape for rank in range(SIZE)]
    return [torch.randn(each, generator=generator).to(dtype).requires_grad_() for each in shapes]


def _target(y: torch.Tensor, rank: int) -> torch.Tensor:
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(99 + rank)).to(y.dtype)


def _check(comm: Communicator, transport: str, dtype: torch.dtype, wires: dict[str, str], bound: float) -> None:
    for name, (shape, operation, plain) in CASES.items():
        xs = _inputs(shape, dtype)
        wholes = [plain(xs, rank) for rank in range(SIZE)]
        expected = torch.autograd.grad(sum((y * _target(y, rank)).sum() for rank, y in enumerate(wholes)), xs)
        x = xs[comm.rank].detach().clone().requires_grad_()
        y: Any = operation(x, comm=comm, transport=transport, **wires)
        scale = max(1.0, float(wholes[comm.rank].detach().abs().max()))
        torch.testing.assert_close(y, wholes[comm.rank], rtol=0, atol=bound * scale, msg=f"{name}: {y}")
        (y * _target(y, comm.rank)).sum().backward()
        want = expected[comm.rank]
        assert x.grad is not None and x.grad.dtype == dtype
        torch.testing.assert_close(
            x.grad, want, rtol=0, atol=bound * float(want.abs().max()) if want.numel() else 0,
            msg=f"gradient of {name}: {x.grad}",
        )  # fmt: skip


@pytest.mark.parametrize("transport", exhaustive_but(["staged"], ["direct", "staged"]))
@pytest.mark.parametrize("mode", exhaustive_but(["thread"], ["thread", "process"]))
def test_gradients_are_those_of_plain_torch(transport: str, mode: str) -> None:
    run_ranks(_check, SIZE, transport, torch.float32, {"wire": "none"}, 1e-6, mode=mode)
    run_ranks(_check, SIZE, transport, torch.float32, {"wire": "int8", "grad_wire": "int8"}, 0.02, mode=mode)


def _check_numerically(comm: Communicator, transport: str) -> None:
    """Of the sum of all ranks' losses, by a small change of this rank's x; the others take part in every call."""
    for name, (shape, operation, _) in CASES.items():
        x = _inputs(shape, torch.float64)[comm.rank].detach().requires_grad_()

        def loss(x: torch.Tensor, operation: Any = operation) -> torch.Tensor:
            y = operation(x, comm=comm, transport=transport, wire="none")
            return (y * _target(y, comm.rank)).sum()

        loss(x).backward()
        assert x.grad is not None
        for rank in range(comm.size):
            change = torch.zeros_like(x)
            if comm.rank == rank:
                change = _target(x, 7)
            total = (loss(x.detach() + 1e-3 * change) - loss(x.detach() - 1e-3 * change)) / 2e-3
            comm.all_reduce(total)
            if comm.rank == rank:
                torch.testing.assert_close((x.grad * change).sum(), total, rtol=1e-9, atol=1e-9, msg=name)


def test_gradients_in_float64_are_those_of_small_changes() -> None:
    run_ranks(_check_numerically, SIZE, "staged", mode="thread")
