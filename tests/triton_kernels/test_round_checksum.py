"""The checksums of rounds by Triton's kernels, interpreted: beside ranks of numba's, and put to what those are.

`TRITON_INTERPRET=1` must be set before Triton is imported, so each test runs its checks in a process of its own.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

pytest.importorskip("triton", reason="interpreting kernels needs Triton")
pytest.importorskip("numba", reason="ranks with numba's kernels take part")

import torch

from tests.helpers import rounds
from tests.helpers.round_kernels import KERNELS
from tests.helpers.tampered_rounds import VICTIM, Kernels, Rounds, Sizes
from thinwire.comm.communicator import Communicator
from thinwire.testing import run_ranks

INTERPRETED = {"TRITON_INTERPRET": "1"}
TINY = Sizes(world=2, experts=3, top_k=2, hidden=40, tokens=2)


class Mixed:
    """Kernels of a rank's own kind: Triton's for some, numba's for the others."""

    def __init__(self, *triton: int) -> None:
        self.triton = triton

    def __getattr__(self, name: str) -> Any:
        def launch(lane: Any, *arguments: Any) -> None:
            getattr(KERNELS if lane.rank in self.triton else Kernels, name)(lane, *arguments)

        return launch


def _same_bytes(sizes: Sizes, specs: tuple[str, ...], comm: Communicator) -> None:
    """With Triton's kernels at one rank all memory is the same, and what one kind writes fits at the other."""
    scales = torch.arange(1.0, sizes.experts + 1)[:, None].expand(-1, sizes.hidden)
    for spec in specs:
        seen: list[list[torch.Tensor]] = []
        for kernels in (Mixed(), Mixed(0), Mixed(1)):
            lanes, tokens = Rounds(sizes=sizes).drawn(3, spec, True)
            torch.manual_seed(4)  # of what weights' gradients are
            seen.append([])
            for closing in ((), (0,)):
                seen[-1] += rounds.run_round(kernels, lanes, tokens, scales, closing)
                seen[-1] += [lane.buffer.clone() for lane in lanes]
        for other in seen[1:]:
            assert all(torch.equal(a, b) for a, b in zip(seen[0], other, strict=True)), spec


def _corrupted(seeds: range, spec: str, comm: Communicator) -> None:
    tampered = Rounds(Mixed(VICTIM), TINY)
    assert sum(tampered.check_corrupted(seed, spec) for seed in seeds) > len(seeds) // 5


def _rows(comm: Communicator) -> None:
    tampered = Rounds(Mixed(VICTIM), TINY)
    tampered.check_stale()
    for change in ("swapped", "zeroed"):
        tampered.check_rows(change)


def _weight_grads(comm: Communicator) -> None:
    sizes = Sizes(world=2, experts=3, top_k=2, hidden=40, tokens=2, weight_grads=True)
    Rounds(Mixed(VICTIM), sizes).check_weight_grads(range(0, 32, 11))
    Rounds(Mixed(0), sizes).check_weight_grads(range(7, 8))  # sent by Triton's kernels


def _finding(comm: Communicator) -> None:
    Rounds(Mixed(VICTIM), Sizes(world=2, experts=2, top_k=1, hidden=16, tokens=8)).check_finding()


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(_finding, id="two findings"),
        pytest.param(_weight_grads, id="gradients of router weights"),
        pytest.param(
            partial(_same_bytes, replace(TINY, weight_grads=True), ("int8", "none", "int8:row")), id="backward",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(_rows, id="rows", marks=pytest.mark.exhaustive),
        pytest.param(partial(_corrupted, range(10), "int8"), id="corrupted", marks=pytest.mark.exhaustive),
        pytest.param(partial(_corrupted, range(20, 30), "none"), id="corrupted, none", marks=pytest.mark.exhaustive),
        pytest.param(
            partial(_same_bytes, TINY, ("int8", "none", "int4", "int8:row", "fp8", "int8:16")), id="wires",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            partial(_same_bytes, Sizes(2, 3, 3, 9001, 2), ("int8:row", "none", "int4:16")), id="several tiles",
            marks=pytest.mark.exhaustive,
        ),
    ],
)  # fmt: skip
def test_interpreted_rounds_with_checksums(check: Any) -> None:
    run_ranks(check, 1, env=INTERPRETED, timeout=280)
