"""What came out: the machine, a figure for each operation and contender, the table of them, and the file.

Times are in seconds, sizes in bytes, bandwidths in bytes a second. Reading a file needs no torch.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from thinwire.fields import (
    Fields,
    Refused,
    just,
    list_of,
    number,
    one_of,
    or_none,
    parse_json,
    read_bytes,
    text,
    within,
)
from thinwire.tools.bench.options import MOST_RANKS, OPERATIONS
from thinwire.version import VERSION

if TYPE_CHECKING:
    import torch

#: What the first two fields of a file say.
FORMAT, FORMAT_VERSION = "thinwire bench", 1
_MOST_FIGURES = 10_000

# ---------------------------------------------------------------------------------------------------------------------
# The machine


def machine(device: torch.device) -> dict[str, Any]:
    """Describes this machine: processor, GPU and versions."""
    import torch

    described: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),  # of what ran before: a busy machine gives other figures
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "thinwire": VERSION,
        "torch": str(torch.__version__),
    }
    for package in ("numpy", "numba", "triton"):
        try:
            described[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            described[package] = None
    if device.type == "cpu":
        return described | {"threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(device)
    return described | {
        "gpu": properties.name,
        "gpus": torch.cuda.device_count(),
        "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
    }


def in_words(described: dict[str, Any]) -> str:
    """Joins what `machine` says into one line."""
    return ", ".join(f"{name} {value}" for name, value in described.items() if value is not None)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def commit() -> str | None:
    """The checkout's commit, marked when tracked files differ from it, but for results, which runs themselves write.

    None outside of a checkout of this project, as where it is installed, or without git.
    """
    here = Path(__file__).resolve()
    commands = (
        ["git", "rev-parse", "--show-toplevel"],
        ["git", "describe", "--always", "--abbrev=12", "--exclude=*"],
        ["git", "status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)benchmarks/results"],
    )
    try:
        root, name, changes = (
            subprocess.run(command, cwd=here.parent, capture_output=True, text=True, check=True).stdout.strip()
            for command in commands
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    # An environment may lie in the checkout of another project.
    if (Path(root) / "src" / "thinwire" / "tools" / "bench" / here.name).resolve() != here:
        return None
    return name + ("-dirty" if changes else "")


# ---------------------------------------------------------------------------------------------------------------------
# Figures


def timed(
    sizes: Mapping[str, Any], samples: Sequence[float] | None, reference: Sequence[float] | None, wire_bytes: float
) -> dict[str, Any]:
    """Derives figures from the samples of one contender and of the reference, None for wrong results.

    A speedup is the ratio of the medians; the paired one is the median over rounds of the ratio within the round.
    """
    seconds = summarised(samples) if samples else None
    rates = {"algorithm": sizes["size_bytes"], "bus": sizes["logical_bytes"], "wire": wire_bytes}
    return {
        "wire_bytes": wire_bytes,
        "seconds": seconds,
        **{f"{name}_bandwidth": seconds and num_bytes / seconds["median"] for name, num_bytes in rates.items()},
        "speedup": statistics.median(reference) / statistics.median(samples) if samples and reference else None,
        "paired_speedup": median_ratio(reference, samples) if samples and reference else None,
    }


def median_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """Median over rounds of one function's time by another's; rounds that only one of them took do not count."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=False))


def summarised(samples: Sequence[float]) -> dict[str, float]:
    """Quantiles are samples: the least that so large a share of all does not exceed. Of less than 100, p99 is the last.

    >>> list(summarised([4.0, 1.0, 3.0, 2.0]).values())
    [1.0, 1.0, 2.5, 3.0, 4.0, 4.0]
    """
    ordered = sorted(samples)
    lower, upper, p99 = (ordered[math.ceil(share * len(ordered)) - 1] for share in (0.25, 0.75, 0.99))
    return {
        "minimum": ordered[0],
        "lower_quartile": lower,
        "median": statistics.median(ordered),
        "upper_quartile": upper,
        "p99": p99,
        "maximum": ordered[-1],
    }


def relative(error_squares: float, squares: float) -> float | None:
    """The L2 of a difference by that of what is exact; None where the difference is not a number."""
    error = math.sqrt(error_squares / squares) if squares else 0.0
    return error if math.isfinite(error) else None


# ---------------------------------------------------------------------------------------------------------------------
# The table, in the manner of nccl-tests: names, a row of units, and a line as soon as it is known


def significant(value: float | None, digits: int = 4) -> str:
    """So many digits, but two below 0.001, so that a column of 7 holds them; None is a dash.

    >>> significant(6706.4), significant(41.953), significant(0.0015, 3), significant(4.56e-7, 3), significant(None)
    ('6706', '41.95', '0.00150', '4.6e-07', '-')
    """
    if value is None or value == 0:
        return "-" if value is None else "0"
    rounded = float(f"{value:.{digits - 1}e}")
    if rounded < 1e-3:
        return f"{value:.1e}"
    return f"{rounded:.{max(0, digits - 1 - math.floor(math.log10(rounded)))}f}"


def name_text(implementation: str, wire: str, transport: str | None) -> str:
    """An implementation in words; that a peer quantises nothing goes without saying.

    >>> name_text("thinwire", "none", "direct"), name_text("gloo", "none", None)
    ('thinwire none direct', 'gloo')
    """
    wire = "" if implementation != "thinwire" and wire == "none" else wire
    return " ".join(filter(None, (implementation, wire, transport)))


def _microseconds(name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda figure: significant(figure["seconds"] and figure["seconds"][name] * 1e6)


def _gigabytes(name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda figure: significant(figure[name] and figure[name] / 1e9, 3)


#: Name, unit, width, which wider cells exceed, and a figure's cell.
_COLUMNS: tuple[tuple[str, str, int, Callable[[Mapping[str, Any]], str]], ...] = (
    ("size", "bytes", 11, lambda f: str(f["size_bytes"])),
    ("count", "", 8, lambda f: str(f["tokens"])),
    ("implementation", "", -24, lambda f: name_text(f["implementation"], f["wire"], f["transport"])),
    ("median", "us", 8, lambda f: "WRONG" if f["seconds"] is None else _microseconds("median")(f)),
    ("p99", "us", 8, _microseconds("p99")),
    ("algbw", "GB/s", 7, _gigabytes("algorithm_bandwidth")),
    ("busbw", "GB/s", 7, _gigabytes("bus_bandwidth")),
    ("wire", "GB/s", 7, _gigabytes("wire_bandwidth")),
    ("error", "", 7, lambda f: significant(f["relative_error"], 2)),
    ("#wrong", "", 6, lambda f: "-" if f["wrong"] is None else str(f["wrong"])),
    ("speedup", "", 7, lambda f: significant(f["speedup"], 3)),
)


def heading(counted: str, reference: str) -> str:
    """Names and units over the first lines of a table: what `count` counts, and whose time speed-ups are of."""
    units = {"count": counted, "speedup": f"x {reference}"}
    rows = [name for name, *_ in _COLUMNS], [units.get(name, unit) for name, unit, *_ in _COLUMNS]
    return "\n".join("#" + _aligned(row)[1:] for row in rows)


def title(figure: Mapping[str, Any], dtype: str) -> str:
    """Returns the line over those of one operation and routing."""
    routed = "" if figure["routing"] is None else f", routing {figure['routing']}, skew {figure['skew']:.2f}"
    violated = "" if figure["max_violation"] is None else f", MaxVio {figure['max_violation']:.2f}"
    return f"# {figure['operation']} of {dtype}{routed}{violated}"


def line(figure: Mapping[str, Any]) -> str:
    """One figure; bandwidths are in GB/s, of 10^9 bytes."""
    return _aligned([cell(figure) for *_, cell in _COLUMNS])


def _aligned(cells: Sequence[str]) -> str:
    padded = [
        cell.ljust(-width) if width < 0 else cell.rjust(width)
        for cell, (_, _, width, _) in zip(cells, _COLUMNS, strict=True)
    ]
    return " ".join(padded).rstrip()


# ---------------------------------------------------------------------------------------------------------------------
# Reading a file, which may come from anywhere and is trusted in nothing


#: Operation, implementation, wire format, transport and routing.
Key = tuple[str, str, str, str | None, str | None]


class Measured(NamedTuple):
    """The part of a run that predictions need.

    Attributes:
        source, ranks, hosts: where it was read, and how many took part.
        points: wire bytes and median seconds of every figure whose result was right.
    """

    source: str
    ranks: int
    hosts: int
    points: dict[Key, list[tuple[float, float]]]


def read_results(path: str | Path) -> Measured:
    """Reads and checks a file of `thinwire bench --json`.

    Raises:
        ThinwireError: the file is not accepted; the message says why.
    """
    content, source = read_bytes(path)
    fields = Fields(parse_json(content, source), source)
    for name, wanted in (("format", FORMAT), ("version", FORMAT_VERSION)):
        fields.get(name, just(wanted))
    ranks = fields.get("ranks", within(1, MOST_RANKS))
    points: dict[Key, list[tuple[float, float]]] = {}
    for key, num_bytes, median in fields.get("figures", list_of(_figure, _MOST_FIGURES)):
        if median is not None:  # a wrong result has none
            points.setdefault(key, []).append((num_bytes, median))
    return Measured(source, ranks, fields.get("hosts", within(1, ranks)), points)


def _figure(value: object) -> tuple[Key, float, float | None]:
    fields, some = Fields(value, ""), or_none(text)
    names = {"operation": one_of(OPERATIONS), "implementation": text, "wire": text, "transport": some, "routing": some}
    key: Any = tuple(fields.get(name, check) for name, check in names.items())
    return key, fields.get("wire_bytes", number("a number of bytes", 1e18)), fields.get("seconds", or_none(_median))


def _median(value: object) -> float:
    median = Fields(value, "").get("median", number("a number of seconds", 1e12))
    if median == 0:
        raise Refused("a median above 0")
    return median
