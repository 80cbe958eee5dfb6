"""Compares all wire formats with those of others: bytes, errors, and what they do to a model's next token.

    python examples/split_into_experts.py build/smollm2_split
    python -m benchmarks.wire_table --smollm2 build/smollm2_split   # twenty minutes
    python -m benchmarks.wire_table                                 # seconds; keeps the columns of SmolLM2

Writes benchmarks/results/cpu/wire_table.json, and from it docs/wire_table.png and the table in docs/wire-formats.md.
Every format gets the same float32 rows and gives back float32 rows. Those of others are computed in torch
(`field_formats.py`).

SmolLM2's experts are dealt out to two simulated ranks. What enters them passes through the format, and so does each
rank's sum of its experts' outputs. `SmolLM2` is the error of what enters, the median over the layers. `KL` compares
the next token's probabilities with those of the unchanged model, on text that thinwire's own model was not trained on.
Instructions are those of one thread for an element, from the files in benchmarks/results/machine_code.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from benchmarks import timing
from benchmarks.error_bytes import GAUSSIAN, MODEL, OUTLIERS, kinds_of_rows
from benchmarks.field_formats import FIELD
from thinwire.fused.codec import dequantize, quantize
from thinwire.tools.bench.plots import GREY, canvas, colour_of, decimal_ticks, log_axis, png, styled
from thinwire.tools.demo.tiny_moe import HELD_OUT_PATH
from thinwire.wire import WireFormat

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
#: The page, and what its table lies between.
PAGE, BEGIN, END = ROOT / "docs" / "wire-formats.md", "<!-- wires table -->\n", "<!-- end -->"
WIRES = (
    "none", "int10+h64", "int8:32", "int8:64+h64", "int8+h64", "int8", "fp8", "int8:row", "int6+h64", "int6",
    "int4+h64", "int4",
)  # fmt: skip
#: Of tokens that a model reads: windows, and the length of each.
WINDOWS, CONTEXT = 4, 512
_HIDDEN, _RANKS = 7168, 2
_ERRORS = "Gaussian", "beside outliers", "shipped model", "SmolLM2"

Passed = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Row:
    """One format. Errors are relative L2; None is what was not measured.

    Attributes:
        source: where a format of others is from; "" for thinwire's.
        bytes_an_element: at hidden 7168; of `none`, with rows in bfloat16.
        outliers: error of the other channels beside four that are 50 times as large.
        model: on what enters the MoE layers of the model that thinwire ships.
        smollm2: on what enters SmolLM2's, the median over the layers.
        kl: KL(unchanged || with the format) of the next token, nats, the mean over the tokens.
        sender: instructions of a thread for an element on sm_90, to quantise and store a row at one rank.
        receiver: likewise, to read it there.
    """

    name: str
    source: str
    bytes_an_element: float
    gaussian: float
    outliers: float
    model: float
    smollm2: float | None = None
    kl: float | None = None
    sender: float | None = None
    receiver: float | None = None


class Wired(nn.Module):
    """A block of Mixtral's all of whose experts are active, each with the same weight, on simulated ranks."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        both, down = block.experts.gate_up_proj.data, block.experts.down_proj.data / len(block.experts.gate_up_proj)
        parts = [half.flatten(0, 1).chunk(_RANKS) for half in both.chunk(2, 1)]
        self.ranks = list(zip(*parts, down.transpose(0, 1).flatten(1).chunk(_RANKS, 1), strict=True))
        self.passed: Passed = lambda rows: rows
        self.inputs = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        self.inputs = x.flatten(0, -2)
        rows = self.passed(self.inputs)
        sums = [(nn.functional.silu(rows @ gate.T) * (rows @ up.T)) @ down.T for gate, up, down in self.ranks]
        return torch.stack([self.passed(part) for part in sums]).sum(0).view_as(x)


class SmolLM2:
    """The checkpoint with its experts on simulated ranks, and what it says of the text unchanged."""

    def __init__(self, folder: str) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        config = self._model.config
        if config.num_experts_per_tok != config.num_local_experts:
            raise SystemExit(f"{folder}: a model all of whose experts are active is needed")
        text = HELD_OUT_PATH.read_text()
        ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids
        self._windows = ids[:, : WINDOWS * CONTEXT].view(WINDOWS, 1, CONTEXT)
        self._exact = self._logits()
        self._layers = [Wired(layer.mlp) for layer in self._model.model.layers]
        for layer, wired in zip(self._model.model.layers, self._layers, strict=True):
            layer.mlp = wired
        if abs(self.kl(lambda rows: rows)) > 1e-8:
            raise SystemExit(f"{folder}: the experts on simulated ranks do not compute what they did")
        self.inputs = [wired.inputs for wired in self._layers]

    @torch.no_grad()
    def _logits(self) -> Tensor:
        return torch.cat([self._model(window).logits for window in self._windows])

    def kl(self, passed: Passed) -> float:
        for layer in self._layers:
            layer.passed = passed
        # float64: a difference of 1e-7 would be rounding in float32.
        pairs = zip(self._exact, self._logits(), strict=True)
        pairs = ([logits.double().log_softmax(-1) for logits in pair] for pair in pairs)
        return statistics.fmean(float((a.exp() * (a - b)).sum(-1).mean()) for a, b in pairs)


def through(wire: str) -> Passed:
    return lambda rows: dequantize(quantize(rows, wire))


def error(passed: Passed, rows: Tensor, columns: Tensor | None = None) -> float:
    got, wanted = passed(rows), rows
    if columns is not None:
        got, wanted = got[:, columns], wanted[:, columns]
    return float((got.double() - wanted).norm() / wanted.double().norm())


def measure(smollm2: SmolLM2 | None = None, names: Sequence[str] | None = None) -> list[Row]:
    """All formats, or those; thinwire's come first."""
    formats = [
        (wire, "", WireFormat.parse(wire).row_bytes(_HIDDEN, torch.bfloat16) / _HIDDEN, through(wire)) for wire in WIRES
    ]
    formats += [(each.name, each.source, each.bytes_an_element, each.passed) for each in FIELD]
    kinds, rows = {kind: rest for kind, *rest in kinds_of_rows()}, []
    for name, source, size, passed in formats:
        if names is None or name in names:
            errors = [error(passed, *kinds[kind]) for kind in (GAUSSIAN, OUTLIERS, MODEL)]
            more = {}
            if smollm2 is not None:
                more["smollm2"] = statistics.median(error(passed, inputs) for inputs in smollm2.inputs)
                more["kl"] = smollm2.kl(passed)
            rows.append(Row(name, source, size, *errors, **more))
            print(rows[-1], flush=True)
    return rows


def completed(rows: Sequence[Row], before: Sequence[Row]) -> list[Row]:
    """With the machine code's instructions, and with what was measured before of what was not measured now."""
    code = {}
    for path in sorted((RESULTS / "machine_code").glob("*.json")):
        for figure in json.loads(path.read_text())["figures"] if path.stem != "before" else ():
            if (figure["target"], figure["hidden"]) == ("sm_90", _HIDDEN):
                code[figure["kernel"], figure["wire"]] = figure["issued"]
    held = {row.name: row for row in before}
    made = []
    for row in rows:
        old = held.get(row.name)
        if row.kl is None and old is not None:
            row = dataclasses.replace(row, smollm2=old.smollm2, kl=old.kl)
        found = (
            {}
            if row.source
            else {"sender": code.get(("send_tokens", row.name)), "receiver": code.get(("gather", row.name))}
        )
        made.append(dataclasses.replace(row, **found))
    return made


def markdown(rows: Sequence[Row]) -> str:
    """The table, thinwire's formats in code."""

    def percent(value: float | None) -> str:
        return "" if value is None else f"{100 * value:.2f} %" if value else "0"

    def number(value: float | None) -> str:
        return "" if value is None else f"{value:.1f}"

    heads = "bytes an element", *_ERRORS, "KL, 1e-4 nats", "sender", "receiver"
    lines = [f"| format | {' | '.join(heads)} |", "|---|" + "---:|" * len(heads)]
    for row in rows:
        cells = [row.name if row.source else f"`{row.name}`", f"{row.bytes_an_element:.3f}"]
        cells += [percent(value) for value in (row.gaussian, row.outliers, row.model, row.smollm2)]
        cells += [number(None if row.kl is None else 1e4 * abs(row.kl)), number(row.sender), number(row.receiver)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def undominated(rows: Sequence[Row]) -> list[Row]:
    """From the fewest bytes up, those that no format with as few bytes beats."""
    best: list[Row] = []
    for row in sorted(rows, key=lambda row: (row.bytes_an_element, row.kl)):
        if row.kl is not None and (not best or row.kl < best[-1].kl):
            best.append(row)
    return best


#: How the picture is read.
CAPTION = (
    "Marks further left and lower are better. The line joins those that no format of as few bytes beats. Diamonds are "
    "formats of others. SmolLM2, both legs through the format, on two simulated ranks."
)


def draw(rows: Sequence[Row]) -> Figure:
    """Bytes against KL; thinwire's names to the left of their marks, those of others to the right."""
    shown = [row for row in rows if row.kl is not None and row.kl > 1e-9]
    with styled():
        made, axes = canvas("Bytes and what they do to the next token", 6.4)
        best = undominated(shown)
        axes.plot(
            [row.bytes_an_element for row in best], [1e4 * row.kl for row in best], color=GREY, linewidth=1, zorder=1
        )
        for row in shown:
            own = not row.source
            colour = colour_of("thinwire", row.name) if own else GREY
            face = colour if own else "white"
            place = row.bytes_an_element, 1e4 * row.kl
            axes.plot(*place, marker="o" if own else "D", color=colour, markerfacecolor=face, linestyle="none")
            aside = {"xytext": (-7, 0), "ha": "right"} if own else {"xytext": (7, 0), "ha": "left"}
            axes.annotate(row.name, place, textcoords="offset points", va="center", color=colour, fontsize=9, **aside)
        values = [1e4 * row.kl for row in shown]
        low, high = min(values) / 2, max(values) * 2
        log_axis(axes.yaxis, decimal_ticks(low, high), lambda value: f"{value:g}")
        axes.set(xlabel="bytes an element", ylabel="KL of the next token, 1e-4 nats", ylim=(low, high), xlim=(0.3, 2.3))
    return made


def write_page(rows: Sequence[Row]) -> None:
    """The page's table anew, where the page has one."""
    text = PAGE.read_text()
    PAGE.write_text(re.sub(f"(?<={BEGIN}).*?(?={END})", lambda _: markdown(rows), text, flags=re.DOTALL))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smollm2", metavar="DIR", help="what examples/split_into_experts.py wrote")
    options = parser.parse_args()
    target = RESULTS / "cpu" / "wire_table.json"
    before = [Row(**row) for row in json.loads(target.read_text())["figures"]] if target.exists() else []
    rows = completed(measure(SmolLM2(options.smollm2) if options.smollm2 else None), before)
    timing.write_json(
        target,
        machine={"torch": torch.__version__},
        caption=CAPTION,
        tokens=WINDOWS * CONTEXT,
        figures=[dataclasses.asdict(row) for row in rows],
    )
    (ROOT / "docs" / "wire_table.png").write_bytes(png(draw(rows)))
    write_page(rows)
    print(markdown(rows), end="")


if __name__ == "__main__":
    main()
