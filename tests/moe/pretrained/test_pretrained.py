"""Properties of layers read from Hugging Face's checkpoints, and written back; each family, each form of experts."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import thinwire as tw
from tests.helpers.files import record_reads, unnumbered
from tests.helpers.speeds import exhaustive_but
from tests.moe.pretrained.families import FORMS, LAYER, NAMES, block_reference, new_tensors, write_checkpoint
from thinwire.comm import Communicator
from thinwire.errors import ArgumentError, CheckpointError
from thinwire.moe.layer import MoELayer
from thinwire.moe.pretrained import load_moe_layer, save_moe_layers
from thinwire.testing import run_ranks

ONE_OF_EACH = [("qwen3_moe", "published"), ("deepseek_v3", "fused"), ("gpt_oss", "published")]
#: With the kind of ranks; a process starts slowly.
TOGETHER = [("deepseek_v3", "fused", "process")] + [(family, form, "thread") for family, form in reversed(FORMS)]


class Owner:
    """What a layer asks of an ExpertParallel before its first forward pass."""

    def __init__(self, local_experts: range, family: str) -> None:
        config = NAMES[family]["config"]
        self.local_experts = local_experts
        self.num_experts, self.top_k, self.hidden_size = num_experts(family), config["num_experts_per_tok"], 16

    def next_layer(self) -> int:
        return 1


def num_experts(family: str) -> int:
    return 8 if family == "deepseek_v3" else 5


def made(folder: Path, family: str, form: str, shards: int = 1, **changes: Any) -> Path:
    return write_checkpoint(folder, new_tensors(family, form), NAMES[family]["config"] | changes, shards)


def new_tokens(number: int) -> torch.Tensor:
    """The same each time: of others two experts' scores may be as good as equal, and then rounding decides."""
    return torch.randn(number, 16, generator=torch.Generator().manual_seed(1))


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("family,form", FORMS)
def test_a_layer_computes_what_its_family_says(family: str, form: str, shards: int, tmp_path: Path):
    folder = made(tmp_path, family, form, shards)
    before = torch.get_rng_state()
    layer = load_moe_layer(folder, LAYER)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.requires_grad for parameter in layer.parameters())
    x = new_tokens(24)
    expected = block_reference(family, NAMES[family]["config"], new_tensors(family, form), x)
    with torch.no_grad():
        assert relative(layer(x), expected) <= 1e-6


@pytest.mark.parametrize("name,value", [("norm_topk_prob", True), ("norm_topk_prob", False)])
def test_settings_in_the_configuration_are_used(name: str, value: bool, tmp_path: Path):
    folder = made(tmp_path, "qwen3_moe", "published", **{name: value})
    x = new_tokens(20)
    expected = block_reference(
        "qwen3_moe", NAMES["qwen3_moe"]["config"] | {name: value}, new_tensors("qwen3_moe", "published"), x
    )
    with torch.no_grad():
        assert relative(load_moe_layer(folder, LAYER)(x), expected) <= 1e-6


def test_the_number_of_experts_has_either_of_its_names(tmp_path: Path):
    """Configurations of Qwen3-MoE were published with num_experts; transformers 5 writes num_local_experts."""
    config = dict(NAMES["qwen3_moe"]["config"])
    config["num_experts"] = config.pop("num_local_experts")
    layer = load_moe_layer(write_checkpoint(tmp_path, new_tensors("qwen3_moe", "fused"), config), LAYER)
    assert layer.num_experts == 5


@pytest.mark.parametrize("owned", [range(0, 2), range(3, 5), range(2, 2)], ids=["first", "last", "none"])
@pytest.mark.parametrize("family,form", FORMS)
def test_a_rank_reads_its_own_experts_alone_and_one_matrix_at_a_time(
    family: str, form: str, owned: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    whole = load_moe_layer(made(tmp_path, family, form), LAYER)
    record = record_reads(monkeypatch)
    layer = load_moe_layer(tmp_path, LAYER, Owner(owned, family))
    values = {unnumbered(name): value for name, value in layer.state_dict().items()}
    assert sum(numel for _, numel in record) == sum(value.numel() for value in values.values())
    assert max(numel for _, numel in record) <= 2 * 16 * 12 * (1 + (family == "deepseek_v3")), "more than one matrix"
    for name, value in whole.state_dict().items():
        kept = value[owned.start : owned.stop] if name.startswith("experts.") else value
        assert torch.equal(values[name], kept), name


def test_other_experts_bytes_may_be_garbage_and_other_files_may_be_missing(tmp_path: Path):
    whole = load_moe_layer(made(tmp_path / "whole", "olmoe", "published"), LAYER)
    tensors = new_tensors("olmoe", "published")
    folder = write_checkpoint(tmp_path / "part", tensors, NAMES["olmoe"]["config"], shards=len(tensors))
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    for expert in (0, 1, 4):
        for name in ("gate", "up", "down"):
            if (expert, name) != (0, "gate"):  # whose dtype the layer gets
                (folder / index[f"model.layers.{LAYER}.mlp.experts.{expert}.{name}_proj.weight"]).unlink()
    layer = load_moe_layer(folder, LAYER, Owner(range(2, 4), "olmoe"))
    assert torch.equal(layer.experts.w_out, whole.experts.w_out[2:4])
    with pytest.raises(CheckpointError, match="No such file"):
        load_moe_layer(folder, LAYER)


def forward_on_a_rank(comm: Communicator, folder: str, x: torch.Tensor) -> torch.Tensor:
    plan = load_moe_layer(folder, LAYER, device="cpu")
    with tw.ExpertParallel(comm, plan.num_experts, plan.top_k, 16, max_tokens=40, wire="none") as ep, torch.no_grad():
        return load_moe_layer(folder, LAYER, ep)(x[comm.rank :: comm.size])


@pytest.mark.parametrize("family,form,mode", exhaustive_but(TOGETHER[1:3], TOGETHER, several=True))
def test_ranks_together_compute_what_one_does(family: str, form: str, mode: str, tmp_path: Path):
    pytest.importorskip("numba", reason="the CPU kernels need numba")
    folder, x = made(tmp_path, family, form, shards=2), new_tokens(50)
    with torch.no_grad():
        expected = load_moe_layer(folder, LAYER)(x).double()
    for rank, got in enumerate(run_ranks(forward_on_a_rank, 3, str(folder), x, mode=mode)):
        assert relative(got, expected[rank::3]) <= 1e-6


def test_a_layer_has_the_files_dtype_unless_another_is_asked_for(tmp_path: Path):
    tensors = new_tensors("deepseek_v3", "published", torch.bfloat16)
    bias = f"model.layers.{LAYER}.mlp.gate.e_score_correction_bias"
    tensors[bias] = new_tensors("deepseek_v3", "published")[bias]  # float32 in files of bfloat16, as published
    folder = write_checkpoint(tmp_path, tensors, NAMES["deepseek_v3"]["config"])
    layer, wide = load_moe_layer(folder, LAYER), load_moe_layer(folder, LAYER, dtype=torch.float32)
    for name, value in layer.state_dict().items():
        assert value.dtype == (torch.float32 if name == "correction_bias" else torch.bfloat16)
        assert torch.equal(value.float(), wide.state_dict()[name]), name
    assert torch.equal(layer.correction_bias, tensors[bias])
    tensors[f"model.layers.{LAYER}.mlp.gate.weight"] = torch.zeros(8, 16)
    write_checkpoint(tmp_path, tensors, NAMES["deepseek_v3"]["config"])
    with pytest.raises(CheckpointError, match="gate.weight is F32, .* BF16: pass the dtype"):
        load_moe_layer(folder, LAYER)
    load_moe_layer(folder, LAYER, dtype=torch.bfloat16)


# ---------------------------------------------------------------------------------------------------------------------
# Writing


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("family,form", FORMS)
def test_a_layer_written_back_gives_the_same_files(family: str, form: str, shards: int, tmp_path: Path):
    folder, copy = made(tmp_path / "old", family, form, shards), tmp_path / "new"
    save_moe_layers({LAYER: load_moe_layer(folder, LAYER)}, folder, copy)
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in copy.iterdir())
    for path in folder.iterdir():
        assert (copy / path.name).read_bytes() == path.read_bytes()
        assert (copy / path.name).stat().st_mode == (folder / "config.json").stat().st_mode  # as any new file's
    assert copy.stat().st_mode == folder.stat().st_mode and sorted(os.listdir(tmp_path)) == ["new", "old"]


@pytest.mark.parametrize("family,form", ONE_OF_EACH)
def test_changed_values_and_no_others_are_written(family: str, form: str, tmp_path: Path):
    tensors = new_tensors(family, form, torch.bfloat16)
    folder = write_checkpoint(tmp_path / "old", tensors, NAMES[family]["config"])
    layer = load_moe_layer(folder, LAYER, dtype=torch.float32)
    for value in layer.state_dict().values():
        value.mul_(1.01)
    save_moe_layers({LAYER: layer}, folder, tmp_path / "new")
    again = load_moe_layer(tmp_path / "new", LAYER, dtype=torch.float32)
    for name, value in again.state_dict().items():
        assert torch.equal(value, layer.state_dict()[name].bfloat16().float()), name
    for name, tensor in load_file(tmp_path / "new" / "model.safetensors").items():
        mine = name.startswith((f"model.layers.{LAYER}.mlp.", f"model.layers.{LAYER}.block_sparse_moe."))
        assert torch.equal(tensor, tensors[name]) != mine, name


def write_on_a_rank(comm: Communicator, family: str, source: str, target: str) -> None:
    top_k = NAMES[family]["config"]["num_experts_per_tok"]
    with tw.ExpertParallel(comm, num_experts(family), top_k, 16, max_tokens=4, wire="none") as ep:
        layer = load_moe_layer(source, LAYER, ep)
        for value in layer.state_dict().values():
            value.mul_(2)
        save_moe_layers({LAYER: layer}, source, target)


@pytest.mark.parametrize("family,form,mode", exhaustive_but(TOGETHER[1:2], TOGETHER, several=True))
def test_ranks_write_together_what_one_does(family: str, form: str, mode: str, tmp_path: Path):
    pytest.importorskip("numba", reason="the CPU kernels need numba")
    folder = made(tmp_path / "old", family, form, shards=2)
    layer = load_moe_layer(folder, LAYER)
    for value in layer.state_dict().values():
        value.mul_(2)
    save_moe_layers({LAYER: layer}, folder, tmp_path / "alone")
    run_ranks(write_on_a_rank, 3, family, str(folder), str(tmp_path / "together"), mode=mode)
    for path in (tmp_path / "alone").iterdir():
        assert path.read_bytes() == (tmp_path / "together" / path.name).read_bytes()


def refused_on_a_rank(comm: Communicator, source: str, target: str, rank: int) -> str:
    with tw.ExpertParallel(comm, 5, 2, 16, max_tokens=4, wire="none") as ep:
        layer = load_moe_layer(source, LAYER, ep)
        if comm.rank == rank:
            layer.top_k = 3
        with pytest.raises(CheckpointError) as caught:
            save_moe_layers({LAYER: layer}, source, target)
        comm.barrier()  # which is of use still
        return str(caught.value)


@pytest.mark.parametrize("rank", [0, 1])
def test_where_one_rank_cannot_write_all_raise_and_nothing_is_left(rank: int, tmp_path: Path):
    pytest.importorskip("numba", reason="the CPU kernels need numba")
    folder = made(tmp_path / "old", "mixtral", "published")
    told = run_ranks(refused_on_a_rank, 2, str(folder), str(tmp_path / "new"), rank, mode="thread")
    assert "top_k 3, expected 2" in told[rank] and f"rank {rank} could not" in told[1 - rank]
    assert os.listdir(tmp_path) == ["old"]


def test_what_cannot_be_written_is_refused_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = made(tmp_path / "old", "mixtral", "published")
    layer = load_moe_layer(folder, LAYER)
    other = MoELayer(16, 12, 5, 2, gated=True, expert_bias=True)
    for layers, target, error in (
        ({LAYER: other}, "new", "experts.b_in .5, 12., expected None"),
        ({7: layer}, "new", "layer 7 has no experts"),
        ({LAYER: layer}, "old", "is there already"),
    ):
        with pytest.raises(CheckpointError, match=error):
            save_moe_layers(layers, folder, tmp_path / target)
    for layers in ({}, [layer], {LAYER: None}, {"1": layer}, {-1: layer}):
        with pytest.raises(ArgumentError, match="expected"):
            save_moe_layers(layers, folder, tmp_path / "new")
    with pytest.raises(ArgumentError, match="different groups"):
        sharded = load_moe_layer(folder, LAYER)
        sharded.ep = type("Group", (), {"comm": object()})()
        save_moe_layers({0: layer, 1: sharded}, folder, tmp_path / "new")
    with pytest.raises(FileNotFoundError):
        save_moe_layers({LAYER: layer}, folder, tmp_path / "nowhere" / "new")
    assert os.listdir(tmp_path) == ["old"]
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(CheckpointError, match="is there already"):
        save_moe_layers({LAYER: layer}, folder, "")  # the working folder
    assert os.listdir(tmp_path / "empty") == []


# ---------------------------------------------------------------------------------------------------------------------
# Memory

#: Loads once to have all in memory that is needed anyway, then says by how much loading the other raised the process's
#: own memory, and that of mapped files; /proc is the kernel's own account of both.
_MEASURE = """
import sys, re, torch
from pathlib import Path
from tests.moe.pretrained.test_pretrained import Owner
from thinwire.moe.pretrained import load_moe_layer

def status(name):
    return 1024 * int(re.search(name + r":\\s*(\\d+)", Path("/proc/self/status").read_text())[1])

class Four(Owner):
    def __init__(self, experts, hidden):
        self.local_experts, self.num_experts, self.top_k, self.hidden_size = experts, 16, 2, hidden

warm, folder = sys.argv[1:]
torch.set_num_threads(1)
load_moe_layer(warm, 1, Four(range(4, 8), 16))
Path("/proc/self/clear_refs").write_text("5")  # the most resident memory counts from now on
most, own = status("VmRSS"), status("RssAnon")
layer = load_moe_layer(folder, 1, Four(range(4, 8), 1024))
print(status("RssAnon") - own, status("VmHWM") - most)
"""


def sparse_checkpoint(folder: Path, family: str, form: str, hidden: int, ff: int) -> Path:
    """Of 16 experts in layer 1, all zero, and of no size on the disk."""
    folder.mkdir()
    sizes = {"hidden_size": hidden, "moe_intermediate_size": ff, "intermediate_size": ff, "num_experts": 16}
    config = {name: value for name, value in NAMES[family]["config"].items() if name != "num_local_experts"}
    (folder / "config.json").write_text(json.dumps(config | sizes))
    block = "model.layers.1.mlp."
    if form == "fused":
        shapes = {"experts.gate_up_proj": [16, 2 * ff, hidden], "experts.down_proj": [16, hidden, ff]}
        if family == "gpt_oss":
            shapes = {"experts.gate_up_proj": [16, hidden, 2 * ff], "experts.down_proj": [16, ff, hidden]}
            shapes |= {"experts.gate_up_proj_bias": [16, 2 * ff], "experts.down_proj_bias": [16, hidden]}
    else:
        matrices = {"gate_proj": [ff, hidden], "up_proj": [ff, hidden], "down_proj": [hidden, ff]}
        shapes = {f"experts.{e}.{name}.weight": shape for e in range(16) for name, shape in matrices.items()}
    router = "router" if family == "gpt_oss" else "gate"
    shapes |= {f"{router}.weight": [16, hidden]} | ({"router.bias": [16]} if family == "gpt_oss" else {})
    header, end = {}, 0
    for name, shape in shapes.items():
        stop = end + 4 * math.prod(shape)
        header[block + name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, stop]}
        end = stop
    encoded = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(8 + len(encoded) + end)
    return folder


@pytest.mark.exhaustive
@pytest.mark.parametrize("family,form", [("qwen3_moe", "published"), ("qwen3_moe", "fused"), ("gpt_oss", "fused")])
def test_a_rank_holds_its_experts_and_maps_no_others(family: str, form: str, tmp_path: Path):
    hidden, ff, mib = 1024, 1024, 1 << 20
    warm = sparse_checkpoint(tmp_path / "warm", family, form, 16, 8)
    large = sparse_checkpoint(tmp_path / "large", family, form, hidden, ff)  # 192 MiB, of which 48 MiB are the rank's
    command = [sys.executable, "-c", _MEASURE, str(warm), str(large)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    own, most = map(int, done.stdout.split())
    layer = 4 * 4 * 3 * hidden * ff
    assert layer * 0.9 < own < layer + 3 * mib
    assert most < 2 * layer + 12 * mib, "of the file, more is in memory than the rank's own experts"
