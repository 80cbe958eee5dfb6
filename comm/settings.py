"""Comparison of settings between ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

__all__ = ["Setting", "describe_mismatch", "describe_settings", "digest_of"]

Setting = str | int | float | bool | None
_ABSENT = "(absent)"


def describe_settings(what: str, settings: Mapping[str, Setting]) -> dict[str, str]:
    """What is compared; `1`, `1.0` and `True` are three different values.

    Raises:
        TypeError: a value of another type.
    """
    for name, value in settings.items():
        if not isinstance(value, str | int | float | bool | None):
            raise TypeError(f"{what}: setting {name!r} is {value!r}, expected a str, int, float, bool or None")
    return {"what": repr(what)} | {name: repr(value) for name, value in settings.items()}


def digest_of(described: Mapping[str, str]) -> bytes:
    """32 bytes that differ where the settings do."""
    return hashlib.sha256(repr(sorted(described.items())).encode()).digest()


def describe_mismatch(what: str, by_rank: list[dict[str, str]]) -> str:
    """Which settings differ, and which ranks have which value."""
    lines = [f"{what}: the ranks' settings differ"]
    for name in dict.fromkeys(name for settings in by_rank for name in settings):
        ranks_of: dict[str, list[int]] = {}
        for rank, settings in enumerate(by_rank):
            ranks_of.setdefault(settings.get(name, _ABSENT), []).append(rank)
        if len(ranks_of) > 1:
            parts = (
                f"{value} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
                for value, ranks in ranks_of.items()
            )
            lines.append(f"  {name}: {'; '.join(parts)}")
    return "\n".join(lines)
