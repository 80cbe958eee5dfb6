"""What is no folder that a layer can be read from is refused, by the name of file, tensor or setting."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.moe.pretrained.families import LAYER, NAMES, new_tensors, write_checkpoint
from thinwire.errors import ArgumentError, CheckpointError
from thinwire.moe.pretrained import load_moe_layer, save_moe_layers

FAMILY, FORM = "mixtral", "published"
CONFIG = NAMES[FAMILY]["config"]
BLOCK = f"model.layers.{LAYER}.block_sparse_moe."
ROUTER = BLOCK + "gate.weight"


def refused(folder: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_moe_layer(folder, LAYER)


def sharded(folder: Path) -> tuple[Path, dict[str, Any]]:
    write_checkpoint(folder, new_tensors(FAMILY, FORM), CONFIG, shards=2)
    return folder, json.loads((folder / "model.safetensors.index.json").read_text())


# ---------------------------------------------------------------------------------------------------------------------
# Files


def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path: Path):
    folder, index = sharded(tmp_path)
    path, weight_map = folder / "model.safetensors.index.json", index["weight_map"]
    for file in ("../other.safetensors", "/etc/passwd", "", "pytorch_model.bin", 7, None, ["x"]):
        path.write_text(json.dumps({"weight_map": weight_map | {"model.norm.weight": file}}))
        refused(folder, "weight_map says that 'model.norm.weight' is in .*, expected a .safetensors file's name")
    swapped = {name: f"model-0000{3 - int(file[10])}-of-00002.safetensors" for name, file in weight_map.items()}
    for text, message in (
        (json.dumps({"weight_map": weight_map | {ROUTER: "absent.safetensors"}}), "absent.safetensors cannot be read"),
        (json.dumps({"weight_map": swapped}), r"model-0000\d-of-00002.safetensors: .*does not contain tensor"),
        ('{"weight_map": []}', "weight_map is .*, expected an object of file names"),
        ("{}", "no field 'weight_map'"),
        ("[]", "expected an object"),
        ("{", "index.json: not JSON"),
    ):
        path.write_text(text)
        refused(folder, message)


def test_neither_or_both_of_the_files_is_refused(tmp_path: Path):
    folder, _ = sharded(tmp_path)
    (folder / "model.safetensors").touch()
    refused(folder, "has both of")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    refused(folder, "has neither of .* pickles, are not read")


def test_links_as_in_hugging_faces_cache_are_followed(tmp_path: Path):
    blobs, folder = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    write_checkpoint(folder, new_tensors(FAMILY, FORM), CONFIG)
    layer = load_moe_layer(folder, LAYER)
    for number, path in enumerate(list(folder.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(Path("..") / ".." / "blobs" / str(number))
    for name, value in load_moe_layer(folder, LAYER).state_dict().items():
        assert torch.equal(value, layer.state_dict()[name])
    save_moe_layers({LAYER: layer}, folder, tmp_path / "copy")
    assert not any(path.is_symlink() for path in (tmp_path / "copy").iterdir())


def test_folders_that_are_none(tmp_path: Path):
    for absent in (tmp_path / "absent", "a\0b"):
        with pytest.raises(FileNotFoundError):
            load_moe_layer(absent, LAYER)
    (tmp_path / "file").touch()
    for odd in (7, None):
        with pytest.raises(CheckpointError, match="the folder is a"):
            load_moe_layer(odd, LAYER)  # type: ignore[arg-type]
    for odd in (tmp_path / "file", tmp_path):
        refused(odd, "config.json: cannot be read")
    folder = write_checkpoint(tmp_path / "folder", new_tensors(FAMILY, FORM), CONFIG)
    path = folder / "model.safetensors"
    for content in (path.read_bytes()[:-1], b"", b"a pickle, say"):
        path.write_bytes(content)
        refused(folder, "model.safetensors is not a complete safetensors file")
    path.unlink()
    path.mkdir()
    refused(folder, "model.safetensors is not a regular file")


# ---------------------------------------------------------------------------------------------------------------------
# Tensors and configuration


def without(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda held: held.pop(name)


def replaced(name: str, value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda held: held.update({name: value})


@pytest.mark.parametrize(
    "change,message",
    [
        (without(BLOCK + "experts.3.w2.weight"), r"lacks .*experts.3.w2.weight, of 5 experts"),
        (without(ROUTER), r"lacks .*gate.weight"),
        (replaced(BLOCK + "experts.5.w1.weight", torch.zeros(12, 16)), "has .*experts.5.w1.weight'"),
        (replaced(BLOCK + "experts.0.w1.weight_scale_inv", torch.zeros(1)), "has .*weight_scale_inv'"),
        (replaced(BLOCK + "experts.4.w2.weight", torch.zeros(12, 16)), r"F32 \[12, 16\], expected .* \[16, 12\]"),
        (replaced(ROUTER, torch.zeros(6, 16)), r"F32 \[6, 16\], expected .* \[5, 16\]"),
        (replaced(ROUTER, torch.zeros(5, 16, dtype=torch.int8)), "is I8"),
        (replaced(BLOCK + "experts.0.w1.weight", torch.zeros(12, 16).to(torch.float8_e4m3fn)), "is F8_E4M3"),
        (replaced(f"model.layers.{LAYER}.mlp.experts.gate_up_proj", torch.zeros(5, 24, 16)), "in no known form"),
        (replaced(f"model.layers.{LAYER}.mlp.gate.weight", torch.zeros(5, 16)), "has .*mlp.gate.weight'"),
    ],
)
def test_a_layer_with_other_tensors_than_it_should_have_is_refused(change: Any, message: str, tmp_path: Path):
    tensors = new_tensors(FAMILY, FORM)
    change(tensors)
    refused(write_checkpoint(tmp_path, tensors, CONFIG), message)


@pytest.mark.parametrize(
    "change,message",
    [
        (replaced("model_type", "llama"), "model_type is 'llama', expected one of mixtral, qwen3_moe"),
        (replaced("model_type", []), "model_type"),
        (without("model_type"), "no field 'model_type'"),
        (replaced("quantization_config", {"quant_method": "fp8"}), "quantised"),
        (replaced("num_local_experts", 4), r"has .*experts.4.w1.weight'"),
        (replaced("num_local_experts", 2**31 - 1), "lacks .*experts.5.w1.weight"),
        (replaced("num_local_experts", 2**31), "num_local_experts is 2147483648, expected an int"),
        (replaced("num_local_experts", True), "num_local_experts is True"),
        (without("num_local_experts"), "no field 'num_experts' or 'num_local_experts'"),
        (replaced("num_experts_per_tok", 6), "num_experts_per_tok is 6, of 5"),
        (replaced("num_experts_per_tok", "2"), "num_experts_per_tok is '2'"),
        (replaced("hidden_size", 17), r"\[.*17"),
        (replaced("intermediate_size", 6), r"expected .* \[6, 16\]"),
        (replaced("hidden_act", "relu"), "hidden_act is 'relu', expected one of silu, gelu"),
        (replaced("hidden_act", ["silu"]), "hidden_act"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(change: Any, message: str, tmp_path: Path):
    config = dict(CONFIG)
    change(config)
    refused(write_checkpoint(tmp_path, new_tensors(FAMILY, FORM), config), message)


@pytest.mark.parametrize(
    "family,name,value,message",
    [
        ("deepseek_v3", "scoring_func", "softmax", "expected one of sigmoid"),
        ("deepseek_v3", "topk_method", "greedy", "expected one of noaux_tc"),
        ("deepseek_v3", "n_group", 3, "8 experts in 3 groups"),
        ("deepseek_v3", "topk_group", 5, "top_groups lie in"),
        ("deepseek_v3", "routed_scaling_factor", float("inf"), "expected a finite number"),
        ("deepseek_v3", "norm_topk_prob", 1, "true or false"),
        ("deepseek_v3", "n_shared_experts", 1, "shared_experts.gate_proj.weight"),
        ("deepseek_v3", "n_shared_experts", 2**31 - 1, "shared_experts.gate_proj.weight"),
        ("deepseek_v3", "hidden_size", 2**31 - 1, "2147483647"),
        ("gpt_oss", "intermediate_size", 2**31 - 1, "4294967294"),
        ("gpt_oss", "swiglu_limit", float("nan"), "expected a finite number"),
        ("gpt_oss", "hidden_act", "gelu", "expected one of silu"),
        ("gpt_oss", "num_local_experts", 2**31 - 1, "expected .* .2147483647, 16"),
    ],
)
def test_a_configuration_of_other_families_that_does_not_fit_is_refused(
    family: str, name: str, value: Any, message: str, tmp_path: Path
):
    config = NAMES[family]["config"] | {name: value}
    refused(write_checkpoint(tmp_path, new_tensors(family, "published"), config), message)


def test_packed_weights_of_gpt_oss_are_refused_by_name(tmp_path: Path):
    tensors = new_tensors("gpt_oss", "published")
    for name in ("gate_up_proj", "down_proj"):
        del tensors[f"model.layers.{LAYER}.mlp.experts.{name}"]
        tensors[f"model.layers.{LAYER}.mlp.experts.{name}_blocks"] = torch.zeros(5, 2, dtype=torch.uint8)
    refused(write_checkpoint(tmp_path, tensors, NAMES["gpt_oss"]["config"]), "in no known form.*_blocks'")


def test_a_dense_layer_is_refused_and_those_with_experts_are_named(tmp_path: Path):
    folder = write_checkpoint(tmp_path, new_tensors("deepseek_v3", "published"), NAMES["deepseek_v3"]["config"])
    for layer in (0, 10**6):
        with pytest.raises(CheckpointError, match=f"layer {layer} has no experts; layers that have: 1"):
            load_moe_layer(folder, layer)
    for odd in (-1, True, "1", 1.0, 2**40):
        with pytest.raises(ArgumentError, match="layer is"):
            load_moe_layer(folder, odd)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="dtype is"):
        load_moe_layer(folder, LAYER, dtype=torch.int8)


def test_a_model_without_its_head_has_shorter_names(tmp_path: Path):
    tensors = {name.removeprefix("model."): tensor for name, tensor in new_tensors(FAMILY, FORM).items()}
    folder = write_checkpoint(tmp_path, tensors, CONFIG)
    assert torch.equal(load_moe_layer(folder, LAYER).router.weight, tensors[ROUTER.removeprefix("model.")])
