"""An optimiser's state as a checkpoint holds it: tensors by the names of its parameters, and settings as JSON.

A file may come from a stranger, and torch's fused kernels do not look at sizes. So a state is either a number, such as
that of the steps, or has its parameter's shape and dtype; and of the settings only numbers are taken.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from thinwire.comm.shaped_json import parse
from thinwire.errors import CheckpointError
from thinwire.moe.places import Place

#: In front of the names of an optimiser's tensors, `optimizer/NAME OF A PARAMETER/NAME OF A STATE`.
OPTIMIZER = "optimizer/"
#: Under which its settings are among a file's metadata.
SETTINGS = "thinwire.optimizer"
#: Settings that say how an optimiser computes, not what; each program has its own.
_OWN = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}


class OptimizerState:
    """The state of an optimiser over parameters of a model.

    Args:
        tensors: the model's, by name, with their places.

    Raises:
        CheckpointError: one of its parameters is not among them.
    """

    def __init__(self, tensors: Mapping[str, tuple[torch.Tensor, Place]], optimizer: torch.optim.Optimizer) -> None:
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
            CheckpointError: a state that is no tensor, or has another shape or dtype than it may have.
        """
        for name, parameter in self.parameters.items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if not isinstance(value, torch.Tensor) or "/" in key:
                    raise CheckpointError(f"the optimiser keeps {key!r}, a {type(value).__name__}, of {name}")
                _check(f"{name}: {key}", value.shape, value.dtype, parameter)
                place = self._places[name][1]
                # A number is the same on all ranks, but one without experts may not have it.
                yield f"{OPTIMIZER}{name}/{key}", value, place if value.dim() else Place((), None, place.mine)

    def settings(self) -> str:
        """Learning rates and the like of each group of parameters, and which parameters those are."""
        groups = [
            {key: _plain(value) for key, value in group.items() if key not in _OWN}
            for group in self._optimizer.param_groups
        ]
        try:
            return json.dumps({"groups": groups, "group_of": self._group_of}, sort_keys=True, allow_nan=False)
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

    def fill(self, settings: str, stored: Mapping[str, torch.Tensor]) -> None:
        """Takes settings, and this rank's tensors by name. If they do not fit, it is as it was.

        Raises:
            CheckpointError: they do not fit.
        """
        groups = self._groups_with(settings)
        states: dict[str, dict[str, torch.Tensor]] = {}
        for name, value in stored.items():
            owner, _, key = name.removeprefix(OPTIMIZER).rpartition("/")
            _check(f"{owner}: {key}", value.shape, value.dtype, self.parameters[owner])
            states.setdefault(owner, {})[key] = value
        numbers = {name: number for number, name in enumerate(self.parameters)}
        for name, number in numbers.items():
            groups[self._group_of[name]]["params"].append(number)
        optimizer = self._optimizer
        before = optimizer.state, optimizer.param_groups
        try:
            optimizer.load_state_dict(
                {"state": {numbers[name]: state for name, state in states.items()}, "param_groups": groups}
            )
        except Exception as error:  # whatever an optimiser makes of a state that it does not know
            optimizer.state, optimizer.param_groups = before
            raise CheckpointError(f"the optimiser cannot take the checkpoint's state: {error!r}") from error

    def _groups_with(self, settings: str) -> list[dict[str, Any]]:
        """This optimiser's groups, without parameters, with the numbers of a checkpoint's."""
        try:
            found = parse(settings.encode())
            groups, group_of = found["groups"], found["group_of"]
            stored = [dict(group) for group in groups]
            moved = [name for name, number in self._group_of.items() if group_of.get(name, number) != number]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"the optimiser's settings cannot be read: {error!r}") from None
        own = [dict(group) for group in self._optimizer.param_groups]
        if len(stored) != len(own) or moved:
            which = f", and {moved[0]} in another one" if moved else ""
            raise CheckpointError(f"the checkpoint has {len(stored)} groups of parameters, here are {len(own)}{which}")
        for mine, theirs in zip(own, stored, strict=True):
            for key in theirs.keys() - _OWN:
                value = theirs[key]
                if _numbers(value) and (key not in mine or _numbers(_plain(mine[key])) == _numbers(value)):
                    before, taken = mine.get(key), tuple(value) if isinstance(value, list) else value
                    mine[key] = torch.full_like(before, value) if isinstance(before, torch.Tensor) else taken
                elif key in mine and value != _plain(mine[key]):
                    raise CheckpointError(
                        f"the optimiser's {key} is {repr(value)[:80]} in the checkpoint, and {mine[key]!r} here"
                    )
            mine["params"] = []
        return own


def _plain(value: Any) -> Any:
    """A setting as JSON has it."""
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        return value.item()
    return list(value) if isinstance(value, tuple) else value


def _numbers(value: Any) -> int:
    """1 for a finite number, two more than its length for a list of them, 0 for anything else."""
    numbers = value if isinstance(value, list) else [value]
    right = all(type(number) in (int, float) and math.isfinite(number) for number in numbers)
    return right * (2 + len(value) if isinstance(value, list) else 1)


def _check(what: str, shape: torch.Size, dtype: torch.dtype, parameter: torch.Tensor) -> None:
    """Raises CheckpointError unless a state is a real number, or like its parameter."""
    if shape != parameter.shape or dtype != parameter.dtype:
        if len(shape) or dtype.is_complex or dtype == torch.bool:
            raise CheckpointError(
                f"the optimiser's {what} is {dtype} {list(shape)}, expected a number or {parameter.dtype} "
                f"{list(parameter.shape)}, as its parameter"
            )
