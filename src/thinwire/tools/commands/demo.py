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
from thinwire.tools.progress import Progress
from thinwire.wire import WireFormat

SUMMARY = "run a trained model, expert-parallel on CPU ranks"
DESCRIPTION = """\
Splits a small trained mixture-of-experts model over CPU ranks, scores a text in several wire formats, and prints the
cost and the savings of each. The model and the text come with the package."""

#: What a rank needs beside what all share, measured; and from how many ranks a core on it gets slow.
_MIB_OF_A_RANK = 256
_RANKS_OF_A_CORE = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--ranks", type=int, default=4, help="processes to split the experts over (default 4)")
    formats = "none,int8,int8:row,int4"
    parser.add_argument("--wire", default=formats, help=f"wire formats, separated by commas (default {formats})")
    parser.add_argument("--text", type=Path, help="a text file to score instead of the packaged held-out text")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds after which everything is ended (600)")


def run(options: argparse.Namespace) -> int:
    """Prints the table."""
    began, model = time.monotonic(), _model_config()
    _check_ranks(options.ranks, int(model["num_experts"]))
    wires = [wire.strip() for wire in options.wire.split(",")]
    for wire in wires:
        WireFormat.parse(wire)
    if not (math.isfinite(options.timeout) and 0 < options.timeout <= 1e9):
        raise ArgumentError(f"--timeout {options.timeout:g}: a number of seconds above 0, at most 1e9, is needed")
    packaged = resources.files("thinwire.moe") / "tiny_moe" / "heldout.txt"
    text = packaged.read_bytes() if options.text is None else options.text.read_bytes()
    if len(text) < 2:
        raise ArgumentError(f"--text {options.text}: a text of at least 2 bytes is needed, this has {len(text)}")
    if options.json is not None:
        options.json.open("a").close()  # a file that cannot be written is better known now than at the end
    print(
        f"A byte-level MoE transformer ({model['num_layers']} MoE layers, {model['num_experts']} experts, "
        f"top-{model['top_k']}, hidden {model['hidden_size']}, float32)\nover {options.ranks} CPU ranks, scoring "
        f"{len(text):,} bytes of {'held-out text' if options.text is None else options.text}:\n",
        flush=True,
    )
    with Progress(sys.stderr, began) as progress:
        progress.stage("loading torch ...")
        from thinwire.tools.demo import score_text, show_scores, write_scores

        scored = score_text(options.ranks, wires, text, options.timeout, progress.report)
    show_scores(*scored)
    if options.json is not None:
        title = "packaged held-out text" if options.text is None else str(options.text)
        write_scores(options.json, options.ranks, title, text, *scored)
    return 0


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
