"""Measures the host's time for calls on a GPU without one: a round trip, and collectives, on the direct transport.

    python -m benchmarks.bench_launch --json benchmarks/results/cpu/launch.json

The calls are the library's, with Triton's own launcher below them. Below that the stub of `tests.helpers.stub_driver`
replaces CUDA's driver and records launches. So the times are all that Python and Triton do. On a GPU, the driver adds 2
to 3 us a launch by published figures, and torch's CUDA allocator and torch.cuda replace stand-ins. Times are of one
rank of several, whose peers do nothing. `Triton's` are the same calls if each launch asks Triton for the compiled
kernel, as `kernel[grid](...)` does. Both run in turn, 0.3 ms at a time, so most samples are not interrupted on a busy
machine. Collectives run with THINWIRE_COLLECTIVE_LAUNCHES=one; the larger all-reduce is too large for it.

    launches        of a call
    us              median time of a call
    quarter, three quarters    of the samples took less
    Triton's us     as above
    ratio           Triton's divided by ours, within the rounds
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

if not __package__:  # run as a file
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "src")]

import torch
from triton.runtime.interpreter import InterpretedFunction

import thinwire as tw
from benchmarks import timing
from tests.helpers.stub_driver import StubDriver, stub_driver
from thinwire.comm import Communicator
from thinwire.fused.all_to_all import open_channel
from thinwire.fused.collective import open_collectives
from thinwire.fused.device_channel import DeviceChannel
from thinwire.fused.direct_transport import DirectTransport
from thinwire.moe.parallel import ExpertParallel
from thinwire.testing import run_ranks
from thinwire.triton_kernels import (  # compiled, all of them
    LAUNCHES_VARIABLE,
    all_to_all_v,
    collective,
    combine,
    dispatch,
    permute,
)
from thinwire.triton_kernels.launch import Launcher
from thinwire.triton_kernels.round_layout import COMBINE, DISPATCH

COLUMNS = {
    "call": "s", "launches": "d", "us": ".1f", "quarter": ".1f", "three quarters": ".1f", "Triton's us": ".1f",
    "ratio": ".2f",
}  # fmt: skip
#: Microseconds of the host that a round trip may take.
GOAL = 60
_SAMPLE_US = 300
# A small capacity, as sizes do not matter and the CPU's allocator asks the system for large tensors.
RANKS, EXPERTS, TOP_K, HIDDEN, TOKENS, CAPACITY, ROWS = 8, 256, 8, 7168, 128, 16, 8
WHOLE = "round trip"


def calls(comm: Communicator, ep: ExpertParallel) -> dict[str, Callable[[], object]]:
    """The whole round trip, collectives, an all-to-all-v, and the round trip's launchers."""
    x, out = torch.randn(TOKENS, HIDDEN).bfloat16(), torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16)
    ids = torch.rand(TOKENS, EXPERTS).topk(TOP_K).indices
    weights, rows = torch.rand(TOKENS, TOP_K), torch.randn(CAPACITY, HIDDEN).bfloat16()
    lane, dropped = ep._assembly.rounds.lanes[0], torch.empty((), dtype=torch.bool)

    def whole() -> None:
        d = ep.dispatch(x, ids, weights)
        d.gather(CAPACITY)
        ep.combine(rows, d, out=out)

    def by_record() -> None:
        d = ep.dispatch(x, ids, weights)
        d.gather_records(CAPACITY)
        ep.combine(rows, d, out=out, weighted=True)

    part, larger = torch.randn(ROWS, HIDDEN).bfloat16(), torch.randn(10 * ROWS, HIDDEN).bfloat16()
    options = {"wire": "int8", "comm": comm, "transport": "direct"}
    counts = [ROWS] + [0] * (RANKS - 1)
    return {
        WHOLE: whole,
        "round trip by record": by_record,
        "all_reduce": lambda: tw.all_reduce(part, out=part, **options),
        "all_reduce, larger": lambda: tw.all_reduce(larger, out=larger, **options),
        "reduce_scatter": lambda: tw.reduce_scatter(part, **options),
        "all_gather": lambda: tw.all_gather(part, **options),
        "all_to_all_v": lambda: tw.all_to_all_v(part, counts, counts, **options),
        "send_tokens": lambda: dispatch.send_tokens(lane, x, ids, weights),
        "wait (dispatch)": lambda: dispatch.wait(lane, DISPATCH, 10.0, 1.0),
        "route": lambda: permute.route(lane),
        "gather": lambda: permute.gather(lane, rows, dropped),
        "send_sums": lambda: combine.send_sums(lane, rows, torch.bfloat16),
        "wait (combine)": lambda: dispatch.wait(lane, COMBINE, 10.0, 1.0),
        "sum_home": lambda: combine.sum_home(lane, out),
    }


@torch.no_grad()
def measure(comm: Communicator, stub: StubDriver, repeats: int) -> list[dict[str, Any]] | None:
    """Figures of each call, at the first rank; the others are there for the first meeting alone."""
    ep = ExpertParallel(comm, EXPERTS, TOP_K, HIDDEN, TOKENS, transport="direct")
    ends = ep._assembly.rounds, open_collectives(comm), open_channel(comm, None)
    if comm.rank:
        return None
    assert not {type(kernels.wait_kernel) for kernels in (all_to_all_v, collective)} & {InterpretedFunction}
    for end in ends:  # from here on the host waits for nothing, and for no peer, as these are gone
        assert isinstance(end, DirectTransport)
        end.on_gpu, end.peers_calls = True, ()
        if isinstance(end, DeviceChannel):
            end.always_looks = False
    by_triton = mock.patch.object(Launcher, "__call__", _ask_triton)
    figures = []
    for name, call in calls(comm, ep).items():
        samples: dict[str, list[float]] = {"ours": [], "Triton's": []}
        for _ in range(3):
            call()
        first = stub.num_launches
        call()
        launches = stub.num_launches - first
        own_times = _calls_of_a_sample(call)
        with by_triton:
            tritons_times = _calls_of_a_sample(call)
        for _ in range(repeats):
            samples["ours"].append(_microseconds(call, own_times))
            with by_triton:
                samples["Triton's"].append(_microseconds(call, tritons_times))
        ours, tritons = samples.values()
        figures.append(
            {
                "call": name,
                "launches": launches,
                "us": statistics.median(ours),
                "quarter": statistics.quantiles(ours, n=4)[0],
                "three quarters": statistics.quantiles(ours, n=4)[2],
                "Triton's us": statistics.median(tritons),
                "ratio": statistics.median(theirs / own for theirs, own in zip(tritons, ours, strict=True)),
            }
        )
    return figures


def _ask_triton(
    launch: Launcher, programs: int, blocks: int = 1, *changing: tuple[Any, ...], now: object = None
) -> None:
    launch._launch_by_triton(programs, blocks, *(*changing, (), (), ())[:3])


def _calls_of_a_sample(call: Callable[[], object]) -> int:
    return max(1, int(_SAMPLE_US / min(_microseconds(call, 1) for _ in range(10))))


def _microseconds(call: Callable[[], object], times: int) -> float:
    start = time.perf_counter_ns()
    for _ in range(times):
        call()
    return (time.perf_counter_ns() - start) / times / 1000


def main() -> None:
    parser = timing.parser(__doc__, repeats=1000)
    options = parser.parse_args()
    described = timing.machine(torch.device("cpu"))
    timing.print_machine(described)
    # Communicators of the CPU, whose rounds are given the kernels of a GPU.
    environ = {"THINWIRE_BACKEND": "triton", "TRITON_INTERPRET": "1", LAUNCHES_VARIABLE: "one"}
    gc.disable()  # as timeit does: all that torch and Triton have imported would be looked through now and then
    with stub_driver() as stub, mock.patch.dict(os.environ, environ):
        figures = run_ranks(measure, RANKS, stub, options.repeats, mode="thread", timeout=900)[0]
    assert figures is not None
    sizes = {
        "ranks": RANKS, "experts": EXPERTS, "top_k": TOP_K, "hidden": HIDDEN, "tokens": TOKENS, "capacity": CAPACITY,
        "rows": ROWS,
    }  # fmt: skip
    timing.finish(options, "launch", described, (figures, COLUMNS), figures, sizes=sizes, goal_us=GOAL)
    whole = figures[0]
    reached = "reached" if whole["us"] <= GOAL else "not reached"
    print(f"goal for a round trip: {GOAL} us, {reached}: {whole['us']:.1f} us and {whole['launches']} launches")


if __name__ == "__main__":
    main()
