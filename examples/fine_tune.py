"""Fine-tune the demo's model expert-parallel, on the Python standard library's source code, once for each wire format.

    python examples/fine_tune.py --json build/fine_tune.json --png build/fine_tune.png

Every run starts from the shipped model, which was trained on documentation, and sees the same windows of text:

    none                nothing is quantised
    int8 forward        tokens travel in int8, gradients as they are (`wire="int8"`)
    int8 both ways      gradients in int8 too (`grad_wire="int8"`)

Each rank holds its share of the experts, and a replica of the rest, of which `tw.all_reduce` adds the gradients up.
Needs matplotlib for the picture: `pip install matplotlib`.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import shlex
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from torch.nn import functional as F

import thinwire as tw
from thinwire.moe.routing import load_balancing_loss
from thinwire.tools.demo.tiny_moe import TinyMoE, bits_per_byte, load_tiny_moe

RUNS = {
    "none": {"wire": "none", "grad_wire": "none"},
    "int8 forward": {"wire": "int8", "grad_wire": "none"},
    "int8 both ways": {"wire": "int8", "grad_wire": "int8"},
}
TRAIN_ON = (
    "argparse",
    "ast",
    "calendar",
    "dataclasses",
    "difflib",
    "enum",
    "functools",
    "inspect",
    "pathlib",
    "random",
)
HELD_OUT, HELD_OUT_BYTES = "statistics", 8192
WARM_UP = 20  # steps in which the learning rate grows
BALANCE = 0.02  # weight of the load-balancing loss


def source_of(*modules: str) -> bytes:
    """The text of modules of the standard library, one after the other."""
    library = Path(sysconfig.get_path("stdlib"))
    paths = (library / f"{name}.py" for name in modules)
    return b"\n\n".join(
        (path if path.exists() else path.with_suffix("") / "__init__.py").read_bytes() for path in paths
    )


class Training(torch.nn.Module):
    """The loss of windows of text, in nats a byte, alone and with the experts' balance."""

    def __init__(self, model: TinyMoE) -> None:
        super().__init__()
        self.model = model

    def forward(self, windows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits, routings = self.model.forward_with_routing(windows[:, :-1])
        logits = rearrange(logits, "windows length bytes -> (windows length) bytes")
        loss = F.cross_entropy(logits, windows[:, 1:].flatten())
        experts = self.model.config.num_experts
        balance = [load_balancing_loss(r.router_logits, r.topk_ids, experts) for r in routings]
        return loss, loss + BALANCE * torch.stack(balance).mean()


def fine_tune(comm: tw.Communicator, formats: dict[str, str], options: dict[str, Any]) -> dict[str, Any]:
    """One rank of one run.

    Returns:
        losses: bits a byte of every step, the mean over the ranks; held_out: bits a byte before and after; seconds.
    """
    torch.manual_seed(options["seed"])
    torch.set_num_threads(1)
    config = load_tiny_moe().config
    windows, context = options["windows"], config.context
    ep = tw.ExpertParallel(comm, config.num_experts, config.top_k, config.hidden_size, windows * context, **formats)
    model = load_tiny_moe(ep=ep).train()
    text = torch.frombuffer(bytearray(source_of(*TRAIN_ON)), dtype=torch.uint8)
    held_out = source_of(HELD_OUT)[: options["held_out_bytes"]]
    training = tw.distributed(Training(model))  # gradients become means over ranks
    optimiser = torch.optim.AdamW(model.parameters(), lr=options["lr"], betas=(0.9, 0.98))
    sampler = torch.Generator().manual_seed(options["seed"])
    before, losses, started = bits_per_byte(model, held_out, batch=windows), [], time.perf_counter()
    for step in range(options["steps"]):
        for group in optimiser.param_groups:
            group["lr"] = options["lr"] * min(1.0, (step + 1) / WARM_UP)
        starts = torch.randint(0, len(text) - context, (comm.size, windows, 1), generator=sampler)[comm.rank]
        window = text[starts + torch.arange(context + 1)].long()
        loss, balanced = training(window)
        optimiser.zero_grad()
        balanced.backward()
        tw.clip_grad_norm_(model, 1.0)
        optimiser.step()
        losses.append(sum(comm.all_gather_object(loss.item())) / comm.size / math.log(2.0))
    seconds = time.perf_counter() - started
    after = bits_per_byte(model, held_out, batch=windows)
    ep.close()
    return {"losses": losses, "held_out": [before, after], "seconds": seconds}


def last_loss(losses: list[float]) -> float:
    """The mean over the last tenth of the steps; a single step's depends on its windows."""
    last = losses[-max(1, len(losses) // 10) :]
    return sum(last) / len(last)


def table(results: dict[str, dict[str, Any]]) -> str:
    """A line a run."""
    exact = results["none"]
    lines = ["bits a byte       first loss   last loss   by none's   held out before              after   by none's"]
    for name, run in results.items():
        loss, (before, after) = last_loss(run["losses"]), run["held_out"]
        lines.append(
            f"{name:16}{run['losses'][0]:12.4f}{loss:12.4f}{loss / last_loss(exact['losses']):12.4f}{before:18.4f}"
            f"{after:20.4f}{after / exact['held_out'][1]:12.4f}"
        )
    return "\n".join(lines)


def draw(results: dict[str, dict[str, Any]], path: Path) -> None:
    """The loss curves, and below them how far each is from the one without quantisation."""
    from matplotlib import pyplot

    figure, (curves, apart) = pyplot.subplots(2, 1, figsize=(8, 5.5), sharex=True, layout="constrained")
    exact = results["none"]["losses"]
    for (name, run), style in zip(results.items(), ("-", "--", ":"), strict=True):
        steps, losses = range(1, len(exact) + 1), run["losses"]
        curves.plot(steps, losses, style, label=f"{name}: {last_loss(losses):.4f}")
        apart.plot(steps, [loss - wanted for loss, wanted in zip(losses, exact, strict=True)], style)
    curves.set(ylabel="loss, bits a byte", title="Fine-tuning, expert-parallel (numbers: the last tenth's mean)")
    apart.set(xlabel="step", ylabel="difference from none")
    for axes in (curves, apart):
        axes.grid(alpha=0.3)
    curves.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--windows", type=int, default=2, help="of text, a rank and step")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--held-out-bytes", type=int, default=HELD_OUT_BYTES)
    parser.add_argument("--timeout", type=float, default=3600.0, help="of each run, in seconds")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    options = vars(parser.parse_args())
    results = {}
    for name, formats in RUNS.items():
        ranks = tw.testing.run_ranks(fine_tune, options["ranks"], formats, options, timeout=options["timeout"])
        results[name] = ranks[0]
        print(f"{name}: {results[name]['seconds']:.0f} s", flush=True)
    print(table(results))
    if options["json"]:
        options["json"].parent.mkdir(parents=True, exist_ok=True)
        given = {name: options[name] for name in ("ranks", "steps", "windows", "lr", "seed", "held_out_bytes")}
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        written = {"command": shlex.join(["python", *sys.argv]), **versions, "options": given, "runs": results}
        options["json"].write_text(json.dumps(written, indent=1) + "\n")
    if options["png"]:
        draw(results, options["png"])


if __name__ == "__main__":
    main()
