"""`thinwire bench` between two hosts joined by a link of 1 and of 10 Gbit/s.

    sudo .venv/bin/python -m benchmarks.bench_on_link all_reduce -b 32M -e 32M --json all_reduce_link.json

Takes the options of `thinwire bench`, and --rate. The hosts are two network namespaces of this machine, with one rank
each (see `benchmarks/link.py`), so the transport is staged. With --json each rate has its own file, with the rate
in its name.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from benchmarks import link, timing
from thinwire.comm import Communicator
from thinwire.tools.bench.options import Settings
from thinwire.tools.bench.results import in_words
from thinwire.tools.bench.session import Results, content_of, print_end, run_session
from thinwire.tools.commands import bench


def measure(comm: Communicator, arguments: Sequence[str]) -> dict[str, Any]:
    """One rank's part."""
    return asdict(run_session(comm, settings_of(parsed(arguments))))


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of `thinwire bench`, a call for a sample, and --rate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    bench.add_arguments(parser)
    parser.add_argument("--rate", nargs="+", default=["1gbit", "10gbit"], help="bits a second each way")
    parser.set_defaults(transport="staged", sample_seconds=0.0)
    return parser.parse_args(arguments)


def settings_of(options: argparse.Namespace) -> Settings:
    """Of two ranks on CPUs."""
    return replace(Settings.of(options), ranks=2, device="cpu")


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parsed(given)
    settings, described = settings_of(options), timing.machine(timing.check_device("cpu"))
    described["congestion_control"] = link.congestion_control()
    wrong = 0
    for rate in options.rate:
        print(f"# 2 ranks, two hosts, {rate}\n# {in_words(described)}", flush=True)
        try:
            found = link.run_on_two_hosts(
                "benchmarks.bench_on_link:measure", {"arguments": given}, rate=rate, timeout=settings.timeout
            )
        except link.LinkUnavailable as reason:
            print(f"skipped: {reason}")
            return 0
        results = Results(**found[0] | {"hosts": 2})  # which have one name
        print_end(results)
        wrong += results.wrong
        if options.json:
            command = shlex.join(["python", "-m", "benchmarks.bench_on_link", *given])
            content = content_of(settings, described, 2, f"two hosts joined by {rate}", command, results)
            file = options.json.with_stem(f"{options.json.stem}_{rate}")
            file.write_text(json.dumps(content, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
