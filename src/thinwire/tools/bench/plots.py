"""Pictures of a run: `thinwire bench --plot`. Time against tokens of rounds, bus bandwidth against size of collectives.

Colour says who: the implementation, or which wire format of thinwire's own; a dashed line says that rows were staged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from thinwire.files import write_file
from thinwire.tools.bench.options import COLLECTIVES, ROUND
from thinwire.tools.bench.results import name_text

#: Inches, and pixels an inch: twice those that a page shows, for screens with fine pixels.
WIDTH, HEIGHT, DPI = 8.0, 4.2, 200
DARK, GREY, PALE, STRIPE = "#24292f", "#6e7781", "#d8dee4", "#f3f5f7"
#: Of thinwire's wire formats by kind, of other implementations, and of those without a colour of their own.
_WIRE_COLOURS = {
    "none": "#24365A", "int8": "#0072B2", "int8:row": "#788AB4", "int8:32": "#485A7E", "int8+h64": "#001230",
    "int6": "#7E7884", "int4": "#A2B4DE", "fp8": "#12000C",
}  # fmt: skip
_COLOURS = {"gloo": "#8A6648", "nccl": "#603C24", "Open MPI": "#361806", "copy": "#BAB48A"}
_OTHER = "#9A8F78"


def colour_of(implementation: str, wire: str) -> str:
    """Formats that differ in their groups or rotation, and have no colour of their own, share that of their kind."""
    if implementation != "thinwire":
        return _COLOURS.get(implementation, _OTHER)
    kind = wire.partition("+")[0].partition(":")[0]
    return _WIRE_COLOURS.get(wire) or _WIRE_COLOURS.get(kind, _OTHER)


def write_pictures(content: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draws what a file of `thinwire bench --json` holds: a PNG for each operation, whose names it gives.

    Raises:
        OSError: the folder cannot be made or written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with styled():
        for operation in (*ROUND, *COLLECTIVES):
            made = draw(content, operation)
            if made is not None:
                paths.append(folder / f"{operation}.png")
                write_file(paths[-1], png(made))
    return paths


def draw(content: Mapping[str, Any], operation: str) -> Figure | None:
    """One operation's picture, of its first routing; None where it has no times.

    Lines join the medians, and bands go from the lower quartile to the upper.
    """
    timed = [figure for figure in content["figures"] if figure["operation"] == operation and figure["seconds"]]
    timed = [figure for figure in timed if figure["routing"] == timed[0]["routing"]]
    is_round = operation in ROUND
    if not is_round:
        timed = [figure for figure in timed if figure["bus_bandwidth"]]
    lines: dict[tuple[str, str, str | None], list[tuple[float, float, float, float]]] = {}
    for figure in timed:
        seconds = figure["seconds"]
        times = [seconds.get(name) or seconds["median"] for name in ("lower_quartile", "median", "upper_quartile")]
        x, points = figure["tokens"], times
        if not is_round:
            x, points = figure["size_bytes"], [figure["logical_bytes"] / taken / 1e9 for taken in reversed(times)]
        name = figure["implementation"], figure["wire"], figure["transport"]
        lines.setdefault(name, []).append((float(x), *points))
    if not lines:
        return None
    routing = f", {timed[0]['routing']} routing" if timed[0]["routing"] else ""
    device = content["machine"].get("gpu") or content["machine"].get("cpu")
    what = "latency" if is_round else "bus bandwidth"
    made, axes = canvas(f"{operation}: {what}{routing}", HEIGHT, subtitle=f"{content['ranks']} ranks, {device}")
    # The highest line's end is the legend's first entry.
    for name in sorted(lines, key=lambda name: -max(lines[name])[2]):
        x, low, middle, high = zip(*sorted(lines[name]), strict=True)
        colour, dashes = colour_of(*name[:2]), "--" if name[2] == "staged" else "-"
        axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.plot(x, middle, color=colour, linestyle=dashes, marker="o", label=name_text(*name))
    if not is_round and content["copy_bandwidth"]:  # a byte that is moved is read and written
        axes.axhline(content["copy_bandwidth"] / 2e9, color=DARK, linestyle=":", label="copy limit")
    axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1.0), borderaxespad=0)
    ends = [end for points in lines.values() for _, *points_y in points for end in points_y]
    log_axis(axes.yaxis, decimal_ticks(*_padded(axes.set_ylim, ends)), _time_text if is_round else "{:g}".format)
    ends = [point[0] for points in lines.values() for point in points]
    log_axis(axes.xaxis, _binary_ticks(*_padded(axes.set_xlim, ends)), "{:,.0f}".format if is_round else _size_text)
    axes.set_xlabel("tokens of a rank" if is_round else "size of a rank's buffer")
    axes.set_ylabel("time of an iteration on its slowest rank" if is_round else "GB/s")
    return made


def _padded(set_limits: Callable[[float, float], object], ends: Iterable[float]) -> tuple[float, float]:
    """Sets limits a little beyond the data, for logarithmic axes; returns them."""
    low, high = min(ends := list(ends)), max(ends)
    room = max((high / low) ** 0.05, 1.5)
    set_limits(low / room, high * room)
    return low / room, high * room


# ---------------------------------------------------------------------------------------------------------------------
# How every picture looks


def styled() -> AbstractContextManager[None]:
    """Pictures that are drawn within this look alike."""
    look: dict[Any, Any] = {
        "font.family": "DejaVu Sans",  # comes with matplotlib: pictures are the same everywhere
        "text.parse_math": False,  # a "$" in a name is no formula
        "font.size": 9.5, "axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlelocation": "left",
        "axes.labelsize": 9.5, "xtick.labelsize": 9, "ytick.labelsize": 9, "legend.fontsize": 9,
        "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True,
        "grid.linewidth": 0.6, "lines.linewidth": 1.8, "lines.markersize": 6, "legend.frameon": False,
        "xtick.color": GREY, "ytick.color": GREY, "axes.edgecolor": GREY, "grid.color": PALE, "text.color": DARK,
        "axes.labelcolor": DARK, "xtick.labelcolor": DARK, "ytick.labelcolor": DARK, "figure.facecolor": "white",
        "savefig.facecolor": "white",
    }  # fmt: skip
    return matplotlib.rc_context(look)


def canvas(title: str, height: float, width: float = WIDTH, subtitle: str = "") -> tuple[Figure, Axes]:
    """A picture of so many inches, with empty axes."""
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, pad=24 if subtitle else 10)
    below = axes.annotate(subtitle, (0, 1), (0, 10), "axes fraction", "offset points", fontsize=9, color=GREY)
    below.set_in_layout(False)  # it may reach over the legend, which begins below it
    return figure, axes


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


def _binary_ticks(low: float, high: float, most: int = 8) -> list[float]:
    """Powers of two that are equally far from each other: at most so many between `low` and `high`."""
    first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
    step = max(1, math.ceil((last - first + 1) / most))
    return [2.0**k for k in range(first, last + 1) if (k - first) % step == 0]


def _size_text(size: float) -> str:
    power = max((k for k in range(5) if size >= 1024**k), default=0)
    return f"{size / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def _time_text(seconds: float) -> str:
    unit, size = next((each for each in (("s", 1.0), ("ms", 1e-3)) if seconds >= each[1] * 0.9999), ("µs", 1e-6))
    return f"{seconds / size:.4g} {unit}"


def png(figure: Figure) -> bytes:
    """The picture's file; the same bytes for the same picture."""
    file = BytesIO()
    figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()
