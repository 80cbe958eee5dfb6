"""Which of a model's tensors this rank alone has, its experts', and how such a model is trained.

All else is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from thinwire.errors import ArgumentError, CheckpointError
from thinwire.moe.experts import NamedByExperts
from thinwire.moe.layer import LocalExperts, MoELayer

if TYPE_CHECKING:
    from thinwire.comm.communicator import Communicator

_MARK = "_thinwire_divisor"  # of a parameter whose gradients are divided


@dataclass(frozen=True)
class Place:
    """Where a rank's part of a tensor lies in the whole.

    Attributes:
        shape: of the whole.
        rows: the rows of the whole that are the part's; None: the part is all of it.
        mine: whether it is of experts that are spread over ranks, so that this rank writes it, whatever others have.
        held: the end of its name that says which experts these are; a checkpoint has the name without it.
    """

    shape: tuple[int, ...]
    rows: range | tuple[int, ...] | None = None
    mine: bool = False
    held: str = ""


def require_kind(name: str, value: object, kind: type) -> None:
    """Raises ArgumentError for what is none of a kind."""
    if not isinstance(value, kind):
        raise ArgumentError(f"{name} is a {type(value).__name__}, expected a torch {kind.__name__}")


def experts_with_groups(model: nn.Module) -> list[tuple[MoELayer | LocalExperts, Communicator]]:
    """The modules of a model that hold experts of a group, and the group. Raises ArgumentError for no module."""
    require_kind("model", model, nn.Module)
    found = (module for module in model.modules() if isinstance(module, MoELayer | LocalExperts))
    return [(module, module.ep.comm) for module in found if module.ep is not None]


def expert_places(model: nn.Module) -> Iterator[tuple[torch.Tensor, Place]]:
    """The tensors of experts that are spread over ranks, as objects: wrappers rename them."""
    for module, comm in experts_with_groups(model):
        if comm.size == 1:
            continue
        if isinstance(module, MoELayer):
            held = held_by(module)
            masks = [mask for name, mask in module.experts.named_buffers() if held and held in name]  # of pruning
            for part in (*module.experts.parameters(), *masks):  # the user may have wrapped them
                yield part, Place((module.num_experts, *part.shape[1:]), module.local_experts, True, held)
        else:
            for tensor in module.state_dict(keep_vars=True).values():
                yield tensor, Place(tuple(tensor.shape), None, True)


def held_by(layer: MoELayer) -> str:
    """The end of names of its experts' tensors that says which they are."""
    return next((each.held for each in layer.experts.modules() if isinstance(each, NamedByExperts)), "")


def placed_tensors(model: nn.Module) -> dict[str, tuple[torch.Tensor, Place]]:
    """What `model.state_dict()` holds, by names without numbers of experts: parameters and buffers, with their places.

    Raises:
        CheckpointError: something else is there, or experts are not.
    """
    require_kind("model", model, nn.Module)
    if isinstance(model, DistributedDataParallel):
        raise CheckpointError(
            "the model is wrapped in DistributedDataParallel, which renames all of it: pass model.module"
        )
    found = model.state_dict(keep_vars=True)
    known = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for name, tensor in found.items():
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(f"{name} of the model is a {type(tensor).__name__}; a checkpoint holds tensors only")
        if id(tensor) not in known:
            raise CheckpointError(f"{name} is among the model's state, but is none of its parameters and buffers")
    experts = {id(tensor): place for tensor, place in expert_places(model)}
    if experts.keys() - {id(tensor) for tensor in found.values()}:
        raise CheckpointError("the model's state_dict() leaves out experts of this rank; a checkpoint would lack them")
    places = {name: experts.get(id(tensor), Place(tuple(tensor.shape))) for name, tensor in found.items()}
    return {without_held(place.held, name): (found[name], place) for name, place in places.items()}


def without_held(held: str, name: str) -> str:
    """A tensor's name without which experts it holds, behind which a parametrisation or pruning adds its own words."""
    before, _, after = name.rpartition(held) if held else ("", "", name)
    return before + after


def group_of_experts(model: nn.Module) -> Communicator | None:
    """The group over which a model's experts are spread; None if they are not.

    Raises:
        CheckpointError: layers are spread over different groups.
    """
    comms = {id(comm): comm for _, comm in experts_with_groups(model)}
    if len(comms) > 1:
        raise CheckpointError("the model's experts are spread over different groups; a checkpoint is made by one group")
    return next(iter(comms.values()), None)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Gathers a tensor of which ranks have shards, as `fully_shard` leaves them; leaves others. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def expert_parameter_names(model: nn.Module) -> list[str]:
    """Names of the parameters that only this rank has: those of its experts, in sharded `MoELayer`s and `LocalExperts`.

    Raises ArgumentError for what is no module.

    Their gradients are sums over all ranks' tokens. `distributed` makes them means, and has DistributedDataParallel
    leave them alone; `fully_shard` takes them as ``ignored_params``.

    >>> expert_parameter_names(MoELayer(8, 16, num_experts=4, top_k=2))  # not sharded
    []
    """
    experts = {id(tensor) for tensor, _ in expert_places(model)}
    return [name for name, parameter in model.named_parameters() if id(parameter) in experts]


def distributed(model: nn.Module, **options: Any) -> nn.Module:
    """Trains a model whose experts are spread over ranks: each rank keeps its experts, all else is reduced. Collective.

    Gradients become means over the ranks. An expert's is a sum over all ranks' tokens, and is divided by their number
    when it comes. Call this after the model is on its device, and after what is frozen was frozen.

    Args:
        model: with sharded `MoELayer`s, or `LocalExperts`, whose group has all ranks that the model is trained on.
            Where `fully_shard` has the rest of it, with ``ignored_params`` for the experts, that stays as it is.
        options: of DistributedDataParallel. Its ``process_group`` is the experts' one.

    Returns:
        DistributedDataParallel of the model; the model itself where `fully_shard` reduces the rest, or where nothing
        but experts is trained.

    Raises:
        ArgumentError: no module, or one that has gone through this or DistributedDataParallel before; experts that
            `fully_shard` has; ranks without a process group, or others than those that experts are spread over.
        CheckpointError: its layers are spread over different groups.

    >>> import thinwire as tw
    >>> with tw.init() as comm, tw.ExpertParallel(comm, 4, 2, 8, max_tokens=16) as ep:
    ...     model = nn.Sequential(nn.Linear(8, 8), tw.MoELayer(8, 16, num_experts=4, top_k=2, ep=ep))
    ...     type(distributed(model)).__name__
    'DistributedDataParallel'
    """
    require_kind("model", model, nn.Module)
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ArgumentError(
            "model is in DistributedDataParallel already, which has overwritten experts: pass it without"
        )
    comm, own = group_of_experts(model), {id(tensor) for tensor, _ in expert_places(model)}
    experts = [parameter for parameter in model.parameters() if id(parameter) in own]
    if any(hasattr(expert, _MARK) for expert in experts):
        raise ArgumentError("model went through distributed before: use what that returned")
    if any(isinstance(expert, DTensor) for expert in experts):
        raise ArgumentError(
            "fully_shard has experts of the model, which each rank has of its own: pass them to it as ignored_params, "
            "{model.get_parameter(name) for name in tw.expert_parameter_names(model)}"
        )
    meshes = {rest.device_mesh for rest in model.parameters() if isinstance(rest, DTensor)}
    if comm is not None:
        if comm.backend == "threads":
            raise ArgumentError("ranks that are threads have no process group; expected processes")
        ranks = {mesh.size() for mesh in meshes} or {options.setdefault("process_group", comm.group).size()}
        if ranks != {comm.size}:
            raise ArgumentError(
                f"experts are spread over {comm.size} ranks, and the rest is reduced over {sorted(ranks)}; expected "
                "the same ranks, as nothing reduces experts that several of their groups have"
            )
        for expert in experts:
            setattr(expert, _MARK, comm.size)
            if expert.requires_grad:
                expert.register_hook(lambda gradient, size=comm.size: gradient / size)
    if meshes or not any(parameter.requires_grad for parameter in model.parameters() if id(parameter) not in own):
        return model
    ignored = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if id(tensor) in own]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    return DistributedDataParallel(model, **options)


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
