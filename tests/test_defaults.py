"""Under other defaults of torch's, for devices and dtypes, every operation does what it does without them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba", reason="the direct transport of CPU ranks needs numba")

import torch

import thinwire as tw
from tests.helpers.collectives import COLLECTIVES
from tests.helpers.speeds import exhaustive_but
from thinwire.comm.communicator import Communicator
from thinwire.testing import run_ranks

HIDDEN = 64
ROOT = Path(tw.__file__).resolve().parents[2]
ROOMS = ("comm", "fused", "moe", "triton_kernels", "src/thinwire")
#: Functions that take a device, and those among them that would take the default dtype.
OF_DTYPE = {"empty", "zeros", "ones", "rand", "randn", "linspace", "eye", "empty_strided"}
OF_DEVICE = OF_DTYPE | {"full", "tensor", "as_tensor", "arange", "randint", "randperm"}


def _allocations() -> Iterator[tuple[Path, ast.Call, str]]:
    for room in ROOMS:
        for file in sorted((ROOT / room).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    owner = node.func.value
                    if isinstance(owner, ast.Name) and owner.id == "torch" and node.func.attr in OF_DEVICE:
                        yield file, node, node.func.attr


def test_every_allocation_names_its_device_and_its_dtype() -> None:
    found, lacking = 0, []
    for file, call, name in _allocations():
        found += 1
        needed = {"device", "dtype"} if name in OF_DTYPE else {"device"}
        if missing := needed - {keyword.arg for keyword in call.keywords}:
            lacking.append(f"{file.relative_to(ROOT)}:{call.lineno}: torch.{name} without {', '.join(sorted(missing))}")
    assert found > 100 and not lacking, "\n".join(lacking)


def _calls(comm: Communicator, transport: str, wire: str) -> list[Callable[[], list[torch.Tensor]]]:
    """Of the same results each time."""
    generator = torch.Generator().manual_seed(comm.rank)
    kind: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    x = torch.randn(4 * comm.size, HIDDEN, generator=generator, **kind)
    ids = torch.arange(4 * comm.size, device="cpu")[:, None] % 4
    weights = torch.rand(4 * comm.size, 1, generator=generator, **kind)
    options: dict[str, Any] = {"wire": wire, "transport": transport, "comm": comm}
    ep = tw.ExpertParallel(comm, 4, 1, HIDDEN, 4 * comm.size, wire=wire, transport=transport)

    def there_and_back() -> list[torch.Tensor]:
        inputs = x.clone().requires_grad_(), weights.clone().requires_grad_()
        d = ep.dispatch(inputs[0], ids, inputs[1])
        y = ep.combine(d.tokens * 2, d)
        y.backward(x)
        assert inputs[0].grad is not None and inputs[1].grad is not None
        return [y.detach(), inputs[0].grad, inputs[1].grad]

    collectives: list[Any] = [lambda function=function: [function(x, **options)] for function in COLLECTIVES]
    return [
        there_and_back,
        *collectives,
        lambda: [tw.all_to_all_v(x, [4] * comm.size, **options)],
        lambda: [comm.barrier() or x],  # type: ignore[func-returns-value]
        lambda: comm.all_gather_object(x),
        lambda: [tw.dequantize(tw.quantize(x, "int8"), torch.float32)],
    ]


def _under_another_device(comm: Communicator, transport: str, wire: str) -> None:
    calls = _calls(comm, transport, wire)
    expected = [call() for call in calls]
    with torch.device("meta"):
        for call, wanted in zip(calls, expected, strict=True):
            for got, result in zip(call(), wanted, strict=True):
                assert torch.equal(got, result)
        fresh = comm.split(groups=[range(comm.size)])
        _calls(fresh, transport, wire)[0]()
        fresh.close()


CASES = exhaustive_but(
    [("direct", "int8"), ("staged", "none")],
    [(transport, wire) for transport in ("direct", "staged") for wire in ("int8", "none")],
    several=True,
)


@pytest.mark.parametrize(("transport", "wire"), CASES)
def test_under_another_default_device_results_are_the_same(transport: str, wire: str) -> None:
    run_ranks(_under_another_device, 2, transport, wire, mode="thread", timeout=60)


def _first_under_another_device(comm: Communicator) -> None:
    """What calls keep for later ones is made there, too; at one rank sums are added up without a peer."""
    x, ids = torch.ones(4, HIDDEN), torch.zeros(4, 1, dtype=torch.int64)
    ep = tw.ExpertParallel(comm, 1, 1, HIDDEN, 4, wire="none", transport="direct")
    weights = torch.ones(4, 1)
    with torch.device("meta"):
        d = ep.dispatch(x, ids, weights)
        assert torch.equal(ep.combine(d.tokens * 2, d), 2 * x)
        y = tw.all_reduce(x, wire="int8", comm=comm, transport="staged")
    assert isinstance(y, torch.Tensor) and torch.allclose(y, x, atol=1e-3)


def test_first_calls_under_another_default_device_are_right() -> None:
    run_ranks(_first_under_another_device, 1)


def _under_another_dtype(comm: Communicator, transport: str, wire: str) -> None:
    calls = _calls(comm, transport, wire)
    expected = [call() for call in calls]
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            for call, wanted in zip(calls, expected, strict=True):
                for got, result in zip(call(), wanted, strict=True):
                    assert got.dtype == result.dtype and torch.equal(got, result)
        finally:
            torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(("transport", "wire"), CASES)
def test_under_another_default_dtype_results_are_the_same(transport: str, wire: str) -> None:
    run_ranks(_under_another_dtype, 2, transport, wire, timeout=60)
