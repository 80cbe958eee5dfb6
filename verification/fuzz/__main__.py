"""Coverage-guided fuzzing, with atheris, of all parsers of foreign files or text.

    python -m verification.fuzz [TARGET ...] --seconds 600 --add --json FILE

Targets are those of `verification/fuzz/targets.py`, by default all. Each has its own process, which may take 1 GiB more
than at its start, and 10 s for an input. It starts from the inputs in `verification/fuzz/corpus`, and keeps inputs that
reach new code in build/fuzz, where the next run continues. An input that shows a defect is kept there too, and ends its
target; `python -m verification.fuzz TARGET --input PATH` runs it alone. With `--add`, a target's seconds and executions
are added to those in FILE.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.helpers.runs import Runs

CORPUS = Path(__file__).parent / "corpus"
WORK = Path(__file__).parents[2] / "build" / "fuzz"
MOST_BYTES = 4096  # of an input
_MOST_SECONDS = 10  # for an input
_EXECUTED = re.compile(r"stat::number_of_executed_units:\s*(\d+)")


def fuzz(target: str, seconds: float) -> dict[str, Any]:
    """Runs a target in a process of its own; what came of it."""
    grown, found = WORK / target, WORK / f"{target} defects"
    grown.mkdir(parents=True, exist_ok=True)
    found.mkdir(exist_ok=True)
    before, start = {*found.iterdir()}, time.monotonic()
    options = [
        f"-max_total_time={int(seconds)}", f"-timeout={_MOST_SECONDS}", f"-max_len={MOST_BYTES}", "-rss_limit_mb=4096",
        f"-artifact_prefix={found}/", "-print_final_stats=1", "-verbosity=0", "-reload=0",
    ]  # fmt: skip
    command = [sys.executable, "-m", "verification.fuzz.follow", target, *options, str(grown), str(CORPUS / target)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    told = done.stdout + done.stderr
    executed = _EXECUTED.search(told)
    defects = sorted({*found.iterdir()} - before)
    if done.returncode or executed is None or defects:
        print(told[-6000:], file=sys.stderr)
    for path in defects:
        print(f"python -m verification.fuzz {target} --input {shlex.quote(str(path))}", flush=True)
    return {
        "seconds": round(time.monotonic() - start, 1),
        "executions": int(executed[1]) if executed else 0,
        "kept": len([*grown.iterdir()]),
        "defects": [path.read_bytes().hex() for path in defects],
        "ended_badly": int(bool(done.returncode and not defects)),
    }


def main() -> int:
    names = sorted(path.name for path in CORPUS.iterdir())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", metavar="TARGET", nargs="*", help=f"of {', '.join(names)}")
    parser.add_argument("--seconds", type=float, default=600.0, help="for each target")
    parser.add_argument("--json", type=Path, help="write what was run there")
    parser.add_argument("--add", action="store_true", help="to what is there")
    parser.add_argument("--input", type=Path, help="run this one alone")
    arguments = parser.parse_args()
    unknown = [target for target in arguments.targets if target not in names]
    if unknown:
        parser.error(f"no target {', '.join(unknown)}; there are {', '.join(names)}")
    if arguments.input is not None:
        from verification.fuzz.targets import TARGETS

        (target,) = arguments.targets
        print("taken" if TARGETS[target].run(arguments.input.read_bytes()) else "refused")
        return 0
    try:
        fuzzer = f"atheris {metadata.version('atheris')}"
    except metadata.PackageNotFoundError:
        parser.error("atheris is not installed: pip install atheris")
    runs = Runs("verification.fuzz", arguments.json, arguments.add, fuzzer=fuzzer)
    stored: dict[str, Any] = runs.stored.get("targets", {})
    bad = executions = 0
    for target in arguments.targets or names:
        figures, before = fuzz(target, arguments.seconds), stored.get(target, {})
        bad += len(figures["defects"]) + figures["ended_badly"]
        executions += figures["executions"]
        print(
            f"{target}: {figures['executions']} executions in {figures['seconds']} s, {len(figures['defects'])} defects"
        )
        added = {
            key: before[key] + figures[key] for key in ("seconds", "executions", "defects", "ended_badly") if before
        }
        stored[target] = figures | added
        runs.write({"executions": executions}, targets=stored)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
