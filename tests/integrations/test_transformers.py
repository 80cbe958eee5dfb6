"""transformers' models with their experts spread over ranks by thinwire, against the same models whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

pytest.importorskip("transformers", reason="`make test-all` installs transformers and runs this")
pytest.importorskip("numba", reason="CPU ranks need numba")

import transformers
from transformers.distributed import DistributedConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import thinwire as tw
from tests.helpers.speeds import exhaustive_but
from tests.integrations.models import CASES, Case, quiet, run, write_models
from thinwire.comm import Communicator
from thinwire.errors import CapacityError, RoutingError, WireFormatError
from thinwire.integrations.transformers import NAMES, EPImplementationInterface, ThinwireEP, register
from thinwire.testing import run_ranks

#: The most that int8 may cost a layer, relative L2, as it may its gradients: a round of both legs costs .0096.
INT8_GATE = 0.02


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    write_models(made)
    return made


@pytest.fixture(scope="module")
def of_2_ranks(folder: Path) -> Any:
    return run(2, folder, ["thinwire:none", "thinwire:int8"])


@pytest.fixture(scope="module")
def of_4_ranks(folder: Path) -> Any:
    return run(4, folder, ["thinwire:none", "thinwire:int8"], timeout=1200.0)


# Four ranks that share a batch on two cores take minutes, most of them in gloo.
_OF_TWO = [case for case in CASES if case[1] == 2]


@pytest.mark.parametrize(
    "case", exhaustive_but(_OF_TWO, CASES), ids=lambda case: f"{case[0]}-{case[1]} ranks-{case[2]}"
)
def test_a_model_over_ranks_is_the_whole_one(case: Case, request: pytest.FixtureRequest) -> None:
    figures = request.getfixturevalue(f"of_{case[1]}_ranks")[case]
    exact, int8 = figures["thinwire:none"], figures["thinwire:int8"]
    assert exact["logits"] <= 1e-6 and max(exact["layers"]) <= 1e-6
    assert exact["tokens_equal"] and exact["flips"] == 0
    # Where ranks share a batch, transformers cuts other products in pieces too, and they round differently.
    limit = 1e-6 if case[2].startswith("a batch each") else 2e-6
    assert max(exact["gradients"].values()) <= limit and set(exact["gradients"]) == {"experts", "router", "rest"}
    assert 1e-3 < min(int8["layers"]) and max(int8["layers"]) <= INT8_GATE
    if int8["flips"] == 0:  # else a token has other experts, and its logits differ by more than rounding
        assert int8["logits"] <= INT8_GATE


# --- what models do not show ------------------------------------------------------------------------------------------

HIDDEN, EXPERTS, TOP_K = 32, 4, 2


def new_experts(ranks: int = 1, rank: int = 0) -> Any:
    """The same experts everywhere, or a rank's share of them."""
    config = transformers.AutoConfig.for_model(
        "qwen3_moe", hidden_size=HIDDEN, moe_intermediate_size=16, num_experts=EXPERTS
    )
    config._experts_implementation = "grouped_mm"
    whole = Qwen3MoeExperts(config)
    generator, share = torch.Generator().manual_seed(3), EXPERTS // ranks
    for name, weight in list(whole.named_parameters()):
        values = torch.randn(weight.shape, generator=generator) / weight.shape[-1] ** 0.5
        setattr(whole, name, torch.nn.Parameter(values[rank * share : (rank + 1) * share]))
    whole.num_experts, whole._is_expert_parallel = share, ranks > 1
    return whole


def batch(tokens: int, experts: list[int], seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, weights = torch.randn(tokens, HIDDEN, generator=generator), torch.rand(tokens, TOP_K, generator=generator)
    return x, torch.tensor(experts).expand(tokens, TOP_K), weights


def of_mesh(comm: Communicator, name: str) -> tuple[Any, ThinwireEP]:
    """A rank's share of the experts, and how tokens come there."""
    mesh = init_device_mesh("cpu", (comm.size, 1), mesh_dim_names=("ep", "tp"))
    experts = new_experts(comm.size, comm.rank)
    return experts, EPImplementationInterface()[name](experts, mesh["ep"], mesh["tp"])


def check_layer(comm: Communicator, layer: ThinwireEP, experts: Any, tokens: list[int], chosen: list[int]) -> None:
    """Output and gradients are those of all experts on the tokens of all ranks."""
    drawn = [batch(count, chosen, seed) for seed, count in enumerate(tokens)]
    x, ids, weights = (tensor.clone() for tensor in drawn[comm.rank])
    x.requires_grad_(), weights.requires_grad_()
    whole = new_experts()
    for all_x, _, all_weights in drawn:
        all_x.requires_grad_(), all_weights.requires_grad_()
    expected = [whole.forward(*each) for each in drawn]
    experts.zero_grad(set_to_none=True)
    y = layer(x, ids, weights)
    torch.testing.assert_close(y, expected[comm.rank], rtol=1e-5, atol=1e-6)
    y.square().sum().backward()
    torch.cat(expected).square().sum().backward()
    torch.testing.assert_close(x.grad, drawn[comm.rank][0].grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(weights.grad, drawn[comm.rank][2].grad, rtol=1e-5, atol=1e-5)
    own = slice(comm.rank * experts.num_experts, (comm.rank + 1) * experts.num_experts)
    for name, weight in experts.named_parameters():
        torch.testing.assert_close(weight.grad, whole.get_parameter(name).grad[own], rtol=1e-5, atol=1e-4)


def uneven_batches(comm: Communicator) -> None:
    experts, layer = of_mesh(comm, "thinwire:none")
    check_layer(comm, layer, experts, [5, 0], [0, 2])  # a rank without tokens
    check_layer(comm, layer, experts, [7, 3], [3, 2])  # and one without rows for its experts, which learn nothing
    check_layer(comm, layer, experts, [0, 0], [0, 1])
    before = layer._expert_parallel(*batch(7, [0, 1], 0)[:2])
    x, ids, weights = batch(3, [0, 3], 9)
    x.requires_grad_()
    y = layer(x, ids, weights)
    check_layer(comm, layer, experts, [300, 2], [1, 2])  # larger than anything before
    y.sum().backward()  # of the round before that
    assert bool(x.grad.any()) and layer._expert_parallel(*batch(1, [0, 1], 0)[:2]) is not before
    assert not before._closed and layer._capacity == 512
    again = of_mesh(comm, "thinwire:none")[1]
    assert again._expert_parallel(*batch(290, [0, 1], 0)[:2]) is layer._expert_parallel(*batch(0, [0, 1], 0)[:2])
    with torch.inference_mode():
        layer(*batch(700, [0, 1], 0))
    check_layer(comm, layer, experts, [600, 5], [1, 2])


def experts_alone(comm: Communicator) -> None:
    experts, layer = of_mesh(comm, "thinwire:none")
    whole, drawn = new_experts(), [batch(4, [1, 2], seed) for seed in range(2)]
    layer(*drawn[comm.rank]).sum().backward()
    torch.cat([whole.forward(*each) for each in drawn]).sum().backward()
    own = slice(comm.rank * 2, comm.rank * 2 + 2)
    torch.testing.assert_close(experts.down_proj.grad, whole.down_proj.grad[own], rtol=1e-5, atol=1e-5)
    experts.requires_grad_(False)
    assert not layer(*drawn[comm.rank]).requires_grad


def own_settings(comm: Communicator) -> None:
    register("tests:small", wire="int8:64", grad_wire="int8", max_tokens=4)
    _, layer = of_mesh(comm, "tests:small")
    ep = layer._expert_parallel(*batch(4, [0, 1], 0)[:2])
    assert (str(ep.wire), str(ep.grad_wire), ep.max_tokens) == ("int8:64", "int8", 4)
    with pytest.raises(CapacityError, match="5 tokens were passed; this ExpertParallel accepts at most max_tokens=4"):
        layer(*batch(5, [0, 1], 0))
    x, ids, weights = batch(4, [0, 3], 1)
    error = (layer(x, ids, weights) - new_experts().forward(x, ids, weights)).norm() / x.norm()
    assert 1e-3 < error < INT8_GATE


def a_layer_left_out(comm: Communicator) -> None:
    """The layers share an ExpertParallel; rank 1 raised between its two layers, and takes the next batch."""
    layers = [of_mesh(comm, "thinwire:none")[1] for _ in range(2)]
    drawn = batch(4, [1, 2], 0)
    for layer in layers:
        layer(*drawn)
    layers[0](*drawn)
    with pytest.raises(RoutingError, match="of layer"):
        layers[1 - comm.rank](*drawn)


@pytest.mark.parametrize("check", [uneven_batches, experts_alone, own_settings, a_layer_left_out])
def test_a_layer_over_two_ranks(check: Any) -> None:
    run_ranks(check, 2)


def with_checkpointing(comm: Communicator, folder: str) -> None:
    quiet()
    tw.init(timeout=120.0)
    config = DistributedConfig(fsdp_size=2, ep_size=2, ep_implementation="thinwire:none")
    grads = []
    for checkpointing in (False, True):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, distributed_config=config).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        ids = torch.randint(0, 90, (2, 9), generator=torch.Generator().manual_seed(comm.rank))
        model(input_ids=ids).logits.square().mean().backward()
        grads.append([weight.grad.full_tensor() for weight in model.parameters()])
    for kept, recomputed in zip(*grads, strict=True):
        assert torch.equal(kept, recomputed)


def test_gradient_checkpointing_changes_nothing(folder: Path) -> None:
    run_ranks(with_checkpointing, 2, str(folder / "qwen3_moe"), timeout=120)


def test_names() -> None:
    for name in NAMES:
        assert issubclass(EPImplementationInterface()[name], ThinwireEP)
    assert {"thinwire", "thinwire:int8", "thinwire:none"} <= set(NAMES)
    with pytest.raises(WireFormatError, match="int9"):
        register("thinwire:int9", wire="int9")
    assert "thinwire:int9" not in EPImplementationInterface()
