"""Rows of experts between two products, and what their activation must be: in float64, rounded once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product

import torch
from torch.nn import functional as F

from thinwire.moe.experts import ClampedSwiGLU

#: An activation, and whether there is a gate.
VARIANTS = (
    ("silu", True),
    ("silu", False),
    ("gelu", True),
    ("gelu", False),
    (ClampedSwiGLU(), True),
    (ClampedSwiGLU(alpha=-1, limit=2), True),
    (None, False),
)
#: Where experts' rows end, how many rows there are, and their width.
PLACES = (
    ([3, 3, 10, 11, 11], 14, 40),
    ([1, 3], 3, 1030),  # no room is left; two tiles
    ([0, 0, 0], 4, 5),  # nothing came
    ([2], 4, 2049),  # three tiles
    ([1, 1], 0, 8),
)
DTYPES = (torch.bfloat16, torch.float32)
CASES = tuple(
    (*variant, biased, place, dtype)
    for variant, biased, place in product(VARIANTS, (True, False), PLACES)
    for dtype in (DTYPES if place is PLACES[0] else DTYPES[:1])
    if biased or variant[0] is not None
)
#: Every variant, with and without biases, every place and dtype, though not all together.
SOME = CASES[::5]
_HALF_A_STEP = {torch.float32: -25, torch.bfloat16: -9}  # of [0.5, 1), the power of 2


def _exact(activation: str | ClampedSwiGLU | None, x: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
    if activation is None:
        return x
    if isinstance(activation, ClampedSwiGLU):
        assert gate is not None
        return activation(gate, x)
    act = {"silu": F.silu, "gelu": F.gelu}[activation]
    return act(x) if gate is None else act(gate) * x


def check_activations(activate: Callable[..., None], cases: Iterable[tuple]) -> None:
    """Each within half a step of the dtype of float64; and that nothing else is written."""
    generator = torch.Generator().manual_seed(11)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * 3

    for activation, gated, biased, (ends, num_rows, width), dtype in cases:
        steps = width + 8
        whole, gate_whole = draw(num_rows + 2, steps).to(dtype), draw(num_rows, steps + 8).to(dtype)
        odd = torch.tensor([torch.nan, 90.0, -90.0, 0.0, -0.0])
        for each, values in ((whole[1:-1], odd), (gate_whole, odd.flip(0))):  # NaN is in one of them at a time
            each[:1, :5] = values.to(dtype)
            each[ends[-1] :] = torch.nan
        rows, gate = whole[1:-1, :width], gate_whole[:, :width] if gated else None
        bias, gate_bias = (draw(len(ends), width).to(dtype) if biased else None for _ in range(2))
        gate_bias = gate_bias if gated else None
        expert = [sum(end <= row for end in ends) for row in range(num_rows)]
        came = min(ends[-1], num_rows)
        x, g, xb, gb = (
            torch.zeros(came, width, dtype=torch.float64)
            if each is None
            else (each[:came] if len(each) == num_rows else each[expert[:came]]).double()
            for each in (rows, gate, bias, gate_bias)
        )
        exact = _exact(activation, x + xb, g + gb if gated else None)
        before = whole.clone(), gate_whole.clone()
        activate(rows, bias, torch.tensor(ends, dtype=torch.int32), activation, gate, gate_bias)
        name = f"{activation}, gated {gated}, biases {biased}, {ends} of {num_rows} x {width}, {dtype}"
        # What float32 itself leaves: of each term, and of the one that it is multiplied by.
        terms = (1 + x.abs() + xb.abs()) * ((1 + g.abs() + gb.abs()) if gated else 1)
        bound = torch.exp2(exact.frexp().exponent + _HALF_A_STEP[dtype]) + terms * 5e-7
        got = rows[:came].double()
        assert torch.equal(got.isnan(), exact.isnan()), name
        off = (got - exact).abs() > bound
        assert not off.any(), f"{name}: {got[off][:3]} instead of {exact[off][:3]}"
        whole[1 : 1 + came, :width] = before[0][1 : 1 + came, :width]
        for now, then in zip((whole, gate_whole), before, strict=True):
            assert torch.equal(now.view(torch.uint8), then.view(torch.uint8)), f"{name}: others were written"
