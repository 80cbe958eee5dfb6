"""Saving a model with MoE layers to one safetensors file: each rank writes its own experts' bytes.

Expert weights of `MoELayer` are stored stacked, ``[num_experts, ...]``, so that the experts of a rank are one
contiguous piece of each of them. Those of `LocalExperts` have the experts' numbers in their names.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from thinwire.errors import CheckpointError
from thinwire.moe.checkpoint_folder import write_at
from thinwire.moe.places import Place, group_of_experts, placed_tensors, whole
from thinwire.moe.safetensors_header import dtype_name, make_header, offsets_of
from thinwire.moe.together import agree_on_path, together, unfinished_folder

if TYPE_CHECKING:
    from thinwire.comm.communicator import Communicator

_Part = tuple[str, torch.Tensor, Place]
_LONGEST_NAME = 2000  # characters
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # of as many bytes as an element
_ROWS_AT_ONCE = 200  # tensors that ranks tell each other of in a message, whatever their names


def save_checkpoint(
    model: nn.Module,
    path: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a model's parameters and persistent buffers to one safetensors file.

    Collective where experts are spread over ranks, by sharded `MoELayer` or `LocalExperts`: each rank writes its own
    experts' bytes, and rank 0 all else, which is the same everywhere. All ranks must see the folder. What
    `fully_shard` has sharded is gathered, one tensor at a time. The file does not say how many ranks there were.
    It appears under ``path`` only when it is complete. If one rank fails, all raise, and nothing is left behind.

    Args:
        model: any module, without what wraps it, such as DistributedDataParallel. Tensors are stored as they are.
        path: the file to write, the same on all ranks; an existing one is replaced. Next to it, folders
            ``.unfinished-...`` of processes that were killed while they saved are removed, if they ran on this host
            since it was started.
        metadata: strings stored in the file's header, such as the number of the step; None for none. Rank 0's count.
        dtype: rounds the model's floating-point tensors to this one; None keeps theirs.

    Raises:
        ArgumentError: ``model`` is no module, or ``path`` no path.
        ConfigMismatch: ranks give different paths.
        CheckpointError: experts are spread over different groups; ranks have different models, or other values of a
            parameter that is not among these experts; the model is wrapped in DistributedDataParallel; a tensor or
            string that cannot be stored; or another rank failed.
        OSError: what the system says of writing.
    """
    comm = group_of_experts(model)
    is_first = comm is None or comm.rank == 0
    parts: list[_Part] = []
    text: dict[str, str] = {}
    values: dict[str, str] = {}

    def collect() -> str:
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise CheckpointError(f"dtype is {dtype!r}, expected None or a floating-point dtype")
        text.update(_checked_metadata(metadata))
        found = [(name, tensor, place) for name, (tensor, place) in placed_tensors(model).items()]
        for name, tensor, _ in found:
            dtype_name(tensor.dtype)
            if len(name) > _LONGEST_NAME or not _is_text(name):
                raise CheckpointError(f"{name[:80]!r} has {len(name)} characters, or some that cannot be written")
        if comm is None and any(isinstance(tensor, DTensor) for _, tensor, _ in found):
            raise CheckpointError("the model is sharded, and no experts are: torch.distributed.checkpoint saves it")
        parts.extend(found)
        if comm is not None:
            values.update((name, "" if place.mine else _digest(tensor)) for name, tensor, place in found)
        return ""

    together(comm, "describe its model", collect)
    target = agree_on_path(comm, path)
    as_stored = {
        name: dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype for name, tensor, _ in parts
    }
    rows = {name: (dtype_name(as_stored[name]), place) for name, _, place in parts}
    stored = _agree(comm, rows, values)
    with contextlib.ExitStack() as stack:

        def create() -> str:
            folder = stack.enter_context(unfinished_folder(target))
            header, end = make_header(stored, text)
            with open(Path(folder).resolve() / "checkpoint", "xb") as file:
                file.write(header)
                file.truncate(len(header) + end)
            return json.dumps([file.name, len(header)])

        unfinished, first = json.loads(together(comm, "make the file", create if is_first else lambda: ""))

        def write() -> str:
            places = {name: first + offset for name, offset in offsets_of(stored).items()}
            _write_all(unfinished, parts, as_stored, places, is_first)
            return ""

        together(comm, "write its part", write)

        def finish() -> str:
            Path(unfinished).replace(target)
            return ""

        together(comm, "give the file its name", finish if is_first else lambda: "")


def _write_all(
    path: str, parts: list[_Part], dtypes: Mapping[str, torch.dtype], places: Mapping[str, int], is_first: bool
) -> None:
    """This rank's parts to a file in which each tensor begins at its place. An error is raised at the end."""
    error: Exception | None = None
    with open(path, "r+b") as file:
        for name, tensor, place in parts:
            tensor = whole(tensor)  # also after an error, as the others take part in it
            if error is None and (place.mine or is_first):
                try:
                    _write(file.fileno(), tensor.to(dtypes[name]), places[name], place)
                except Exception as raised:
                    error = raised
        if error is not None:
            raise error
        os.fsync(file.fileno())


def _checked_metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    if not isinstance(metadata, Mapping | None):
        raise CheckpointError(f"metadata is a {type(metadata).__name__}, expected a dict of strings or None")
    for item in (metadata or {}).items():
        if not all(isinstance(text, str) and _is_text(text) for text in item):
            raise CheckpointError(f"metadata has {item[0]!r}: {repr(item[1])[:80]}, expected strings")
    return dict(metadata or {})


def _is_text(text: str) -> bool:
    """Whether UTF-8 has it: not half of a pair of surrogates."""
    return text.encode(errors="ignore").decode() == text


def _write(descriptor: int, tensor: torch.Tensor, offset: int, place: Place) -> None:
    """All of a part to its place in a file, of which the whole begins at `offset`."""
    octets = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    rows = range(1) if place.rows is None else place.rows  # of one, all is a row
    size = len(octets) // max(1, len(rows))
    for number, row in enumerate(rows):
        write_at(descriptor, octets.data[number * size : (number + 1) * size], offset + row * size)


def _digest(tensor: torch.Tensor) -> str:
    """Of a parameter's bits, whatever their order; nothing of what ranks may have different values or shards of."""
    if not isinstance(tensor, nn.Parameter) or isinstance(tensor, DTensor):
        return ""
    if tensor.is_meta or tensor.itemsize not in _INTEGERS:  # which is refused elsewhere
        return ""
    integers = tensor.detach().view(_INTEGERS[tensor.itemsize])
    return str(int(integers.sum(dtype=torch.int64)))


def _agree(
    comm: Communicator | None, own: dict[str, tuple[str, Place]], values: Mapping[str, str]
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of each tensor of all ranks, in the order of rank 0, then of others.

    Raises:
        CheckpointError: on all ranks, where they differ.
    """
    if comm is None:
        return {name: (dtype, place.shape) for name, (dtype, place) in own.items()}
    rows = [[name, dtype, list(place.shape), place.mine, values[name]] for name, (dtype, place) in own.items()]
    counts = comm.all_gather_data((len(rows),), (int,))
    told: list[list[Any]] = [[] for _ in range(comm.size)]
    for start in range(0, max(count for (count,) in counts), _ROWS_AT_ONCE):
        part = comm.all_gather_data(rows[start : start + _ROWS_AT_ONCE], [(str, str, [int], bool, str)])
        for rank, more in enumerate(part):
            told[rank] += more
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    common = {name: value for name, _, _, mine, value in told[0] if not mine}
    for rank, of_rank in enumerate(told):
        for name, dtype, shape, mine, value in of_rank:
            if found.setdefault(name, (dtype, tuple(shape))) != (dtype, tuple(shape)) or mine == (name in common):
                raise CheckpointError(f"ranks have different models: rank {rank} has {name}, {dtype} {shape}")
            if not mine and value != common[name]:
                raise CheckpointError(
                    f"rank {rank} has other values of {name} than rank 0, and only rank 0's would be stored. Experts "
                    "belong into tw.LocalExperts or a sharded tw.MoELayer; all else has to be the same on all ranks, "
                    "as DistributedDataParallel keeps it"
                )
        missing = common.keys() - {name for name, *_ in of_rank}
        if missing:
            raise CheckpointError(f"ranks have different models: rank {rank} lacks {min(missing)}")
    return found
