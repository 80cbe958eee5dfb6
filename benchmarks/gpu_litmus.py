"""A litmus test of message passing, with the kernels' own signals: `python -m benchmarks.gpu_litmus`.

    python -m benchmarks.gpu_litmus --rounds 125000 --programs 1 16 132 528
    TRITON_INTERPRET=1 python -m benchmarks.gpu_litmus --device cpu --rounds 20 --programs 3

In each round every rank stores numbers at all ranks, by so many programs of which the last to `arrive` `publish`es the
round. Then it waits for all flags, and counts the numbers that are not this round's. The numbers of two rounds lie side
by side: one that is behind the others by a round overwrites nothing. Both scopes of `arrive` are tried, see
THINWIRE_ARRIVE_SCOPE. With `--early` a round is published before its numbers are there, which must be found.

Ranks are threads that share a GPU; under Triton's interpreter, processes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from benchmarks import timing
from tests.gpu.capture import capture
from tests.gpu.sharing import on_host
from thinwire.comm import Communicator, allocate
from thinwire.triton_kernels import SCOPES
from thinwire.triton_kernels.compat import tl, triton
from thinwire.triton_kernels.put import base_of, put
from thinwire.triton_kernels.signal import (
    CONTROL_EPOCH,
    CONTROL_STATUS,
    CONTROL_WORDS,
    INTERPRETED,
    REPORT_PEERS,
    SIGNAL_LINE_BYTES,
    Launch,
    SignalLayout,
    advance,
    arrive,
    pause,
    publish,
    wait_or_give_up,
)

RANKS, WORDS = 2, 256 if INTERPRETED else 1 << 13  # int32 from each rank to each
_AT_ONCE = 50  # rounds in a graph
_BLOCK = tl.constexpr(64)
_PAYLOAD = tl.constexpr(2 * RANKS * SIGNAL_LINE_BYTES)  # behind the flags and the stuck lines
_COUNT = tl.constexpr(WORDS)
COLUMNS = {"scope": "s", "programs": "d", "rounds": "d", "numbers": "d", "wrong": "d"}


@triton.jit
def numbers_of(base, source, epoch, LAYOUT: tl.constexpr):
    """Where the numbers of a rank's round lie in a buffer."""
    slot = (epoch % 2) * LAYOUT.WORLD + source
    return (base + _PAYLOAD + slot.to(tl.int64) * (4 * _COUNT)).to(tl.pointer_type(tl.int32))


@triton.jit(do_not_specialize=["rank"])
def send_kernel(buffer_ptrs, control_ptr, rank, EARLY: tl.constexpr, LAYOUT: tl.constexpr, LAUNCH: tl.constexpr):
    """Any number of programs."""
    epoch = tl.load(control_ptr + LAYOUT.EPOCH) + 1
    if EARLY:
        if tl.program_id(0) == 0:
            publish(buffer_ptrs, rank, 0, epoch, LAYOUT, LAUNCH)
            for _ in range(300):  # under the interpreter some 40 ms, in which peers look at what is not there
                pause(LAUNCH)
    for peer in range(LAYOUT.WORLD):
        numbers = numbers_of(base_of(buffer_ptrs, peer), rank, epoch, LAYOUT)
        start = tl.program_id(0) * _BLOCK
        while start < _COUNT:
            places = start + tl.arange(0, _BLOCK)
            put(numbers + places, epoch * LAYOUT.WORLD + rank + places, places < _COUNT)
            start += tl.num_programs(0) * _BLOCK
    if arrive(control_ptr, LAYOUT, LAUNCH):
        publish(buffer_ptrs, rank, 0, advance(control_ptr + LAYOUT.EPOCH, 1), LAYOUT, LAUNCH)


@triton.jit(do_not_specialize=["rank"])
def wait_kernel(
    buffer_ptr, buffer_ptrs, control_ptr, report_ptr, rank, timeout_ns: tl.int64, LAYOUT: tl.constexpr,
    LAUNCH: tl.constexpr,
):  # fmt: skip
    """One program of one warp."""
    epoch = tl.load(control_ptr + LAYOUT.EPOCH)
    if tl.load(control_ptr + LAYOUT.STATUS) == LAYOUT.RUNNING:
        base = buffer_ptr.to(tl.int64)
        status = wait_or_give_up(
            base, buffer_ptrs, report_ptr, rank, 0, epoch, epoch, timeout_ns, timeout_ns, 0, LAYOUT, LAUNCH
        )
        tl.store(control_ptr + LAYOUT.STATUS, status)


@triton.jit
def check_kernel(buffer_ptr, control_ptr, wrong_ptr, LAYOUT: tl.constexpr):
    """Any number of programs."""
    epoch = tl.load(control_ptr + LAYOUT.EPOCH)
    for peer in range(LAYOUT.WORLD):
        numbers = numbers_of(buffer_ptr.to(tl.int64), peer + epoch * 0, epoch, LAYOUT)
        start = tl.program_id(0) * _BLOCK
        while start < _COUNT:
            places = start + tl.arange(0, _BLOCK)
            found = tl.load(numbers + places, mask=places < _COUNT, other=0)
            wanted = tl.where(places < _COUNT, epoch * LAYOUT.WORLD + peer + places, 0)
            tl.atomic_add(wrong_ptr, tl.sum(tl.where(found != wanted, 1, 0)).to(tl.int64))
            start += tl.num_programs(0) * _BLOCK


def case(comm: Communicator, scope: str, programs: int, rounds: int, early: bool) -> dict[str, Any]:
    """Rounds of one scope and so many programs: how many numbers were wrong on all ranks. Collective.

    Raises:
        SystemExit: a wait has ended.
    """
    layout = SignalLayout(WORLD=comm.size, STUCK=comm.size * SIGNAL_LINE_BYTES)
    launch = replace(Launch.of(layout, comm.device), SCOPE=scope)
    control, report = (
        torch.zeros(count, dtype=torch.int32, device=comm.device) for count in (CONTROL_WORDS, REPORT_PEERS + 3 * RANKS)
    )
    wrong, grid = torch.zeros(1, dtype=torch.int64, device=comm.device), (programs,)
    with allocate(comm, _PAYLOAD.value + 2 * RANKS * 4 * WORDS) as memory:
        local, bases = memory.local, memory.buffer_ptrs
        waited = local, bases, control, report, comm.rank, 10 * 10**9, layout, launch
        steps: list[Callable[[], object]] = [
            lambda: send_kernel[grid](bases, control, comm.rank, early, layout, launch),
            lambda: wait_kernel[(1,)](*waited, num_warps=1),
            lambda: check_kernel[grid](local, control, wrong, layout),
        ]
        for step in steps:  # loaded one by one, while no kernel waits for a peer
            for rank in range(comm.size):
                comm.barrier()
                if rank == comm.rank:
                    step()

        def several(times: int) -> None:
            for _ in range(times):
                for step in steps:
                    step()

        comm.barrier()
        at_once = min(_AT_ONCE, rounds)
        replay = capture(comm, lambda: several(at_once))[0].replay if local.is_cuda else lambda: several(at_once)
        for _ in range(rounds // at_once):
            replay()
        words = on_host(control).tolist()
        done = words[CONTROL_EPOCH]
        if words[CONTROL_STATUS]:
            raise SystemExit(f"rank {comm.rank}, {scope}, {programs} programs: a wait ended in round {done}")
        comm.barrier()
    found = sum(comm.all_gather_object(int(on_host(wrong))))
    return {"scope": scope, "programs": programs, "rounds": done, "numbers": done * RANKS**2 * WORDS, "wrong": found}


def cases(comm: Communicator, programs: list[int], rounds: int, early: bool) -> list[dict[str, Any]]:
    """All of them, on one rank."""
    return [case(comm, scope, number, rounds, early) for scope in SCOPES for number in programs]


def main() -> int:
    parser = timing.parser(__doc__, repeats=None, timeout_of="run")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu needs TRITON_INTERPRET=1")
    parser.add_argument("--rounds", type=int, default=125_000, help="of each scope and number of programs")
    parser.add_argument("--programs", type=int, nargs="+", default=[1, 16, 132, 528])
    parser.add_argument("--early", action="store_true", help="publish too early, and be found out")
    options = parser.parse_args()
    if options.device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("--device cpu needs TRITON_INTERPRET=1 in the environment: nothing else runs these kernels there")
    described = timing.machine(timing.check_device(options.device))
    timing.print_machine(described)
    figures = timing.run_over_ranks(options, cases, RANKS, options.programs, options.rounds, options.early)[0]
    timing.finish(options, "gpu_litmus", described, (figures, COLUMNS), figures, early=options.early)
    found = sum(figure["wrong"] for figure in figures)
    print(f"{found} numbers were wrong")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
