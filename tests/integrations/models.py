"""Tiny random models of transformers, whole and with their experts spread over ranks, and how far the two are apart.

`compare` is what a rank runs; `python -m tests.integrations.models --json FILE` keeps what it finds for all of `CASES`.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

import thinwire as tw
import thinwire.integrations.transformers
from benchmarks.timing import machine, relative_error, write_json
from thinwire.comm import Communicator
from thinwire.testing import run_ranks

__all__ = [
    "CASES", "FAMILIES", "LAYOUTS", "STOCK", "Batch", "Case", "compare", "loss", "new_batch", "quiet", "record", "run",
    "whole_tensor", "write_models",
]  # fmt: skip

Case = tuple[str, int, str]
Batch = dict[str, torch.Tensor]

_SIZES = {
    "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": 64, "intermediate_size": 48, "num_experts_per_tok": 2, "initializer_range": 0.1,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 48, "head_dim": 16, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 8},
    "olmoe": {"num_experts": 8},
    "deepseek_v3": {
        "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
        "n_shared_experts": 1, "moe_intermediate_size": 48, "num_hidden_layers": 3, "q_lora_rank": 32,
        "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    },
    "gpt_oss": {"num_local_experts": 8, "head_dim": 16, "sliding_window": 16},
}  # fmt: skip
#: By number of ranks and by how they are used, what DistributedConfig is told.
LAYOUTS: dict[tuple[int, str], dict[str, Any]] = {
    (ranks, use): settings
    for ranks in (2, 4)
    for use, settings in {
        "a batch each": {"fsdp_size": ranks, "ep_size": ranks},
        "one batch": {"tp_size": ranks, "ep_size": ranks},  # attention is spread over them too
    }.items()
} | {
    (4, "two batches"): {"tp_size": 2, "fsdp_size": 2, "ep_size": 4},
    (4, "a batch each, experts twice"): {"fsdp_size": 4, "ep_size": 2},
}
#: Families, ranks, and how they are used.
CASES = [
    (family, ranks, use)
    for ranks, use in LAYOUTS
    for family in FAMILIES
    if use in ("a batch each", "one batch") or family == "qwen3_moe"
]
#: Implementations of transformers' own, beside which thinwire's can be seen.
STOCK = "all_to_all"
#: What changes no value, but by rounding.
EXACT = ("thinwire:none", STOCK)
_NEW_TOKENS = 8


def write_models(folder: Path, families: dict[str, dict[str, Any]] = FAMILIES) -> None:
    """A model of each family, with values in what new models have as zeros."""
    for family, sizes in families.items():
        torch.manual_seed(5)
        config = transformers.AutoConfig.for_model(family, **{**_SIZES, **sizes})
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, tensor in model.state_dict().items():
            if "bias" in name or "sinks" in name:
                tensor.normal_(std=0.1)
        model.save_pretrained(folder / family)


class _Experts:
    """What went into and came out of the experts of each layer; with `inputs`, those go in instead."""

    def __init__(self, model: Any, inputs: list[Any] | None = None) -> None:
        self.inputs: list[Any] = []
        self.outputs: list[torch.Tensor] = []
        found = [module for name, module in model.named_modules() if name.endswith(".experts")]
        self._hooks = [module.register_forward_hook(self._after) for module in found]
        for place, module in enumerate(found):
            given = None if inputs is None else inputs[place]
            self._hooks.append(module.register_forward_pre_hook(lambda _, args, given=given: self._before(args, given)))

    def _before(self, args: Any, given: Any) -> Any:
        self.inputs.append(tuple(map(whole_tensor, args)))
        return given

    def _after(self, module: Any, args: Any, output: torch.Tensor) -> None:
        self.outputs.append(whole_tensor(output))

    def __enter__(self) -> _Experts:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for hook in self._hooks:
            hook.remove()


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of all of it, on every rank."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def new_batch(tokens: int, seed: int) -> Batch:
    """Three texts, the longest of so many tokens; the others are padded on the left."""
    ids = torch.randint(1, _SIZES["vocab_size"], (3, tokens), generator=torch.Generator().manual_seed(seed))
    mask = torch.arange(tokens) >= torch.tensor([[0], [3], [5]])
    return {"input_ids": ids * mask, "attention_mask": mask.long()}


def loss(model: Any, batch: Batch) -> torch.Tensor:
    """Of the tokens behind the first of each text."""
    logits, labels = model(**batch).logits, batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def quiet() -> None:
    """No bars, and no advice."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)


def compare(comm: Communicator, folder: str, cases: list[Case], implementations: list[str]) -> list[dict[str, Any]]:
    """One rank's figures for models of `write_models`, against the whole model in the same process."""
    quiet()
    tw.init(timeout=120.0)
    return [_compare(Path(folder) / family, family, ranks, use, implementations) for family, ranks, use in cases]


def _compare(path: Path, family: str, ranks: int, use: str, implementations: list[str]) -> dict[str, Any]:
    rank, sizes = dist.get_rank(), LAYOUTS[ranks, use]
    holders = ranks // sizes.get("tp_size", 1)  # of different batches
    drawn = [new_batch(24 - 7 * (holder % 2), holder) for holder in range(holders)]
    batch = drawn[rank // sizes.get("tp_size", 1)]
    prompts, real = {name: tensor[:2, :9] for name, tensor in batch.items()}, batch["attention_mask"].bool()
    whole = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    generating = {"max_new_tokens": _NEW_TOKENS, "min_new_tokens": _NEW_TOKENS, "do_sample": False}
    with torch.no_grad(), _Experts(whole) as expected:
        logits = whole(**batch).logits[real]
    tokens = whole.generate(**prompts, **generating)
    torch.stack([loss(whole, each) for each in drawn]).mean().backward()
    grads = {name: weight.grad for name, weight in whole.named_parameters() if weight.grad is not None}

    largest = float(logits.abs().max())
    figures: dict[str, Any] = {"family": family, "ranks": ranks, "use": use, "largest_logit": largest}
    for implementation in implementations:
        config = DistributedConfig(**sizes, ep_implementation=implementation)
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, distributed_config=config)
        found: dict[str, Any] = {}
        with torch.no_grad(), _Experts(model) as free:
            off = (whole_tensor(model(**batch).logits)[real] - logits).abs()
        with torch.no_grad(), _Experts(model, expected.inputs) as fixed:
            model(**batch)
        found["logits"] = float(off.max()) / largest
        found["layers"] = [*map(relative_error, fixed.outputs, expected.outputs)]
        found["tokens_equal"] = torch.equal(model.generate(**prompts, **generating), tokens)
        found["flips"] = sum(_flips(*pair, real.flatten()) for pair in zip(free.inputs, expected.inputs, strict=True))
        found["routed"] = int(real.sum()) * len(expected.inputs)
        if implementation in EXACT:
            loss(model, batch).backward()
            found["gradients"] = {}
            for name, grad in grads.items():
                kind = "experts" if ".experts." in name else "router" if _is_router(name) else "rest"
                error = relative_error(whole_tensor(model.get_parameter(name).grad), grad)
                found["gradients"][kind] = max(found["gradients"].get(kind, 0.0), error)
        figures[implementation] = found
    return figures


def _is_router(name: str) -> bool:
    return ".gate." in name or ".router." in name


def _flips(found: Any, expected: Any, real: torch.Tensor) -> int:
    """Tokens whose experts are others."""
    return int((found[1].sort(-1).values != expected[1].sort(-1).values).any(-1)[real].sum())


def run(
    ranks: int, folder: Path, implementations: list[str], timeout: float = 280.0, all_cases: list[Case] = CASES
) -> dict[Case, dict[str, Any]]:
    """The figures of all cases of so many ranks, of each the worst rank's; flips and routed tokens are of all ranks."""
    cases = [case for case in all_cases if case[1] == ranks]
    by_rank = run_ranks(compare, ranks, str(folder), cases, implementations, timeout=timeout)
    return {case: _worst(found) for case, *found in zip(cases, *by_rank, strict=True)}


def _worst(found: list[Any]) -> Any:
    if isinstance(found[0], dict):
        return {
            name: (sum if name in ("flips", "routed") else _worst)([each[name] for each in found]) for name in found[0]
        }
    if isinstance(found[0], list):
        return [_worst(list(values)) for values in zip(*found, strict=True)]
    return min(found) if isinstance(found[0], bool) else max(found)


def record(module: str, measure: Callable[[Path], dict[str, Any]]) -> None:
    """Writes what `measure` finds, given a folder for models, to the file that the command line of a module names."""
    parser = argparse.ArgumentParser(f"python -m tests.integrations.{module}")
    parser.add_argument("--json", required=True, help="where to write the figures")
    options = parser.parse_args()
    where = machine(torch.device("cpu")) | {"transformers": transformers.__version__}
    quiet()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder))
    write_json(options.json, command=f"{parser.prog} --json {options.json}", machine=where, **found)


def measure(folder: Path) -> dict[str, Any]:
    write_models(folder)
    implementations = [STOCK, "thinwire:none", "thinwire:int8"]
    return {"figures": [each for ranks in (2, 4) for each in run(ranks, folder, implementations, 600.0).values()]}


if __name__ == "__main__":
    record("models", measure)
