"""The experts of one rank: two-layer MLPs with stacked weights, run on rows that are sorted by expert."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from thinwire.comm.tensors import is_int, require_dense
from thinwire.compiler import require_flag
from thinwire.errors import RoutingError
from thinwire.log import LOGGER
from thinwire.moe import grouped_mm

#: Tensors of stacked experts, here and in `Int8Experts`.
_STACKED = {"w_in", "w_gate", "w_out", "b_in", "b_gate", "b_out", "s_in", "s_out"}
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"silu": F.silu, "gelu": F.gelu}


@dataclass(frozen=True)
class ClampedSwiGLU:
    """The activation of gpt-oss's gated experts: ``g * sigmoid(alpha * g) * (u + 1)``.

    ``g`` is the gate, at most ``limit``, and ``u`` the other half, within ``-limit .. limit``. Source: "gpt-oss-120b &
    gpt-oss-20b Model Card", OpenAI, 2025 (arXiv:2508.10925), and the models' published code.

    Raises:
        ValueError: a number that is not finite, or a limit that is not above 0.
    """

    alpha: float = 1.702
    limit: float = 7.0

    def __post_init__(self) -> None:
        for name, value in (("alpha", self.alpha), ("limit", self.limit)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"{name} must be a finite number, got {value!r}")
        if self.limit <= 0:
            raise ValueError(f"limit must be above 0, got {self.limit!r}")

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate = gate.clamp(max=self.limit)
        return (up.clamp(-self.limit, self.limit) + 1) * (gate * torch.sigmoid(gate * self.alpha))


class NamedByExperts(nn.Module):
    """A module whose tensors' names say which of a layer's experts they are: ``w_in_of_0to3``, by attribute ``w_in``.

    torch takes what has one name for the same on all ranks. Where these are all of a layer's experts, or it is unknown
    which they are, names are the attributes'. A state_dict with tensors of other experts instead of these is refused.
    """

    held = ""  # what is behind names

    def name_tensors(self, experts: Sequence[int]) -> None:
        """Renames all parameters. `experts`: numbers of those held, ascending."""
        runs: list[list[int]] = []
        for expert in experts:
            if runs and expert == runs[-1][1] + 1:
                runs[-1][1] = expert
            else:
                runs.append([expert, expert])
        shown = "_".join(str(first) if first == last else f"{first}to{last}" for first, last in runs)
        self.held = f"_of_{shown or 'none'}"
        for name in list(self._parameters):
            self._parameters[name + self.held] = self._parameters.pop(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self, name + self.held) if self.held and name in _STACKED else super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name + self.held if name in _STACKED else name, value)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool, missing: Any, more: Any, errors: Any
    ) -> None:
        held = {**self._parameters, **self._buffers}
        own = {prefix + name for name, tensor in held.items() if tensor is not None}
        others = [
            key
            for key in state_dict
            if key.startswith(prefix) and key not in own and key[len(prefix) :].partition("_of_")[0] in _STACKED
        ]
        if others and not own <= state_dict.keys():
            errors.append(
                f"{others[0]} is there, and {min(own - state_dict.keys())} is not: these are other experts. A sharded "
                "layer's state_dict() is for ranks that have the same ones; tw.save_checkpoint's file is for any"
            )
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, more, errors)


class GroupedExperts(NamedByExperts):
    """``num_experts`` two-layer MLPs, held as stacked tensors.

    Expert e computes ``act(x @ w_in[e]) @ w_out[e]``, or, gated, ``(act(x @ w_gate[e]) * (x @ w_in[e])) @ w_out[e]``
    (Shazeer, "GLU Variants Improve Transformer", 2020, arXiv:2002.05202); with biases, each product has its own added.
    On a rank of an expert-parallel group, ``num_experts`` counts that rank's experts; it may be 0.

    Parameters: ``w_in`` and, if gated, ``w_gate`` [num_experts, hidden_size, ff_size]; ``w_out`` [num_experts, ff_size,
    hidden_size]; all drawn from N(0, 1 / fan-in). With ``bias`` also ``b_in``, ``b_gate`` [num_experts, ff_size] and
    ``b_out`` [num_experts, hidden_size], all zero.

    Args:
        activation: "silu", "gelu", or a `ClampedSwiGLU`, which only gated experts have.

    Raises:
        ValueError: a negative ``num_experts``, a size below 1, or an activation that is unknown or needs a gate.

    >>> experts = GroupedExperts(2, hidden_size=4, ff_size=8)
    >>> experts(torch.zeros(3, 4), torch.tensor([1, 2])).shape
    torch.Size([3, 4])
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        ff_size: int,
        *,
        activation: str | ClampedSwiGLU = "silu",
        gated: bool = False,
        bias: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        require_flag("gated", gated)
        require_flag("bias", bias)
        if not is_int(num_experts, 0) or not is_int(hidden_size, 1) or not is_int(ff_size, 1):
            raise ValueError(
                "num_experts must be >= 0, hidden_size and ff_size >= 1, ints below 2**31, got "
                f"{num_experts!r}, {hidden_size!r}, {ff_size!r}"
            )
        if isinstance(activation, ClampedSwiGLU):
            if not gated:
                raise ValueError(f"{activation} is for gated experts: pass gated=True")
        elif not isinstance(activation, str) or activation not in _ACTIVATIONS:
            raise ValueError(f"activation must be one of {sorted(_ACTIVATIONS)} or a ClampedSwiGLU, got {activation!r}")
        self.hidden_size = hidden_size
        self.ff_size = ff_size
        self.activation = activation

        def zeros(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(num_experts, *shape, dtype=dtype, device=device))

        self.w_in = zeros(hidden_size, ff_size)
        self.w_gate = zeros(hidden_size, ff_size) if gated else None
        self.w_out = zeros(ff_size, hidden_size)
        self.draw()
        self.b_in = zeros(ff_size) if bias else None
        self.b_gate = zeros(ff_size) if bias and gated else None
        self.b_out = zeros(hidden_size) if bias else None

    @torch.no_grad()
    def draw(self, expert: int | None = None) -> None:
        """Draws the matrices of one of the experts held here, or of all, from N(0, 1 / fan-in)."""
        for weight in (self.w_in, self.w_gate, self.w_out):
            if weight is not None:
                nn.init.normal_(weight if expert is None else weight[expert], std=1.0 / math.sqrt(weight.shape[1]))

    _logged = ""  # the choice that the logger was told last

    @property
    def num_experts(self) -> int:
        """Experts held here."""
        return self.w_in.shape[0]

    def forward(
        self, tokens: torch.Tensor, expert_counts: torch.Tensor, expert_offsets: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run each expert on its own rows: by a grouped product for each weight, or a loop (`explain` says which).

        On CUDA the former does not wait for the device. It cannot look at the counts, then: those that do not fit the
        rows are cut off instead of refused.

        Args:
            tokens: [N, hidden_size], sorted by expert, in the dtype of the weights.
            expert_counts: integer [num_experts], rows of each expert, padding excluded.
            expert_offsets: integer [num_experts + 1], the row at which each expert begins, and the end of the last; may
                leave padding rows between experts. Without it the experts follow each other without gaps.

        Returns:
            [N, hidden_size] in the order of ``tokens``; rows of no expert are zero. On CUDA, where no gradient is
            wanted, they hold anything: `combine` does not look at them, and there may be far more of them.

        Raises:
            RoutingError: counts or offsets of another length, negative, overlapping, beyond N, or no integers; tokens
                of another width.
            ArgumentError: what is no dense tensor.
        """
        reason, segments = self._choose(tokens, expert_counts, expert_offsets)
        if not torch.compiler.is_compiling() and LOGGER.isEnabledFor(logging.INFO):
            choice = self._describe(reason, tokens)
            if choice != self._logged:
                self._logged = choice
                LOGGER.info("%s", choice)
        if segments is None:
            return self._grouped_on_device(tokens, expert_counts, expert_offsets)
        # torch.compile knows grouped_mm in bfloat16 alone.
        if reason is not None or torch.compiler.is_compiling():
            return self._loop(tokens, *segments)
        ends = torch.tensor(segments[0], device="cpu").cumsum(0, dtype=torch.int32)
        out = self._grouped(grouped_mm.aligned(tokens), ends)
        if out.requires_grad:
            out.register_hook(grouped_mm.aligned)  # a gradient may be expanded, which grouped_mm does not take
        return out

    def explain(
        self, tokens: torch.Tensor, expert_counts: torch.Tensor, expert_offsets: torch.Tensor | None = None
    ) -> str:
        """Which way a call with these arguments goes, and why. Raises what the call would raise for them."""
        reason, _ = self._choose(tokens, expert_counts, expert_offsets)
        return self._describe(reason, tokens)

    def _describe(self, reason: str | None, tokens: torch.Tensor) -> str:
        """Which way a call goes; `reason` is that for a loop."""
        way = f"grouped_mm ({tokens.dtype} on {tokens.device.type})" if reason is None else f"loop ({reason})"
        return f"experts: {way}"

    def _choose(
        self, tokens: torch.Tensor, expert_counts: torch.Tensor, expert_offsets: torch.Tensor | None
    ) -> tuple[str | None, tuple[list[int], list[int]] | None]:
        """Why there is a loop, or None; and counts and first rows as the host knows them, or None."""
        require_dense("tokens", tokens, in_memory=False)
        if tokens.dim() != 2 or tokens.shape[1] != self.hidden_size:
            raise RoutingError(f"tokens must be [rows, {self.hidden_size}], got {tuple(tokens.shape)}")
        expected = [("expert_counts", expert_counts, self.num_experts)]
        if expert_offsets is not None:
            expected.append(("expert_offsets", expert_offsets, self.num_experts + 1))
        for name, numbers, length in expected:
            require_integers(name, numbers)
            if tuple(numbers.shape) != (length,):
                raise RoutingError(f"{name} must be [{length}], got {tuple(numbers.shape)}")
        weights = [weight for weight in (self.w_in, self.w_gate, self.w_out) if weight is not None]
        reason = grouped_mm.why_not(tokens, weights, expert_counts)
        if reason is None and tokens.device.type != "cpu":
            return None, None
        counts, starts = self._segments(tokens.shape[0], expert_counts, expert_offsets)
        if reason is None and sum(counts) < tokens.shape[0]:
            reason = "there are padding rows, which a loop on the CPU leaves out"
        return reason, (counts, starts)

    def _loop(self, tokens: torch.Tensor, counts: list[int], starts: list[int]) -> torch.Tensor:
        # Concatenation instead of writes into a zero tensor: autograd then keeps no version of the whole output.
        pieces = [tokens[:0]]
        end = 0
        # Not indexed: the gradient of an index is a tensor of zeros, of the size of all experts, for each of them.
        held = (self.w_in, self.b_in, self.w_gate, self.b_gate, self.w_out, self.b_out)
        weights = [() if weight is None else weight.unbind() for weight in held]
        for expert, (start, count) in enumerate(zip(starts, counts, strict=True)):
            pieces.append(tokens.new_zeros(start - end, self.hidden_size))
            end = start + count
            # Also for no rows: the weights then get a zero gradient, and the output stays attached to the tokens.
            w_in, b_in, w_gate, b_gate, w_out, b_out = (of[expert] if of else None for of in weights)
            assert w_in is not None and w_out is not None
            rows = tokens[start:end]
            inner = self._activate(_affine(rows, w_in, b_in), None if w_gate is None else _affine(rows, w_gate, b_gate))
            pieces.append(_affine(inner, w_out, b_out))
        pieces.append(tokens.new_zeros(tokens.shape[0] - end, self.hidden_size))
        # By torch's own rules of promotion: autocast has none for float16 among bfloat16, as rows may then be.
        with torch.autocast(tokens.device.type, enabled=False):
            return torch.cat(pieces)

    def _grouped_on_device(
        self, tokens: torch.Tensor, expert_counts: torch.Tensor, expert_offsets: torch.Tensor | None
    ) -> torch.Tensor:
        ends = grouped_mm.ends_of_experts(tokens.shape[0], expert_counts, expert_offsets)
        wants_gradient = any(each.requires_grad for each in (tokens, *self.parameters()))
        if not (torch.is_grad_enabled() and wants_gradient):
            return self._grouped(grouped_mm.aligned(tokens), ends)
        is_row = grouped_mm.rows_of_experts(tokens.shape[0], expert_counts, expert_offsets, ends)
        # Padding may hold NaN, which zero gradients would not keep out of the weights', and the rest anything.
        rows = torch.where(is_row.unsqueeze(1), tokens, 0)
        return torch.where(is_row.unsqueeze(1), self._grouped(rows, ends, is_row), 0)

    def _grouped(self, rows: torch.Tensor, ends: torch.Tensor, is_row: torch.Tensor | None = None) -> torch.Tensor:
        def affine(rows: torch.Tensor, weights: torch.Tensor, biases: torch.Tensor | None) -> torch.Tensor:
            product = F.grouped_mm(rows, weights, offs=ends)
            if biases is None:
                return product
            has_bias = rows.new_ones(len(rows)) if is_row is None else is_row
            return product + grouped_mm.biases_of_rows(biases, has_bias, ends)

        inner = affine(rows, self.w_in, self.b_in)
        inner = self._activate(inner, None if self.w_gate is None else affine(rows, self.w_gate, self.b_gate))
        return affine(inner, self.w_out, self.b_out)

    def _activate(self, inner: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
        if not isinstance(self.activation, str):
            assert gate is not None
            return self.activation(gate, inner)
        activate = _ACTIVATIONS[self.activation]
        return activate(inner) if gate is None else activate(gate) * inner

    def _segments(
        self, num_rows: int, expert_counts: torch.Tensor, expert_offsets: torch.Tensor | None
    ) -> tuple[list[int], list[int]]:
        """Counts and first rows as checked host integers."""
        counts = expert_counts.tolist()
        if expert_offsets is None:
            bounds = [0, *accumulate(counts)]
            if bounds[-1] != num_rows:
                raise RoutingError(f"expert_counts {counts} sum to {bounds[-1]}, but there are {num_rows} token rows")
        else:
            bounds = expert_offsets.tolist()
        ordered = all(
            count >= 0 and 0 <= start and start + count <= stop
            for count, (start, stop) in zip(counts, pairwise(bounds), strict=True)
        )
        if not ordered or bounds[-1] > num_rows:
            raise RoutingError(
                f"expert_offsets {bounds} do not hold expert_counts {counts} one after another within {num_rows} rows"
            )
        return counts, bounds[:-1]

    def extra_repr(self) -> str:
        gate = ", gated" if self.w_gate is not None else ""
        bias = ", biases" if self.b_in is not None else ""
        return f"{self.num_experts} experts, {self.hidden_size} -> {self.ff_size}, {self.activation}{gate}{bias}"


def _affine(rows: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product = rows @ weights
    return product if bias is None else product + bias


def require_integers(name: str, numbers: torch.Tensor) -> None:
    """Raises ArgumentError for no dense tensor, RoutingError for one of no integers."""
    require_dense(name, numbers, in_memory=False)
    if numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool:
        raise RoutingError(f"{name} must hold integers, got {numbers.dtype}")
