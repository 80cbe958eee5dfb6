"""`TrainingState`: a training saved by torch.distributed.checkpoint goes on, also on other ranks with other experts."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

pytest.importorskip("numba", reason="CPU ranks need numba")

import thinwire as tw
from tests.helpers.speeds import exhaustive_but
from thinwire.comm.communicator import Communicator
from thinwire.errors import ArgumentError, CheckpointError
from thinwire.moe.distributed import whole
from thinwire.testing import run_ranks

HIDDEN, EXPERTS, TOP_K, TOKENS = 16, 5, 2, 24


class Model(nn.Module):
    """Experts of both kinds, and dense weights."""

    def __init__(self, ep: tw.ExpertParallel, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.dense = nn.Linear(HIDDEN, HIDDEN)
        self.moe = tw.MoELayer(HIDDEN, 8, EXPERTS, TOP_K, gated=True, expert_bias=True).shard(ep)
        self.own = tw.LocalExperts(ep, lambda _: nn.Linear(HIDDEN, HIDDEN))
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.layer = ep.next_layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.moe(self.dense(x))
        weights, ids = self.router(x).softmax(-1).topk(TOP_K)
        d = self.own.ep.dispatch(x, ids, weights, layer=self.layer)
        return self.own.ep.combine(self.own(d.tokens, d.expert_counts), d)


def made(comm: Communicator, way: str, fused: bool, seed: int, expert_map=None):
    ep = tw.ExpertParallel(comm, EXPERTS, TOP_K, HIDDEN, TOKENS, wire="none", expert_map=expert_map)
    model = Model(ep, seed)
    if way == "fully_shard" and comm.size > 1:
        own = {model.get_parameter(name) for name in tw.expert_parameter_names(model)}
        fully_shard(model, mesh=DeviceMesh.from_group(comm.group, "cpu"), ignored_params=own)
    parallel = tw.distributed(model)
    experts = {id(model.get_parameter(name)) for name in tw.expert_parameter_names(model)}
    apart = way == "fully_shard"  # fused AdamW takes no DTensors beside other tensors
    parts = [[each for each in model.parameters() if (id(each) in experts) == mine] for mine in (False, True)]
    parts = [part for part in parts if part] if apart else [[*parts[0], *parts[1]]]
    rate = 1e-2 if seed == 3 else 0.5
    return ep, parallel, [torch.optim.AdamW(part, lr=rate, fused=fused) for part in parts]


def steps(comm: Communicator, model: nn.Module, optimizers: list[torch.optim.Optimizer], numbers: range) -> list[float]:
    """Losses, and the norms of gradients."""
    told = []
    for number in numbers:
        x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(number))[comm.rank :: comm.size]
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = model(x).square().sum() * comm.size / TOKENS
        loss.backward()
        norm = tw.clip_grad_norm_(model, 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.param_groups[0]["lr"] *= 0.9  # as a scheduler does
        mean = loss.detach() / comm.size
        comm.all_reduce(mean)
        told += [mean.item(), norm.item()]
    return told


def save(comm: Communicator, folder: str, way: str, fused: bool, expert_map=None) -> None:
    ep, model, optimizers = made(comm, way, fused, 3, expert_map)
    steps(comm, model, optimizers, range(2))
    checkpoint.save(
        {"training": tw.TrainingState(model, *optimizers), "step": 2}, checkpoint_id=folder, process_group=comm.group
    )
    ep.close()


def resume(comm: Communicator, folder: str, way: str, fused: bool, expert_map=None) -> list[float]:
    ep, model, optimizers = made(comm, way, fused, 4, expert_map)
    state = {"training": tw.TrainingState(model, *optimizers), "step": 0}
    checkpoint.load(state, checkpoint_id=folder, process_group=comm.group)
    assert state["step"] == 2
    assert all(group["lr"] == pytest.approx(1e-2 * 0.9**2) for each in optimizers for group in each.param_groups)
    told = steps(comm, model, optimizers, range(2, 4))
    ep.close()
    return told


def uninterrupted(comm: Communicator, fused: bool) -> list[float]:
    ep, model, optimizers = made(comm, "ddp", fused, 3)
    told = steps(comm, model, optimizers, range(4))
    ep.close()
    return told[4:]


@functools.cache
def of_one_process(fused: bool) -> list[float]:
    (told,) = run_ranks(uninterrupted, 1, fused)
    return told


QUICK = [("ddp", True, (2, 3)), ("fully_shard", False, (2, 1))]
ALL = [*itertools.product(("ddp", "fully_shard"), (False, True), ((2, 3), (2, 1), (3, 2), (1, 3), (2, 2)))]


@pytest.mark.parametrize(("way", "fused", "ranks"), exhaustive_but(QUICK, ALL, several=True))
def test_what_some_ranks_saved_others_go_on_with(way, fused, ranks, tmp_path: Path) -> None:
    before, after = ranks
    run_ranks(save, before, str(tmp_path), "ddp" if before == 1 else way, fused)
    for told in run_ranks(resume, after, str(tmp_path), way if after > 1 else "ddp", fused):
        assert told == pytest.approx(of_one_process(fused), rel=2e-5)


def test_experts_may_lie_elsewhere(tmp_path: Path) -> None:
    run_ranks(save, 2, str(tmp_path), "ddp", False, [1, 0, 1, 0, 0])
    for told in run_ranks(resume, 3, str(tmp_path), "ddp", False, [2, 1, 0, 0, 1]):
        assert told == pytest.approx(of_one_process(False), rel=2e-5)


def few(comm: Communicator, folder: str, loads: bool) -> dict[str, torch.Tensor]:
    """Fewer experts than ranks; weights, and what Adam keeps of them."""
    with tw.ExpertParallel(comm, 2, 1, HIDDEN, TOKENS, wire="none") as ep:
        torch.manual_seed(4 if loads else 3)
        model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), tw.MoELayer(HIDDEN, 8, 2, 1).shard(ep))
        model[0].weight.requires_grad_(False)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.5 if loads else 1e-2)
        state = tw.TrainingState(tw.distributed(model), optimizer)
        if loads:
            checkpoint.load({"training": state}, checkpoint_id=folder)
        else:
            model(torch.ones(TOKENS, HIDDEN)).square().sum().backward()
            optimizer.step()
            checkpoint.save({"training": state}, checkpoint_id=folder)
        assert optimizer.param_groups[0]["lr"] == 1e-2
        found = {name: value for name, value in state.state_dict().items() if isinstance(value, torch.Tensor)}
        return {name: value.clone() for name, value in found.items()}


@pytest.mark.parametrize(("saving", "loading"), [(3, 1), (1, 3)])
def test_a_rank_may_have_no_experts(saving, loading, tmp_path: Path) -> None:
    saved, loaded = (
        {name: value for rank in run_ranks(few, ranks, str(tmp_path), loads) for name, value in rank.items()}
        for ranks, loads in ((saving, False), (loading, True))
    )
    assert saved.keys() == loaded.keys() and "optimizer.state.1.experts.1.w_out.exp_avg_sq" in saved
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)


def by_rank(comm: Communicator, folder: str) -> None:
    """torch.save of each rank's own, joined by whoever loads."""
    ep, model, optimizers = made(comm, "ddp", False, 3)
    steps(comm, model, optimizers, range(1))
    state = tw.TrainingState(model, *optimizers).state_dict()
    torch.save(state, f"{folder}/{comm.rank}")
    comm.barrier()
    joined = {}
    for rank in range(comm.size):
        joined |= torch.load(f"{folder}/{rank}")
    _, other, others = made(comm, "ddp", False, 4)
    tw.TrainingState(other, *others).load_state_dict(joined)
    again = tw.TrainingState(other, *others).state_dict()
    assert state.keys() == again.keys()
    for name, value in state.items():
        assert torch.equal(value, again[name]) if isinstance(value, torch.Tensor) else value == again[name], name
    experts = [set(torch.load(f"{folder}/{rank}")) for rank in range(comm.size)]
    held = [{name for name in names if "experts." in name and "param_groups" not in name} for names in experts]
    assert held[0] and held[1] and not held[0] & held[1]
    del joined["model.dense.weight"]
    with pytest.raises(CheckpointError, match="model.dense.weight is missing"):
        tw.TrainingState(other, *others).load_state_dict(joined)
    with pytest.raises(CheckpointError, match="parameter of shape .2. that is not the model's"):
        tw.TrainingState(other, torch.optim.SGD([torch.ones(2)], lr=1.0)).state_dict()
    ep.close()


def test_each_ranks_own_state_names_its_experts(tmp_path: Path) -> None:
    run_ranks(by_rank, 2, str(tmp_path))


def of_wrong_size(comm: Communicator, folder: str) -> None:
    ep = tw.ExpertParallel(comm, EXPERTS, TOP_K, HIDDEN, TOKENS, wire="none")
    torch.manual_seed(0)
    checkpoint.save({"training": tw.TrainingState(Model(ep, 1))}, checkpoint_id=folder)
    other = Model(ep, 2)
    other.dense = nn.Linear(HIDDEN, HIDDEN, bias=False)
    before = {name: whole(value).clone() for name, value in other.state_dict().items()}
    other.extra = nn.Linear(2, 2)
    with pytest.raises(checkpoint.CheckpointException, match="Missing key.*model.extra"):
        checkpoint.load({"training": tw.TrainingState(other)}, checkpoint_id=folder)
    after = other.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    ep.close()


def test_what_is_not_in_the_checkpoint_is_an_error(tmp_path: Path) -> None:
    run_ranks(of_wrong_size, 2, str(tmp_path))


class Whole(nn.Module):
    """A layer that is not spread over ranks."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.moe = tw.MoELayer(HIDDEN, 8, 4, TOP_K)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.moe(x)


def fully_sharded(comm: Communicator, folder: str, saves: bool) -> dict[str, torch.Tensor]:
    model = fully_shard(Whole(3 if saves else 4), mesh=DeviceMesh.from_group(comm.group, "cpu"))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    state = tw.TrainingState(model, optimizer)
    if saves:
        model(torch.ones(3, HIDDEN)).square().sum().backward()
        optimizer.step()
        checkpoint.save({"training": state}, checkpoint_id=folder)
    else:
        checkpoint.load({"training": state}, checkpoint_id=folder)
    found = {name: value for name, value in state.state_dict().items() if isinstance(value, torch.Tensor)}
    return {name: whole(value).clone() for name, value in found.items()}


def test_a_layer_that_fully_shard_has_is_loaded(tmp_path: Path) -> None:
    saved, _ = run_ranks(fully_sharded, 2, str(tmp_path), True)
    assert "optimizer.state.moe.experts.w_in.exp_avg" in saved
    for rank in run_ranks(fully_sharded, 3, str(tmp_path), False):
        assert saved.keys() == rank.keys() and all(torch.equal(saved[name], rank[name]) for name in saved)


def layer_and(kind=torch.optim.AdamW, seed: int = 0, **settings):
    torch.manual_seed(seed)
    layer = tw.MoELayer(8, 6, 4, 2, expert_bias=True)
    return layer, kind(layer.parameters(), **{"lr": 1e-2, **settings})


def step(layer: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    optimizer.zero_grad()
    layer(torch.ones(5, 8)).square().sum().backward()
    optimizer.step()
    return layer.experts.w_in.detach().clone()


def copied(layer: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    state = tw.TrainingState(layer, optimizer).state_dict()
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()}


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.Adagrad, torch.optim.SGD])
def test_to_save_before_the_first_step_changes_nothing(kind) -> None:
    plain, saved = (layer_and(kind) for _ in range(2))
    tw.TrainingState(*saved).state_dict()
    for _ in range(2):
        assert torch.equal(step(*plain), step(*saved))


def test_gradients_of_before_are_kept_and_lose_no_state() -> None:
    layer, optimizer = layer_and()
    step(layer, optimizer)
    again, fresh = layer_and(seed=1)
    again(torch.ones(2, 8)).sum().backward()  # to see how much memory it takes
    gradient = again.experts.w_in.grad.clone()
    tw.TrainingState(again, fresh).load_state_dict(copied(layer, optimizer))
    assert torch.equal(again.experts.w_in.grad, gradient)
    assert torch.equal(step(layer, optimizer), step(again, fresh))


def test_a_parameter_without_a_gradient_so_far_can_be_loaded() -> None:
    layer, optimizer = layer_and()
    layer.experts.b_out.square().sum().backward()
    (layer.experts.b_out * torch.ones(4, 8)).sum().backward()  # of one parameter alone
    optimizer.step()
    kept = {key: value.clone() for key, value in optimizer.state[layer.experts.b_out].items()}
    names = copied(layer, optimizer).keys()
    assert all(torch.equal(optimizer.state[layer.experts.b_out][key], value) for key, value in kept.items())
    assert tw.TrainingState(*layer_and(seed=1)).state_dict().keys() == names


class PerExpert(torch.optim.Optimizer):
    """Keeps a number of each expert, as a trust ratio is."""

    def __init__(self, parameters, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for parameter in (each for group in self.param_groups for each in group["params"] if each.grad is not None):
            ratio = self.state[parameter].setdefault("ratio", torch.zeros(len(parameter)))
            ratio += torch.arange(1.0, len(parameter) + 1)


def test_a_number_of_each_expert_is_loaded_and_other_states_are_refused() -> None:
    layer, optimizer = layer_and(PerExpert)
    step(layer, optimizer)
    state = copied(layer, optimizer)
    assert state["optimizer.state.experts.2.w_in.ratio"] == 3
    again, fresh = layer_and(PerExpert, seed=1)
    tw.TrainingState(again, fresh).load_state_dict(state)
    assert torch.equal(fresh.state[again.experts.w_in]["ratio"], torch.arange(1.0, 5.0))
    with pytest.raises(CheckpointError, match="expected 4 rows, one for each expert"):
        tw.TrainingState(*layer_and(torch.optim.Adafactor)).state_dict()
    with pytest.raises(CheckpointError, match="LBFGS cannot be saved: a step without gradients raises TypeError"):
        tw.TrainingState(*layer_and(torch.optim.LBFGS)).state_dict()


def test_what_would_lose_something_is_refused() -> None:
    layer, optimizer = layer_and(torch.optim.SGD, momentum=0.9)
    step(layer, optimizer)
    state = copied(layer, optimizer)
    before = layer.experts.w_in.detach().clone()
    zeros = {name: torch.zeros_like(each) if isinstance(each, torch.Tensor) else each for name, each in state.items()}
    for name, value, told in (
        ("model.experts.3.w_in", torch.ones(1, 1), r"experts.3.w_in is \[1, 1\], expected \[8, 6\]"),
        ("model.router.weight", 5, "router.weight is int"),
    ):
        with pytest.raises(CheckpointError, match=told):
            tw.TrainingState(layer, optimizer).load_state_dict(zeros | {name: value})
        assert torch.equal(layer.experts.w_in, before)  # none of it
    with pytest.raises(CheckpointError, match="momentum is 0.9, and 0 here: make the optimiser as it was saved"):
        plain = torch.optim.SGD(layer.parameters(), lr=1.0)
        tw.TrainingState(layer, plain).load_state_dict(state)
    with pytest.raises(ArgumentError, match="two of the optimizers have the same parameter"):
        tw.TrainingState(layer, optimizer, torch.optim.SGD([layer.router.weight], lr=1.0))
    with pytest.raises(CheckpointError, match="is on meta"):
        tw.TrainingState(layer.to("meta")).state_dict()


class Flat(nn.Module):
    """Experts of a user's, whose rows lie in one matrix."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(experts * HIDDEN, HIDDEN))


def wrapped(comm: Communicator) -> None:
    ep = tw.ExpertParallel(comm, 4, TOP_K, HIDDEN, TOKENS, wire="none")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), tw.MoELayer(HIDDEN, 8, 4, TOP_K, ep=ep))
    names = tw.TrainingState(model).state_dict().keys()
    parallel = tw.distributed(model)
    for each in (parallel, torch.compile(parallel), torch.compile(model)):
        assert tw.TrainingState(each).state_dict().keys() == names
    with pytest.raises(CheckpointError, match="pass what wrappers, such as DistributedDataParallel, have inside"):
        tw.TrainingState(nn.ModuleDict({"net": parallel})).state_dict()
    model[1].experts = Flat(2)
    with pytest.raises(CheckpointError, match=r"is \[32, 16\], expected a row for each of 2 experts"):
        tw.TrainingState(model).state_dict()


def test_wrappers_change_no_name_or_are_refused() -> None:
    run_ranks(wrapped, 2)
