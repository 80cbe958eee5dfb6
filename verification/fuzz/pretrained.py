"""The fuzz target of Hugging Face's checkpoint folders: one file in a folder of good ones is the input."""

from __future__ import annotations

import functools
import json
import random
import tempfile
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save

from thinwire.errors import CheckpointError
from thinwire.moe.pretrained import load_moe_layer, save_moe_layers
from verification.fuzz.change import changed_json, safetensors_header

__all__ = ["FILES", "change_file", "files", "pretrained"]

#: Which file the input is, by its first byte, of which family's folder.
FILES = [
    (family, name)
    for family in ("mixtral", "gpt_oss")
    for name in ("config.json", "model.safetensors.index.json", "model.safetensors")
]
_BLOCK = {"mixtral": "model.layers.0.block_sparse_moe.", "gpt_oss": "model.layers.0.mlp."}
_SHARD = "a.safetensors"


@functools.cache
def files(family: str) -> dict[str, bytes]:
    """A model of two experts: the three files, of which a folder has one or the other kind."""
    shapes = {"gate.weight": (2, 2)} | {f"experts.{e}.w{n}.weight": (2, 2) for e in (0, 1) for n in (1, 2, 3)}
    if family == "gpt_oss":
        shapes = {
            "router.weight": (2, 2),
            "router.bias": (2,),
            "experts.gate_up_proj": (2, 2, 4),
            "experts.gate_up_proj_bias": (2, 4),
            "experts.down_proj": (2, 2, 2),
            "experts.down_proj_bias": (2, 2),
        }
    generator = torch.Generator().manual_seed(3)
    tensors = {_BLOCK[family] + name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    sizes = {"hidden_size": 2, "intermediate_size": 2, "num_local_experts": 2, "num_experts_per_tok": 1}
    config = {"model_type": family, "hidden_act": "silu"} | sizes
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, _SHARD)}
    return {
        "config.json": json.dumps(config).encode(),
        "model.safetensors.index.json": json.dumps(index).encode(),
        "model.safetensors": save(tensors),
    }


def pretrained(data: bytes) -> bool:
    """The first byte says which file of which family the rest is."""
    family, changed = FILES[data[0] % len(FILES)] if data else FILES[0]
    held = dict(files(family)) | {changed: data[1:]}
    if changed == "model.safetensors":
        del held["model.safetensors.index.json"]
    else:
        held[_SHARD] = held.pop("model.safetensors")
    if changed == "config.json" and data[:1] > b"\x7f":  # of one file instead of several
        del held["model.safetensors.index.json"]
        held["model.safetensors"] = held.pop(_SHARD)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "folder"
        folder.mkdir()
        for file, octets in held.items():
            (folder / file).write_bytes(octets)
        try:
            layer = load_moe_layer(folder, 0)
        except CheckpointError as error:
            assert len(str(error)) < 3000, "an error that fills the screen"
            return False
        (shard,) = folder.glob("*.safetensors")
        with safe_open(shard, "pt") as opened:  # so that what is taken here is taken, and read, there as well
            router = opened.get_tensor(_BLOCK[family] + ("gate.weight" if family == "mixtral" else "router.weight"))
        assert router.dtype == layer.router.weight.dtype
        assert bytes(router.view(torch.uint8).numpy()) == bytes(layer.router.weight.detach().view(torch.uint8).numpy())
        save_moe_layers({0: layer}, folder, Path(name) / "copy")
        for path in folder.iterdir():
            assert (Path(name) / "copy" / path.name).read_bytes() == path.read_bytes(), f"{path.name} is otherwise"
    return True


def change_file(rng: random.Random, data: bytes) -> bytes:
    """Of a file that a byte precedes, in the form that it says the file has."""
    first = data[:1] if data and rng.random() < 0.9 else rng.randbytes(1)
    change = safetensors_header if FILES[first[0] % len(FILES)][1] == "model.safetensors" else changed_json
    return first + change(rng, data[1:])
