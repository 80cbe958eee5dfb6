"""Which implementation was fastest at which sizes, in sentences. Needs neither torch nor matplotlib."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from thinwire.tools.bench.options import ROUND
from thinwire.tools.bench.results import Figure, Seconds
from thinwire.tools.bench.units import name_text, significant, size_text, token_text


class _Fastest(NamedTuple):
    """At one size: its name, its figure, and the names of those whose median lies within its quartiles."""

    name: str
    figure: Figure
    alike: tuple[str, ...]


def summarise(figures: Iterable[Figure]) -> list[str]:
    """A sentence for each operation and routing: who has the lowest median at which sizes.

    A plain copy, which exchanges nothing, and wrong results do not take part.
    """
    groups: dict[tuple[str, str | None], list[tuple[Figure, Seconds]]] = {}
    for figure in figures:
        if figure.seconds is not None and figure.implementation != "copy":
            groups.setdefault((figure.operation, figure.routing), []).append((figure, figure.seconds))
    routings = {routing for _, routing in groups if routing is not None}
    sentences = []
    for (operation, routing), group in groups.items():
        at_sizes = groupby(sorted(group, key=lambda timed: _size(timed[0])), key=lambda timed: _size(timed[0]))
        fastest = [_fastest_of(list(timed)) for _, timed in at_sizes]
        clauses = [_clause(list(run)) for _, run in groupby(fastest, key=lambda each: each.name)]
        routed = f", {routing}" if routing is not None and len(routings) > 1 else ""
        sentences.append(f"{operation}{routed}: {'; '.join(clauses)}")
    return sentences


def _size(figure: Figure) -> float:
    return figure.tokens if figure.operation in ROUND else figure.size_bytes


def _fastest_of(timed: Sequence[tuple[Figure, Seconds]]) -> _Fastest:
    (best, seconds), *others = sorted(timed, key=lambda each: each[1].median)
    most = seconds.median if seconds.upper_quartile is None else seconds.upper_quartile
    return _Fastest(_name(best), best, tuple(_name(other) for other, taken in others if taken.median <= most))


def _name(figure: Figure) -> str:
    return name_text(figure.implementation, figure.wire, figure.transport)


def _clause(run: Sequence[_Fastest]) -> str:
    """Of sizes one after the other with the same name."""
    first, last = run[0].figure, run[-1].figure
    text, noun = (token_text, " tokens") if first.operation in ROUND else (size_text, "")
    where = f"at {text(_size(first))}" if len(run) == 1 else f"from {text(_size(first))} to {text(_size(last))}"
    speedups = [each.figure.speedup for each in run if each.figure.speedup and each.name != each.figure.reference]
    behind = []
    if speedups:
        ends = dict.fromkeys(f"{significant(end, 2)}x" for end in (min(speedups), max(speedups)))
        behind.append(f"{' to '.join(ends)} {first.reference}")
    if alike := dict.fromkeys(name for each in run for name in each.alike):
        behind.append(f"{', '.join(alike)} about as fast")
    return f"{run[0].name} is fastest {where}{noun}" + (f" ({'; '.join(behind)})" if behind else "")
