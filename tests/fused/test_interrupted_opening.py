"""An exception from outside in the first direct call: all ranks go on, or all of them hear why not, and none hangs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("numba", reason="the direct transport of CPU ranks needs numba")

import torch

import thinwire as tw
from tests.helpers.speeds import exhaustive_but
from thinwire.comm.communicator import Communicator
from thinwire.errors import PeerTimeout, ThinwireError
from thinwire.fused.pulled_legs import NAME
from thinwire.testing import run_ranks

MOST = 13  # one more exchange than there is in a first call


class Interrupted(BaseException):
    """As KeyboardInterrupt."""


def _all_to_all(comm: Communicator, value: float) -> list[float]:
    x = torch.full((4, 4), value + comm.rank)
    values: list[float] = tw.all_to_all_v(
        x, [2, 2], [2, 2], wire="none", comm=comm, transport="direct"
    )[:, 0].tolist()  # fmt: skip
    return values


def _interrupt(comm: Communicator, number: int, when: str) -> None:
    """The exchange of this number from now on is interrupted, once."""
    exchange: Any = comm._exchange
    start, complete, left = exchange._start, exchange.complete, [number]

    def due(here: str) -> bool:
        left[0] -= here == "before it"
        return left[0] == 0 and when == here

    def raise_at(here: str) -> None:
        if due(here):
            left[0] = -1
            raise Interrupted

    def started(*arguments: Any) -> Any:
        raise_at("before it")
        return start(*arguments)

    def completed(posted: Any, **options: Any) -> None:
        raise_at("in its wait")
        complete(posted, **options)
        raise_at("behind it")

    exchange._start, exchange.complete = started, completed


def _outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (Interrupted, ThinwireError) as error:
        return type(error).__name__


def _outcomes(comm: Communicator, number: int, when: str) -> list[Any]:
    """Of a first call, which rank 0 makes again after an interrupt, and of what follows."""
    found = []
    with comm.split(groups=[[0, 1]]) as short:
        short._exchange.timeout = 0.4
        if comm.rank == 0:
            _interrupt(short, number, when)
            if (first := _outcome(lambda: _all_to_all(short, 1.0))) != "Interrupted":
                found.append(first)
            vars(short._exchange).pop("_start"), vars(short._exchange).pop("complete")
        if not found:
            found.append(_outcome(lambda: _all_to_all(short, 1.0)))
        found += [_outcome(lambda: _all_to_all(short, 2.0)), _outcome(short.barrier)]
        found.append(_outcome(lambda: _all_to_all(short, 3.0)))
    comm.barrier()
    return found


def _at_each(comm: Communicator, when: str, numbers: tuple[int, ...]) -> list[list[Any]]:
    return [_outcomes(comm, number, when) for number in numbers]


QUICK = ("in its wait", (1, MOST))
ALL = [(when, tuple(range(1, MOST + 1))) for when in ("before it", "in its wait", "behind it")]


@pytest.mark.parametrize(("when", "numbers"), exhaustive_but([QUICK], [QUICK, *ALL], several=True))
def test_ranks_are_in_step_or_all_are_told_that_they_are_not(when: str, numbers: tuple[int, ...]) -> None:
    own, peer = run_ranks(_at_each, 2, when, numbers, timeout=120)
    right = [[value, value, value + 1, value + 1] for value in (1.0, 2.0, 3.0)]
    right.insert(2, None)
    assert own[-1] == right, "there is no such exchange, and nothing was interrupted"
    for number, found, there in zip(numbers, own, peer, strict=True):
        # Interrupted, the communicator has ended at that rank; its peer may have had all that it needed for the call.
        ended = found == ["ThinwireError"] * 4
        assert ended or found == there == right, f"exchange {number}: {found}, {there}"
        if ended:
            assert there in (["PeerTimeout"] * 4, [right[0], *["PeerTimeout"] * 3]), f"exchange {number}: {there}"


def _failed_elsewhere(comm: Communicator) -> None:
    with comm.split(groups=[[0, 1]]) as short:
        _all_to_all(short, 1.0)
        tw.all_reduce(torch.ones(8), comm=short, transport="direct")
        short._exchange.timeout = 0.4
        short.attached(NAME).timeout = 0.4
        with pytest.raises(PeerTimeout):
            short.barrier() if comm.rank == 0 else _all_to_all(short, 2.0)
        for again in (lambda: _all_to_all(short, 3.0), lambda: tw.all_reduce(torch.ones(8), comm=short)):
            with pytest.raises(PeerTimeout, match="cannot be used any more"):
                again()


def test_after_a_timeout_no_transport_gives_rows_of_another_call() -> None:
    run_ranks(_failed_elsewhere, 2)
