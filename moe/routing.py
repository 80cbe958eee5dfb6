"""Which experts a token goes to, which rank owns them, and the loss that keeps them evenly used."""

from __future__ import annotations

import torch

from thinwire.comm.tensors import is_int, require_dense
from thinwire.errors import RoutingError


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


def top_k_route(router_logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose ``top_k`` experts for every token and the weights of their outputs.

    ``p = softmax(router_logits)`` over all experts in fp32; the ``top_k`` largest are kept, and their weights are
    ``p / sum of the kept p``. This is the gate of Shazeer et al., "Outrageously Large Neural Networks: The
    Sparsely-Gated Mixture-of-Experts Layer", 2017 (arXiv:1701.06538), section 2.1, without its noise. Experts with
    equal probabilities are taken in ascending id, so that ties do not depend on the device.

    Args:
        router_logits: floating point [T, E].
        top_k: 1..E.

    Returns:
        ``topk_ids`` int32 [T, K], the most probable expert first, no id twice in a row;
        ``topk_weights`` fp32 [T, K], each row sums to 1. The weights are differentiable in ``router_logits``.

    Raises:
        RoutingError: ``router_logits`` is not a floating-point matrix, or ``top_k`` is outside 1..E.
        ArgumentError: ``router_logits`` is no dense tensor.

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
    probabilities = router_logits.float().softmax(dim=-1)
    # torch.topk leaves the order of equal values open; a stable sort does not.
    ranked, order = probabilities.sort(dim=-1, descending=True, stable=True)
    kept = ranked[:, :top_k]
    return order[:, :top_k].to(torch.int32), kept / kept.sum(dim=-1, keepdim=True)


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
