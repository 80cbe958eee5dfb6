"""Wire formats, sizes, values and comparisons that several tests share."""

from __future__ import annotations

import torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WIRES = (
    "int8",
    "int8:row",
    "int8:16",
    "int8:64",
    "int8:1024",
    "int4",
    "int4:16",
    "int4:1024",
    "fp8",
    "fp8:32",
    "int6",
    "int10:64",
    "int8+h64",
    "int8:row+h64",
    "int6+h64",
    "int10:1024+h64",
    "int4+h64",
    "none",
)


def integer_view(x: torch.Tensor) -> torch.Tensor:
    """The bit patterns of a float tensor."""
    return x.view({4: torch.int32, 2: torch.int16}[x.dtype.itemsize])


def assert_same_bits(name: str, expected: torch.Tensor, got: torch.Tensor, any_nan: bool = True) -> None:
    """Equal to the last bit; any NaN equals any NaN, but not among bfloat16 without `any_nan`."""
    assert expected.shape == got.shape and expected.dtype == got.dtype, (name, expected.shape, got.shape)
    differs = integer_view(expected) != integer_view(got)
    if any_nan or expected.dtype != torch.bfloat16:
        differs &= ~(expected.isnan() & got.isnan())
    assert not differs.any(), f"{name}: {int(differs.sum())} elements differ, first at {differs.nonzero()[0].tolist()}"


def relative_error(exact: torch.Tensor, got: torch.Tensor) -> float:
    """Relative L2 error, in float64."""
    exact, got = exact.double(), got.double()
    return float((got - exact).detach().norm() / exact.norm())


def magnitudes(rows: int, hidden: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Random rows whose magnitudes run from subnormal to the dtype's maximum, with zeros strewn in."""
    largest, smallest = torch.finfo(dtype).max, 1e-38 if dtype != torch.float16 else 6e-8
    exponents = torch.linspace(0, 1, rows).view(-1, 1).double()
    scale = smallest * (largest / smallest) ** exponents
    x = torch.rand(rows, hidden, generator=generator).double() * 2 - 1
    x = (x * scale).to(dtype)
    x[torch.rand(rows, hidden, generator=generator) < 0.05] = 0.0
    return x.clamp(-largest, largest)
