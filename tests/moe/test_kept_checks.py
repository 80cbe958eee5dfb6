"""What a rank has found acceptable before never shows: any tokens are refused, or not, as by a rank without a past."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("numba", reason="the direct transport of CPU ranks needs numba")

import torch

import thinwire as tw
from tests.helpers.odd_tensors import odd
from thinwire.comm.communicator import Communicator
from thinwire.errors import ThinwireError
from thinwire.moe.round_transport import Rounds
from thinwire.testing import run_ranks

NUM_EXPERTS, TOP_K, HIDDEN, MOST = 5, 2, 8, 3
DTYPES = (torch.float32,) * 6 + (torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.complex64)
ID_DTYPES = (torch.int64,) * 4 + (torch.int32, torch.int16, torch.float32)


def _tensor(rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Mostly of that shape."""
    if rng.random() < 0.1:
        shape = rng.choice((shape[:1], (*shape, 1), (shape[0], shape[1] + 1), (shape[0] + 1, shape[1])))
    return torch.zeros(shape, dtype=dtype)


def _arguments(rng: random.Random) -> list[Any]:
    tokens = rng.choice((0, 1, 1, 2, MOST, MOST + 1))
    x = _tensor(rng, (tokens, HIDDEN), rng.choice(DTYPES))
    ids = _tensor(rng, (tokens, TOP_K), rng.choice(ID_DTYPES)) + rng.choice(
        (0, 0, 0, -1, -2, NUM_EXPERTS - 1, NUM_EXPERTS)
    )
    arguments = [x, ids, _tensor(rng, (tokens, TOP_K), rng.choice(DTYPES))]
    if rng.random() < 0.1 and not ids.dtype.is_floating_point:
        arguments[1] = torch._neg_view(-ids)  # the memory has the other sign
    if rng.random() < 0.3:
        which = rng.randrange(3)
        arguments[which] = rng.choice((odd(rng, arguments[which]), odd(rng, arguments[which]), None, [0.0]))
    return arguments


def _outcome(rounds: Rounds, arguments: list[Any]) -> tuple[type[BaseException], str] | None:
    try:
        rounds.check_tokens(*arguments)
    except Exception as error:
        return type(error), str(error)
    return None


def _same(comm: Communicator, transport: str, seed: int, calls: int) -> dict[str, int]:
    rng, seen = random.Random(seed), {"accepted": 0, "refused": 0, "known": 0}
    settings = {"wire": "none", "transport": transport}
    with (
        tw.ExpertParallel(comm, NUM_EXPERTS, TOP_K, HIDDEN, MOST, **settings) as ep,
        tw.ExpertParallel(comm, NUM_EXPERTS, TOP_K, HIDDEN, MOST, **settings) as other,
    ):
        for _ in range(calls):
            arguments = _arguments(rng)
            known = len(ep._assembly.rounds._accepted)
            other._assembly.rounds._accepted.clear()
            expected = _outcome(other._assembly.rounds, arguments)
            assert expected is None or issubclass(expected[0], ThinwireError), expected
            assert _outcome(ep._assembly.rounds, arguments) == expected, arguments
            if expected is None:
                assert all(-1 <= expert < NUM_EXPERTS for expert in arguments[1].flatten().tolist())
            seen["refused" if expected else "accepted"] += 1
            seen["known"] += not expected and len(ep._assembly.rounds._accepted) == known
    return seen


@pytest.mark.parametrize("transport", ["direct", "staged"])
@pytest.mark.parametrize("seed", range(3))
def test_what_was_accepted_before_never_shows(transport: str, seed: int) -> None:
    for seen in run_ranks(_same, 1, transport, seed, 600, mode="thread"):
        assert min(seen.values()) > 50, seen
