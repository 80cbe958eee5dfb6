"""The looks that need no ranks: `python -m thinwire.tools.doctor.probe NAME` prints a line for each finding."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict

from thinwire.tools.doctor import gpus, host, software
from thinwire.tools.doctor.finding import Finding

PROBES: dict[str, tuple[Callable[[], Iterator[Finding]], ...]] = {
    "software": (software.versions, software.settings, software.caches),
    "host": (host.processors, host.memory, host.limits, host.shared_memory),
    "gpus": (gpus.devices, gpus.peers, gpus.topology),
}


def tell(probe: Callable[[], Iterator[Finding]]) -> None:
    """Prints what a probe finds; what it raises is a finding as well."""
    try:
        for finding in probe():
            print(json.dumps(asdict(finding)), flush=True)
    except Exception as error:
        text = f"could not be looked at: {type(error).__name__}: {error}"
        advice = "see whether the command that looks works by itself; if so, please report this"
        print(json.dumps(asdict(Finding("problem", probe.__name__, text, advice))), flush=True)


if __name__ == "__main__":
    for probe in PROBES[sys.argv[1]]:
        tell(probe)
