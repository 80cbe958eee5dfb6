"""A model with experts on several ranks is saved in one file, and read there, or on another number of ranks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict as distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrize, prune

pytest.importorskip("numba", reason="CPU ranks need numba")

import thinwire as tw
from thinwire.comm.communicator import Communicator
from thinwire.errors import ArgumentError, CheckpointError, ConfigMismatch
from thinwire.moe.distributed import whole
from thinwire.testing import RankError, run_ranks

HIDDEN, EXPERTS, TOP_K, TOKENS = 32, 5, 2, 24
DRAWING = threading.Lock()  # ranks that are threads share torch's generator: one draws its weights at a time


class Model(nn.Module):
    """Experts of both kinds, and dense weights."""

    def __init__(self, ep: tw.ExpertParallel, seed: int = 3) -> None:
        super().__init__()
        with DRAWING:
            torch.manual_seed(seed)
            self.dense = nn.Linear(HIDDEN, HIDDEN)
            self.moe = tw.MoELayer(HIDDEN, 16, EXPERTS, TOP_K).shard(ep)
            self.own = tw.LocalExperts(ep, lambda _: nn.Linear(HIDDEN, HIDDEN))
            self.router = nn.Linear(HIDDEN, EXPERTS)
        self.layer = ep.next_layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.moe(self.dense(x))
        weights, ids = self.router(x).softmax(-1).topk(TOP_K)
        d = self.own.ep.dispatch(x, ids, weights, layer=self.layer)
        return self.own.ep.combine(self.own(d.tokens, d.expert_counts), d)


def parallel(comm: Communicator) -> tw.ExpertParallel:
    return tw.ExpertParallel(comm, EXPERTS, TOP_K, HIDDEN, TOKENS, wire="none")


def batch(comm: Communicator) -> torch.Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))[comm.rank :: comm.size]


def save(comm: Communicator, path: str) -> torch.Tensor:
    with parallel(comm) as ep:
        model = Model(ep)
        tw.save_checkpoint(model, path, {"steps": "3"})
        return model(batch(comm)).detach()


def load(comm: Communicator, path: str) -> torch.Tensor:
    with parallel(comm) as ep:
        model = Model(ep, seed=4)
        assert tw.load_checkpoint(model, path) == {"steps": "3"}
        return model(batch(comm)).detach()


def test_any_number_of_ranks_reads_what_some_saved(tmp_path: Path) -> None:
    path = str(tmp_path / "model.safetensors")
    outputs = {0: run_ranks(save, 2, path)}
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
    outputs |= {ranks: run_ranks(load, ranks, path) for ranks in (2, 1, 3)}
    together = {}
    for ranks, parts in outputs.items():
        together[ranks] = torch.zeros(TOKENS, HIDDEN)
        for rank, part in enumerate(parts):
            together[ranks][rank :: len(parts)] = part
    assert torch.equal(together[0], together[2])
    torch.testing.assert_close(together[0], together[1])
    torch.testing.assert_close(together[0], together[3])


def weights_of(comm: Communicator) -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    with parallel(comm) as ep:
        experts = tw.LocalExperts(ep, lambda _: nn.Linear(HIDDEN, HIDDEN))
        return {name: weight.detach() for name, weight in experts.named_parameters()} | {"next": torch.rand(1)}


def test_experts_are_the_same_on_whichever_rank_they_are() -> None:
    alone = run_ranks(weights_of, 1)[0]
    shared = run_ranks(weights_of, 3)
    found = {name: weight for rank in shared for name, weight in rank.items()}
    assert found.keys() == alone.keys() and all(torch.equal(alone[name], found[name]) for name in alone)
    assert all(torch.equal(rank["next"], alone["next"]) for rank in shared)
    weights = torch.stack([alone[f"{number}.weight"] for number in range(EXPERTS)]).flatten(1)
    assert len(weights.unique(dim=0)) == EXPERTS


def misused(comm: Communicator, folder: str) -> None:
    path = Path(folder) / "model.safetensors"
    with parallel(comm) as ep:
        model = Model(ep)

        def refused(what: str) -> None:
            with pytest.raises(CheckpointError, match=what):
                tw.save_checkpoint(model, path)

        model.register_buffer("odd", torch.zeros(2 + comm.rank))
        refused("ranks have different models: rank 1 has odd, F32")
        model.odd = torch.zeros(2, dtype=torch.complex128)
        refused("odd is torch.complex128, which cannot be stored")
        model.odd = torch.zeros(2)
        if comm.rank == 1:
            model.extra = nn.Parameter(torch.zeros(1))
        refused("ranks have different models: rank 1 has extra")
        if comm.rank == 1:
            del model.extra
        tw.save_checkpoint(model, path)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with torch.no_grad():
            model.dense.weight += 1
        model.odd = torch.zeros(3)
        with pytest.raises(CheckpointError, match=r"odd is \(2,\), expected \(3,\)"):
            tw.load_checkpoint(model, path)
        assert torch.equal(model.dense.weight, before["dense.weight"] + 1)  # it is as it was
        model.odd = torch.zeros(2)
        assert tw.load_checkpoint(model, path) == {}
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_does_not_fit_is_refused_on_every_rank_and_changes_nothing(tmp_path: Path) -> None:
    run_ranks(misused, 2, str(tmp_path))
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


def mixed_up(comm: Communicator, folder: str) -> None:
    path = f"{folder}/mixed"
    with tw.ExpertParallel(comm, 4, 2, HIDDEN, TOKENS, wire="none") as ep:
        model = nn.ModuleDict({"own": tw.LocalExperts(ep, lambda _: nn.Linear(HIDDEN, HIDDEN))})
        model["by_hand"] = nn.Linear(3, 3)  # as experts would be that nobody knows to be a rank's own
        with torch.no_grad():
            model["by_hand"].weight.fill_(comm.rank)
        with pytest.raises(tw.CheckpointError, match="rank 1 has other values of by_hand.weight than rank 0"):
            tw.save_checkpoint(model, path)
        assert not Path(path).exists()
        parallel_model = nn.parallel.DistributedDataParallel(model)  # was told to ignore nothing: all is rank 0's now
        with pytest.raises(tw.CheckpointError, match="pass model.module"):
            tw.save_checkpoint(parallel_model, path)
        with pytest.raises(tw.CheckpointError, match="pass model.module"):
            tw.load_checkpoint(parallel_model, path)


def test_experts_that_are_no_ranks_own_are_told(tmp_path: Path) -> None:
    run_ranks(mixed_up, 2, str(tmp_path))


def full(comm: Communicator, path: str, sharded: bool) -> None:
    with parallel(comm) as ep:
        model = Model(ep)
        if sharded:
            own = {model.get_parameter(name) for name in tw.expert_parameter_names(model)}
            fully_shard(model, mesh=DeviceMesh.from_group(comm.group, "cpu"), ignored_params=own)
        if comm.rank == 1:
            model.moe.experts.w_in = nn.Parameter(model.moe.experts.w_in.to("meta"))
        tw.save_checkpoint(model, path)


@pytest.mark.parametrize("sharded", [False, True])
def test_where_one_rank_cannot_write_all_raise_and_nothing_is_left(sharded: bool, tmp_path: Path) -> None:
    with pytest.raises(RankError) as raised:
        run_ranks(full, 2, str(tmp_path / "model.safetensors"), sharded, mode="process" if sharded else "thread")
    assert "rank 1 could not write its part" in str(raised.value)
    assert not list(tmp_path.iterdir())


def only_one(comm: Communicator, path: str) -> list[str]:
    """Rank 1 alone passes what cannot be stored."""
    said = []
    with parallel(comm) as ep:
        model = Model(ep)
        for odd in (
            {"metadata": {"steps": 20}},
            {"metadata": 5},
            {"dtype": torch.int32},
            {"path": 5},
            {"path": f"{path}.other"},
            {"path": os.path.relpath(path, "..")},
        ):
            with pytest.raises((CheckpointError, ArgumentError, ConfigMismatch)) as raised:
                tw.save_checkpoint(model, **{"path": path, **(odd if comm.rank == 1 else {})})  # type: ignore[arg-type]
            said.append(str(raised.value))
    return said


def test_what_one_rank_cannot_store_is_an_error_on_all(tmp_path: Path) -> None:
    first, second = run_ranks(only_one, 2, str(tmp_path / "model.safetensors"), mode="thread")
    assert all("rank 1 could not describe its model" in said for said in first[:3]) and len(first) == 6
    assert ["metadata" in said for said in second] == [True] * 2 + [False] * 4
    assert "rank 1 could not take its path" in first[3] and "path is a int" in second[3]
    for told in (*first[4:], *second[4:]):
        assert "a checkpoint" in told and f"{tmp_path}/model.safetensors" in told
    assert not list(tmp_path.iterdir())


def test_what_a_killed_process_left_goes_with_the_next_save(tmp_path: Path) -> None:
    code = """if True:
        import os, signal, sys, torch, thinwire as tw
        from thinwire.moe import checkpoint
        checkpoint.write_rows = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        tw.save_checkpoint(torch.nn.Linear(2, 2), sys.argv[1])
    """
    path = tmp_path / "model.safetensors"
    assert subprocess.run([sys.executable, "-c", code, path]).returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    alive = left.rename(tmp_path / re.sub("-[0-9]+-", f"-{os.getpid()}-", left.name))  # as if it were ours
    elsewhere = tmp_path / ".unfinished-00000000-1-x"  # of another host
    elsewhere.mkdir()
    left.mkdir()
    tw.save_checkpoint(nn.Linear(2, 2), path)
    assert {alive, elsewhere, path} == set(tmp_path.iterdir())


def saved_by_torch(comm: Communicator, folder: Path) -> None:
    """No tool of torch's brings experts into others' places, whoever saves and loads."""
    with parallel(comm) as ep:
        first, second = (Model(ep, seed) for seed in (1, 2))
        pairs = [(model, torch.optim.Adam(model.parameters())) for model in (first, second)]
        for model, optimizer in pairs:
            for parameter in model.parameters():  # each rank's own, where they are experts'
                parameter.grad = parameter.detach().clone()
            optimizer.step()
        names = [name for name in first.state_dict() if "moe.experts" in name]
        assert names == [f"moe.experts.{name}_of_{'0to2' if comm.rank == 0 else '3to4'}" for name in ("w_in", "w_out")]
        files = [folder / f"{rank}" for rank in range(comm.size)]
        torch.save(first.state_dict(), files[comm.rank])
        torch.save(tw.MoELayer(HIDDEN, 16, EXPERTS, TOP_K).state_dict(), folder / f"whole {comm.rank}")
        comm.barrier()
        before = {name: value.clone() for name, value in second.state_dict().items()}
        whole = torch.load(folder / f"whole {comm.rank}")
        for options in ({}, {"strict": False}, {"assign": True}, {"assign": True, "strict": False}):
            with pytest.raises(RuntimeError, match=f"moe.experts.w_in_of_.* is there, and {names[0]} is not"):
                second.load_state_dict(torch.load(files[1 - comm.rank]), **options)
            with pytest.raises(RuntimeError, match=f"experts.w_in is there, and {names[0][4:]} is not"):
                second.moe.load_state_dict(whole, **options)
        assert all(torch.equal(before[name], second.state_dict()[name]) for name in names)
        merged = {name: value for file in files for name, value in torch.load(file).items()}
        with pytest.raises(RuntimeError, match="experts.w_in_of_.* is there, and experts.w_in is not"):
            tw.MoELayer(HIDDEN, 16, EXPERTS, TOP_K).load_state_dict({k[4:]: v for k, v in merged.items()}, strict=False)
        second.load_state_dict(merged, strict=False)  # among them are its own
        assert all(torch.equal(value, second.state_dict()[name]) for name, value in first.state_dict().items())
        second = Model(ep, 3)
        pairs[1] = (second, torch.optim.Adam(second.parameters()))
        states = [
            {"model": distributed.get_model_state_dict(model), "optimizer": distributed.get_optimizer_state_dict(*pair)}
            for pair in pairs
            for model in pair[:1]
        ]
        checkpoint.save(states[0], checkpoint_id=folder / "distributed")
        checkpoint.load(states[1], checkpoint_id=folder / "distributed")
        distributed.set_model_state_dict(second, states[1]["model"])
        distributed.set_optimizer_state_dict(*pairs[1], states[1]["optimizer"])
        for mine, other in zip(first.parameters(), second.parameters(), strict=True):
            own, its = (optimizer.state[each] for (_, optimizer), each in zip(pairs, (mine, other), strict=True))
            assert torch.equal(mine, other) and all(torch.equal(own[key], its[key]) for key in own)
        in_int8 = [tw.Int8Experts(model.moe.experts) for model in (first, second)]
        torch.save(in_int8[0].state_dict(), folder / f"int8 {comm.rank}")
        comm.barrier()
        with pytest.raises(RuntimeError, match="_of_.* is there, and s_in_of_.* is not"):
            in_int8[1].load_state_dict(torch.load(folder / f"int8 {1 - comm.rank}"))
        in_int8[1].load_state_dict(torch.load(folder / f"int8 {comm.rank}"))


def test_what_torch_saves_and_loads_is_never_another_ranks_experts(tmp_path: Path) -> None:
    run_ranks(saved_by_torch, 2, tmp_path)


class Renamed(nn.Module):
    """As wrappers for activation checkpointing do, it is not in the names of the state."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.inner = layer
        self._register_state_dict_hook(self._drop)

    @staticmethod
    def _drop(module: nn.Module, state: dict[str, torch.Tensor], prefix: str, _: object) -> None:
        for name in [name for name in state if name.startswith(f"{prefix}inner.")]:
            state[prefix + name.removeprefix(f"{prefix}inner.")] = state.pop(name)


def wrapped(comm: Communicator, path: str) -> None:
    torch.manual_seed(0)
    with parallel(comm) as ep:
        layer = tw.MoELayer(HIDDEN, 16, EXPERTS, TOP_K).shard(ep)
        model = nn.ModuleDict({"first": Renamed(layer), "second": layer})  # twice
        before = {name: value.clone() for name, value in model.state_dict().items()}
        assert (
            f"first.experts.w_in_of_{'0to2' if comm.rank == 0 else '3to4'}" in before
            and len(tw.expert_parameter_names(model)) == 2
        )
        tw.save_checkpoint(model, path)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        tw.load_checkpoint(model, path)
        assert all(
            torch.equal(value, before[name]) for name, value in model.state_dict().items() if ".experts." in name
        )


def pruned_and_parametrised(comm: Communicator, path: str, loads: bool) -> dict[str, torch.Tensor]:
    with parallel(comm) as ep:
        experts = Model(ep, 4 if loads else 3).moe.experts
        held = dict(experts.named_parameters())
        w_in, w_out = (next(name for name in held if name.startswith(start)) for start in ("w_in", "w_out"))
        prune.custom_from_mask(experts, w_in, torch.ones_like(held[w_in]) if loads else (held[w_in] > 0).float())
        parametrize.register_parametrization(experts, w_out, nn.Softplus())
        layer = nn.ModuleDict({"moe": tw.MoELayer(HIDDEN, 16, EXPERTS, TOP_K).shard(ep)})
        layer["moe"].experts = experts
        (tw.load_checkpoint if loads else tw.save_checkpoint)(layer, path)
        return {str(number): row.clone() for number, row in zip(ep.local_experts, getattr(experts, w_out), strict=True)}


def test_experts_may_be_pruned_and_parametrised(tmp_path: Path) -> None:
    path = str(tmp_path / "model.safetensors")
    saved, loaded = (
        {k: v for each in run_ranks(pruned_and_parametrised, n, path, n == 3) for k, v in each.items()} for n in (2, 3)
    )
    with safe_open(path, framework="pt") as file:
        assert not any("_of_" in name for name in file.keys())
        assert 0 < file.get_tensor("moe.experts.w_in_mask").mean() < 1
    assert saved.keys() == loaded.keys() and all(torch.equal(saved[name], loaded[name]) for name in saved)


def test_experts_are_known_whatever_they_are_called(tmp_path: Path) -> None:
    path = str(tmp_path / "model.safetensors")
    run_ranks(wrapped, 2, path)
    with safe_open(path, framework="pt") as file:
        assert file.get_slice("first.experts.w_in").get_shape() == [EXPERTS, HIDDEN, 16]


def few_experts(comm: Communicator, path: str) -> None:
    torch.manual_seed(0)
    with tw.ExpertParallel(comm, 2, 1, HIDDEN, TOKENS, wire="none") as ep:
        layer = tw.MoELayer(HIDDEN, 16, 2, 1).shard(ep)
        own = tw.LocalExperts(ep, lambda _: nn.Linear(HIDDEN, HIDDEN))
        model = nn.ModuleDict({"layer": layer, "own": own})
        before = {name: value.clone() for name, value in model.state_dict().items()}
        tw.save_checkpoint(model, path)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        tw.load_checkpoint(model, path)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_rank_may_have_no_experts(ranks: int, tmp_path: Path) -> None:
    run_ranks(few_experts, ranks, str(tmp_path / "model.safetensors"))


def sharded(comm: Communicator, path: str, loads: bool) -> dict[str, torch.Tensor]:
    with parallel(comm) as ep:
        model = Model(ep, seed=4 if loads else 3)
        own = {model.get_parameter(name) for name in tw.expert_parameter_names(model)}
        fully_shard(model, mesh=DeviceMesh.from_group(comm.group, "cpu"), ignored_params=own)
        (tw.load_checkpoint if loads else tw.save_checkpoint)(model, path)
        return {name: whole(value).detach() for name, value in model.named_parameters()}


def test_what_fully_shard_has_sharded_is_stored_whole(tmp_path: Path) -> None:
    path = str(tmp_path / "sharded.safetensors")
    before, after = run_ranks(sharded, 2, path, False), run_ranks(sharded, 2, path, True)
    for was, now in zip(before, after, strict=True):
        assert was.keys() == now.keys() and all(torch.equal(was[name], now[name]) for name in was)
    with safe_open(path, framework="pt") as file:
        assert file.get_slice("dense.weight").get_shape() == [HIDDEN, HIDDEN]
        assert file.get_slice("moe.experts.w_in").get_shape() == [EXPERTS, HIDDEN, 16]
    others = run_ranks(sharded, 3, path, True)
    assert all(torch.equal(rank["dense.weight"], before[0]["dense.weight"]) for rank in others)
