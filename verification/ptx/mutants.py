"""Shows why each piece of synchronisation in the compiled kernels is needed: removes each in turn, and something
breaks.

    python -m verification.ptx.mutants --write benchmarks/results/ahead_of_time/mutants.txt

Runs small calls on kernels in which one barrier or fence is missing, or one acquire, release or scope is weaker
(`mutations.py`). Prints the outcome: a data race, wrong bytes, threads that wait for ever, or nothing. `REDUNDANT`
lists mutations without effect, with the reason.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import triton

from tests.helpers.collective_calls import Call
from thinwire.triton_kernels.leg_layout import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from thinwire.triton_kernels.pack import pack_rows
from thinwire.triton_kernels.signal import MISMATCHED, REPORT_PEERS, REPORT_STATUS, TIMED_OUT
from thinwire.wire import WireFormat
from verification.ptx.channels import Channels
from verification.ptx.collectives import Collectives
from verification.ptx.device import Device
from verification.ptx.errors import PtxError
from verification.ptx.mutations import Mutation, is_site, mutations_of
from verification.ptx.program import parse
from verification.ptx.rails import RailedRounds
from verification.ptx.rounds import Rounds

#: What takes away nothing, and why: the first that fits. None is left out of the kernels, as the argument of
#: `docs/protocol.md` rests on each, and not on how Triton passes values from thread to thread.
REDUNDANT = {
    r"^load_flags < wait_for_all .*acquire": "a stuck line ends the wait; what it says is read behind another look",
    r"^load_flags < behind < give_up .*acquire": "who gives up reads nothing that a late flag publishes",
    r"^publish < .*bar\.": "the threads of a line's words store its flag, and `arrive` has a barrier behind all rows",
    r"^load_flags < behind < wait_for_all < wait_kernel: .*relaxed": "one of the looks is at the own flag alone",
    r"^(?:wait_for_all|wait_beside|give_up) .*small_kernel: bar\.": (
        "what one thread has looked at reaches the others through shared memory, behind Triton's barriers"
    ),
    r"^(?:wait_for_all|await_leg) .*bar\.": "behind flags of second legs, room and pieces the kernel reads nothing",
    r"^arrive < .*recv_rows_kernel: bar\.": (
        "a row's columns change threads after it is loaded, behind a barrier of Triton's"
    ),
    r"^store_released < publish < wait_kernel.* becomes st\.relaxed": "kernels read nothing behind this flag",
    r"\bpoison < ": "the host reads it, which is not seen here, or a later kernel",
    r"^(?:put|store_encoded_tile|store_row_tile|store_float32|group_amax|_largest|max|sum) .*bar\.": (
        "Triton's own, of shared memory used once"
    ),
}

_TIMEOUT, _GRACE = 60e-6, 30e-6

#: Queues calls on a device, and returns what compares their results.
Scenario = Callable[[Device], Callable[[], None]]


def _round(device: Device) -> Callable[[], None]:
    rounds = Rounds.of(device, 2, hidden=32, max_tokens=2)
    rounds.queue(counts=(2, 2))
    rounds.queue(closing=(1,), counts=(2, 1))
    return rounds.check


def _round_over_two_levels(device: Device) -> Callable[[], None]:
    rounds = RailedRounds.on_hosts(device, ((0, 1), (2, 3)), num_experts=4, top_k=2, hidden=32, max_tokens=2)
    rounds.queue(counts=(2, 1, 0, 2))
    rounds.queue(closing=(1,), counts=(2, 2, 2, 1))
    return rounds.check


def _round_of_long_rows(device: Device) -> Callable[[], None]:
    """Of several warps."""
    rounds = Rounds.of(device, 2, hidden=1536, max_tokens=1, top_k=1)
    rounds.queue(counts=(1, 1))
    return rounds.check


def _lost_round(device: Device) -> Callable[[], None]:
    rounds = Rounds.of(device, 3, hidden=32, max_tokens=1, top_k=1)
    rounds.timeout, rounds.grace = _TIMEOUT, _GRACE
    rounds.queue(absent=(2,), counts=(1, 1, 1))
    return lambda: _assert_lost([lane.report for lane in rounds.lanes[:2]])


def _collectives(device: Device) -> Callable[[], None]:
    collectives = Collectives.of(device, 2)
    for op, counts in ((ALL_GATHER, (60, 30)), (ALL_GATHER, (130, 30)), (ALL_REDUCE, (260, 30))):
        collectives.queue(Call(op, counts, num_programs=2))
    return collectives.check


def _with_other_work(device: Device) -> Collectives:
    """One rank has other work to do, and the other looks for it again and again."""
    x, wire = torch.ones(1, 32), WireFormat.parse("int8")
    collectives, device.rank = Collectives.of(device, 2), 1
    for _ in range(80):
        pack_rows(x, wire, None, torch.zeros(1, wire.row_bytes(32, x.dtype), dtype=torch.uint8))
    return collectives


def _late_collective(device: Device) -> Callable[[], None]:
    collectives = _with_other_work(device)
    collectives.queue(Call(ALL_REDUCE, (260, 30), num_programs=2))
    return collectives.check


def _lost_collective(device: Device) -> Callable[[], None]:
    collectives = Collectives.of(device, 3)
    collectives.timeout, collectives.grace = _TIMEOUT, _GRACE
    collectives.queue(Call(ALL_REDUCE, (200,) * 3, num_programs=2), absent=(2,))
    return lambda: _assert_lost([end.report for end in collectives.ends[:2]])


def _small_collectives(device: Device) -> Callable[[], None]:
    collectives = Collectives.of(device, 2, 2048)
    for op, counts in ((ALL_REDUCE, (260, 30)), (ALL_GATHER, (130, 30)), (REDUCE_SCATTER, (130, 30))):
        collectives.queue(Call(op, counts, rows_per_chunk=3, num_programs=2, at_once=True))
    return collectives.check


def _late_small_collective(device: Device) -> Callable[[], None]:
    collectives = _with_other_work(device)
    collectives.queue(Call(ALL_REDUCE, (260, 30), rows_per_chunk=3, num_programs=2, at_once=True))
    return collectives.check


def _lost_small_collective(device: Device) -> Callable[[], None]:
    collectives = Collectives.of(device, 3)
    collectives.timeout, collectives.grace = _TIMEOUT, _GRACE
    collectives.queue(Call(ALL_REDUCE, (200,) * 3, num_programs=2, at_once=True), absent=(2,))
    return lambda: _assert_lost([end.report for end in collectives.ends[:2]])


def _different_small_collectives(device: Device) -> Callable[[], None]:
    collectives = Collectives.of(device, 2)
    call = Call(ALL_REDUCE, (200,) * 2, num_programs=2, at_once=True)
    collectives.queue(call, changes={1: replace(call.job(), signature=(1, 2, 3, 4))})

    def check() -> None:
        for end in collectives.ends:
            assert end.report[REPORT_STATUS] == MISMATCHED
            assert end.report[REPORT_PEERS:][:2].tolist() == [int(peer != end.rank) for peer in range(2)]

    return check


def _channel(device: Device) -> Callable[[], None]:
    channels = Channels.of(device, 2, piece_bytes=128)
    channels.queue([[1, 8], [3, 0]], (20,), torch.bfloat16, "int8")
    channels.queue([[3, 70], [0, 60]], (9,), torch.int8, "none")
    return channels.check


def _lost_channel(device: Device) -> Callable[[], None]:
    channels = Channels.of(device, 3, piece_bytes=128, timeout=_TIMEOUT)
    channels.queue([[4] * 3] * 3, (20,), torch.bfloat16, "int8", halfway=(2,))
    return lambda: _assert_lost([channel._end.report for channel in channels.channels[:2]])


def _different_channel(device: Device) -> Callable[[], None]:
    channels = Channels.of(device, 2, piece_bytes=128, timeout=_TIMEOUT)
    channels.queue([[1, 8], [1, 2]], (20,), torch.bfloat16, "int8", expects={(1, 0): 7})
    return lambda: None


def _assert_lost(reports: list[torch.Tensor]) -> None:
    for report in reports:
        assert report[REPORT_STATUS] == TIMED_OUT
        assert report[8:].tolist() == [0, 0, 1, 0, 0, 1, 1, 1, 0]


SCENARIOS: dict[str, tuple[int, Scenario]] = {
    "round": (2, _round),
    "round of long rows": (2, _round_of_long_rows),
    "round of a lost rank": (3, _lost_round),
    "round over two levels": (4, _round_over_two_levels),
    "collectives": (2, _collectives),
    "collective of a late rank": (2, _late_collective),
    "collective of a lost rank": (3, _lost_collective),
    "small collectives": (2, _small_collectives),
    "small collective of a late rank": (2, _late_small_collective),
    "small collective of a lost rank": (3, _lost_small_collective),
    "small collectives of ranks that differ": (2, _different_small_collectives),
    "all-to-all-v": (2, _channel),
    "all-to-all-v of a lost rank": (3, _lost_channel),
    "all-to-all-v of ranks that differ": (2, _different_channel),
}


@dataclass(frozen=True)
class Mutant:
    """A kernel with one change, in a scenario that executes the place of it."""

    scenario: str
    kernel: str
    ptx: str
    mutation: Mutation


def run(scenario: str, edit: Callable[[str, str], str] | None, seed: int = 0) -> tuple[str, Device]:
    """What comes of a scenario: "race", "wrong", "stuck" or "nothing"."""
    ranks, queue = SCENARIOS[scenario]
    device = Device(ranks=ranks, races=True, edit=edit, seed=seed, warps="any order")
    device.most_steps = 50_000
    with device.patch(queued=True):
        check = queue(device)
    try:
        device.run_queued()
    except PtxError as error:
        assert re.search("for ever|no end|different places", str(error)), error
        return "stuck", device
    assert device.races is not None
    if device.races.found:
        return "race", device
    try:
        check()
    except AssertionError:
        return "wrong", device
    return "nothing", device


def mutants_of(scenario: str) -> Iterator[Mutant]:
    """Every change at a place that the scenario executes.

    Raises:
        AssertionError: it does not pass as it is.
    """
    kernels: dict[str, str] = {}

    def note(name: str, ptx: str) -> str:
        kernels[ptx] = name
        return ptx

    outcome, device = run(scenario, note)
    assert outcome == "nothing", (scenario, outcome, device.races and device.races.found)
    for ptx, kernel in kernels.items():
        if not orders(ptx):
            continue
        program = parse(ptx)
        sites = [place for place, instruction in enumerate(program.code) if is_site(instruction.text)]
        executed = device.executed[program]
        for mutation in mutations_of(ptx):
            if executed[sites[mutation.number]]:
                yield Mutant(scenario, kernel, ptx, mutation)


def run_mutant(mutant: Mutant) -> str:
    """See `run`; in other orders too, where nothing comes of it and nobody has said why."""

    def edit(_: str, ptx: str) -> str:
        return mutant.mutation.apply(ptx) if ptx == mutant.ptx else ptx

    outcomes = (run(mutant.scenario, edit, seed)[0] for seed in range(1 if redundant(str(mutant.mutation)) else 4))
    return next((outcome for outcome in outcomes if outcome != "nothing"), "nothing")


def orders(ptx: str) -> bool:
    """Whether a kernel tells other programs something, or learns from them."""
    return re.search(r"\.(?:acquire|release|acq_rel)\.", ptx) is not None


def redundant(mutation: str) -> str | None:
    """Why nothing comes of a change, as it is written in the table, if that is known."""
    return next((reason for pattern, reason in REDUNDANT.items() if re.search(pattern, mutation)), None)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="*", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--write", type=Path, help="a file for the table")
    options = parser.parse_args()
    rows: dict[tuple[str, str, int], tuple[str, str]] = {}
    for scenario in options.only:
        seen: Counter[tuple[str, str]] = Counter()
        for mutant in mutants_of(scenario):
            name = mutant.kernel, str(mutant.mutation)
            key = (*name, seen[name])
            seen[name] += 1
            if key not in rows or (rows[key][0] == "nothing" and not redundant(name[1])):
                rows[key] = run_mutant(mutant), scenario
                print(f"{rows[key][0]:8}{scenario}: {mutant.kernel}, {mutant.mutation}", flush=True)
    table = "\n".join(_table(rows))
    if options.write:
        options.write.write_text(table + "\n")
    print(table)
    return int(any(outcome == "nothing" and redundant(name) is None for (_, name, _), (outcome, _) in rows.items()))


def _table(rows: dict[tuple[str, str, int], tuple[str, str]]) -> Iterator[str]:
    counts = Counter(outcome for outcome, _ in rows.values())
    yield f"Triton {triton.__version__}, sm_90, by python -m verification.ptx.mutants"
    yield f"{len(rows)} changes: " + ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items()))
    kernels: dict[str, list[str]] = defaultdict(list)
    for (kernel, name, _), (outcome, scenario) in rows.items():
        why = redundant(name) or "UNEXPLAINED" if outcome == "nothing" else scenario
        kernels[kernel].append(f"  {outcome:8}{name}\n          {why}")
    for kernel, lines in sorted(kernels.items()):
        yield ""
        yield kernel
        yield from lines


if __name__ == "__main__":
    sys.exit(main())
