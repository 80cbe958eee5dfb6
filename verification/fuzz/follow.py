"""The process of one fuzz target: `python -m verification.fuzz.follow TARGET`, and libFuzzer's options.

Nothing of thinwire may be imported before it is prepared to be followed in its steps.
"""

from __future__ import annotations

import importlib.util
import random
import resource
import sys
from pathlib import Path

import numba  # noqa: F401
import torch  # noqa: F401

_MOST_MEMORY = 1 << 30  # bytes, beyond what the process has
_FOLLOWED = ["thinwire", "ipaddress", "json"]  # whole packages: no part of one can be named


def _compiled() -> list[str]:
    """The modules that numba compiles, which it cannot when they are prepared to be followed."""
    spec = importlib.util.find_spec("thinwire")
    assert spec is not None and spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0])
    files = (root / "triton_kernels").rglob("*.py")
    return [".".join(("thinwire", *file.relative_to(root).with_suffix("").parts)) for file in files]


def main() -> None:
    import atheris  # here, as pytest imports all modules of tests, and may do so without it

    if early := [name for name in sys.modules if name.startswith("thinwire.")]:
        raise RuntimeError(f"{', '.join(early)} cannot be followed any more: imported too early")
    with atheris.instrument_imports(include=_FOLLOWED, exclude=_compiled()):
        from verification.fuzz.targets import TARGETS

    run, change = TARGETS[sys.argv[1]]

    def once(data: bytes) -> None:
        run(data)

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if change is None or rng.random() < 0.3:
            return bytes(atheris.Mutate(data, most))
        return change(rng, data)[:most]

    atheris.Setup([sys.argv[0], *sys.argv[2:]], once, custom_mutator=mutate)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _MOST_MEMORY, resource.RLIM_INFINITY))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
