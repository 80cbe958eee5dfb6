"""Sizes and rates as people write them: 64K, 4M, 10Gbit."""

from __future__ import annotations

import re

from thinwire.errors import ArgumentError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", re.IGNORECASE)
_RATE = re.compile(r"(\d+(?:\.\d+)?)([kKMGT]?)(bit|B)(?:/s|ps)?")
_BINARY = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_MOST_BYTES, _MOST_RATE, _MOST_FACTOR, _MOST_SIZES = 1 << 50, 1e18, 1e6, 256
_DECIMAL = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def parse_bytes(option: str, text: str) -> int:
    """Bytes, with a suffix of powers of 1024 if there is one.

    Raises:
        ArgumentError: naming the option.

    >>> parse_bytes("-b", "64K"), parse_bytes("-e", "1.5M"), parse_bytes("-e", "8")
    (65536, 1572864, 8)
    """
    match = _SIZE.fullmatch(text.strip())
    size = 0 if match is None else float(match[1]) * _BINARY[match[2].upper()]
    if not 1 <= size <= _MOST_BYTES:
        raise ArgumentError(
            f"{option} {text}: a number of bytes is needed, at least 1 and at most 1024T, such as 8, 64K, 4M or 1G"
        )
    return int(size)


def sweep(begin: int, end: int, factor: float) -> list[int]:
    """Sizes from `begin` to at most `end`, each `factor` times the one before.

    Raises:
        ArgumentError: they would not grow, there are none, or too many.

    >>> sweep(64, 4096, 8)
    [64, 512, 4096]
    """
    if not 1 < factor <= _MOST_FACTOR:
        raise ArgumentError(f"-f {factor:g}: a factor above 1 is needed, at most {_MOST_FACTOR:g}")
    if begin > end:
        raise ArgumentError(f"-b {begin} is more than -e {end}")
    sizes = [begin]
    while (larger := max(sizes[-1] + 1, int(sizes[-1] * factor))) <= end:
        sizes.append(larger)
        if len(sizes) > _MOST_SIZES:
            raise ArgumentError(f"-f {factor:g}: more than {_MOST_SIZES} sizes from {begin} to {end}; use a larger one")
    return sizes


def parse_rate(option: str, text: str) -> float:
    """Bytes a second of a link's rate, whose prefixes are powers of 1000.

    Raises:
        ArgumentError: naming the option.

    >>> parse_rate("--link", "10Gbit"), parse_rate("--link", "900GB/s")
    (1250000000.0, 900000000000.0)
    """
    match = _RATE.fullmatch(text.strip())
    rate = 0.0 if match is None else float(match[1]) * _DECIMAL[match[2].upper()] / (8 if match[3] == "bit" else 1)
    if not 0 < rate < _MOST_RATE:
        raise ArgumentError(
            f"{option} {text}: a rate is needed, such as 1Gbit, 400Gbit/s or 900GB/s, and below {_MOST_RATE:g} bytes/s"
        )
    return rate


def in_words(size: int) -> str:
    """Bytes with the largest suffix that leaves nothing over.

    >>> in_words(65536), in_words(1000), in_words(3 << 20)
    ('64K', '1000', '3M')
    """
    name, unit = max(((name, unit) for name, unit in _BINARY.items() if size % unit == 0), key=lambda pair: pair[1])
    return f"{size // unit}{name}"
