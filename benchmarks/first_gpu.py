"""Tests and measures on one GPU for ten minutes, the most valuable first: `python -m benchmarks.first_gpu`.

    python -m benchmarks.first_gpu --out results --minutes 9
    python -m benchmarks.first_gpu --out results --only kernels rounds

Each step is a separate process with a time limit. If it fails or hangs, that is noted, and the next one begins. Its
output goes to `<step>.txt`, its measurements to `<step>.json`, and the outcome of all steps to `summary.json`, which is
rewritten after each step. The first step compiles Triton's kernels on all cores. The tests' references do without
numba, whose kernels take minutes to compile. Ranks that share a GPU are threads or processes. Times of processes mean
nothing, as a GPU runs one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import timing

#: A failure is printed when it comes, see tests/gpu/conftest.py.
_PYTEST = ("pytest", "-v", "-p", "no:cacheprovider", "--tb=short", "-W", "ignore", "--dist", "worksteal", "-n")
_ROUNDS = (
    "thinwire", "bench", "--device", "cuda", "--ranks", "2", "-b", "64K", "-e", "64M", "-f", "8",
    "--tokens", "16,128,1024", "--hidden", "7168", "--experts", "256",
)  # fmt: skip
#: The seconds and the modules with their arguments, all at once, of each step; {} is where it writes its figures.
STEPS: dict[str, tuple[float, tuple[tuple[str, ...], ...]]] = {
    "compile": (150, (("tests.gpu.warm",),)),
    "host": (40, (("benchmarks.gpu_host_waits", "--json", "{}"),)),
    "kernels": (90, (("benchmarks.gpu_kernels", "--json", "{}"),)),
    "doctor": (60, (("thinwire", "doctor", "--json", "{}"),)),
    "threads": (150, ((*_PYTEST, "3", "tests/gpu", "-k", "threads"),)),
    "processes": (120, ((*_PYTEST, "2", "tests/gpu", "-k", "processes"),)),
    "arithmetic": (150, ((*_PYTEST, "14", "tests/gpu/test_codec.py", "tests/gpu/test_experts.py", "-k", "equal"),)),
    "rest": (150, ((*_PYTEST, "4", "tests/gpu", "-k", "not threads and not processes and not equal"),)),
    "codec": (90, (("benchmarks.bench_codec", "--device", "cuda", "--json", "{}"),)),
    "bench": (120, ((*_ROUNDS, "--json", "{}"),)),
}


def run(name: str, folder: Path, seconds: float) -> dict[str, object]:
    """One step: its exit statuses, or that it was stopped, and the seconds that it took."""
    started = time.monotonic()
    with (folder / f"{name}.txt").open("w") as output:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", *(argument.format(folder / f"{name}.json") for argument in command)],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | {"NUMBA_DISABLE_JIT": "1"},
            )
            for command in STEPS[name][1]
        ]
        status: list[int | str] = []
        for process in processes:
            try:
                status.append(process.wait(max(0.1, started + seconds - time.monotonic())))
            except subprocess.TimeoutExpired:
                status.append(f"stopped after {seconds:.0f} s")
                os.killpg(process.pid, 9)
                process.wait()
    return {"status": status, "seconds": round(time.monotonic() - started, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu"), help="the folder")
    parser.add_argument("--only", nargs="+", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--minutes", type=float, default=9.0, help="for all steps")
    options = parser.parse_args()
    ends = time.monotonic() + 60 * options.minutes
    described = timing.machine(timing.check_device("cuda"))
    timing.print_machine(described)
    options.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, object]] = {}
    for name in options.only:
        seconds = min(STEPS[name][0], ends - time.monotonic())
        results[name] = run(name, options.out, seconds) if seconds > 5 else {"status": ["no time was left"]}
        print(f"{name}: {results[name]}", flush=True)
        summary = {"machine": described, "commit": timing.commit(), "steps": results}
        (options.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    return 0 if all(status == 0 for result in results.values() for status in result["status"]) else 1  # type: ignore[attr-defined]


if __name__ == "__main__":
    sys.exit(main())
