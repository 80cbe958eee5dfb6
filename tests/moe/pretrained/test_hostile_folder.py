"""What a checkpoint folder must not do: lead elsewhere, be two things at once, or be believed before it was checked."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.moe.pretrained.families import LAYER, NAMES, new_tensors, write_checkpoint
from thinwire.errors import ArgumentError, CheckpointError
from thinwire.moe import checkpoint_folder, safetensors_header
from thinwire.moe.pretrained import load_moe_layer

FAMILY, FORM = "mixtral", "published"
CONFIG = NAMES[FAMILY]["config"]
BLOCK = f"model.layers.{LAYER}.block_sparse_moe."
ROUTER = BLOCK + "gate.weight"
DATA = b"\0" * 8


def refused(folder: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_moe_layer(folder, LAYER)


def sharded(folder: Path) -> tuple[Path, dict[str, Any]]:
    write_checkpoint(folder, new_tensors(FAMILY, FORM), CONFIG, shards=2)
    return folder, json.loads((folder / "model.safetensors.index.json").read_text())


# ---------------------------------------------------------------------------------------------------------------------
# Index and links


@pytest.mark.parametrize(
    "file",
    ["../other/model-00001-of-00002.safetensors", "/etc/passwd", "", ".", "..", "pytorch_model.bin", 7, None, ["x"],
     "sub/model-00001-of-00002.safetensors", "../.safetensors"],
    ids=repr,
)  # fmt: skip
def test_an_index_that_names_what_is_no_file_in_the_folder_is_refused(file: Any, tmp_path: Path):
    sharded(tmp_path / "other")
    folder, index = sharded(tmp_path / "folder")
    (folder / "sub").symlink_to(tmp_path / "other")
    index["weight_map"]["model.norm.weight"] = file  # which the layer does not need
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, "expected the name of a .safetensors file in the same folder")


@pytest.mark.parametrize(
    "file", ["a\0b.safetensors", "\ud800.safetensors", "absent.safetensors", "x" * 300 + ".safetensors"]
)
def test_a_file_that_is_not_there_or_cannot_be_is_refused(file: str, tmp_path: Path):
    folder, index = sharded(tmp_path)
    index["weight_map"][ROUTER] = file
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, "cannot be used")


def test_an_index_at_odds_with_its_files_is_refused(tmp_path: Path):
    folder, index = sharded(tmp_path)
    path, original = folder / "model.safetensors.index.json", json.dumps(index)
    other = {"model-00001-of-00002.safetensors": "model-00002-of-00002.safetensors"}
    swapped = {name: other.get(file, "model-00001-of-00002.safetensors") for name, file in index["weight_map"].items()}
    path.write_text(json.dumps({"weight_map": swapped}))
    refused(folder, "by model.safetensors.index.json")
    path.write_text(json.dumps({"weight_map": index["weight_map"] | {"more": "model-00001-of-00002.safetensors"}}))
    refused(folder, "lacks 'more'")
    for text, message in (
        (original.replace("{", '{"weight_map": {}, ', 1), "appears twice"),
        ('{"weight_map": []}', "has no weight_map"),
        ("{}", "has no weight_map"),
        ("[]", "holds a list"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('{"a": ' + "9" * 5000 + "}", "digits"),
    ):
        path.write_text(text)
        refused(folder, message)


def test_neither_or_both_of_the_files_is_refused(tmp_path: Path):
    folder, _ = sharded(tmp_path)
    (folder / "model.safetensors").symlink_to("nowhere")
    refused(folder, "has both of")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    refused(folder, "has neither of .* pickles, are not read")


def test_links_within_a_folder_and_into_the_blobs_of_a_cache_are_followed(tmp_path: Path):
    blobs, folder = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    write_checkpoint(folder, new_tensors(FAMILY, FORM), CONFIG)
    expected = load_moe_layer(folder, LAYER).state_dict()
    for number, path in enumerate(list(folder.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(Path("..") / ".." / "blobs" / str(number))
    (tmp_path / "link").symlink_to(folder)  # the caller's own word
    (folder / "model.safetensors").rename(folder / "other")
    (folder / "model.safetensors").symlink_to("other")  # a link to a link
    for place in (folder, tmp_path / "link"):
        for name, value in load_moe_layer(place, LAYER).state_dict().items():
            assert torch.equal(value, expected[name])
    (blobs.parent / "blobs").rename(blobs.parent / "elsewhere")
    (blobs.parent / "blobs").symlink_to("elsewhere")
    refused(folder, "leads to .*elsewhere")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_link_out_of_the_folder_is_refused(name: str, tmp_path: Path):
    write_checkpoint(tmp_path / "other", new_tensors(FAMILY, FORM), CONFIG)
    folder = write_checkpoint(tmp_path / "folder", new_tensors(FAMILY, FORM), CONFIG)
    (folder / name).unlink()
    (folder / name).symlink_to(tmp_path / "other" / name)
    refused(folder, f"{name}' leads to .*other.*, expected a file in .*folder")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_what_is_no_regular_file_is_refused_at_once(name: str, tmp_path: Path):
    folder = write_checkpoint(tmp_path, new_tensors(FAMILY, FORM), CONFIG)
    for make in (os.mkfifo, os.mkdir, lambda path: os.symlink(path, path)):
        (folder / name).unlink()
        make(folder / name)
        refused(folder, "no regular file|cannot be used")
        if (folder / name).is_dir():
            (folder / name).rmdir()
            (folder / name).touch()


def test_folders_that_are_none(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        load_moe_layer(tmp_path / "absent", LAYER)
    (tmp_path / "file").touch()
    for odd in (tmp_path / "file", "a\0b", 7, None):
        with pytest.raises(CheckpointError, match="folder"):
            load_moe_layer(odd, LAYER)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="config.json"):
        load_moe_layer(tmp_path, LAYER)


# ---------------------------------------------------------------------------------------------------------------------
# Headers


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8), **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets} | more


HEADERS = [
    ([], "a list, expected an object"),
    ({"w": []}, "not described by"),
    ({"w": entry(more=1)}, "not described by"),
    ({"w": {"dtype": "F32"}}, "not described by"),
    ({"w": entry("F33")}, "has dtype 'F33'"),
    ({"w": entry([])}, "has dtype"),
    ({"w": entry(shape=2)}, "shape that is no list"),
    ({"w": entry(shape=[-2])}, "shape that is no list"),
    ({"w": entry(shape=[2.0])}, "shape that is no list"),
    ({"w": entry(shape=[True, 2])}, "shape that is no list"),
    ({"w": entry(shape=[2**63])}, "shape that is no list"),
    ({"w": entry(shape=[1] * 65)}, "shape that is no list"),
    ({"w": entry(offsets=[0])}, "data_offsets that are not"),
    ({"w": entry(offsets=[-8, 0])}, "data_offsets that are not"),
    ({"w": entry(offsets=[8, 0])}, "but its data_offsets are"),
    ({"w": entry(shape=[3])}, "of 12 bytes, but"),
    ({"w": entry(shape=[2**62, 4])}, "but its data_offsets are"),  # which is 2 modulo 2**64
    ({"w": entry("F4", [15], [0, 8])}, "of 7.5 bytes"),
    ({"w": entry(), "v": entry()}, "begins at byte 0 of the tensors, expected 8"),
    ({"w": entry(shape=[1], offsets=[0, 4]), "v": entry(shape=[0], offsets=[6, 6])}, "begins at byte 6"),
    ({"w": entry(shape=[1], offsets=[0, 4])}, "cut short"),
    ({"w": entry(shape=[4], offsets=[0, 16])}, "cut short"),
    ({"w": entry(), "__metadata__": {"format": 7}}, "__metadata__"),
    ({"w": entry(), "__metadata__": []}, "__metadata__"),
]


@pytest.mark.parametrize("header,message", HEADERS, ids=[message for _, message in HEADERS])
def test_a_header_that_does_not_describe_the_file_is_refused(header: Any, message: str, tmp_path: Path):
    encoded = json.dumps(header).encode()
    with pytest.raises(CheckpointError, match=re.escape(message)):
        safetensors_header.parse_header(encoded, 8 + len(encoded) + len(DATA), "file")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").write_bytes(len(encoded).to_bytes(8, "little") + encoded + DATA)
    refused(tmp_path, re.escape(message))


def test_a_header_with_a_name_twice_or_of_a_length_that_cannot_be_is_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    path, one = tmp_path / "model.safetensors", json.dumps(entry())
    twice = f'{{"w": {one}, "w": {one}}}'.encode()
    path.write_bytes(len(twice).to_bytes(8, "little") + twice + DATA)
    refused(tmp_path, "'w' appears twice")
    for length in (len(twice) + 9, 2**62, 2**64 - 1):
        path.write_bytes(length.to_bytes(8, "little") + twice + DATA)
        refused(tmp_path, f"says that its header has {length} bytes")
    for octets in (b"", b"1234567", b"\0" * 8):
        path.write_bytes(octets)
        refused(tmp_path, "model.safetensors")


def test_a_file_that_gets_shorter_while_it_is_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = write_checkpoint(tmp_path, new_tensors(FAMILY, FORM), CONFIG)
    read_at = checkpoint_folder.read_at
    count = iter(range(1000))

    def cutting(descriptor: int, into: memoryview, offset: int) -> None:
        if next(count) == 5:
            os.truncate(folder / "model.safetensors", 2000)
        read_at(descriptor, into, offset)

    monkeypatch.setattr(checkpoint_folder, "read_at", cutting)
    refused(folder, "too early")


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
        (replaced("model_type", "llama"), "model_type 'llama', expected one of mixtral, qwen3_moe"),
        (replaced("model_type", []), "model_type"),
        (without("model_type"), "lacks model_type"),
        (replaced("quantization_config", {"quant_method": "fp8"}), "quantised"),
        (replaced("num_local_experts", 4), r"has .*experts.4.w1.weight'"),
        (replaced("num_local_experts", 2**31 - 1), "lacks .*experts.5.w1.weight"),
        (replaced("num_local_experts", 2**31), "num_local_experts 2147483648, expected an int"),
        (replaced("num_local_experts", True), "num_local_experts True"),
        (without("num_local_experts"), "lacks num_experts or num_local_experts"),
        (replaced("num_experts_per_tok", 6), "num_experts_per_tok is 6, of 5"),
        (replaced("num_experts_per_tok", "2"), "num_experts_per_tok '2'"),
        (replaced("hidden_size", 17), r"\[.*17"),
        (replaced("intermediate_size", 6), r"expected .* \[6, 16\]"),
        (replaced("hidden_act", "relu"), "hidden_act 'relu', expected 'silu' or 'gelu'"),
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
        ("deepseek_v3", "scoring_func", "softmax", "expected 'sigmoid'"),
        ("deepseek_v3", "topk_method", "greedy", "expected 'noaux_tc'"),
        ("deepseek_v3", "n_group", 3, "8 experts in 3 groups"),
        ("deepseek_v3", "topk_group", 5, "top_groups lie in"),
        ("deepseek_v3", "routed_scaling_factor", float("inf"), "scale must be"),
        ("deepseek_v3", "norm_topk_prob", 1, "true or false"),
        ("deepseek_v3", "n_shared_experts", 1, "shared_experts.gate_proj.weight"),
        ("deepseek_v3", "n_shared_experts", 2**31 - 1, "shared_experts.gate_proj.weight"),
        ("deepseek_v3", "hidden_size", 2**31 - 1, "2147483647"),
        ("gpt_oss", "intermediate_size", 2**31 - 1, "4294967294"),
        ("gpt_oss", "swiglu_limit", float("nan"), "limit must be"),
        ("gpt_oss", "hidden_act", "gelu", "expected 'silu'"),
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


def test_a_file_of_safetensors_own_is_read_as_it_reads_it(tmp_path: Path):
    held = {"a": torch.randn(3, 2), "b": torch.zeros(0, 4), "c": torch.tensor(7), "d": torch.ones(5, dtype=torch.bool)}
    save_file(held, tmp_path / "model.safetensors", metadata={"note": "é"})
    octets = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(octets[:8], "little")
    found = safetensors_header.parse_header(octets[8 : 8 + length], len(octets), "file")
    assert {name: each.shape for name, each in found.items()} == {name: tuple(held[name].shape) for name in held}
    assert octets[found["a"].offset :][:24] == held["a"].numpy().tobytes()


def test_a_header_of_more_entries_than_can_be_looked_at_in_seconds_is_refused(tmp_path: Path):
    folder = write_checkpoint(tmp_path, new_tensors(FAMILY, FORM), CONFIG)
    entry = '"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    header = ("{" + ",".join(entry % number for number in range(300_000)) + "}").encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    refused(folder, "says that its header has .* bytes; at most 16777216 are read")
