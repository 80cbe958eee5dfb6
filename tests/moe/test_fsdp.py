"""Sharded layers in a model whose dense part `fully_shard` spreads over the same ranks."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.helpers.files import unnumbered
from thinwire.comm.communicator import Communicator
from thinwire.moe.layer import MoELayer
from thinwire.moe.parallel import ExpertParallel
from thinwire.testing import run_ranks

pytest.importorskip("numba", reason="CPU ranks need numba")

HIDDEN, EXPERTS, TOP_K, COUNTS = 48, 5, 2, (6, 0, 9)


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.dense = torch.nn.Linear(HIDDEN, HIDDEN)
        self.layers = torch.nn.ModuleList(MoELayer(HIDDEN, 16, EXPERTS, TOP_K) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dense(x)
        for layer in self.layers:
            x = x + layer(x)
        return x


def _inputs(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(COUNTS[rank], HIDDEN, generator=generator), torch.randn(
        COUNTS[rank], HIDDEN, generator=generator
    )


def _train(comm: Communicator, transport: str) -> None:
    whole, model = _Model(), _Model()
    with ExpertParallel(comm, EXPERTS, TOP_K, HIDDEN, max(COUNTS), wire="none", transport=transport) as ep:
        for layer in model.layers:
            layer.shard(ep)
        experts = {weight for layer in model.layers for weight in layer.experts.parameters()}
        mesh = DeviceMesh.from_group(comm.group, "cpu")
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, ignored_params=experts)
        fully_shard(model, mesh=mesh, ignored_params=experts)
        for _ in range(2):
            model.zero_grad()
            x, y = _inputs(comm.rank)
            (model(x) * y).sum().backward()
        mine = slice(ep.local_experts.start, ep.local_experts.stop)
    sum((whole(x) * y).sum() for x, y in map(_inputs, range(comm.size))).backward()
    for name, weight in model.named_parameters():
        want = whole.get_parameter(unnumbered(name)).grad
        if ".experts." in name:
            want, got = want[mine], weight.grad
        else:
            assert isinstance(weight.grad, DTensor)
            got = weight.grad.full_tensor() * comm.size  # of which there is the mean
        assert (got - want).abs().max() <= 3e-6 * want.abs().max(), name


@pytest.mark.exhaustive
@pytest.mark.parametrize("transport", ["direct", "staged"])
def test_a_model_under_fully_shard_trains_as_one_process(transport: str) -> None:
    run_ranks(_train, 3, transport, timeout=100)
