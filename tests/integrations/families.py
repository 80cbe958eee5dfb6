"""More families of transformers, each as a tiny random model on two ranks: `python -m tests.integrations.families`.

With `--json FILE` it keeps what it finds, and what transformers says of the families that it does not spread.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.distributed import DistributedConfig

from tests.integrations.models import LAYOUTS, STOCK, Case, quiet, record, run, write_models
from thinwire.comm import Communicator
from thinwire.testing import run_ranks

__all__ = ["CASES", "FAMILIES", "INEXACT", "REFUSED", "refusal"]

_ROUTED = {"n_routed_experts": 8, "moe_intermediate_size": 48, "head_dim": 16}
_NAMED = {"num_experts": 8, "moe_intermediate_size": 48, "head_dim": 16}
_LOCAL = {"num_local_experts": 8, "head_dim": 16}
_LATENT = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
_QWEN = {"num_experts": 8, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48}
_DELTA = {
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "head_dim": 16, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
#: The first layer of these has no experts.
_LATER: dict[str, Any] = {"num_hidden_layers": 3}
FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": _NAMED | _LATER | {"sliding_window": 16, "num_shared_experts": 1},
    "cohere2_moe": {"num_experts": 8, "head_dim": 16, "sliding_window": 16} | _LATER,
    "deepseek_v2": _ROUTED | _LATENT | _LATER | {"head_dim": None, "first_k_dense_replace": 1, "n_shared_experts": 1},
    "deepseek_v32": _ROUTED | _LATENT | _LATER | {
        "head_dim": 8, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "index_topk": 8,
        "index_head_dim": 16, "index_n_heads": 2,
    },
    "dots1": _ROUTED | _LATER | {"first_k_dense_replace": 1, "n_shared_experts": 1},
    "ernie4_5_moe": _LATER | {
        "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 48, "moe_num_shared_experts": 1,
    },
    "exaone_moe": _NAMED | _LATER | {"sliding_window": 16},
    "flex_olmo": {"num_experts": 8},
    "gemma4_text": _NAMED | {
        "enable_moe_block": True, "top_k_experts": 2, "global_head_dim": 16, "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 96, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"],
    },
    "glm4_moe": _ROUTED | _LATER,
    "glm4_moe_lite": _ROUTED | _LATENT | _LATER | {"head_dim": 8},
    "granitemoe": {"num_local_experts": 8},
    "granitemoehybrid": {
        "num_local_experts": 8, "shared_intermediate_size": 48, "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 4, "mamba_d_state": 16, "mamba_d_head": 32, "mamba_chunk_size": 8,
    },
    "granitemoeshared": {"num_local_experts": 8, "shared_intermediate_size": 48},
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 2, "head_dim": 16},
    "hy_v3": _NAMED | _LATER,
    "jamba": {
        "num_experts": 8, "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8,
        "mamba_dt_rank": 8,
    },
    "laguna": _QWEN | _LATER | {"head_dim": 16, "sliding_window": 16},
    "lfm2_moe": _LATER | {
        "num_experts": 8, "moe_intermediate_size": 48, "num_dense_layers": 1,
        "layer_types": ["conv", "conv", "full_attention"],
    },
    "mimo_v2_flash": _ROUTED | _LATER | {"v_head_dim": 16, "sliding_window": 16, "num_key_value_heads": 2},
    "minimax": _LOCAL | {"block_size": 8, "layer_types": ["linear_attention", "full_attention"]},
    "minimax_m2": _LOCAL,
    "nemotron_h": _ROUTED | {
        "moe_shared_expert_intermediate_size": 48, "layers_block_type": ["mamba", "moe", "attention", "moe"],
        "ssm_state_size": 16, "mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 2, "chunk_size": 8,
    },
    "phimoe": {"num_local_experts": 8},
    "qwen2_moe": _QWEN,
    "qwen3_5_moe_text": _QWEN | _DELTA,
    "qwen3_next": _QWEN | _DELTA,
    "solar_open": _ROUTED,
}  # fmt: skip
#: What transformers does not spread so, whoever moves the tokens.
REFUSED: dict[tuple[str, str], dict[str, Any]] = {
    ("dbrx", "a batch each"): {
        "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 64,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 8, "moe_top_k": 2},
    },
    ("gemma4_text", "a batch each"): FAMILIES["gemma4_text"],
    ("jetmoe", "a batch each"): {"num_local_experts": 8},
    ("llama4_text", "a batch each"): _LOCAL | {"intermediate_size_mlp": 48},
}  # fmt: skip
#: Families whose gradients differ by as much, or nearly, as is allowed, with transformers' own implementation too.
INEXACT = ("gemma4_text", "qwen3_5_moe_text", "qwen3_next")
CASES: list[Case] = [
    (family, 2, use) for family in FAMILIES for use in ("a batch each", "one batch") if (family, use) not in REFUSED
]


def refusal(comm: Communicator, folder: str, use: str, implementation: str) -> str:
    """What loading a model raises on this rank."""
    quiet()
    config = DistributedConfig(**LAYOUTS[2, use], ep_implementation=implementation)
    try:
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=config)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError(f"a model of {folder} was loaded")


def measure(folder: Path) -> dict[str, Any]:
    begun, figures, refused = time.monotonic(), [], []
    write_models(folder, FAMILIES)
    for family in FAMILIES:
        cases = [case for case in CASES if case[0] == family]
        figures += run(2, folder, [STOCK, "thinwire:none", "thinwire:int8"], all_cases=cases).values()
        print(f"{family}: {time.monotonic() - begun:.0f} s", flush=True)
    for (family, use), sizes in REFUSED.items():
        write_models(folder, {family: sizes})
        said = run_ranks(refusal, 2, f"{folder}/{family}", use, STOCK, timeout=120)[0]
        refused.append({"family": family, "use": use, "says": said})
    return {"figures": figures, "refused": refused}


if __name__ == "__main__":
    record("families", measure)
