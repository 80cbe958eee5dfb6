"""torchtitan's dispatcher contract, its layer and its trainer with thinwire between the ranks, beside its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

pytest.importorskip("torchtitan", reason="torchtitan is not installed: docs/integrations-torchtitan.md")
pytest.importorskip("numba", reason="CPU ranks need numba")

from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common import config_utils
from torchtitan.models.common import token_dispatcher as theirs

from tests.helpers.speeds import exhaustive_but
from tests.integrations.torchtitan_trainer import losses
from thinwire.comm import Communicator, as_communicator
from thinwire.errors import CapacityError, RoutingError, WireFormatError
from thinwire.integrations.torchtitan import ThinwireTokenDispatcher
from thinwire.moe.parallel import ExpertParallel
from thinwire.testing import run_ranks

EXPERTS, TOP_K, HIDDEN = 8, 2, 256
#: The most that int8 may cost a layer and its gradients, relative L2.
INT8_GATE = 0.02
EVEN, UNEVEN, IDLE = [24, 24, 24, 24], [24, 5, 1, 17], [9, 0, 0, 4]
#: Tokens of each rank, and the experts that they choose among.
BATCHES: dict[str, tuple[list[int], list[int]]] = {
    "ranks alike": (EVEN, [*range(EXPERTS)]),
    "ranks of different sizes": (UNEVEN, [*range(EXPERTS)]),
    "ranks without tokens": (IDLE, [*range(EXPERTS)]),
    "experts without rows": (EVEN, [0, 3, 5]),
    "a rank without rows": (UNEVEN, [0, 1]),
}


def drawn(size: int, tokens: list[int], chosen: list[int]) -> tuple[torch.Tensor, ...]:
    """Tokens, logits of all experts and the output's gradient for all ranks, and the experts' weights."""
    generator = torch.Generator().manual_seed(7)
    rows = sum(tokens[:size])
    x, logits, dy = (torch.randn(rows, width, generator=generator) for width in (HIDDEN, EXPERTS, HIDDEN))
    others = torch.ones(EXPERTS, dtype=torch.bool)
    others[chosen] = False
    logits = logits.masked_fill(others, -1e4)
    return x, logits, dy, torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=generator) / HIDDEN**0.5


def whole(x: torch.Tensor, logits: torch.Tensor, dy: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
    """Output and gradients of all experts on all tokens, without a dispatcher."""
    inputs = [tensor.clone().requires_grad_() for tensor in (x, logits, weights)]
    scores, ids = inputs[1].softmax(-1).topk(TOP_K)
    y = (torch.einsum("th,tkhj->tkj", inputs[0], inputs[2][ids]) * scores[..., None]).sum(1)
    return [y.detach(), *torch.autograd.grad(y, inputs, dy)]


def through(dispatcher: Any, x: Any, logits: Any, weights: Any) -> torch.Tensor:
    """A layer in float32: torchtitan's routing and dispatcher, and an expert that is one product."""
    scores, ids = logits.softmax(-1).topk(TOP_K)
    rows, counts, metadata = dispatcher.dispatch(x, scores, ids, torch.bincount(ids.flatten(), minlength=EXPERTS))
    parts = zip(rows.split(counts.tolist()), weights, strict=True)
    return dispatcher.combine(torch.cat([part @ weight for part, weight in parts]), metadata, x)


def mesh_of(comm: Communicator) -> DeviceMesh:
    set_spmd_backend("partial_dtensor")  # their own all-to-all asks for a mesh that the trainer sets otherwise
    return init_device_mesh("cpu", (comm.size,), mesh_dim_names=("ep",))


def wired(mesh: DeviceMesh | None, kind: Any, **settings: Any) -> Any:
    dispatcher = kind.Config(num_experts=EXPERTS, top_k=TOP_K, **settings).build()
    dispatcher.wire_meshes(ep_mesh=mesh)
    return dispatcher


def largest(got: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest relative L2 error; absolute where nothing is expected."""
    errors = (
        ((a - b).norm() / (b.norm() if b.any() else 1.0)).item() for a, b in zip(got, expected, strict=True) if len(b)
    )
    return max(errors, default=0.0)


def contract(comm: Communicator) -> dict[str, dict[str, float]]:
    """For each batch and dispatcher the largest error of the output and the three gradients, against the whole."""
    mesh, share = mesh_of(comm), EXPERTS // comm.size
    kinds = {
        "theirs": wired(mesh, theirs.AllToAllTokenDispatcher),
        "none": wired(mesh, ThinwireTokenDispatcher, wire="none", num_max_tokens_per_rank=24),
        "int8": wired(mesh, ThinwireTokenDispatcher, wire="int8", num_max_tokens_per_rank=24, hidden_dim=HIDDEN),
        "int8, int8 back": wired(
            mesh, ThinwireTokenDispatcher, wire="int8", grad_wire="int8", num_max_tokens_per_rank=24
        ),
    }
    found: dict[str, dict[str, float]] = {}
    for batch, (tokens, chosen) in BATCHES.items():
        all_x, all_logits, all_dy, all_weights = drawn(comm.size, tokens, chosen)
        y, dx, dlogits, dweights = whole(all_x, all_logits, all_dy, all_weights)
        first = sum(tokens[: comm.rank])
        here = slice(first, first + tokens[comm.rank])
        own = slice(comm.rank * share, (comm.rank + 1) * share)
        expected = [y[here], dx[here], dlogits[here], dweights[own]]
        for name, dispatcher in kinds.items():
            inputs = [tensor.clone().requires_grad_() for tensor in (all_x[here], all_logits[here], all_weights[own])]
            got = through(dispatcher, *inputs)
            gradients = torch.autograd.grad(got, inputs, all_dy[here])
            found.setdefault(batch, {})[name] = largest([got.detach(), *gradients], expected)
    return found


@pytest.mark.parametrize("ranks", exhaustive_but([2], [2, 4]))
def test_a_layer_over_ranks_is_the_whole_one_as_over_torchtitans_all_to_all(ranks: int) -> None:
    everywhere = [item for found in run_ranks(contract, ranks, timeout=240) for item in found.items()]
    for batch, errors in everywhere:
        assert max(errors["theirs"], errors["none"]) <= 1e-6, (batch, errors)
        assert max(errors["int8"], errors["int8, int8 back"]) <= INT8_GATE, (batch, errors)
    assert max(errors["int8"] for _, errors in everywhere) > 1e-3  # else nothing was quantised


# --- what the comparison does not show --------------------------------------------------------------------------------


def in_order(comm: Communicator) -> None:
    mesh = mesh_of(comm)
    first, second = (wired(mesh, ThinwireTokenDispatcher, wire="none") for _ in range(2))
    x, logits, _, weights = drawn(1, [12], [*range(EXPERTS)])
    own = weights[comm.rank * 4 :][:4].clone().requires_grad_()
    with torch.no_grad():
        eight, again = (through(dispatcher, x[:8], logits[:8], own) for dispatcher in (first, second))
        twelve = through(second, x, logits, own)  # more tokens than before, and no number of them given
    assert torch.equal(eight, again)
    torch.testing.assert_close(twelve[:8], eight, rtol=1e-5, atol=1e-5)
    assert not eight.requires_grad
    through(first, x, logits, own).sum().backward()  # neither tokens nor scores want a gradient
    scores, ids = logits.softmax(-1).topk(TOP_K)
    whole_weights = weights.clone().requires_grad_()
    (torch.einsum("th,tkhj->tkj", x, whole_weights[ids]) * scores[..., None]).sum().backward()
    # All ranks have the same tokens here.
    torch.testing.assert_close(own.grad, comm.size * whole_weights.grad[comm.rank * 4 :][:4], rtol=1e-5, atol=1e-4)
    # One rank leaves out the first layer.
    with torch.no_grad(), pytest.raises(RoutingError, match="of layer"):
        through((first, second)[comm.rank], x, logits, own)


def sizes(comm: Communicator) -> None:
    mesh = mesh_of(comm)
    settings: dict[str, Any] = {"wire": "int8:64", "num_max_tokens_per_rank": 8, "hidden_dim": HIDDEN}
    dispatcher = wired(mesh, ThinwireTokenDispatcher, **settings, combine_wire="none", grad_wire="int8")
    assert "shared ExpertParallel: 1" in as_communicator(mesh).explain()  # since the mesh was wired
    made = ExpertParallel.shared(mesh, EXPERTS, TOP_K, HIDDEN, 8, wire="int8:64", combine_wire="none", grad_wire="int8")
    x, logits, _, weights = drawn(1, [9], [*range(EXPERTS)])
    scores, ids = logits.softmax(-1).topk(TOP_K)
    *_, metadata = dispatcher.dispatch(x[:8], scores[:8], ids[:8], torch.bincount(ids[:8].flatten()))
    assert metadata.state[0] is made
    with pytest.raises(CapacityError, match="9 tokens were passed; this ExpertParallel accepts at most max_tokens=8"):
        through(dispatcher, x, logits, weights[:4])


@pytest.mark.parametrize("check", [in_order, sizes])
def test_a_dispatcher_over_two_ranks(check: Any) -> None:
    run_ranks(check, 2)


def test_without_expert_parallelism_it_is_torchtitans_local_one() -> None:
    x, logits, _, weights = drawn(1, [7], [*range(EXPERTS)])
    ours, local = (wired(None, kind) for kind in (ThinwireTokenDispatcher, theirs.LocalTokenDispatcher))
    assert torch.equal(through(ours, x, logits, weights), through(local, x, logits, weights))


def test_a_format_that_there_is_not_is_refused_before_anything_is_built() -> None:
    with pytest.raises(WireFormatError, match="int9"):
        ThinwireTokenDispatcher.Config(num_experts=EXPERTS, top_k=TOP_K, wire="int9").build()


@pytest.mark.parametrize("backend", ["standard", "deepep", "hybridep"])
def test_an_override_takes_the_place_of_every_layers_dispatcher_and_has_its_sizes(backend: str) -> None:
    settings: dict[str, Any] = {} if backend == "standard" else {"num_max_tokens_per_rank": 48}
    layer = config_utils.make_routed_experts_config(
        dim=HIDDEN, hidden_dim=32, num_experts=EXPERTS, top_k=TOP_K, param_init={}, comm_backend=backend, **settings
    )
    target = "thinwire.integrations.torchtitan.dispatcher"
    apply_overrides(OverrideConfig(imports=[(target, {"wire": "int4", "grad_wire": "int8"})]), layer)
    sized = {} if backend == "standard" else settings | {"hidden_dim": HIDDEN}
    assert layer.token_dispatcher == ThinwireTokenDispatcher.Config(
        num_experts=EXPERTS, top_k=TOP_K, wire="int4", grad_wire="int8", **sized
    )
    with pytest.raises(ValueError, match="wires"):
        apply_overrides(OverrideConfig(imports=[(target, {"wires": "int4"})]), layer)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("ranks", "tensor_parallel"), [(2, 1), (4, 2)])
def test_torchtitans_trainer_learns_alike_with_it(ranks: int, tensor_parallel: int, tmp_path: Path) -> None:
    for module in ("torchdata", "datasets", "tokenizers", "tensorboard"):
        pytest.importorskip(module, reason="torchtitan's trainer imports it")
    runs = [None, {"wire": "none"}, {"wire": "int8"}, {"wire": "int8", "grad_wire": "int8"}]
    for theirs_alone, *others in run_ranks(losses, ranks, str(tmp_path), 6, tensor_parallel, runs, timeout=280):
        assert len(theirs_alone) == 6 and theirs_alone[-1] < 0.85 * theirs_alone[0]
        assert others[0] == pytest.approx(theirs_alone, rel=1e-5)
        for with_int8 in others[1:]:
            assert with_int8 != theirs_alone and with_int8 == pytest.approx(theirs_alone, rel=2e-3)
