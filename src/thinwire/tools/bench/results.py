"""The file that `thinwire bench --json FILE` writes: what it holds, and how it is read.

A file may come from anywhere, and is trusted in nothing: `thinwire.fields` checks it. Reading needs no torch. Times are
in seconds, sizes in bytes, bandwidths in bytes per second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from thinwire.fields import (
    Check,
    Fields,
    Refused,
    just,
    list_of,
    number,
    one_of,
    or_none,
    parse_json,
    read_bytes,
    seconds,
    text,
    text_of,
    whole,
    within,
)
from thinwire.tools.bench.options import MOST_EXPERTS, MOST_RANKS, OPERATIONS

#: What the first two fields of a file say.
FORMAT, VERSION = "thinwire bench", 1

_MOST_FIGURES, _MOST_SETTINGS = 10_000, 200
#: What figures of older files do not have.
_LATER = ("paired_speedup", "max_violation", "fastest_rank", "rank_spread", "period", "called")
_COMMAND_CHARACTERS, _LIST_CHARACTERS = 4000, 10_000
_T = TypeVar("_T")


@dataclass(frozen=True)
class Seconds:
    """Of an iteration, on its slowest rank: above 0, in this order. Older files have no quartiles and no p99."""

    minimum: float
    lower_quartile: float | None
    median: float
    upper_quartile: float | None
    p99: float | None
    maximum: float


@dataclass(frozen=True)
class Figure:
    """One operation of one size as one implementation does it.

    Attributes:
        operation: one of `options.OPERATIONS`.
        transport, routing: None where the implementation or the operation has none.
        skew: rows of the busiest rank by the mean over ranks; 1 is balanced.
        max_violation: of rounds, rows of the busiest expert by the mean over experts, less 1; None in older files.
        tokens: tokens or rows of a rank.
        size_bytes: a rank's buffer as nccl-tests defines it for the operation.
        logical_bytes, wire_bytes: what leaves a rank, uncompressed and as it travels; the mean over ranks.
        algorithm_bandwidth, bus_bandwidth: of logical bytes, as nccl-tests defines them.
        seconds: None for a wrong result, which also has no bandwidths and no speed-up.
        fastest_rank, rank_spread: seconds on the fastest rank, and what the slowest takes longer; None in older files.
        period: seconds of a round among rounds without a barrier between them; of whole rounds.
        wire_bandwidth: of what travels.
        relative_error: L2 of the difference by L2 of the exact result.
        wrong: elements further off than the wire format allows.
        speedup: the reference's median by this one's; in older files what `paired_speedup` is now.
        paired_speedup: the reference's time by this one's, the median over rounds; None in older files.
        called: on a GPU, whether a CUDA graph was timed or calls from Python, and then why.
    """

    operation: str
    implementation: str
    wire: str
    transport: str | None
    routing: str | None
    skew: float | None
    max_violation: float | None
    tokens: int
    size_bytes: float
    logical_bytes: float
    wire_bytes: float
    seconds: Seconds | None
    fastest_rank: float | None
    rank_spread: float | None
    period: float | None
    algorithm_bandwidth: float | None
    bus_bandwidth: float | None
    wire_bandwidth: float | None
    relative_error: float | None
    wrong: int | None
    speedup: float | None
    paired_speedup: float | None
    reference: str | None
    called: str | None


@dataclass(frozen=True)
class Skipped:
    """An implementation that was not measured, and why; None is for all operations, wire formats, transports."""

    implementation: str
    reason: str
    operation: str | None
    wire: str | None
    transport: str | None


@dataclass(frozen=True)
class Results:
    """A run.

    Attributes:
        source: where it was read.
        machine, settings: names and values, as text.
        traffic: rows from rank i to rank j, of the expert operations' last size.
        expert_load: rows of each expert.
        copy_bandwidth: bytes that a rank's plain copy reads and writes a second, while all ranks copy.
        link_bandwidth: of the link between ranks, as the user gave it.
    """

    source: str
    command: str
    commit: str | None
    machine: dict[str, str]
    ranks: int
    hosts: int
    launched: str
    settings: dict[str, str]
    figures: tuple[Figure, ...]
    skipped: tuple[Skipped, ...]
    traffic: tuple[tuple[float, ...], ...] | None
    expert_load: tuple[float, ...] | None
    copy_bandwidth: float | None
    link_bandwidth: float | None


def read_results(path: str | Path) -> Results:
    """A file's content, checked.

    Raises:
        ThinwireError: the file is not accepted; the message says why.
    """
    content, source = read_bytes(path)
    return parse_results(parse_json(content, source), source)


def parse_results(value: object, source: str) -> Results:
    """As `read_results`, of what a file says.

    Raises:
        ThinwireError: the source is not accepted; the message says why.
    """
    fields = Fields(value, source)
    for name, wanted in (("format", FORMAT), ("version", VERSION)):
        fields.get(name, just(wanted))
    ranks = fields.get("ranks", within(1, MOST_RANKS))
    return Results(
        source=source,
        command=fields.get("command", text_of(_COMMAND_CHARACTERS)),
        commit=fields.get("commit", or_none(text)),
        machine=fields.get("machine", _described),
        ranks=ranks,
        hosts=fields.get("hosts", within(1, ranks)),
        launched=fields.get("launched", text),
        settings=fields.get("settings", _described),
        figures=fields.get("figures", list_of(figure_of, _MOST_FIGURES)),
        skipped=fields.get("skipped", list_of(_skipped, _MOST_FIGURES)),
        traffic=fields.get("traffic", or_none(_square(ranks))),
        expert_load=fields.get("expert_load", or_none(_not_empty(list_of(_rows, MOST_EXPERTS)))),
        copy_bandwidth=fields.get("copy_bandwidth", or_none(_positive(_bandwidth))),
        link_bandwidth=fields.get("link_bandwidth", or_none(_positive(_bandwidth))),
    )


_bytes = number("a number of bytes", 1e18)
_bandwidth = number("a number of bytes per second", 1e18)
_rows = number("a number of rows", 1e15)
_ratio = number("a ratio", 1e12)


def _positive(check: Check[float]) -> Check[float]:
    def checked(value: object) -> float:
        if value == 0:
            raise Refused("a number above 0")
        return check(value)

    return checked


def _not_empty(check: Check[tuple[_T, ...]]) -> Check[tuple[_T, ...]]:
    def checked(value: object) -> tuple[_T, ...]:
        if value == []:
            raise Refused("a list with an entry at least")
        return check(value)

    return checked


def _square(size: int) -> Callable[[object], tuple[tuple[float, ...], ...]]:
    def check(value: object) -> tuple[tuple[float, ...], ...]:
        matrix = list_of(list_of(_rows, size), size)(value)
        if any(len(row) != size for row in (matrix, *matrix)):
            raise Refused(f"a row of {size} numbers for each of {size} ranks")
        return matrix

    return check


def _described(value: object) -> dict[str, str]:
    """Names with a text, number, boolean, null or a list of those each, as text; null ones are left out."""
    if not isinstance(value, Mapping) or len(value) > _MOST_SETTINGS:
        raise Refused(f"an object of at most {_MOST_SETTINGS} fields")
    return {text(name): _scalars(held) for name, held in value.items() if held is not None}


def _scalars(value: Any) -> str:
    items = value if isinstance(value, list) else [value]
    if any(type(item) not in (str, int, float, bool, type(None)) for item in items):
        raise Refused("a text, number, boolean or null for each name, or a list of those")
    words = [text("yes" if item is True else "no" if item is False else str(item)) for item in items]
    return text_of(_LIST_CHARACTERS)(", ".join(words))


def _seconds(value: object) -> Seconds:
    later = dict.fromkeys(("lower_quartile", "upper_quartile", "p99"))
    fields = Fields(later | value if isinstance(value, dict) else value, "")
    least, median, most = (fields.get(name, _positive(seconds)) for name in ("minimum", "median", "maximum"))
    lower, upper, p99 = (fields.get(name, or_none(_positive(seconds))) for name in later)
    held = [taken for taken in (least, lower, median, upper, p99, most) if taken is not None]
    if held != sorted(held):
        raise Refused("minimum <= lower_quartile <= median <= upper_quartile <= p99 <= maximum")
    return Seconds(least, lower, median, upper, p99, most)


def figure_of(value: object) -> Figure:
    """A figure as it is written, checked.

    Raises:
        ThinwireError: naming the field that is not accepted.
    """
    fields = Fields(dict.fromkeys(_LATER) | value if isinstance(value, dict) else value, "")
    return Figure(
        operation=fields.get("operation", one_of(OPERATIONS)),
        implementation=fields.get("implementation", text),
        wire=fields.get("wire", text),
        transport=fields.get("transport", or_none(text)),
        routing=fields.get("routing", or_none(text)),
        skew=fields.get("skew", or_none(_ratio)),
        max_violation=fields.get("max_violation", or_none(_ratio)),
        tokens=fields.get("tokens", whole),
        size_bytes=fields.get("size_bytes", _bytes),
        logical_bytes=fields.get("logical_bytes", _bytes),
        wire_bytes=fields.get("wire_bytes", _bytes),
        seconds=fields.get("seconds", or_none(_seconds)),
        fastest_rank=fields.get("fastest_rank", or_none(_positive(seconds))),
        rank_spread=fields.get("rank_spread", or_none(seconds)),
        period=fields.get("period", or_none(_positive(seconds))),
        algorithm_bandwidth=fields.get("algorithm_bandwidth", or_none(_bandwidth)),
        bus_bandwidth=fields.get("bus_bandwidth", or_none(_bandwidth)),
        wire_bandwidth=fields.get("wire_bandwidth", or_none(_bandwidth)),
        relative_error=fields.get("relative_error", or_none(_ratio)),
        wrong=fields.get("wrong", or_none(whole)),
        speedup=fields.get("speedup", or_none(_ratio)),
        paired_speedup=fields.get("paired_speedup", or_none(_ratio)),
        reference=fields.get("reference", or_none(text)),
        called=fields.get("called", or_none(text)),
    )


def _skipped(value: object) -> Skipped:
    of_all = {"operation": None, "wire": None, "transport": None}
    fields = Fields(of_all | value if isinstance(value, dict) else value, "")
    return Skipped(
        implementation=fields.get("implementation", text),
        reason=fields.get("reason", text),
        operation=fields.get("operation", or_none(text)),
        wire=fields.get("wire", or_none(text)),
        transport=fields.get("transport", or_none(text)),
    )
