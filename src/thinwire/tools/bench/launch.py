"""Finds the ranks that a launcher started, or starts some, and writes what they found."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from thinwire._rank_thread import require_queues
from thinwire.comm.launch.bootstrap import init
from thinwire.comm.launch.launchers import LAUNCHERS, discover
from thinwire.errors import ArgumentError
from thinwire.files import open_to_write, write_file
from thinwire.testing import run_ranks
from thinwire.tools.bench.machine import commit, in_words, machine
from thinwire.tools.bench.options import DEFAULT_RANKS, ROUND, Settings
from thinwire.tools.bench.results import FORMAT, VERSION, parse_results
from thinwire.tools.bench.session import THREADS, Results, run_session
from thinwire.tools.bench.traffic import expert_ids, read_matrix


def launcher_of(environ: Mapping[str, str]) -> str | None:
    """Which launcher started this process as one of its ranks, if one did."""
    return next((name for name, rank, size, _ in LAUNCHERS if rank in environ or size in environ), None)


def run_bench(settings: Settings, command: str, json_file: Path | None, plot_folder: Path | None) -> int:
    """Runs everything, and prints and writes what was found; 1 if a result was wrong, or nothing was measured.

    Args:
        settings: what is to be measured.
        command: as it was typed.
        json_file: where all figures are written.
        plot_folder: where they are drawn.

    Raises:
        ArgumentError: more or fewer ranks than the launcher's, or no GPU.
        OSError: a file that cannot be written.
    """
    device = settings.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("--device cuda needs a GPU, and torch.cuda.is_available() is False; accepted here: cpu")
    launcher = launcher_of(os.environ)
    first = True
    if launcher is not None:
        info = discover(os.environ)
        if settings.ranks not in (None, info.size):
            raise ArgumentError(f"--ranks {settings.ranks}: {info.source} says {info.size}; leave it out")
        first = info.rank == 0
    ranks = settings.ranks or DEFAULT_RANKS if launcher is None else info.size
    _check_matrices(settings, ranks)
    if first:
        if json_file is not None:
            json_file.parent.mkdir(parents=True, exist_ok=True)
            os.close(open_to_write(json_file))  # a file that cannot be written is better known now than at the end
        if plot_folder is not None:
            plot_folder.mkdir(parents=True, exist_ok=True)
    if launcher is not None:
        with init(device=device, timeout=settings.timeout) as comm:
            described = _described(comm.device)
            if first:
                _print_head(described, ranks, launcher)
            results = run_session(comm, settings)
    else:
        # Ranks that have no GPU of their own share the first one.
        mode = "thread" if device == "cuda" and torch.cuda.device_count() < ranks else "process"
        if mode == "thread":
            require_queues(ranks)  # before CUDA is asked what it runs on
        launcher = "processes of one host" if mode == "process" else "threads of one process"
        described = _described(torch.device(device))
        _print_head(described, ranks, launcher)
        results = run_ranks(run_session, ranks, settings, mode=mode, device=device, timeout=settings.timeout)[0]
    if first:
        content = content_of(settings, results, described, ranks, launcher, command)
        print_end(results)
        text = json.dumps(content, indent=1, allow_nan=False) + "\n"
        if json_file is not None:
            write_file(json_file, text.encode())
        if plot_folder is not None:
            from thinwire.tools.bench.report import write_reports

            for file in write_reports([parse_results(json.loads(text), "results")], plot_folder):
                print(f"# wrote {file}")
    return 1 if results.wrong or not results.figures else 0


def _check_matrices(settings: Settings, ranks: int) -> None:
    """Raises what is wrong with a traffic matrix before any rank is started."""
    for routing in settings.routings:
        if routing.kind == "matrix":
            read_matrix(routing, ranks)
            for tokens in settings.tokens if set(settings.operations) & set(ROUND) else ():
                expert_ids(routing, tokens, settings.experts, settings.top_k, ranks)


def _described(device: torch.device) -> dict[str, Any]:
    return machine(device) | ({"threads": THREADS} if device.type == "cpu" else {})


def _print_head(described: dict[str, Any], ranks: int, launched: str) -> None:
    print(f"# {ranks} ranks, {launched}\n# {in_words(described)}", flush=True)


def print_end(results: Results) -> None:
    """What stands under the tables."""
    print()
    for entry in results.skipped:
        where = ", ".join(str(entry[key]) for key in ("operation", "wire", "transport") if entry.get(key))
        print(f"# skipped: {entry['implementation']}{f' ({where})' if where else ''}: {entry['reason']}")
    if results.copy_bandwidth is not None:
        print(f"# copy: {results.copy_bandwidth / 1e9:.2f} GB/s read and written by a rank while all copy")
    if not results.figures:
        print("# nothing was measured")
    wrong = sorted({f"{line['operation']} {line['implementation']}" for line in results.figures if line["wrong"]})
    print(f"# wrong: {results.wrong} elements" + (f", of {', '.join(wrong)}" if wrong else ""))


def content_of(
    settings: Settings, results: Results, described: dict[str, Any], ranks: int, launched: str, command: str
) -> dict[str, Any]:
    """What is written to JSON: times in seconds, sizes in bytes, bandwidths in bytes a second."""
    routings = list(map(str, settings.routings))
    return {
        "format": FORMAT,
        "version": VERSION,
        "command": command,
        "commit": commit(),
        "machine": described,
        "ranks": ranks,
        "hosts": results.hosts,
        "launched": launched,
        "settings": asdict(settings) | {"routings": routings, "routing": ",".join(routings)},
        "figures": results.figures,
        "skipped": results.skipped,
        "traffic": results.traffic,
        "expert_load": results.expert_load,
        "copy_bandwidth": results.copy_bandwidth,
        "link_bandwidth": settings.link,
    }
