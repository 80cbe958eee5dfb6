"""A Hugging Face checkpoint folder: its configuration, which file holds a tensor, and pieces of tensors by their bytes.

The folder holds `config.json`, and either `model.safetensors` or `model.safetensors.index.json` with the files that its
`weight_map` names. All of it may come from a stranger. Files are read at the places their headers give, after those
were checked, and never mapped, so that a file that is cut short while it is read gives an error and no signal.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from thinwire.comm.shaped_json import parse
from thinwire.comm.tensors import is_int
from thinwire.errors import CheckpointError
from thinwire.files import open_regular
from thinwire.moe.safetensors_header import LENGTH_BYTES, MOST_HEADER_BYTES, StoredTensor, parse_header

__all__ = ["CONFIG", "INDEX", "SINGLE", "CheckpointFolder", "ModelConfig"]

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_MOST_JSON_BYTES = 64 << 20
_MOST_AT_ONCE = 1 << 30  # bytes; Linux moves at most 2 GiB in a call


class _OpenFile(NamedTuple):
    descriptor: int
    tensors: dict[str, StoredTensor]


class CheckpointFolder:
    """The tensors of a folder; a context manager, which closes its files.

    Names in a `weight_map` are names of files in the folder itself. A file may be a link to one in the same folder, or,
    where the folder is `.../snapshots/<revision>` of the Hugging Face cache, to one in `.../blobs`: nowhere else.

    Args:
        path: the folder.
        writable: whether its tensors' bytes may be overwritten, by `write`.

    Attributes:
        path: the folder.
        config: what config.json holds.

    Raises:
        FileNotFoundError: there is no such folder.
        CheckpointError: it has no config.json, neither or both of model.safetensors and its index, or one of them
            is not as it must be.
    """

    def __init__(self, path: str | os.PathLike[str], *, writable: bool = False) -> None:
        if not isinstance(path, str | os.PathLike):
            raise CheckpointError(f"the folder is a {type(path).__name__}, expected a str or a path")
        self.path = Path(path)
        self._writable = writable
        self._files: dict[str, _OpenFile] = {}
        self._file_of: Mapping[str, str] = {}
        try:
            real = self.path.resolve(strict=True)
            if not real.is_dir():
                raise CheckpointError(f"{self.path} is a file, expected a folder with {CONFIG} and {SINGLE}")
        except (FileNotFoundError, CheckpointError):
            raise
        except (OSError, ValueError, RuntimeError) as error:  # a path that nothing can have, links in a circle
            raise CheckpointError(f"{self.path} is no folder that can be read: {error}") from error
        self._homes = [real]
        if real.parent.name == "snapshots":
            self._homes.append(real.parent.parent / "blobs")
        try:
            self.config: Mapping[str, Any] = self._read_json(CONFIG)
            self._file_of = self._find_tensors()
        except BaseException:
            self.close()
            raise

    def _find_tensors(self) -> Mapping[str, str]:
        found = [name for name in (SINGLE, INDEX) if os.path.lexists(self.path / name)]
        if len(found) != 1:
            has = "both" if found else "neither"
            raise CheckpointError(
                f"{self.path} has {has} of {SINGLE} and {INDEX}, expected one of them; other kinds of file, such as "
                "pickles, are not read"
            )
        if found == [SINGLE]:
            return dict.fromkeys(self._open(SINGLE).tensors, SINGLE)
        weight_map = self._read_json(INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{self.path / INDEX} has no weight_map, expected an object of file names")
        for name, file in weight_map.items():
            if not isinstance(file, str) or file != os.path.basename(file) or not file.endswith(".safetensors"):
                raise CheckpointError(
                    f"{self.path / INDEX} says that {name[:200]!r} is in {str(file)[:200]!r}, expected the name of a "
                    ".safetensors file in the same folder"
                )
        return weight_map

    @property
    def names(self) -> list[str]:
        """Of all tensors."""
        return list(self._file_of)

    @property
    def files(self) -> list[str]:
        """Of the names of files that hold tensors, each once."""
        return list(dict.fromkeys(self._file_of.values()))

    def __enter__(self) -> CheckpointFolder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files."""
        while self._files:
            os.close(self._files.popitem()[1].descriptor)

    def describe(self, name: str) -> StoredTensor:
        """A tensor's dtype, shape and place. Reads the header of its file if that is the first one of it.

        Raises:
            CheckpointError: its file cannot be read, does not hold it, or holds one that the index says is elsewhere.
        """
        return self._find(name)[1]

    def read(self, name: str, row: int | None = None, buffer: torch.Tensor | None = None) -> torch.Tensor:
        """A tensor, or `tensor[row]`, whose bytes alone are read; on the CPU, of the file's dtype.

        Args:
            buffer: uint8 [n] on the CPU, to hold what is read, at least as long as that; None for new memory.

        Raises:
            CheckpointError: as `describe`; it is not float64, float32, float16 or bfloat16; or the file ended.
        """
        dtype, shape, descriptor, offset = self._place(name, row)
        length = math.prod(shape) * dtype.itemsize
        octets = torch.empty(length, dtype=torch.uint8, device="cpu") if buffer is None else buffer[:length]
        with self._errors_named(name):
            read_at(descriptor, octets.numpy().data, offset)
        return octets.view(dtype).view(shape)

    def write(self, name: str, values: torch.Tensor, row: int | None = None) -> None:
        """Overwrites a tensor, or `tensor[row]`, with a dense one of the same shape and dtype.

        Raises:
            CheckpointError: as `read`, or what the system says of the write.
        """
        dtype, shape, descriptor, offset = self._place(name, row)
        if values.dtype != dtype or tuple(values.shape) != shape:
            raise CheckpointError(f"{name} is {dtype} {shape}, got {values.dtype} {tuple(values.shape)}")
        octets = values.cpu().contiguous().view(-1).view(torch.uint8)
        with self._errors_named(name):
            write_at(descriptor, octets.numpy().data, offset)

    def copy_to(self, target: Path) -> None:
        """Makes a folder with copies of config.json, the index if there is one, and all files that hold tensors.

        Raises:
            CheckpointError: a file cannot be opened.
            OSError: what the system says of reading and writing.
        """
        target.mkdir()
        names = [CONFIG, *self.files] if self.files == [SINGLE] else [CONFIG, INDEX, *self.files]
        for name in names:
            with (
                os.fdopen(self._open_descriptor(name, os.O_RDONLY), "rb") as here,
                open(target / name, "xb") as there,
            ):
                shutil.copyfileobj(here, there, 1 << 20)

    def _place(self, name: str, row: int | None) -> tuple[torch.dtype, tuple[int, ...], int, int]:
        """Dtype, shape, descriptor, and offset in the file."""
        file, stored = self._find(name)
        dtype, shape, offset = stored.float_dtype, stored.shape, stored.offset
        if dtype is None:
            raise CheckpointError(f"{self.path}: {name} is {stored.dtype}, expected F64, F32, F16 or BF16")
        if row is not None:
            if not shape or not 0 <= row < shape[0]:
                raise CheckpointError(f"{self.path}: {name} is {list(shape)}, and has no row {row}")
            shape = shape[1:]
            offset += row * math.prod(shape) * dtype.itemsize
        return dtype, shape, file.descriptor, offset

    def _find(self, name: str) -> tuple[_OpenFile, StoredTensor]:
        if name not in self._file_of:
            raise CheckpointError(f"{self.path} has no tensor {name}")
        file = self._open(self._file_of[name])
        return file, file.tensors[name]

    def _open(self, name: str) -> _OpenFile:
        if name not in self._files:
            descriptor = self._open_descriptor(name, os.O_RDWR if self._writable else os.O_RDONLY)
            try:
                tensors = self._read_header(name, descriptor)
                self._compare_with_index(name, tensors)
            except BaseException:
                os.close(descriptor)
                raise
            self._files[name] = _OpenFile(descriptor, tensors)
        return self._files[name]

    def _compare_with_index(self, name: str, tensors: Mapping[str, StoredTensor]) -> None:
        for tensor in tensors:
            other = self._file_of.get(tensor, name)
            if other != name:
                raise CheckpointError(
                    f"{self.path}: {tensor[:200]!r} is in {name!r}, and in {other[:200]!r} by {INDEX}"
                )
        missing = [tensor for tensor, file in self._file_of.items() if file == name and tensor not in tensors]
        if missing:
            raise CheckpointError(f"{self._told(name)} lacks {missing[0][:200]!r}, which {INDEX} says it holds")

    def _read_header(self, name: str, descriptor: int) -> dict[str, StoredTensor]:
        size = os.fstat(descriptor).st_size
        length = bytearray(LENGTH_BYTES)
        with self._errors_named(name):
            read_at(descriptor, memoryview(length), 0)
            header_bytes = int.from_bytes(length, "little")
            if header_bytes > min(MOST_HEADER_BYTES, size - LENGTH_BYTES):
                raise CheckpointError(
                    f"{self._told(name)} says that its header has {header_bytes} bytes; at most {MOST_HEADER_BYTES} "
                    f"are read, and the file has {size}"
                )
            header = bytearray(header_bytes)
            read_at(descriptor, memoryview(header), LENGTH_BYTES)
        return parse_header(bytes(header), size, self._told(name))

    def _read_json(self, name: str) -> dict[str, Any]:
        descriptor = self._open_descriptor(name, os.O_RDONLY)
        try:
            size = os.fstat(descriptor).st_size
            if size > _MOST_JSON_BYTES:
                raise CheckpointError(f"{self.path / name} has {size} bytes; at most {_MOST_JSON_BYTES} are read")
            octets = bytearray(size)
            with self._errors_named(name):
                read_at(descriptor, memoryview(octets), 0)
        finally:
            os.close(descriptor)
        try:
            found = parse(bytes(octets))
        except ValueError as error:
            raise CheckpointError(f"{self.path / name} is not JSON: {error}") from None
        if not isinstance(found, dict):
            raise CheckpointError(f"{self.path / name} holds a {type(found).__name__}, expected an object")
        return found

    def _open_descriptor(self, name: str, mode: int) -> int:
        """A regular file that is in the folder, or where a link in it may lead to."""
        with self._errors_named(name):
            real = (self.path / name).resolve(strict=True)
            if real.parent not in self._homes:
                homes = " or ".join(map(str, self._homes))
                raise CheckpointError(f"{self._told(name)} leads to {str(real)!r}, expected a file in {homes}")
            return open_regular(real, mode | os.O_NOFOLLOW)  # no link any more

    @contextmanager
    def _errors_named(self, name: str) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            raise
        # Also names that no file can have, and links in a circle.
        except (OSError, EOFError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{self._told(name)} cannot be used: {error}") from error

    def _told(self, name: str) -> str:
        """A file or tensor, for people; names in an index may hold anything."""
        return repr(str(self.path / name[:200]))


def read_at(descriptor: int, into: memoryview, offset: int) -> None:
    """Fills a buffer from a place in a file, in one copy; EOFError where that ends before."""
    done = 0
    while done < len(into):
        count = os.preadv(descriptor, [into[done : done + _MOST_AT_ONCE]], offset + done)
        if not count:
            raise EOFError(f"it ends at byte {offset + done}, {len(into) - done} too early")
        done += count


def write_at(descriptor: int, octets: memoryview, offset: int) -> None:
    """Writes all of a buffer to a place in a file."""
    done = 0
    while done < len(octets):
        done += os.pwritev(descriptor, [octets[done : done + _MOST_AT_ONCE]], offset + done)


class ModelConfig:
    """The values of a folder's config.json, asked for one value of a known type at a time.

    Where a name is missing, and there is no default, or its value is of another type, each of these raises
    CheckpointError, which says what was expected.
    """

    def __init__(self, folder: CheckpointFolder) -> None:
        self._where, self._config = folder.path / CONFIG, folder.config

    def get(self, names: str | tuple[str, ...], accepted: str, fits: Callable[[Any], bool], default: Any = None) -> Any:
        """The value of the first of these names that is there, or the default, if there is one."""
        names = (names,) if isinstance(names, str) else names
        for name in names:
            if name in self._config:
                value = self._config[name]
                if not fits(value):
                    raise CheckpointError(f"{self._where} has {name} {repr(value)[:80]}, expected {accepted}")
                return value
        if default is None:
            raise CheckpointError(f"{self._where} lacks {' or '.join(names)}, expected {accepted}")
        return default

    def size(self, names: str | tuple[str, ...], default: int | None = None) -> int:
        return int(self.get(names, "an int of at least 1", lambda value: is_int(value, 1), default))

    def truth(self, name: str, default: bool) -> bool:
        return bool(self.get(name, "true or false", lambda value: isinstance(value, bool), default))

    def number(self, name: str, default: float) -> float:
        return float(
            self.get(
                name, "a number", lambda value: isinstance(value, int | float) and not isinstance(value, bool), default
            )
        )

    def one_of(self, name: str, accepted: tuple[str, ...], default: str) -> str:
        return str(self.get(name, " or ".join(map(repr, accepted)), lambda value: value in accepted, default))
