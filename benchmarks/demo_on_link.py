"""The demo's model on two hosts, joined by a link of a given rate, in each wire format.

    sudo .venv/bin/python -m benchmarks.demo_on_link --rate 1gbit

Both legs of a round cross the link: it is here that fewer bytes are less time. The hosts are network namespaces of this
machine (see `benchmarks/link.py`), with a rank each. Who is not root may make them on most systems in a namespace of
users: `unshare --user --map-root-user --net .venv/bin/python -m benchmarks.demo_on_link`.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import link, timing
from thinwire.comm.communicator import Communicator
from thinwire.moe.dispatched import Dispatched, ExpertRows
from thinwire.moe.layer import MoELayer
from thinwire.moe.parallel import ExpertParallel
from thinwire.tools.demo.tiny_moe import HELD_OUT_PATH, TinyMoE, load_tiny_moe, nats, text_windows

#: Windows of a rank in one call of the model: 10,240 tokens, as when a batch of prompts comes in.
_WINDOWS = 40
#: How often each format is timed, in turn with the others; each time is a round of every layer.
_TURNS = 5
_BAR = 24


@dataclass(frozen=True)
class LinkScore:
    """One wire format's rounds over the link. `seconds` are medians, `wire_bytes` means over ranks; of both legs."""

    wire: str
    seconds: float
    wire_bytes: float
    bits_per_byte: float
    samples: list[float]


class _TimedExpertParallel(ExpertParallel):
    """Rounds in bfloat16 under a model in float32. Each leg begins when all ranks are there, and is timed."""

    times: list[float]  # a round's seconds on this rank
    sent: list[int]  # and bytes to the other rank

    def dispatch(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, *, lane: int = 0, layer: int = 0
    ) -> Dispatched:
        x = x.bfloat16()
        self.comm.barrier()
        began = time.perf_counter()
        d = super().dispatch(x, topk_ids, topk_weights, lane=lane, layer=layer)
        _ = d.tokens  # dequantised here, at the latest
        self.times.append(time.perf_counter() - began)
        self.sent.append(d.dispatch_traffic.wire_bytes + d.combine_traffic.wire_bytes)
        return d

    def combine(
        self, expert_out: ExpertRows, d: Dispatched, *, weighted: bool = False, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        self.comm.barrier()
        began = time.perf_counter()
        y = super().combine(expert_out, d, weighted=weighted, out=out)
        self.times[-1] += time.perf_counter() - began
        return y.float()


def score_rank(comm: Communicator, text: str, wires: list[str]) -> list[dict[str, Any]]:
    """Runs in both ranks: a `LinkScore`'s fields for each wire; the text's bytes come as Latin-1."""
    content = text.encode("latin-1")
    config = load_tiny_moe().config
    sizes = (config.num_experts, config.top_k, config.hidden_size, _WINDOWS * config.context)
    steps = [
        (inputs[start + comm.rank : start + 2 * _WINDOWS : 2], targets[start + comm.rank : start + 2 * _WINDOWS : 2])
        for inputs, targets in text_windows(content, config.context)
        for start in range(0, inputs.shape[0], 2 * _WINDOWS)
    ]

    def sharded(wire: str) -> tuple[_TimedExpertParallel, TinyMoE]:
        ep = _TimedExpertParallel(comm, *sizes, wire=wire, dtype=torch.bfloat16, transport="staged")
        ep.times, ep.sent = [], []
        model = load_tiny_moe(ep=ep)
        for module in model.modules():
            if isinstance(module, MoELayer):
                module.experts.bfloat16()
        return ep, model

    models = {wire: sharded(wire) for wire in wires}
    bits = {}
    with torch.inference_mode():
        for wire, (ep, model) in models.items():
            cost = sum(nats(model(inputs), targets) for inputs, targets in steps)
            bits[wire] = sum(comm.all_gather_object(cost)) / math.log(2.0) / (len(content) - 1)
            ep.times, ep.sent = [], []  # those were also the warm-up
        for _ in range(_TURNS):
            for _, model in models.values():
                model(steps[0][0])
    scores = []
    for wire, (ep, _) in models.items():
        samples = [max(of_ranks) for of_ranks in zip(*comm.all_gather_object(ep.times), strict=True)]
        sent = statistics.fmean(number for of_rank in comm.all_gather_object(ep.sent) for number in of_rank)
        scores.append(asdict(LinkScore(wire, statistics.median(samples), sent, bits[wire], samples)))
    return scores


def format_chart(scores: list[LinkScore], block: str) -> str:
    """A line for each format, with a bar as long as its rounds take; 80 columns."""
    longest, exact = max(score.seconds for score in scores), scores[0].seconds
    lines = [f"{'wire':11}{'ms a round':>11}{'speedup':>9}{'MB a round':>12}{'bits/byte':>11}"]
    for s in scores:
        name = "none (bf16)" if s.wire == "none" else s.wire
        bar = block * max(1, round(_BAR * s.seconds / longest))
        lines.append(
            f"{name:11}{1e3 * s.seconds:11.1f}{exact / s.seconds:9.2f}{s.wire_bytes / 1e6:12.2f}"
            f"{s.bits_per_byte:11.4f}  {bar}"
        )
    return "\n".join(lines)


@link.or_skipped
def main(arguments: Sequence[str] | None) -> None:
    parser = timing.parser(__doc__, repeats=None)
    parser.add_argument("--rate", default="1gbit", help="bits a second each way, such as 100mbit")
    parser.add_argument("--wires", nargs="+", default=["int8", "int8+h64", "int6+h64", "int4"])
    parser.add_argument("--text", type=Path, default=HELD_OUT_PATH, help="scored instead of the held-out text")
    parser.add_argument("--timeout", type=float, default=600.0)
    options = parser.parse_args(arguments)
    text = options.text.read_bytes()
    settings = {"text": text.decode("latin-1"), "wires": list(dict.fromkeys(["none", *options.wires]))}
    print(f"scoring {len(text):,} bytes on two hosts joined by {options.rate}, in {', '.join(settings['wires'])} ...")
    job = "benchmarks.demo_on_link:score_rank"
    found, _ = link.run_on_two_hosts(job, settings, rate=options.rate, timeout=options.timeout)
    scores = [LinkScore(**score) for score in found]
    unicode = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    print(format_chart(scores, "█" if unicode else "#"))
    print(
        "\nA round is dispatch and combine of one MoE layer, with quantising and\n"
        f"dequantising. Its ms are the median of {len(scores[0].samples)} rounds on the slower rank; the\n"
        "formats took turns. MB are what a rank sends over the link. The hosts share this\n"
        "machine's cores; with cores of their own they gain more over fast links. A row\n"
        "has 256 columns: longer ones gain more, too, as each carries ids and weights."
    )
    if options.json:
        described = timing.machine(timing.check_device("cpu"))
        timing.write_json(options.json, machine=described, rate=options.rate, scores=[asdict(s) for s in scores])


if __name__ == "__main__":
    main()
