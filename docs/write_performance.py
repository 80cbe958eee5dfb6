"""Writes docs/performance.md out of the files in benchmarks/results: `python docs/write_performance.py`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "cpu"
TARGET = ROOT / "docs" / "performance.md"

_HEAD = """\
# Performance

Every figure on this page comes from a file in `benchmarks/results`, which names its command, commit and machine. All
are of CPUs: **nothing has been measured on a GPU yet**. What is compared ran in the same processes, in turn, round
after round; ratios are medians of those within rounds, and above 1 means that thinwire was faster. Two cores share all
ranks, their memory and, over links, the work of the network: read ratios, not times.

`thinwire bench` measures on your machine.
"""

_MACHINE_CODE = """\
Counted in the machine code for sm_90, without a GPU; int8, rows of 7168 bfloat16, of collectives 4096: instructions,
and cycles of the busiest pipe, for each element and times 32; the warps that a multiprocessor holds; and what that
allows at most, in GB/s of the wire, on 132 multiprocessors and on 20. It is a ceiling and not a measurement, of the
longest way through the code of a row, with one destination, expert or sum for each token. What is assumed of the
hardware is in `python -m benchmarks.machine_code --help`.
"""

_NOT_LEAN = """\
Two things are not as lean as they could be. Rows that do not begin on 16-byte boundaries, as of 5121 elements, are read
element by element, 16 of a row side by side in a thread: for each 128 bytes `quantize` asks for {unaligned:.0f} sectors
of 32 bytes where 4 would do, most of which the first-level cache has. Of aligned rows it asks for {aligned:.1f}, each
half by itself, since a thread takes the 16 columns that it then stores together. And `sum_home` loads four of a token's
sums at once, not all: with the registers that 32 warps leave, eight do not fit for every format and GPU.
"""


def page() -> str:
    """The whole page."""
    parts = (_one_host(), _links(), _codec(), _collective_accuracy(), _safety(), _machine_code(), _not_shown())
    return "\n".join((_HEAD, *parts))


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def _source(*names: str) -> str:
    """Where figures come from: files, commands, the machine."""
    lines = []
    for name in names:
        found = _read(name)
        machine = found["machine"]
        lines.append(
            f"`{found['command']}`, commit {found['commit']}, {machine['cpus']} x {machine['cpu']}, torch "
            f"{machine['torch']}: [{name}.json](../benchmarks/results/cpu/{name}.json)"
        )
    return "*Source: " + "; ".join(lines) + ".*\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.0f} GiB"


def _one_host() -> str:
    return "".join(("## Between ranks of one host\n\n", _bench("bench"), _bench("bench_mpi")))


def _bench(name: str) -> str:
    """Of a file of `thinwire bench`: a table for each operation, with a column for each size."""
    found = _read(name)
    text = [f"### {found['ranks']} ranks, {found['launched']}\n"]
    operations = list(dict.fromkeys(figure["operation"] for figure in found["figures"]))
    for operation in operations:
        figures = [figure for figure in found["figures"] if figure["operation"] == operation]
        text.append(_bench_table(operation, figures))
    skipped = [f"{entry['implementation']} ({entry['reason']})" for entry in found["skipped"]]
    if skipped:
        text.append("Not measured: " + "; ".join(skipped) + ".\n")
    return "\n".join((*text, _source(name))) + "\n"


def _bench_table(operation: str, figures: Sequence[dict[str, Any]]) -> str:
    def column(figure: dict[str, Any]) -> tuple[int, str]:
        return figure["size_bytes"], figure["routing"] or ""

    def line(figure: dict[str, Any]) -> str:
        wire = f" `{figure['wire']}`" if figure["wire"] else ""
        return f"{figure['implementation']}{wire}" + (f", {figure['transport']}" if figure["transport"] else "")

    columns = sorted({column(figure) for figure in figures})
    cells = {(line(figure), column(figure)): _cell(figure) for figure in figures}
    routings = {routing for _, routing in columns}
    head = [_size(size) + (f", {routing}" if len(routings) > 1 and routing else "") for size, routing in columns]
    lines = list(dict.fromkeys(map(line, figures)))
    reference = next((figure["reference"] for figure in figures if figure["reference"]), None)
    caption = "Median time in us" + (f", and in brackets times as fast as {reference}" if reference else "") + ":\n\n"
    rows = [[name, *(cells.get((name, column), "") for column in columns)] for name in lines]
    return f"**{operation}**. {caption}{_table(['', *head], rows)}"


def _cell(figure: dict[str, Any]) -> str:
    if figure["wrong"]:
        return "wrong"
    text = f"{figure['seconds']['median'] * 1e6:,.0f}"
    compared = figure["speedup"] and figure["implementation"] not in ("copy", figure["reference"])
    return text + (f" ({figure['speedup']:.2f})" if compared else "")


def _links() -> str:
    exchange = [
        [
            figure["rate"].replace("gbit", " Gbit/s"),
            figure["transfer"],
            f"{figure['wire_bytes'] / 1e6:.1f}",
            f"{figure['seconds'] * 1e3:.0f}",
            f"{figure['ratio_to_best_bf16']:.2f}",
            f"{figure['ratio_to_all_to_all']:.2f}",
        ]
        for figure in _read("link")["figures"]
    ]
    reduce = [
        [
            figure["where"].replace("gbit", " Gbit/s"),
            figure["way"],
            f"{figure['wire_bytes'] / 1e6:.1f}",
            f"{figure['seconds'] * 1e3:.0f}",
            f"{figure['ratio_to_bf16']:.2f}",
        ]
        for figure in _read("all_reduce_link")["figures"]
    ]
    head = ["link", "way", "wire MB", "ms"]
    return "\n".join(
        (
            "## Over a slow link\n",
            "Two hosts made of network namespaces, 33.6 MB of bfloat16 each way, staged. In memory there is no link to "
            "save;\nhere there is. **All-to-all-v**, times as fast as the faster of two ways to send bfloat16, and as "
            "gloo's\n`all_to_all_single`, which takes turns in the two directions:\n",
            _table([*head, "by the best in bf16", "by all_to_all_single"], exchange),
            "**All-reduce**, wire formats of the two legs, times as fast as gloo's in bfloat16:\n",
            _table([*head, "by gloo bf16"], reduce),
            "At 10 Gbit/s two cores cannot quantise as fast as the link carries.\n",
            _source("link", "all_reduce_link"),
        )
    )


def _codec() -> str:
    rows = [
        [
            f"{figure['rows']} x {figure['hidden']}",
            figure["dtype"],
            f"`{figure['wire']}`",
            f"{figure['quantise share']:.2f}",
            f"{figure['dequantise share']:.2f}",
            f"{figure['quantise in torch'] / figure['quantise']:.0f}",
            f"{figure['dequantise in torch'] / figure['dequantise']:.0f}",
        ]
        for figure in _read("codec")["figures"]
    ]
    head = ["rows", "dtype", "wire", "quantise", "dequantise", "quantise by torch's", "dequantise by torch's"]
    return "\n".join(
        (
            "## Quantising alone\n",
            "Speed as a share of a plain copy's of the same tensor, on one core (above 1: faster than copying, as "
            "fewer bytes\nare written or read), and times as fast as the same in separate torch operations:\n",
            _table(head, rows),
            _source("codec"),
        )
    )


def _collective_accuracy() -> str:
    names = ["reduce_scatter", "16-bit gather", "int8 both legs", "beside outliers"]
    rows = [
        [str(figure["ranks"]), *(f"{figure[name]:.4f}" for name in names)] for figure in _read("accuracy")["figures"]
    ]
    return "\n".join(
        (
            "## Accuracy of the collectives\n",
            "Relative L2 error with int8, Gaussian rows: reduce-scatter, all-reduce with a 16-bit gather and with int8 "
            "on both\nlegs; and of elements that share a group with outliers:\n",
            _table(["ranks", *names], rows),
            _source("accuracy"),
        )
    )


def _safety() -> str:
    integrity, recorder = _read("integrity"), _read("flight_recorder")
    ratios: dict[tuple[str, str], list[float]] = {}
    for figure in integrity["figures"]:
        ratios.setdefault((figure["call"].split()[0], figure["transport"]), []).append(figure["ratio"])
    rows = [
        [operation, transport, f"{min(found):.2f} ... {max(found):.2f}"]
        for (operation, transport), found in ratios.items()
    ]
    return "\n".join(
        (
            "## What safety costs\n",
            'Calls with `integrity="checksum"` take so many times as long as without, from the least to the most of '
            "all sizes\nand formats that were measured:\n",
            _table(["operation", "transport", "times"], rows),
            f"An entry of the flight recorder, which is on, takes {recorder['entry_ns']['on']:.0f} ns.\n",
            _source("integrity", "flight_recorder"),
        )
    )


def _machine_code() -> str:
    folder = RESULTS.parent / "machine_code"
    before, after = (json.loads((folder / f"{name}.json").read_text()) for name in ("before", "after"))
    known = {_code_key(figure): figure for figure in before["figures"]}
    rows = []
    for figure in after["figures"]:
        if figure["target"] == "sm_90" and figure["hidden"] != 5121 and (earlier := known.get(_code_key(figure))):
            changes = [f"{earlier[name]:.1f} -> {figure[name]:.1f}" for name in ("issued", "pipe")]
            warps = f"{earlier['warps']} -> {figure['warps']}"
            rows.append([f"`{figure['kernel']}`", *changes, warps, *(f"{figure[n]:,.0f}" for n in ("GB/s", "on 20"))])
    files = ", ".join(f"[{name}.json](../benchmarks/results/machine_code/{name}.json)" for name in ("before", "after"))
    sectors = {
        figure["hidden"]: figure["sectors"]
        for figure in after["figures"]
        if (figure["kernel"], figure["target"]) == ("quantize", "sm_90")
    }
    not_lean = _NOT_LEAN.format(unaligned=sectors[5121], aligned=sectors[7168])
    return "\n".join(
        (
            "## What compiled kernels allow\n",
            _MACHINE_CODE,
            _table(["kernel", "instructions", "pipe", "warps", "GB/s", "on 20"], rows),
            not_lean,
            f"*Source: `{after['command']}`, before and after the kernels were given NVIDIA's own conversions, with "
            f"Triton {after['machine']['triton']}: {files}.*\n",
        )
    )


def _code_key(figure: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(figure[name] for name in ("kernel", "wire", "hidden", "target"))


def _not_shown() -> str:
    return """\
## What these figures do not show

GPUs, NVLink, NCCL, real networks, more ranks than two cores can hold without sharing. What the published figures of
others say, and what a model of latency and bandwidth predicts for thinwire, is in [Plan](planning.md): predicted, not
measured.
"""


if __name__ == "__main__":
    TARGET.write_text(page())
