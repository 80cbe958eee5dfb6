"""Gradients of a sharded layer are clipped, and its weights averaged, as one process does it with the whole layer."""

from __future__ import annotations

import copy
import math

import pytest

pytest.importorskip("numba", reason="CPU ranks need numba")

import torch

import thinwire as tw
from tests.helpers.files import unnumbered
from thinwire.testing import run_ranks

HIDDEN, EXPERTS, TOP_K, TOKENS = 16, 5, 2, 12
NORMS = (2.0, 1.0, math.inf)


def _trained() -> tuple[tw.MoELayer, torch.Tensor]:
    """A whole layer that has gradients of all tokens."""
    torch.manual_seed(0)
    whole, x = tw.MoELayer(HIDDEN, 24, EXPERTS, TOP_K, gated=True), torch.randn(TOKENS, HIDDEN)
    whole(x).square().sum().backward()
    return whole, x


def _sharded(comm: tw.Communicator, whole: tw.MoELayer) -> tw.MoELayer:
    ep = tw.ExpertParallel(comm, EXPERTS, TOP_K, HIDDEN, TOKENS, wire="none", transport="staged")
    return copy.deepcopy(whole).shard(ep)


def _clipped(comm: tw.Communicator, whole: tw.MoELayer, x: torch.Tensor) -> tuple[list[torch.Tensor], float]:
    layer = _sharded(comm, whole)
    layer.zero_grad()
    layer(x[comm.rank :: comm.size]).square().sum().backward()
    comm.all_reduce(layer.router.weight.grad)
    alone = torch.nn.utils.clip_grad_norm_(layer.parameters(), math.inf)  # torch's own, which changes nothing here
    found = []
    for norm_type in NORMS:
        for share in (2.0, 0.5):  # of the norm that there is: nothing is scaled, and all is
            given, expected = copy.deepcopy(layer), copy.deepcopy(whole)
            for one, of in ((given, layer), (expected, whole)):
                for parameter, other in zip(one.parameters(), of.parameters(), strict=True):
                    parameter.grad = None if other.grad is None else other.grad.clone()
            most = share * float(torch.nn.utils.clip_grad_norm_(expected.parameters(), math.inf, norm_type))
            total = torch.nn.utils.clip_grad_norm_(expected.parameters(), most, norm_type)
            found.append(tw.clip_grad_norm_(given, most, norm_type))
            torch.testing.assert_close(found[-1].float(), total, rtol=1e-5, atol=0)
            for name, parameter in given.named_parameters():
                right = expected.get_parameter(unnumbered(name)).grad
                right = right[list(given.local_experts)] if name.startswith("experts") else right
                torch.testing.assert_close(parameter.grad, right, rtol=1e-5, atol=1e-6)
    return found, float(alone)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_ranks_clip_by_the_norm_that_one_process_has(size: int) -> None:
    ranks = run_ranks(_clipped, size, *_trained(), mode="thread", timeout=100)
    assert all(torch.equal(one, other) for found, _ in ranks for one, other in zip(found, ranks[0][0], strict=True))
    assert size == 1 or len({alone for _, alone in ranks}) == size, "torch's own differs between ranks"


def _averaged(comm: tw.Communicator, whole: tw.MoELayer, x: torch.Tensor) -> None:
    layer, whole = _sharded(comm, whole), copy.deepcopy(whole)
    averages = [torch.optim.swa_utils.AveragedModel(model) for model in (layer, whole)]
    for step in range(3):
        for model, average in zip((layer, whole), averages, strict=True):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.5 + step)
            average.update_parameters(model)
    with torch.no_grad():
        mine, right = averages[0](x[comm.rank :: comm.size]), averages[1](x)[comm.rank :: comm.size]
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(mine, layer(x[comm.rank :: comm.size]), rtol=0.1), "a copy has weights of its own"


@pytest.mark.parametrize("size", [1, 2])
def test_an_average_of_a_sharded_layer_is_that_of_one_process(size: int) -> None:
    run_ranks(_averaged, size, *_trained(), mode="thread", timeout=100)
