"""Properties of the router, of expert ownership and of the load-balancing loss."""

from __future__ import annotations

import pytest
import torch

from thinwire.moe.routing import RouterConfig, expert_range, load_balancing_loss, top_k_route


def random_logits(tokens: int, experts: int, seed: int = 0) -> torch.Tensor:
    return 3.0 * torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("num_experts,world_size", [(8, 1), (8, 3), (7, 4), (3, 5), (0, 2), (256, 8)])
def test_expert_ranges_cover_every_expert_once_and_the_first_ranks_own_one_more(num_experts: int, world_size: int):
    ranges = [expert_range(num_experts, world_size, rank) for rank in range(world_size)]
    assert [expert for owned in ranges for expert in owned] == list(range(num_experts))
    block, larger = divmod(num_experts, world_size)
    assert [len(owned) for owned in ranges] == [block + 1] * larger + [block] * (world_size - larger)


@pytest.mark.parametrize("tokens,experts,top_k", [(1, 1, 1), (42, 6, 2), (123, 31, 8), (5, 4, 4), (0, 8, 2)])
def test_routing_equals_a_float64_softmax_and_renormalised_top_k(tokens: int, experts: int, top_k: int):
    logits = random_logits(tokens, experts)
    ids, weights = top_k_route(logits, top_k)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    assert ids.shape == weights.shape == (tokens, top_k)
    probabilities = logits.double().softmax(dim=-1)
    kept, kept_ids = probabilities.topk(top_k, dim=-1)
    assert torch.equal(ids.long(), kept_ids)
    torch.testing.assert_close(weights.double(), kept / kept.sum(-1, keepdim=True), rtol=1e-6, atol=1e-7)


def test_equal_probabilities_are_taken_in_ascending_expert_id():
    ids, weights = top_k_route(torch.zeros(3, 16), top_k=4)
    assert ids.tolist() == [[0, 1, 2, 3]] * 3
    assert weights.tolist() == [[0.25] * 4] * 3


def test_logits_of_low_precision_are_routed_in_fp32():
    logits = random_logits(33, 8).bfloat16()
    ids, weights = top_k_route(logits, 2)
    expected_ids, expected_weights = top_k_route(logits.float(), 2)
    assert torch.equal(ids, expected_ids) and torch.equal(weights, expected_weights)


def test_huge_logits_give_finite_weights():
    _, weights = top_k_route(torch.tensor([[1e30, -1e30, 0.0], [-1e30, -1e30, -1e30]]), top_k=2)
    assert torch.isfinite(weights).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2), rtol=1e-6, atol=0)


def test_router_weights_have_the_gradient_of_the_float64_formula():
    logits = random_logits(9, 7).requires_grad_()
    upstream = torch.randn(9, 3, generator=torch.Generator().manual_seed(1))
    ids, weights = top_k_route(logits, 3)
    weights.backward(upstream)
    exact = logits.detach().double().requires_grad_()
    kept = exact.softmax(-1).gather(1, ids.long())
    (kept / kept.sum(-1, keepdim=True)).backward(upstream.double())
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=1e-5, atol=1e-6)


def test_balance_loss_equals_a_float64_loop_over_tokens_and_experts():
    logits = random_logits(57, 6)
    ids, _ = top_k_route(logits, 2)
    probabilities = logits.double().softmax(-1)
    expected = 0.0
    for expert in range(6):
        share = sum(row.count(expert) for row in ids.tolist()) / (57 * 2)
        expected += 6 * share * sum(probabilities[:, expert].tolist()) / 57
    assert load_balancing_loss(logits, ids, 6).item() == pytest.approx(expected, rel=1e-6)


def test_balance_loss_is_one_for_even_use_and_num_experts_for_collapse():
    even = load_balancing_loss(torch.zeros(8, 4), torch.arange(16).reshape(8, 2) % 4, 4)
    collapsed = load_balancing_loss(torch.tensor([[100.0, 0.0, 0.0, 0.0]] * 8), torch.zeros(8, 1, dtype=torch.int32), 4)
    assert even.item() == 1.0
    assert collapsed.item() == pytest.approx(4.0, rel=1e-6)


def test_balance_loss_does_not_count_absent_experts():
    logits = random_logits(4, 3)
    with_absent = torch.tensor([[0, -1], [2, -1], [1, -1], [-1, 2]])
    assert torch.equal(
        load_balancing_loss(logits, with_absent, 3), load_balancing_loss(logits, torch.tensor([[0], [2], [1], [2]]), 3)
    )


@pytest.mark.parametrize("ids", [torch.zeros(0, 2, dtype=torch.int32), torch.full((5, 2), -1)])
def test_balance_loss_of_nothing_is_zero_with_a_zero_gradient(ids: torch.Tensor):
    logits = torch.zeros(ids.shape[0], 3, requires_grad=True)
    loss = load_balancing_loss(logits, ids, 3)
    loss.backward()
    assert loss.item() == 0.0 and torch.equal(logits.grad, torch.zeros_like(logits))


def test_descending_the_balance_loss_evens_out_the_load():
    logits = random_logits(64, 4) + torch.tensor([4.0, 0.0, 0.0, 0.0])
    before = torch.bincount(top_k_route(logits, 1)[0].flatten(), minlength=4)
    bias = torch.zeros(4, requires_grad=True)
    for _ in range(50):
        ids, _ = top_k_route(logits + bias, 1)
        (gradient,) = torch.autograd.grad(load_balancing_loss(logits + bias, ids, 4), bias)
        bias = (bias - 0.3 * gradient).detach().requires_grad_()
    after = torch.bincount(top_k_route(logits + bias, 1)[0].flatten(), minlength=4)
    assert before.max() > 40 and after.max() < 28


def test_weights_that_are_not_renormalised_are_the_probabilities():
    logits = random_logits(17, 9)
    ids, weights = top_k_route(logits, 3, RouterConfig(renormalize=False, scale=0.5))
    assert torch.equal(ids, top_k_route(logits, 3)[0])
    probabilities = logits.double().softmax(-1).gather(1, ids.long())
    torch.testing.assert_close(weights.double(), probabilities / 2, rtol=1e-6, atol=1e-7)


def test_only_experts_of_the_best_groups_are_taken():
    """Against a search over all experts, one token at a time, in float64."""
    config = RouterConfig("sigmoid", renormalize=False, num_groups=4, top_groups=2, correction_bias=True)
    logits, bias = random_logits(50, 12), random_logits(1, 12, seed=1)[0] / 6
    ids, weights = top_k_route(logits, 5, config, bias)
    corrected = logits.double().sigmoid() + bias.double()
    differs = 0
    for token, chosen in enumerate(ids.tolist()):
        by_group = [sorted(corrected[token, 3 * g : 3 * g + 3].tolist())[1:] for g in range(4)]
        best = sorted(range(4), key=lambda g: sum(by_group[g]))[2:]
        allowed = [expert for expert in range(12) if expert // 3 in best]
        expected = sorted(allowed, key=lambda e: -corrected[token, e].item())[:5]
        assert chosen == expected
        differs += set(expected) != set(corrected[token].topk(5).indices.tolist())
    assert differs > 5, "the groups made no difference"
    torch.testing.assert_close(weights.double(), logits.double().sigmoid().gather(1, ids.long()), rtol=1e-6, atol=1e-7)


def test_sigmoids_that_are_all_zero_give_weights_of_zero():
    _, weights = top_k_route(torch.full((1, 4), -200.0), 2, RouterConfig("sigmoid"))
    assert weights.tolist() == [[0.0, 0.0]]
