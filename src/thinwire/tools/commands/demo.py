"""`thinwire demo`: its options, which are checked before torch is imported, and what it prints."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.errors import ArgumentError
from thinwire.files import write_file
from thinwire.tools.progress import Progress
from thinwire.version import VERSION
from thinwire.wire import WireFormat

if TYPE_CHECKING:
    from thinwire.tools.demo.tiny_moe import WireScore

SUMMARY = "run a trained model, expert-parallel on CPU ranks, in several wire formats"
DESCRIPTION = """\
Splits a small trained mixture-of-experts model over CPU ranks, scores a text in several wire
formats, and prints what each of them costs and saves. The model and the text come with the
package.

  thinwire demo
  thinwire demo --ranks 2 --wire none,int8"""

#: The packaged model's; every rank needs one at least.
_EXPERTS = 8

_EXPLAINED = """
max |dlogit| is the most that any logit differs from the unsharded model's.
Bytes are per token and MoE layer, of rows that change ranks; dispatch carries expert ids and router
weights besides. Errors are relative L2 against the same round sent exactly, over the first 2 steps.
Seconds are of this machine: all ranks share its {cores} cores and no network is crossed.

In your own model:

    import thinwire as tw

    comm = tw.init()                                    # torchrun, mpirun, Slurm, or a single process
    ep = tw.ExpertParallel(comm, num_experts, top_k, hidden_size, max_tokens)

    d = ep.dispatch(x, topk_ids, topk_weights)          # x [tokens, hidden]; in every MoE layer
    y = ep.combine(experts(d.tokens, d.expert_counts), d)

docs/quick-start.md has a whole layer.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    ranks = "The experts are split over this many processes (default 4)."
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help=ranks)
    wires, compared = "none,int8+h64,int8,int4+h64", "These wire formats are compared"
    parser.add_argument("--wire", default=wires, metavar="WIRE,...", help=f"{compared} (default {wires}).")
    text = "Score this file instead of the held-out text that comes with the package."
    parser.add_argument("--text", type=Path, metavar="FILE", help=text)
    parser.add_argument("--json", type=Path, metavar="FILE", help="Also write the figures to this file.")
    timeout = "End everything after this many seconds (default 600)."
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help=timeout)


def run(options: argparse.Namespace) -> int:
    """Prints the table."""
    began, ranks = time.monotonic(), options.ranks
    if not 1 <= ranks <= _EXPERTS:
        raise ArgumentError(f"--ranks {ranks}: 1 to {_EXPERTS} are accepted, as every rank needs one of the experts")
    wires = [str(WireFormat.parse(wire.strip())) for wire in options.wire.split(",")]
    if not (math.isfinite(options.timeout) and 0 < options.timeout <= 1e9):
        raise ArgumentError(f"--timeout {options.timeout:g}: a number of seconds above 0, at most 1e9, is needed")
    text = _text(options.text)
    if options.json is not None:
        try:
            options.json.open("a").close()  # a file that cannot be written is better known now than at the end
        except OSError as error:
            raise ArgumentError(f"--json {options.json}: {error.strerror}") from error
    print(
        f"A byte-level MoE transformer (3 MoE layers, {_EXPERTS} experts, top-2, hidden 256, float32)\n"
        f"over {ranks} CPU ranks, scoring {len(text):,} bytes of {options.text or 'held-out text'}:\n",
        flush=True,
    )
    with Progress(sys.stderr, began) as progress:
        progress.stage("loading torch ...")
        import torch

        from thinwire.fused.backend import select_backend
        from thinwire.testing import run_ranks
        from thinwire.tools.demo.tiny_moe import score_text

        for wire in wires:
            select_backend(torch.device("cpu"), WireFormat.parse(wire))  # refuses where no kernel can run
        progress.stage(f"starting {ranks} rank{'s' if ranks > 1 else ''} ...")
        exact_bits, scores = run_ranks(score_text, ranks, text, wires, progress.report, timeout=options.timeout)[0]
    print(format_table(exact_bits, scores), _EXPLAINED.format(cores=os.cpu_count()), sep="\n")
    if options.json is not None:
        figures = {
            "demo": f"thinwire demo --ranks {ranks} --wire {','.join(wires)}",
            "text": "packaged held-out text" if options.text is None else str(options.text),
            "thinwire": VERSION,
            "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__},
            "text_bytes": len(text),
            "unsharded_bits_per_byte": exact_bits,
            "scores": [asdict(score) for score in scores],
        }
        write_file(options.json, f"{json.dumps(figures, indent=2)}\n".encode())
    return 0


def format_table(exact_bits: float, scores: list[WireScore]) -> str:
    """One line a wire format, under one of the unsharded model."""
    lines = [
        "                                      ------ dispatch ------   ------- combine ------",
        "wire        bits/byte  max |dlogit|   logical    wire  error   logical    wire  error   seconds",
        f"{'unsharded':10}{exact_bits:11.4f}",
    ]
    for s in scores:
        lines.append(
            f"{s.wire:10}{s.bits_per_byte:11.4f}{s.largest_logit_difference:14.1e}"
            f"{s.dispatch_logical_bytes:10.0f}{s.dispatch_wire_bytes:8.0f}{s.dispatch_error:7.4f}"
            f"{s.combine_logical_bytes:10.0f}{s.combine_wire_bytes:8.0f}{s.combine_error:7.4f}{s.seconds:10.2f}"
        )
    return "\n".join(lines)


def _text(file: Path | None) -> bytes:
    try:
        text = (resources.files("thinwire.tools.demo") / "heldout.txt" if file is None else file).read_bytes()
    except OSError as error:
        raise ArgumentError(f"--text {file}: {error.strerror}") from error
    if len(text) < 2:
        raise ArgumentError(f"--text {file}: a text of at least 2 bytes is needed, this has {len(text)}")
    return text
