"""A small byte-level language model with MoE layers, and what each wire format does to it: `thinwire demo`.

The trained weights and the text that they were not trained on lie beside this file. They are shipped so that the effect
of a wire format can be measured in bits per byte, and for nothing else.
"""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from einops import rearrange
from torch import nn
from torch.nn import functional as F

from thinwire.comm.communicator import Communicator
from thinwire.errors import CheckpointError
from thinwire.moe.checkpoint import load_checkpoint, read_metadata
from thinwire.moe.dispatched import Dispatched, ExpertRows
from thinwire.moe.layer import MoELayer, Routing
from thinwire.moe.parallel import ExpertParallel
from thinwire.tools.progress import Report

TINY_MOE_PATH = Path(__file__).with_name("tiny_moe.safetensors")
HELD_OUT_PATH = Path(__file__).with_name("heldout.txt")
VOCABULARY = 256
#: Windows that a rank scores in one call of the model, and steps over which the legs' errors are measured.
_WINDOWS_PER_STEP, _ERROR_STEPS = 4, 2


@dataclass(frozen=True)
class TinyMoEConfig:
    """Sizes of a `TinyMoE`; ``dropout`` acts on the output of every attention and MoE layer, in training."""

    hidden_size: int = 256
    num_layers: int = 3
    num_heads: int = 4
    num_experts: int = 8
    top_k: int = 2
    ff_size: int = 128
    context: int = 256
    dropout: float = 0.0

    def to_json(self) -> str:
        """As stored under ``config`` in a checkpoint's metadata."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> TinyMoEConfig:
        """The inverse of `to_json`; raises CheckpointError for anything else."""
        try:
            return cls(**json.loads(text))
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"not the configuration of a TinyMoE: {text!r} ({error})") from error


def _rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of [B, heads, S, D] (Su et al., "RoFormer", 2021, arXiv:2104.09864)."""
    sequence, half = x.shape[-2], x.shape[-1] // 2
    frequencies = 10000.0 ** (-torch.arange(half, dtype=torch.float32, device=x.device) / half)
    angles = torch.arange(sequence, dtype=torch.float32, device=x.device)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class CausalAttention(nn.Module):
    """Multi-head causal self-attention with rotary positions, [B, S, hidden_size] -> the same."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        if hidden_size % (2 * num_heads):
            raise ValueError(f"hidden_size must be a multiple of 2 * num_heads = {2 * num_heads}, got {hidden_size}")
        self.num_heads = num_heads
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.out = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        split = "batch sequence (three heads width) -> three batch heads sequence width"
        query, key, value = rearrange(self.qkv(x), split, three=3, heads=self.num_heads)
        attended = F.scaled_dot_product_attention(_rotate(query), _rotate(key), value, is_causal=True)
        return self.out(rearrange(attended, "batch heads sequence width -> batch sequence (heads width)"))


class Block(nn.Module):
    """Pre-norm attention and MoE feed-forward, each with a residual connection."""

    def __init__(self, config: TinyMoEConfig, ep: ExpertParallel | None) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=1e-6)
        self.attention = CausalAttention(config.hidden_size, config.num_heads)
        self.moe_norm = nn.RMSNorm(config.hidden_size, eps=1e-6)
        self.moe = MoELayer(config.hidden_size, config.ff_size, config.num_experts, config.top_k, ep=ep)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Routing]:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        y, routing = self.moe.forward_with_routing(self.moe_norm(x))
        return x + self.dropout(y), routing


class TinyMoE(nn.Module):
    """A causal transformer over bytes whose feed-forward layers are all `MoELayer`. Computes in fp32.

    The output projection is the embedding table. With ``ep`` every MoE layer holds only this rank's experts, and a
    forward pass is collective: ranks may differ in batch size (also 0) but not in how often they call it.

    >>> TinyMoE(TinyMoEConfig(num_layers=1))(torch.zeros(2, 5, dtype=torch.int64)).shape
    torch.Size([2, 5, 256])
    """

    def __init__(self, config: TinyMoEConfig | None = None, ep: ExpertParallel | None = None) -> None:
        super().__init__()
        self.config = config or TinyMoEConfig()
        self.embedding = nn.Embedding(VOCABULARY, self.config.hidden_size)
        self.blocks = nn.ModuleList(Block(self.config, ep) for _ in range(self.config.num_layers))
        self.final_norm = nn.RMSNorm(self.config.hidden_size, eps=1e-6)
        nn.init.normal_(self.embedding.weight, std=1.0 / math.sqrt(self.config.hidden_size))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Bytes int64 [B, S], S <= ``config.context`` -> logits fp32 [B, S, 256] of the byte that follows each."""
        return self.forward_with_routing(tokens)[0]

    def forward_with_routing(self, tokens: torch.Tensor) -> tuple[torch.Tensor, list[Routing]]:
        """Like `forward`, and the routing of every layer besides."""
        if tokens.dim() != 2 or tokens.shape[1] > self.config.context:
            raise ValueError(f"tokens must be [batch, at most {self.config.context}], got {tuple(tokens.shape)}")
        # The table is scaled for its second use, as output projection; RMS norms make the size of x itself irrelevant
        # for the layers, but residuals of size one should not drown it.
        x = self.embedding(tokens) * math.sqrt(self.config.hidden_size)
        routings = []
        for block in self.blocks:
            x, routing = block(x)
            routings.append(routing)
        return F.linear(self.final_norm(x), self.embedding.weight), routings


def load_tiny_moe(path: str | os.PathLike[str] = TINY_MOE_PATH, ep: ExpertParallel | None = None) -> TinyMoE:
    """A trained `TinyMoE` in evaluation mode, with fp32 weights on the CPU; with ``ep``, only this rank's experts.

    Raises:
        CheckpointError: its metadata has no configuration under ``config``, or it does not fit the model it describes.
    """
    metadata = read_metadata(path)
    if "config" not in metadata:
        raise CheckpointError(f"{path} has no 'config' in its metadata, only {sorted(metadata)}")
    model = TinyMoE(TinyMoEConfig.from_json(metadata["config"]), ep=ep)
    load_checkpoint(model, path)
    return model.eval()


def text_windows(text: bytes, context: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Cut ``text`` into windows of inputs and the bytes that follow them; every byte but the first is a target once.

    Gives pairs of int64 [windows, length]: the full windows of length ``context``, then the shorter rest as one.

    >>> [pair[1].tolist() for pair in text_windows(bytes([1, 2, 3, 4, 5, 6]), context=2)]
    [[[2, 3], [4, 5]], [[6]]]
    """
    data = torch.tensor(list(text), dtype=torch.int64, device="cpu")
    full = max(len(data) - 1, 0) // context * context
    pairs = (
        (data[:full].view(-1, context), data[1 : full + 1].view(-1, context)),
        (data[full:-1].view(1, -1), data[full + 1 :].view(1, -1)),
    )
    return [(inputs, targets) for inputs, targets in pairs if inputs.numel()]


def nats(logits: torch.Tensor, targets: torch.Tensor) -> float:
    """The targets' code length, summed in fp64: logits [B, S, 256], bytes [B, S]."""
    return F.cross_entropy(logits.double().flatten(0, 1), targets.flatten(), reduction="sum").item()


@torch.no_grad()
def bits_per_byte(model: TinyMoE, text: bytes, *, batch: int = 16) -> float:
    """Mean code length, ``-log2 p(byte | bytes before it in its window)``, over all of ``text`` but its first byte.

    The model is put into evaluation mode for the time. With a sharded model the call is collective: every rank passes
    a text of the same length.

    Raises:
        ValueError: ``text`` has fewer than 2 bytes, or ``batch`` is below 1.
    """
    if len(text) < 2 or batch < 1:
        raise ValueError(f"need at least 2 bytes and a batch >= 1, got {len(text)} bytes and a batch of {batch}")
    was_training = model.training
    model.eval()
    length = 0.0
    for inputs, targets in text_windows(text, model.config.context):
        length += sum(nats(model(x), y) for x, y in zip(inputs.split(batch), targets.split(batch), strict=True))
    model.train(was_training)
    return length / math.log(2.0) / (len(text) - 1)


@dataclass(frozen=True)
class WireScore:
    """What the text cost under one wire format. Bytes are per token and MoE layer, of rows that change ranks."""

    wire: str
    bits_per_byte: float
    largest_logit_difference: float
    dispatch_logical_bytes: float
    dispatch_wire_bytes: float
    dispatch_error: float
    combine_logical_bytes: float
    combine_wire_bytes: float
    combine_error: float
    seconds: float


class _MeasuredExpertParallel(ExpertParallel):
    """Adds up what its rounds send and, while there is an `exact` one to repeat them, how far off it arrives."""

    exact: ExpertParallel | None
    sent: torch.Tensor  # float64 [5]: tokens, then logical and wire bytes of dispatch, then of combine
    squares: torch.Tensor  # float64 [4]: dispatch error, dispatch, combine error, combine

    def dispatch(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, *, lane: int = 0, layer: int = 0
    ) -> Dispatched:
        d = super().dispatch(x, topk_ids, topk_weights, lane=lane, layer=layer)
        legs = d.dispatch_traffic, d.combine_traffic
        sent = [x.shape[0], *(count for leg in legs for count in (leg.logical_bytes, leg.wire_bytes))]
        self.sent += torch.tensor(sent, dtype=torch.float64, device="cpu")
        if self.exact is not None:
            self._exact_round = self.exact.dispatch(x, topk_ids, topk_weights)
            self._compare(0, d.tokens, self._exact_round.tokens)
        return d

    def combine(
        self, expert_out: ExpertRows, d: Dispatched, *, weighted: bool = False, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        y = super().combine(expert_out, d, weighted=weighted, out=out)
        if self.exact is not None:
            self._compare(2, y, self.exact.combine(expert_out, self._exact_round, weighted=weighted))
        return y

    def _compare(self, position: int, value: torch.Tensor, exact: torch.Tensor) -> None:
        self.squares[position] += (value.double() - exact.double()).square().sum()
        self.squares[position + 1] += exact.double().square().sum()


@torch.inference_mode()
def score_text(comm: Communicator, text: bytes, wires: list[str], report: Report) -> tuple[float, list[WireScore]]:
    """Bits per byte of a text under the unsharded model, and its score in each wire format. Collective."""
    report = report if comm.rank == 0 else Report(None)
    unsharded = load_tiny_moe()
    config = unsharded.config
    sizes = (config.num_experts, config.top_k, config.hidden_size, _WINDOWS_PER_STEP * config.context)
    # This rank's inputs and targets, step by step; every rank has as many steps, some of no windows.
    steps, each = [], _WINDOWS_PER_STEP * comm.size
    for inputs, targets in text_windows(text, config.context):
        for start in range(0, inputs.shape[0], each):
            mine = slice(start + comm.rank, start + each, comm.size)
            steps.append((inputs[mine], targets[mine]))

    def logits_of(model: TinyMoE, label: str) -> list[torch.Tensor]:
        report.stage(f"scoring with {label} ...", len(steps))
        logits = []
        for inputs, _ in steps:
            logits.append(model(inputs))
            report.step()
        return logits

    def bits_of(logits: list[torch.Tensor]) -> float:
        own = sum(nats(got, targets) for got, (_, targets) in zip(logits, steps, strict=True))
        return sum(comm.all_gather_object(own)) / math.log(2.0) / (len(text) - 1)

    def summed(values: torch.Tensor) -> list[float]:
        return torch.stack(comm.all_gather_object(values)).sum(0).tolist()

    def score(wire: str) -> WireScore:
        ep = _MeasuredExpertParallel(comm, *sizes, wire=wire)
        ep.exact = ExpertParallel(comm, *sizes, wire="none")
        ep.sent, ep.squares = (torch.zeros(size, dtype=torch.float64, device="cpu") for size in (5, 4))
        model = load_tiny_moe(ep=ep)
        report.stage(f"comparing {wire} with none; kernels may be compiled ...")
        for inputs, _ in steps[:_ERROR_STEPS]:  # also the warm-up of what is timed below
            model(inputs)
        squares = summed(ep.squares)
        ep.exact = None
        ep.sent.zero_()
        comm.barrier()
        started = time.perf_counter()
        logits = logits_of(model, wire)
        comm.barrier()
        seconds = time.perf_counter() - started
        pairs = zip(logits, expected, strict=True)
        difference = max(float((got - want).abs().max()) if len(got) else 0.0 for got, want in pairs)
        tokens, *counts = summed(ep.sent)
        errors = [math.sqrt(squares[leg] / squares[leg + 1]) for leg in (0, 2)]
        legs = counts[0] / tokens, counts[1] / tokens, errors[0], counts[2] / tokens, counts[3] / tokens, errors[1]
        return WireScore(wire, bits_of(logits), max(comm.all_gather_object(difference)), *legs, seconds)

    expected = logits_of(unsharded, "the unsharded model")
    return bits_of(expected), [score(wire) for wire in wires]
