"""Tests and measures on one GPU for ten minutes, the most valuable first: `python -m benchmarks.first_gpu`.

    python -m benchmarks.first_gpu --out results --minutes 9
    python -m benchmarks.first_gpu --out results --only kernels codec
    python -m benchmarks.first_gpu --out results --from threads  # where a run was cut off

Each step is a process of its own with a time limit. If it fails or hangs, that is noted, and the next one begins. Its
output goes to `<step>.txt`, its measurements to `<step>.json`, and the outcome of all steps to `summary.json`, which is
replaced before and after each step; with `--only` or `--from` it keeps what an earlier run of the same commit left.
When a step ends or is stopped, and when this program is killed, what is left of the step's processes is killed. The
first step compiles Triton's kernels on all cores. The tests' references do without numba, whose kernels take minutes to
compile. Ranks that share a GPU are threads or processes. Times of processes mean nothing, as a GPU runs one after the
other.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import timing
from thinwire.files import replace_file

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
    "litmus": (90, (("benchmarks.gpu_litmus", "--json", "{}"),)),
    "codec": (90, (("benchmarks.bench_codec", "--device", "cuda", "--json", "{}"),)),
    "bench": (120, ((*_ROUNDS, "--json", "{}"),)),
}


_LEAST_SECONDS = 5  # that a step is begun with
#: Ends what steps have left behind once this process is gone, however it went: its standard input ends then.
_KEEPER = """
import os, sys
groups = ""
for groups in sys.stdin:
    pass
for group in groups.split():
    try:
        os.killpg(int(group), 9)
    except ProcessLookupError:
        pass
"""


class Keeper:
    """Of the process groups of steps that run: when this process is killed, so are they."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", _KEEPER]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)

    def keep(self, groups: Sequence[int]) -> None:
        """From now on these, and no others."""
        assert self._process.stdin is not None
        print(*groups, file=self._process.stdin, flush=True)


def run(name: str, folder: Path, seconds: float, keeper: Keeper) -> dict[str, object]:
    """One step: its exit statuses, or that it was stopped, and the seconds that it took."""
    started = time.monotonic()
    processes: list[subprocess.Popen[bytes]] = []
    with (folder / f"{name}.txt").open("w") as output:
        for command in STEPS[name][1]:
            arguments = [sys.executable, "-m", *(argument.format(folder / f"{name}.json") for argument in command)]
            process = subprocess.Popen(
                arguments,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | {"NUMBA_DISABLE_JIT": "1"},
            )
            processes.append(process)
            keeper.keep([process.pid for process in processes])
        status: list[int | str] = []
        for process in processes:
            try:
                status.append(process.wait(max(0.1, started + seconds - time.monotonic())))
            except subprocess.TimeoutExpired:
                status.append(f"stopped after {seconds:.0f} s")
            with contextlib.suppress(ProcessLookupError):  # where nothing is left of it
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        keeper.keep([])
    return {"status": status, "seconds": round(time.monotonic() - started, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu"), help="the folder")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--only", nargs="+", choices=list(STEPS), help="these steps")
    chosen.add_argument("--from", dest="first", choices=list(STEPS), help="this step and those after it")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all steps")
    options = parser.parse_args()
    ends = time.monotonic() + 60 * options.minutes
    names = list(STEPS)
    names = options.only or names[names.index(options.first or names[0]) :]
    described = timing.machine(timing.check_device("cuda"))
    timing.print_machine(described)
    options.out.mkdir(parents=True, exist_ok=True)
    summary, keeper = options.out / "summary.json", Keeper()
    goes_on = options.only or options.first
    results: dict[str, dict[str, Any]] = timing.read_json(summary).get("steps", {}) if goes_on else {}

    def note(name: str, outcome: dict[str, object]) -> None:
        results[name] = outcome
        content = {"machine": described, "commit": timing.commit(), "steps": results}
        replace_file(summary, (json.dumps(content, indent=1) + "\n").encode())

    for name in names:
        seconds = min(STEPS[name][0], ends - time.monotonic())
        if seconds > _LEAST_SECONDS:
            note(name, {"status": ["cut off"]})  # which stays if it is
            note(name, run(name, options.out, seconds, keeper))
        else:
            note(name, {"status": ["no time was left"]})
        print(f"{name}: {results[name]}", flush=True)
    return 0 if all(status == 0 for name in names for status in results[name]["status"]) else 1


if __name__ == "__main__":
    sys.exit(main())
