"""`thinwire demo`: a trained MoE model split over CPU ranks, its tokens crossing between them in each wire format."""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from thinwire.comm.communicator import Communicator
from thinwire.files import write_file
from thinwire.fused.backend import select_backend
from thinwire.moe.dispatched import Dispatched, ExpertRows
from thinwire.moe.parallel import ExpertParallel
from thinwire.moe.tiny import TinyMoE, TinyMoEConfig, load_tiny_moe, nats, text_windows
from thinwire.testing import run_ranks
from thinwire.tools.progress import Report
from thinwire.version import VERSION
from thinwire.wire import WireFormat

#: Windows that a rank scores in one call of the model.
_WINDOWS_PER_STEP = 4
#: Steps over which the legs' errors are measured.
_ERROR_STEPS = 2

_USAGE = """\
In your own model:

    import thinwire as tw

    comm = tw.init()                                    # torchrun, mpirun, Slurm, or a single process
    ep = tw.ExpertParallel(comm, num_experts, top_k, hidden_size, max_tokens)

    d = ep.dispatch(x, topk_ids, topk_weights)          # x [tokens, hidden]; in every MoE layer
    y = ep.combine(experts(d.tokens, d.expert_counts), d)

docs/quick-start.md has a whole layer; thinwire demo --link 1Gbit shows what a network gains.
"""


@dataclass(frozen=True)
class WireScore:
    """What the text cost under one wire format. Bytes are per token and MoE layer, of rows that change ranks."""

    wire: str
    bits_per_byte: float
    largest_logit_difference: float
    dispatch_logical_bytes: float
    dispatch_wire_bytes: float
    dispatch_error: float
    combine_logical_bytes: float
    combine_wire_bytes: float
    combine_error: float
    seconds: float


class _MeasuredExpertParallel(ExpertParallel):
    """Adds up what its rounds send and, while there is an exact one to send all of it again, how far off it arrives."""

    exact: ExpertParallel | None
    sent: torch.Tensor  # float64: tokens, then logical and wire bytes of dispatch, then of combine
    squares: torch.Tensor  # float64: dispatch error, dispatch, combine error, combine
    _exact_round: Dispatched

    def dispatch(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, *, lane: int = 0, layer: int = 0
    ) -> Dispatched:
        d = super().dispatch(x, topk_ids, topk_weights, lane=lane, layer=layer)
        out, back = d.dispatch_traffic, d.combine_traffic
        self.sent += torch.tensor(
            [x.shape[0], out.logical_bytes, out.wire_bytes, back.logical_bytes, back.wire_bytes],
            dtype=torch.float64,
            device="cpu",
        )
        if self.exact is not None:
            self._exact_round = self.exact.dispatch(x, topk_ids, topk_weights)
            self._compare(0, d.tokens, self._exact_round.tokens)
        return d

    def combine(
        self, expert_out: ExpertRows, d: Dispatched, *, weighted: bool = False, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        y = super().combine(expert_out, d, weighted=weighted, out=out)
        if self.exact is not None:
            self._compare(2, y, self.exact.combine(expert_out, self._exact_round, weighted=weighted))
        return y

    def _compare(self, position: int, value: torch.Tensor, exact: torch.Tensor) -> None:
        self.squares[position] += (value.double() - exact.double()).square().sum()
        self.squares[position + 1] += exact.double().square().sum()


def _steps(text: bytes, context: int, rank: int, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's inputs and targets, step by step; every rank has as many steps, some of no windows."""
    for inputs, targets in text_windows(text, context):
        per_step = _WINDOWS_PER_STEP * size
        for start in range(0, inputs.shape[0], per_step):
            mine = slice(start + rank, min(start + per_step, inputs.shape[0]), size)
            yield inputs[mine], targets[mine]


def _sum_over_ranks(comm: Communicator, values: torch.Tensor) -> torch.Tensor:
    return torch.stack(comm.all_gather_object(values)).sum(0)


def _prepare_kernels(comm: Communicator, config: TinyMoEConfig, wire: str, report: Report) -> None:
    """A round of one token, in whose three parts kernels are compiled where that has not been done before."""
    with ExpertParallel(comm, config.num_experts, config.top_k, config.hidden_size, 1, wire=wire) as ep:
        ids = torch.arange(config.top_k, device="cpu")[None]
        report.stage("preparing kernels of dispatch, 1 of 3 ...")
        d = ep.dispatch(
            torch.ones(1, config.hidden_size, dtype=torch.float32, device="cpu"),
            ids,
            torch.ones(1, config.top_k, dtype=torch.float32, device="cpu"),
        )
        report.stage("preparing kernels of experts' rows, 2 of 3 ...")
        rows = d.tokens
        report.stage("preparing kernels of combine, 3 of 3 ...")
        ep.combine(rows, d)


def _score_rank(comm: Communicator, text: bytes, wires: list[str], report: Report) -> tuple[float, list[WireScore]]:
    """Runs in every rank: bits per byte of the unsharded model, and a score for each wire."""
    report = report if comm.rank == 0 else Report(None)
    unsharded = load_tiny_moe()
    config = unsharded.config
    sizes = (config.num_experts, config.top_k, config.hidden_size, _WINDOWS_PER_STEP * config.context)
    steps = list(_steps(text, config.context, comm.rank, comm.size))

    def logits_of(model: TinyMoE, label: str) -> list[torch.Tensor]:
        logits = []
        report.stage(f"scoring with {label} ...", len(steps))
        for inputs, _ in steps:
            logits.append(model(inputs))
            report.step()
        return logits

    def bits_per_byte(logits: list[torch.Tensor]) -> float:
        own = sum(nats(got, targets) for got, (_, targets) in zip(logits, steps, strict=True))
        return sum(comm.all_gather_object(own)) * (1 / math.log(2.0) / (len(text) - 1))

    def score(wire: str) -> WireScore:
        ep = _MeasuredExpertParallel(comm, *sizes, wire=wire)
        ep.exact = ExpertParallel(comm, *sizes, wire="none")
        ep.sent, ep.squares = (
            torch.zeros(5, dtype=torch.float64, device="cpu"),
            torch.zeros(4, dtype=torch.float64, device="cpu"),
        )
        model = load_tiny_moe(ep=ep)
        report.stage(f"comparing {wire} with none ...")
        for inputs, _ in steps[:_ERROR_STEPS]:  # also the warm-up of what is timed below
            model(inputs)
        squares = _sum_over_ranks(comm, ep.squares)

        ep.exact = None
        ep.sent.zero_()
        comm.barrier()
        started = time.perf_counter()
        logits = logits_of(model, wire)
        comm.barrier()
        seconds = time.perf_counter() - started

        pairs = zip(logits, expected, strict=True)
        difference = max(float((got - want).abs().max()) if len(got) else 0.0 for got, want in pairs)
        sent = _sum_over_ranks(comm, ep.sent)
        per_token = (sent[1:] / sent[0]).tolist()
        return WireScore(
            wire=wire,
            bits_per_byte=bits_per_byte(logits),
            largest_logit_difference=max(comm.all_gather_object(difference)),
            dispatch_logical_bytes=per_token[0],
            dispatch_wire_bytes=per_token[1],
            dispatch_error=float((squares[0] / squares[1]).sqrt()),
            combine_logical_bytes=per_token[2],
            combine_wire_bytes=per_token[3],
            combine_error=float((squares[2] / squares[3]).sqrt()),
            seconds=seconds,
        )

    with torch.inference_mode():
        _prepare_kernels(comm, config, wires[0], report)
        expected = logits_of(unsharded, "the unsharded model")
        return bits_per_byte(expected), [score(wire) for wire in wires]


def format_table(exact_bits: float, scores: list[WireScore]) -> str:
    """The demo's table: one line a wire format."""
    lines = [
        "                                      ------ dispatch ------   ------- combine ------",
        "wire        bits/byte  max |dlogit|   logical    wire  error   logical    wire  error   seconds",
        f"{'unsharded':10}{exact_bits:11.4f}",
    ]
    for s in scores:
        lines.append(
            f"{s.wire:10}{s.bits_per_byte:11.4f}{s.largest_logit_difference:14.1e}"
            f"{s.dispatch_logical_bytes:10.0f}{s.dispatch_wire_bytes:8.0f}{s.dispatch_error:7.4f}"
            f"{s.combine_logical_bytes:10.0f}{s.combine_wire_bytes:8.0f}{s.combine_error:7.4f}{s.seconds:10.2f}"
        )
    return "\n".join(lines)


def score_text(
    ranks: int, wires: list[str], text: bytes, timeout: float, report: Report
) -> tuple[float, list[WireScore]]:
    """Bits per byte of a text under the unsharded model, and a score of it for each wire format.

    Args:
        report: gets the progress.

    Raises:
        TransportUnavailable: there is nothing to run the kernels on CPUs with.
        RankError, RanksTimeout: as `run_ranks`.
    """
    for wire in wires:
        select_backend(torch.device("cpu"), WireFormat.parse(wire))
    report.stage(f"starting {ranks} rank{'s' if ranks > 1 else ''} ...")
    return run_ranks(_score_rank, ranks, text, wires, report, timeout=timeout)[0]


def show_scores(exact_bits: float, scores: list[WireScore]) -> None:
    """Prints the table, and what its columns are."""
    print(format_table(exact_bits, scores))
    print(
        "\nmax |dlogit| is the most that any logit differs from the unsharded model's.\n"
        "Bytes are per token and MoE layer, of rows that change ranks; dispatch carries expert ids and router\n"
        f"weights besides. Errors are relative L2 against the same round sent exactly, over the first {_ERROR_STEPS} "
        "steps.\n"
        f"Seconds are of this machine: all ranks share its {os.cpu_count()} cores and no network is crossed.\n"
        "`thinwire demo --link 1Gbit` has two hosts with a link between them.\n"
    )
    print(_USAGE)


def write_scores(
    path: Path, option: str, file: Path | None, text: bytes, exact_bits: float | None, scores: Sequence[Any]
) -> None:
    """Writes the figures as JSON. `scores` are dataclasses with a `wire`; None for `exact_bits` says not measured."""
    figures = {
        "demo": f"thinwire demo {option} --wire {','.join(score.wire for score in scores)}",
        "text": "packaged held-out text" if file is None else str(file),
        "thinwire": VERSION,
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__},
        "text_bytes": len(text),
        "unsharded_bits_per_byte": exact_bits,
        "scores": [asdict(score) for score in scores],
    }
    write_file(path, f"{json.dumps(figures, indent=2)}\n".encode())
