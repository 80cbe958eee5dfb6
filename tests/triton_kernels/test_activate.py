"""Biases and activation of experts' rows against float64, by Triton's interpreter and as compiled code."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="interpreting kernels needs Triton")

import torch

from tests.helpers.activations import CASES, SOME, check_activations
from tests.helpers.speeds import exhaustive_but
from thinwire.comm.communicator import Communicator
from thinwire.moe.grouped_mm import ends_of_experts
from thinwire.testing import run_ranks
from thinwire.triton_kernels.activate import activate
from verification.ptx.device import Device


def _interpreted(comm: Communicator, cases: tuple) -> None:
    check_activations(activate, cases)


@pytest.mark.parametrize("cases", exhaustive_but([SOME], [SOME, CASES]), ids=lambda cases: str(len(cases)))
def test_the_interpreted_kernel_is_float64_rounded_once_and_writes_nothing_else(cases: tuple) -> None:
    run_ranks(_interpreted, 1, cases, env={"TRITON_INTERPRET": "1"}, timeout=300)


def test_gelu_is_within_its_bound() -> None:
    x = torch.cat([torch.linspace(-14, 14, 30_000), torch.tensor([0.0, 1e-30, 30.0, -30.0])])[None]
    got = x.clone()
    with Device().patch():
        activate(got, None, torch.tensor([1], dtype=torch.int32), "gelu")
    exact = torch.nn.functional.gelu(x.double())
    assert ((got - exact).abs() <= 3e-7 * x.abs()).all()
    near = x.abs() < 5  # at the lower end 1 + erf(x) in float32 is a tenth off
    assert ((got - exact).abs() <= 0.002 * exact.abs())[near].all()


@pytest.mark.parametrize(
    "ends",
    [[2, 4, 90], [-5, 2**31 - 1, 2], [9, 1, 6], [0, 0, -1_000_000_000], [7, 7, 7]],
    ids=lambda ends: " ".join(map(str, ends)),
)
def test_whatever_ends_hold_no_memory_is_touched_but_that_of_rows_and_biases(ends: list[int]) -> None:
    """On a device that refuses any other access; three tiles a row, so numbers of tiles could overflow."""
    rows, gate = torch.ones(2, 7, 2100)
    bias, gate_bias = torch.ones(2, 3, 2100)
    with Device(races=True).patch():
        for given in (ends, ends_of_experts(7, torch.zeros(3).long(), torch.tensor([0, *ends])).tolist()):
            activate(rows[:6], bias, torch.tensor(given, dtype=torch.int32), "silu", gate[:6], gate_bias)
    assert (rows[6] == 1).all() and (gate == 1).all()
    if max(ends[-1], 0) < 6:
        assert (rows[max(ends) :] == 1).all()
