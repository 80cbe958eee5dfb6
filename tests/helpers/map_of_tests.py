"""Which tests test which module: `python -m tests.helpers.map_of_tests` writes tests/MAP.md anew."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "tests" / "MAP.md"
_ROOMS = ("comm", "fused", "moe", "triton_kernels")
_MOST = 4  # test files that a line names
#: Modules that only the command imports, which their tests run.
_BY_COMMAND = {
    "thinwire.tools.bench.plots": ("tests/test_commands.py",),
    "thinwire.tools.commands.bench": ("tests/test_commands.py",),
    "thinwire.tools.commands.sizes": ("tests/planning/test_plan.py", "tests/test_commands.py"),
    "thinwire.tools.planning.report": ("tests/planning/test_plan.py",),
    "thinwire.tools.warmup.compile": ("tests/warmup/test_warmup.py",),
}
_HEAD = """# Which tests test which module

For each module: the test files with its name; otherwise those that import from it, most names first; otherwise those
that import from modules that do. Every module's doctests run as well. `python -m tests.helpers.map_of_tests` writes
this page.

| module | tests |
|---|---|
"""


def modules() -> dict[str, Path]:
    """Every module of the package that has code, by its dotted name."""
    found = {}
    for room in (*_ROOMS, "src/thinwire"):
        for path in sorted((ROOT / room).rglob("*.py")):
            dotted = ".".join(path.relative_to(ROOT).with_suffix("").parts).removeprefix("src.")
            name = dotted.removeprefix("thinwire.") if room.startswith("src") else dotted
            if path.name not in ("__init__.py", "__main__.py") and not any(
                part in _ROOMS for part in path.relative_to(ROOT / room).parts if room.startswith("src")
            ):
                found[f"thinwire.{name}"] = path
    return found


def imports(path: Path) -> Counter[str]:
    """The modules that a file imports, and how many names of each."""
    found: Counter[str] = Counter()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found[node.module] += len(node.names)
            found.update(f"{node.module}.{name.name}" for name in node.names)
    return found


def _test_files() -> dict[Path, Counter[str]]:
    paths = (path for folder in ("tests", "verification") for path in sorted((ROOT / folder).rglob("test_*.py")))
    return {path: imports(path) for path in paths if path.parent.name != "helpers"}


def lines() -> Iterator[tuple[str, list[Path]]]:
    """Each module with the test files that are named for it."""
    known, tests = modules(), _test_files()
    importers: dict[str, list[str]] = {module: [] for module in known}
    for module, path in known.items():
        for imported in imports(path):
            if imported in importers:
                importers[imported].append(module)
    for module in known:
        name, room = module.rpartition(".")[2], module.split(".")[1]
        alike = [path for path in tests if path.stem in (f"test_{name}", f"test_{name.strip('_')}")]
        # One in another room may be another module's.
        named = [path for path in alike if room in path.parts]
        named = named or [path for path in alike if tests[path][module] or path.parent == ROOT / "tests"]
        near = [module, *importers[module]]
        far = [above for one in importers[module] for above in importers[one]]
        by_command = [ROOT / path for path in _BY_COMMAND.get(module, ())]
        chosen = by_command or named or _by_names(tests, near[:1]) or _by_names(tests, near) or _by_names(tests, far)
        yield module, (chosen or alike)[:_MOST]


def _by_names(tests: dict[Path, Counter[str]], of: list[str]) -> list[Path]:
    counts = {path: sum(found[module] for module in of) for path, found in tests.items()}
    return sorted((path for path in tests if counts[path]), key=lambda path: (-counts[path], str(path)))


def page() -> str:
    """MAP.md as it should be."""
    rows = (
        f"| `{module}` | {', '.join(f'`{path.relative_to(ROOT)}`' for path in chosen)} |" for module, chosen in lines()
    )
    return _HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
