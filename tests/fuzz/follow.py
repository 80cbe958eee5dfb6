"""The process of one fuzz target: `python -m tests.fuzz.follow TARGET`, and libFuzzer's options.

Nothing of thinwire may be imported before it is prepared to be followed in its steps.
"""

from __future__ import annotations

import random
import resource
import sys
from pathlib import Path

import numba  # noqa: F401
import torch  # noqa: F401

_MOST_MEMORY = 1 << 30  # bytes, beyond what the process has
# The parsers, and nothing that numba compiles.
_FOLLOWED = [
    "thinwire.wire", "thinwire.flight", "thinwire.flight_report", "thinwire.comm.launchers", "thinwire.comm.meeting",
    "thinwire.comm.plain", "thinwire.comm.rank_table", "thinwire.comm.standby", "thinwire.fused.codec",
    "thinwire.fused.size_switch", "thinwire.moe.checkpoint", "ipaddress", "json.decoder",
]  # fmt: skip
_NOT_FOLLOWED = ["thinwire.triton_kernels", "thinwire.fused.transport"]


def main() -> None:
    import atheris  # here, as pytest imports all modules of tests, and may do so without it

    early = [name for name in sys.modules if name in _FOLLOWED and name.startswith("thinwire")]
    if early:
        raise RuntimeError(f"{', '.join(early)} cannot be followed any more: imported too early")
    with atheris.instrument_imports(include=_FOLLOWED, exclude=_NOT_FOLLOWED):
        from tests.fuzz.targets import TARGETS

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
