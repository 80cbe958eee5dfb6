"""Train the small MoE language model that thinwire ships, on the documentation text inside the Python standard library.

    python examples/train_tiny_moe.py --out build/tiny_moe

writes ``tiny_moe.safetensors`` (bf16), ``heldout.txt`` (text the model is not trained on) and ``MODEL_CARD.md`` into
the folder. All numbers in the card are measured here, on the saved file after reloading it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import textwrap
import time
from collections import Counter
from pathlib import Path
from pydoc_data.topics import topics

import torch
from einops import rearrange
from torch.nn import functional as F

from thinwire.moe.checkpoint import save_checkpoint
from thinwire.moe.routing import load_balancing_loss
from thinwire.tools.demo.tiny_moe import TinyMoE, TinyMoEConfig, bits_per_byte, load_tiny_moe, text_windows

HELDOUT_BYTES = 16 * 1024
TOPIC_CHARACTERS = range(1000, 10_001)
SHARED_CHARACTERS = 100
SEPARATOR = "\n\n"

CARD = """# tiny_moe: a small byte-level MoE language model

It is shipped so that the effect of a wire format on a model's output can be measured in bits per byte without a
download. It is not meant to write text. This card was written by `examples/train_tiny_moe.py`.

| | |
|---|---|
| parameters | {parameters:,} |
| sizes | {layers} layers, hidden size {hidden}, {experts} experts of width {ff}, top-{top_k}, context {context} bytes |
| file | `tiny_moe.safetensors`, {file_bytes:,} bytes, bf16 |
| **held-out text** | **{heldout_bits:.4f} bits per byte** (loss {heldout_loss:.4f} nats per byte) |
| training text | {train_bits:.4f} bits per byte (loss {train_loss:.4f} nats per byte) |
| held-out text under the training text's byte histogram | {histogram_bits:.4f} bits per byte |
| an expert's share of its layer's tokens, held-out | {min_share:.1%} to {max_share:.1%} (even: {even_share:.1%}) |

The numbers are those of the bf16 file, reloaded, computed in fp32. Text is cut into windows of {context} bytes that do
not overlap; a byte is predicted from the bytes before it in its window.

## Data

The values of `pydoc_data.topics.topics` of Python {python}: {num_topics} topics of the Python documentation in English.
They, and so `heldout.txt`, are under the licence in `LICENSE-PYTHON-DOCS.txt`.

Held out are whole topics, {heldout_size:,} bytes in all:
{heldout_topics}.

Topics of {shortest} to {longest} characters were taken in the order of the SHA-256 of their name until they added up to
{minimum} bytes. A topic was passed over if any {shared} characters of it in a row also occur in another topic, with all
white space made single blanks. The training text is all other topics in alphabetical order, {train_size:,} bytes; some
of its topics repeat parts of others. No gradient came from the held-out text, but settings were compared on it.

| text | SHA-256 |
|---|---|
| held-out | `{heldout_sha}` |
| training | `{train_sha}` |

## Training

    {command}

{steps:,} steps of {batch} windows of {context} bytes ({epochs:.1f} times the training text). AdamW, peak learning rate
{lr} (linear warm-up over {warmup} steps, then a cosine down to a twentieth), weight decay {weight_decay}, dropout
{dropout}, gradient norm clipped to 1, load-balancing loss times {aux_weight}, seed {seed}.

It took {minutes:.1f} minutes of wall time on {cores} CPU cores (torch {torch}, {threads} threads).
"""


def heldout_topic_names() -> list[str]:
    """The topics to hold out; see the card for the rule."""
    plain = {name: " ".join(text.split()) for name, text in topics.items()}
    windows = {
        name: {text[i : i + SHARED_CHARACTERS] for i in range(len(text) - SHARED_CHARACTERS + 1)}
        for name, text in plain.items()
    }
    occurrences = Counter(window for found in windows.values() for window in found)
    chosen: list[str] = []
    size = 0
    for name in sorted(topics, key=lambda name: hashlib.sha256(name.encode()).hexdigest()):
        own = all(occurrences[window] == 1 for window in windows[name])
        if size < HELDOUT_BYTES and len(topics[name]) in TOPIC_CHARACTERS and own:
            chosen.append(name)
            size += len(topics[name].encode())
    if size < HELDOUT_BYTES:
        raise SystemExit(f"only {size} bytes of topics without overlap, need {HELDOUT_BYTES}")
    return chosen


def split_text(heldout_names: list[str]) -> tuple[bytes, bytes]:
    """The training text (all other topics in alphabetical order) and the held-out text."""
    train_names = [name for name in sorted(topics) if name not in heldout_names]
    train_text, heldout = (SEPARATOR.join(topics[name] for name in names) for names in (train_names, heldout_names))
    return train_text.encode(), heldout.encode()


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Linear warm-up, then a cosine from ``--lr`` down to a twentieth of it."""
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    progress = (step - args.warmup) / max(1, args.steps - args.warmup)
    return args.lr * (0.05 + 0.95 * 0.5 * (1.0 + math.cos(math.pi * progress)))


def train(model: TinyMoE, text: bytes, heldout: bytes, args: argparse.Namespace) -> None:
    """Minimise cross-entropy plus the load-balancing loss on random windows of ``text``; prints progress lines."""
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    context = model.config.context
    experts = model.config.num_experts
    offsets = torch.arange(context + 1)
    # Norm gains and the embedding are not decayed: they set scales, decay would only fight the loss over them.
    decayed = [p for name, p in model.named_parameters() if p.dim() >= 2 and "embedding" not in name]
    others = [p for name, p in model.named_parameters() if p.dim() < 2 or "embedding" in name]
    groups = [{"params": decayed, "weight_decay": args.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.98))
    sampler = torch.Generator().manual_seed(args.seed)
    started = time.monotonic()
    for step in range(args.steps):
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(step, args)
        starts = torch.randint(0, len(data) - context, (args.batch, 1), generator=sampler)
        window = data[starts + offsets].long()
        logits, routings = model.forward_with_routing(window[:, :-1])
        logits = rearrange(logits, "windows length bytes -> (windows length) bytes")
        loss = F.cross_entropy(logits, window[:, 1:].flatten())
        balance = torch.stack([load_balancing_loss(r.router_logits, r.topk_ids, experts) for r in routings])
        optimiser.zero_grad()
        (loss + args.aux_weight * balance.mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if (step + 1) % args.report_every == 0 or step + 1 == args.steps:
            print(
                f"step {step + 1:5d}  train {loss.item() / math.log(2.0):.3f} bits/byte  "
                f"balance {balance.mean().item():.3f}  held-out {bits_per_byte(model, heldout):.3f}  "
                f"{time.monotonic() - started:.0f} s",
                flush=True,
            )


def histogram_bits(train_text: bytes, heldout: bytes) -> float:
    """Bits per byte of the held-out text under the byte frequencies of the training text, each count plus one."""
    counts = Counter(train_text)
    total = len(train_text) + 256
    return -sum(math.log2((counts[byte] + 1) / total) for byte in heldout) / len(heldout)


@torch.no_grad()
def expert_shares(model: TinyMoE, text: bytes) -> torch.Tensor:
    """[layers, experts]: the share of each expert in its layer's routed (token, choice) pairs."""
    inputs, _ = text_windows(text, model.config.context)[0]
    _, routings = model.forward_with_routing(inputs)
    counts = torch.stack([torch.bincount(r.topk_ids.flatten(), minlength=r.router_logits.shape[1]) for r in routings])
    return counts / counts.sum(dim=1, keepdim=True)


def write_card(args: argparse.Namespace, names: list[str], train_text: bytes, heldout: bytes, seconds: float) -> None:
    """Measure the saved file and write ``MODEL_CARD.md`` beside it."""
    path = args.out / "tiny_moe.safetensors"
    model = load_tiny_moe(path)
    config = model.config
    heldout_bits, train_bits = bits_per_byte(model, heldout), bits_per_byte(model, train_text)
    shares = expert_shares(model, heldout)
    options = ("steps", "seed", "batch", "lr", "dropout", "weight_decay", "aux_weight", "warmup", "threads")
    flags = " ".join(f"--{name.replace('_', '-')} {getattr(args, name)}" for name in options)
    histogram = histogram_bits(train_text, heldout)
    card = CARD.format(
        **{name: getattr(args, name) for name in options},
        parameters=sum(p.numel() for p in model.parameters()),
        layers=config.num_layers,
        hidden=config.hidden_size,
        experts=config.num_experts,
        ff=config.ff_size,
        top_k=config.top_k,
        context=config.context,
        file_bytes=path.stat().st_size,
        heldout_bits=heldout_bits,
        heldout_loss=heldout_bits * math.log(2.0),
        train_bits=train_bits,
        train_loss=train_bits * math.log(2.0),
        histogram_bits=histogram,
        min_share=shares.min().item(),
        max_share=shares.max().item(),
        even_share=1.0 / config.num_experts,
        python=platform.python_version(),
        torch=torch.__version__,
        num_topics=len(topics),
        heldout_size=len(heldout),
        heldout_sha=hashlib.sha256(heldout).hexdigest(),
        heldout_topics=textwrap.fill(", ".join(f"`{name}`" for name in names), 100),
        shortest=TOPIC_CHARACTERS[0],
        longest=TOPIC_CHARACTERS[-1],
        minimum=HELDOUT_BYTES,
        shared=SHARED_CHARACTERS,
        train_size=len(train_text),
        train_sha=hashlib.sha256(train_text).hexdigest(),
        command=f"python examples/train_tiny_moe.py {flags} --out {args.out.as_posix()}",
        epochs=args.steps * args.batch * config.context / len(train_text),
        minutes=seconds / 60.0,
        cores=os.cpu_count(),
    )
    (args.out / "MODEL_CARD.md").write_text(card, encoding="utf-8")
    print(f"parameters {sum(p.numel() for p in model.parameters()):,}, file {path.stat().st_size:,} bytes")
    print(f"expert shares {shares.min().item():.3f}..{shares.max().item():.3f}")
    print(f"byte histogram of the training text: held-out {histogram:.4f} bits/byte")
    print(f"saved file: held-out {heldout_bits:.4f} bits/byte, training text {train_bits:.4f} bits/byte")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/tiny_moe"))
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--aux-weight", type=float, default=0.02)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--report-every", type=int, default=100)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    names = heldout_topic_names()
    train_text, heldout = split_text(names)
    print(f"{len(train_text):,} bytes to train on, {len(heldout):,} held out: {', '.join(names)}", flush=True)

    model = TinyMoE(TinyMoEConfig(dropout=args.dropout))
    started = time.monotonic()
    train(model, train_text, heldout, args)
    seconds = time.monotonic() - started

    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "heldout.txt").write_bytes(heldout)
    training = {"seed": args.seed, "steps": args.steps, "batch": args.batch, "python": platform.python_version()}
    metadata = {"config": model.config.to_json(), "training": json.dumps(training, sort_keys=True)}
    save_checkpoint(model, args.out / "tiny_moe.safetensors", metadata, dtype=torch.bfloat16)
    write_card(args, names, train_text, heldout, seconds)


if __name__ == "__main__":
    main()
