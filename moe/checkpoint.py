"""A model with MoE layers in one safetensors file: each rank writes its own experts, and reads its own.

Expert weights of `MoELayer` are stored stacked, ``[num_experts, ...]``; those of `LocalExperts` have the experts'
numbers in their names. The library safetensors reads. It cannot write one file from several ranks, so rank 0 makes the
file with its header, and each rank writes at its own places.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from thinwire.comm.hosts import system_name
from thinwire.comm.tensors import require_dense, require_writable
from thinwire.errors import ArgumentError, CheckpointError
from thinwire.fields import MOST_TEXT
from thinwire.moe.distributed import Place, group_of_experts, placed_tensors, whole
from thinwire.moe.layer import LocalExperts

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


class _Part(NamedTuple):
    """A tensor of this rank's model, and where it lies in the whole."""

    tensor: torch.Tensor
    place: Place
    dtype: str  # that is stored, by safetensors' name
    digest: str  # of values that must be the same on all ranks


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
    parts: dict[str, _Part] = {}
    together(comm, "describe its model", lambda: parts.update(_stored_parts(model, metadata, dtype, comm is not None)))
    stored = _agree(comm, parts)
    is_first = comm is None or comm.rank == 0

    def write(path: str) -> None:
        begins, left = places_in(path), iter(parts.items())
        with open(path, "r+b") as file:
            for name, (tensor, place, kind, _) in left:
                tensor = whole(tensor)
                try:
                    if place.mine or is_first:
                        write_rows(file, begins[name], tensor.to(DTYPES[kind]), place.rows)
                except Exception:
                    for _, part in left:  # as the others take part in it
                        whole(part.tensor)
                    raise
            file.flush()
            os.fsync(file.fileno())

    write_together(comm, path, "file", lambda made: _make_file(made, stored, metadata or {}), write)


def _stored_parts(
    model: nn.Module, metadata: Mapping[str, str] | None, dtype: torch.dtype | None, is_spread: bool
) -> dict[str, _Part]:
    """Lists what is to be stored, by name. Raises CheckpointError for what cannot be."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise CheckpointError(f"dtype is {dtype!r}, expected None or a floating-point dtype")
    if not isinstance(metadata, Mapping | None):
        raise CheckpointError(f"metadata is a {type(metadata).__name__}, expected a dict of strings or None")
    for key, text in (metadata or {}).items():
        if not (isinstance(key, str) and isinstance(text, str)):
            raise CheckpointError(f"metadata has {key!r}: {repr(text)[:80]}, expected strings")
    parts = {}
    for name, (tensor, place) in placed_tensors(model).items():
        kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        if kind not in _NAMES:
            raise CheckpointError(f"{name} is {kind}, which cannot be stored; one of {', '.join(map(str, _NAMES))} can")
        if isinstance(tensor, DTensor) and not is_spread:
            raise CheckpointError("the model is sharded, and no experts are: torch.distributed.checkpoint saves it")
        parts[name] = _Part(tensor, place, _NAMES[kind], _digest(tensor) if is_spread and not place.mine else "")
    return parts


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
    """Reads a stored tensor, or these rows of it alone."""
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
    """Sums up a parameter's bits, whatever their order; not where ranks may have different values or shards."""
    if not isinstance(tensor, nn.Parameter) or isinstance(tensor, DTensor) or tensor.is_meta:
        return ""
    integers = tensor.detach().view(_INTEGERS[tensor.itemsize])
    return str(int(integers.sum(dtype=torch.int64)))


def _agree(comm: Communicator | None, own: Mapping[str, _Part]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of each tensor of all ranks, in the order of rank 0, then of others.

    Raises:
        CheckpointError: on all ranks, where they differ.
    """
    rows: list[Any] = [
        [name, kind, list(place.shape), place.mine, value] for name, (_, place, kind, value) in own.items()
    ]
    told = [rows]
    if comm is not None:
        counts = comm.all_gather_data((len(rows),), (int,))
        told = [[] for _ in range(comm.size)]
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


def write_together(
    comm: Communicator | None,
    path: object,
    kind: str,
    make: Callable[[Path], object],
    write: Callable[[str], None],
) -> None:
    """Has rank 0 make a file or folder, and each rank write its part; then it gets its name. Collective.

    If one rank fails, all raise, and nothing is left behind.
    """
    together(comm, "take its path", lambda: _absolute(path))
    target, is_first = _absolute(path), comm is None or comm.rank == 0
    if comm is not None:
        comm.require_same("a checkpoint", {"path": target})
    with contextlib.ExitStack() as stack:

        def create() -> str:
            unfinished = Path(stack.enter_context(_unfinished_folder(Path(target)))).resolve() / "checkpoint"
            make(unfinished)
            return str(unfinished)

        unfinished = together(comm, f"make the {kind}", create if is_first else None)
        together(comm, "write its part", lambda: write(unfinished))
        together(comm, f"give the {kind} its name", (lambda: os.rename(unfinished, target)) if is_first else None)


def _absolute(path: object) -> str:
    if not isinstance(path, str | os.PathLike):
        raise ArgumentError(f"path is a {type(path).__name__}, expected a str or a path")
    return os.path.abspath(os.fsdecode(path))


def together(comm: Communicator | None, what: str, step: Callable[[], str | None] | None) -> str:
    """Takes a step on every rank that has one: it succeeds on all of them, or all raise. Collective.

    Returns:
        What it gave on rank 0; without a group, here.

    Raises:
        CheckpointError: it failed on another rank, which could not do `what`. A rank on which it failed raises why.
    """
    take = step or (lambda: None)
    if comm is None:
        return take() or ""
    done, error = "", None
    try:
        done = take() or ""
        if len(done) > MOST_TEXT:
            raise CheckpointError(f"a path of {len(done)} characters; at most {MOST_TEXT} can be sent to peers")
    except Exception as raised:
        error = raised
    why = None if error is None else f"{type(error).__name__}: {error}"[:MOST_TEXT]
    told = comm.all_gather_data((done, why), (str, str | None))
    if error is not None:
        raise error
    for rank, (_, why) in enumerate(told):
        if why is not None:
            raise CheckpointError(f"rank {rank} could not {what}: {why}")
    first: str = told[0][0]
    return first


def _unfinished_folder(target: Path) -> tempfile.TemporaryDirectory[str]:
    """A new folder beside a checkpoint, which only this user may enter. Those of killed processes of this host go.

    In the target's own folder, others may be able to put a link where a file of a known name is about to be.
    """
    start = f".unfinished-{hashlib.sha256(system_name().encode()).hexdigest()[:8]}-"
    for left in target.parent.glob(f"{start}*"):
        if not Path("/proc", left.name.removeprefix(start).partition("-")[0]).exists():
            shutil.rmtree(left, ignore_errors=True)
    return tempfile.TemporaryDirectory(prefix=f"{start}{os.getpid()}-", dir=target.parent)
