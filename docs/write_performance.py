"""Writes docs/performance.md out of the files in benchmarks/results: `python docs/write_performance.py`."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "cpu"
TARGET = ROOT / "docs" / "performance.md"

_HEAD = """\
# Performance

Every figure on this page comes from a file in `benchmarks/results`, which names its command, commit and machine. All
measurements are on CPUs, except those of kernels on [one GPU](#kernels-on-one-h200). **Nothing has been
measured between GPUs yet**; [the speed of light](#the-speed-of-light) is calculated. Contenders ran in the same
processes, in turn, round after round. A ratio is the median of the ratios within rounds; above 1, thinwire was faster.
All ranks, their memory and, over links, the network share two cores: read the ratios, not the times.

`thinwire bench` measures on your machine.

Two hosts and a slow link ([tables](#over-a-slow-link)):

![Speedup of an all-to-all-v between two hosts over bfloat16, for three links and three wire formats](links.svg)

Four ranks of one host beside gloo; staged rows go through gloo, too ([tables](#4-ranks-processes-of-one-host)):

![Speedup over gloo of each operation between 4 ranks of one host, direct and staged, in none and int8](one_host.svg)

Ranks of one host beside Open MPI. Small calls are slower, and so is an all-to-all-v in int8
([tables](#2-ranks-beside-open-mpi-2-cores)):

![Speedup over Open MPI of all-to-all-v and all-reduce by size, with extremes](open_mpi.svg)
"""

_MACHINE_CODE = """\
These figures were counted in the machine code for sm_90, without a GPU: int8, rows of 7168 bfloat16, in collectives
4096. The columns are instructions, and cycles of the busiest pipe, both per 32 elements; the warps that a
multiprocessor holds; and the largest rate that this allows, in GB/s of the wire, on 132 multiprocessors and on 20. This
is a ceiling, not a measurement. It follows the longest path through the code of a row, with one destination, expert or
sum for each token. `python -m benchmarks.machine_code --help` lists the assumptions about the hardware.
"""

_NOT_LEAN = """\
Two things could be leaner. First, rows that do not begin on 16-byte boundaries, such as those of 5121 elements, are
read element by element, with 16 adjacent elements in a thread. For each 128 bytes `quantize` then requests
{unaligned:.0f} sectors of 32 bytes where 4 would do; most are in the first-level cache. For aligned rows it requests
{aligned:.1f}, as a thread loads in two halves the 16 columns that it stores together. Second, `sum_home` loads four of
a token's sums at once, not all: with 32 warps there are not enough registers for eight in every format and on every
GPU.
"""

_OF_ACCOUNT = """\
Where that time goes, in ms of a rank: the whole call; processor time of the calling thread, by phase, of Gloo's thread
and of others; time waiting for a core; the bytes' time on the link; and both ranks' processor time divided by the
cores. No call can take less than either of the last two (`python -m benchmarks.bench_link --help`).
"""


def page() -> str:
    """The whole page."""
    of_kernels = _one_gpu(), _machine_code(), _speed_of_light(), _latency(), _small_collectives()
    rest = _codec(), _collective_accuracy(), _flight_recorder(), *of_kernels, _not_shown()
    parts = (_one_host(), _links(), _result_memory(), *rest)
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
    return "".join(
        (
            "## Between ranks of one host\n\n",
            _bench("bench"),
            _bench("bench_mpi"),
            *map(_beside_open_mpi, (2, 4)),
        )
    )


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
    caption = "Median time in us" + (f"; in brackets, speedup over {reference}" if reference else "") + ":\n\n"
    rows = [[name, *(cells.get((name, column), "") for column in columns)] for name in lines]
    return f"**{operation}**. {caption}{_table(['', *head], rows)}"


def _cell(figure: dict[str, Any]) -> str:
    if figure["wrong"]:
        return "wrong"
    text = f"{figure['seconds']['median'] * 1e6:,.0f}"
    compared = figure["speedup"] and figure["implementation"] not in ("copy", figure["reference"])
    return text + (f" ({figure['speedup']:.2f})" if compared else "")


def _beside_open_mpi(ranks: int) -> str:
    """Of a file of `bench_mpi`: a table for each operation, with a column for each size."""
    name = f"open_mpi_{ranks}"
    found = _read(name)
    cores = found["machine"]["cpus"]
    text = [f"### {ranks} ranks beside Open MPI, {cores} cores\n"]
    for operation in dict.fromkeys(figure["operation"] for figure in found["figures"]):
        figures = [each for each in found["figures"] if each["operation"] == operation]
        sizes = list(dict.fromkeys((figure["size"], figure["rows"]) for figure in figures))
        head = [f"{rows:,} row{'s' if rows > 1 else ''}" if rows else _size(size) for size, rows in sizes]
        lines: dict[str, list[str]] = {figure["what"]: [""] * len(sizes) for figure in figures}
        for figure in figures:
            ratios = f" ({figure['of Open MPI']:.2f}, {figure['low']:.2f}-{figure['high']:.2f})"
            plain = figure["what"].startswith(("Open MPI", "copy"))
            place = sizes.index((figure["size"], figure["rows"]))
            lines[figure["what"]][place] = f"{figure['us']:,.0f}" + ("" if plain else ratios)
        barriers = {(figure["size"], figure["rows"]): f"{figure['barrier']:.2f}" for figure in figures}
        lines["barrier"] = [barriers[size] for size in sizes]
        rows_of_table = [[_in_words(what), *cells] for what, cells in lines.items()]
        caption = (
            "Median time in us with a barrier; in brackets, speedup over Open MPI, with extremes. The last line is "
            "Open MPI's barrier alone, which takes longer while the cores share no cache"
        )
        what_rows = ". Rows of 4096 bfloat16 to each rank" if operation == "all_to_all_v" else ". float32"
        text.append(f"**{operation}**. {caption}{what_rows}:\n\n{_table(['', *head], rows_of_table)}")
    return "\n".join((*text, _source(name))) + "\n"


def _in_words(label: str) -> str:
    """A contender's name, its wire, and its transport."""
    implementation, *rest = label.split("/")
    return ", ".join([implementation + (f" `{rest[0]}`" if rest else ""), *rest[1:]])


def _over_runs(figure: dict[str, Any], ratio: str) -> str:
    """The median of several runs, and the least and the greatest."""
    runs = figure.get(f"ratios_{ratio}", [])
    return f"{figure[f'ratio_{ratio}']:.2f}" + (f" ({min(runs):.2f}-{max(runs):.2f})" if len(runs) > 1 else "")


def _links() -> str:
    figures = _read("link")["figures"]
    exchange = [
        [
            figure["rate"].replace("gbit", " Gbit/s"),
            figure["transfer"],
            f"{figure['wire_bytes'] / 1e6:.1f}",
            f"{figure['seconds'] * 1e3:.0f}",
            *(_over_runs(figure, f"to_{other}") for other in ("best_bf16", "all_to_all")),
        ]
        for figure in figures
    ]
    accounts = [figure["account"] for figure in figures if "account" in figure]
    account = [
        row[:2] + [f"{seconds * 1e3:.1f}" for seconds in taken.values()]
        for row, taken in zip(exchange, accounts, strict=False)
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
            "Two hosts made of network namespaces, 33.6 MB of bfloat16 each way, staged.\n\n**All-to-all-v**, speedup "
            "over the faster of two ways to send bfloat16, and over gloo's `all_to_all_single`,\nwhich takes turns in "
            "the two directions:\n",
            _table([*head, "over the best in bf16", "over all_to_all_single"], exchange),
            *((_OF_ACCOUNT, _table([*head[:2], *accounts[0]], account)) if account else ()),
            "**All-reduce**, wire formats of the two legs, speedup over gloo's in bfloat16:\n",
            _table([*head, "over gloo bf16"], reduce),
            _source("link", "all_reduce_link"),
        )
    )


def _result_memory() -> str:
    rows = [
        [f"{figure['tokens']:,}", figure["transport"], figure["call"], figure["memory"]]
        + [f"{figure['MiB']:,.0f}", f"{figure['ms']:.1f}", f"{figure['share']:.2f}", f"{figure['faults']:,.0f}"]
        for figure in _read("result_memory")["figures"]
    ]
    head = ["tokens", "transport", "call", "memory", "MiB", "ms", "share", "page faults"]
    return "\n".join(
        (
            "## Memory of results\n",
            "Rounds of 2 ranks in int8, 8 experts for each token of 7168 bfloat16. Results are in memory reused from "
            "earlier\nones, in new memory, or in torch's. ms is the call's time, share the time of a plain copy of the "
            "result divided by it:\n",
            _table(head, rows),
            _source("result_memory"),
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
    head = ["rows", "dtype", "wire", "quantise", "dequantise", "quantise over torch", "dequantise over torch"]
    on_two = [
        row[:3] + [f"{figure[f'{name}: x one thread']:.2f}" for name in ("copy", "quantise", "dequantise")]
        for figure in _read("codec_threads")["figures"]
        for row in [[f"{figure['rows']} x {figure['hidden']}", figure["dtype"], f"`{figure['wire']}`"]]
    ]
    return "\n".join(
        (
            "## Quantising alone\n",
            "Speed on one core relative to a plain copy of the same tensor (above 1: faster than copying, as fewer "
            "bytes are\nwritten or read), and speedup over separate torch operations:\n",
            _table(head, rows),
            "Speedup of two threads over one, beside torch's copy; small calls stay on one thread:\n",
            _table([*head[:3], "copy", "quantise", "dequantise"], on_two),
            _source("codec", "codec_threads"),
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
            "Relative L2 error with int8 and Gaussian rows: reduce-scatter, all-reduce with a 16-bit gather and with "
            "int8 on\nboth legs; and the error of elements that share a group with outliers:\n",
            _table(["ranks", *names], rows),
            _source("accuracy"),
        )
    )


def _flight_recorder() -> str:
    return "\n".join(
        (
            "## What the flight recorder costs\n",
            f"It takes {_read('flight_recorder')['entry_ns']['on']:.0f} ns for each entry.\n",
            _source("flight_recorder"),
        )
    )


def _wrapped(text: str, **indents: str) -> str:
    return textwrap.fill(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False, **indents) + "\n"


def _speed_of_light() -> str:
    found = json.loads((ROOT / "benchmarks" / "results" / "model.json").read_text())
    figures, published, machines = found["figures"], found["published"], found["machines"]
    shown = next(line for line in figures if line["tokens"] == 4096)
    launched = [launch for leg in shown["legs"] for launch in leg["launches"]]
    counted = any(launch["pipe us"] for launch in launched)
    rows = [
        [line["machine"].replace(", ", ", `") + "`", str(line["tokens"]), line["wires"]]
        + [f"{line[name]:,.0f}" for name in ("dispatch us", "combine us", "round trip us")]
        + [f"{line['by bf16']:.2f}", f"{line['planned us']:,.0f}"]
        for line in figures
    ]
    launches = [
        [f"`{launch['kernel']}`"]
        + [f"{launch[name]:.1f}" if launch[name] else "" for name in ("link us", "memory us", "pipe us")]
        for launch in launched
    ]
    launch_us = f"{1e6 * machines[0]['launch']:g} us"
    crossings = sorted({(machine["crossing"], machine["link"].rstrip("0123456789")) for machine in machines})
    long, short = (
        [line["times"] for line in published if (line["tokens"] > 128) == is_long] for is_long in (True, False)
    )
    sources = (
        "*Counted from the code*: the launches of a leg, as recorded; records, planes and positions from the layouts "
        "of lanes, each byte once, however often a kernel reads it; rows from uniform routing, without padding."
        + " Cycles of the busiest pipe are those of the machine code for sm_90, on every GPU."
        * counted,
        "*From data sheets*: the rates of the links in one direction ([Plan](planning.md#time)); memory and clocks: "
        + "; ".join(f"{machine['gpu']}, {machine['source'].removeprefix('data sheet: ')}" for machine in machines)
        + ".",
        f"*Guessed*: {launch_us} from the end of a kernel to the first instruction of the next one; "
        + " and ".join(f"{1e6 * seconds:g} us ({link})" for seconds, link in crossings)
        + " for a word to cross a link one way; a leg's signal takes three crossings. With 128 tokens these guesses "
        "make up much of the figures for NVLink.",
        "*Assumed*: every GPU of a PCIe box sends and receives at its own full rate, past switches and processors, "
        "which is not true of boxes with two sockets; all ranks begin at once; there is no other traffic; no launch "
        "waits for the host.",
    )
    head = ["GPUs, link", "tokens a rank", "wires", "dispatch us", "combine us", "both us", "over bf16", "planned us"]
    return "\n".join(
        (
            "## The speed of light\n",
            _wrapped(
                "**A ceiling, not a measurement**: the least possible time of a round on 8 GPUs, and the part of it "
                "that int8 on both legs saves. All times are of thinwire's kernels; fp8 out and bf16 back are what "
                "other libraries send. Each launch waits for the one before it, and then takes as long as the "
                "slowest of these: its bytes over the link, its bytes of the GPU's memory"
                + (", its instructions" if counted else "")
                + '. All run at nominal rates and at once. 7168 elements, 8 of 256 experts, bfloat16 tokens. "Records '
                'to experts" is for experts that read int8 themselves; otherwise dispatch ends with rows gathered in '
                'bfloat16. "Planned" is the prediction of [`thinwire plan`](planning.md#time) for the same legs: 20 us '
                "a leg, and the share of the link that published kernels reach.",
            ),
            _table(head, rows),
            _wrapped(
                f"The launches of {shown['machine']}, {shown['tokens']} tokens, {shown['wires']}, in us; each takes "
                f"the largest of its times, and {launch_us} for its launch:"
            ),
            _table(["kernel", "link", "memory", "pipe"], launches),
            "Sources of the numbers:\n",
            "".join(_wrapped(text, initial_indent="- ", subsequent_indent="  ") for text in sources),
            _wrapped(
                "Real kernels take longer than such a ceiling. Of the legs that other libraries' authors published "
                "([Plan](planning.md#next-to-published-figures)), those with thousands of tokens took "
                f"{min(long):.1f} to {max(long):.1f} times as long as one launch, one signal and their bytes at the "
                f"link's nominal rate; those with 128 tokens took {min(short):.1f} to {max(short):.1f} times as long."
            ),
            f"*Source: `{found['command']}`: [model.json](../benchmarks/results/model.json).*\n",
        )
    )


def _small_collectives() -> str:
    found = json.loads((RESULTS.parent / "small_collectives.json").read_text())
    rows = [
        [line["op"], str(line["KiB"]), str(line["launches"])]
        + [f"{line[key]:,.1f}" for key in ("least of several", "most of several", "least of one", "most of one")]
        + [f"{line['ratio']:.2f}"]
        for line in found["figures"]
    ]
    header = ["call", "KiB", "launches", "least", "most", "least in one", "most in one", "ratio"]
    return "\n".join(
        [
            "## Small collectives\n",
            _wrapped(
                "**Reckoned, not measured**, as above, for 8 x H100 SXM in int8: the launches of a collective, one "
                "after the other in a graph, and the one launch of `THINWIRE_COLLECTIVE_LAUNCHES=one` instead, in us. "
                "KiB are of the whole tensor in bfloat16. Where the host launches each, it saves more."
            ),
            _table(header, rows),
            f"*Source: `{found['command']}`: "
            "[small_collectives.json](../benchmarks/results/small_collectives.json).*\n",
        ]
    )


def _latency() -> str:
    found = json.loads((RESULTS.parent / "latency.json").read_text())
    figures = found["figures"]
    parts = [
        "## Where a round's time goes\n",
        _wrapped(
            "**Reckoned, not measured**: the compiled kernels of a rank run on the CPU, and each result comes its "
            "instruction's latency after the operands. `path` is the longest program's way through a kernel, `bytes` "
            "how long those take that must move, in us. `least` is a launch and the longest of its times; `most` adds "
            "up what programs that begin together do not overlap. int8, 7168 elements, 8 of 256 experts, rank 0 of 8. "
            '"Records to experts" is for experts that read records themselves, as `tw.Int8Experts` does: no gather. '
            "The first table is what one H200 measured, with older kernels; the second is on NVLink, which nothing has "
            "run on. `python -m benchmarks.latency --help` says what is left out."
        ),
    ]
    for machine, name in (("H200 alone", "One H200, no link"), ("8 x H100", "8 x H100 SXM, `nvlink4`")):
        lines = [figure for figure in figures if figure["machine"] == machine]
        beside = machine == "H200 alone"
        rows = [
            [str(line["tokens"]), line["kernel"] if line["kernel"].startswith("round") else f"`{line['kernel']}`"]
            + [f"{line[key]:,.1f}" for key in ("path", "bytes", "least", "most")]
            + [line["measured"] or "-"] * beside
            for line in lines
        ]
        parts += [
            f"{name}:\n",
            _table(["tokens", "kernel", "path", "bytes", "least", "most"] + ["measured"] * beside, rows),
        ]
    parts.append(f"*Source: `{found['command']}`: [latency.json](../benchmarks/results/latency.json).*\n")
    return "\n".join(parts)


def _one_gpu() -> str:
    found = json.loads((RESULTS.parent / "h200" / "kernels.json").read_text())
    machine, figures = found["machine"], {(f["tokens"], f["wire"], f["what"]): f for f in found["figures"]}
    whats = [what for what in dict.fromkeys(what for _, _, what in figures) if what != "copy"]
    tokens = list(dict.fromkeys(number for number, _, _ in figures))
    rows = [
        [what if what.endswith("threads") else f"`{what}`" if what != "round" else "round"]
        + [_of_kernel(figures[number, wire, what]) for number in tokens for wire in ("int8", "none")]
        for what in whats
    ]
    copies = sorted(figure["GB/s"] for figure in figures.values() if figure["what"] == "copy")
    return "\n".join(
        (
            f"## Kernels on one {machine['gpu'].removeprefix('NVIDIA ')}\n",
            _wrapped(
                "Measured, without a link: one thread plays eight ranks on one GPU, kernel by kernel in CUDA graphs. "
                "Times are in us of a rank; in brackets is the share of a plain copy's bandwidth, counting only the "
                f"bytes that a kernel must read and write. The copy moved {copies[0]:,.0f} to {copies[-1]:,.0f} GB/s. "
                "7168 elements, 8 of 256 experts, bfloat16 tokens. `route` reads little: its time is that of its "
                "launches. "
                '"Round" is all launches of dispatch, gather and combine. "2 threads" and "8 threads" are rounds '
                "of ranks that run at once on that GPU, signals and waits included. They share its memory and "
                "multiprocessors, so with many tokens N ranks take about N times as long as one."
            ),
            _table(["", *(f"{number} tokens, {wire}" for number in tokens for wire in ("int8", "none"))], rows),
            f"*Source: `python -m benchmarks.gpu_kernels`, {machine['gpu']}, torch {machine['torch']}, Triton "
            f"{machine['triton']}: [kernels.json](../benchmarks/results/h200/kernels.json).*\n",
            _codec_on_a_gpu(),
        )
    )


def _codec_on_a_gpu() -> str:
    found = json.loads((RESULTS.parent / "h100" / "codec.json").read_text())
    rows = [
        [f"{figure['rows']} x {figure['hidden']}", f"`{figure['wire']}`"]
        + [f"{figure[name] * 1e6:.1f} ({figure[f'{name} share']:.2f})" for name in ("quantise", "dequantise")]
        for figure in found["figures"]
        if figure["dtype"] == "bfloat16"
    ]
    return "\n".join(
        (
            _wrapped(
                "Quantising alone, on one H100 that ran tests at the same time: us, and the speed relative to a plain "
                "copy of the same bfloat16 tensor in the same run."
            ),
            _table(["rows", "wire", "quantise", "dequantise"], rows),
            f"*Source: `python -m benchmarks.bench_codec --device cuda`, commit {found['commit']}, "
            f"{found['machine']['gpu']}, torch {found['machine']['torch']}, Triton {found['machine']['triton']}: "
            "[codec.json](../benchmarks/results/h100/codec.json).*\n",
        )
    )


def _of_kernel(figure: dict[str, Any]) -> str:
    share = f" ({figure['share']:.2f})" if figure["share"] >= 0.005 else ""
    return f"{figure['us']:,.1f}{share}"


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
            f"*Source: `{after['command']}`, before and after the kernels used NVIDIA's own conversions, with "
            f"Triton {after['machine']['triton']}: {files}.*\n",
        )
    )


def _code_key(figure: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(figure[name] for name in ("kernel", "wire", "hidden", "target"))


def _not_shown() -> str:
    return """\
## What these figures do not show

There are no figures for several GPUs, NVLink, NCCL, real networks, or more ranks than two cores can hold without
sharing. [Plan](planning.md) has the published figures of other libraries, and what a model of latency and bandwidth
predicts for thinwire: predicted, not measured.
"""


if __name__ == "__main__":
    TARGET.write_text(page())
