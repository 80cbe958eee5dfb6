"""Unchanged packages that import `deep_ep`, run over thinwire: what is common to their tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import torch

from thinwire.comm.communicator import Communicator

TOKENS, HIDDEN, EXPERTS, TOP_K = 24, 256, 8, 2
#: Relative L2 of outputs and gradients, by wire format of tokens, sums and gradients.
GATES = {"none": 1e-6, "int8": 0.02}


def stand_in_for_cuda() -> None:
    """What these packages ask of torch.cuda outside of DeepEP, on machines without one. For ranks of their own alone.

    Streams and events that do nothing, the current device, `Tensor.record_stream`, and tensors as split sizes.
    """
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    for name in ("Stream", "Event", "current_stream", "stream"):
        setattr(torch.cuda, name, MagicMock())
    torch.Tensor.record_stream = lambda *_: None  # type: ignore[assignment]
    exchange = torch.distributed.all_to_all_single

    def with_numbers(
        output: torch.Tensor, x: torch.Tensor, output_split_sizes: Any = None, input_split_sizes: Any = None,
        **options: Any,
    ) -> Any:  # fmt: skip
        splits = (
            each.tolist() if isinstance(each, torch.Tensor) else each
            for each in (output_split_sizes, input_split_sizes)
        )
        return exchange(output, x, *splits, **options)

    torch.distributed.all_to_all_single = with_numbers


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


Dispatcher = Callable[[torch.Tensor, torch.Tensor, Callable[..., torch.Tensor]], torch.Tensor]


def compare_with_whole(comm: Communicator, layer: Dispatcher, sizes: list[int]) -> dict[str, float]:
    """Errors of a layer's output and gradients, against all experts on one rank: relative L2, of all ranks the largest.

    Args:
        layer: of tokens, router logits and a function that applies this rank's experts to rows by expert, given how
            many each has and the rows' weights, the output.
        sizes: tokens of each rank.
    """
    weights = drawn(EXPERTS, HIDDEN, HIDDEN, seed=1) / 16
    begin = sum(sizes[: comm.rank])
    own = slice(begin, begin + sizes[comm.rank])
    tokens, logits, grads = (
        drawn(sum(sizes), width, seed=seed) for width, seed in ((HIDDEN, 2), (EXPERTS, 3), (HIDDEN, 4))
    )
    x, router = tokens.clone().requires_grad_(), logits.clone().requires_grad_()
    probs, ids = router.softmax(-1).topk(TOP_K, -1)
    y = sum(probs[:, k, None] * torch.einsum("th,thj->tj", x, weights[ids[:, k]]) for k in range(TOP_K))
    assert isinstance(y, torch.Tensor)
    (y * grads).sum().backward()
    assert x.grad is not None and router.grad is not None
    wanted = {"y": y.detach()[own], "x": x.grad[own], "router": router.grad[own]}

    local = EXPERTS // comm.size
    w = weights[comm.rank * local : (comm.rank + 1) * local].clone().requires_grad_()

    def experts(rows: torch.Tensor, counts: list[int], row_weights: torch.Tensor) -> torch.Tensor:
        parts = rows[: sum(counts)].split(counts)
        out = torch.cat([part @ w[expert] for expert, part in enumerate(parts)])
        return torch.nn.functional.pad(out * row_weights[: len(out), None], (0, 0, 0, len(rows) - len(out)))

    x, router = tokens[own].clone().requires_grad_(), logits[own].clone().requires_grad_()
    y = layer(x, router, experts)
    (y * grads[own]).sum().backward()
    assert x.grad is not None and router.grad is not None
    got = {"y": y.detach(), "x": x.grad, "router": router.grad}
    errors = [float((got[name] - wanted[name]).norm() / wanted[name].norm().clamp_min(1e-9)) for name in got]
    largest = torch.tensor(errors)
    comm.all_reduce(largest, "max")
    return dict(zip(got, largest.tolist(), strict=True))


def show(package: str, what: str, ranks: int, wire: str, errors: dict[str, float]) -> None:
    """Prints a line of the matrix of what was run."""
    figures = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    print(f"\n{package:24} {what:34} {ranks} ranks, {wire:5} {figures}")


def check(errors: dict[str, float], wire: str) -> None:
    assert max(errors.values()) <= GATES[wire]
    if wire != "none":
        assert min(errors.values()) > 1e-5  # so it did travel in this format
