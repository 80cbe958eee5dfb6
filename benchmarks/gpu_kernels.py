"""Times the kernels of a round on one GPU, beside a plain copy: one rank's share of a round of eight, no link.

    python -m benchmarks.gpu_kernels --json benchmarks/results/gpu/kernels.json

One thread plays eight ranks on one GPU, so every store stays in its memory and no wait blocks. Each kernel runs for all
ranks in turn, in one CUDA graph; its time is the graph's divided by eight. `GB/s` counts only the bytes that a kernel
must read and write; `share` is that divided by the rate of a copy of a gigabyte in the same run. `round` is a graph of
all launches. Everything runs in turn, round after round; times are medians.

`N threads` are rounds through `ExpertParallel` of ranks that run at once on that GPU and wait for each other, each with
its own graph; the time is a rank's. They share its memory and multiprocessors, so with many tokens N ranks take
about N times as long as one.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import timing
from tests.gpu.capture import capture
from tests.helpers.round_kernels import KERNELS
from tests.helpers.rounds import make_lanes
from thinwire._rank_thread import require_queues
from thinwire.comm.communicator import Communicator
from thinwire.moe.parallel import ExpertParallel
from thinwire.testing import run_ranks
from thinwire.triton_kernels.round_layout import COMBINE, DISPATCH, Lane

RANKS, EXPERTS, TOP_K, HIDDEN = 8, 256, 8, 7168
_COPY_BYTES = 1 << 30
_ROUNDS = 10  # in a graph
COLUMNS = {"tokens": "d", "wire": "s", "what": "s", "us": ".1f", "GB/s": ".0f", "share": ".2f"}


def bench(tokens: int, wire: str, repeats: int) -> list[dict[str, Any]]:
    """Figures of each kernel and of the whole round, a rank."""
    generator = torch.Generator("cuda").manual_seed(tokens)
    lanes = make_lanes(RANKS, EXPERTS, TOP_K, HIDDEN, tokens, wire, device="cuda", dtype=torch.bfloat16)
    xs = [torch.randn(tokens, HIDDEN, device="cuda", generator=generator).bfloat16() for _ in lanes]
    scores = [torch.rand(tokens, EXPERTS, device="cuda", generator=generator) for _ in lanes]
    ids = [score.topk(TOP_K).indices for score in scores]
    weights = [torch.rand(tokens, TOP_K, device="cuda", generator=generator) for _ in lanes]
    outs = [torch.empty_like(x) for x in xs]
    dropped = torch.empty((), dtype=torch.bool, device="cuda")

    def send_tokens() -> None:
        for lane, x, own_ids, own_weights in zip(lanes, xs, ids, weights, strict=True):
            KERNELS.send_tokens(lane, x, own_ids, own_weights)

    def wait(phase: int) -> None:
        for lane in lanes:
            KERNELS.wait(lane, phase, 10.0, 1.0)

    def route() -> None:
        for lane in lanes:
            KERNELS.route(lane)

    send_tokens()
    wait(DISPATCH)
    route()
    rows = [torch.empty(int(lane.expert_offsets[-1]), HIDDEN, dtype=torch.bfloat16, device="cuda") for lane in lanes]

    def gather() -> None:
        for lane, own_rows in zip(lanes, rows, strict=True):
            KERNELS.gather(lane, own_rows, dropped)

    def send_sums() -> None:
        for lane, own_rows in zip(lanes, rows, strict=True):
            KERNELS.send_sums(lane, own_rows, torch.bfloat16)

    def sum_home() -> None:
        for lane, out in zip(lanes, outs, strict=True):
            KERNELS.sum_home(lane, out)

    def whole() -> None:
        send_tokens()
        wait(DISPATCH)
        route()
        gather()
        send_sums()
        wait(COMBINE)
        sum_home()

    gather()
    send_sums()
    wait(COMBINE)
    sum_home()
    torch.cuda.synchronize()
    _assert_right(lanes, xs, weights, outs, wire)

    source, target = (torch.empty(_COPY_BYTES // 2, dtype=torch.uint8, device="cuda") for _ in range(2))
    kernels: dict[str, Callable[[], object]] = {
        "send_tokens": send_tokens, "route": route, "gather": gather, "send_sums": send_sums, "sum_home": sum_home,
        "round": whole,
    }  # fmt: skip
    functions = {name: timing.captured(function) for name, function in kernels.items()}
    times = timing.interleaved({**functions, "copy": lambda: target.copy_(source)}, torch.device("cuda"), repeats)
    copied = _COPY_BYTES / statistics.median(times["copy"])
    figures = []
    for name, num_bytes in _bytes(lanes, ids, rows, tokens).items():
        seconds = statistics.median(times[name]) / RANKS
        rate = num_bytes / seconds
        figures.append(
            {
                "tokens": tokens, "wire": wire, "what": name, "seconds": seconds, "bytes": num_bytes,
                "us": seconds * 1e6, "GB/s": rate / 1e9, "share": rate / copied,
                "fastest us": min(times[name]) / RANKS * 1e6, "slowest us": max(times[name]) / RANKS * 1e6,
            }
        )  # fmt: skip
    figures.append({"tokens": tokens, "wire": wire, "what": "copy", "us": _COPY_BYTES / copied * 1e6,
                    "GB/s": copied / 1e9, "share": 1.0, "bytes": _COPY_BYTES})  # fmt: skip
    return figures


@torch.no_grad()
def at_once(comm: Communicator, tokens: int, wire: str, repeats: int) -> dict[str, Any]:
    """Figures of rounds of ranks that run at once, through the library."""
    with ExpertParallel(comm, EXPERTS, TOP_K, HIDDEN, tokens, wire=wire, transport="direct") as ep:
        x = torch.randn(tokens, HIDDEN, device=comm.device).bfloat16()
        ids = torch.rand(tokens, EXPERTS, device=comm.device).topk(TOP_K).indices
        weights = torch.rand(tokens, TOP_K, device=comm.device)
        capacity = tokens * TOP_K * 5 // 4 + 64

        def step() -> torch.Tensor:
            for _ in range(_ROUNDS):
                d = ep.dispatch(x, ids, weights)
                y = ep.combine(d.gather(capacity)[0], d)
            return y

        step()
        ep.check()
        graph, y = capture(comm, step)
        times = timing.interleaved_over_ranks(comm, {"graph": graph.replay, "eager": step}, repeats, sample_seconds=0)
        ep.check()
        error = timing.relative_error(y, x.float() * weights.sum(1, keepdim=True))
        if not error < 0.02:
            raise SystemExit(f"{wire}: the result of {comm.size} threads is {error:.3g} off")
    seconds, eager = (statistics.median(times[name]) / _ROUNDS for name in ("graph", "eager"))
    return {"seconds": seconds, "us": seconds * 1e6, "eager us": eager * 1e6}


def _assert_right(
    lanes: list[Lane], xs: list[torch.Tensor], weights: list[torch.Tensor], outs: list[torch.Tensor], wire: str
) -> None:
    """Experts that change nothing give a token the sum of its weights."""
    for x, own_weights, out in zip(xs, weights, outs, strict=True):
        error = timing.relative_error(out, x.float() * own_weights.sum(1, keepdim=True))
        if not error < 0.02:
            raise SystemExit(f"{wire}: a round's result is {error:.3g} off; nothing was measured")


def _bytes(lanes: list[Lane], ids: list[torch.Tensor], rows: list[torch.Tensor], tokens: int) -> dict[str, int]:
    """What a rank's kernels cannot but read and write of rows and records, on average."""
    owners = [torch.zeros(tokens, RANKS, device="cuda").scatter_(1, own // (EXPERTS // RANKS), 1) for own in ids]
    records = int(sum(float(own.sum()) for own in owners)) // RANKS
    num_rows = sum(map(len, rows)) // RANKS
    row = HIDDEN * 2
    there, back = (wire.row_bytes(HIDDEN, torch.bfloat16) for wire in (lanes[0].wire, lanes[0].combine_wire))
    moved = {
        "send_tokens": tokens * row + records * there,
        "route": RANKS * tokens * TOP_K * 8,
        "gather": records * there + num_rows * row,
        "send_sums": num_rows * row + records * back,
        "sum_home": records * back + tokens * row,
    }
    return moved | {"round": sum(moved.values())}


def main() -> None:
    parser = timing.parser(__doc__, repeats=30)
    parser.add_argument("--device", choices=("cuda",), default="cuda")
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 1024, 4096], help="of a rank")
    parser.add_argument("--wires", nargs="+", default=["int8", "none"], metavar="WIRE")
    parser.add_argument("--threads", type=int, nargs="*", default=[2, 8], help="ranks that run at once")
    options = parser.parse_args()
    require_queues(max(options.threads, default=0))  # before CUDA starts
    described = timing.machine(timing.check_device("cuda"))
    timing.print_machine(described)
    sizes = {"ranks": RANKS, "experts": EXPERTS, "top_k": TOP_K, "hidden": HIDDEN}
    figures = []
    for tokens in options.tokens:
        for wire in options.wires:
            of_kernels = bench(tokens, wire, options.repeats)
            figures += of_kernels
            timing.print_table(of_kernels, COLUMNS)
            torch.cuda.empty_cache()
            for size in options.threads:
                call = (at_once, size, tokens, wire, options.repeats)
                found = run_ranks(*call, mode="thread", device="cuda", timeout=120)[0]
                entry = {"tokens": tokens, "wire": wire, "what": f"{size} threads", "GB/s": 0.0, "share": 0.0, **found}
                figures.append(entry)
                print(entry, flush=True)
            if options.json:  # as it goes: the time on a GPU may be over at any moment
                found = {"benchmark": "gpu_kernels", "machine": described, "sizes": sizes, "figures": figures}
                timing.write_json(options.json, **found)
    timing.print_table(figures, COLUMNS)


if __name__ == "__main__":
    main()
