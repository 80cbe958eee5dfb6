"""Properties of saving and loading: exact values, only a rank's own experts are read, misfits are refused."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.files import record_reads, unnumbered
from thinwire.errors import CheckpointError
from thinwire.moe import checkpoint
from thinwire.moe.checkpoint import load_checkpoint, read_metadata, save_checkpoint
from thinwire.moe.layer import MoELayer
from thinwire.tools.demo.tiny_moe import TinyMoE, TinyMoEConfig

SMALL = TinyMoEConfig(hidden_size=16, num_layers=2, num_heads=2, num_experts=7, ff_size=12, context=32)


class Owner:
    """What a model asks of an ExpertParallel before its first forward pass."""

    def __init__(self, local_experts: range, num_experts: int, top_k: int, hidden_size: int) -> None:
        self.local_experts = local_experts
        self.num_experts, self.top_k, self.hidden_size = num_experts, top_k, hidden_size
        self.comm = SimpleNamespace(size=2, rank=0)

    def next_layer(self) -> int:
        return 1


def new_model(seed: int, experts: range | None = None) -> TinyMoE:
    torch.manual_seed(seed)
    return TinyMoE(
        SMALL, ep=None if experts is None else Owner(experts, SMALL.num_experts, SMALL.top_k, SMALL.hidden_size)
    )


def is_expert_tensor(name: str) -> bool:
    return ".experts." in name


@pytest.fixture
def saved(tmp_path: Path) -> tuple[TinyMoE, Path]:
    model = new_model(0)
    path = tmp_path / "model.safetensors"
    save_checkpoint(model, path, {"config": SMALL.to_json(), "note": "odd é"})
    return model, path


def test_round_trip_gives_every_tensor_as_it_was(saved):
    model, path = saved
    other = new_model(1)
    metadata = load_checkpoint(other, path)
    assert metadata == read_metadata(path) == {"config": SMALL.to_json(), "note": "odd é"}
    stored = load_file(path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor) and torch.equal(stored[name], tensor), name


def test_floats_are_rounded_where_that_is_asked_for(saved):
    model, path = saved
    model.register_buffer("steps", torch.tensor([3, 2**40 + 1]))
    save_checkpoint(model, path, dtype=torch.bfloat16)
    for name, tensor in load_file(path).items():
        want = model.state_dict()[name]
        want = want.bfloat16() if want.is_floating_point() else want
        assert tensor.dtype == want.dtype and torch.equal(tensor, want), name


@pytest.mark.parametrize("owned", [range(0, 3), range(3, 5), range(6, 7), range(7, 7), range(0, 7)])
def test_a_rank_gets_the_slice_of_its_own_experts(saved, owned: range):
    model, path = saved
    shard = new_model(1, owned)
    load_checkpoint(shard, path)
    held = {unnumbered(name): tensor for name, tensor in shard.state_dict().items()}
    for name, tensor in model.state_dict().items():
        expected = tensor[owned.start : owned.stop] if is_expert_tensor(name) else tensor
        assert torch.equal(held[name], expected), name


def test_a_rank_asks_the_file_for_no_other_expert(saved, monkeypatch: pytest.MonkeyPatch):
    record = record_reads(monkeypatch)
    shard = new_model(1, range(2, 4))
    load_checkpoint(shard, saved[1])
    assert dict(record) == {unnumbered(name): tensor.numel() for name, tensor in shard.state_dict().items()}
    assert len(record) == len(dict(record))


def damaged(tensors: dict[str, torch.Tensor], damage: str) -> str:
    """Change ``tensors`` in place; returns what the error must say."""
    expert = "blocks.1.moe.experts.w_in"
    if damage == "missing":
        del tensors[expert]
        return f"{expert} (7, 16, 12) is missing"
    if damage == "unexpected":
        tensors["blocks.9.bias"] = torch.zeros(3)
        return "blocks.9.bias (3,) is unexpected"
    if damage == "too few experts":
        tensors[expert] = tensors[expert][:6].clone()
        return f"{expert} is (6, 16, 12), expected (7, 16, 12)"
    if damage == "ill-shaped":
        tensors["embedding.weight"] = torch.zeros(256, 15)
        return "embedding.weight is (256, 15), expected (256, 16)"
    tensors["embedding.weight"] = torch.zeros(256, 16, dtype=torch.int8)
    return "embedding.weight is torch.int8"


@pytest.mark.parametrize("damage", ["missing", "unexpected", "too few experts", "ill-shaped", "integers"])
@pytest.mark.parametrize("owned", [None, range(0, 2)], ids=["whole", "sharded"])
def test_a_file_that_does_not_fit_is_refused_by_name_and_leaves_the_model_alone(saved, damage, owned):
    _, path = saved
    tensors = load_file(path)
    message = damaged(tensors, damage)
    save_file(tensors, path)
    model = new_model(1, owned)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load_checkpoint(model, path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_cut_off_or_foreign_file_is_refused(saved, tmp_path: Path):
    _, path = saved
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(path.read_bytes()[:-1])
    foreign = tmp_path / "foreign.safetensors"
    foreign.write_bytes(b"not a checkpoint at all")
    for bad in (cut, foreign, tmp_path):
        with pytest.raises(CheckpointError, match=re.escape(str(bad))):
            load_checkpoint(new_model(1), bad)
        with pytest.raises(CheckpointError):
            read_metadata(bad)
    with pytest.raises(FileNotFoundError):
        load_checkpoint(new_model(1), tmp_path / "absent.safetensors")


def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(saved, monkeypatch: pytest.MonkeyPatch):
    _, path = saved
    before = path.read_bytes()

    def full_disk(*arguments):
        raise OSError("no space left on device")

    monkeypatch.setattr(checkpoint, "write_rows", full_disk)
    with pytest.raises(OSError, match="no space"):
        save_checkpoint(new_model(1), path, {})
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


def test_a_string_that_cannot_be_read_again_is_not_stored(saved):
    before = saved[1].read_bytes()
    for odd in ({"a": "\ud800"}, {"\udfff": "a"}):
        with pytest.raises(CheckpointError, match="not a complete safetensors file"):
            save_checkpoint(new_model(1), saved[1], odd)
    assert saved[1].read_bytes() == before and list(saved[1].parent.iterdir()) == [saved[1]]


@pytest.mark.skipif(os.name != "posix", reason="file modes are POSIX")
def test_the_file_has_the_mode_of_any_other_new_file(saved):
    path = saved[1]
    other = path.with_name("other")
    other.touch()
    assert path.stat().st_mode == other.stat().st_mode


def test_a_bare_layer_can_be_saved_and_loaded_too(tmp_path: Path):
    torch.manual_seed(0)
    layer = MoELayer(8, 6, 4, 2, gated=True)
    save_checkpoint(layer, tmp_path / "layer.safetensors", {})
    shard = MoELayer(8, 6, 4, 2, gated=True, ep=Owner(range(1, 3), 4, 2, 8))
    load_checkpoint(shard, tmp_path / "layer.safetensors")
    assert torch.equal(shard.experts.w_gate, layer.experts.w_gate[1:3])
