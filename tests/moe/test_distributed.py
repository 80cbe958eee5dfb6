"""`distributed`: models of a user's own train on several ranks as on one, and what would mix experts is refused."""

from __future__ import annotations

import functools
import itertools

import pytest

pytest.importorskip("numba", reason="the CPU kernels need numba")

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.helpers.speeds import exhaustive_but
from thinwire.errors import ArgumentError
from thinwire.moe.distributed import whole
from thinwire.testing import run_ranks

BATCH, WORDS, HIDDEN, EXPERTS, TOP_K = 24, 16, 8, 4, 2


class Own(nn.Module):
    """A user's layer: a router, and modules as experts."""

    def __init__(self, ep):
        super().__init__()
        self.ep, self.layer = ep, ep.next_layer()
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.experts = tw.LocalExperts(ep, lambda number: nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh()))

    def forward(self, x):
        weights, ids = self.router(x).softmax(-1).topk(TOP_K)
        d = self.ep.dispatch(x, ids, weights, layer=self.layer)
        return self.ep.combine(self.experts(d.tokens, d.expert_counts), d)


def made(comm, kind):
    """The same model on any number of ranks."""
    torch.manual_seed(0)
    ep = tw.ExpertParallel(comm, EXPERTS, TOP_K, HIDDEN, BATCH, wire="none")
    layer = Own(ep) if kind == "own" else tw.MoELayer(HIDDEN, 16, EXPERTS, TOP_K).shard(ep)
    return nn.Sequential(nn.Embedding(WORDS, HIDDEN), layer, nn.Linear(HIDDEN, WORDS)), ep


def trained(comm, kind, way, fused):
    """Of each step the loss and the norm of the gradients, then sums of the weights and of their average."""
    model, ep = made(comm, kind)
    if way == "fully_shard":
        ignored = {model.get_parameter(name) for name in tw.expert_parameter_names(model)}
        fully_shard(
            model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (comm.size,)), ignored_params=ignored
        )
    parallel = tw.distributed(model)
    average = torch.optim.swa_utils.AveragedModel(model) if way == "ddp" else None
    experts = [model.get_parameter(name) for name in tw.expert_parameter_names(model)]
    rest = [parameter for parameter in model.parameters() if not any(parameter is expert for expert in experts)]
    optimizers = [torch.optim.AdamW(part, lr=1e-2, fused=fused) for part in (rest, experts) if part]
    words = torch.randint(WORDS, (3, 2, BATCH), generator=torch.Generator().manual_seed(1))
    figures = []
    for step in words:
        for batch in step:  # gradients accumulate
            mine = batch[comm.rank :: comm.size]
            loss = nn.functional.cross_entropy(parallel(mine), (mine * 3) % WORDS)
            loss.backward()
            comm.all_reduce(loss := loss.detach() / comm.size)
        norm = tw.clip_grad_norm_(model, 0.5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if average is not None:
            average.update_parameters(model)
        figures += [loss.item(), norm.item()]
    for each in (model, *([average.module] if average else [])):
        shared = sum(float(whole(p.detach()).double().abs().sum()) for p in rest_of(each))
        own = torch.tensor(
            sum(float(each.get_parameter(n).double().abs().sum()) for n in tw.expert_parameter_names(each))
        )
        if comm.size > 1:
            comm.all_reduce(own)
        figures += [shared + own.item() if comm.size > 1 else shared]
    ep.close()
    return figures


def rest_of(model):
    names = set(tw.expert_parameter_names(model))
    return [parameter for name, parameter in model.named_parameters() if name not in names]


QUICK = [("own", 3, "ddp", False), ("own", 2, "fully_shard", True), ("MoELayer", 2, "ddp", True)]
ALL = [*itertools.product(("own", "MoELayer"), (2, 3), ("ddp", "fully_shard"), (False, True))]


@functools.cache
def of_one_process(kind):
    (figures,) = run_ranks(trained, 1, kind, "ddp", False)
    return figures


@pytest.mark.parametrize(("kind", "ranks", "way", "fused"), exhaustive_but(QUICK, ALL, several=True))
def test_ranks_train_as_one_process(kind, ranks, way, fused):
    one = of_one_process(kind)
    for figures in run_ranks(trained, ranks, kind, way, fused):
        assert figures == pytest.approx(one[: len(figures)], rel=2e-5)


def refused(comm):
    told = []

    def refusal(call):
        with pytest.raises(ArgumentError) as caught:
            call()
        told.append(str(caught.value))

    model, ep = made(comm, "own")
    plain, x = DistributedDataParallel(model), torch.arange(BATCH) % WORDS
    refusal(lambda: tw.distributed(plain))
    refusal(lambda: plain(x))
    model, layered = made(comm, "MoELayer")
    refusal(lambda: DistributedDataParallel(model)(x))
    model, again = made(comm, "MoELayer")
    parallel = tw.distributed(model)
    parallel(x).sum().backward()
    refusal(lambda: tw.distributed(model))
    model, sharded = made(comm, "own")
    fully_shard(model)
    refusal(lambda: tw.distributed(model))
    model, apart = made(comm.split(groups=[[rank] for rank in range(comm.size)]), "own")
    tw.distributed(model)  # no expert is spread
    refusal(lambda: tw.distributed([model]))
    return told


def test_what_would_mix_experts_is_refused():
    for told in run_ranks(refused, 2):
        before, own, layer, twice, sharded, kind = told
        assert "in DistributedDataParallel already" in before and "went through distributed before" in twice
        for text in (own, layer):
            assert "overwritten this rank's experts with rank 0's" in text and "tw.distributed(model)" in text
        assert "ignored_params" in sharded and "model is a list" in kind


def frozen(comm):
    model, ep = made(comm, "own")
    for name in {name for name, _ in model.named_parameters()} - set(tw.expert_parameter_names(model)):
        model.get_parameter(name).requires_grad_(False)
    assert tw.distributed(model) is model
    model(torch.arange(BATCH) % WORDS).sum().backward()
    return [float(model.get_parameter(name).grad.abs().sum()) > 0 for name in tw.expert_parameter_names(model)]


def test_experts_alone_may_be_trained():
    assert all(map(all, run_ranks(frozen, 2)))
