"""A run: the ranks that a launcher started, or new ones, measure every size in turn; rank 0 prints and writes."""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from thinwire._rank_thread import require_queues, set_queues
from thinwire.comm import Communicator
from thinwire.comm.launch.bootstrap import init
from thinwire.comm.launch.launchers import LAUNCHERS, discover
from thinwire.comm.resources import available_bytes
from thinwire.errors import ArgumentError
from thinwire.files import open_to_write, replace_file, write_file
from thinwire.testing import run_ranks
from thinwire.tools.bench import contenders as made
from thinwire.tools.bench import results as written
from thinwire.tools.bench.contenders import OpenMPI
from thinwire.tools.bench.options import COLLECTIVES, DEFAULT_RANKS, ROUND, Routing, Settings
from thinwire.tools.bench.problems import Collective, Round
from thinwire.tools.bench.timing import Candidate, Laps, NotHere, measure
from thinwire.tools.bench.traffic import expert_ids, row_counts, violation_of
from thinwire.tools.progress import SILENT, Progress, Report, print_over

#: Of a rank on the CPU, for everything that is compared.
THREADS = 1
#: Bytes that a check and the contenders' tensors take for each of a collective's, for each element of a round's expert
#: rows, and for each element of all tokens; and the share of the free memory that ranks may take.
_OF_A_COLLECTIVE, _ROW_BYTES, _CHECKED_BYTES, _SHARE = 16, 6, 20, 0.5
#: Of what is not measured yet, in a file that stays so only if the run is cut off.
_CUT_OFF = "the run was cut off before"
_LINE = 110


@dataclass
class Results:
    """The figures of a run; the same on all ranks."""

    hosts: int
    figures: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)
    traffic: list[list[int]] | None = None
    expert_load: list[int] | None = None
    copy_bandwidth: float | None = None

    @property
    def wrong(self) -> int:
        """Elements outside their bounds, of all figures."""
        return sum(figure["wrong"] or 0 for figure in self.figures)


# ---------------------------------------------------------------------------------------------------------------------
# One rank's part of a run


class Session:
    """One rank's part of a run; rank 0 prints, tells `report` what is measured now, and `keep` what was found."""

    def __init__(
        self,
        comm: Communicator,
        settings: Settings,
        report: Report = SILENT,
        keep: Callable[[Results], None] | None = None,
    ) -> None:
        self.comm, self.settings = comm, settings
        self._keep, self._report = (keep, report) if comm.rank == 0 else (None, SILENT)
        self.dtype: torch.dtype = getattr(torch, settings.dtype)
        self.laps = Laps(comm.device)
        #: What the process group's own collectives are called; None where ranks are threads.
        self.group = None if comm.in_process else str(torch.distributed.get_backend(comm.group))
        self.reference = self.group or made.COPY
        hosts = comm.all_gather_object(socket.gethostname())
        self.results, self._titled, self._most_copied = Results(len(set(hosts))), "", 0
        #: Ranks that have one memory.
        self._sharing = 1 if comm.device.type == "cuda" and self.group else hosts.count(socket.gethostname())
        self._print_ranks()
        self._mpi: OpenMPI | None = None
        if "mpi" in settings.baselines:
            try:
                self._mpi = OpenMPI(comm)
            except NotHere as reason:
                self._skip(made.OPEN_MPI, str(reason))
        if self.group is None and "group" in settings.baselines:
            self._skip("group", "ranks that are threads have no process group")

    def _skip(self, implementation: str, reason: str, **where: object) -> None:
        entry = {"implementation": implementation, "reason": reason, **where}
        if entry not in self.results.skipped:
            self.results.skipped.append(entry)

    def _print(self, text: str) -> None:
        if self.comm.rank == 0:
            print_over(text)

    def _print_ranks(self) -> None:
        """Prints each rank's process, host and device."""
        device = self.comm.device
        named = f"{device} {torch.cuda.get_device_name(device)}" if device.type == "cuda" else str(device)
        everyone = self.comm.all_gather_object((str(os.getpid()), socket.gethostname(), named))
        width = max(len(host) for _, host, _ in everyone)
        self._print(f"#\n# rank  process  {'host'.ljust(width)}  device")
        for rank, (process, host, named) in enumerate(everyone):
            self._print(f"# {rank:4}  {process:>7}  {host.ljust(width)}  {named}")

    def run(self) -> Results:
        """Measures everything that was asked for."""
        jobs = list(self._jobs())
        for place, (what, needed, routing, make) in enumerate(jobs, 1):
            if self._fits(what, needed):
                self._measure(f"{place} of {len(jobs)}: {what}", make(), routing)
            if self._keep is not None:  # the run may be cut off at any moment
                left = [{"implementation": what, "reason": _CUT_OFF} for what, *_ in jobs[place:]]
                self._keep(Results(**vars(self.results) | {"skipped": self.results.skipped + left}))
        return self.results

    def _jobs(self) -> Iterator[tuple[str, int, Routing | None, Callable[[], Collective | Round]]]:
        """Lists what is measured: its name, the memory that each rank needs for it, its routing, and how to make it."""
        chosen = self.settings
        for operation in (operation for operation in COLLECTIVES if operation in chosen.operations):
            # What all ranks share equally has no routing.
            for routing in chosen.routings if operation == "all_to_all_v" else (None,):
                for size in chosen.sizes:
                    make = partial(self._collective, operation, size, routing)
                    yield f"{operation} of {size} bytes", _OF_A_COLLECTIVE * size, routing, make
        for routing in chosen.routings if {*ROUND} & {*chosen.operations} else ():
            for tokens in chosen.tokens:
                element_bytes = _ROW_BYTES * chosen.top_k * self.dtype.itemsize + _CHECKED_BYTES * self.comm.size
                needed = tokens * chosen.hidden * element_bytes
                yield f"a round of {tokens} tokens", needed, routing, partial(self._round, tokens, routing)

    def _fits(self, what: str, needed: int) -> bool:
        """Tells whether all ranks have memory for it; if one has not, all leave it out."""
        device, needed = self.comm.device, needed * self._sharing
        free = int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else available_bytes()
        fits = all(self.comm.all_gather_object(needed <= _SHARE * free))
        if not fits:
            self._skip(what, f"needs about {needed / 2**20:.0f} MiB, more than half of what is free")
        return fits

    def _collective(self, operation: str, size: int, routing: Routing | None) -> Collective:
        counts, width, ranks = None, 1, self.comm.size
        if routing is not None:
            elements = max(1, size // self.dtype.itemsize)
            width = max(1, min(self.settings.hidden, elements // ranks))
            counts = row_counts(routing, elements // width, ranks)
        return Collective(self.comm, self.dtype, operation, size, counts, width)

    def _round(self, tokens: int, routing: Routing) -> Round:
        chosen = self.settings
        ids = expert_ids(routing, tokens, chosen.experts, chosen.top_k, self.comm.size)
        problem = Round(self.comm, self.dtype, chosen.hidden, ids, chosen.experts)
        self.results.traffic, self.results.expert_load = problem.between.tolist(), problem.load.tolist()
        return problem

    def _candidates(self, problem: Collective | Round) -> Iterator[Candidate]:
        chosen = self.settings
        if "group" in chosen.baselines and self.group is not None:
            yield made.process_group(problem, self.group, self.laps)
        if self._mpi is not None:
            yield self._mpi.candidate(problem, self.laps)
        if "copy" in chosen.baselines:
            yield made.copy(problem)
        for transport in chosen.transports:
            for wire in chosen.wires:
                yield made.thinwire(problem, wire, transport, self.laps)

    def _measure(self, job: str, problem: Collective | Round, routing: Routing | None) -> None:
        """Measures all candidates, and prints and keeps a figure for each operation that was asked for."""
        candidates = list(self._candidates(problem))
        operations = [each for each in problem.operations if each in self.settings.operations]
        self._report.stage(job, len(candidates))
        found, missing = measure(self.comm, candidates, self.settings, self.laps, self._report)
        for candidate, reason in missing:
            where = {"operation": "/".join(operations), "wire": candidate.wire, "transport": candidate.transport}
            self._skip(candidate.implementation, reason, **where)
        everyone = self.comm.all_gather_object((problem.rows, problem.logical_bytes))
        for operation in operations:
            sizes = {
                "operation": operation,
                "routing": None if routing is None else str(routing),
                "skew": problem.skew,
                "max_violation": violation_of(problem.load) if isinstance(problem, Round) else None,
                "tokens": max(rows for rows, _ in everyone),
                "size_bytes": problem.size_bytes,
                "logical_bytes": sum(logical[operation] for _, logical in everyone) / self.comm.size,
                "reference": self.reference,
            }
            samples = {outcome.candidate.label: outcome.samples.get(operation) for outcome in found}
            for outcome in (outcome for outcome in found if operation in outcome.sent):
                candidate, verdict = outcome.candidate, outcome.verdicts.get(operation)
                # What is wrong in a leg that was not asked for counts in those that were.
                others = {*operations} - {operation}
                wrong = sum(each.wrong for what, each in outcome.verdicts.items() if what not in others)
                times = samples[candidate.label], samples.get(f"{self.reference}/none")
                figure = {
                    **dict(zip(("implementation", "wire", "transport"), candidate[:3], strict=True)),
                    **sizes,
                    **written.timed(sizes, *times, outcome.sent[operation]),
                    "relative_error": verdict and written.relative(verdict.error_squares, verdict.squares),
                    "wrong": verdict and wrong,
                }
                self._add(figure, problem)

    def _add(self, figure: dict[str, Any], problem: Collective | Round) -> None:
        self.results.figures.append(figure)
        copied = math.prod(problem.copied) * self.dtype.itemsize
        if figure["implementation"] == made.COPY and figure["seconds"] and copied > self._most_copied:
            self._most_copied = copied
            self.results.copy_bandwidth = 2 * copied / figure["seconds"]["median"]
        titled = written.title(figure, self.settings.dtype)
        if titled != self._titled:
            self._print(f"\n{titled}\n{written.heading(problem.counted, self.reference)}")
        self._titled = titled
        self._print(written.line(figure))


@torch.no_grad()
def run_session(
    comm: Communicator, settings: Settings, report: Report = SILENT, keep: Callable[[Results], None] | None = None
) -> Results:
    """A whole run on one rank. Collective.

    Raises:
        ThinwireError: a rank's problem cannot be made, or a peer did not answer.
    """
    if comm.device.type == "cpu":
        torch.set_num_threads(THREADS)
    return Session(comm, settings, report, keep).run()


# ---------------------------------------------------------------------------------------------------------------------
# All ranks


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
    launcher = next((one.name for one in LAUNCHERS if one.rank in os.environ or one.size in os.environ), None)
    device, mode = _placed(settings, launcher)
    first, ranks = True, settings.ranks or DEFAULT_RANKS
    if launcher is not None:
        info = discover(os.environ)
        if settings.ranks not in (None, info.size):
            raise ArgumentError(f"--ranks {settings.ranks}: {info.source} says {info.size}; leave it out")
        first, ranks = info.rank == 0, info.size
    if first and json_file is not None:  # a file that cannot be written is better known now than at the end
        _require("--json", json_file.parent, lambda: json_file.parent.mkdir(parents=True, exist_ok=True))
        _require("--json", json_file, lambda: os.close(open_to_write(json_file)))
    if first and plot_folder is not None:
        _require("--plot", plot_folder, lambda: plot_folder.mkdir(parents=True, exist_ok=True))
    launched = launcher or ("processes of one host" if mode == "process" else "threads of one process")

    def describe(device: torch.device) -> Callable[[Results], dict[str, Any]]:
        described = written.machine(device) | ({"threads": THREADS} if device.type == "cpu" else {})
        if first:
            _comment(f"{ranks} ranks, {launched}")
            _comment(written.in_words(described))
        return partial(content_of, settings, described, ranks, launched, command)

    with Progress(sys.stderr, time.monotonic()) if first else contextlib.nullcontext() as progress:
        report = SILENT if progress is None else progress.report
        report.stage("starting")
        if launcher is not None:
            with init(device=device, timeout=settings.timeout) as comm:
                content = describe(comm.device)
                results = run_session(comm, settings, report, partial(_keep, json_file, content))
        else:
            if mode == "thread":
                require_queues(ranks)  # before CUDA starts
            content = describe(torch.device(device))
            shared = settings, report, partial(_keep, json_file, content)
            results = run_ranks(run_session, ranks, *shared, mode=mode, device=device, timeout=settings.timeout)[0]
    if first:
        print_end(results)
        if json_file is not None:
            (replace_file if json_file.is_file() else write_file)(json_file, _text(content(results)))
        if plot_folder is not None:
            from thinwire.tools.bench.plots import write_pictures

            for file in write_pictures(content(results), plot_folder):
                print(f"# wrote {file}")
    return 1 if results.wrong or not results.figures else 0


def _placed(settings: Settings, launcher: str | None) -> tuple[str, str]:
    """Picks where ranks run, and as what: those that are started here without a GPU each are threads that share one.

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
        replace_file(file, _text(content(results)))


def _text(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=1, allow_nan=False) + "\n").encode()


def _require(option: str, path: Path, use: Callable[[], object]) -> None:
    """Raises ArgumentError, naming the option, if a path cannot be used."""
    try:
        use()
    except OSError as error:
        raise ArgumentError(f"{option} {path}: {error.strerror or error}; name a path that can be written to") from None


def _comment(text: str) -> None:
    for line in textwrap.wrap(f"# {text}", _LINE, subsequent_indent="#   "):
        print_over(line)


def print_end(results: Results) -> None:
    """Prints what stands under the tables."""
    print()
    for entry in results.skipped:
        where = ", ".join(str(entry[key]) for key in ("operation", "wire", "transport") if entry.get(key))
        _comment(f"skipped: {entry['implementation']}{f' ({where})' if where else ''}: {entry['reason']}")
    if results.copy_bandwidth is not None:
        _comment(f"copy: {results.copy_bandwidth / 1e9:.2f} GB/s read and written by a rank while all copy")
    if not results.figures:
        _comment("nothing was measured")
    wrong = sorted(
        {f"{figure['operation']} {figure['implementation']}" for figure in results.figures if figure["wrong"]}
    )
    _comment(f"wrong: {results.wrong} elements" + (f", of {', '.join(wrong)}" if wrong else ""))


def content_of(
    settings: Settings, described: dict[str, Any], ranks: int, launched: str, command: str, results: Results
) -> dict[str, Any]:
    """Returns the content of the JSON file."""
    routings = list(map(str, settings.routings))
    return {
        "format": written.FORMAT,
        "version": written.FORMAT_VERSION,
        "command": command,
        "commit": written.commit(),
        "machine": described,
        "ranks": ranks,
        "launched": launched,
        "settings": asdict(settings) | {"routings": routings, "routing": ",".join(routings)},
        **asdict(results),
    }
