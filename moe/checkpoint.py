"""Loading a model with MoE layers from a file of `save_checkpoint`: each rank its own experts."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from thinwire.comm.tensors import require_dense, require_writable
from thinwire.errors import ArgumentError, CheckpointError
from thinwire.files import open_regular
from thinwire.moe.local_experts import LocalExperts
from thinwire.moe.places import Place, placed_tensors


def read_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """The metadata strings of a checkpoint, as `save_checkpoint` was given them; no tensor is read.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: the file is not a safetensors file.
    """
    with _open(path) as file:
        return dict(file.metadata() or {})


def load_checkpoint(model: nn.Module, path: str | os.PathLike[str]) -> dict[str, str]:
    """Fill ``model`` from a file that `save_checkpoint` wrote, and return the file's metadata.

    Experts may be spread over any number of ranks, or over none: a rank reads what its model holds, of stacked experts
    the rows of its own. It is not collective. Values are converted to the dtype and device of the model's own tensors.
    Everything is compared, and converted, before the first value is copied, so that a file that does not fit leaves the
    model as it was. Whole numbers must fit their dtype.

    Args:
        model: a module with the names and shapes of the saved one.
        path: the safetensors file.

    Raises:
        ArgumentError: ``model`` is no module.
        FileNotFoundError: there is no such file.
        CheckpointError: the file is not a safetensors file; it lacks a tensor, or has one too many or of another shape
            or kind of dtype; or the model has tensors that cannot be filled.
    """
    held = placed_tensors(model)
    for name, (tensor, _) in held.items():
        _check_can_be_filled(name, tensor)
    with _open(path) as file:
        others = _experts_elsewhere(model, held, set(file.keys()))
        _check_names_and_shapes(file, path, {name: place.shape for name, (_, place) in held.items()}, others)
        values = {}
        for name, (tensor, place) in held.items():
            read = functools.partial(_part_of, file, name, place)
            values[name] = _converted(read, tensor, f"{path}: {name}")
        with torch.no_grad():
            for name, (tensor, _) in held.items():
                tensor.copy_(_sharded_like(values[name], tensor))
        return dict(file.metadata() or {})


def _part_of(file: Any, name: str, place: Place) -> torch.Tensor:
    """What this rank holds of a stored tensor."""
    rows = place.rows
    if rows is None:
        found: torch.Tensor = file.get_tensor(name)
    else:  # a slice is read at once
        found = file.get_slice(name)[slice(rows.start, rows.stop) if isinstance(rows, range) else list(rows)]
    return found


def _sharded_like(value: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A whole tensor as `tensor` is sharded by `fully_shard`, if it is; nothing is sent."""
    if not isinstance(tensor, DTensor):
        return value
    return distribute_tensor(value.to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None)


def _experts_elsewhere(model: nn.Module, held: Iterable[str], names: Iterable[str]) -> set[str]:
    """The tensors of experts that are `LocalExperts` of other ranks, by what their own are called."""
    found = set()
    for prefix, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, LocalExperts):
            start = f"{prefix}." if prefix else ""
            absent = [f"{start}{number}." for number in range(module.ep.num_experts) if str(number) not in module]
            found |= {name for name in names if name.startswith(tuple(absent))}
    return found.difference(held)


def _check_can_be_filled(name: str, tensor: torch.Tensor) -> None:
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    try:
        if tensor.is_meta:
            raise ArgumentError(f"{name} is on meta, where tensors have no values; to_empty() gives it memory")
        require_dense(name, tensor)
        require_writable(name, tensor)
    except ArgumentError as error:
        raise CheckpointError(f"the model cannot be filled: {error}") from error


def _converted(read: Callable[[], torch.Tensor], tensor: torch.Tensor, what: str) -> torch.Tensor:
    """A value of a file as it is to be copied into a tensor of the model, of that one's dtype."""
    with _errors_named(what):
        value = read()
        same_kind = _kind(value) == _kind(tensor)
        converted = value.to(tensor.dtype) if same_kind else value
        fits = same_kind and (_kind(value) != "int" or bool((converted.to(value.dtype) == value).all()))
    if not fits:
        values = "" if not same_kind else ", with numbers that do not fit"
        raise CheckpointError(f"{what} is {value.dtype}{values}, expected a kind of {tensor.dtype}")
    return converted


@contextlib.contextmanager
def _errors_named(what: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, NotImplementedError, SafetensorError) as error:  # a dtype that torch knows by name alone
        raise CheckpointError(f"{what} cannot be read: {error}") from error


def _kind(tensor: torch.Tensor) -> str:
    if tensor.is_floating_point():
        return "float"
    return "complex" if tensor.is_complex() else "bool" if tensor.dtype == torch.bool else "int"


def _open(path: str | os.PathLike[str]) -> Any:
    if not isinstance(path, str | os.PathLike):
        raise CheckpointError(f"path is a {type(path).__name__}, expected a str or a path")
    try:
        os.close(open_regular(path))  # of a pipe, safetensors would wait for a writer, whatever signals come
        return safe_open(path, framework="pt", device="cpu")
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError, ValueError) as error:  # a folder, a path that no file can have
        raise CheckpointError(f"{path} is not a complete safetensors file: {error}") from error


def _check_names_and_shapes(
    file: Any, path: str | os.PathLike[str], expected: Mapping[str, tuple[int, ...]], others: set[str]
) -> None:
    """Raises CheckpointError unless a file has what is expected, and besides that at most `others`."""
    found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys() if name not in others}
    problems = [f"{name} {shape} is missing" for name, shape in expected.items() if name not in found]
    problems += [f"{name} {shape} is unexpected" for name, shape in found.items() if name not in expected]
    different = [name for name, shape in expected.items() if found.get(name, shape) != shape]
    problems += [f"{name} is {found[name]}, expected {expected[name]}" for name in different]
    if problems:
        raise CheckpointError(f"{path} does not fit the model: " + "; ".join(problems))
