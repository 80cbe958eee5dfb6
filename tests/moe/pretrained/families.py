"""Tiny checkpoints as Hugging Face's transformers writes them, made by hand, and what their blocks compute.

`names.json` holds, for each family, the config.json, names and shapes that transformers wrote for a tiny model, of both
forms where there are two; `test_transformers.py` compares it with the transformers that is installed, where one is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

__all__ = ["FORMS", "LAYER", "NAMES", "VERSION", "block_reference", "new_tensors", "write_checkpoint"]

_RECORDED = json.loads(Path(__file__).with_name("names.json").read_text())
VERSION: str = _RECORDED["transformers"]
#: By family: "config", and by form ("published", "fused") shapes by name.
NAMES: dict[str, dict[str, Any]] = _RECORDED["families"]
#: Each family, with each form that its experts have.
FORMS = [(family, form) for family, recorded in NAMES.items() for form in recorded if form != "config"]
#: Which has experts in every family; layer 0 of deepseek_v3 is dense.
LAYER = 1


def new_tensors(family: str, form: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, torch.Tensor]:
    """Values so large that clamps, groups and correction biases matter."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in NAMES[family][form].items()}


def write_checkpoint(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    shards: int = 1,
) -> Path:
    """In one file, or dealt to several in turn, so that even one expert's tensors are in different files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    files = [f"model-{number + 1:05}-of-{shards:05}.safetensors" for number in range(shards)]
    weight_map = {name: files[place % shards] for place, name in enumerate(tensors)}
    for file in files:
        held = {name: tensor for name, tensor in tensors.items() if weight_map[name] == file}
        save_file(held, folder / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def block_reference(
    family: str, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], x: torch.Tensor
) -> torch.Tensor:
    """The block of layer LAYER on tokens [T, hidden], in float64, token by token and expert by expert."""
    start = f"model.layers.{LAYER}."
    found = {name.removeprefix(start): tensor.double() for name, tensor in tensors.items() if name.startswith(start)}
    block = "block_sparse_moe" if any(name.startswith("block_sparse_moe") for name in found) else "mlp"
    found = {name.removeprefix(block + "."): tensor for name, tensor in found.items() if name.startswith(block + ".")}
    rows = []
    for row in x.double():
        chosen = _chosen(family, config, found, row)
        y = sum(weight * _expert(family, found, expert, row) for expert, weight in chosen)
        if family == "deepseek_v3":
            gate, up, down = (found[f"shared_experts.{part}_proj.weight"] for part in ("gate", "up", "down"))
            y = y + down @ (torch.nn.functional.silu(gate @ row) * (up @ row))
        rows.append(y)
    return torch.stack(rows)


def _chosen(
    family: str, config: Mapping[str, Any], found: Mapping[str, torch.Tensor], row: torch.Tensor
) -> list[tuple[int, float]]:
    top_k = config["num_experts_per_tok"]
    if family == "gpt_oss":
        kept = (found["router.weight"] @ row + found["router.bias"]).topk(top_k)
        return list(zip(kept.indices.tolist(), kept.values.softmax(0).tolist(), strict=True))
    logits = found["gate.weight"] @ row
    if family != "deepseek_v3":
        kept = logits.softmax(0).topk(top_k)
        total = kept.values.sum() if family == "mixtral" or config["norm_topk_prob"] else 1.0
        return list(zip(kept.indices.tolist(), (kept.values / total).tolist(), strict=True))
    scores = logits.sigmoid()
    corrected = scores + found["gate.e_score_correction_bias"]
    groups = corrected.view(config["n_group"], -1)
    best = groups.topk(2, dim=1).values.sum(1).topk(config["topk_group"]).indices.tolist()
    allowed = [expert for expert in range(len(scores)) if expert // groups.shape[1] in best]
    experts = sorted(allowed, key=lambda expert: -float(corrected[expert]))[:top_k]
    total = float(scores[experts].sum())
    return [(expert, config["routed_scaling_factor"] * float(scores[expert]) / total) for expert in experts]


def _expert(family: str, found: Mapping[str, torch.Tensor], expert: int, row: torch.Tensor) -> torch.Tensor:
    if family == "gpt_oss":
        both = row @ found["experts.gate_up_proj"][expert] + found["experts.gate_up_proj_bias"][expert]
        gate, up = both[::2].clamp(max=7.0), both[1::2].clamp(-7.0, 7.0)
        inner = (up + 1) * gate * torch.sigmoid(1.702 * gate)
        return inner @ found["experts.down_proj"][expert] + found["experts.down_proj_bias"][expert]
    if "experts.gate_up_proj" in found:
        both, down = found["experts.gate_up_proj"][expert] @ row, found["experts.down_proj"][expert]
        gate, up = both[: len(both) // 2], both[len(both) // 2 :]
    else:
        names = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        w_gate, w_up, down = (found[f"experts.{expert}.{name}.weight"] for name in names)
        gate, up = w_gate @ row, w_up @ row
    return down @ (torch.nn.functional.silu(gate) * up)
