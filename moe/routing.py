"""Which experts a token goes to, which rank owns them, and the loss that keeps them evenly used."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from einops import rearrange

from thinwire.comm.tensors import is_int, require_dense
from thinwire.compiler import require_flag
from thinwire.errors import ArgumentError, RoutingError
from thinwire.fields import shown


def expert_range(num_experts: int, world_size: int, rank: int) -> range:
    """Global ids of the experts that ``rank`` owns: contiguous blocks, of which the first are one larger if need be.

    Raises:
        ValueError: a negative ``num_experts``, a ``world_size`` below 1, or a ``rank`` outside ``0..world_size-1``.

    >>> [expert_range(8, 3, rank) for rank in range(3)]
    [range(0, 3), range(3, 6), range(6, 8)]
    """
    if num_experts < 0:
        raise ValueError(f"num_experts must be >= 0, got {num_experts}")
    if world_size < 1:
        raise ValueError(f"world_size must be >= 1, got {world_size}")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must lie in 0..{world_size - 1} for a world size of {world_size}, got {rank}")
    block, larger = divmod(num_experts, world_size)
    start = rank * block + min(rank, larger)
    return range(start, start + block + (rank < larger))


def owners_in(expert_map: object, num_experts: int, world_size: int) -> list[int]:
    """The rank that owns each expert, as a map says it: a sequence or an integer tensor [num_experts].

    Raises:
        ArgumentError: it is no such map.
    """
    if isinstance(expert_map, torch.Tensor):
        require_dense("expert_map", expert_map)
        expert_map = expert_map.tolist()
    owners = list(expert_map) if isinstance(expert_map, Sequence) else []
    if len(owners) != num_experts or not all(is_int(rank, 0, world_size - 1) for rank in owners):
        raise ArgumentError(
            f"expert_map is {shown(expert_map)}, expected {num_experts} ranks from 0 to {world_size - 1} in a list or "
            "tensor, the owner of each expert"
        )
    return owners


@dataclass(frozen=True)
class RouterConfig:
    """How router logits become experts and weights; the default is Shazeer's gate, as Mixtral has it.

    ``scores = softmax(logits)`` over all experts, or ``sigmoid(logits)`` of each, in fp32. The ``top_k`` experts with
    the largest scores are taken, and their weights are ``scale * score``, the scores divided by their sum first if
    ``renormalize``. What DeepSeek-V3 adds ("DeepSeek-V3 Technical Report", 2024, arXiv:2412.19437, section 2.1.2, and
    its published code): experts are chosen, not weighted, by ``score + correction_bias``; and with ``num_groups`` above
    1 only among those of the ``top_groups`` groups, of consecutive experts, whose two best such sums are largest.

    Attributes:
        scoring: "softmax" or "sigmoid". For sigmoid a layer computes the logits in fp32, too.
        renormalize: whether the weights of a token sum to ``scale``.
        scale: what all weights are multiplied by.
        num_groups: of equal size; it divides the number of experts.
        top_groups: 1..num_groups.
        bias: whether the router has one, [num_experts], which is part of the logits.
        correction_bias: whether the layer has one, fp32 [num_experts], not trained.

    Raises:
        ValueError: an unknown scoring, a scale that is not finite and above 0, or numbers of groups out of range.
    """

    scoring: str = "softmax"
    renormalize: bool = True
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    bias: bool = False
    correction_bias: bool = False

    def __post_init__(self) -> None:
        if self.scoring not in ("softmax", "sigmoid"):
            raise ValueError(f"scoring must be 'softmax' or 'sigmoid', got {self.scoring!r}")
        for name in ("renormalize", "bias", "correction_bias"):
            require_flag(name, getattr(self, name))
        scale: object = self.scale
        number = isinstance(scale, int | float) and not isinstance(scale, bool)
        if not number or not math.isfinite(self.scale) or self.scale <= 0:
            raise ValueError(f"scale must be a finite number above 0, got {self.scale!r}")
        if not is_int(self.num_groups, 1) or not is_int(self.top_groups, 1, self.num_groups):
            raise ValueError(
                "num_groups must be an int of at least 1, and top_groups lie in 1..num_groups, got "
                f"{self.num_groups!r} and {self.top_groups!r}"
            )

    def check_sizes(self, num_experts: int, top_k: int) -> None:
        """Raises ValueError where experts do not fall into such groups, or ``top_k`` are not in those taken."""
        group_size, rest = divmod(num_experts, self.num_groups)
        if rest or (self.num_groups > 1 and group_size < 2):
            raise ValueError(
                f"{num_experts} experts in {self.num_groups} groups: groups must be equal, and of at least 2 experts"
            )
        if top_k > group_size * self.top_groups:
            raise ValueError(
                f"top_k is {top_k}, but {self.top_groups} of {self.num_groups} groups hold "
                f"{group_size * self.top_groups} of the {num_experts} experts"
            )


def top_k_route(
    router_logits: torch.Tensor,
    top_k: int,
    config: RouterConfig | None = None,
    correction_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose ``top_k`` experts for every token and the weights of their outputs.

    Without ``config``: ``p = softmax(router_logits)`` over all experts in fp32; the ``top_k`` largest are kept, and
    their weights are ``p / sum of the kept p``. This is the gate of Shazeer et al., "Outrageously Large Neural
    Networks: The Sparsely-Gated Mixture-of-Experts Layer", 2017 (arXiv:1701.06538), section 2.1, without its noise.
    Experts with equal scores are taken in ascending id, so that ties do not depend on the device.

    Args:
        router_logits: floating point [T, E].
        top_k: 1..E.
        config: other ways to score and choose; see `RouterConfig`.
        correction_bias: floating point [E], added to the scores by which experts are chosen; None for none.

    Returns:
        ``topk_ids`` int32 [T, K], the expert with the best score first, no id twice in a row;
        ``topk_weights`` fp32 [T, K], by default each row sums to 1. The weights are differentiable in
        ``router_logits``.

    Raises:
        RoutingError: ``router_logits`` is not a floating-point matrix, ``top_k`` is outside 1..E, the groups of
            ``config`` do not fit E and ``top_k``, or ``correction_bias`` is not [E].
        ArgumentError: ``router_logits`` or ``correction_bias`` is no dense tensor.

    >>> ids, weights = top_k_route(torch.tensor([[0.0, 2.0, 2.0, -1.0]]), top_k=2)
    >>> ids.tolist(), weights.tolist()
    ([[1, 2]], [[0.5, 0.5]])
    """
    require_dense("router_logits", router_logits, in_memory=False)
    if router_logits.dim() != 2 or not router_logits.is_floating_point():
        raise RoutingError(
            f"router_logits must be a floating-point tensor [tokens, experts], "
            f"got {router_logits.dtype} {tuple(router_logits.shape)}"
        )
    num_experts = router_logits.shape[1]
    if not is_int(top_k, 1, num_experts):
        raise RoutingError(f"top_k must lie in 1..{num_experts} (the number of experts), got {top_k!r}")
    config = RouterConfig() if config is None else config
    try:
        config.check_sizes(num_experts, top_k)
    except ValueError as error:
        raise RoutingError(str(error)) from error
    logits = router_logits.float()
    scores = logits.softmax(dim=-1) if config.scoring == "softmax" else logits.sigmoid()
    ranking = scores.detach()
    if correction_bias is not None:
        require_dense("correction_bias", correction_bias, in_memory=False)
        if tuple(correction_bias.shape) != (num_experts,) or not correction_bias.is_floating_point():
            raise RoutingError(
                f"correction_bias must be floating point [{num_experts}], got {correction_bias.dtype} "
                f"{tuple(correction_bias.shape)}"
            )
        ranking = ranking + correction_bias.float()
    if config.num_groups > 1:
        ranking = _only_best_groups(ranking, config)
    # torch.topk leaves the order of equal values open; a stable sort does not.
    chosen = ranking.argsort(dim=-1, descending=True, stable=True)[:, :top_k]
    weights = scores.gather(1, chosen)
    if config.renormalize:
        # As DeepSeek-V3 does it: sigmoids may all be 0. A sum of softmaxes is far too large for this to change it.
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return chosen.to(torch.int32), weights if config.scale == 1.0 else weights * config.scale


def _only_best_groups(ranking: torch.Tensor, config: RouterConfig) -> torch.Tensor:
    """-inf for the experts of groups that are not taken."""
    by_group = rearrange(ranking, "tokens (groups experts) -> tokens groups experts", groups=config.num_groups)
    best = by_group.topk(2, dim=-1).values.sum(dim=-1).argsort(dim=-1, descending=True, stable=True)
    taken = torch.zeros(by_group.shape[:2], dtype=torch.bool, device=ranking.device)
    taken.scatter_(1, best[:, : config.top_groups], True)
    return by_group.masked_fill(~taken[:, :, None], -math.inf).flatten(1)


def load_balancing_loss(router_logits: torch.Tensor, topk_ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Auxiliary loss that is smallest when the experts are used evenly: ``E * sum_e f_e * P_e``.

    ``f_e`` is the share of the routed (token, choice) pairs that went to expert e, and ``P_e`` the mean router
    probability of e over the tokens: Fedus, Zoph and Shazeer, "Switch Transformers", 2021 (arXiv:2101.03961),
    equations 4-6, with ``f`` counted over all ``top_k`` choices. Perfectly even use gives 1, everything on one expert
    gives up to E. The gradient flows through ``P`` only, as a count has none.

    Args:
        router_logits: floating point [T, E].
        topk_ids: int32 or int64 [T, K], global expert ids; -1 (no expert) is not counted.
        num_experts: E.

    Returns:
        An fp32 scalar; 0 (still attached to ``router_logits``) when nothing was routed.

    Raises:
        RoutingError: shapes or dtypes that do not fit each other, or an id outside -1..E-1.
        ArgumentError: what is no dense tensor.

    >>> load_balancing_loss(torch.zeros(4, 2), torch.tensor([[0], [1], [0], [1]]), num_experts=2).item()
    1.0
    """
    require_dense("router_logits", router_logits, in_memory=False)
    require_dense("topk_ids", topk_ids, in_memory=False)
    if not is_int(num_experts, 1):
        raise RoutingError(f"num_experts must be an int of at least 1, got {num_experts!r}")
    if router_logits.dim() != 2 or router_logits.shape[1] != num_experts or not router_logits.is_floating_point():
        raise RoutingError(
            f"router_logits must be floating point [tokens, {num_experts}], got {router_logits.dtype} "
            f"{tuple(router_logits.shape)}"
        )
    if topk_ids.dim() != 2 or topk_ids.shape[0] != router_logits.shape[0]:
        raise RoutingError(f"topk_ids must be [{router_logits.shape[0]}, top_k], got {tuple(topk_ids.shape)}")
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise RoutingError(f"topk_ids must be int32 or int64, got {topk_ids.dtype}")
    # One more bin, for -1; one_hot-free, so that memory stays [E + 1] and not [T, K, E].
    shifted = topk_ids.flatten().long() + 1
    if shifted.numel() and not 0 <= int(shifted.min()) <= int(shifted.max()) <= num_experts:
        raise RoutingError(
            f"topk_ids must lie in -1..{num_experts - 1}, got {int(shifted.min()) - 1}..{int(shifted.max()) - 1}"
        )
    counts = torch.bincount(shifted, minlength=num_experts + 1)[1:].float()
    routed = counts.sum()
    if routed == 0:
        return router_logits.float().sum() * 0.0
    mean_probability = router_logits.float().softmax(dim=-1).mean(dim=0)
    return num_experts * torch.dot(counts / routed, mean_probability)
