"""Changes one place of the package at a time, at random, and says which test fails, or that none does.

    python -m verification.mutants --count 20 --seed 1 --whole --add --json FILE

The more lines a room has, the more of its places are drawn. Each mutant is a copy of the checkout, with what numba has
compiled. The tests that tests/MAP.md names for the module run first, and with `--whole` all others; none that is marked
exhaustive does. A test catches a mutant if it fails twice there, and not without the change. So do tests that end
within `--limit` seconds without the change alone: a hang.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.helpers.files import kill_marked
from tests.helpers.map_of_tests import ROOT, lines, modules
from tests.helpers.runs import Runs
from verification.mutants.changes import Change, changes_of

_LEFT_OUT = "src/thinwire/tools", "src/thinwire/integrations"
_NOT_COPIED = ".venv*", "build", "dist", ".hypothesis", ".*_cache"
_WHOLE = ["tests", "verification", "src/thinwire"]
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
_HANG = "no end in time"


class Trees:
    """Copies of a checkout: `original`, and `mutant`, which has one change."""

    def __init__(self, checkout: Path, limit: float, processes: int = 1) -> None:
        self.limit, self.processes = limit, processes
        self.folder = Path(tempfile.mkdtemp(prefix="mutants-"))
        self.mark = f"FOLDER_OF_MUTANTS={self.folder}"  # in the environment of all that is started
        self.original, self.mutant = self.folder / "original", self.folder / "mutant"
        shutil.copytree(checkout, self.original, symlinks=True, ignore=shutil.ignore_patterns(*_NOT_COPIED))

    def change(self, path: str, text: str) -> None:
        """Makes a mutant, whose other files keep their times, and so what is compiled of them."""
        shutil.rmtree(self.mutant, ignore_errors=True)
        shutil.copytree(self.original, self.mutant, symlinks=True)
        (self.mutant / path).write_text(text)

    def run(self, tree: Path, tests: list[str], but: list[str], times: int = 1) -> str:
        """Names the test that fails first, or says what else pytest ends with; "" if all pass."""
        command = [sys.executable, "-m", "pytest", "-xqrfE", "-p", "no:cacheprovider", "-m", "not exhaustive", *tests]
        command += [*(f"--deselect={name}" for name in but), *(("-n", str(self.processes)) * (self.processes > 1))]
        paths, mark = os.pathsep.join((str(tree / "src"), str(tree))), self.mark.partition("=")
        environment = os.environ | {"PYTHONPATH": paths, "GIT_OPTIONAL_LOCKS": "0", mark[0]: mark[2]}
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            process = subprocess.Popen(
                command, cwd=tree, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                status = process.wait(self.limit * times)
            except subprocess.TimeoutExpired:
                return _HANG
            finally:
                kill_marked(self.mark)
                process.wait()
            output.seek(0)
            told = output.read()
        failed = _FAILED.search(told)
        return "" if status in (0, 5) else failed[1] if failed else told.strip().rpartition("\n")[2]  # 5: none to run

    def judge(self, tests: list[str], but: list[str], times: int = 1) -> tuple[str, str]:
        """The verdict on the mutant, and the test that it is by."""
        unsure: list[str] = []
        while failed := self.run(self.mutant, tests, but + unsure, times):
            again, rest = ([failed], []) if failed.partition("::")[0].endswith(".py") else (tests, but + unsure)
            fails = failed == _HANG or self.run(self.mutant, again, rest, times)
            if fails and not self.run(self.original, again, rest, times):
                return "hang" if failed == _HANG else "caught", failed
            if again is tests or failed in unsure:
                return "no verdict", f"{failed}, without the change, too"
            unsure.append(failed)
        return "survived", ""

    def close(self) -> None:
        """Ends what runs, and removes all."""
        kill_marked(self.mark)
        shutil.rmtree(self.folder, ignore_errors=True)


def draw(sources: dict[str, str], seed: int) -> Iterator[tuple[Change, str]]:
    """Changes in random order, and the changed files; a room comes as often as it has lines."""
    rng, rooms, weights = random.Random(seed), dict[str, list[Change]](), Counter[str]()
    for path, source in sources.items():
        rooms.setdefault(path.partition("/")[0], []).extend(changes_of(path, source))
        weights[path.partition("/")[0]] += source.count("\n")
    while left := [room for room, changes in rooms.items() if changes]:
        changes = rooms[rng.choices(left, [weights[room] for room in left])[0]]
        change = changes.pop(rng.randrange(len(changes)))
        if (text := change.apply(sources[change.path])) is not None:
            yield change, text


def main() -> int:
    """Runs as many as were asked for; survivors are no failure, as people have to look at them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20, help="mutants to run")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="to begin new ones for")
    parser.add_argument("--only", default="", metavar="PATH", help="files whose paths begin so")
    parser.add_argument("--whole", action="store_true", help="run all tests of those that survive the module's")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for a module's tests; ten times for all")
    parser.add_argument("--processes", type=int, default=1, help="of pytest")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what came of them there, after each")
    parser.add_argument("--add", action="store_true", help="to what is there, and run none of those again")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that it, too, ends with everything removed
    named = {modules()[name].relative_to(ROOT).as_posix(): (name, tests) for name, tests in lines()}
    chosen = [path for path in named if path.startswith(options.only) and not path.startswith(_LEFT_OUT)]
    if not chosen:
        raise SystemExit(f"no module's path begins with {options.only!r}")
    runs = Runs("verification.mutants", options.json, options.add)
    records: list[dict[str, Any]] = runs.stored.get("mutants", [])
    known, ran, end = {record["change"] for record in records}, 0, time.monotonic() + options.seconds
    trees = Trees(ROOT, options.limit, options.processes)
    try:
        for change, text in draw({path: (trees.original / path).read_text() for path in chosen}, options.seed):
            if ran == options.count or time.monotonic() >= end:
                break
            if str(change) in known:
                continue
            start, (name, paths) = time.monotonic(), named[change.path]
            tests = [f"src/{name.replace('.', '/')}.py", *(path.relative_to(ROOT).as_posix() for path in paths)]
            trees.change(change.path, text)
            verdict, by = trees.judge(tests, [])
            if verdict == "survived" and options.whole:
                verdict, by = trees.judge(_WHOLE, tests, times=10)
            seconds, ran = round(time.monotonic() - start), ran + 1
            print(f"{change}: {'SURVIVED' if verdict == 'survived' else f'{verdict} {by}'}, {seconds} s", flush=True)
            records.append({"change": str(change), "verdict": verdict, "by": by, "seconds": seconds})
            runs.write({"mutants": ran}, survived=sum(r["verdict"] == "survived" for r in records), mutants=records)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    finally:
        trees.close()
    found = Counter((record["change"].partition("/")[0], record["verdict"]) for record in records)
    for room in sorted({room for room, _ in found}):
        print(f"{room}: {', '.join(f'{many} {verdict}' for (of, verdict), many in found.items() if of == room)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
