"""Reckons how long each launch of a round takes, from latencies of instructions and from bytes; needs no GPU.

    python -m benchmarks.latency --json benchmarks/results/latency.json
    python -m benchmarks.latency --tokens 128 --waits 5     # decode alone, in half a minute; what its paths wait for

The compiled kernels of rank 0 of 8 run on the CPU (`verification/ptx/meter.py`), with 7168 columns and top 8 of 256. Of
kernels that move rows 12 programs run, evenly spread over a grid of 528, which take their rows one after the other; the
others count as these. All programs of other kernels run. What peers store at rank 0 is put there, but for the records'
bytes, on which no time depends. Experts are drawn uniformly, and give back what they got.

Times are in microseconds. `path` is the longest program's, behind those of earlier waves where not all are resident at
once: each result waits for its operands, and nothing for other programs. `first` is what each instruction takes longer
that a launch executes for the first time, because caches of instructions are cold or the assembler's order is not the
best: 9 cycles, fitted to kernels of 128 tokens in int8. `issue` is how long all instructions take at four a cycle and
multiprocessor; PTX counts as machine code. `bytes` is how long those take that must move, each once
(`benchmarks.speed_of_light`). `least` is the longest of path, issue and bytes, behind a launch in a graph. `most` is
launch, path, first, and the longer of issue and bytes, one after the other, as programs that begin together do.

"Round, records to experts" is one whose experts read records themselves, so that nothing is gathered.

"H200 alone" is what `benchmarks.gpu_kernels` measures: eight ranks take turns on one GPU, so each has an eighth of its
L2 cache, and all bytes move in its memory at the rate of a copy. On "8 x H100" bytes go at nominal rates, those for
peers over NVLink, and a flag flies as well. `measured` is of the kernels of commit e0966ea, which routed in three
launches and sent sums without looking ahead. For those, `most` is 0.78 to 1.30 times what each took, and 1.04 to 1.15
times what rounds took: of 128, 1,024 and 4,096 tokens in int8, and 128 and 1,024 in bf16.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton

from benchmarks import timing
from benchmarks.machine_code import GPUS, registers_of, resident_warps
from benchmarks.model import REQUEST
from benchmarks.speed_of_light import CROSSINGS, MACHINES, Work, round_work
from tests.helpers.rounds import make_lanes
from thinwire.tools.planning.model import find_link
from thinwire.triton_kernels import combine, dispatch, permute, signal
from thinwire.triton_kernels.round_layout import COMBINE, DISPATCH, Lane
from thinwire.triton_kernels.signal import SIGNAL_LINE_BYTES
from verification.ptx.device import Device
from verification.ptx.latencies import FENCES, L2_BYTES
from verification.ptx.meter import Launched

H100, SM_90 = MACHINES[0], GPUS["sm_90"]
MEASURED = Path(__file__).parent / "results" / "h200" / "kernels.json"
#: Of a graph, in seconds: `benchmarks/results/h100/latency.txt` has 0.79 to 0.96.
LAUNCH = 0.9e-6
#: Cycles for each instruction that a launch executes for the first time: fitted to kernels of 128 tokens, see above.
FIRST = 9
#: Of a flag over a link, and what the fence in front of it takes longer than on one GPU, in seconds.
FLIGHT = CROSSINGS * H100.crossing - FENCES["sys"] / H100.clock
MOST_PROGRAMS = 4 * SM_90.count
#: Of these so many programs run; senders count how many have arrived.
SENDERS = ("send_tokens_kernel", "send_sums_kernel")
ROW_KERNELS = (*SENDERS, "gather_kernel", "sum_home_kernel")
PROGRAMS = 12
#: What `benchmarks.gpu_kernels` measured as one.
TOGETHER = {"count_kernel": "route", "place_kernel": "route"}
SUMMED = ("path", "first", "issue", "bytes", "least", "most")
COLUMNS = {
    "tokens": "d",
    "machine": "s",
    "kernel": "s",
    "programs": "d",
    "waves": "d",
    "path": ".1f",
    "first": ".1f",
    "issue": ".1f",
    "bytes": ".1f",
    "least": ".1f",
    "most": ".1f",
    "measured": "s",
}


def meter_round(tokens: int, wire: str = "int8", few: int = PROGRAMS, l2_bytes: int = L2_BYTES) -> list[Any]:
    """The launches of a round at rank 0, each with how many of its programs an H100 holds at once.

    Args:
        few: how many programs run of kernels that move rows.
        l2_bytes: larger tensors are not in the L2 cache.
    """
    sizes = REQUEST.ranks, REQUEST.experts, REQUEST.top_k, REQUEST.hidden
    lanes = make_lanes(*sizes, tokens, wire, dtype=torch.bfloat16)
    lane, device = lanes[0], Device(ranks=1, metered=True)
    for each in lanes:
        device.register(f"rank {each.rank}'s buffer", each.buffer)
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, REQUEST.hidden, generator=generator).bfloat16()
    scores = torch.rand(REQUEST.ranks, tokens, REQUEST.experts, generator=generator)
    weights, ids = scores.topk(REQUEST.top_k)

    def chosen(kernel: str, programs: int) -> Sequence[int]:
        if kernel not in ROW_KERNELS:
            return range(programs)
        run = sorted({programs - 1 - number * programs // few for number in range(few)})
        if kernel in SENDERS:
            lane.control[lane.layout.ARRIVALS] += programs - len(run)
        return run

    device.chosen, device.l2_bytes = chosen, l2_bytes
    with ExitStack() as stack:
        for module in (signal, dispatch, permute, combine):
            if hasattr(module, "most_programs"):
                patch = mock.patch.object(module, "most_programs", lambda device, programs=None: MOST_PROGRAMS)
                stack.enter_context(patch)
        stack.enter_context(device.patch())
        dispatch.send_tokens(lane, x, ids[0], weights[0])
        _store_planes(lane, ids, weights)
        _signal(lane, lane.layout.SIGNALS)
        dispatch.wait(lane, DISPATCH, 1.0, 0.1)
        device.metered = False
        permute.route(lane)
        device.metered = True  # the next time there is something to clear
        permute.route(lane)
        rows = torch.zeros(int(lane.expert_offsets[-1]), REQUEST.hidden, dtype=torch.bfloat16)
        permute.gather(lane, rows, torch.tensor(False))
        combine.send_sums(lane, rows, rows.dtype)
        _signal(lane, lane.layout.COMBINE_SIGNALS)
        dispatch.wait(lane, COMBINE, 1.0, 0.1)
        combine.sum_home(lane, torch.empty_like(x))
    return [(launch, resident_programs(device.compiled[launch.kernel])) for launch in device.meters]


def _store_planes(lane: Lane, ids: torch.Tensor, weights: torch.Tensor) -> None:
    words = lane.buffer.view(torch.int32)
    for offset, plane in ((lane.layout.IDS, ids.int()), (lane.layout.WEIGHTS, weights.view(torch.int32))):
        words[offset // 4 :][: plane.numel()] = plane.flatten()


def _signal(lane: Lane, offset: int) -> None:
    """Every peer's line becomes what the own one is."""
    size = REQUEST.ranks * SIGNAL_LINE_BYTES
    lines = lane.buffer[offset : offset + size].view(REQUEST.ranks, SIGNAL_LINE_BYTES)
    lines[:] = lines[lane.rank].clone()


def resident_programs(compiled: Any) -> int:
    """Programs of a kernel that the GPU holds at once."""
    warps = compiled.metadata.num_warps
    return SM_90.count * (resident_warps(registers_of(compiled), warps, compiled.metadata.shared, SM_90) // warps)


def reckon(launch: Launched, resident: int, seconds_of_bytes: float, flight: float = 0.0) -> dict[str, Any]:
    """A line of the table, in microseconds; what a launch waits for begins to fly when the launch begins."""
    waves, times = math.ceil(launch.programs / resident), list(launch.cycles.values())
    path = ((waves - 1) * statistics.median(times) + max(times)) / H100.clock
    issue = launch.instructions / len(times) * launch.programs / (4 * SM_90.count) / H100.clock
    busy, first = max(issue, seconds_of_bytes), FIRST * launch.code / H100.clock
    found = {
        "path": path, "first": first, "issue": issue, "bytes": seconds_of_bytes,
        "least": max(LAUNCH, flight) + max(path, busy), "most": LAUNCH + flight + path + first + busy,
    }  # fmt: skip
    return {
        "kernel": launch.kernel, "programs": launch.programs, "waves": waves, "cycles": max(times),
        **{name: 1e6 * seconds for name, seconds in found.items()},
    }  # fmt: skip


def table(tokens: int, wire: str, few: int, measured: list[dict[str, Any]], waits: int = 0) -> list[dict[str, Any]]:
    """The launches of a round and its sum, on both machines; `few` as of `meter_round`. Prints waits."""
    took = {each["what"]: each for each in measured if (each["tokens"], each["wire"]) == (tokens, wire)}
    works = round_work(replace(REQUEST, max_tokens=tokens, wire=wire, combine_wire=wire))
    link, lines = find_link(H100.link).beta, []
    alone = meter_round(tokens, wire, few, L2_BYTES // REQUEST.ranks)
    # What is above a whole L2 cache in tokens is so in an eighth of it.
    linked = meter_round(tokens, wire, few) if 2 * REQUEST.hidden * tokens < L2_BYTES else alone
    for machine, launches in (("H200 alone", alone), ("8 x H100", linked)):
        of_machine = []
        for launch, resident in launches:
            work = works.get(launch.kernel, Work())
            if machine == "8 x H100":
                flight = FLIGHT if launch.kernel == "wait_kernel" else 0.0
                line = reckon(launch, resident, max(work.memory_bytes / H100.memory, work.link_bytes / link), flight)
            else:
                copied = 1e9 * took["copy"]["GB/s"]
                line = reckon(launch, resident, work.memory_bytes / copied)
            of_machine.append(line)
            for site, cycles in list(launch.path.items())[: waits if machine == "8 x H100" else 0]:
                print(f"{tokens:5} {cycles:7.0f} {site}")
        rounds = {
            "round": of_machine,
            "round, records to experts": [line for line in of_machine if line["kernel"] != "gather_kernel"],
        }
        of_machine += [
            {"kernel": kernel, "programs": 0, "waves": 0}
            | {name: sum(line[name] for line in launched) for name in SUMMED}
            for kernel, launched in rounds.items()
        ]
        for line in of_machine:
            what = TOGETHER.get(line["kernel"], line["kernel"].removesuffix("_kernel"))
            known = machine == "H200 alone" and what in took
            line |= {"tokens": tokens, "wire": wire, "machine": machine}
            line["measured"] = f"{took[what]['us']:.1f} {what}" if known else ""
        lines += of_machine
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = timing.parser(__doc__, repeats=None)
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 4096], choices=[128, 1024, 4096])
    parser.add_argument("--wires", nargs="+", default=["int8"], choices=["int8", "none"])
    parser.add_argument(
        "--programs", type=int, default=PROGRAMS, help=f"of kernels that move rows (default {PROGRAMS}); 528 are all"
    )
    parser.add_argument(
        "--waits", type=int, default=0, metavar="N", help="print the N instructions that each path waits for longest"
    )
    options = parser.parse_args(arguments)
    measured = json.loads(MEASURED.read_text())["figures"]
    lines = [
        line
        for tokens in options.tokens
        for wire in options.wires
        for line in table(tokens, wire, options.programs, measured, options.waits)
    ]
    timing.finish(options, "latency", {"triton": triton.__version__}, (lines, COLUMNS), lines)


if __name__ == "__main__":
    main()
