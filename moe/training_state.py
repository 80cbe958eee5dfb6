"""What torch.distributed.checkpoint saves of a training: experts that are spread over ranks, each by its number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from thinwire.errors import ArgumentError, CheckpointError
from thinwire.moe.distributed import experts_with_groups, held_by, require_kind, without_held
from thinwire.moe.layer import MoELayer

_FLAT = states.StateDictOptions(flatten_optimizer_state_dict=True)
_WEIGHTS, _STATES, _SETTINGS = "model.", "optimizer.state.", "optimizer.param_groups."
#: Settings of which an optimiser's states depend.
_OF_STATES = (".amsgrad", ".centered", ".momentum")
#: What an optimiser counts from, and what it has before its first step.
_BEGINNING = {"step": 0.0, "mu_product": 1.0}


class TrainingState(Stateful):
    """A model and its optimisers for `torch.distributed.checkpoint`, to be saved on some ranks and loaded on others.

        dcp.save({"training": tw.TrainingState(model, optimizer)}, checkpoint_id=folder)
        dcp.load({"training": tw.TrainingState(model, optimizer)}, checkpoint_id=folder)

    Whatever number of ranks there are then, and whichever experts they have, a rank reads its own. `MoELayer` has the
    weights of its experts in one tensor, so torch alone would look for the same ones on every rank. Here they, and what
    an optimiser keeps of them, have names of their own, ``model.moe.experts.3.w_in``, as those of `LocalExperts` have.
    Settings of an optimiser's groups, such as learning rates, are loaded, too.

    What is no expert must be the same on all ranks: torch stores any rank's. Experts that `fully_shard` has sharded, of
    layers that are not spread over ranks, keep their stacked names.

    Args:
        model: any module, also in DistributedDataParallel, as `distributed` returns it, compiled, or sharded by
            `fully_shard`.
        optimizers: over parameters of the model, with the settings and groups that they are saved with. Parameters
            without a state, as before the first step, are given one by a step without gradients, as torch does; save
            Rprop and ASGD after their first step.

    Raises:
        ArgumentError: no module, no optimiser, one parameter in two of them, or ranks that are threads.

    >>> layer = MoELayer(8, 16, num_experts=2, top_k=1)
    >>> [name for name in TrainingState(layer).state_dict() if "w_in" in name]
    ['model.experts.0.w_in', 'model.experts.1.w_in']
    """

    def __init__(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        require_kind("model", model, nn.Module)
        inner: Any = model
        while isinstance(inner, DistributedDataParallel) or hasattr(inner, "_orig_mod"):  # or of torch.compile
            inner = inner.module if isinstance(inner, DistributedDataParallel) else inner._orig_mod
        for optimizer in optimizers:
            require_kind("optimizers", optimizer, torch.optim.Optimizer)
        parameters = [id(each) for optimizer in optimizers for each in _parameters_of(optimizer)]
        if len(parameters) > len(set(parameters)):
            raise ArgumentError("two of the optimizers have the same parameter; expected each in one of them")
        if any(comm.backend == "threads" and comm.size > 1 for _, comm in experts_with_groups(inner)):
            raise ArgumentError(
                "ranks that are threads have no process group, which torch.distributed.checkpoint needs; expected "
                "processes"
            )
        self._model: nn.Module = inner
        self._optimizers = optimizers

    def state_dict(self) -> dict[str, Any]:
        """Tensors, and settings, by name. Nothing is copied: what is loaded into these tensors is loaded.

        Raises:
            CheckpointError: a tensor is on meta; an optimiser has a parameter that is not the model's, or its step
                fails; experts are in a wrapper that renames them, or a tensor of theirs has no row for each.
        """
        return {name: value for name, _, value in self._entries(self._whole())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes what `state_dict` gave, here or on other ranks; names that are not held here are ignored.

        torch.distributed.checkpoint has filled the tensors before it calls this, and raises CheckpointException itself
        for what its folder lacks.

        Raises:
            CheckpointError: as `state_dict`; something is missing or has another shape; or an optimiser was made with
                settings that ask for other states. Until then nothing is copied.
        """
        taken = self._whole()
        entries = list(self._entries(taken))
        for name, _, own in entries:
            if name not in state_dict:
                raise CheckpointError(f"{name} is missing: another model's or optimiser's state?")
            value = state_dict[name]
            if isinstance(own, torch.Tensor) and (not isinstance(value, torch.Tensor) or value.shape != own.shape):
                what = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
                raise CheckpointError(f"{name} is {what}, expected {list(own.shape)}")
            if name.startswith(_SETTINGS) and name.endswith(_OF_STATES) and bool(own) != bool(value):
                raise CheckpointError(f"{name} is {value}, and {own} here: make the optimiser as it was saved")
        whole = dict(taken)
        with torch.no_grad():
            for name, key, own in entries:
                if isinstance(whole[key], torch.Tensor) and own is not whole[key]:  # an expert's row
                    own.copy_(state_dict[name])
                else:
                    taken[key] = state_dict[name]
        weights, others = (
            {key.removeprefix(part): value for key, value in taken.items() if key.startswith(part)}
            for part in ("model.", "optimizer.")
        )
        states.set_model_state_dict(self._model, weights)
        if self._optimizers:
            states.set_optimizer_state_dict(self._model, self._optimizers, others, options=_FLAT)

    def _whole(self) -> dict[str, Any]:
        """Reads model and optimisers as torch has them, experts stacked."""
        known = {id(parameter) for parameter in self._model.parameters()}
        for optimizer in self._optimizers:
            for parameter in _parameters_of(optimizer):
                if id(parameter) not in known:
                    raise CheckpointError(
                        f"the optimiser has a parameter of shape {list(parameter.shape)} that is not the model's"
                    )
            _complete(optimizer)
        weights: dict[str, Any] = states.get_model_state_dict(self._model)
        found = {_WEIGHTS + name: value for name, value in weights.items()}
        if self._optimizers:
            others: dict[str, Any] = states.get_optimizer_state_dict(self._model, self._optimizers, options=_FLAT)
            found |= {f"optimizer.{name}": value for name, value in others.items()}
        for name, value in found.items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                raise CheckpointError(f"{name} is on meta, where tensors have no values; to_empty() gives it memory")
        return found

    def _entries(self, whole: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
        """Name, key of `whole`, and value, of each thing that is saved: of stacked tensors, each expert's row."""
        stacked = self._stacked()
        for known in stacked:
            if _WEIGHTS + known not in whole:
                raise CheckpointError(
                    f"{known} has another name in torch's state of the model: pass what wrappers, such as "
                    "DistributedDataParallel, have inside"
                )
        for key, value in whole.items():
            start = next(start for start in (_WEIGHTS, _STATES, _SETTINGS) if key.startswith(start))
            rest = key.removeprefix(start)
            name = next((name for name in stacked if rest == name or rest.startswith(f"{name}.")), None)
            if key.endswith(".param_names"):  # of parameters here
                continue
            if name is None:
                yield key, key, value
                continue
            plain, experts = stacked[name]
            module, _, attribute = plain.rpartition(".")
            after = rest.removeprefix(name)
            if start == _SETTINGS:  # the same for all experts
                yield f"{start}{plain}{after}", key, value
                continue
            is_number = not isinstance(value, torch.Tensor) or not value.dim()
            if not is_number and len(value) != len(experts):
                raise CheckpointError(
                    f"{key} is {list(value.shape)}, expected {len(experts)} rows, one for each expert"
                )
            for row, expert in enumerate(experts):
                yield f"{start}{module}.{expert}.{attribute}{after}", key, value if is_number else value[row]

    def _stacked(self) -> dict[str, tuple[str, range | tuple[int, ...]]]:
        """Names of tensors of stacked experts, with the names less which experts these are, and the experts."""
        owned: dict[int, tuple[str, range | tuple[int, ...]]] = {}
        for module in self._model.modules():
            if isinstance(module, MoELayer):
                held, experts = held_by(module), module.local_experts
                rows = [each for each in module.experts.buffers() if each.shape[:1] == (len(experts),)]
                for each in (*module.experts.parameters(), *rows):
                    is_spread = module.ep is not None and module.ep.comm.size > 1
                    if is_spread and each.shape[:1] != (len(experts),):
                        raise CheckpointError(
                            f"a parameter of an MoELayer's experts is {list(each.shape)}, expected a row for each of "
                            f"{len(experts)} experts"
                        )
                    if not isinstance(each, DTensor):
                        owned[id(each)] = held, experts
        names = {
            name.replace("_orig_mod.", ""): owned[id(tensor)]  # of torch.compile, which torch's names are without
            for name, tensor in self._model.state_dict(keep_vars=True).items()
            if id(tensor) in owned
        }
        return {name: (without_held(held, name), experts) for name, (held, experts) in names.items()}


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _complete(optimizer: torch.optim.Optimizer) -> None:
    """Gives each parameter that has no state one, by a step without gradients of which nothing else changes.

    Whoever loads makes a new optimiser, which asks for the states of all parameters that are trained.

    Raises:
        CheckpointError: it cannot make such a step.
    """
    parameters = _parameters_of(optimizer)
    without = {id(each) for each in parameters if each.requires_grad and not optimizer.state.get(each)}
    if not without:
        return
    gradients = [each.grad for each in parameters]
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    try:
        for each in parameters:
            each.grad = torch.zeros_like(each) if id(each) in without else None
        for group in optimizer.param_groups:
            if "lr" in group:
                group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
        optimizer.step()
    except Exception as error:  # of whatever class the optimiser is
        raise CheckpointError(
            f"{type(optimizer).__name__} cannot be saved: a step without gradients raises {error!r}"
        ) from error
    finally:
        for each, gradient in zip(parameters, gradients, strict=True):
            each.grad = gradient
        for group, before in zip(optimizer.param_groups, settings, strict=True):
            group.update(before)
    for each in parameters:
        if id(each) in without:
            state = optimizer.state.get(each, {})
            for key in _BEGINNING.keys() & state.keys():
                was, begins = state[key], _BEGINNING[key]
                state[key] = torch.full_like(was, begins) if isinstance(was, torch.Tensor) else type(was)(begins)
