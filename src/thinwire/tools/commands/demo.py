"""`thinwire demo`: its options, which are checked before torch is imported."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from importlib import resources
from pathlib import Path
from typing import Any

from thinwire.errors import ArgumentError
from thinwire.tools.link import bits_per_second, enter_user_namespace
from thinwire.tools.progress import Progress
from thinwire.wire import WireFormat

SUMMARY = "run a trained model, expert-parallel on CPU ranks, in several wire formats"
DESCRIPTION = """\
Splits a small trained mixture-of-experts model over CPU ranks, scores a text in several wire
formats, and prints what each of them costs and saves. The model and the text come with the
package.

With --link the ranks are two hosts, joined by a link of that rate, and the time of a round is
shown for each format. The hosts are network namespaces of this machine, which need Linux with
iproute2 and util-linux, and root or a system that grants users such namespaces.

  thinwire demo
  thinwire demo --link 1Gbit"""

#: What a rank needs beside what all share, measured; and from how many ranks a core on it gets slow.
_MIB_OF_A_RANK = 256
_RANKS_OF_A_CORE = 4

_RANKS, _HOSTS = 4, 2
_WIRES, _LINK_WIRES = "none,int8+h64,int8,int4+h64", "none,int8,int8+h64,int6+h64,int4"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    ranks = f"The experts are split over this many processes (default {_RANKS}; with --link {_HOSTS}, one a host)."
    parser.add_argument("--ranks", type=int, metavar="N", help=ranks)
    wires = f"These wire formats are compared (default {_WIRES}; with --link {_LINK_WIRES})."
    parser.add_argument("--wire", metavar="WIRE,...", help=wires)
    link = "Put a link of this rate between two hosts: a number and Mbit or Gbit, such as 1Gbit."
    parser.add_argument("--link", metavar="RATE", help=link)
    text = "Score this file instead of the held-out text that comes with the package."
    parser.add_argument("--text", type=Path, metavar="FILE", help=text)
    parser.add_argument("--json", type=Path, metavar="FILE", help="Also write the figures to this file.")
    timeout = "End everything after this many seconds (default 600)."
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help=timeout)


def run(options: argparse.Namespace) -> int:
    """Prints the table, or with --link the chart."""
    began, model = time.monotonic(), _model_config()
    rate = None if options.link is None else _rate(options.link)
    ranks = options.ranks if options.ranks is not None else _RANKS if rate is None else _HOSTS
    if rate is not None and ranks != _HOSTS:
        raise ArgumentError(f"--ranks {ranks}: --link joins {_HOSTS} hosts of one rank each; leave --ranks out")
    _check_ranks(ranks, int(model["num_experts"]))
    wires = [wire.strip() for wire in (options.wire or (_WIRES if rate is None else _LINK_WIRES)).split(",")]
    for wire in wires:
        WireFormat.parse(wire)
    if not (math.isfinite(options.timeout) and 0 < options.timeout <= 1e9):
        raise ArgumentError(f"--timeout {options.timeout:g}: a number of seconds above 0, at most 1e9, is needed")
    text = _text(options.text)
    if options.json is not None:
        try:
            options.json.open("a").close()  # a file that cannot be written is better known now than at the end
        except OSError as error:
            raise ArgumentError(f"--json {options.json}: {error.strerror}") from error
    if rate is not None:
        # Also a user who is not root may make namespaces, on most systems: this command then runs anew in one.
        enter_user_namespace([sys.executable, "-m", "thinwire", *options.arguments])
    where = f"over {ranks} CPU ranks" if rate is None else f"on two hosts, joined by {options.link}/s"
    print(
        f"A byte-level MoE transformer ({model['num_layers']} MoE layers, {model['num_experts']} experts, "
        f"top-{model['top_k']}, hidden {model['hidden_size']}, {'float32' if rate is None else 'bfloat16'})\n"
        f"{where}, scoring {len(text):,} bytes of {'held-out text' if options.text is None else options.text}:\n",
        flush=True,
    )
    if rate is None:
        _show(options, ranks, wires, text, began)
    else:
        _show_on_link(options, rate, wires, text, began)
    return 0


def _show(options: argparse.Namespace, ranks: int, wires: list[str], text: bytes, began: float) -> None:
    with Progress(sys.stderr, began) as progress:
        progress.stage("loading torch ...")
        from thinwire.tools.demo import score_text, show_scores, write_scores

        exact_bits, scores = score_text(ranks, wires, text, options.timeout, progress.report)
    show_scores(exact_bits, scores)
    if options.json is not None:
        write_scores(options.json, f"--ranks {ranks}", options.text, text, exact_bits, scores)


def _show_on_link(options: argparse.Namespace, rate: str, wires: list[str], text: bytes, began: float) -> None:
    with Progress(sys.stderr, began) as progress:
        progress.stage("loading torch ...")
        from thinwire.tools.demo import write_scores
        from thinwire.tools.link_demo import score_on_link, show_link_scores

        exact_first = list(dict.fromkeys(["none", *wires]))
        scores = score_on_link(rate, exact_first, text, options.timeout, progress.report)
    show_link_scores(options.link, scores)
    if options.json is not None:
        write_scores(options.json, f"--link {options.link}", options.text, text, None, scores)


def _rate(given: str) -> str:
    """As `tc` spells it."""
    try:
        bits_per_second(given.lower())
    except ValueError as error:
        raise ArgumentError(f"--link {given}: a number and Mbit or Gbit is needed, such as 1Gbit") from error
    return given.lower()


def _text(file: Path | None) -> bytes:
    packaged = resources.files("thinwire.moe") / "tiny_moe" / "heldout.txt"
    try:
        text = packaged.read_bytes() if file is None else file.read_bytes()
    except OSError as error:
        raise ArgumentError(f"--text {file}: {error.strerror}") from error
    if len(text) < 2:
        raise ArgumentError(f"--text {file}: a text of at least 2 bytes is needed, this has {len(text)}")
    return text


def _check_ranks(ranks: int, experts: int) -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if ranks < 1:
        raise ArgumentError(f"--ranks {ranks}: at least 1 is needed")
    if ranks > experts:
        raise ArgumentError(f"--ranks {ranks}: the model has {experts} experts, and every rank needs at least one")
    available = _available_mib()
    if available is not None and ranks * _MIB_OF_A_RANK > available:
        raise ArgumentError(
            f"--ranks {ranks}: they need about {ranks * _MIB_OF_A_RANK} MiB of memory; {available} MiB are available"
        )
    if ranks > _RANKS_OF_A_CORE * cores:
        warning = f"{ranks} ranks share {cores} cores: they take turns, and this takes long"
        print(f"thinwire: warning: {warning}", file=sys.stderr)


def _model_config() -> dict[str, Any]:
    from safetensors import safe_open

    with resources.as_file(resources.files("thinwire.moe") / "tiny_moe" / "tiny_moe.safetensors") as path:
        with safe_open(path, framework="numpy") as file:
            config: dict[str, Any] = json.loads(file.metadata()["config"])
            return config


def _available_mib() -> int | None:
    """Memory that processes may still take; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return None
