"""Pictures of a run: latency, bandwidth, and speed-up against skew.

Each is drawn on one machine's figures alone; times of different runs never share a picture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D

from thinwire.tools.bench.options import COLLECTIVES, ROUND
from thinwire.tools.bench.results import Figure, Results, Seconds
from thinwire.tools.bench.style import (
    DARK,
    Series,
    Styles,
    binary_ticks,
    canvas,
    decimal_ticks,
    legend,
    log_axis,
    short,
    styled,
    time_text,
)
from thinwire.tools.bench.units import size_text, token_text

_HEIGHT = 4.2


@dataclass(frozen=True)
class Picture:
    """A picture, and what is said under it.

    Attributes:
        name: of its file, without `.png`.
        caption: how to read it, and what it does not show.
    """

    name: str
    title: str
    caption: str
    canvas: Canvas


@dataclass(frozen=True)
class _Point:
    x: float
    low: float
    middle: float
    high: float


def draw(results: Results) -> tuple[list[Picture], list[str]]:
    """All pictures that the figures allow, and of each other one why it is not there."""
    timed = [figure for figure in results.figures if figure.seconds is not None]  # of wrong results there is no picture
    styles = Styles(_series(figure) for figure in timed)
    of_rounds, of_all = _sizes(results, ("hidden", "experts", "top_k", "dtype")), _sizes(results, ("dtype",))
    pictures: list[Picture | str] = []
    with styled():
        for operation in ROUND:
            figures = [figure for figure in timed if figure.operation == operation]
            if figures:
                pictures += [
                    _latency(operation, figures, styles, of_rounds),
                    _skew(operation, figures, styles, of_rounds),
                ]
        for operation in COLLECTIVES:
            figures = [figure for figure in timed if figure.operation == operation]
            if figures:
                pictures.append(_bandwidth(operation, figures, styles, results, of_all))
    missing = [picture for picture in pictures if isinstance(picture, str)]
    return [picture for picture in pictures if isinstance(picture, Picture)], missing


def _sizes(results: Results, names: Iterable[str]) -> str:
    """For a subtitle: the ranks, these settings, and the machine."""
    ranks = f"{results.ranks} rank{'s' if results.ranks > 1 else ''}"
    settings = [f"{name.replace('_', '-')} {results.settings[name]}" for name in names if name in results.settings]
    processor = results.machine.get("gpu") or results.machine.get("cpu")
    return ", ".join(short(part, 40) for part in (ranks, *settings, processor) if part)


def _quartiles(seconds: Seconds) -> tuple[float, float]:
    """The median twice, where a file has none."""
    return seconds.lower_quartile or seconds.median, seconds.upper_quartile or seconds.median


def _series(figure: Figure) -> Series:
    return Series(figure.implementation, figure.wire, figure.transport)


def _times(figure: Figure) -> Seconds:
    """Of a figure that has any, as all have that are drawn."""
    if figure.seconds is None:
        raise ValueError(f"{figure} has no times")
    return figure.seconds


def _of_first_routing(figures: Sequence[Figure]) -> list[Figure]:
    return [figure for figure in figures if figure.routing == figures[0].routing]


def _other_routings(figures: Sequence[Figure]) -> str:
    """For a caption: which routings are not in a picture of the first one."""
    others = sorted({figure.routing for figure in figures if figure.routing} - {figures[0].routing or ""})
    return f"Other routings are in the table alone: {', '.join(others)}." if others else ""


def _latency(operation: str, figures: Sequence[Figure], styles: Styles, sizes: str) -> Picture | str:
    """Time against tokens, of the first routing."""

    def point(figure: Figure) -> _Point:
        low, high = _quartiles(_times(figure))
        return _Point(figure.tokens, low, _times(figure).median, high)

    lines = _lines((figure for figure in _of_first_routing(figures) if figure.tokens > 0), point)
    if not lines:
        return f"Latency of {operation}: no figure has a token."
    routed = f", {short(figures[0].routing)} routing" if figures[0].routing else ""
    made, axes = canvas(f"{operation}: latency{routed}", _HEIGHT, subtitle=sizes)
    _draw_lines(made, axes, lines, styles)
    low, high = _pad_log(axes, lines)
    log_axis(axes.xaxis, binary_ticks(max(1.0, axes.get_xlim()[0]), axes.get_xlim()[1]), token_text)
    log_axis(axes.yaxis, decimal_ticks(low, high), time_text)
    axes.set(xlabel="tokens of a rank", ylabel="time of an iteration on its slowest rank")
    return Picture(
        f"latency_{operation}",
        f"Latency of {operation} against tokens{routed}",
        "Lower is better. A line joins the medians over the iterations; its band goes from the lower quartile to the "
        "upper, and holds half of them. Both axes are logarithmic: equal distances are equal factors. It does not show "
        "how far off the results are, which the table does, nor which part of the time is quantisation. "
        + _other_routings(figures),
        made,
    )


def _bandwidth(
    operation: str, figures: Sequence[Figure], styles: Styles, results: Results, sizes: str
) -> Picture | str:
    """Bus bandwidth against size, with what memory and link allow."""

    def point(figure: Figure) -> _Point:
        middle, seconds = (figure.bus_bandwidth or 0.0) / 1e9, _times(figure)
        low, high = (middle * seconds.median / taken for taken in reversed(_quartiles(seconds)))
        return _Point(figure.size_bytes, low, middle, high)

    lines = _lines((f for f in _of_first_routing(figures) if f.bus_bandwidth and f.size_bytes), point)
    if not lines:
        return f"Bandwidth of {operation}: no figure has a size and a bandwidth."
    limits = []
    if results.copy_bandwidth is not None:  # a byte that is moved is read and written
        limits.append((results.copy_bandwidth / 2e9, ":", "copy limit"))
    if results.link_bandwidth is not None:
        limits.append((results.link_bandwidth / 1e9, "-.", "link's rate"))
    made, axes = canvas(f"{operation}: bus bandwidth", _HEIGHT, subtitle=sizes)
    entries = []
    for height, dashes, label in limits:
        entries.append(
            (axes.axhline(height, color=DARK, linestyle=dashes, linewidth=1.4), f"{label}, {height:.3g} GB/s")
        )
    _draw_lines(made, axes, lines, styles, entries)
    low, high = _pad_log(axes, lines, [height for height, _, _ in limits])
    log_axis(axes.xaxis, binary_ticks(*axes.get_xlim()), size_text)
    log_axis(axes.yaxis, decimal_ticks(low, high), lambda bandwidth: f"{bandwidth:g}")
    axes.set(xlabel="size of a rank's buffer", ylabel="GB/s")
    told = {
        "copy limit": "The dotted line is what plain copies move while all ranks copy, each byte read once and written "
        "once; buffers that stay in a cache may pass it. ",
        "link's rate": "The dash-dotted line is the rate of the link as it was given with --link; a quantised "
        "format sends fewer bytes, and may stand above it. ",
    }
    return Picture(
        f"bandwidth_{operation}",
        f"Bus bandwidth of {operation} against size",
        "Higher is better. Bandwidth counts the bytes before quantisation, by nccl-tests' definition of bus bandwidth, "
        "at the median over the iterations; the band is that of their quartiles, and holds half of them. "
        + "".join(told[label] for _, _, label in limits)
        + "It does not show how many bytes travelled or how far off the results are: the table does. "
        + _other_routings(figures),
        made,
    )


def _skew(operation: str, figures: Sequence[Figure], styles: Styles, sizes: str) -> Picture | str:
    """Speed-up against skew, at the largest number of tokens that has several routings."""
    usable = [
        figure
        for figure in figures
        if figure.speedup is not None
        and figure.skew is not None
        and figure.implementation not in ("copy", figure.reference)  # a limit, and the line at 1
    ]
    several = [f.tokens for f in usable if len({g.skew for g in usable if g.tokens == f.tokens}) > 1]
    if not several:
        return (
            f"Speed-up of {operation} against skew: the run has no speed-ups at two routings. --routing takes "
            "several, which are then compared in one run."
        )
    tokens = max(several)
    usable = [figure for figure in usable if figure.tokens == tokens]
    lines = _lines(usable, lambda f: _Point(f.skew or 0.0, f.speedup or 0.0, f.speedup or 0.0, f.speedup or 0.0))
    references = sorted({figure.reference or "the reference" for figure in usable})
    reference = references[0] if len(references) == 1 else "each one's reference"
    title = f"{operation}: speed-up over {short(reference)}, {tokens:,} tokens a rank"
    made, axes = canvas(title, _HEIGHT, subtitle=sizes)
    even = axes.axhline(1.0, color=DARK, linestyle=":", linewidth=1.4)
    _draw_lines(made, axes, lines, styles, [(even, f"as fast as {reference}")])
    speedups = [figure.speedup or 0.0 for figure in usable]
    top = 1.08 * max(1.0, *speedups)
    axes.set_ylim(0 if min(speedups) > 0 else -0.04 * top, top)  # marks at 0 are seen, too
    axes.yaxis.set_major_formatter(lambda speedup, _: f"{speedup:g}")  # its own puts a power of ten over the axis
    axes.set(xlabel="skew: rows of the busiest rank by the mean (1 is balanced)", ylabel="speed-up")
    routings = dict(sorted({(figure.skew, figure.routing or "unnamed") for figure in usable}))
    named = ", ".join(f"{routing} {skew:.3g}" for skew, routing in routings.items())
    return Picture(
        f"speedup_{operation}",
        f"Speed-up of {operation} over {reference} against skew",
        "Higher is better; at the dotted line it takes as long as what it is compared with. A point is the ratio of "
        f"the median times, {tokens:,} tokens a rank. Skew by routing: {named}. It "
        "does not show times: all may be slower at high skew, and the speed-up the same.",
        made,
    )


def _lines(figures: Iterable[Figure], point: Callable[[Figure], _Point]) -> dict[Series, list[_Point]]:
    lines: dict[Series, list[_Point]] = {}
    for figure in figures:
        lines.setdefault(_series(figure), []).append(point(figure))
    return {series: sorted(points, key=lambda found: found.x) for series, points in lines.items()}


def _draw_lines(
    made: Canvas,
    axes: Axes,
    lines: dict[Series, list[_Point]],
    styles: Styles,
    more_entries: Sequence[tuple[Line2D, str]] = (),
) -> None:
    """Lines with their bands, and a legend in the order in which the lines end, the highest first."""
    for series, points in lines.items():
        x = [point.x for point in points]
        lows, highs = [point.low for point in points], [point.high for point in points]
        colour, own = styles.colour(series), series.implementation == "thinwire" and series.wire in ("int8", "int8+h64")
        if len(points) > 1:
            axes.fill_between(x, lows, highs, color=colour, alpha=0.25 if own else 0.14, linewidth=0)
        else:
            axes.vlines(x, lows, highs, color=colour, linewidth=1.2)
        drawn = styles.handle(series)
        drawn.set_zorder(3 if own else 2)
        drawn.set_data(x, [point.middle for point in points])
        axes.add_line(drawn)
    axes.autoscale_view()
    ordered = sorted(lines, key=lambda series: -lines[series][-1].middle)
    legend(made, axes, [*((styles.handle(series), series.label) for series in ordered), *more_entries], _HEIGHT)


def _pad_log(axes: Axes, lines: dict[Series, list[_Point]], heights: Sequence[float] = ()) -> tuple[float, float]:
    """Sets limits a little beyond the data, for logarithmic axes; returns those of y."""
    points = [point for found in lines.values() for point in found]
    xs = [point.x for point in points]
    ys = [*(point.low for point in points), *(point.high for point in points), *heights]
    room = max((max(xs) / min(xs)) ** 0.04, 1.15 if max(xs) > min(xs) else 2)
    axes.set_xlim(min(xs) / room, max(xs) * room)
    room = max((max(ys) / min(ys)) ** 0.06, 1.3)
    axes.set_ylim(min(ys) / room, max(ys) * room)
    return min(ys) / room, max(ys) * room
