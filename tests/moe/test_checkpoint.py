"""Properties of saving and loading: exact values, only a rank's own experts are read, misfits are refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.helpers.files import unnumbered, writer_of
from thinwire.errors import CheckpointError
from thinwire.moe import checkpoint, checkpoint_writer
from thinwire.moe.checkpoint import load_checkpoint, read_metadata
from thinwire.moe.checkpoint_writer import save_checkpoint
from thinwire.moe.layer import MoELayer
from thinwire.moe.tiny import TinyMoE, TinyMoEConfig

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
    _, path = saved
    elements: dict[str, int] = {}

    class Slice:
        def __init__(self, name, inner):
            self.name, self.inner = name, inner

        def get_shape(self):
            return self.inner.get_shape()

        def __getitem__(self, index):
            value = self.inner[index]
            elements[self.name] = elements.get(self.name, 0) + value.numel()
            return value

    class Recorder:
        def __init__(self, *args, **kwargs):
            self.inner = safe_open(*args, **kwargs)

        def __enter__(self):
            self.file = self.inner.__enter__()
            return self

        def __exit__(self, *exc):
            return self.inner.__exit__(*exc)

        def keys(self):
            return self.file.keys()

        def metadata(self):
            return self.file.metadata()

        def get_slice(self, name):
            return Slice(name, self.file.get_slice(name))

        def get_tensor(self, name):
            value = self.file.get_tensor(name)
            elements[name] = elements.get(name, 0) + value.numel()
            return value

    monkeypatch.setattr(checkpoint, "safe_open", Recorder)
    shard = new_model(1, range(2, 4))
    load_checkpoint(shard, path)
    assert elements == {unnumbered(name): tensor.numel() for name, tensor in shard.state_dict().items()}


def test_other_experts_bytes_may_be_garbage(saved):
    model, path = saved
    tensors = load_file(path)
    for name in filter(is_expert_tensor, tensors):
        tensors[name][:2], tensors[name][4:] = float("nan"), float("nan")
    save_file(tensors, path, metadata=read_metadata(path))
    shard = new_model(1, range(2, 4))
    load_checkpoint(shard, path)
    for name in filter(is_expert_tensor, tensors):
        assert torch.equal(shard.state_dict()[f"{name}_of_2to3"], model.state_dict()[name][2:4])


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
    for bad in (cut, foreign):
        with pytest.raises(CheckpointError, match=re.escape(str(bad))):
            load_checkpoint(new_model(1), bad)
        with pytest.raises(CheckpointError):
            read_metadata(bad)
    with pytest.raises(FileNotFoundError):
        load_checkpoint(new_model(1), tmp_path / "absent.safetensors")


def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(saved, monkeypatch: pytest.MonkeyPatch):
    _, path = saved
    before = path.read_bytes()

    def full_disk(descriptor, octets, offset):
        raise OSError("no space left on device")

    monkeypatch.setattr(checkpoint_writer, "write_at", full_disk)
    with pytest.raises(OSError, match="no space"):
        save_checkpoint(new_model(1), path, {})
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


def test_a_link_that_lies_in_wait_is_not_followed(saved, tmp_path: Path):
    _, path = saved
    other = tmp_path / "other"
    other.write_text("precious")
    path.with_name(path.name + ".unfinished").symlink_to(other)
    save_checkpoint(new_model(1), path, {})
    assert other.read_text() == "precious"
    assert {file.name for file in tmp_path.iterdir()} == {path.name, "other", path.name + ".unfinished"}


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


@pytest.mark.parametrize("call", [read_metadata, lambda path: load_checkpoint(new_model(0), path)])
def test_what_is_no_regular_file_is_refused_and_not_waited_for(call, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with writer_of(pipe), pytest.raises(CheckpointError, match="not a regular file"):
        call(pipe)
    for place in ("/dev/zero", tmp_path):
        with pytest.raises(CheckpointError, match="not a regular file"):
            call(place)


@pytest.mark.parametrize("call", ["read_metadata(pipe)", "load_checkpoint(MoELayer(8, 6, 4, 2), pipe)"])
def test_a_pipe_to_which_nobody_writes_is_not_waited_for(call: str, tmp_path: Path) -> None:
    """In a process of its own: no exception ends who waits there."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    code = f"from thinwire.moe.checkpoint import *; from thinwire import MoELayer; pipe = {str(pipe)!r}; {call}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "CheckpointError" in done.stderr and "not a regular file" in done.stderr
