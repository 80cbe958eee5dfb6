"""`thinwire demo --link`: the demo's model on two hosts, joined by a link of a given rate, in each wire format.

Both legs of a round cross the link: it is here that fewer bytes are less time.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from thinwire.comm.communicator import Communicator
from thinwire.moe.dispatched import Dispatched, ExpertRows
from thinwire.moe.layer import MoELayer
from thinwire.moe.parallel import ExpertParallel
from thinwire.moe.tiny import TinyMoE, load_tiny_moe, nats, text_windows
from thinwire.tools.link import run_on_two_hosts
from thinwire.tools.progress import Report

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


def score_rank(comm: Communicator, text: str, wires: list[str], told: str | None) -> list[dict[str, Any]]:
    """Runs in both ranks: a `LinkScore`'s fields for each wire.

    Args:
        text: its bytes, as Latin-1.
        told: the file that a `Report` writes to.
    """
    report = Report(told if comm.rank == 0 else None)
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
            report.stage(f"scoring the text in {wire} ...", len(steps))
            cost = 0.0
            for inputs, targets in steps:
                cost += nats(model(inputs), targets)
                report.step()
            bits[wire] = sum(comm.all_gather_object(cost)) / math.log(2.0) / (len(content) - 1)
            ep.times, ep.sent = [], []  # those were also the warm-up
        report.stage("timing rounds of all formats in turn ...", _TURNS * len(wires))
        for _ in range(_TURNS):
            for _, model in models.values():
                model(steps[0][0])
                report.step()
    scores = []
    for wire, (ep, _) in models.items():
        samples = [max(of_ranks) for of_ranks in zip(*comm.all_gather_object(ep.times), strict=True)]
        sent = statistics.fmean(number for of_rank in comm.all_gather_object(ep.sent) for number in of_rank)
        scores.append(asdict(LinkScore(wire, statistics.median(samples), sent, bits[wire], samples)))
    return scores


def score_on_link(rate: str, wires: list[str], text: bytes, timeout: float, report: Report) -> list[LinkScore]:
    """Scores a text between two hosts joined by a link of that rate, such as "1gbit"; `wires` begins with "none".

    Raises:
        LinkUnavailable: there can be no such link here.
        ThinwireError: a rank failed.
        TimeoutError: time was up.
    """
    report.stage(f"joining two hosts by a link of {rate}, and starting a rank on each ...")
    settings = {"text": text.decode("latin-1"), "wires": wires, "told": report.path}
    found = run_on_two_hosts(f"{__name__}:score_rank", settings, rate=rate, timeout=timeout)
    return [LinkScore(**score) for score in found[0]]


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


def show_link_scores(rate: str, scores: list[LinkScore]) -> None:
    """Prints the chart, and what its columns are."""
    unicode = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    print(format_chart(scores, "█" if unicode else "#"))
    print(
        "\nA round is dispatch and combine of one MoE layer, with quantising and\n"
        f"dequantising. Its ms are the median of {len(scores[0].samples)} rounds on the slower rank; the\n"
        f"formats took turns. MB are what a rank sends over the link of {rate}/s. Both\n"
        "hosts are network namespaces of this machine and share its cores; with cores of\n"
        "their own they gain more over fast links. A row has 256 columns: longer ones\n"
        "gain more, too, as each carries expert ids, weights and padding besides."
    )
