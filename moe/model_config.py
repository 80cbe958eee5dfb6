"""A model's config.json, asked for one value of a known type at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from thinwire.comm.tensors import is_int
from thinwire.errors import CheckpointError
from thinwire.moe.checkpoint_folder import CONFIG, CheckpointFolder

__all__ = ["ModelConfig"]


class ModelConfig:
    """The values of a folder's config.json.

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
