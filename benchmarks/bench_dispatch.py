"""Expert parallelism's two legs beside a plain copy: dispatch of 1 to 8192 tokens a rank, and combine.

    python -m benchmarks.bench_dispatch --device cpu --json benchmarks/results/cpu/dispatch.json
    python -m benchmarks.bench_dispatch --device cuda --ranks 8 --experts 256

Every rank dispatches as many bfloat16 tokens, each to --top-k random experts, and gets them back from experts that do
nothing. Dispatch is from the call until the experts' rows lie sorted in one tensor (`Dispatched.tokens`; on a GPU
`Dispatched.gather`, which does not wait for the host); combine until the weighted sums are home. Columns:

    rows       expert rows that a rank gets: with 2 ranks and top-8, eight times as many as it has tokens
    leave      rows that leave a rank on the dispatch leg: a token goes to another rank once, whatever the number of its
               experts there; as many sums come back
    MB, wire MB   of those rows in bfloat16, and what is sent instead, expert ids and router weights included
    copy       time of a plain copy that reads and writes, together, as many bytes as a leg must at the least: the
               tokens and the experts' rows, once each
    share      the copy's time by the leg's: 1 is a leg that costs no more than that
    error      relative L2 of what comes back, against the same round sent exactly

All of it runs in turn, round after round, in the same processes; a time is that of the slowest rank.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a file
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "src")]

import torch

from benchmarks import timing
from thinwire.comm import Communicator
from thinwire.errors import TransportUnavailable
from thinwire.moe.parallel import ExpertParallel

ROUNDS = (("direct", "none"), ("direct", "int8"), ("staged", "none"), ("staged", "int8"))
COLUMNS = {
    "ranks": "d",
    "tokens": "d",
    "hidden": "d",
    "round": "s",
    "rows": "d",
    "leave": "d",
    "MB": ".3f",
    "wire MB": ".3f",
    "copy us": ".0f",
    "dispatch us": ".0f",
    "share": ".3f",
    "combine us": ".0f",
    "share ": ".3f",
    "error": ".4f",
}
COPY = "copy"
_MEMORY_SHARE = 0.5  # of what is free, for all ranks together


def measure(
    comm: Communicator, tokens: int, hidden: int, num_experts: int, top_k: int, repeats: int, sample_seconds: float
) -> dict[str, Any]:
    """One rank's part: samples of both legs in every way, traffic and errors."""
    device = comm.device
    generator = torch.Generator().manual_seed(1000 * tokens + comm.rank)
    x = torch.randn(tokens, hidden, generator=generator).bfloat16().to(device)
    logits = torch.randn(tokens, num_experts, generator=generator).to(device)
    weights, ids = (part.contiguous() for part in logits.softmax(-1).topk(top_k))
    laps = timing.Laps(device)
    rounds: dict[str, Callable[[], object]] = {}
    result: dict[str, Any] = {"missing": {}, "traffic": {}, "error": {}, "rows": 0}
    outputs: dict[str, torch.Tensor] = {}
    layers = []
    for transport, wire in ROUNDS:
        name = f"{transport} {wire}"
        try:
            ep = ExpertParallel(comm, num_experts, top_k, hidden, tokens, wire=wire, transport=transport)
        except TransportUnavailable as reason:
            result["missing"][name] = str(reason)
            continue
        layers.append(ep)
        first = ep.dispatch(x, ids, weights)
        result["rows"] = first.tokens.shape[0]
        result["traffic"][name] = [
            (leg.rows, leg.logical_bytes, leg.wire_bytes) for leg in (first.dispatch_traffic, first.combine_traffic)
        ]
        outputs[name] = ep.combine(first.tokens, first)
        del first
        rounds[name] = _round(ep, x, ids, weights, result["rows"], laps, name)
    exact = next(output for name, output in outputs.items() if name.endswith("none"))
    for name, output in outputs.items():
        result["error"][name] = timing.relative_error(output, exact)
    outputs.clear()
    source = torch.randn(max(1, (tokens + result["rows"]) // 2), hidden, device=device, dtype=x.dtype)
    target = torch.empty_like(source)
    functions = {COPY: lambda: target.copy_(source), **rounds}
    samples = timing.interleaved_over_ranks(comm, functions, repeats, sample_seconds=sample_seconds, laps=laps)
    for ep in layers:
        ep.close()
    return {**result, "samples": samples, "copied_bytes": 2 * source.nbytes}


def _round(
    ep: ExpertParallel,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    rows: int,
    laps: timing.Laps,
    name: str,
) -> Callable[[], object]:
    out = torch.empty_like(x)
    on_gpu = x.device.type == "cuda"

    def run() -> None:
        laps.start()
        d = ep.dispatch(x, ids, weights)
        tokens = d.gather(rows)[0] if on_gpu else d.tokens
        laps.end(f"{name} dispatch")
        ep.combine(tokens, d, out=out)
        laps.end(f"{name} combine")

    return run


def figures(tokens: int, hidden: int, ranks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A line for each way to make the round: medians, and shares within the rounds."""
    samples, lines = ranks[0]["samples"], []
    for name, legs in ranks[0]["traffic"].items():
        line: dict[str, Any] = {
            "ranks": len(ranks),
            "tokens": tokens,
            "hidden": hidden,
            "round": name,
            "expert_rows": ranks[0]["rows"],
            "copied_bytes": ranks[0]["copied_bytes"],
            "copy": statistics.median(samples[COPY]),
            "error": max(rank["error"][name] for rank in ranks),
        }
        for leg, (rows, logical_bytes, wire_bytes) in zip(("dispatch", "combine"), legs, strict=True):
            seconds = samples[f"{name} {leg}"]
            line[leg] = {
                "rows": rows,
                "logical_bytes": logical_bytes,
                "wire_bytes": wire_bytes,
                **timing.spread(seconds),
                "share": timing.median_ratio(samples[COPY], seconds),
            }
        lines.append(line)
    return lines


def _columns(line: Mapping[str, Any]) -> dict[str, Any]:
    dispatch, combine = line["dispatch"], line["combine"]
    return {
        **line,
        "rows": line["expert_rows"],
        "leave": dispatch["rows"],
        "MB": dispatch["logical_bytes"] / 1e6,
        "wire MB": dispatch["wire_bytes"] / 1e6,
        "copy us": line["copy"] * 1e6,
        "dispatch us": dispatch["seconds"] * 1e6,
        "share": dispatch["share"],
        "combine us": combine["seconds"] * 1e6,
        "share ": combine["share"],
    }


def memory_needed(tokens: int, hidden: int, top_k: int) -> int:
    """About how many bytes a rank holds at once: experts' rows three times, tokens and records a few times."""
    return (3 * top_k + 8) * tokens * hidden * torch.bfloat16.itemsize


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def main(arguments: Sequence[str] | None = None) -> None:
    parser = timing.parser(__doc__, repeats=11, timeout_of="size")
    parser.set_defaults(timeout=600.0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 128, 1024, 8192], help="tokens of a rank")
    parser.add_argument("--hidden", type=int, nargs="+", default=[2048, 4096, 7168])
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=8)
    options = parser.parse_args(arguments)
    device = timing.check_device(options.device)
    described = timing.machine(device)
    timing.print_machine(described)
    together = options.device == "cpu" or timing.share_a_gpu(options.device, options.ranks)
    on_one_device = options.ranks if together else 1
    lines: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    for hidden in options.hidden:
        for tokens in options.tokens:
            needed = on_one_device * memory_needed(tokens, hidden, options.top_k)
            if needed > _MEMORY_SHARE * _free_memory(device):
                skipped[f"{tokens} tokens of {hidden}"] = f"needs {needed / 2**30:.1f} GiB of memory"
                continue
            sizes = (tokens, hidden, options.experts, options.top_k, options.repeats, options.sample_seconds)
            ranks = timing.run_over_ranks(options, measure, options.ranks, *sizes)
            lines += figures(tokens, hidden, ranks)
            skipped |= ranks[0]["missing"]
    settings = {name: getattr(options, name) for name in ("experts", "top_k", "repeats")}
    table = ([_columns(line) for line in lines], COLUMNS)
    timing.finish(options, "dispatch", described, table, lines, **settings, skipped=skipped)


if __name__ == "__main__":
    main()
