"""How Hugging Face's checkpoints name, shape and lay out the tensors of a mixture-of-experts block, by model family.

Two forms of experts are in use: one tensor an expert and matrix, `experts.{e}.gate_proj.weight` [ff, hidden], as the
models were published; and all experts of a layer in one tensor, `experts.gate_up_proj` [experts, 2 ff, hidden], gate
first, as transformers 5 holds them. gpt-oss's is of the second kind, transposed, [experts, hidden, 2 ff], with gate and
up in alternate columns, and has biases. Names, shapes, configuration and its defaults are those of transformers 5.23.0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from thinwire.errors import CheckpointError
from thinwire.fields import Fields, one_of, that, within
from thinwire.moe.experts import ClampedSwiGLU
from thinwire.moe.routing import RouterConfig

__all__ = ["FAMILIES", "LayerPlan", "Piece", "plan_layer"]

#: Values within what is stored, as the layer has them; a view, to be read and to be written.
_View = Callable[[torch.Tensor], torch.Tensor]
#: Of one expert: the end of the name, the shape in units of h(idden) and f(f), and the views by GroupedExperts' names.
_Matrix = tuple[str, str, dict[str, _View]]


class Piece(NamedTuple):
    """A tensor of a file, or one expert's part of it.

    Attributes:
        name: of the tensor.
        shape: of the whole tensor.
        row: the part, along its first dimension; None for all of it.
        expert: whose it is; None for what belongs to no expert.
        views: of all its values, by names in the layer's `state_dict`.
    """

    name: str
    shape: tuple[int, ...]
    row: int | None
    expert: int | None
    views: dict[str, _View]


def _three(gate: str, up: str, down: str) -> tuple[_Matrix, ...]:
    return (
        (f"{gate}.weight", "fh", {"w_gate": torch.t}),
        (f"{up}.weight", "fh", {"w_in": torch.t}),
        (f"{down}.weight", "hf", {"w_out": torch.t}),
    )


def _as_it_is(stored: torch.Tensor) -> torch.Tensor:
    return stored


_PROJECTIONS = _three("gate_proj", "up_proj", "down_proj")


class Layout(NamedTuple):
    """A form of experts.

    Attributes:
        block: the name of the mixture-of-experts block in a layer.
        stacked: whether all experts are in one tensor.
        matrices: an expert's.
    """

    block: str
    stacked: bool
    matrices: tuple[_Matrix, ...]

    @property
    def first(self) -> str:
        """The name of a tensor, behind the layer's, that there is in this form only."""
        return f"{self.block}.experts.{'' if self.stacked else '0.'}{self.matrices[0][0]}"


_PER_EXPERT = Layout("mlp", False, _PROJECTIONS)
_FUSED = Layout(
    "mlp",
    True,
    (
        ("gate_up_proj", "2h", {"w_gate": lambda x: x.chunk(2)[0].T, "w_in": lambda x: x.chunk(2)[1].T}),
        ("down_proj", "hf", {"w_out": torch.t}),
    ),
)
_MIXTRAL = Layout("block_sparse_moe", False, _three("w1", "w3", "w2"))
_GPT_OSS = Layout(
    "mlp",
    True,
    (
        ("gate_up_proj", "h2", {"w_gate": lambda x: x[..., ::2], "w_in": lambda x: x[..., 1::2]}),
        ("gate_up_proj_bias", "2", {"b_gate": lambda x: x[..., ::2], "b_in": lambda x: x[..., 1::2]}),
        ("down_proj", "fh", {"w_out": _as_it_is}),
        ("down_proj_bias", "h", {"b_out": _as_it_is}),
    ),
)


class Family(NamedTuple):
    """What is particular to a family: forms of its experts, and names of its settings in config.json."""

    layouts: tuple[Layout, ...]
    num_experts: tuple[str, ...]
    ff_size: str
    router: Callable[[Fields], RouterConfig]
    router_name: str = "gate"
    has_shared: bool = False


_size = within(1, 2**31 - 1)
_truth = that(lambda value: isinstance(value, bool), "true or false")
_finite = that(lambda value: type(value) in (int, float) and math.isfinite(value), "a finite number")


def _deepseek_router(settings: Fields) -> RouterConfig:
    settings.get("scoring_func", one_of(("sigmoid",)), None)
    settings.get("topk_method", one_of(("noaux_tc",)), None)
    return RouterConfig(
        scoring="sigmoid",
        renormalize=settings.get("norm_topk_prob", _truth, True),
        scale=settings.get("routed_scaling_factor", _finite, 2.5),
        num_groups=settings.get("n_group", _size, 8),
        top_groups=settings.get("topk_group", _size, 4),
        correction_bias=True,
    )


def _softmax_router(settings: Fields) -> RouterConfig:
    return RouterConfig(renormalize=settings.get("norm_topk_prob", _truth, False))


_NUMBER = ("num_experts", "num_local_experts")
#: By `model_type`.
FAMILIES = {
    "mixtral": Family((_MIXTRAL, _FUSED), _NUMBER, "intermediate_size", lambda settings: RouterConfig()),
    "qwen3_moe": Family((_PER_EXPERT, _FUSED), _NUMBER, "moe_intermediate_size", _softmax_router),
    "olmoe": Family((_PER_EXPERT, _FUSED), _NUMBER, "intermediate_size", _softmax_router),
    "deepseek_v3": Family(
        (_PER_EXPERT, _FUSED), ("n_routed_experts", *_NUMBER), "moe_intermediate_size", _deepseek_router,
        has_shared=True,
    ),
    "gpt_oss": Family(
        (_GPT_OSS,), _NUMBER, "intermediate_size", lambda settings: RouterConfig(bias=True), router_name="router"
    ),
}  # fmt: skip


class LayerPlan(NamedTuple):
    """A layer of a checkpoint: where its values are, and what the layer is.

    Attributes:
        prefix: of its tensors' names, `model.layers.3.`.
        arguments: of `MoELayer`.
    """

    prefix: str
    family: Family
    layout: Layout
    arguments: dict[str, Any]

    def pieces(self, experts: Iterable[int]) -> Iterator[Piece]:
        """All tensors of no expert, then those of these experts, each expert's as far as they are its own."""
        block = f"{self.prefix}{self.layout.block}."
        router = f"{block}{self.family.router_name}."
        config, shared = self.arguments["router_config"], self.arguments["shared_ff_size"]
        tensors = [(f"{router}weight", "eh", "router.weight")]
        if config.bias:
            tensors.append((f"{router}bias", "e", "router.bias"))
        if config.correction_bias:
            tensors.append((f"{router}e_score_correction_bias", "e", "correction_bias"))
        for name, shape, parameter in tensors:
            yield Piece(name, self._shape(shape), None, None, {parameter: _as_it_is})
        if shared:
            for name, shape, views in _PROJECTIONS:
                named = {f"shared.{parameter}": _as_only(view) for parameter, view in views.items()}
                yield Piece(f"{block}shared_experts.{name}", self._shape(shape, shared), None, None, named)
        for name, shape, views in self.layout.matrices:
            named = {f"experts.{parameter}": view for parameter, view in views.items()}
            for expert in experts:
                if self.layout.stacked:
                    yield Piece(f"{block}experts.{name}", self._shape("e" + shape), expert, expert, named)
                else:
                    yield Piece(f"{block}experts.{expert}.{name}", self._shape(shape), None, expert, named)

    def _shape(self, units: str, ff_size: int | None = None) -> tuple[int, ...]:
        known = self.arguments
        ff_size = known["ff_size"] if ff_size is None else ff_size
        sizes = {"e": known["num_experts"], "h": known["hidden_size"], "f": ff_size, "2": 2 * ff_size}
        return tuple(sizes[unit] for unit in units)


def _as_only(view: _View) -> _View:
    """As the only one of stacked experts."""
    return lambda stored: view(stored)[None]


def plan_layer(folder: Path, settings: Fields, names: Iterable[str], layer: int) -> LayerPlan:
    """Where a layer's values are among a folder's tensors, of these names, with these settings in config.json.

    Raises:
        CheckpointError: config.json is of another family or says what cannot be; the layer has no experts, or other
            tensors than it should.
    """
    if settings.get("quantization_config", lambda value: True, False):
        raise CheckpointError(
            f"{folder} holds quantised weights, by quantization_config in config.json; expected weights in float64, "
            "float32, float16 or bfloat16"
        )
    family = FAMILIES[settings.get("model_type", one_of(tuple(FAMILIES)))]
    prefix, names = _names_of(folder, family, names, layer)
    layouts = [layout for layout in family.layouts if prefix + layout.first in names]
    if len(layouts) != 1:
        forms = " or ".join(prefix + layout.first for layout in family.layouts)
        raise CheckpointError(
            f"{folder}: layer {layer} has experts in no known form, expected {forms}; it has {_few(names)}"
        )
    num_experts, ff_size = settings.get(family.num_experts, _size), settings.get(family.ff_size, _size)
    shared = settings.get("n_shared_experts", _size, 1) if family.has_shared else 0
    activation: str | ClampedSwiGLU
    try:
        if layouts[0] is _GPT_OSS:
            settings.get("hidden_act", one_of(("silu",)), None)
            activation = ClampedSwiGLU(
                settings.get("swiglu_alpha", _finite, 1.702), settings.get("swiglu_limit", _finite, 7.0)
            )
        else:
            activation = settings.get("hidden_act", one_of(("silu", "gelu")), "silu")
        top_k, router_config = settings.get("num_experts_per_tok", _size), family.router(settings)
        if top_k > num_experts:
            raise ValueError(f"num_experts_per_tok is {top_k}, of {num_experts} experts")
        router_config.check_sizes(num_experts, top_k)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{folder / 'config.json'}: {error}") from error
    arguments = {
        "hidden_size": settings.get("hidden_size", _size), "ff_size": ff_size, "num_experts": num_experts,
        "top_k": top_k, "activation": activation, "expert_bias": layouts[0] is _GPT_OSS,
        "shared_ff_size": shared * ff_size, "router_config": router_config,
    }  # fmt: skip
    plan = LayerPlan(prefix, family, layouts[0], arguments)
    _check_names(folder, plan, names)
    return plan


def _names_of(folder: Path, family: Family, held: Iterable[str], layer: int) -> tuple[str, set[str]]:
    """Finds the prefix of a layer's tensors, and the names in its mixture-of-experts block."""
    blocks = tuple({f"{layout.block}." for layout in family.layouts})
    for prefix in (f"model.layers.{layer}.", f"layers.{layer}."):  # the second without a language model's head
        starts = tuple(prefix + block for block in blocks)
        names = {name for name in held if name.startswith(starts)}
        if any(".experts." in name for name in names):
            return prefix, names
    found = sorted({int(match[1]) for name in held if (match := _EXPERTS.match(name))})
    layers = ", ".join(map(str, found[:100])) if found else "none"
    raise CheckpointError(f"{folder}: layer {layer} has no experts; layers that have: {layers}")


_EXPERTS = re.compile(r"(?:model\.)?layers\.([0-9]{1,6})\.(?:mlp|block_sparse_moe)\.experts\.")


def _check_names(folder: Path, plan: LayerPlan, names: set[str]) -> None:
    """Refuses a layer that lacks a tensor, or has one more: scales, say, would mean something."""
    known, num_experts = set(), plan.arguments["num_experts"]
    # config.json may speak of any number of experts. The size of a stacked tensor is compared when it is read.
    for piece in plan.pieces(range(1 if plan.layout.stacked else num_experts)):
        if piece.name not in names:
            raise CheckpointError(f"{folder} lacks {piece.name}, of {num_experts} experts by config.json")
        known.add(piece.name)
    if unknown := names - known:
        raise CheckpointError(
            f"{folder} has {_few(unknown)}, which a layer of {num_experts} experts does not have here"
        )


def _few(names: set[str]) -> str:
    first = ", ".join(repr(name[:200]) for name in sorted(names)[:3])
    return first if len(names) <= 3 else f"{first} and {len(names) - 3} more"
