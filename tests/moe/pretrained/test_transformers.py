"""Against Hugging Face's transformers itself, where it is installed: models of its own, written by it.

`python -m tests.moe.pretrained.test_transformers` records `names.json` anew.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

transformers: Any = pytest.importorskip("transformers", reason="compares with Hugging Face's transformers")

from safetensors import safe_open

from tests.moe.pretrained.families import FORMS, LAYER, NAMES, VERSION
from thinwire.moe.pretrained import load_moe_layer, save_moe_layers

_SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "num_experts_per_tok": 2, "bos_token_id": 0,
    "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
_CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 5},
    "qwen3_moe": {"num_experts": 5, "moe_intermediate_size": 12, "head_dim": 8, "norm_topk_prob": True},
    "olmoe": {"num_experts": 5},
    "deepseek_v3": {
        "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
        "n_shared_experts": 2, "moe_intermediate_size": 12, "intermediate_size": 20, "kv_lora_rank": 8,
        "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
    },
    "gpt_oss": {"num_local_experts": 5, "head_dim": 8},
}  # fmt: skip
#: What `save_pretrained` is told, by form.
_FORMS = {"published": {}, "fused": {"save_original_format": False}}


def new_model(family: str, dtype: torch.dtype = torch.float32) -> Any:
    config = transformers.AutoConfig.for_model(family, **{**_SIZES, **_CONFIGS[family]})
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():  # buffers, too; new models have many zeros
            tensor.copy_(torch.randn(tensor.shape))
    return model.to(dtype)


def written(family: str, form: str) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """The settings in the config.json that transformers writes, and names and shapes of the tensors."""
    with tempfile.TemporaryDirectory() as folder:
        new_model(family).save_pretrained(folder, **_FORMS[form])
        config = json.loads((Path(folder) / "config.json").read_text())
        with safe_open(Path(folder) / "model.safetensors", "pt") as file:
            shapes = {name: list(file.get_slice(name).get_shape()) for name in sorted(file.keys())}
    return {name: value for name, value in config.items() if not isinstance(value, dict | list)}, shapes


def block_output(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = model.model.layers[LAYER].mlp(x)
    return y[0] if isinstance(y, tuple) else y


@pytest.mark.parametrize("sharded", [False, True], ids=["one-file", "sharded"])
@pytest.mark.parametrize("family,form", FORMS)
def test_a_layer_computes_what_the_block_of_transformers_does(family: str, form: str, sharded: bool, tmp_path: Path):
    model = new_model(family)
    model.save_pretrained(tmp_path, **_FORMS[form], **({"max_shard_size": "8KB"} if sharded else {}))
    assert (tmp_path / "model.safetensors.index.json").exists() == sharded
    x = torch.randn(3, 40, 16)
    expected = block_output(model, x)
    with torch.no_grad():
        got = load_moe_layer(tmp_path, LAYER)(x)
    assert (got - expected).abs().max() / expected.abs().max() <= 1e-6


@pytest.mark.parametrize("family", _CONFIGS)
def test_in_bfloat16_a_layer_differs_from_the_block_by_rounding(family: str, tmp_path: Path):
    model = new_model(family, torch.bfloat16)
    model.set_experts_implementation("eager")  # torch's grouped products want rows of a multiple of 16 bytes
    model.save_pretrained(tmp_path)
    x = torch.randn(1, 100, 16, dtype=torch.bfloat16)
    expected = block_output(model, x).float()
    with torch.no_grad():
        got = load_moe_layer(tmp_path, LAYER)(x)
    assert got.dtype == torch.bfloat16
    assert (got.float() - expected).norm() / expected.norm() <= 0.01


@pytest.mark.parametrize("family,form", FORMS)
def test_transformers_loads_what_was_written_back(family: str, form: str, tmp_path: Path):
    model = new_model(family)
    model.save_pretrained(tmp_path / "old", **_FORMS[form], max_shard_size="8KB")
    layer = load_moe_layer(tmp_path / "old", LAYER)
    with torch.no_grad():
        for tensor in layer.state_dict().values():
            tensor.mul_(0.5)
    save_moe_layers({LAYER: layer}, tmp_path / "old", tmp_path / "new")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new").eval()
    before, after = model.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.startswith(f"model.layers.{LAYER}.mlp.")}
    assert all(torch.equal(before[name] * 0.5, after[name]) for name in changed)
    x = torch.randn(1, 40, 16)
    expected = block_output(again, x)
    with torch.no_grad():
        assert (layer(x) - expected).abs().max() / expected.abs().max() <= 1e-6


@pytest.mark.skipif(transformers.__version__ != VERSION, reason=f"recorded with transformers {VERSION}")
@pytest.mark.parametrize("family,form", FORMS)
def test_the_recorded_names_and_shapes_are_those_that_transformers_writes(family: str, form: str):
    assert written(family, form) == (NAMES[family]["config"], NAMES[family][form])


def record() -> None:
    families: dict[str, dict[str, Any]] = {}
    for family in _CONFIGS:
        forms = ["published"] if family == "gpt_oss" else list(_FORMS)
        families[family] = {"config": written(family, "published")[0]} | {
            form: written(family, form)[1] for form in forms
        }
    text = json.dumps({"transformers": transformers.__version__, "families": families}, separators=(",", ":"))
    # A form a line.
    Path(__file__).with_name("names.json").write_text(text.replace('},"', '},\n"') + "\n")


if __name__ == "__main__":
    record()
