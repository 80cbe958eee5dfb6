"""A small byte-level language model with MoE layers, trained on English documentation text.

It is shipped so that what a wire format does to a model can be measured in bits per byte, and for nothing else.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from einops import rearrange
from torch import nn
from torch.nn import functional as F

from thinwire.errors import CheckpointError
from thinwire.moe.checkpoint import load_checkpoint, read_metadata
from thinwire.moe.layer import MoELayer, Routing

if TYPE_CHECKING:
    from thinwire.moe.parallel import ExpertParallel

VOCABULARY = 256
TINY_MOE_PATH = Path(__file__).parent / "tiny_moe" / "tiny_moe.safetensors"


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
        """The inverse of `to_json`.

        Raises:
            CheckpointError: ``text`` is not JSON, or has a field that is unknown here.
        """
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

    Raises:
        ValueError: ``hidden_size`` is not a multiple of ``2 * num_heads``, or `MoELayer` refuses its sizes.

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
        """Bytes int64 [B, S], S <= ``config.context`` -> logits fp32 [B, S, 256] of the byte that follows each.

        Raises:
            ValueError: ``tokens`` is not a matrix, or longer than the context.
        """
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


def load_tiny_moe(path: str | os.PathLike[str] | None = None, ep: ExpertParallel | None = None) -> TinyMoE:
    """A trained `TinyMoE` in evaluation mode, with fp32 weights on the CPU.

    With ``ep`` only the experts of this rank are read from the file.

    Args:
        path: a checkpoint whose metadata holds a configuration under ``config``; None for the packaged one.
        ep: the expert-parallel group to spread the experts over.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: the file has no configuration, or does not fit the model it describes.
    """
    path = TINY_MOE_PATH if path is None else path
    metadata = read_metadata(path)
    if "config" not in metadata:
        raise CheckpointError(f"{path} has no 'config' in its metadata, only {sorted(metadata)}")
    model = TinyMoE(TinyMoEConfig.from_json(metadata["config"]), ep=ep)
    load_checkpoint(model, path)
    return model.eval()


def text_windows(text: bytes, context: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Cut ``text`` into windows of inputs and the bytes that follow them; every byte but the first is a target once.

    Returns:
        (inputs, targets) pairs, int64 [windows, length]: all full windows (length ``context``), then the shorter rest
        as one window; either is left out when there is none.

    Raises:
        ValueError: ``context`` is below 1.

    >>> [pair[1].tolist() for pair in text_windows(bytes([1, 2, 3, 4, 5, 6]), context=2)]
    [[[2, 3], [4, 5]], [[6]]]
    """
    if context < 1:
        raise ValueError(f"context must be >= 1, got {context}")
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

    Windows as in `text_windows`, of the model's context; the sum is taken in fp64. The model is put into
    evaluation mode for the time. With a sharded model the call is collective: every rank passes a text of the same
    length, or runs its own loop over `text_windows`.

    Raises:
        ValueError: ``text`` has fewer than 2 bytes, or ``batch`` is below 1.
    """
    if len(text) < 2 or batch < 1:
        raise ValueError(f"need at least 2 bytes and a batch >= 1, got {len(text)} bytes and a batch of {batch}")
    was_training = model.training
    model.eval()
    length = sum(
        nats(model(some_inputs), some_targets)
        for inputs, targets in text_windows(text, model.config.context)
        for some_inputs, some_targets in zip(inputs.split(batch), targets.split(batch), strict=True)
    )
    model.train(was_training)
    return length / math.log(2.0) / (len(text) - 1)
