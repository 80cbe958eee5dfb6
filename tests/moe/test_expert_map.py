"""Any map of experts to ranks: rounds, layers and checkpoints are those of contiguous blocks, but for numbers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import thinwire as tw
from tests.helpers.files import unnumbered
from tests.helpers.hosts import for_transport
from tests.helpers.wires import assert_same_bits, relative_error
from tests.moe.pretrained.families import LAYER, NAMES, new_tensors, write_checkpoint
from thinwire.comm import Communicator
from thinwire.errors import ArgumentError, ConfigMismatch, RoutingError
from thinwire.moe.pretrained import load_moe_layer, save_moe_layers
from thinwire.testing import run_ranks

pytest.importorskip("numba", reason="CPU ranks need numba")

RANKS, EXPERTS, TOP_K, HIDDEN, MOST = 4, 10, 3, 72, 23
BLOCKS = [0, 0, 0, 1, 1, 1, 2, 2, 3, 3]
UNEVEN = [3 - rank for rank in BLOCKS]  # in other numbers than without a map
TRANSPORTS = ("direct", "staged", "two_level")
SEEN = (
    "tokens", "weights", "expert_ids", "source", "records", "record_ids", "record_weights", "record_source",
    "expert_counts", "expert_offsets",
)  # fmt: skip


def _random_map(seed: int) -> list[int]:
    owners = BLOCKS.copy()
    random.Random(seed).shuffle(owners)
    assert owners != BLOCKS
    return owners


def _in_blocks(owners: list[int]) -> list[int]:
    """The experts in the order in which contiguous blocks would have them."""
    return [expert for rank in range(RANKS) for expert, owner in enumerate(owners) if owner == rank]


def _make(comm: Communicator, transport: str, **options: Any) -> tw.ExpertParallel:
    comm = for_transport(comm, transport)
    return tw.ExpertParallel(comm, EXPERTS, TOP_K, HIDDEN, MOST, **{"transport": transport, "wire": "none"} | options)


def _tokens(rank: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of one rank none; some ids are missing, some repeat."""
    generator = torch.Generator().manual_seed(31 * seed + rank)
    count = (MOST, 5, 0, 12)[(rank + seed) % 4]
    x = torch.randn(count, HIDDEN, generator=generator)
    ids = torch.randint(-1, EXPERTS, (count, TOP_K), generator=generator)
    if count > 2:
        ids[1], ids[2, 1] = -1, ids[2, 0]
    return x, ids, torch.rand(count, TOP_K, generator=generator)


def _experts(d: Any, rows: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Rows through experts of their own numbers; those of padding stay zero."""
    ids = d.expert_ids
    return torch.sin(rows * (1 + numbers[ids.clamp(min=0)])[:, None]) * (ids >= 0)[:, None]


def _rounds(comm: Communicator, transport: str, wire: str) -> None:
    for seed in range(3):
        owners = _random_map(seed)
        order = torch.tensor(_in_blocks(owners))
        renumbered = torch.cat([order.argsort(), torch.tensor([-1])])  # -1 stays, as it is the last
        options = {"wire": wire, "align": 1 + 3 * (seed % 2)}
        given = (owners, tuple(owners), torch.tensor(owners, dtype=torch.int32))[seed]
        with (
            _make(comm, transport, expert_map=given, **options) as ep,
            _make(comm, transport, **options) as plain,
        ):
            assert ep.transport == plain.transport == transport and "by expert_map" in ep.explain()
            assert ep.local_experts == tuple(e for e in range(EXPERTS) if owners[e] == comm.rank)
            x, ids, weights = _tokens(comm.rank, seed)
            grads = []
            for each, these in ((ep, ids.int()), (plain, renumbered[ids])):
                numbers = torch.tensor(each.local_experts) if each is ep else order[list(plain.local_experts)]
                mine, of_weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
                if seed == 2:
                    d = each.dispatch_finish(each.dispatch_start(mine, these, of_weights))
                else:
                    d = each.dispatch(mine, these, of_weights)
                seen = [getattr(d, name).detach().clone() for name in SEEN]
                y = each.combine(_experts(d, d.tokens, numbers), d)
                torch.sin(y).sum().backward()
                grads.append([*seen, y.detach(), mine.grad, of_weights.grad])
            for name, got, expected in zip((*SEEN, "y", "dx", "dw"), *grads, strict=True):
                assert got.dtype == expected.dtype and torch.equal(got, expected), name
            if wire == "none":  # by token, without ranks
                per_token = torch.sin(x[:, None] * (1 + ids)[..., None]) * (weights * (ids >= 0))[..., None]
                whole = per_token.sum(1)
                assert len(x) == 0 or relative_error(whole, grads[0][-3]) <= 1e-6


@pytest.mark.parametrize("wire", ["none", "int8"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rounds_and_gradients_are_those_of_contiguous_blocks_to_the_bit(transport: str, wire: str) -> None:
    run_ranks(_rounds, RANKS, transport, wire, mode="thread", timeout=100)


def _layer(comm: Communicator, transport: str, owners: list[int], weights: dict[str, torch.Tensor]) -> None:
    whole, mine = (tw.MoELayer(HIDDEN, 16, EXPERTS, TOP_K, gated=True) for _ in range(2))
    for layer in (whole, mine):
        layer.load_state_dict(weights)
    x = torch.randn(RANKS * 7, HIDDEN, generator=torch.Generator().manual_seed(5)).requires_grad_()
    expected = whole(x)
    expected.square().sum().backward()
    own = slice(7 * comm.rank, 7 * comm.rank + 7)
    with _make(comm, transport, expert_map=owners) as ep:
        mine.shard(ep)
        part = x.detach()[own].clone().requires_grad_()
        y = mine(part)
        y.square().sum().backward()
    assert relative_error(expected[own].detach(), y.detach()) <= 1e-6
    assert relative_error(x.grad[own], part.grad) <= 1e-6
    for name, weight in mine.experts.named_parameters():
        assert (
            relative_error(whole.experts.get_parameter(unnumbered(name)).grad[list(ep.local_experts)], weight.grad)
            <= 1e-6
        )


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_layer_and_its_gradients_are_those_of_the_unsharded_one(transport: str) -> None:
    weights = tw.MoELayer(HIDDEN, 16, EXPERTS, TOP_K, gated=True).state_dict()
    run_ranks(_layer, RANKS, transport, _random_map(7), weights, mode="thread", timeout=100)


def _blocks(comm: Communicator) -> None:
    with _make(comm, "direct", expert_map=BLOCKS, invariant=True) as ep:
        assert ep.local_experts == range(BLOCKS.index(comm.rank), BLOCKS.index(comm.rank) + BLOCKS.count(comm.rank))
        assert ep._assembly.rounds.places_of_ids is None and "map" not in ep.explain()


def test_contiguous_blocks_are_no_map() -> None:
    run_ranks(_blocks, RANKS, mode="thread")


def _disagree(comm: Communicator) -> None:
    for others in (None, _random_map(2)):
        with pytest.raises(ConfigMismatch, match=r"expert_map: .* on ranks 0, 1, 2; .* on rank 3"):
            _make(comm, "auto", expert_map=_random_map(1) if comm.rank < 3 else others)
    many = [number % RANKS for number in range(1 << 14)]  # of which the difference is not shown
    if comm.rank == 3:
        many[-1], many[-2] = many[-2:]
    with pytest.raises(ConfigMismatch, match=r"expert_map: .*SHA-256 \w+' on ranks 0, 1, 2; .*SHA-256 \w+' on rank 3"):
        tw.ExpertParallel(comm, len(many), TOP_K, HIDDEN, MOST, expert_map=many)


def test_ranks_with_different_maps_all_get_an_error() -> None:
    run_ranks(_disagree, RANKS, mode="thread")


class _Begun(RoutingError):
    """A round of such ids was about to begin."""


def _ids_that_are_none(comm: Communicator) -> None:
    owners = _random_map(3)
    with _make(comm, "direct", expert_map=owners) as ep:
        x, ids, weights = torch.ones(1, HIDDEN), torch.tensor([[0, 1, 2]]), torch.ones(1, TOP_K)
        for number in (EXPERTS, -2, 2**31 - 1, -(2**31)):
            ids[0, 1] = number if comm.rank == 1 else 1
            with pytest.raises(RoutingError, match="topk_ids runs from" if comm.rank == 1 else "rank 1"):
                ep.dispatch(x, ids, weights)
        ids[0, 1] = -1
        d = ep.dispatch(x, ids, weights)
        assert torch.equal(ep.combine(d.tokens, d), 2 * x)

        def begin(lane: int, x: torch.Tensor, topk_ids: torch.Tensor, *_: object) -> None:
            raise _Begun(topk_ids.flatten().tolist())

        # As on CUDA, where kernels alone look at ids, and report those that are neither -1 nor experts.
        rounds = ep._assembly.rounds
        rounds.check_tokens, rounds.begin = lambda *_: None, begin  # type: ignore[assignment, method-assign]
        given = [-(2**31), -5, -2, -1, *range(EXPERTS), EXPERTS, EXPERTS + 3, 2**31 - 1]
        expected = [-2, -2, -2, -1, *map(_in_blocks(owners).index, range(EXPERTS)), EXPERTS, EXPERTS, EXPERTS]
        for dtype in (torch.int32, torch.int64):
            with pytest.raises(_Begun) as caught:
                ep.dispatch(x, torch.tensor([given], dtype=dtype), weights)
            assert caught.value.args[0] == expected


def test_ids_of_no_expert_mean_the_same_as_without_a_map() -> None:
    run_ranks(_ids_that_are_none, RANKS, mode="thread")


def _rebuilt(comm: Communicator) -> None:
    first, second = _random_map(1), _random_map(2)
    x, ids, weights = _tokens(comm.rank, 0)

    def scaled(ep: tw.ExpertParallel) -> torch.Tensor:
        d = ep.dispatch(x, ids, weights)
        return ep.combine(d.tokens * (1 + torch.tensor(ep.local_experts)[d.expert_ids])[:, None], d)

    with _make(comm, "staged", expert_map=first) as ep:
        expected = scaled(ep)
        layer = tw.MoELayer(HIDDEN, 16, EXPERTS, TOP_K, ep=ep)
        single = tw.LocalExperts(ep, lambda _: nn.Identity())
        assert [*single] == [str(expert) for expert in ep.local_experts]
        with pytest.raises(ArgumentError, match="expert_map gives the ranks"):
            ep.rebuild(comm, expert_map=UNEVEN)
        assert relative_error(expected, scaled(ep)) <= 1e-6 or len(x) == 0  # it goes on
        ep.rebuild(comm, expert_map=second)
        assert ep.local_experts == tuple(e for e in range(EXPERTS) if second[e] == comm.rank)
        assert relative_error(expected, scaled(ep)) <= 1e-6 or len(x) == 0
        moved = ep.local_experts != layer.local_experts
        assert moved == (comm.rank != 0)  # which has the same experts in both maps
        with pytest.raises(RoutingError, match="since it was rebuilt" if moved else "refused what dispatch was given"):
            layer(x)
        if moved:
            with pytest.raises(RoutingError, match="since it was rebuilt"):
                single(x[:0], torch.zeros(len(single), dtype=torch.int64))
        fewer = comm.split(groups=[range(3), [3]])  # rank 3 alone; a map of four ranks does not fit
        if comm.rank < 3:
            with pytest.raises(ArgumentError, match="from 0 to 2"):
                ep.rebuild(fewer, expert_map=first)
        ep.rebuild(fewer)
        assert isinstance(ep.local_experts, range)
        scaled(ep)


def test_rebuild_takes_a_map_of_the_new_group_and_otherwise_has_blocks() -> None:
    run_ranks(_rebuilt, RANKS, mode="thread")


def _shared(comm: Communicator) -> None:
    owners = _random_map(1)
    sizes = (EXPERTS, TOP_K, HIDDEN, MOST)
    mapped = tw.ExpertParallel.shared(comm, *sizes, expert_map=owners)
    assert tw.ExpertParallel.shared(comm, *sizes, expert_map=torch.tensor(owners)) is mapped
    plain = tw.ExpertParallel.shared(comm, *sizes)
    assert plain is not mapped and tw.ExpertParallel.shared(comm, *sizes, expert_map=BLOCKS) is plain


def test_layers_share_what_has_the_same_map() -> None:
    run_ranks(_shared, RANKS, mode="thread")


class _Model(nn.Module):
    def __init__(self, ep: tw.ExpertParallel | None, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.moe = tw.MoELayer(HIDDEN, 16, EXPERTS, TOP_K)
        self.moe.load_state_dict(weights)
        if ep is not None:
            self.moe.shard(ep)


def _saved(comm: Communicator, path: str, weights: dict[str, torch.Tensor]) -> None:
    zeros = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    states = []
    for seed in (1, 2, None):  # other maps than the one that was saved with
        with _make(comm, "staged", expert_map=None if seed is None else _random_map(seed)) as ep:
            model = _Model(ep, weights if seed == 1 else zeros)
            optimizer = torch.optim.AdamW(model.parameters())
            if seed == 1:
                for parameter in model.parameters():
                    parameter.grad = parameter.detach() / 3
                optimizer.step()
                tw.save_checkpoint(model, path)
                dcp.save({"training": tw.TrainingState(model, optimizer)}, checkpoint_id=f"{path} and optimizer")
            else:
                tw.load_checkpoint(model, path)
                before = {name: weight.clone() for name, weight in model.state_dict().items()}
                dcp.load({"training": tw.TrainingState(model, optimizer)}, checkpoint_id=f"{path} and optimizer")
                assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
            whole = {}
            for name, parameter in model.moe.experts.named_parameters():
                for expert, row in zip(ep.local_experts, range(len(parameter)), strict=True):
                    state = optimizer.state[parameter]
                    whole[unnumbered(name), expert] = torch.stack(
                        [parameter[row], state["exp_avg"][row], state["exp_avg_sq"][row]]
                    )
            states.append({key: part for of_rank in comm.all_gather_object(whole) for key, part in of_rank.items()})
    assert states[0].keys() == states[1].keys() == states[2].keys() and len(states[0]) == 2 * EXPERTS
    for key, part in states[0].items():
        assert part[0].any() and torch.equal(part, states[1][key]) and torch.equal(part, states[2][key]), key
    if comm.rank == 0:
        model = _Model(None, zeros)
        tw.load_checkpoint(model, path)
        for name, parameter in model.moe.experts.named_parameters():
            assert_same_bits(name, torch.stack([states[0][name, e][0] for e in range(EXPERTS)]), parameter.detach())


def test_checkpoints_are_the_same_with_any_map(tmp_path: Path) -> None:
    weights = tw.MoELayer(HIDDEN, 16, EXPERTS, TOP_K).state_dict()
    run_ranks(_saved, RANKS, str(tmp_path / "model.safetensors"), weights)


def _pretrained(comm: Communicator, folder: Path, copy: Path) -> None:
    whole = load_moe_layer(folder, LAYER)
    with tw.ExpertParallel(comm, 8, whole.top_k, 16, MOST, wire="none", expert_map=[0, 1, 1, 0, 0, 1, 0, 1]) as ep:
        layer = load_moe_layer(folder, LAYER, ep)
        for name, weight in layer.experts.named_parameters():
            assert torch.equal(weight, whole.experts.get_parameter(unnumbered(name))[list(ep.local_experts)])
        x = torch.randn(9, 16, generator=torch.Generator().manual_seed(comm.rank))
        with torch.no_grad():
            assert relative_error(whole(x), layer(x)) <= 1e-6
            for weight in layer.experts.parameters():
                weight.mul_(2)
        save_moe_layers({LAYER: layer}, folder, copy)
        twice = load_moe_layer(copy, LAYER)
        for name, weight in twice.experts.named_parameters():
            assert torch.equal(weight, 2 * whole.experts.get_parameter(name))


@pytest.mark.parametrize("form", ["published", "fused"])
def test_pretrained_experts_go_to_their_owners_and_back(form: str, tmp_path: Path) -> None:
    config = NAMES["deepseek_v3"]["config"]
    folder = write_checkpoint(tmp_path / "folder", new_tensors("deepseek_v3", form), config, 1)
    run_ranks(_pretrained, 2, folder, tmp_path / "copy", mode="thread")
