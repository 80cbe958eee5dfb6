"""Lines of Python in each part of this repository, beside what each may have.

    python -m verification.budgets            prints them, and fails if a part has more than its budget
    python -m verification.budgets --lower    also lowers budgets to what is there; none is ever raised by it

The budgets are in `budgets.json` beside this file. What needs more room takes it from elsewhere: raise one budget there
and lower another by as much.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
BUDGETS = Path(__file__).with_name("budgets.json")
#: Folders, those within others first: a file counts for the first that it lies in.
PARTS = {
    "triton_kernels/cpu": "triton_kernels/cpu",
    "triton_kernels": "triton_kernels",
    "comm": "comm",
    "fused": "fused",
    "moe": "moe",
    "tools": "src/thinwire/tools",
    "integrations": "src/thinwire/integrations",
    "top": "src/thinwire",
    "tests": "tests",
    "verification": "verification",
    "benchmarks": "benchmarks",
}
#: What makes up the package, and of it what runs in a call.
PACKAGE = ("triton_kernels/cpu", "triton_kernels", "comm", "fused", "moe", "tools", "integrations", "top")
CORE = tuple(part for part in PACKAGE if part not in ("tools", "integrations"))


def count_lines(root: Path = ROOT) -> dict[str, int]:
    """Lines of the Python files of each part."""
    counts, seen = dict.fromkeys(PARTS, 0), set()
    for part, folder in PARTS.items():
        for file in _python_files(root / folder):
            if file not in seen:
                seen.add(file)
                counts[part] += len(file.read_bytes().splitlines())
    return counts


def _python_files(folder: Path) -> Iterator[Path]:
    for entry in folder.iterdir():
        if entry.is_symlink():  # a room that has its own folder
            continue
        if entry.is_dir():
            yield from _python_files(entry)
        elif entry.suffix == ".py":
            yield entry


def over_budget(counts: dict[str, int], budgets: dict[str, int]) -> list[str]:
    """What is wrong, a line each."""
    wrong = [f"{part} has {lines} lines, and may have {budgets.get(part, 0)}" for part, lines in counts.items()
             if lines > budgets.get(part, 0)]  # fmt: skip
    return wrong + [f"{part} has a budget, and is no part" for part in budgets if part not in counts]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lower", action="store_true", help="lower budgets to what is there")
    options = parser.parse_args()
    counts, budgets = count_lines(), json.loads(BUDGETS.read_text())
    for part, lines in counts.items():
        print(f"{part:20s} {lines:7,} of {budgets.get(part, 0):7,}")
    for name, parts in ("core", CORE), ("package", PACKAGE), ("tests, verification", ("tests", "verification")):
        print(
            f"{name:20s} {sum(counts[part] for part in parts):7,} of {sum(budgets.get(part, 0) for part in parts):7,}"
        )
    if options.lower:
        lower = {part: min(lines, budgets.get(part, lines)) for part, lines in counts.items()}
        BUDGETS.write_text(json.dumps(lower, indent=2) + "\n")
    wrong = over_budget(counts, budgets)
    print(*wrong, sep="\n", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
