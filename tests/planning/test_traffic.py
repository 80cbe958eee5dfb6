"""Fan-out and bytes: by counting all sets of experts, and by what a real dispatch says that it sent."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import pytest
import torch

import thinwire as tw
from thinwire.comm.communicator import Communicator
from thinwire.errors import ArgumentError
from thinwire.fused.staged import StagedExchange
from thinwire.moe.config import ParallelSettings
from thinwire.moe.routing import expert_range
from thinwire.testing import run_ranks
from thinwire.tools.planning.plan import RoundMemory, plan_traffic, reach, staged_memory


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


def _staged_round(comm: Communicator, ids: torch.Tensor, settings: dict[str, Any]) -> None:
    with tw.ExpertParallel(comm, transport="staged", **settings) as ep:
        x = torch.randn(len(ids), settings["hidden_size"], dtype=torch.bfloat16, requires_grad=True)
        weights = torch.rand(ids.shape, requires_grad=True)
        d = ep.dispatch(x, ids, weights)
        ep.combine(d.tokens, d).sum().backward()


def _messages(monkeypatch: pytest.MonkeyPatch, ids: Any, settings: dict[str, Any]) -> RoundMemory:
    """What rank 0's messages take in a round of three ranks that dispatch `ids`; as `most_bytes` and so on."""
    sizes: dict[int, list[tuple[int, int]]] = defaultdict(list)
    post = StagedExchange.post.__func__  # type: ignore[attr-defined]

    def watched(cls: Any, comm: Communicator, sends: Any, receives: Any, record: int, *rest: Any, **more: Any) -> Any:
        sizes[comm.rank].append((record * sum(sends), record * sum(receives)))
        return post(cls, comm, sends, receives, record, *rest, **more)

    monkeypatch.setattr(StagedExchange, "post", classmethod(watched))
    run_ranks(_staged_round, 3, ids, settings, mode="thread")
    monkeypatch.undo()
    (leave, arrive), combine, *backward = sizes[0]
    assert len(backward) == 2
    forward = max(leave + arrive, arrive + sum(combine))
    return RoundMemory(forward, forward, max(forward, *map(sum, backward)))


@pytest.mark.parametrize("wire", ["int8", "none"])
@pytest.mark.parametrize(("top_k", "ids"), [(4, [0, 1, 2, 4]), (2, [0, 2])])
def test_no_round_takes_more_than_the_most_that_is_planned(
    top_k: int, ids: list[int], wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"num_experts": 6, "top_k": top_k, "hidden_size": 200, "max_tokens": 40, "wire": wire}
    planned = staged_memory(settings_of(**settings, combine_wire=None), 3, torch.bfloat16)
    found = _messages(monkeypatch, torch.tensor([ids]).expand(40, -1), settings)
    assert (found.most_bytes, found.training_bytes) == (planned.most_bytes, planned.training_bytes)


def test_the_most_of_invariant_rounds_is_one_of_sums_for_each_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"num_experts": 6, "top_k": 2, "hidden_size": 200, "max_tokens": 40, "wire": "int8"}
    planned = staged_memory(settings_of(**settings, combine_wire=None, invariant=True), 3, torch.bfloat16)
    ordinary = staged_memory(settings_of(**settings, combine_wire=None), 3, torch.bfloat16)
    assert planned.most_bytes > ordinary.most_bytes
    ids = torch.tensor([[0, 1]]).expand(40, -1)  # both experts of rank 0: the most sums, not the most tokens
    assert _messages(monkeypatch, ids, settings | {"invariant": True}).most_bytes == planned.most_bytes


def test_the_messages_of_uniform_routing_are_those_of_every_set(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.tensor(list(itertools.combinations(range(8), 3)))
    settings: dict[str, Any] = {"num_experts": 8, "top_k": 3, "hidden_size": 200, "max_tokens": 56, "wire": "int8"}
    for invariant in (False, True):
        planned = staged_memory(settings_of(**settings, combine_wire=None, invariant=invariant), 3, torch.bfloat16)
        found = _messages(monkeypatch, ids, settings | {"invariant": invariant})
        assert found.uniform_bytes == planned.uniform_bytes
    lanes = staged_memory(settings_of(**settings, combine_wire=None, invariant=True, lanes=3), 3, torch.bfloat16)
    assert lanes.uniform_bytes == pytest.approx(3 * planned.uniform_bytes, abs=3)
