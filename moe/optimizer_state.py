"""An optimiser's state as a checkpoint holds it: tensors by the names of its parameters, and settings as JSON.

A file may come from a stranger, and torch's fused kernels do not look at sizes. So a state must have the names, shapes
and dtypes that this optimiser keeps of small stand-ins for its parameters, after a step with the file's settings; of
these only numbers are taken. Nothing is changed before all of it is known to fit.
"""

from __future__ import annotations

import copy
import inspect
import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from thinwire.comm.shaped_json import parse
from thinwire.errors import CheckpointError
from thinwire.moe.places import Place, require_kind

#: In front of the names of an optimiser's tensors, `optimizer/NAME OF A PARAMETER/NAME OF A STATE`.
OPTIMIZER = "optimizer/"
#: Under which its settings are among a file's metadata.
SETTINGS = "thinwire.optimizer"
#: Settings that say how an optimiser computes, not what; each program has its own.
_OWN = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}
#: Settings that torch's schedulers add; a program may make its scheduler after it has loaded.
_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
_MOST = 1e300  # which a float takes
_States = dict[str, dict[str, torch.Tensor]]  # by parameter and key


class OptimizerState:
    """The state of an optimiser over parameters of a model.

    Args:
        tensors: the model's, by name, with their places.

    Raises:
        ArgumentError: it is no optimiser.
        CheckpointError: one of its parameters is not among them.
    """

    def __init__(self, tensors: Mapping[str, tuple[torch.Tensor, Place]], optimizer: torch.optim.Optimizer) -> None:
        require_kind("optimizer", optimizer, torch.optim.Optimizer)
        self._optimizer, self._places = optimizer, tensors
        known: dict[int, str] = {}
        for name, (tensor, _) in tensors.items():
            known.setdefault(id(tensor), name)
        self.parameters: dict[str, torch.Tensor] = {}  # by name
        self._group_of: dict[str, int] = {}
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in known:
                    raise CheckpointError(
                        f"the optimiser has a parameter of shape {list(parameter.shape)} that is not the model's; was "
                        "it made before the layers were sharded?"
                    )
                self.parameters[known[id(parameter)]] = parameter
                self._group_of[known[id(parameter)]] = number

    def tensors(self) -> Iterator[tuple[str, torch.Tensor, Place]]:
        """Its tensors with their names and places.

        Raises:
            CheckpointError: they are not what `load_checkpoint` could take.
        """
        states = self._own_states()
        kept = self._step_stand_ins(self._optimizer.param_groups, self._small(states))
        for name, state in states.items():
            self._check(name, state, kept[name])
            for key, value in state.items():
                place = self._places[name][1]
                # A number is the same on all ranks, but one without experts may not have it.
                is_number = self._is_number(name, kept[name][key])
                yield f"{OPTIMIZER}{name}/{key}", value, Place((), None, place.mine) if is_number else place

    def settings(self) -> str:
        """Learning rates and the like of each group of parameters, and which parameters those are."""
        groups = [
            {key: _plain(value) for key, value in group.items() if key not in _OWN}
            for group in self._optimizer.param_groups
        ]
        try:
            described = {"class": type(self._optimizer).__name__, "groups": groups, "group_of": self._group_of}
            return json.dumps(described, sort_keys=True, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"a setting of the optimiser cannot be written: {error}") from None

    def place_of(self, name: str, shape: tuple[int, ...]) -> tuple[torch.Tensor, Place] | None:
        """The parameter of a stored tensor of that name and shape, and where that lies; None: it is of other ranks.

        Raises:
            CheckpointError: it has another shape than it may have.
        """
        owner = name.removeprefix(OPTIMIZER).rpartition("/")[0]
        if owner not in self.parameters:
            return None
        place = self._places[owner][1]
        if shape not in ((), place.shape):
            raise CheckpointError(f"{name} is {list(shape)}, expected [] or {list(place.shape)}")
        return self.parameters[owner], place if shape else Place(())

    def prepare(self, settings: str, count: int, stored: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        """What takes settings, and this rank's of so many tensors, by name. Until it is called, nothing changes.

        Raises:
            CheckpointError: they do not fit.
        """
        groups = self._groups_with(settings, count)
        kept = self._step_stand_ins(groups, self._small(self._own_states()))
        states: _States = {name: {} for name in self.parameters}
        for name, value in stored.items():
            owner, _, key = name.removeprefix(OPTIMIZER).rpartition("/")
            like = kept[owner].get(key, value)
            if self._is_number(owner, like) and value.is_floating_point() and like.is_floating_point():
                value = value.to(like.dtype)  # which follows torch's default, and whether the optimiser is fused
            states[owner][key] = value.to(like.device, copy=True)  # what safetensors gives lies in the file itself
        for name, state in states.items():
            self._check(name, state, kept[name])
        self._step_stand_ins(groups, self._small(states))  # whatever an optimiser makes of these numbers

        def fill() -> None:
            for name, parameter in self.parameters.items():
                self._optimizer.state.pop(parameter, None)
                if states[name]:
                    self._optimizer.state[parameter] = states[name]
            for group, taken in zip(self._optimizer.param_groups, groups, strict=True):
                group.update({key: value for key, value in taken.items() if key != "params"})

        return fill

    def _own_states(self) -> _States:
        of_none = self._optimizer.state.keys() - set(self.parameters.values())
        if any(self._optimizer.state[key] for key in of_none):
            raise CheckpointError("the optimiser keeps a state of something that is none of its parameters")
        found = {name: dict(self._optimizer.state.get(each, {})) for name, each in self.parameters.items()}
        for name, state in found.items():
            for key, value in state.items():
                if type(value) not in (torch.Tensor, DTensor) or "/" in key:
                    raise CheckpointError(f"the optimiser keeps {key!r}, a {type(value).__name__}, of {name}")
                if value.shape not in ((), self.parameters[name].shape):
                    raise CheckpointError(f"the optimiser keeps {key!r}, a tensor of {list(value.shape)}, of {name}")
        return found

    def _small(self, states: _States) -> _States:
        """Of stand-ins: numbers as they are, and zeros instead of the rest."""

        def small(name: str, value: torch.Tensor) -> torch.Tensor:
            if not value.dim():
                return value.detach().clone()
            return torch.zeros(_small_shape(self.parameters[name]), dtype=value.dtype, device=value.device)

        return {name: {key: small(name, value) for key, value in state.items()} for name, state in states.items()}

    def _step_stand_ins(self, groups: list[dict[str, Any]], states: _States) -> _States:
        """What the optimiser keeps of stand-ins for its parameters, after a step from these settings and states.

        The stand-ins have the parameters' dtypes, devices and numbers of dimensions; their sizes are small.
        """
        optimizer = self._optimizer
        kind = type(optimizer)
        small = {
            name: torch.zeros(_small_shape(each), dtype=each.dtype, device=each.device)
            for name, each in self.parameters.items()
        }
        of_groups: list[list[torch.Tensor]] = [[] for _ in groups]
        for name, number in self._group_of.items():
            of_groups[number].append(small[name])
        another = object.__new__(kind)
        try:
            # Copies, as a step may change a setting in place.
            own_groups = [copy.deepcopy({key: group[key] for key in group.keys() - {"params"}}) for group in groups]
            settings = [{**group, "params": params} for group, params in zip(own_groups, of_groups, strict=True)]
            torch.optim.Optimizer.__init__(another, settings, dict(optimizer.defaults))
            # What a class of the user's keeps besides, with stand-ins wherever it refers to what they stand in for.
            known: dict[int, Any] = {id(parameter): small[name] for name, parameter in self.parameters.items()}
            known |= {id(optimizer): another, id(optimizer.state): another.state}
            known[id(optimizer.param_groups)] = another.param_groups
            own = {key: value for key, value in vars(optimizer).items() if key not in vars(another)}
            vars(another).update(copy.deepcopy({key: value for key, value in own.items() if key != "step"}, known))
            accepted = inspect.signature(kind).parameters.keys() - _OWN
            for group, params in zip(groups, of_groups, strict=True):
                if params and f"{kind.__module__}.".startswith("torch.optim."):  # whose constructors check numbers
                    kind(params, **{key: group[key] for key in accepted & group.keys()})
            for name, stand_in in small.items():
                can_step = stand_in.is_complex() or (stand_in.is_floating_point() and stand_in.itemsize > 1)
                if can_step or states[name] or self.parameters[name].requires_grad:  # others are frozen
                    stand_in.grad = torch.ones_like(stand_in)
                if states[name]:
                    another.state[stand_in] = states[name]
            with torch.random.fork_rng({each.device for each in small.values() if each.is_cuda}):
                kind.step(another)
        except Exception as error:  # of whatever class the optimiser is
            raise CheckpointError(
                f"{kind.__name__} with these settings cannot be stored or loaded, as a step of it for small tensors "
                f"raises {error!r}"
            ) from error
        kept = {name: dict(another.state.get(stand_in, {})) for name, stand_in in small.items()}
        for name, state in kept.items():
            for key, value in state.items():
                if not isinstance(value, torch.Tensor) or value.shape not in ((), small[name].shape):
                    what = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
                    raise CheckpointError(
                        f"{kind.__name__} cannot be stored or loaded, as it keeps {key!r}, {what}, of a tensor of "
                        f"{list(small[name].shape)}; expected a number as a tensor, or a tensor of the same shape"
                    )
        return kept

    def _is_number(self, name: str, kept: torch.Tensor) -> bool:
        return kept.dim() == 0 and self.parameters[name].dim() > 0

    def _check(self, name: str, state: dict[str, torch.Tensor], kept: dict[str, torch.Tensor]) -> None:
        """Raises CheckpointError unless there is no state of a parameter, or one as is kept of its stand-in."""
        parameter = self.parameters[name]
        if state and state.keys() != kept.keys():
            raise CheckpointError(
                f"the optimiser's state of {name} is {', '.join(sorted(state))}; expected, of a "
                f"{type(self._optimizer).__name__} with these settings, {', '.join(sorted(kept)) or 'none'}"
            )
        for key, value in state.items():
            like, is_number = kept[key], self._is_number(name, kept[key])
            shape = () if is_number else parameter.shape
            if value.shape != shape or value.dtype != like.dtype:
                raise CheckpointError(
                    f"the optimiser's {key} of {name} is {value.dtype} {list(value.shape)}, expected {like.dtype} "
                    f"{list(shape)}"
                )
            if key == "step" and value.dim() == 0 and not 0 <= value.item() < math.inf:
                raise CheckpointError(f"the optimiser's step of {name} is {value.item()}, expected 0 or more")

    def _groups_with(self, settings: str, count: int) -> list[dict[str, Any]]:
        """This optimiser's groups with a checkpoint's numbers; that has so many tensors of the state."""
        own_kind = type(self._optimizer).__name__
        try:
            found = parse(settings.encode())
            saved, of_kind = found.get("tensors", count), found.get("class", own_kind)
            groups, group_of = found["groups"], found["group_of"]
            stored = [dict(group) for group in groups]
            moved = [name for name, number in self._group_of.items() if group_of.get(name, number) != number]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"the optimiser's settings cannot be read: {error!r}") from None
        if of_kind != own_kind:
            raise CheckpointError(
                f"the checkpoint has the state of {repr(of_kind)[:80]}, and the optimiser is {own_kind}"
            )
        if saved != count:
            raise CheckpointError(
                f"the checkpoint has {count} tensors of the optimiser's, and was saved with {repr(saved)[:80]}"
            )
        own = [dict(group) for group in self._optimizer.param_groups]
        if len(stored) != len(own) or moved:
            which = f", and {moved[0]} in another one" if moved else ""
            raise CheckpointError(f"the checkpoint has {len(stored)} groups of parameters, here are {len(own)}{which}")
        for mine, theirs in zip(own, stored, strict=True):
            for key in (mine.keys() ^ theirs.keys()) - _OWN - _OF_SCHEDULERS:
                where = "not in the checkpoint" if key in mine else "in the checkpoint alone"
                raise CheckpointError(f"the optimiser's setting {key[:80]!r} is {where}")
            for key in theirs.keys() - _OWN:
                value = theirs[key]
                if _numbers(value) and (key not in mine or _numbers(_plain(mine[key])) == _numbers(value)):
                    before, taken = mine.get(key), tuple(value) if isinstance(value, list) else value
                    mine[key] = torch.full_like(before, value) if isinstance(before, torch.Tensor) else taken
                elif key not in mine or value != _plain(mine[key]):
                    raise CheckpointError(
                        f"the optimiser's {key} is {repr(value)[:80]} in the checkpoint, and {mine.get(key)!r} here"
                    )
        return own


def _plain(value: Any) -> Any:
    """A setting as JSON has it."""
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        return value.item()
    return list(value) if isinstance(value, tuple) else value


def _numbers(value: Any) -> int:
    """1 for a finite number, two more than its length for a list of them, 0 for anything else."""
    numbers = value if isinstance(value, list) else [value]
    right = all(type(number) in (int, float) and -_MOST < number < _MOST for number in numbers)
    return right * (2 + len(value) if isinstance(value, list) else 1)


def _small_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Of a stand-in for it: another size of each dimension, so that what is turned or cut looks different."""
    return tuple(min(size, 2 + place) for place, size in enumerate(parameter.shape))
