"""Rounds over two levels as GPUs have them, by Triton's interpreter: what those of CPUs promise holds of them, too."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from tests.helpers.hosts import on_hosts
from tests.helpers.speeds import exhaustive_but
from tests.helpers.wires import assert_same_bits
from tests.moe.test_gradients import _disagree, _one_layer, _records_layer
from tests.moe.test_open_rounds import _abandoned, _all_leave, _experts_fail, _layers
from tests.moe.test_refused_tokens import _all_refused, _layer_refuses, _refused
from tests.moe.test_two_level import TWO_BY_TWO, as_on_one_level, batch
from thinwire import ExpertParallel
from thinwire.comm import Communicator
from thinwire.comm.hosts import Hosts
from thinwire.errors import CapacityError, PeerTimeout, RoutingError
from thinwire.testing import RankError, run_ranks
from thinwire.triton_kernels.launch import Launcher

pytest.importorskip("triton", reason="its kernels are Triton's")

INTERPRETED = {"TRITON_INTERPRET": "1", "THINWIRE_BACKEND": "triton"}
THREE_BY_TWO = ((0, 1), (2, 3), (4, 5))
#: Hosts, and the wire of a round over them.
ON_HOSTS = [(TWO_BY_TWO, "int8"), (TWO_BY_TWO, "none"), (TWO_BY_TWO, "int4+h64"), (THREE_BY_TWO, "fp8")]


@pytest.mark.parametrize(("hosts", "wire"), exhaustive_but(ON_HOSTS[:1], ON_HOSTS, several=True), ids=str)
def test_experts_see_what_they_see_on_one_level(hosts: Hosts, wire: str) -> None:
    size = sum(map(len, hosts))
    ranks = run_ranks(as_on_one_level, size, hosts, wire, torch.bfloat16, (12, 4, 72, 6), env=INTERPRETED, timeout=500)
    one, two, norm = map(math.sqrt, torch.tensor(ranks).sum((0, 1)).tolist())
    assert two <= 1.1 * one, (one / norm, two / norm)


@pytest.mark.parametrize(
    ("size", "function", "arguments"),
    exhaustive_but(
        [(4, _abandoned, ())],
        [
            (4, _abandoned, ()), (4, _refused, ()), (2, _all_refused, ()), (2, _layer_refuses, ()), (2, _all_leave, ()),
            (4, _experts_fail, ("experts raise",)), (2, _experts_fail, ("in halves",)), (2, _layers, ()),
            (2, _one_layer, ()), (2, _records_layer, ()), (2, _disagree, ()),
        ],
        several=True,
    ),
)  # fmt: skip
def test_what_holds_of_cpus_holds_of_them(size: int, function: Callable[..., Any], arguments: tuple[str, ...]) -> None:
    run_ranks(function, size, "two_level", *arguments, env=INTERPRETED, timeout=500)


def _combined(comm: Communicator, hosts: Hosts, wire: str) -> list[torch.Tensor]:
    sizes, found = (12, 4, 72, 6), []
    with ExpertParallel(on_hosts(comm, hosts), *sizes, wire=wire, transport="two_level") as ep:
        for number in range(3):
            d = ep.dispatch(*batch(comm.rank, number, torch.bfloat16, sizes))
            rows = torch.randn(d.tokens.shape, generator=torch.Generator().manual_seed(number))
            found.append(ep.combine(rows.bfloat16(), d))
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("wire", ["int8", "none"])
def test_what_comes_home_is_what_comes_home_on_cpus(wire: str) -> None:
    """Though there records that are not wanted do not travel, and sums go part by part."""
    of_cpus = run_ranks(_combined, 4, TWO_BY_TWO, wire, mode="thread")
    for one, other in zip(
        of_cpus, run_ranks(_combined, 4, TWO_BY_TWO, wire, env=INTERPRETED, timeout=200), strict=True
    ):
        for number, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_same_bits(f"round {number}", left, right)


def _launchers_made(comm: Communicator) -> list[int]:
    """In each of some rounds whose experts sum up a token's rows themselves."""
    x, ids, weights = torch.ones(2, 16), torch.tensor([[0, 1], [1, 0]]), torch.ones(2, 2)
    made, found = mock.Mock(), []
    made.side_effect = Launcher.__init__
    with (
        ExpertParallel(on_hosts(comm, ((0,), (1,))), 2, 2, 16, 2, transport="two_level") as ep,
        mock.patch.object(Launcher, "__init__", lambda *given, **more: made(*given, **more)),
    ):
        for _ in range(3):
            d = ep.dispatch(x, ids, weights)
            ep.combine(d.gather_records(4).tokens, d, weighted=True)
            found.append(made.call_count)
    return found


def test_weighted_rounds_keep_their_launchers() -> None:
    for first, *later in run_ranks(_launchers_made, 2, env=INTERPRETED, timeout=100):
        assert first > 0 and {*later} == {first}


def _crossed(comm: Communicator) -> None:
    """Messages of the two lanes are as long, and the network matches them by order alone, as NCCL does."""
    two = on_hosts(Communicator(comm.group, timeout=8.0), ((0,), (1,)))
    post = two.post
    two.post = lambda sends, receives, _: post(sends, receives, "alike")  # type: ignore[method-assign,assignment]
    ep = ExpertParallel(two, 2, 1, 16, 2, lanes=2, transport="two_level")
    x, ids, weights = torch.full((1, 16), comm.rank + 1.0), torch.tensor([[1 - comm.rank]]), torch.ones(1, 1)
    rounds = [ep.dispatch(x * 10**lane, ids, weights, lane=lane) for lane in range(2)]
    with pytest.raises(PeerTimeout, match="round 1 on lane"):
        for d in rounds[:: 1 - 2 * comm.rank]:
            ep.combine(d.tokens, d)


def test_lanes_that_ranks_combine_in_another_order_do_not_meet() -> None:
    run_ranks(_crossed, 2, env=INTERPRETED, timeout=100)


def _refused_first(comm: Communicator) -> None:
    """Where messages have no room for rows of another dtype."""
    two, tokens = on_hosts(comm, ((0,), (1,))), torch.ones(3 - comm.rank, 16).bfloat16()
    with ExpertParallel(two, 2, 1, 16, 2, wire="none", transport="two_level", dtype=torch.bfloat16) as ep:
        for attempt in (tokens, tokens[:1]):
            with pytest.raises((CapacityError, RoutingError)) if len(attempt) > 1 else contextlib.nullcontext():
                d = ep.dispatch(attempt, torch.zeros(len(attempt), 1).long(), torch.ones(len(attempt), 1))
        assert torch.equal(ep.combine(d.tokens, d), tokens[:1])


def test_a_first_dispatch_may_be_refused() -> None:
    run_ranks(_refused_first, 2, env=INTERPRETED, timeout=100)


def _explained(comm: Communicator, hosts: Hosts, transport: str) -> str:
    with ExpertParallel(on_hosts(comm, hosts), 4, 1, 16, 2, transport=transport) as ep:
        return ep.explain()


def test_what_is_not_chosen_says_why() -> None:
    (said, *_) = run_ranks(_explained, 4, TWO_BY_TWO, "auto", env=INTERPRETED)
    reason = "its ranks are on several hosts, and two levels of GPUs have run on none yet"
    assert f"direct is not available: {reason}" in said
    for hosts in (((0,), (1, 2, 3)), ((0, 2), (1, 3))):
        with pytest.raises(RankError, match="every host must have as many ranks, one behind the other"):
            run_ranks(_explained, 4, hosts, "two_level", env=INTERPRETED)
