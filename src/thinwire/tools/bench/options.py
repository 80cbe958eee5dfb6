"""The command's options, checked before anything is started. Imports neither torch nor numpy."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.errors import ArgumentError
from thinwire.wire import WireFormat

COLLECTIVES = ("all_to_all_v", "all_gather", "reduce_scatter", "all_reduce")
#: The legs of a round, and all of it.
ROUND = ("dispatch", "combine", "moe")
OPERATIONS = COLLECTIVES + ROUND
TRANSPORTS = ("direct", "staged")
DTYPES = ("bfloat16", "float16", "float32")
BASELINES = ("group", "mpi", "copy")
DEFAULT_RANKS = 4
#: The most ranks that are started; a results file has no more.
MOST_RANKS = 1024
_MOST_TOP_K, _MOST_EXPERTS = 32, 1 << 16
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", re.IGNORECASE)
_BINARY = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_MOST_BYTES, _MOST_FACTOR, _MOST_SIZES = 1 << 50, 1e6, 256
DEFAULT_FACTOR = 16.0


@dataclass(frozen=True)
class Routing:
    """Who sends how much to whom.

    Attributes:
        kind: "uniform"; "zipf": popularity falls with a power of the place; "hot": one rank gets a share of the
            choices; "maxvio": one expert gets so much more than the mean.
        value: the power of zipf, the share of hot, or what maxvio has beyond the mean, by the mean.
    """

    kind: str
    value: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Routing:
        """Reads `uniform`, `zipf:S`, `hot:SHARE` or `maxvio:V`.

        Raises:
            ArgumentError: the text is unknown, or a number is out of range.

        >>> Routing.parse("zipf:1.2"), str(Routing.parse("hot:0.50"))
        (Routing(kind='zipf', value=1.2), 'hot:0.5')
        """
        kind, _, rest = text.partition(":")
        if text == "uniform":
            return cls("uniform")
        try:
            value = float(rest)
        except ValueError:
            value = math.nan
        if (kind in ("zipf", "maxvio") and 0 <= value < math.inf) or (kind == "hot" and 0 < value < 1):
            return cls(kind, value)
        raise ArgumentError(
            f"--routing {text}: accepted are uniform, zipf:S with S of at least 0, hot:SHARE with a share between 0 "
            "and 1, and maxvio:V with V of at least 0"
        )

    def __str__(self) -> str:
        return self.kind if self.kind == "uniform" else f"{self.kind}:{self.value:g}"


@dataclass(frozen=True)
class Settings:
    """A whole run; the same on every rank. What an option is for, its help says.

    `sizes` are bytes of a rank's buffer in collectives, `tokens` a rank's in rounds. None for `ranks` means the
    launcher's, or `DEFAULT_RANKS` processes; for `device` what is there. `timeout` is seconds for everything.
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
    timeout: float = 600.0

    def __post_init__(self) -> None:
        for option, value, least, most in (
            ("-n", self.iterations, 1, math.inf),
            ("-w", self.warmup, 0, math.inf),
            ("--hidden", self.hidden, 1, math.inf),
            ("--experts", self.experts, 1, _MOST_EXPERTS),
            ("--top-k", self.top_k, 1, min(_MOST_TOP_K, self.experts)),
            ("--ranks", self.ranks, 1, MOST_RANKS),
            *(("--tokens", tokens, 1, math.inf) for tokens in self.tokens),
        ):
            if value is not None and not least <= value <= most:
                accepted = f"at least {least} is needed" if most == math.inf else f"{least} to {most} are accepted"
                raise ArgumentError(f"{option} {value}: {accepted}")
        if not 0 <= self.sample_seconds < math.inf:
            raise ArgumentError(f"--sample-seconds {self.sample_seconds:g}: at least 0 is needed")
        if not 0 < self.timeout <= 1e9:
            raise ArgumentError(f"--timeout {self.timeout:g}: seconds above 0 are needed, at most 1e9")

    @classmethod
    def of(cls, options: argparse.Namespace) -> Settings:
        """Takes the command's options.

        Raises:
            ArgumentError, WireFormatError: an option is not accepted; the message says what is.
        """
        as_they_are = "iterations warmup sample_seconds hidden experts top_k dtype ranks device timeout".split()
        return cls(
            **{name: getattr(options, name) for name in as_they_are},
            operations=_among("operation", options.operations or OPERATIONS, OPERATIONS),
            sizes=tuple(sweep(options.begin, options.end, options.factor, options.increment)),
            tokens=_whole_numbers("--tokens", options.tokens),
            check=options.check == 1,
            wires=tuple(dict.fromkeys(str(WireFormat.parse(wire)) for wire in _split("--wire", options.wire))),
            transports=_among("--transport", _split("--transport", options.transport), TRANSPORTS),
            routings=tuple(dict.fromkeys(map(Routing.parse, _split("--routing", options.routing)))),
            baselines=_baselines(options.baselines),
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


def _whole_numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(dict.fromkeys(map(int, _split(option, text))))
    except ValueError:
        raise ArgumentError(f"{option} {text}: whole numbers are needed, separated by commas") from None
