"""What was asked for, checked before anything is started. Imports neither torch nor numpy."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from thinwire.errors import ArgumentError
from thinwire.wire import WireFormat

COLLECTIVES = ("all_to_all_v", "all_gather", "reduce_scatter", "all_reduce")
#: The legs of a round, and all of it.
ROUND = ("dispatch", "combine", "moe")
OPERATIONS = COLLECTIVES + ROUND
TRANSPORTS = ("direct", "staged")
DTYPES = ("bfloat16", "float16", "float32")
BASELINES = ("group", "mpi", "quantize", "symmetric_memory", "copy")
DEFAULT_RANKS = 4
#: The most ranks that are started, and experts; a results file has no more.
_MOST_TOP_K, MOST_RANKS, MOST_EXPERTS = 32, 1024, 1 << 16
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", re.IGNORECASE)
_RATE = re.compile(r"(\d+(?:\.\d+)?)([kKMGT]?)(bit|B)(?:/s|ps)?")
_BINARY = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_MOST_BYTES, _MOST_RATE, _MOST_FACTOR, _MOST_SIZES = 1 << 50, 1e18, 1e6, 256
DEFAULT_FACTOR = 16.0
_DECIMAL = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}

T = TypeVar("T")


@dataclass(frozen=True)
class Routing:
    """Who sends how much to whom.

    Attributes:
        kind: "uniform"; "zipf": popularity falls with a power of the place; "hot": one rank gets a share of the
            choices; "maxvio": one expert gets so much more than the mean; "matrix": rows from rank i to rank j, out of
            a file.
        value: the power of zipf, the share of hot, or what maxvio has beyond the mean, by the mean.
        file: the matrix's.
    """

    kind: str
    value: float = 0.0
    file: str = ""

    @classmethod
    def parse(cls, text: str) -> Routing:
        """Reads `uniform`, `zipf:S`, `hot:SHARE`, `maxvio:V` or `matrix:FILE`.

        Raises:
            ArgumentError: the text is unknown, a number is out of range, or the file does not exist.

        >>> Routing.parse("zipf:1.2"), str(Routing.parse("hot:0.50"))
        (Routing(kind='zipf', value=1.2, file=''), 'hot:0.5')
        """
        kind, _, rest = text.partition(":")
        if text == "uniform":
            return cls("uniform")
        if kind == "matrix" and rest:
            if not Path(rest).is_file():
                raise ArgumentError(f"--routing {text}: there is no file {rest}")
            return cls("matrix", file=rest)
        try:
            value = float(rest)
        except ValueError:
            value = math.nan
        if (kind in ("zipf", "maxvio") and 0 <= value < math.inf) or (kind == "hot" and 0 < value < 1):
            return cls(kind, value)
        raise ArgumentError(
            f"--routing {text}: accepted are uniform, zipf:S with S of at least 0, hot:SHARE with a share between 0 "
            "and 1, maxvio:V with V of at least 0, and matrix:FILE"
        )

    def __str__(self) -> str:
        return self.kind if self.kind == "uniform" else f"{self.kind}:{self.file or format(self.value, 'g')}"


@dataclass(frozen=True)
class Settings:
    """A whole run; the same on every rank.

    Attributes:
        operations: in the order in which they are measured.
        sizes: bytes of a rank's buffer, of collectives.
        tokens: of a rank, of rounds.
        iterations: samples of each contender.
        warmup: calls of each before them.
        sample_seconds: how long a sample is to take, about; a shorter call is repeated within it.
        ranks: None means the launcher's, or `DEFAULT_RANKS` processes.
        device: "cpu" or "cuda"; None means what is there.
        link: bytes a second, as it was stated.
        timeout: seconds for everything.
        wide: whether the table has all columns.
        eager: whether no CUDA graphs are timed.
    """

    operations: tuple[str, ...] = OPERATIONS
    sizes: tuple[int, ...] = (64 << 10, 1 << 20)
    tokens: tuple[int, ...] = (16, 256)
    iterations: int = 10
    warmup: int = 2
    sample_seconds: float = 0.01
    check: bool = True
    wires: tuple[str, ...] = ("none", "int8", "int8+h64")
    transports: tuple[str, ...] = TRANSPORTS
    hidden: int = 4096
    experts: int = 64
    top_k: int = 8
    dtype: str = "bfloat16"
    routings: tuple[Routing, ...] = (Routing("uniform"),)
    baselines: tuple[str, ...] = BASELINES
    ranks: int | None = None
    device: str | None = None
    link: float | None = None
    timeout: float = 600.0
    wide: bool = False
    eager: bool = False

    def __post_init__(self) -> None:
        for option, value, least in (
            ("-n", self.iterations, 1),
            ("-w", self.warmup, 0),
            ("--hidden", self.hidden, 1),
            ("--experts", self.experts, 1),
            ("--ranks", self.ranks, 1),
            *(("--tokens", tokens, 1) for tokens in self.tokens),
        ):
            if value is not None and value < least:
                raise ArgumentError(f"{option} {value}: at least {least} is needed")
        for option, value, most in (("--ranks", self.ranks, MOST_RANKS), ("--experts", self.experts, MOST_EXPERTS)):
            if value is not None and value > most:
                raise ArgumentError(f"{option} {value}: at most {most} is accepted")
        if not 1 <= self.top_k <= min(_MOST_TOP_K, self.experts):
            raise ArgumentError(
                f"--top-k {self.top_k}: 1 to {min(_MOST_TOP_K, self.experts)} of {self.experts} experts is accepted"
            )
        if not 0 <= self.sample_seconds < math.inf:
            raise ArgumentError(f"--sample-seconds {self.sample_seconds:g}: at least 0 is needed")
        if not 0 < self.timeout <= 1e9:
            raise ArgumentError(f"--timeout {self.timeout:g}: seconds above 0 are needed, at most 1e9")

    @classmethod
    def of(cls, options: argparse.Namespace) -> Settings:
        """Of the command's options.

        Raises:
            ArgumentError, WireFormatError: an option is not accepted; the message says what is.
        """
        return cls(
            operations=_among("operation", options.operations or OPERATIONS, OPERATIONS),
            sizes=tuple(sweep(options.begin, options.end, options.factor, options.increment)),
            tokens=_each("--tokens", options.tokens, int, "whole numbers"),
            iterations=options.iterations,
            warmup=options.warmup,
            sample_seconds=options.sample_seconds,
            check=options.check == 1,
            wires=tuple(dict.fromkeys(str(WireFormat.parse(wire)) for wire in _split("--wire", options.wire))),
            transports=_among("--transport", _split("--transport", options.transport), TRANSPORTS),
            hidden=options.hidden,
            experts=options.experts,
            top_k=options.top_k,
            dtype=options.dtype,
            routings=tuple(dict.fromkeys(map(Routing.parse, _split("--routing", options.routing)))),
            baselines=_baselines(options.baselines),
            ranks=options.ranks,
            device=options.device,
            link=None if options.link is None else parse_rate("--link", options.link),
            timeout=options.timeout,
            wide=options.wide,
            eager=options.eager,
        )


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


def sweep(begin: str, end: str, factor: float | None = None, increment: str | None = None) -> list[int]:
    """Sizes from `begin` to at most `end`, each `factor` times the one before, or `increment` bytes larger.

    Raises:
        ArgumentError: both were given, sizes would not grow, there are none, or too many.

    >>> sweep("64", "4K", 8), sweep("1K", "4K", increment="1K")
    ([64, 512, 4096], [1024, 2048, 3072, 4096])
    """
    first, last = parse_bytes("-b", begin), parse_bytes("-e", end)
    if factor is not None and increment is not None:
        raise ArgumentError(f"-f {factor:g} and -i {increment} were given; expected one of them")
    factor = DEFAULT_FACTOR if factor is None else factor
    if not 1 < factor <= _MOST_FACTOR:
        raise ArgumentError(f"-f {factor:g}: a factor above 1 is needed, at most {_MOST_FACTOR:g}")
    if first > last:
        raise ArgumentError(f"-b {begin} is more than -e {end}")
    step, told = (0, f"-f {factor:g}") if increment is None else (parse_bytes("-i", increment), f"-i {increment}")
    sizes = [first]
    while (larger := sizes[-1] + step if step else max(sizes[-1] + 1, int(sizes[-1] * factor))) <= last:
        sizes.append(larger)
        if len(sizes) > _MOST_SIZES:
            raise ArgumentError(f"{told}: more than {_MOST_SIZES} sizes from {begin} to {end}; use a larger one")
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


def _baselines(text: str) -> tuple[str, ...]:
    if text in ("all", "none"):
        return BASELINES if text == "all" else ()
    return _among("--baselines", _split("--baselines", text), BASELINES, also="all, none, ")


def _split(option: str, text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise ArgumentError(f"{option} {text!r}: at least one is needed")
    return parts


def _among(option: str, given: Sequence[str], accepted: Sequence[str], also: str = "") -> tuple[str, ...]:
    for name in given:
        if name not in accepted:
            raise ArgumentError(f"{option} {name}: accepted are {also}{', '.join(accepted)}")
    return tuple(name for name in accepted if name in given)


def _each(option: str, text: str, kind: Callable[[str], T], what: str) -> tuple[T, ...]:
    try:
        return tuple(dict.fromkeys(map(kind, _split(option, text))))
    except ValueError:
        raise ArgumentError(f"{option} {text}: {what} are needed, separated by commas") from None
