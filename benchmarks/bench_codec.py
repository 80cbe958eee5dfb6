"""Measures quantising: the codec beside a plain copy of the same tensor, and beside the same codec in plain torch.

    python -m benchmarks.bench_codec --device cpu
    python -m benchmarks.bench_codec --device cuda --json codec.json
    python -m benchmarks.bench_codec --threads 2 --rows 32 256 1024 4096 --wires int8 --dtypes bfloat16

A copy reads and writes as many bytes as the tensor has, the least that any transport does. `share` is the copy's time
divided by the codec's: at 1, quantising takes as long as copying. For dequantise the copy is of the output. On a CPU
everything runs in one thread, at one size that lies in memory and one that lies in the cache. With `--threads` it also
runs in that many threads, or fewer for small calls; the last columns are the time of one thread divided by that of
several, for the copy too. On a GPU the tensors rotate, so none is in the cache.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from typing import Any

# torch's second thread would look for work for milliseconds behind a copy, on the core that ours are to run on.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from benchmarks import timing
from thinwire.triton_kernels import pack as triton_pack
from thinwire.triton_kernels.codec_reference import dequantize_reference, quantize_reference
from thinwire.wire import WireFormat

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WIRES = ("int8", "int8:row", "int4", "fp8")
COLUMNS = {
    "rows": "d",
    "dtype": "s",
    "wire": "s",
    "copy GB/s": ".1f",
    "quantise us": ".1f",
    "share": ".2f",
    "x torch": ".1f",
    "dequantise us": ".1f",
    "share ": ".2f",
    "x torch ": ".1f",
}
THREADS_COLUMNS = {f"{name}: x one thread": ".2f" for name in ("copy", "quantise", "dequantise")}
REFERENCE_ROUNDS = 3  # it takes long, and varies little for that
_CALLS_PER_SAMPLE_BYTES = 32 << 20
_GPU_BYTES = 2 << 30  # what tensors rotate over: many times any cache


def bench(
    device: torch.device, rows: int, hidden: int, dtype: torch.dtype, wire: WireFormat, repeats: int, threads: int = 1
) -> dict[str, float]:
    """Times in seconds a call, and shares; with several threads also the times of one by theirs."""
    size = rows * hidden * dtype.itemsize
    on_gpu = device.type == "cuda"
    sets = max(2, _GPU_BYTES // (3 * size)) if on_gpu else 1
    calls = 1 if on_gpu else max(1, _CALLS_PER_SAMPLE_BYTES // size)
    xs = [torch.randn(rows, hidden, device=device).to(dtype) for _ in range(sets)]
    outs = [torch.empty_like(x) for x in xs]
    records = [torch.empty(rows, wire.row_bytes(hidden), dtype=torch.uint8, device=device) for _ in xs]
    pack_rows, unpack_rows = _launchers(device)

    def every(work: Callable[[int], object]) -> Callable[[], object]:
        def run() -> None:
            for _ in range(calls):
                for number in range(sets):
                    work(number)

        return timing.captured(run) if on_gpu else run

    functions = {
        "copy": every(lambda i: outs[i].copy_(xs[i])),
        "quantise": every(lambda i: pack_rows(xs[i], wire, None, records[i])),
        "dequantise": every(lambda i: unpack_rows(records[i], wire, None, None, outs[i])),
        "quantise in torch": lambda: quantize_reference(xs[0], wire),
        "dequantise in torch": lambda: dequantize_reference(records[0], wire, hidden, dtype),
    }
    if threads > 1:
        options = {"threads": threads}

        def copy_on_threads() -> None:
            torch.set_num_threads(threads)
            functions["copy"]()
            torch.set_num_threads(1)

        functions |= {
            "copy on threads": copy_on_threads,
            "quantise on threads": every(lambda i: pack_rows(xs[i], wire, None, records[i], **options)),
            "dequantise on threads": every(lambda i: unpack_rows(records[i], wire, None, None, outs[i], **options)),
        }
    limits = {name: REFERENCE_ROUNDS for name in functions if name.endswith("in torch")}
    times = timing.interleaved(functions, device, repeats, limits)
    per_call = {name: [t / (1 if name in limits else calls * sets) for t in taken] for name, taken in times.items()}
    median = {name: statistics.median(taken) for name, taken in per_call.items()}
    return {
        "copy": median["copy"],
        "quantise": median["quantise"],
        "dequantise": median["dequantise"],
        "quantise share": timing.median_ratio(per_call["copy"], per_call["quantise"]),
        "dequantise share": timing.median_ratio(per_call["copy"], per_call["dequantise"]),
        "quantise in torch": median["quantise in torch"],
        "dequantise in torch": median["dequantise in torch"],
        "copied bytes per second": 2 * size / median["copy"],
        **{
            f"{name}: x one thread": timing.median_ratio(per_call[name], per_call[f"{name} on threads"])
            for name in ("copy", "quantise", "dequantise")
            if threads > 1
        },
    }


def _launchers(device: torch.device) -> tuple[Callable[..., None], Callable[..., None]]:
    if device.type == "cuda":
        return triton_pack.pack_rows, triton_pack.unpack_rows
    from thinwire.triton_kernels.cpu import pack as cpu_pack

    return cpu_pack.pack_rows, cpu_pack.unpack_rows


def _columns(figure: dict[str, Any]) -> dict[str, Any]:
    return {
        **figure,
        "copy GB/s": figure["copied bytes per second"] / 1e9,
        "quantise us": figure["quantise"] * 1e6,
        "share": figure["quantise share"],
        "x torch": figure["quantise in torch"] / figure["quantise"],
        "dequantise us": figure["dequantise"] * 1e6,
        "share ": figure["dequantise share"],
        "x torch ": figure["dequantise in torch"] / figure["dequantise"],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = timing.parser(__doc__, repeats=15)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rows", type=int, nargs="+", help="default: 4096 and 16 on a CPU, 4096 and 128 on a GPU")
    parser.add_argument("--threads", type=int, default=1, help="of a CPU rank, for one call")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--wires", nargs="+", default=list(WIRES), metavar="WIRE")
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    options = parser.parse_args(arguments)
    if options.threads > 1 and options.device != "cpu":
        parser.error("--threads is for --device cpu")
    device = timing.check_device(options.device)
    described = timing.machine(device)
    timing.print_machine(described)
    figures: list[dict[str, Any]] = []
    for rows in options.rows or ([4096, 16] if device.type == "cpu" else [4096, 128]):
        for name in options.dtypes:
            for wire in options.wires:
                form = DTYPES[name], WireFormat.parse(wire)
                figure = bench(device, rows, options.hidden, *form, options.repeats, options.threads)
                figures.append({"rows": rows, "hidden": options.hidden, "dtype": name, "wire": wire, **figure})
    table = ([_columns(figure) for figure in figures], COLUMNS | (THREADS_COLUMNS if options.threads > 1 else {}))
    timing.finish(options, "codec", described, table, figures, repeats=options.repeats, threads=options.threads)


if __name__ == "__main__":
    main()
