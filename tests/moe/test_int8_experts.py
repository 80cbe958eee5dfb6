"""Experts in int8 on rounds of both transports: near the float32 experts, and the same bits wherever they run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.helpers.speeds import exhaustive_but
from thinwire.comm.communicator import Communicator
from thinwire.moe import compiled_round
from thinwire.moe.experts import GroupedExperts
from thinwire.moe.int8_experts import Int8Experts
from thinwire.moe.parallel import ExpertParallel
from thinwire.testing import run_ranks

NUM_EXPERTS, TOP_K, HIDDEN, FF = 5, 2, 256, 200


def _whole(gated: bool) -> GroupedExperts:
    experts, generator = GroupedExperts(NUM_EXPERTS, HIDDEN, FF, gated=gated), torch.Generator().manual_seed(3)
    for weight in experts.parameters():  # not by the generator that ranks, being threads, share
        torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5, generator=generator)
    return experts


def _shard(whole: GroupedExperts, local: range) -> GroupedExperts:
    shard = GroupedExperts(len(local), HIDDEN, FF, gated=whole.w_gate is not None)
    shard.load_state_dict({name: weight[local.start : local.stop] for name, weight in whole.state_dict().items()})
    return shard


def _round(comm: Communicator, transport: str, wire: str, gated: bool, align: int) -> list[torch.Tensor]:
    """The result in int8 with and without a capacity, and that of the float32 experts on exact rows."""
    generator = torch.Generator().manual_seed(comm.rank)
    count = 0 if comm.rank == 1 else 23
    x = torch.randn(count, HIDDEN, generator=generator)
    ids = torch.randint(-1, NUM_EXPERTS, (count, TOP_K), generator=generator)
    weights = torch.rand(count, TOP_K, generator=generator)
    sizes = {"num_experts": NUM_EXPERTS, "top_k": TOP_K, "hidden_size": HIDDEN, "max_tokens": 23, "align": align}
    results = []
    with ExpertParallel(comm, **sizes, wire=wire, combine_wire="none", transport=transport) as ep:
        experts = Int8Experts(_shard(_whole(gated), ep.local_experts), rotated=wire.endswith("+h64"))
        for capacity in (None, 99):
            d = ep.dispatch(x, ids, weights)
            out = experts(d, capacity)
            assert out.dtype == torch.float32 and len(out) == (len(d.tokens) if capacity is None else capacity)
            padding = torch.arange(len(out)) < d.expert_offsets[-1]
            for first, rows in zip(d.expert_offsets.tolist(), d.expert_counts.tolist(), strict=False):
                padding[first : first + rows] = False
            assert not out[padding].any()
            results.append(ep.combine(out, d))
            in_graph = compiled_round.dispatch(ep, x, ids, weights)
            assert torch.equal(ep.combine(experts(in_graph, capacity), in_graph), results[-1])
    with ExpertParallel(comm, **sizes, wire="none", transport=transport) as ep:
        d = ep.dispatch(x, ids, weights)
        exact = _shard(_whole(gated), ep.local_experts)
        results.append(ep.combine(exact(d.tokens, d.expert_counts, d.expert_offsets).detach(), d))
    return results


@pytest.mark.parametrize(
    "transport,wire,gated,align",
    exhaustive_but(
        [("direct", "int8", True, 4)],
        [
            ("direct", "int8", True, 4),
            ("staged", "int8", True, 4),
            ("direct", "int8:row", False, 1),
            ("direct", "int8:32", True, 1),
            ("direct", "int8+h64", True, 4),
            ("staged", "int8:row+h64", False, 4),
        ],
        several=True,
    ),
)
def test_they_are_near_the_float32_experts(transport: str, wire: str, gated: bool, align: int) -> None:
    ranks = run_ranks(_round, 2, transport, wire, gated, align, mode="thread", timeout=200)
    got, roomy, exact = (torch.cat(parts) for parts in zip(*ranks, strict=True))
    assert torch.equal(got, roomy)
    error = float(torch.linalg.norm(got - exact) / torch.linalg.norm(exact))
    assert 1e-3 < error < 0.02, error


def _error(comm: Communicator, hidden: int, ff: int, gated: bool, wire: str) -> float:
    """Of rows of one expert, both legs in int8."""
    generator = torch.Generator().manual_seed(hidden)
    whole = GroupedExperts(1, hidden, ff, gated=gated)
    for weight in whole.parameters():
        torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5, generator=generator)
    x = torch.randn(24, hidden, generator=generator)
    ids, ones = torch.zeros(24, 1, dtype=torch.int64), torch.ones(24, 1)
    with ExpertParallel(comm, 1, 1, hidden, 24, wire=wire) as ep:
        d = ep.dispatch(x, ids, ones)
        y = ep.combine(Int8Experts(whole, rotated=wire.endswith("+h64"))(d), d)
    exact = whole(x, torch.tensor([24])).detach()
    return float(torch.linalg.norm(y - exact) / torch.linalg.norm(exact))


_SIZES = [
    (2048, 768, True, "int8"),
    (1024, 1024, False, "int8"),
    (4096, 512, False, "int8:row"),
    (512, 2048, True, "int8"),
    (2048, 768, True, "int8+h64"),
    (1000, 768, True, "int8:row+h64"),
]


@pytest.mark.parametrize(("hidden", "ff", "gated", "wire"), exhaustive_but(_SIZES[2:3], _SIZES, several=True))
def test_errors_are_within_what_is_documented(hidden: int, ff: int, gated: bool, wire: str) -> None:
    (error,) = run_ranks(_error, 1, hidden, ff, gated, wire, mode="thread", timeout=100)
    assert 0.01 < error < 0.025, error


def test_the_bound_that_holds_is_the_one_that_is_documented() -> None:
    page = Path(__file__).parents[2] / "docs/rounds.md"
    for text in (page.read_text(), Int8Experts.__doc__ or ""):
        assert re.search(r"within\s+0\.025 \(relative L2", text)


@pytest.mark.exhaustive
def test_triton_and_torch_give_the_same_bits() -> None:
    pytest.importorskip("triton", reason="interpreting kernels needs Triton")
    by_backend = [
        run_ranks(_round, 2, "staged", "int8", True, 4, env=environment, timeout=300)
        for environment in ({}, {"THINWIRE_BACKEND": "torch"}, {"THINWIRE_BACKEND": "triton", "TRITON_INTERPRET": "1"})
    ]
    for ranks in by_backend[1:]:
        for ours, theirs in zip(ranks, by_backend[0], strict=True):
            assert torch.equal(ours[0], theirs[0])


def _casts_and_drops(comm: Communicator) -> None:
    experts = Int8Experts(GroupedExperts(2, 64, 32), rotated=False)
    x, ids, weights = torch.randn(4, 64), torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)
    sizes = {"num_experts": 2, "top_k": 1, "hidden_size": 64, "max_tokens": 4}
    with ExpertParallel(comm, **sizes, wire="int8") as ep:
        d = ep.dispatch(x, ids, weights)
        assert torch.linalg.norm(experts.bfloat16()(d) - experts.float()(d)) < 0.01 * torch.linalg.norm(experts(d))
        assert ep.combine(experts(d, 2), d)[2:].eq(0).all()  # dropped


def test_a_cast_changes_little_and_rows_past_the_capacity_are_dropped() -> None:
    run_ranks(_casts_and_drops, 1, mode="thread", timeout=200)


def test_a_state_dict_brings_the_weights_back() -> None:
    first, second = (Int8Experts(GroupedExperts(2, 40, 24, gated=True), rotated=False) for _ in range(2))
    second.load_state_dict(first.state_dict())
    assert torch.equal(first.w_in, second.w_in) and torch.equal(first.s_out, second.s_out)
    assert first.w_in.shape == (2, 48, 48) and not list(first.parameters())
    rotated = Int8Experts(GroupedExperts(2, 64, 24))
    third = Int8Experts(GroupedExperts(2, 64, 24), rotated=False)  # of the same shapes
    third.load_state_dict(rotated.state_dict())
    assert third.rotated and not first.rotated
