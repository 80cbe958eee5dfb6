"""Generate text greedily from a mixture-of-experts checkpoint whose experts lie on several ranks, for each wire format.

    python examples/split_into_experts.py build/smollm2_split  # or any folder that `tw.load_moe_layer` reads
    python examples/generate.py build/smollm2_split --json build/generate.json

Needs transformers 5.23 or newer, which runs everything but the experts. Each rank has prompts of its own. What is
printed of a wire format:

    tokens/s        that all ranks generated together, on this machine's CPU
    wire, logical   bytes that a token's round sends to other ranks, there and back, and what it would take unquantised
    diverges at     the first generated token that differs from the unsharded model's, of all ranks' texts; - if none
    flips           tokens and layers whose experts are others than in the unsharded model, reading the same text
    logits          relative error of the logits, reading the same text
    KL              how far the next token's probabilities are from the unsharded model's: KL(unsharded || wire) in 1e-4
                    nats, the mean over two windows a rank of held-out text
    layer, worst    relative error of a layer's output from the unsharded layer's input, so with the same experts: the
                    median over the layers, and the largest

The last two are also printed for the model that thinwire ships, and for both how far a layer's largest input is from
their root mean square: outliers cost a quantised row its accuracy.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import thinwire as tw
from thinwire.tools.demo.tiny_moe import HELD_OUT_PATH, load_tiny_moe, text_windows

PROMPTS = (
    "The capital of France is",
    "A mixture of experts is a neural network in which",
    "def fibonacci(n):",
    "Water boils at a lower temperature on a mountain because",
)
WINDOWS, CONTEXT = 2, 512  # of held-out text that a rank reads, and their tokens


class CountingExpertParallel(tw.ExpertParallel):
    """Adds up what its rounds send."""

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        d = super().dispatch(*args, **kwargs)
        self.tokens = getattr(self, "tokens", 0) + args[0].shape[0]
        for leg in (d.dispatch_traffic, d.combine_traffic):
            self.wire_bytes = getattr(self, "wire_bytes", 0) + leg.wire_bytes
            self.logical_bytes = getattr(self, "logical_bytes", 0) + leg.logical_bytes
        return d


class Sharded(nn.Module):
    """A layer of thinwire in the place of transformers' block, some of which return the router's scores besides."""

    def __init__(self, layer: tw.MoELayer, with_scores: bool) -> None:
        super().__init__()
        self.layer, self.with_scores = layer, with_scores

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, None]:
        return (self.layer(x), None) if self.with_scores else self.layer(x)


def formats_of(name: str) -> dict[str, str]:
    """ "int8", or "int8/none": the way there / the way back."""
    there, _, back = name.partition("/")
    return {"wire": there, "combine_wire": back or there}


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def inputs_of(modules: dict[int, nn.Module], run: Callable[[], Any]) -> tuple[dict[int, torch.Tensor], Any]:
    """What the modules are called with, and what `run` returns."""
    seen: dict[int, torch.Tensor] = {}

    def note(number: int) -> Callable[..., None]:
        return lambda module, args: seen.update({number: args[0].detach().clone()})

    handles = [module.register_forward_pre_hook(note(number)) for number, module in modules.items()]
    result = run()
    for handle in handles:
        handle.remove()
    return seen, result


def greedy(model: nn.Module, ids: torch.Tensor, count: int) -> torch.Tensor:
    """[1, prompt + count] tokens; every rank makes as many calls, whatever its text."""
    fed, past = ids, None
    for _ in range(count):
        out = model(fed, past_key_values=past, use_cache=True)
        fed, past = out.logits[:, -1:].argmax(-1), out.past_key_values
        ids = torch.cat([ids, fed], dim=1)
    return ids


def held_out_windows(tokenizer: Any, rank: int) -> list[torch.Tensor]:
    """[1, CONTEXT] tokens each; other ones for each rank, as far as the text goes."""
    ids = tokenizer(HELD_OUT_PATH.read_text(), return_tensors="pt").input_ids[0]
    windows = ids[: len(ids) // CONTEXT * CONTEXT].view(-1, 1, CONTEXT)
    return list(windows.roll(-WINDOWS * rank, 0)[:WINDOWS])


def log_probabilities(model: nn.Module, window: torch.Tensor) -> torch.Tensor:
    """[tokens, vocabulary], float64: of float32, a difference of 1e-7 would be rounding."""
    return model(window).logits[0].double().log_softmax(-1)


def outlier(inputs: dict[int, torch.Tensor]) -> list[float]:
    """Of each layer's input, the largest element by the root mean square of its row; the largest of all rows."""
    return [float((x.abs().amax(-1) / x.square().mean(-1).sqrt()).max()) for x in inputs.values()]


@torch.no_grad()
def score_model(comm: tw.Communicator, folder: str, wires: list[str], count: int) -> dict[str, Any]:
    """One rank: the figures of each wire, of its own text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    blocks = {n: layer.mlp for n, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "experts")}
    prompt = tokenizer(PROMPTS[comm.rank % len(PROMPTS)], return_tensors="pt").input_ids
    expected = greedy(model, prompt, count)
    windows = held_out_windows(tokenizer, comm.rank)
    exact = [log_probabilities(model, window) for window in windows]
    inputs, whole_logits = inputs_of(blocks, lambda: model(expected).logits)
    outputs = {n: block(inputs[n]) for n, block in blocks.items()}
    result: dict[str, Any] = {"outliers": outlier(inputs), "wires": {}, "text": tokenizer.decode(expected[0])}
    first = tw.load_moe_layer(folder, next(iter(blocks)))
    sizes = first.num_experts, first.top_k, first.hidden_size
    longest = max(CONTEXT, *comm.all_gather_object(expected.shape[1]))
    for wire in wires:
        ep = CountingExpertParallel(comm, *sizes, longest, **formats_of(wire))
        layers = {n: tw.load_moe_layer(folder, n, ep) for n in blocks}
        for n, layer in layers.items():
            model.model.layers[n].mlp = Sharded(layer, isinstance(outputs[n], tuple))
        comm.barrier()
        started = time.perf_counter()
        got = greedy(model, prompt, count)
        seconds = time.perf_counter() - started
        bytes_a_token = [sent / ep.tokens for sent in (ep.wire_bytes, ep.logical_bytes)]
        differs = (got != expected)[0, prompt.shape[1] :].nonzero()
        now, logits = inputs_of({n: model.model.layers[n].mlp for n in blocks}, lambda: model(expected).logits)
        flips = sum(flipped(layer, now[n], inputs[n]) for n, layer in layers.items())
        kl = [divergence(exact[n], log_probabilities(model, window)) for n, window in enumerate(windows)]
        errors = []
        for n, layer in layers.items():
            wanted = outputs[n][0] if isinstance(outputs[n], tuple) else outputs[n]
            errors.append(relative(layer(inputs[n]), wanted))
        result["wires"][wire] = {
            "seconds": seconds,
            "wire_bytes": bytes_a_token[0],
            "logical_bytes": bytes_a_token[1],
            "diverges_at": int(differs[0]) if len(differs) else None,
            "flips": flips,
            "routed": len(layers) * expected.shape[1],
            "logits": relative(logits, whole_logits),
            "kl": statistics.fmean(kl),
            "layers": errors,
        }
        for n, block in blocks.items():
            model.model.layers[n].mlp = block
        ep.close()
    return result


def divergence(exact: torch.Tensor, got: torch.Tensor) -> float:
    """KL(exact || got) in nats, the mean over the tokens."""
    return float(nn.functional.kl_div(got, exact, reduction="batchmean", log_target=True))


def flipped(layer: tw.MoELayer, x: torch.Tensor, other: torch.Tensor) -> int:
    """How many tokens go to other experts with one input than with the other."""
    ids = [layer.route(tensor.flatten(0, -2)).topk_ids.sort(1).values for tensor in (x, other)]
    return int((ids[0] != ids[1]).any(1).sum())


@torch.no_grad()
def score_tiny_moe(comm: tw.Communicator, wires: list[str]) -> dict[str, Any]:
    """The same of the model that thinwire ships: each rank reads every so-many-th window of its held-out text."""
    torch.set_num_threads(1)
    whole = load_tiny_moe()
    config = whole.config
    tokens = text_windows(HELD_OUT_PATH.read_bytes(), config.context)[0][0][comm.rank :: comm.size][:2]
    norms = {n: block.moe_norm for n, block in enumerate(whole.blocks)}
    before, _ = inputs_of(norms, lambda: whole(tokens))
    inputs = {n: norms[n](x) for n, x in before.items()}
    result: dict[str, Any] = {"outliers": outlier(inputs), "wires": {}}
    for wire in wires:
        sizes = (config.num_experts, config.top_k, config.hidden_size, tokens.numel())
        with tw.ExpertParallel(comm, *sizes, **formats_of(wire)) as ep:
            layers = load_tiny_moe(ep=ep).blocks
            errors = [relative(layers[n].moe(x), whole.blocks[n].moe(x)) for n, x in inputs.items()]
        result["wires"][wire] = {"layers": errors}
    return result


def summary(ranks: list[dict[str, Any]], wire: str, count: int) -> str:
    """A line of the table."""
    runs = [rank["wires"][wire] for rank in ranks]
    layers = [statistics.fmean(errors) for errors in zip(*(run["layers"] for run in runs), strict=True)]
    ends = f"{statistics.median(layers):10.1e}{max(layers):10.1e}"
    if "seconds" not in runs[0]:
        return f"{wire:10}{'':73}{ends}"
    mean = {
        name: statistics.fmean(run[name] for run in runs) for name in ("wire_bytes", "logical_bytes", "logits", "kl")
    }
    diverging = min((run["diverges_at"] for run in runs if run["diverges_at"] is not None), default="-")
    flips = f"{sum(run['flips'] for run in runs)}/{sum(run['routed'] for run in runs)}"
    speed = len(runs) * count / max(run["seconds"] for run in runs)
    return (
        f"{wire:10}{speed:8.1f}{mean['wire_bytes']:9.0f}{mean['logical_bytes']:9.0f}{diverging!s:>13}{flips:>15}"
        f"{mean['logits']:10.1e}{1e4 * mean['kl']:9.2f}{ends}"
    )


def table(title: str, ranks: list[dict[str, Any]], count: int) -> str:
    """The figures of one model."""
    outliers = [max(values) for values in zip(*(rank["outliers"] for rank in ranks), strict=True)]
    lines = [
        f"{title}: a layer's largest input is {statistics.median(outliers):.0f} times its row's root mean square",
        f"(median of the layers; {max(outliers):.0f} at most)",
        "wire      tokens/s     wire  logical  diverges at          flips    logits       KL     layer     worst",
    ]
    return "\n".join(lines + [summary(ranks, wire, count) for wire in ranks[0]["wires"]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="a Hugging Face checkpoint, with its tokenizer")
    parser.add_argument("--ranks", type=int, default=2)
    wires = ["none", "int10+h64", "int8+h64", "int8", "int8/none", "none/int8", "int8:32", "int8:row", "fp8"]
    wires += ["int6+h64", "int4"]
    parser.add_argument("--wires", nargs="+", default=wires, help="a format, or WAY_THERE/WAY_BACK")
    parser.add_argument("--tokens", type=int, default=32, help="to generate, a rank")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    run = partial(tw.testing.run_ranks, timeout=options.timeout)
    tiny = run(score_tiny_moe, options.ranks, options.wires)
    print(table("the model that thinwire ships", tiny, 0))
    ranks = run(score_model, options.ranks, options.folder, options.wires, options.tokens)
    print(table(Path(options.folder).name, ranks, options.tokens))
    for rank in ranks:
        print(repr(rank["text"]))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        written = {
            "command": shlex.join(["python", *sys.argv]),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "model": Path(options.folder).name,
            "tokens": options.tokens,
            "ranks": ranks,
            "tiny_moe": tiny,
        }
        options.json.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
