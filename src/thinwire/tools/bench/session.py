"""What each rank does: every operation, size and routing in turn; rank 0 prints."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from thinwire.comm import Communicator
from thinwire.tools.bench import baselines, machine, mpi
from thinwire.tools.bench.contender import Candidate, NotHere
from thinwire.tools.bench.expert_problem import Round
from thinwire.tools.bench.figures import Sizes, figures_of, heading, line, title
from thinwire.tools.bench.measure import measure
from thinwire.tools.bench.mpi import OpenMPI
from thinwire.tools.bench.operations import collective, expert_round, straight
from thinwire.tools.bench.options import COLLECTIVES, ROUND, Routing, Settings
from thinwire.tools.bench.problems import AllGather, AllReduce, AllToAll, Problem, ReduceScatter
from thinwire.tools.bench.routed_rows import group_exchange, routed_rows
from thinwire.tools.bench.timing import Laps
from thinwire.tools.bench.traffic import expert_ids, row_counts, skew_of, violation_of
from thinwire.tools.progress import SILENT, Report, print_over
from thinwire.wire import WireFormat

_Job = tuple[str, int, Callable[[], None]]
#: Of a rank on the CPU, for everything that is compared.
THREADS = 1
#: Of what is not measured yet, in a file that stays so only if the run is cut off.
_CUT_OFF = "the run was cut off before"


@dataclass
class Results:
    """What a run has found; the same on all ranks."""

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


Keep = Callable[[Results], None]


class Session:
    """One rank's part of a run.

    Args:
        comm: the ranks.
        settings: the same on all of them.
        report: is told what is measured now, by rank 0.
        keep: gets what has been found, from rank 0, after each size.
    """

    def __init__(
        self, comm: Communicator, settings: Settings, report: Report = SILENT, keep: Keep | None = None
    ) -> None:
        self.comm, self.settings = comm, settings
        self._keep = keep if comm.rank == 0 else None
        self._report = report if comm.rank == 0 else SILENT
        self._job = self._titled = ""
        self.dtype: torch.dtype = getattr(torch, settings.dtype)
        self.laps = Laps(comm.device)
        self.group = baselines.group_name(comm)
        #: Whose time speed-ups are of.
        self.reference = self.group or baselines.COPY
        hosts = comm.all_gather_object(socket.gethostname())
        self.results = Results(len(set(hosts)))
        #: Ranks that have one memory.
        self._sharing = 1 if comm.device.type == "cuda" and self.group else hosts.count(socket.gethostname())
        self._print_ranks()
        self._most_copied = 0
        self._mpi: OpenMPI | None = None
        self._look_for_baselines()

    def _look_for_baselines(self) -> None:
        chosen = self.settings.baselines
        if "mpi" in chosen:
            try:
                self._mpi = OpenMPI(self.comm)
            except NotHere as reason:
                self._skip(mpi.NAME, str(reason))
        if self.group is None:
            for option in ("group", "quantize"):
                if option in chosen:
                    self._skip(option, "ranks that are threads have no process group")
        self._has_symmetric_memory = self.comm.device.type == "cuda" and self.group is not None
        if "symmetric_memory" in chosen and not self._has_symmetric_memory:
            self._skip(baselines.SYMMETRIC_MEMORY, "it is for processes with a GPU each")

    def _skip(self, implementation: str, reason: str, **where: object) -> None:
        entry = {"implementation": implementation, "reason": reason, **where}
        if entry not in self.results.skipped:
            self.results.skipped.append(entry)

    def _print(self, text: str) -> None:
        if self.comm.rank == 0:
            print_over(text)

    def _print_ranks(self) -> None:
        """Which process each rank is, where it runs, and on what."""
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
        for place, (what, needed, job) in enumerate(jobs, 1):
            self._job = f"{place} of {len(jobs)}: {what}"
            if self._fits(what, needed):
                job()
            if self._keep is not None:  # the run may be cut off at any moment
                left = [{"implementation": what, "reason": _CUT_OFF} for what, *_ in jobs[place:]]
                self._keep(replace(self.results, skipped=self.results.skipped + left))
        return self.results

    def _jobs(self) -> Iterator[_Job]:
        """What is measured, the memory that it needs, and how."""
        chosen, comm = self.settings, self.comm
        for operation in (operation for operation in COLLECTIVES if operation in chosen.operations):
            # What all ranks share equally has no routing.
            for routing in chosen.routings if operation == "all_to_all_v" else (None,):
                for size in chosen.sizes:
                    job = partial(self._collective, operation, size, routing, size == chosen.sizes[0])
                    yield f"{operation} of {size} bytes", machine.memory_of_collective(size), job
        legs = [operation for operation in ROUND if operation in chosen.operations]
        for routing in chosen.routings if legs else ():
            for tokens in chosen.tokens:
                job = partial(self._round, legs, tokens, routing, tokens == chosen.tokens[0])
                sizes = tokens, chosen.hidden, chosen.top_k, comm.size, self.dtype.itemsize
                yield f"a round of {tokens} tokens", machine.memory_of_round(*sizes), job

    def _fits(self, what: str, needed: int) -> bool:
        """Whether all ranks have memory for it; if one has not, all leave it out."""
        reasons = self.comm.all_gather_object(machine.why_too_large(needed, self._sharing, self.comm.device))
        reason = next(filter(None, reasons), None)
        if reason is not None:
            self._skip(what, reason)
        return reason is None

    # -----------------------------------------------------------------------------------------------------------------
    # Collectives

    def _problem(self, operation: str, size: int, routing: Routing | None) -> Problem:
        comm, dtype = self.comm, self.dtype
        if routing is None:
            kinds: dict[str, Callable[..., Problem]] = {
                "all_gather": AllGather, "reduce_scatter": ReduceScatter, "all_reduce": AllReduce
            }  # fmt: skip
            return kinds[operation](comm, dtype, size)
        elements = max(1, size // dtype.itemsize)
        width = max(1, min(self.settings.hidden, elements // comm.size))
        counts = row_counts(routing, elements // width, comm.size)
        return AllToAll(comm, dtype, counts, width, skew_of(counts.sum(0).tolist()))

    def _collective(self, operation: str, size: int, routing: Routing | None, first: bool) -> None:
        problem = self._problem(operation, size, routing)
        candidates = list(self._collective_baselines(problem))
        for transport in self.settings.transports:
            candidates += [collective(problem, wire, transport) for wire in self.settings.wires]
            if transport == "direct" and "none" in self.settings.wires and isinstance(problem, AllToAll | AllGather):
                candidates.append(straight(problem))
        rows = max(self.comm.all_gather_object(problem.rows))
        name = None if routing is None else str(routing)
        sizes = Sizes(rows, problem.size_bytes, self._mean(problem.logical_bytes), name, problem.skew)
        self._measure(candidates, {problem.operation: sizes}, None, first, problem.size_bytes)

    def _collective_baselines(self, problem: Problem) -> Iterator[Candidate]:
        chosen = self.settings.baselines
        if "group" in chosen and self.group is not None:
            yield baselines.of_group(problem, self.group)
        if self._mpi is not None:
            yield baselines.of_mpi(problem, self._mpi)
        if "quantize" in chosen and self.group is not None:
            for wire in self._quantized_wires():
                yield baselines.quantized_by_hand(problem, wire, self.group)
        if "symmetric_memory" in chosen and self._has_symmetric_memory:
            yield baselines.of_symmetric_memory(problem)
        if "copy" in chosen:
            source = problem.x.new_ones(problem.size_bytes // problem.dtype.itemsize)
            yield baselines.copy(source, torch.empty_like(source), (problem.operation,))

    # -----------------------------------------------------------------------------------------------------------------
    # Rounds

    def _round(self, legs: Sequence[str], tokens: int, routing: Routing, first: bool) -> None:
        settings = self.settings
        ids = expert_ids(routing, tokens, settings.experts, settings.top_k, self.comm.size)
        problem = Round(self.comm, self.dtype, settings.hidden, ids, settings.experts)
        self.results.traffic = problem.between.tolist()
        self.results.expert_load = problem.load.tolist()
        candidates = list(self._round_baselines(problem))
        for transport in settings.transports:
            candidates += [expert_round(problem, wire, transport, self.laps) for wire in settings.wires]
        sizes = {
            leg: Sizes(
                tokens, problem.size_bytes, self._mean(problem.logical_bytes[leg]), str(routing), problem.skew,
                violation_of(problem.load),
            )
            for leg in legs
        }  # fmt: skip
        self._measure(candidates, sizes, self.laps, first, self._copied_rows(problem) * problem.x[:1].nbytes)

    @staticmethod
    def _copied_rows(problem: Round) -> int:
        """A leg reads tokens and writes experts' rows, or the other way round; a copy reads as much as it writes."""
        return max(1, (problem.tokens + problem.expert_rows) // 2)

    def _round_baselines(self, problem: Round) -> Iterator[Candidate]:
        chosen = self.settings.baselines
        if self.group is not None:
            exchange = group_exchange(self.comm)
            if "group" in chosen:
                yield routed_rows(problem, self.group, "none", exchange, self.laps)
            if "quantize" in chosen:
                for wire in self._quantized_wires():
                    yield routed_rows(problem, f"quantize, {self.group}", wire, exchange, self.laps)
        if self._mpi is not None:
            yield routed_rows(problem, mpi.NAME, "none", self._mpi.exchange, self.laps)
        if "copy" in chosen:
            source = problem.x.new_ones(self._copied_rows(problem), problem.hidden)
            yield baselines.copy(source, torch.empty_like(source), ("dispatch", "combine"))

    # -----------------------------------------------------------------------------------------------------------------

    def _quantized_wires(self) -> list[str]:
        return [wire for wire in self.settings.wires if WireFormat.parse(wire).quantized]

    def _mean(self, value: float) -> float:
        return sum(self.comm.all_gather_object(value)) / self.comm.size

    def _measure(
        self, candidates: list[Candidate], sizes: dict[str, Sizes], laps: Laps | None, first: bool, copied: int
    ) -> None:
        self._report.stage(self._job, len(candidates))
        found = measure(self.comm, candidates, self.settings, laps, self._report)
        for candidate, reason in found.missing:
            where = {"operation": "/".join(sizes), "wire": candidate.wire, "transport": candidate.transport}
            self._skip(candidate.implementation, reason, **where)
        figures = figures_of(found, sizes, self.reference)
        self.results.figures += figures
        for figure in figures:
            if figure["implementation"] == baselines.COPY and figure["seconds"] and copied > self._most_copied:
                self._most_copied = copied
                self.results.copy_bandwidth = 2 * copied / figure["seconds"]["median"]
        if first:
            counted = "elements" if laps is None else "tokens"
            counted = "rows" if "all_to_all_v" in sizes else counted
            self._print(f"\n{heading(counted, self.reference, self.settings.wide)}")
        for figure in figures:
            named = (figure[name] for name in ("routing", "skew", "max_violation"))
            titled = title(figure["operation"], self.settings.dtype, *named)
            if first or titled != self._titled:
                self._print(titled)
            self._print(line(figure, self.settings.wide))
            first, self._titled = False, titled


@torch.no_grad()
def run_session(comm: Communicator, settings: Settings, report: Report = SILENT, keep: Keep | None = None) -> Results:
    """A whole run on one rank. Collective.

    Raises:
        ThinwireError: a rank's problem cannot be made, or a peer did not answer.
    """
    if comm.device.type == "cpu":
        torch.set_num_threads(THREADS)
    return Session(comm, settings, report, keep).run()
