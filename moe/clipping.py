"""One gradient norm for a model whose experts are spread over ranks."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from thinwire.errors import ArgumentError
from thinwire.moe.places import expert_parameter_names, group_of_experts, whole


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scales a model's gradients in place, on all ranks alike, so that their norm is at most `max_norm`. Collective.

    The norm is that of every rank's experts and of one replica of all else, as one process would have it.
    `torch.nn.utils.clip_grad_norm_` takes in the experts of its rank alone: ranks then scale by different numbers, and
    what all of them hold, such as routers, drifts apart. Call this after all gradients were reduced over ranks.

    Args:
        model: the module, wrapped or not; not its parameters.
        max_norm: at least 0.
        norm_type: of the p-norm; `float("inf")` for the largest magnitude.

    Returns:
        The norm before: float64 [], the same bits on all ranks.

    Raises:
        ArgumentError: no module, or a `max_norm` below 0.
        CheckpointError: its layers are spread over different groups.
        PeerTimeout: a rank did not call it.

    >>> layer = nn.Linear(2, 1, bias=False)
    >>> layer.weight.grad = torch.tensor([[3.0, 4.0]])
    >>> clip_grad_norm_(layer, 1.0).item(), layer.weight.grad
    (5.0, tensor([[0.6000, 0.8000]]))
    """
    if not isinstance(model, nn.Module) or not max_norm >= 0:
        raise ArgumentError(
            f"model is a {type(model).__name__} and max_norm {max_norm!r}; expected the module itself, and at least 0"
        )
    comm, experts = group_of_experts(model), set(expert_parameter_names(model))
    found: dict[bool, list[torch.Tensor]] = {False: [], True: []}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[name in experts].append(parameter.grad)

    norm = partial(torch.linalg.vector_norm, ord=norm_type, dtype=torch.float64)

    def norm_of(gradient: torch.Tensor) -> torch.Tensor:
        """In float32 at least; float64 would take a copy of the gradient."""
        exact = torch.promote_types(gradient.dtype, torch.float32)
        return whole(torch.linalg.vector_norm(gradient, norm_type, dtype=exact)).to(device, torch.float64)

    gradients = found[False] + found[True]
    device = comm.device if comm is not None else gradients[0].device if gradients else None
    nothing = torch.zeros((), dtype=torch.float64, device=device)  # of a rank without experts
    shared, own = (norm(torch.stack([nothing, *(norm_of(gradient) for gradient in found[mine])])) for mine in found)
    norms = torch.stack([shared, own])
    if comm is not None:
        told = torch.empty(comm.size, 2, dtype=torch.float64, device=device)
        comm.all_gather(list(told), norms)
        norms = torch.cat([told[0, :1], told[:, 1]])
    total: torch.Tensor = norm(norms)
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        (gradient.to_local() if isinstance(gradient, DTensor) else gradient).mul_(scale.to(gradient.device))
    return total
