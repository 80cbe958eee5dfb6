"""A model whose experts are spread over ranks, in DistributedDataParallel or beside fully_shard, in one call."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from thinwire.errors import ArgumentError
from thinwire.moe.places import expert_places, group_of_experts, require_kind

_MARK = "_thinwire_divisor"  # of a parameter whose gradients are divided


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
