"""Writes what `+h64` costs into docs/wire-formats.md, measuring nothing: `python docs/write_wire_price.py`.

From benchmarks/results: cpu/codec_rotated.json (bench_codec), cpu/wire_price.json (`thinwire bench`),
cpu/link_rotated.json (bench_link), machine_code/rotated.json (machine_code) and ahead_of_time/triton-3.6.0.txt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parent / "wire-formats.md"
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
_KERNELS = {
    "quantize": "quantise", "dequantize": "dequantise", "send_tokens": "send tokens", "gather": "gather them",
    "send_sums": "send sums", "sum_home": "add them up at home",
}  # fmt: skip


def read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return content


def rows() -> Iterator[tuple[str, str, str]]:
    """What is compared, in what unit, and int8 and int8+h64 in it."""
    codec = {(each["rows"], each["wire"]): each for each in read("cpu/codec_rotated.json")["figures"]}
    for size in dict.fromkeys(number for number, _ in codec):
        for name in ("quantise", "dequantise"):
            plain, rotated = (1e3 * codec[size, wire][name] for wire in ("int8", "int8+h64"))
            yield f"CPU, one thread: {name} {size:,} rows of 7,168", *_compared(plain, rotated, " ms")
    found: dict[tuple[Any, ...], dict[str, float]] = {}
    for each in read("cpu/wire_price.json")["figures"]:
        if each["implementation"] == "thinwire" and each["transport"] == "direct":
            place = each["operation"], each["size_bytes"], each["tokens"]
            found.setdefault(place, {})[each["wire"]] = each["seconds"]["median"]
    for (operation, num_bytes, tokens), seconds in found.items():
        of = (
            f"round, {tokens:,} tokens a rank" if operation == "moe" else f"{operation}, {num_bytes >> 10:,} KiB a rank"
        )
        what = f"2 CPU ranks of one host: {of}"
        yield what, *_compared(1e3 * seconds["int8"], 1e3 * seconds["int8+h64"], " ms")
    links = {(each["rate"], each["transfer"]): each["seconds"] for each in read("cpu/link_rotated.json")["figures"]}
    for rate in dict.fromkeys(rate for rate, _ in links):
        plain, rotated = (1e3 * links[rate, f"thinwire {wire}"] for wire in ("int8", "int8+h64"))
        what = f"2 hosts, {rate.removesuffix('gbit')} Gbit/s between them: 32 MiB of bfloat16 each way"
        yield what, *_compared(plain, rotated, " ms")
    code = read("machine_code/rotated.json")["figures"]
    counts = {(each["kernel"], each["wire"], each["target"]): each["instructions"] for each in code}
    for kernel, name in _KERNELS.items():
        cells = [
            f"{counts[kernel, 'int8+h64', target]:.0f} / {counts[kernel, 'int8', target]:.0f}"
            for target in ("sm_80", "sm_90", "sm_100")
        ]
        ratio = counts[kernel, "int8+h64", "sm_90"] / counts[kernel, "int8", "sm_90"]
        yield (
            f"GPU, instructions of a warp for 32 elements, Triton 3.7.1, sm_80, sm_90, sm_100: {name}",
            ", ".join(cells),
            f"{ratio:.1f}",
        )


def _compared(plain: float, rotated: float, unit: str) -> tuple[str, str]:
    return f"{rotated:.3g} / {plain:.3g}{unit}", f"{rotated / plain:.2f}"


def spilling() -> list[str]:
    """Kernels for int8+h64 that spill registers with Triton 3.6."""
    text = (RESULTS / "ahead_of_time" / "triton-3.6.0.txt").read_text()
    found = re.findall(r"^(\w+)[ ,].* int8\+h64 .*<- \d+ spills", text, re.MULTILINE)
    return list(dict.fromkeys(found))


def section() -> str:
    lines = ["| what | `int8+h64` / `int8` | ratio |", "|---|---|---|"]
    lines += [f"| {what} | {figures} | {ratio} |" for what, figures, ratio in rows()]
    names = ", ".join(f"`{name}`" for name in spilling())
    machine = read("cpu/wire_price.json")["machine"]
    return (
        "\n".join(lines) + "\n\n"
        "CPU figures are medians; 512 rows lie in the cache, 4,096 in memory; ranks shared "
        f"{machine['cpus']} cores ({machine['cpu']}). GPU code was compiled by Triton 3.7.1, not run: instructions of "
        "a warp for 32 elements on sm_80, sm_90 and sm_100; the ratio is sm_90's. With Triton 3.6 "
        f"{names} spill registers for `int8+h64`, with 3.7 no kernel does.\n"
    )


def page() -> str:
    """All of the page."""
    text = TARGET.read_text()
    return re.sub(r"(<!-- wire price -->\n\n).*?(?=<!-- end -->)", lambda m: m[1] + section(), text, flags=re.S)


if __name__ == "__main__":
    TARGET.write_text(page())
