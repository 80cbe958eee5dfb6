"""Which part of a model's tensors this rank has: experts are its own, all else is the same on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from thinwire.errors import ArgumentError, CheckpointError
from thinwire.moe.experts import NamedByExperts
from thinwire.moe.layer import MoELayer
from thinwire.moe.local_experts import LocalExperts

if TYPE_CHECKING:
    from thinwire.comm.communicator import Communicator


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


def expert_places(model: nn.Module) -> Iterator[tuple[torch.Tensor, Place]]:
    """Of the tensors of experts that are spread over ranks. They are known as objects: wrappers rename them."""
    require_kind("model", model, nn.Module)
    for module in model.modules():
        if not isinstance(module, MoELayer | LocalExperts) or module.ep is None or module.ep.comm.size == 1:
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
    if isinstance(model, nn.parallel.DistributedDataParallel):
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
    require_kind("model", model, nn.Module)
    spread = (module for module in model.modules() if isinstance(module, MoELayer | LocalExperts))
    comms = {id(module.ep.comm): module.ep.comm for module in spread if module.ep is not None}
    if len(comms) > 1:
        raise CheckpointError("the model's experts are spread over different groups; a checkpoint is made by one group")
    return next(iter(comms.values()), None)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor of which ranks have shards, as `fully_shard` leaves them. Collective for these."""
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
