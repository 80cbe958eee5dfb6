"""Sizes grow as they are said to, and routings give the rows that they say."""

from __future__ import annotations

import numpy as np
import pytest

from thinwire.tools.bench.options import Routing, sweep
from thinwire.tools.bench.traffic import expert_ids, expert_load, row_counts, skew_of, violation_of


def test_sizes_grow_to_the_last_one() -> None:
    assert sweep("1", "10", 2) == [1, 2, 4, 8] and sweep("1", "3", 1.1) == [1, 2, 3] and sweep("8", "8", 2) == [8]
    assert sweep("8", "30", increment="10") == [8, 18, 28] and sweep("64K", "1M") == [1 << 16, 1 << 20]


def test_every_row_is_dealt_to_somebody_and_a_single_one_changes_ranks() -> None:
    for ranks in (2, 3, 4):
        assert row_counts(Routing("uniform"), 1, ranks).diagonal().tolist() == [0] * ranks
        for rows in (0, 1, 5, 8):
            counts = row_counts(Routing("uniform"), rows, ranks)
            assert (counts.sum(1) == rows).all() and (counts.max(1) - counts.min(1) <= 1).all()


def test_a_hot_rank_gets_its_share_and_zipf_falls() -> None:
    hot = row_counts(Routing("hot", 0.7), 100, 4)
    assert hot[:, 0].tolist() == [70] * 4 and skew_of(hot.sum(0).tolist()) == pytest.approx(2.8)
    received = row_counts(Routing("zipf", 1.0), 1200, 4).sum(0).tolist()
    assert received == sorted(received, reverse=True) and received[0] == pytest.approx(2 * received[1], rel=0.02)


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "ranks", "violation"),
    [(16, 64, 8, 4, 0.2), (500, 64, 8, 4, 1), (500, 64, 8, 2, 4), (33, 10, 3, 3, 7 / 3), (7, 12, 12, 2, 0)],
)
def test_the_busiest_expert_exceeds_the_mean_as_it_should_and_the_others_are_even(
    tokens: int, experts: int, top_k: int, ranks: int, violation: float
) -> None:
    ids = expert_ids(Routing("maxvio", violation), tokens, experts, top_k, ranks)
    assert [own.shape for own in ids] == [(tokens, top_k)] * ranks
    for own in ids:
        ordered = np.sort(own)
        assert (ordered[:, 1:] != ordered[:, :-1]).all() and own.min() >= 0 and own.max() < experts
    load = expert_load(ids, experts)
    mean = tokens * ranks * top_k / experts
    assert abs(violation_of(load) - violation) <= 0.5 / mean
    rest = np.delete(load, load.argmax())
    assert rest.max() - rest.min() <= 1
    by_rank = [int((own == load.argmax()).sum()) for own in ids]
    assert max(by_rank) - min(by_rank) <= 1


def test_tokens_name_different_experts_as_popular_as_they_are_said_to_be() -> None:
    loads = {}
    for routing in (Routing("uniform"), Routing("hot", 0.9), Routing("zipf", 1.5)):
        ids = expert_ids(routing, 500, 64, 2, 4)
        assert all((np.sort(own)[:, 0] != np.sort(own)[:, 1]).all() and own.min() >= 0 for own in ids)
        assert not np.array_equal(ids[0], ids[1])
        loads[routing.kind] = expert_load(ids, 64)
        assert loads[routing.kind].sum() == 4 * 500 * 2
    by_rank = {kind: skew_of(load.reshape(4, 16).sum(1).tolist()) for kind, load in loads.items()}
    assert by_rank["uniform"] < 1.1 and by_rank["hot"] == pytest.approx(3.6, abs=0.2)
    assert loads["zipf"].max() > 5 * loads["uniform"].max()
