"""Properties of the grouped experts and of the MoE layer, unsharded and with a stand-in for expert parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.helpers.files import unnumbered
from thinwire.moe.experts import ClampedSwiGLU, GroupedExperts
from thinwire.moe.layer import MoELayer
from thinwire.moe.routing import RouterConfig

ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors on a busy machine: threads that wait for each other cost far more than they save."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def exact_expert(experts: GroupedExperts, expert: int, row: torch.Tensor) -> torch.Tensor:
    """One row [hidden] through one expert, in float64."""
    activate = ACTIVATIONS[experts.activation]
    inner = row.double() @ experts.w_in[expert].double()
    if experts.w_gate is None:
        inner = activate(inner)
    else:
        inner = activate(row.double() @ experts.w_gate[expert].double()) * inner
    return inner @ experts.w_out[expert].double()


def exact_layer(layer: MoELayer, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The layer in float64, token by token, for a given choice of experts."""
    rows = []
    for row, chosen in zip(x, ids.tolist(), strict=True):
        logits = layer.router.weight.double() @ row.double()
        weights = logits[chosen].softmax(dim=0)
        rows.append(sum(w * exact_expert(layer.experts, e, row) for w, e in zip(weights, chosen, strict=True)))
    return torch.stack(rows)


class OneRank:
    """A stand-in for one rank's ExpertParallel whose peers send and return nothing.

    Rows come with padding: each expert's rows are rounded up to ``align``, and the padding holds NaN.
    """

    def __init__(
        self, local_experts: range | tuple[int, ...], num_experts: int, top_k: int, hidden_size: int, align: int = 4
    ) -> None:
        self.local_experts = local_experts
        self.num_experts, self.top_k, self.hidden_size = num_experts, top_k, hidden_size
        self.align = align
        self.calls: list[str] = []

    def next_layer(self) -> int:
        return 1

    def dispatch(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, layer: int
    ) -> SimpleNamespace:
        self.calls.append("dispatch")
        pieces, counts, offsets, sources = [x[:0]], [], [0], []
        for expert in self.local_experts:
            token, choice = (topk_ids == expert).nonzero(as_tuple=True)
            padding = -len(token) % self.align
            pieces += [x[token], x.new_full((padding, x.shape[1]), float("nan"))]
            sources.append((offsets[-1], token, topk_weights[token, choice]))
            counts.append(len(token))
            offsets.append(offsets[-1] + len(token) + padding)
        return SimpleNamespace(
            tokens=torch.cat(pieces),
            expert_counts=torch.tensor(counts, dtype=torch.int32),
            expert_offsets=torch.tensor(offsets, dtype=torch.int32),
            sources=sources,
            like=x,
        )

    def combine(self, expert_out: torch.Tensor, dispatched: SimpleNamespace) -> torch.Tensor:
        self.calls.append("combine")
        y = torch.zeros(dispatched.like.shape, dtype=torch.float32)
        for start, token, weights in dispatched.sources:
            y = y.index_add(0, token, weights[:, None] * expert_out[start : start + len(token)].float())
        return y.to(dispatched.like.dtype)


def test_a_sigmoid_router_computes_logits_in_float32_under_autocast() -> None:
    layer = MoELayer(64, 8, 4, 2, router_config=RouterConfig(scoring="sigmoid"))
    x = torch.randn(5, 64)
    wanted = layer.route(x)
    with torch.autocast("cpu", torch.bfloat16):
        got = layer.route(x)
    assert got.router_logits.dtype == torch.float32 and torch.equal(got.router_logits, wanted.router_logits)


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_experts_equal_a_float64_loop_over_rows(activation: str, gated: bool):
    torch.manual_seed(0)
    experts = GroupedExperts(5, 6, 42, activation=activation, gated=gated)
    counts = [3, 0, 7, 1, 0]
    tokens = torch.randn(11, 6)
    owner = [expert for expert, count in enumerate(counts) for _ in range(count)]
    expected = torch.stack([exact_expert(experts, expert, row) for expert, row in zip(owner, tokens, strict=True)])
    torch.testing.assert_close(experts(tokens, torch.tensor(counts)).double(), expected, rtol=1e-5, atol=1e-6)


def test_padding_rows_come_out_zero_and_do_not_touch_the_others():
    torch.manual_seed(1)
    experts = GroupedExperts(3, 8, 16)
    tokens, counts = torch.randn(9, 8), torch.tensor([4, 0, 5])
    packed = experts(tokens, counts)
    padded = torch.full((20, 8), float("nan"))
    padded[2:6], padded[11:16] = tokens[:4], tokens[4:]
    out = experts(padded, counts, torch.tensor([2, 8, 11, 18]))
    assert torch.equal(out[2:6], packed[:4]) and torch.equal(out[11:16], packed[4:])
    rest = torch.cat([out[:2], out[6:11], out[16:]])
    assert torch.equal(rest, torch.zeros_like(rest))


@pytest.mark.parametrize("num_experts,rows", [(0, 0), (3, 0), (0, 2)])
def test_no_experts_or_no_rows_give_zero_rows(num_experts: int, rows: int):
    experts = GroupedExperts(num_experts, 4, 8)
    tokens = torch.randn(rows, 4, requires_grad=True)
    offsets = torch.zeros(num_experts + 1, dtype=torch.int64)
    out = experts(tokens, torch.zeros(num_experts, dtype=torch.int64), offsets)
    assert torch.equal(out, torch.zeros(rows, 4))
    out.sum().backward()  # A rank without rows takes part in the backward pass all the same.
    assert tokens.grad is not None
    if num_experts:
        assert all(torch.equal(weight.grad, torch.zeros_like(weight)) for weight in experts.parameters())


@pytest.mark.parametrize("tokens,hidden,experts,top_k", [(123, 31, 7, 3), (1, 8, 4, 1), (6, 42, 5, 5)])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_unsharded_layer_equals_a_float64_loop_over_tokens(tokens, hidden, experts, top_k, gated):
    torch.manual_seed(2)
    layer = MoELayer(hidden, 24, experts, top_k, gated=gated)
    x = torch.randn(tokens, hidden)
    y, routing = layer.forward_with_routing(x)
    torch.testing.assert_close(y.double(), exact_layer(layer, x, routing.topk_ids), rtol=1e-5, atol=1e-6)


def test_unsharded_gradients_equal_those_of_the_float64_loop():
    torch.manual_seed(3)
    layer = MoELayer(10, 12, 6, 2, gated=True)
    x = torch.randn(37, 10, requires_grad=True)
    upstream = torch.randn(37, 10)
    inputs = [x, *layer.parameters()]
    y, routing = layer.forward_with_routing(x)
    got = torch.autograd.grad(y, inputs, upstream)
    expected = torch.autograd.grad(exact_layer(layer, x, routing.topk_ids), inputs, upstream.double())
    for value, reference in zip(got, expected, strict=True):
        torch.testing.assert_close(value, reference, rtol=2e-5, atol=2e-6)


def test_unsharded_layer_is_bit_identical_from_run_to_run():
    torch.manual_seed(4)
    layer = MoELayer(64, 32, 8, 2)
    x = torch.randn(200, 64)
    results = []
    for _ in range(3):
        inputs = [x.clone().requires_grad_(), *layer.parameters()]
        y = layer(inputs[0])
        results.append([y.detach(), *torch.autograd.grad(y.square().sum(), inputs)])
    assert all(torch.equal(a, b) for run in results[1:] for a, b in zip(results[0], run, strict=True))


def test_outputs_are_summed_in_fp32_in_ascending_expert_id():
    class Constants(nn.Module):
        values = torch.tensor([1.0, 1e8, -1e8, 3.0])

        def forward(self, tokens, expert_counts, expert_offsets=None):
            return self.values.repeat_interleave(expert_counts)[:, None].expand(-1, tokens.shape[1])

    torch.manual_seed(5)
    layer = MoELayer(4, 4, 4, 4)
    layer.experts = Constants()
    x = torch.randn(50, 4)
    y, routing = layer.forward_with_routing(x)
    weights = torch.empty(50, 4).scatter(1, routing.topk_ids.long(), routing.topk_weights)

    def in_order(order):
        total = torch.zeros(50)
        for expert in order:
            total = total + weights[:, expert] * Constants.values[expert]
        return total[:, None].expand(-1, 4)

    assert torch.equal(y, in_order([0, 1, 2, 3]))
    assert not torch.equal(y, in_order([3, 2, 1, 0]))  # The data can tell one order from another.


@pytest.mark.parametrize("shape", [(2, 3, 16), (0, 16), (2, 0, 16), (16,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_layer_keeps_shape_and_dtype(shape: tuple[int, ...], dtype: torch.dtype):
    layer = MoELayer(16, 8, 4, 2, dtype=dtype)
    y = layer(torch.randn(shape).to(dtype))
    assert y.shape == shape and y.dtype == dtype


def test_layer_on_a_group_of_one_equals_the_unsharded_layer_bit_for_bit():
    torch.manual_seed(6)
    layer = MoELayer(32, 24, 8, 2)
    x = torch.randn(2, 45, 32)
    expected = layer(x)
    ep = OneRank(range(8), 8, 2, 32)
    assert torch.equal(layer.shard(ep)(x), expected)
    assert ep.calls == ["dispatch", "combine"]


def test_shards_hold_only_their_own_experts_and_their_outputs_add_up_to_the_unsharded_layer():
    torch.manual_seed(7)
    whole = MoELayer(32, 24, 7, 3, gated=True)
    x = torch.randn(61, 32)
    total = torch.zeros(61, 32)
    for owned in (range(0, 3), range(3, 5), range(5, 7), range(7, 7)):
        shard = MoELayer(32, 24, 7, 3, gated=True)
        shard.load_state_dict(whole.state_dict())
        shard.shard(OneRank(owned, 7, 3, 32))
        assert shard.local_experts == owned
        for name, weight in shard.experts.named_parameters():
            assert torch.equal(weight, whole.experts.get_parameter(unnumbered(name))[owned.start : owned.stop])
            assert weight.untyped_storage().nbytes() == weight.numel() * 4
        total += shard(x)
    torch.testing.assert_close(total, whole(x), rtol=1e-5, atol=1e-6)


def test_layer_built_with_ep_allocates_only_local_experts():
    layer = MoELayer(16, 8, 6, 2, ep=OneRank(range(2, 5), 6, 2, 16))
    assert layer.experts.num_experts == 3 and layer.local_experts == range(2, 5)
    assert layer.router.weight.shape == (6, 16)


def test_layers_built_with_ep_have_one_router_and_experts_that_do_not_depend_on_where_they_are():
    def drawn(*ranks: range) -> tuple[list[MoELayer], list[torch.Tensor]]:
        layers, after = [], []
        for owned in ranks:
            torch.manual_seed(5)
            layers.append(MoELayer(16, 8, 6, 2, gated=True, ep=OneRank(owned, 6, 2, 16)))
            after.append(torch.rand(1))
        return layers, after

    (whole,), (next_number,) = drawn(range(6))
    layers, after = drawn(range(0, 2), range(2, 6))
    for name, weight in whole.experts.named_parameters():
        assert len(weight.flatten(1).unique(dim=0)) == 6
        assert torch.equal(torch.cat([layer.experts.get_parameter(name) for layer in layers]), weight)
    for layer, number in zip(layers, after, strict=True):
        assert torch.equal(layer.router.weight, whole.router.weight) and torch.equal(number, next_number)


def test_rank_without_tokens_still_takes_part_forward_and_backward():
    ep = OneRank(range(0, 2), 4, 2, 16)
    layer = MoELayer(16, 8, 4, 2, ep=ep)
    x = torch.zeros(0, 16, requires_grad=True)
    layer(x).sum().backward()
    assert ep.calls == ["dispatch", "combine"]
    assert x.grad is not None and x.grad.shape == (0, 16)


def test_an_optimiser_that_was_made_before_trains_the_shard():
    layer = MoELayer(16, 8, 4, 2)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    layer.shard(OneRank(range(1, 3), 4, 2, 16))
    before = [weight.detach().clone() for weight in layer.experts.parameters()]
    layer(torch.randn(32, 16)).square().sum().backward()
    optimizer.step()
    assert all(not torch.equal(*pair) for pair in zip(before, layer.experts.parameters(), strict=True))
    tied = MoELayer(16, 8, 4, 2)
    tied.experts = layer.experts
    with pytest.raises(ValueError, match="shares the parameters"):
        tied.shard(OneRank(range(2, 4), 4, 2, 16))


def test_experts_with_biases_and_clamped_swiglu_equal_the_formula_in_float64():
    torch.manual_seed(11)
    activation = ClampedSwiGLU(alpha=1.5, limit=0.75)
    experts = GroupedExperts(3, 6, 5, activation=activation, gated=True, bias=True)
    assert {name for name, _ in experts.named_parameters()} == {"w_in", "w_gate", "w_out", "b_in", "b_gate", "b_out"}
    for bias in (experts.b_in, experts.b_gate, experts.b_out):
        assert bias.detach().count_nonzero() == 0
        nn.init.normal_(bias)
    x, counts = torch.randn(7, 6), [4, 0, 3]
    y = experts(x, torch.tensor(counts))
    owner = [0] * 4 + [2] * 3
    clamped = 0
    for row, expert, got in zip(x.double(), owner, y, strict=True):
        gate = row @ experts.w_gate[expert].double() + experts.b_gate[expert].double()
        up = row @ experts.w_in[expert].double() + experts.b_in[expert].double()
        clamped += int((gate > 0.75).sum()) * int((up.abs() > 0.75).sum())
        gate = torch.minimum(gate, torch.tensor(0.75))
        up = up.clamp(min=-0.75).clamp(max=0.75)
        inner = (up + 1) * gate / (1 + torch.exp(-1.5 * gate))
        expected = inner @ experts.w_out[expert].double() + experts.b_out[expert].double()
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
    assert clamped, "nothing was clamped"


def test_a_shared_expert_is_added_for_every_token_also_when_sharded():
    torch.manual_seed(12)
    layer = MoELayer(8, 12, 4, 2, gated=True, shared_ff_size=10)
    x = torch.randn(5, 8)
    with torch.no_grad():
        y = layer(x)
        shared = torch.stack([exact_expert(layer.shared, 0, row) for row in x])
        routed = exact_layer(layer, x, layer.route(x).topk_ids)
        torch.testing.assert_close(y.double(), routed + shared, rtol=1e-5, atol=1e-5)
        assert layer(x[:0]).shape == (0, 8)
        assert torch.equal(layer.shard(OneRank(range(4), 4, 2, 8))(x), y)


def test_a_router_with_biases_chooses_by_the_corrected_scores_and_weighs_by_the_others():
    config = RouterConfig("sigmoid", scale=2.5, num_groups=2, top_groups=1, bias=True, correction_bias=True)
    layer = MoELayer(8, 4, 6, 2, router_config=config, dtype=torch.bfloat16)
    assert layer.correction_bias.dtype == torch.float32 and "correction_bias" in layer.state_dict()
    nn.init.normal_(layer.router.bias)
    layer.correction_bias[:] = torch.tensor([0.0, 0.0, 0.0, 9.0, 8.0, 10.0])
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    routing = layer.route(x)
    assert routing.router_logits.dtype == torch.float32
    assert set(routing.topk_ids.flatten().tolist()) == {3, 5}
    logits = x.double() @ layer.router.weight.double().T + layer.router.bias.double()
    kept = logits.sigmoid().gather(1, routing.topk_ids.long())
    torch.testing.assert_close(routing.topk_weights.double(), 2.5 * kept / kept.sum(1, keepdim=True), rtol=1e-5, atol=0)
