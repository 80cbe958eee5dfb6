"""How every picture looks: one canvas, one palette, axes with units.

A picture is 8 inches wide and shown 800 pixels wide, so that 9 points are read as such. Colour says who: the
implementation, or which wire format of thinwire's own; the marker says the wire format, and a dashed line that rows
were staged. The one saturated colour is that of thinwire's int8: the eye finds it first. All that are named here are
apart for the colour-blind, too (`tests/bench/test_plots.py`).
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from io import BytesIO

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from thinwire.tools.bench.units import name_text

#: Inches, and pixels an inch: twice those that a page shows, for screens with fine pixels.
WIDTH, DPI = 8.0, 200
DARK, GREY, PALE, STRIPE = "#24292f", "#6e7781", "#d8dee4", "#f3f5f7"

#: Of thinwire's wire formats, and of the other implementations.
WIRE_COLOURS = {
    "none": "#24365A",
    "int8": "#0072B2",
    "int8:row": "#788AB4",
    "int8:32": "#485A7E",
    "int8+h64": "#001230",
    "int6": "#7E7884",
    "int4": "#A2B4DE",
    "fp8": "#12000C",
}
COLOURS = {
    "gloo": "#8A6648",
    "nccl": "#603C24",
    "Open MPI": "#361806",
    "quantize, gloo": "#A88A7E",
    "torch symmetric memory": "#5A4E4E",
    "copy": "#BAB48A",
}
#: For those without a colour of their own.
OTHER_COLOURS = ("#9A8F78", "#745F73", "#7B5646", "#43394D")
MARKERS = {"none": "o", "int8": "s", "int8:row": "D", "int8:32": "P", "int4": "^", "fp8": "v", "int8+h64": "H"}
OTHER_MARKERS = ("X", "p", "*", "h", "<", ">")

_LEGEND_CHARACTERS = 26


@dataclass(frozen=True)
class Series:
    """What one line of a picture is of; its rows travelled in `wire`, over `transport`."""

    implementation: str
    wire: str
    transport: str | None

    @property
    def label(self) -> str:
        """In words."""
        return name_text(self.implementation, self.wire, self.transport)


class Styles:
    """The look of all series of a report: the same in each of its pictures."""

    def __init__(self, series: Iterable[Series]) -> None:
        known = sorted(set(series), key=lambda each: (each.implementation, each.wire, each.transport or ""))
        others = sorted({each.implementation for each in known} - {"thinwire"} - set(COLOURS))
        self._colours = COLOURS | {name: OTHER_COLOURS[i % len(OTHER_COLOURS)] for i, name in enumerate(others)}
        wires = sorted({each.wire for each in known} - set(MARKERS))
        self._markers = MARKERS | {wire: OTHER_MARKERS[i % len(OTHER_MARKERS)] for i, wire in enumerate(wires)}

    def colour(self, series: Series) -> str:
        """Formats that differ in their groups or rotation, and are not among WIRE_COLOURS, share that of their kind."""
        if series.implementation != "thinwire":
            return self._colours[series.implementation]
        kind = re.split("[:+]", series.wire)[0]
        return WIRE_COLOURS.get(series.wire) or WIRE_COLOURS.get(kind) or OTHER_COLOURS[0]

    def handle(self, series: Series) -> Line2D:
        """A line of that look, without data, for a legend or to copy from."""
        return Line2D(
            [],
            [],
            color=self.colour(series),
            marker=self._markers[series.wire],
            markeredgecolor="white",
            markeredgewidth=0.6,
            linestyle="--" if series.transport == "staged" else "-",
        )


def styled() -> AbstractContextManager[None]:
    """Pictures that are drawn within this look alike."""
    return matplotlib.rc_context(
        {
            "font.family": "DejaVu Sans",  # comes with matplotlib: pictures are the same everywhere
            "font.size": 9.5,
            "axes.titlesize": 11,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "axes.labelsize": 9.5,
            "axes.edgecolor": GREY,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.color": PALE,
            "grid.linewidth": 0.6,
            "xtick.labelsize": 9,
            "ytick.labelsize": 9,
            "xtick.color": GREY,
            "ytick.color": GREY,
            "xtick.labelcolor": DARK,
            "ytick.labelcolor": DARK,
            "text.color": DARK,
            "axes.labelcolor": DARK,
            "text.parse_math": False,  # names come from files, and "$" is no formula there
            "lines.linewidth": 1.8,
            "lines.markersize": 6,
            "legend.frameon": False,
            "legend.fontsize": 9,
            "figure.facecolor": "white",
            "savefig.facecolor": "white",
        }
    )


def blank(height: float, width: float = WIDTH) -> Figure:
    """A picture of so many inches, without axes."""
    return Figure(figsize=(width, height), dpi=DPI, layout="constrained")


def canvas(title: str, height: float, width: float = WIDTH, subtitle: str = "") -> tuple[Figure, Axes]:
    """A picture of so many inches, with empty axes; of a subtitle what one line holds."""
    figure = blank(height, width)
    axes = figure.add_subplot()
    axes.set_title(title, pad=24 if subtitle else 10)
    line = short(subtitle, int(11 * width))
    below = axes.annotate(line, (0, 1), (0, 10), "axes fraction", "offset points", fontsize=9, color=GREY)
    below.set_in_layout(False)  # it may reach over the legend, which begins below it
    return figure, axes


def legend(figure: Figure, axes: Axes, entries: Sequence[tuple[Line2D, str]], least_height: float) -> None:
    """To the right of the axes, where it covers nothing; the picture grows where there are many entries."""
    labels = [textwrap.fill(label, _LEGEND_CHARACTERS) for _, label in entries]
    lines = sum(label.count("\n") + 1 for label in labels)
    figure.set_size_inches(WIDTH, max(least_height, 1.2 + 0.155 * lines + 0.07 * len(labels)))
    # A label that begins with an underscore would be left out, so they are set afterwards.
    made = axes.legend(
        [handle for handle, _ in entries],
        [str(i) for i in range(len(entries))],
        loc="upper left",
        bbox_to_anchor=(1.02, 1.0),
        borderaxespad=0,
    )
    for text, label in zip(made.get_texts(), labels, strict=True):
        text.set_text(label)


def log_axis(axis: Axis, ticks: Sequence[float], formatted: Callable[[float], str]) -> None:
    """Makes an axis logarithmic, with labels at these ticks and nowhere else."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})  # type: ignore[attr-defined]
    axis.set_major_locator(FixedLocator(list(ticks)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: formatted(value)))
    axis.set_minor_locator(NullLocator())


def decimal_ticks(low: float, high: float, most: int = 8) -> list[float]:
    """1, 2, 5, 10, ... or powers of ten alone, or of a thousand: at most so many between `low` and `high`.

    >>> decimal_ticks(0.3, 7), decimal_ticks(0.0005, 2e6, 4)
    ([0.5, 1.0, 2.0, 5.0], [0.001, 1.0, 1000.0, 1000000.0])
    """
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    for steps, every in (((1, 2, 5), 1), ((1, 3), 1), ((1,), 1), ((1,), 2)):
        found = [float(f"{step}e{k}") for k in decades if k % every == 0 for step in steps]
        found = [tick for tick in found if low <= tick <= high]
        if len(found) <= most:
            return found
    return [tick for k in decades if k % 3 == 0 and low <= (tick := float(f"1e{k}")) <= high]


def binary_ticks(low: float, high: float, most: int = 8) -> list[float]:
    """Powers of two that are equally far from each other: at most so many between `low` and `high`.

    >>> binary_ticks(1, 4096)
    [1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0]
    """
    first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
    step = max(1, math.ceil((last - first + 1) / most))
    return [2.0**k for k in range(first, last + 1) if (k - first) % step == 0]


def short(name: str, most: int = 30) -> str:
    """For titles, which have one line: a name's beginning.

    >>> short("matrix:measured-on-friday.npy", 16)
    'matrix:measured…'
    """
    return name if len(name) <= most else f"{name[: most - 1]}…"


def time_text(seconds: float) -> str:
    """
    >>> time_text(2e-05), time_text(0.5), time_text(3.0)
    ('20 µs', '500 ms', '3 s')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size * 0.9999999:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds / 1e-9:.4g} ns"


def png(figure: Figure) -> bytes:
    """The picture's file; the same bytes for the same picture."""
    file = BytesIO()
    figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()
