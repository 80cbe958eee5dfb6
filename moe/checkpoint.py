"""A model with MoE layers in one safetensors file: each rank writes its own experts, and reads its own.

Expert weights of `MoELayer` are stored stacked, ``[num_experts, ...]``; those of `LocalExperts` have the experts'
numbers in their names. The library safetensors reads. It cannot write one file from several ranks, so rank 0 makes the
file with its header, and each rank writes at its own places.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from thinwire.comm.tensors import require_dense, require_writable
from thinwire.errors import ArgumentError, CheckpointError
from thinwire.moe.local_experts import LocalExperts
from thinwire.moe.places import Place, group_of_experts, placed_tensors, whole
from thinwire.moe.together import agree_on_path, together, unfinished_folder

if TYPE_CHECKING:
    from thinwire.comm.communicator import Communicator

#: By safetensors' names.
DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F16": torch.float16, "BF16": torch.bfloat16,
    "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
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
    parts: dict[str, tuple[torch.Tensor, Place]] = {}
    values: dict[str, str] = {}

    def collect() -> str:
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise CheckpointError(f"dtype is {dtype!r}, expected None or a floating-point dtype")
        if not isinstance(metadata, Mapping | None):
            raise CheckpointError(f"metadata is a {type(metadata).__name__}, expected a dict of strings or None")
        for key, text in (metadata or {}).items():
            if not (isinstance(key, str) and isinstance(text, str)):
                raise CheckpointError(f"metadata has {key!r}: {repr(text)[:80]}, expected strings")
        parts.update(placed_tensors(model))
        for name, (tensor, place) in parts.items():
            if tensor.dtype not in _NAMES:
                raise CheckpointError(
                    f"{name} is {tensor.dtype}, which cannot be stored; one of {', '.join(map(str, _NAMES))} can"
                )
            values[name] = "" if comm is None or place.mine else _digest(tensor)
        if comm is None and any(isinstance(tensor, DTensor) for tensor, _ in parts.values()):
            raise CheckpointError("the model is sharded, and no experts are: torch.distributed.checkpoint saves it")
        return ""

    together(comm, "describe its model", collect)
    target = agree_on_path(comm, path)
    as_stored = {
        name: dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        for name, (tensor, _) in parts.items()
    }
    stored = _agree(comm, {name: (_NAMES[as_stored[name]], place) for name, (_, place) in parts.items()}, values)
    with contextlib.ExitStack() as stack:

        def create() -> str:
            unfinished = Path(stack.enter_context(unfinished_folder(target))).resolve() / "checkpoint"
            _make_file(unfinished, stored, metadata or {})
            return str(unfinished)

        unfinished = together(comm, "make the file", create if is_first else lambda: "")

        def write() -> str:
            begins = places_in(unfinished)
            error: Exception | None = None
            with open(unfinished, "r+b") as file:
                for name, (tensor, place) in parts.items():
                    tensor = whole(tensor)  # also after an error, as the others take part in it
                    if error is None and (place.mine or is_first):
                        try:
                            write_rows(file, begins[name], tensor.to(as_stored[name]), place.rows)
                        except Exception as raised:
                            error = raised
                if error is not None:
                    raise error
                file.flush()
                os.fsync(file.fileno())
            return ""

        together(comm, "write its part", write)

        def finish() -> str:
            Path(unfinished).replace(target)
            return ""

        together(comm, "give the file its name", finish if is_first else lambda: "")


def read_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """The metadata strings of a checkpoint, as `save_checkpoint` was given them; no tensor is read.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: the file is not a safetensors file.
    """
    with open_file(path) as file:
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
    with open_file(path) as file:
        _check_names_and_shapes(file, path, model, {name: place.shape for name, (_, place) in held.items()})
        values = {}
        for name, (tensor, place) in held.items():
            try:
                values[name] = _converted(_read(file, name, place.rows), tensor)
            except (RuntimeError, SafetensorError, CheckpointError) as error:
                raise CheckpointError(f"{path}: {name} {error}") from error
        with torch.no_grad():
            for name, (tensor, _) in held.items():
                value = values[name]
                if isinstance(tensor, DTensor):  # of `fully_shard`; nothing is sent
                    value = value.to(tensor.device)
                    value = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
                tensor.copy_(value)
        return dict(file.metadata() or {})


def _read(file: Any, name: str, rows: range | tuple[int, ...] | None) -> torch.Tensor:
    """A stored tensor, or these rows of it, which alone are read."""
    if rows is None:
        found: torch.Tensor = file.get_tensor(name)
    else:
        found = file.get_slice(name)[slice(rows.start, rows.stop) if isinstance(rows, range) else list(rows)]
    return found


def _check_can_be_filled(name: str, tensor: torch.Tensor) -> None:
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    try:
        if tensor.is_meta:
            raise ArgumentError(f"{name} is on meta, where tensors have no values; to_empty() gives it memory")
        require_dense(name, tensor)
        require_writable(name, tensor)
    except ArgumentError as error:
        raise CheckpointError(f"the model cannot be filled: {error}") from error


def _converted(value: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A value of a file as it is to be copied into a tensor of the model, of that one's dtype."""
    if _kind(value) != _kind(tensor):
        raise CheckpointError(f"is {value.dtype}, expected a kind of {tensor.dtype}")
    converted = value.to(tensor.dtype)
    if _kind(value) == "int" and not bool((converted.to(value.dtype) == value).all()):
        raise CheckpointError(f"is {value.dtype}, with numbers that do not fit, expected a kind of {tensor.dtype}")
    return converted


def _kind(tensor: torch.Tensor) -> str:
    if tensor.is_floating_point():
        return "float"
    return "complex" if tensor.is_complex() else "bool" if tensor.dtype == torch.bool else "int"


def open_file(path: str | os.PathLike[str]) -> Any:
    """A safetensors file as `safe_open` gives it, which maps it: what is read of it can be dropped from memory again.

    Raises:
        FileNotFoundError: there is none.
        CheckpointError: it is another kind of file, or cut short.
    """
    if not isinstance(path, str | os.PathLike):
        raise CheckpointError(f"path is a {type(path).__name__}, expected a str or a path")
    if os.path.exists(path) and not os.path.isfile(path):
        raise CheckpointError(f"{path} is not a regular file, expected a safetensors file")
    try:
        return safe_open(path, framework="pt", device="cpu")
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a complete safetensors file: {error}") from error


def _check_names_and_shapes(
    file: Any, path: str | os.PathLike[str], model: nn.Module, expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Raises CheckpointError unless a file has what is expected, and no more but `LocalExperts` of other ranks."""
    elsewhere = tuple(
        f"{prefix}.{number}.".removeprefix(".")
        for prefix, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, LocalExperts)
        for number in range(module.ep.num_experts)
        if str(number) not in module
    )
    names = [name for name in file.keys() if name in expected or not name.startswith(elsewhere)]
    found = {name: tuple(file.get_slice(name).get_shape()) for name in names}
    problems = [f"{name} {shape} is missing" for name, shape in expected.items() if name not in found]
    problems += [f"{name} {shape} is unexpected" for name, shape in found.items() if name not in expected]
    different = [name for name, shape in expected.items() if found.get(name, shape) != shape]
    problems += [f"{name} is {found[name]}, expected {expected[name]}" for name in different]
    if problems:
        raise CheckpointError(f"{path} does not fit the model: " + "; ".join(problems))


def _make_file(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]) -> None:
    """A safetensors file of these dtypes and shapes, all zero. Those of wide elements come first, so all are aligned.

    Source: the format's description in Hugging Face's repository `safetensors`.
    """
    described: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: -DTYPES[item[1][0]].itemsize):
        begin, end = end, end + math.prod(shape) * DTYPES[dtype].itemsize
        described[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    header = json.dumps(described, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with open(path, "xb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)
    open_file(path)  # which refuses a name or string that cannot be read again


def places_in(path: str | os.PathLike[str]) -> dict[str, int]:
    """Where in a safetensors file the bytes of each tensor begin."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return {name: 8 + length + described["data_offsets"][0] for name, described in header.items()}


def write_rows(file: BinaryIO, begin: int, tensor: torch.Tensor, rows: Iterable[int] | None = None) -> None:
    """A tensor's bytes to where it begins in a file; or its rows to those of a larger one that begins there."""
    octets = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
    places = [0] if rows is None else list(rows)
    size = len(octets) // max(1, len(places))
    for number, row in enumerate(places):
        file.seek(begin + row * size)
        file.write(octets[number * size : (number + 1) * size])


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
    common = [{name: value for name, _, _, mine, value in of_rank if not mine} for of_rank in told]
    for rank, of_rank in enumerate(told):
        for name, dtype, shape, _, _ in of_rank:
            if found.setdefault(name, (dtype, tuple(shape))) != (dtype, tuple(shape)):
                raise CheckpointError(f"ranks have different models: rank {rank} has {name}, {dtype} {shape}")
        for name in sorted(common[0].keys() ^ common[rank].keys()):
            verb = "has" if name in common[rank] else "lacks"
            raise CheckpointError(f"ranks have different models: rank {rank} {verb} {name}")
        for name, value in common[rank].items():
            if value != common[0][name]:
                raise CheckpointError(
                    f"rank {rank} has other values of {name} than rank 0, and only rank 0's would be stored. Experts "
                    "belong into tw.LocalExperts or a sharded tw.MoELayer; all else has to be the same on all ranks, "
                    "as DistributedDataParallel keeps it"
                )
    return found
