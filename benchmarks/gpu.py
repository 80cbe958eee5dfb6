"""Every benchmark that runs on a GPU, one after the other, each in a process of its own: `python -m benchmarks.gpu`.

What each printed and the JSON it wrote go to one folder, with a summary of what ran and how it ended. One that fails
does not keep the others from running, and makes the exit status 1. The kernels of `thinwire bench` are compiled before.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks import timing
from thinwire.bench.options import Settings
from thinwire.cli import make_parser
from thinwire.moe.config import ParallelSettings
from thinwire.progress import Progress
from thinwire.warmup.compile import compile_ahead
from thinwire.warmup.configuration import Configuration
from thinwire.warmup.target import archs_here

_SIZES = ("-b", "1K", "-e", "64M", "--tokens", "1,16,128,1024,8192", "--hidden", "7168", "--experts", "256")
#: Name of the result, and the module with its arguments.
BENCHMARKS = {
    "codec": ("benchmarks.bench_codec",),
    "bench2": ("thinwire", "bench", "--ranks", "2", *_SIZES),
    "bench8": ("thinwire", "bench", "--ranks", "8", *_SIZES),
}


def configurations(name: str) -> list[Configuration]:
    """What a benchmark launches, if it is `thinwire bench`."""
    module, *arguments = BENCHMARKS[name]
    if module != "thinwire":
        return []
    settings = Settings.of(make_parser().parse_args(arguments))
    assert settings.ranks is not None
    dtype: torch.dtype = getattr(torch, settings.dtype)
    return [
        Configuration(
            ParallelSettings.of(
                settings.experts, settings.top_k, settings.hidden, tokens, wire=wire, combine_wire=None,
                grad_wire=None, transport="direct", lanes=1, align=1, num_programs=None, timeout=None, dtype=dtype,
            ),
            settings.ranks,
            dtype,
            collectives=True,
            all_to_all_v=True,
        )
        for wire in settings.wires
        for tokens in settings.tokens
    ]  # fmt: skip


def run(name: str, folder: Path, timeout: float) -> dict[str, object]:
    """Runs one benchmark; its output goes to `<name>.txt`, its figures to `<name>.json`."""
    module, *arguments = BENCHMARKS[name]
    json_file = folder / f"{name}.json"
    command = [sys.executable, "-m", module, *arguments, "--device", "cuda", "--json", str(json_file)]
    started = time.monotonic()
    with (folder / f"{name}.txt").open("w") as output:
        try:
            status: int | str = subprocess.run(
                command, stdout=output, stderr=subprocess.STDOUT, timeout=timeout
            ).returncode
        except subprocess.TimeoutExpired:
            status = f"stopped after {timeout:g} s"
    result = {"status": status, "seconds": round(time.monotonic() - started, 1), "written": json_file.exists()}
    print(f"{name}: {result}", flush=True)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu"), help="the folder")
    parser.add_argument("--only", nargs="+", choices=list(BENCHMARKS), default=list(BENCHMARKS))
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for each benchmark")
    options = parser.parse_args()
    device = timing.check_device("cuda")
    described = timing.machine(device)
    timing.print_machine(described)
    options.out.mkdir(parents=True, exist_ok=True)
    with Progress(sys.stderr, time.monotonic()) as progress:
        wanted = [configuration for name in options.only for configuration in configurations(name)]
        compile_ahead(wanted, archs_here(), len(os.sched_getaffinity(0)), progress.report)
    results = {name: run(name, options.out, options.timeout) for name in options.only}
    (options.out / "summary.json").write_text(json.dumps({"machine": described, "results": results}, indent=1) + "\n")
    torch.cuda.synchronize()
    return 0 if all(result["status"] == 0 for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
