"""Fan-out and bytes: by counting all sets of experts, and by what a real dispatch says that it sent."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import thinwire as tw
from thinwire.comm.communicator import Communicator
from thinwire.errors import ArgumentError
from thinwire.moe.config import ParallelSettings
from thinwire.moe.routing import expert_range
from thinwire.testing import run_ranks
from thinwire.tools.planning.traffic import plan_traffic, reach


@pytest.mark.parametrize(("experts", "top_k", "ranks"), [(7, 3, 3), (5, 1, 4), (6, 6, 2), (3, 2, 5), (8, 2, 1)])
def test_the_fan_out_is_that_of_counting_all_sets(experts: int, top_k: int, ranks: int) -> None:
    owner = {expert: rank for rank in range(ranks) for expert in expert_range(experts, ranks, rank)}
    sets = [{owner[expert] for expert in chosen} for chosen in itertools.combinations(range(experts), top_k)]
    counted = [sum(rank in owners for owners in sets) / len(sets) for rank in range(ranks)]
    assert reach(experts, top_k, ranks) == pytest.approx(counted, rel=1e-12)


def test_eight_of_256_experts_on_eight_ranks_reach_5_295() -> None:
    assert sum(reach(256, 8, 8)) == pytest.approx(5.295, abs=5e-4)
    with pytest.raises(ArgumentError, match="top_k is 9, expected 1 to 8"):
        reach(8, 9, 2)


def settings_of(**changed: Any) -> ParallelSettings:
    given: dict[str, Any] = {
        "num_experts": 8, "top_k": 3, "hidden_size": 200, "max_tokens": 64, "wire": "int8", "combine_wire": "int8:row",
        "grad_wire": "none", "transport": "auto", "lanes": 1, "align": 1, "invariant": False,
        "num_programs": None, "timeout": None, "dtype": None,
    }  # fmt: skip
    return ParallelSettings.of(**given | changed)


def _every_set(comm: Communicator, transport: str, invariant: bool) -> list[tuple[int, int]]:
    """Rows and bytes of both legs, for one token of each set of 3 experts of 8: uniform routing, exactly."""
    ids = torch.tensor(list(itertools.combinations(range(8), 3)))
    wires: dict[str, Any] = {"wire": "int8", "combine_wire": "int8:row"}
    with tw.ExpertParallel(comm, 8, 3, 200, 64, **wires, transport=transport, invariant=invariant) as ep:
        d = ep.dispatch(torch.randn(len(ids), 200, dtype=torch.bfloat16), ids, torch.rand(ids.shape))
        out = d.tokens
        legs = [d.dispatch_traffic, d.combine_traffic]
        ep.combine(out, d)
        return [(leg.rows, leg.wire_bytes) for leg in legs]


@pytest.mark.parametrize("transport", ["direct", "staged"])
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_planned_bytes_are_those_that_a_round_sends(transport: str, invariant: bool, ranks: int) -> None:
    planned = plan_traffic(settings_of(invariant=invariant), ranks, 56, torch.bfloat16, transport)  # 8 choose 3
    for sent in run_ranks(_every_set, ranks, transport, invariant, mode="thread"):
        for leg, (rows, wire_bytes) in zip(planned, sent, strict=True):
            assert leg.rows == pytest.approx(rows, rel=1e-12)
            assert leg.wire_bytes == pytest.approx(wire_bytes, rel=1e-12)
            alone = invariant and leg.name == "combine"
            assert leg.own_rows == pytest.approx(56 * (3 / ranks if alone else reach(8, 3, ranks)[0]))


def test_hosts_share_the_bytes_of_one_host() -> None:
    settings = settings_of(num_experts=13, top_k=4)
    whole, _ = plan_traffic(settings, 8, 100, torch.float32, "staged")
    for hosts in (1, 2, 4, 8):
        dispatch, _ = plan_traffic(settings, 8, 100, torch.float32, "staged", hosts)
        assert dispatch.within_bytes + dispatch.between_bytes == pytest.approx(whole.wire_bytes)
    assert dispatch.within_bytes == 0
    with pytest.raises(ArgumentError, match="hosts is 3"):
        plan_traffic(settings, 8, 100, torch.float32, "staged", 3)
