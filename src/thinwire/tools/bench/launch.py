"""Finds the ranks that a launcher started, or starts some, and writes what they found."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from thinwire._rank_thread import require_queues, set_queues
from thinwire.comm.launch.bootstrap import init
from thinwire.comm.launch.launchers import LAUNCHERS, discover
from thinwire.errors import ArgumentError
from thinwire.files import open_to_write, replace_file, write_file
from thinwire.testing import run_ranks
from thinwire.tools.bench.machine import commit, in_words, machine
from thinwire.tools.bench.options import DEFAULT_RANKS, ROUND, Settings
from thinwire.tools.bench.results import FORMAT, VERSION, figure_of, parse_results
from thinwire.tools.bench.session import THREADS, Results, run_session
from thinwire.tools.bench.summary import summarise
from thinwire.tools.bench.traffic import expert_ids, read_matrix
from thinwire.tools.bench.units import name_text
from thinwire.tools.progress import SILENT, Progress, print_over

_COLUMNS = 110  # of all lines, unless --wide is given


def launcher_of(environ: Mapping[str, str]) -> str | None:
    """Which launcher started this process as one of its ranks, if one did."""
    return next((one.name for one in LAUNCHERS if one.rank in environ or one.size in environ), None)


def run_bench(settings: Settings, command: str, json_file: Path | None, plot_folder: Path | None) -> int:
    """Runs everything, and prints and writes what was found; 1 if a result was wrong, or nothing was measured.

    Args:
        settings: what is to be measured.
        command: as it was typed.
        json_file: where all figures are written.
        plot_folder: where they are drawn.

    Raises:
        ArgumentError: more or fewer ranks than the launcher's, no GPU, or a file or folder that cannot be written.
    """
    json_file = json_file and json_file.absolute()  # for the process of rank 0
    launcher = launcher_of(os.environ)
    device, mode = _placed(settings, launcher)
    first = True
    if launcher is not None:
        info = discover(os.environ)
        if settings.ranks not in (None, info.size):
            raise ArgumentError(f"--ranks {settings.ranks}: {info.source} says {info.size}; leave it out")
        first = info.rank == 0
    ranks = settings.ranks or DEFAULT_RANKS if launcher is None else info.size
    _check_matrices(settings, ranks)
    if first and json_file is not None:  # a file that cannot be written is better known now than at the end
        _require("--json", json_file.parent, lambda: json_file.parent.mkdir(parents=True, exist_ok=True))
        _require("--json", json_file, lambda: os.close(open_to_write(json_file)))
    if first and plot_folder is not None:
        _require("--plot", plot_folder, lambda: plot_folder.mkdir(parents=True, exist_ok=True))
    with Progress(sys.stderr, time.monotonic()) if first else contextlib.nullcontext() as progress:
        report = SILENT if progress is None else progress.report
        report.stage("starting")
        if launcher is not None:
            with init(device=device, timeout=settings.timeout) as comm:
                described = _described(comm.device)
                if first:
                    _print_head(described, ranks, launcher)
                content = partial(content_of, settings, described, ranks, launcher, command)
                results = run_session(comm, settings, report, partial(_keep, json_file, content))
        else:
            if mode == "thread":
                require_queues(ranks)
            launcher = "processes of one host" if mode == "process" else "threads of one process"
            described = _described(torch.device(device))
            _print_head(described, ranks, launcher)
            content = partial(content_of, settings, described, ranks, launcher, command)
            shared = settings, report, partial(_keep, json_file, content)
            results = run_ranks(run_session, ranks, *shared, mode=mode, device=device, timeout=settings.timeout)[0]
    if first:
        text = _text(content(results))
        print_end(results)
        if json_file is not None:
            (replace_file if json_file.is_file() else write_file)(json_file, text.encode())
        if plot_folder is not None:
            from thinwire.tools.bench.report import write_reports

            for file in write_reports([parse_results(json.loads(text), "results")], plot_folder):
                print(f"# wrote {file}")
    return 1 if results.wrong or not results.figures else 0


def _placed(settings: Settings, launcher: str | None) -> tuple[str, str]:
    """Where ranks run, and as what: those that are started here without a GPU each are threads that share the first.

    Raises:
        ArgumentError: there is no GPU.
    """
    if settings.device == "cpu":
        return "cpu", "process"
    set_here = {} if launcher is not None else set_queues()  # before CUDA is asked anything
    found = torch.cuda.is_available()
    shared = launcher is None and found and torch.cuda.device_count() < (settings.ranks or DEFAULT_RANKS)
    if not shared:
        for variable in set_here:
            del os.environ[variable]
    if settings.device == "cuda" and not found:
        raise ArgumentError("--device cuda needs a GPU, and torch.cuda.is_available() is False; accepted here: cpu")
    return "cuda" if found else "cpu", "thread" if shared else "process"


def _keep(file: Path | None, content: Callable[[Results], dict[str, Any]], results: Results) -> None:
    """Writes what has been found so far; what is no regular file, such as a pipe, gets all of it at the end alone."""
    if file is not None and file.is_file():
        replace_file(file, _text(content(results)).encode())


def _text(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def _require(option: str, path: Path, use: Callable[[], object]) -> None:
    """Raises ArgumentError, naming the option, if a path cannot be used."""
    try:
        use()
    except OSError as error:
        raise ArgumentError(f"{option} {path}: {error.strerror or error}; name a path that can be written to") from None


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
    _comment(f"{ranks} ranks, {launched}")
    _comment(in_words(described))


def _comment(text: str) -> None:
    for line in textwrap.wrap(f"# {text}", _COLUMNS, subsequent_indent="#   "):
        print_over(line)


def print_end(results: Results) -> None:
    """What stands under the tables."""
    print()
    for entry in results.skipped:
        where = ", ".join(str(entry[key]) for key in ("operation", "wire", "transport") if entry.get(key))
        _comment(f"skipped: {entry['implementation']}{f' ({where})' if where else ''}: {entry['reason']}")
    if results.copy_bandwidth is not None:
        _comment(f"copy: {results.copy_bandwidth / 1e9:.2f} GB/s read and written by a rank while all copy")
    for called in dict.fromkeys(figure["called"] for figure in results.figures if figure["called"]):
        alike = (figure for figure in results.figures if figure["called"] == called)
        named = (name_text(figure["implementation"], figure["wire"], figure["transport"]) for figure in alike)
        _comment(f"called by {called}: {', '.join(dict.fromkeys(named))}")
    for sentence in summarise(map(figure_of, results.figures)):
        _comment(sentence)
    if not results.figures:
        _comment("nothing was measured")
    wrong = sorted({f"{line['operation']} {line['implementation']}" for line in results.figures if line["wrong"]})
    _comment(f"wrong: {results.wrong} elements" + (f", of {', '.join(wrong)}" if wrong else ""))


def content_of(
    settings: Settings, described: dict[str, Any], ranks: int, launched: str, command: str, results: Results
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
