"""Saving and loading a model with MoE layers; a rank reads only its own experts' bytes.

The file is one safetensors file. Expert weights are stored stacked, ``[num_experts, ...]``, so that the experts of a
rank are one contiguous piece of each of them.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from thinwire.comm.tensors import require_dense, require_writable
from thinwire.errors import ArgumentError, CheckpointError
from thinwire.files import open_regular
from thinwire.moe.layer import MoELayer


def _expert_tensors(model: nn.Module) -> dict[str, MoELayer]:
    """The names of all stacked expert tensors, each with its layer."""
    return {
        f"{prefix}.experts.{name}" if prefix else f"experts.{name}": layer
        for prefix, layer in model.named_modules()
        if isinstance(layer, MoELayer)
        for name, _ in layer.experts.named_parameters()
    }


def save_checkpoint(model: nn.Module, path: str | os.PathLike[str], metadata: Mapping[str, str] | None = None) -> None:
    """Write the parameters and persistent buffers of an unsharded model to a safetensors file.

    Floating-point tensors are rounded to bf16, others stored as they are. The file appears under ``path`` only when it
    is complete.

    Args:
        model: any module; its `MoELayer` children hold all their experts.
        path: the file to write; an existing one is replaced.
        metadata: strings stored in the file's header, such as a model's configuration as JSON; None for none.

    Raises:
        CheckpointError: a layer of ``model`` is sharded and so lacks the other ranks' experts.
    """
    for name, layer in _expert_tensors(model).items():
        if len(layer.local_experts) != layer.num_experts:
            raise CheckpointError(
                f"{name} holds experts {layer.local_experts} only; a checkpoint needs all {layer.num_experts}: "
                "save from an unsharded model"
            )
    tensors = {
        name: (tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor).cpu().contiguous()
        for name, tensor in model.state_dict().items()
    }
    target = Path(path)
    # In a folder of its own, which only this user may write to: in the target's, others may be able to put a link where
    # a file of a known name is about to be.
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=target.parent) as folder:
        unfinished = Path(folder) / target.name
        # safetensors creates files that only their owner may read; keep what the umask gives any other new file.
        unfinished.touch()
        mode = unfinished.stat().st_mode
        save_file(tensors, unfinished, metadata=dict(metadata or {}))
        unfinished.chmod(mode)
        unfinished.replace(target)


def read_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """The metadata strings of a checkpoint; no tensor is read.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: the file is not a safetensors file.
    """
    with _open(path) as file:
        return dict(file.metadata() or {})


def load_checkpoint(model: nn.Module, path: str | os.PathLike[str], experts: range | None = None) -> dict[str, str]:
    """Fill ``model`` from a file that `save_checkpoint` wrote, and return the file's metadata.

    Of each stacked expert tensor only the slice ``experts.start:experts.stop`` is read. Values are converted to the
    dtype and device of the model's own tensors. Everything is compared, and converted, before the first value is
    copied, so that a file that does not fit leaves the model as it was. Whole numbers must fit their dtype.

    Args:
        model: a module with the names and shapes of the saved one, its expert tensors ``[len(experts), ...]``.
        path: the safetensors file.
        experts: global ids of the experts that every MoE layer of ``model`` holds; None for all.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: the file is not a safetensors file; it lacks a tensor, or has one too many or of another shape
            or kind of dtype; or the model's layers do not hold the experts asked for, or it has tensors that cannot be
            filled.
    """
    expert_tensors = _expert_tensors(model)
    for name, layer in expert_tensors.items():
        wanted = range(layer.num_experts) if experts is None else experts
        if wanted != layer.local_experts:
            raise CheckpointError(f"{name} holds experts {layer.local_experts}, but {wanted} were asked for")
    for name, tensor in model.state_dict().items():
        _check_can_be_filled(name, tensor)
    stored = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name, layer in expert_tensors.items():
        stored[name] = (layer.num_experts, *stored[name][1:])  # a file holds all experts
    with _open(path) as file:
        _check_names_and_shapes(file, path, stored)
        values = {}
        for name, tensor in model.state_dict().items():
            if name in expert_tensors:
                read = functools.partial(_slice_of, file, name, expert_tensors[name].local_experts)
            else:
                read = functools.partial(file.get_tensor, name)
            values[name] = _converted(read, tensor, f"{path}: {name}")
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                tensor.copy_(values[name])
        return dict(file.metadata() or {})


def _check_can_be_filled(name: str, tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise CheckpointError(f"{name} of the model is a {type(tensor).__name__}; a checkpoint holds tensors only")
    try:
        if tensor.is_meta:
            raise ArgumentError(f"{name} is on meta, where tensors have no values; to_empty() gives it memory")
        require_dense(name, tensor)
        require_writable(name, tensor)
    except ArgumentError as error:
        raise CheckpointError(f"the model cannot be filled: {error}") from error
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise CheckpointError(
            f"the model cannot be filled: {name} was made in inference mode, and can be written there only"
        )


def _converted(read: Callable[[], torch.Tensor], tensor: torch.Tensor, what: str) -> torch.Tensor:
    """A value of a file as it is to be copied into a tensor of the model, of that one's dtype."""
    try:
        value = read()
        same_kind = _kind(value) == _kind(tensor)
        converted = value.to(tensor.dtype) if same_kind else value
        fits = same_kind and (_kind(value) != "int" or bool((converted.to(value.dtype) == value).all()))
    except (RuntimeError, NotImplementedError, SafetensorError) as error:  # a dtype that torch knows by name alone
        raise CheckpointError(f"{what} cannot be read as {tensor.dtype}: {error}") from error
    if not fits:
        values = "" if not same_kind else ", with numbers that do not fit"
        raise CheckpointError(f"{what} is {value.dtype}{values}, expected a kind of {tensor.dtype}")
    return converted


def _kind(tensor: torch.Tensor) -> str:
    if tensor.is_floating_point():
        return "float"
    return "complex" if tensor.is_complex() else "bool" if tensor.dtype == torch.bool else "int"


def _slice_of(file: Any, name: str, owned: range) -> torch.Tensor:
    found: torch.Tensor = file.get_slice(name)[owned.start : owned.stop]
    return found


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


def _check_names_and_shapes(file: Any, path: str | os.PathLike[str], expected: Mapping[str, tuple[int, ...]]) -> None:
    found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
    problems = [f"{name} {shape} is missing" for name, shape in expected.items() if name not in found]
    problems += [f"{name} {shape} is unexpected" for name, shape in found.items() if name not in expected]
    different = [name for name, shape in expected.items() if found.get(name, shape) != shape]
    problems += [f"{name} is {found[name]}, expected {expected[name]}" for name in different]
    if problems:
        raise CheckpointError(f"{path} does not fit the model: " + "; ".join(problems))
