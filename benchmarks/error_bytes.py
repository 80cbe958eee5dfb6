"""Measures bytes and error of each wire format, with the codec itself, on three kinds of rows.

Formats are usually judged by Gaussian rows. Rows with a few channels far above the others, as in trained models, suffer
most if too many elements share a scale. The packaged model's own activations are neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor, nn

from thinwire.fused.codec import dequantize, quantize
from thinwire.tools.bench.plots import DARK, DPI, GREY, STRIPE, WIDTH, colour_of, decimal_ticks, log_axis, styled
from thinwire.tools.demo.tiny_moe import HELD_OUT_PATH, load_tiny_moe, text_windows
from thinwire.wire import WireFormat

#: From the most bytes to the fewest.
WIRES = (
    "none", "int10+h64", "fp8:32", "int8:32", "int8:64+h64", "fp8", "int8", "int8+h64", "int8:row", "int6", "int6+h64",
    "int4", "int4:128",
)  # fmt: skip
GAUSSIAN, OUTLIERS, MODEL = "Gaussian rows", "4 channels ×50: error of the others", "a trained model's activations"

_ROWS, _HIDDEN = 256, 7168
_OUTLIER_CHANNELS, _OUTLIER_FACTOR = 4, 50.0
_MODEL_WINDOWS = 8
#: Of the marks of a line, in lines: those of equal errors would hide each other.
_OFFSETS = {GAUSSIAN: -0.27, OUTLIERS: 0.0, MODEL: 0.27}
_MARKERS: dict[str, dict[str, Any]] = {
    GAUSSIAN: {"marker": "o", "markersize": 8},
    OUTLIERS: {"marker": "^", "markersize": 8, "markerfacecolor": "white", "markeredgewidth": 1.6},
    MODEL: {"marker": "D", "markersize": 6.5, "markerfacecolor": "white", "markeredgewidth": 1.6},
}


@dataclass(frozen=True)
class Cost:
    """One wire format on one kind of rows, of bfloat16.

    Attributes:
        rows: GAUSSIAN, OUTLIERS or MODEL.
        hidden: elements of a row.
        bytes_an_element: of a record with its scales and padding; it depends on `hidden`.
        relative_error: L2 of the difference by L2 of the rows, both rounded to bfloat16; of OUTLIERS, over the elements
            that are no outliers.
    """

    wire: str
    rows: str
    hidden: int
    bytes_an_element: float
    relative_error: float


def model_activations(windows: int = _MODEL_WINDOWS) -> Tensor:
    """What enters the MoE layers of the packaged model on its held-out text: float32 [rows, 256], layer by layer."""
    model, found = load_tiny_moe(), []
    text = HELD_OUT_PATH.read_bytes()
    inputs = text_windows(text, model.config.context)[0][0][:windows]

    def keep(_: nn.Module, __: object, normed: Tensor) -> None:
        found.append(normed.flatten(0, 1))

    hooks = [module.register_forward_hook(keep) for name, module in model.named_modules() if name.endswith("moe_norm")]
    with torch.no_grad():
        model(inputs)
    for hook in hooks:
        hook.remove()
    return torch.cat(found)


def kinds_of_rows(seed: int = 0) -> list[tuple[str, Tensor, Tensor | None]]:
    """GAUSSIAN, OUTLIERS and MODEL, float32 [rows, hidden], and which columns are judged; None: all."""
    generator = torch.Generator().manual_seed(seed)
    gaussian = torch.randn(_ROWS, _HIDDEN, generator=generator, dtype=torch.float32, device="cpu")
    channels = torch.randperm(_HIDDEN, generator=generator, device="cpu")[:_OUTLIER_CHANNELS]
    outliers = gaussian.clone()
    outliers[:, channels] *= _OUTLIER_FACTOR
    others = torch.ones(_HIDDEN, dtype=torch.bool, device="cpu")
    others[channels] = False
    return [(GAUSSIAN, gaussian, None), (OUTLIERS, outliers, others), (MODEL, model_activations(), None)]


def measure(wires: Sequence[str] = WIRES, seed: int = 0) -> list[Cost]:
    """Every format on every kind of rows, which are taken to bfloat16 first.

    Raises:
        WireFormatError: an unknown format.
    """
    kinds = kinds_of_rows(seed)
    return [
        _cost(WireFormat.parse(wire), name, rows.bfloat16(), columns) for wire in wires for name, rows, columns in kinds
    ]


def _cost(wire: WireFormat, name: str, rows: Tensor, columns: Tensor | None) -> Cost:
    hidden = rows.shape[1]
    size = wire.row_bytes(hidden, rows.dtype) / hidden
    back = dequantize(quantize(rows, wire))
    got, wanted = (x.double() if columns is None else x[:, columns].double() for x in (back, rows))
    return Cost(str(wire), name, hidden, size, float(torch.linalg.norm(got - wanted) / torch.linalg.norm(wanted)))


#: How the picture is read, and what it does not show.
CAPTION = (
    "Shorter bars and marks further left are better. Every format quantises the same bfloat16 rows once and gives "
    "them back in bfloat16. Circles: Gaussian rows. Triangles: the same rows with 4 channels 50 times as large; "
    "the error is that of the other elements, which a scale shared with one of these channels makes coarse. "
    "Diamonds: what enters the MoE layers of the packaged model, rows of 256, on text that it was not trained on. "
    "It does not show what an error does to a model's answers, nor how long quantising takes."
)


def draw_error_bytes(costs: Sequence[Cost]) -> Figure:
    """A line for each format: its bytes to the left, its errors to the right."""
    wires = list(dict.fromkeys(cost.wire for cost in costs))
    places = {wire: place for place, wire in enumerate(wires)}
    colours = {wire: colour_of("thinwire", wire) for wire in wires}
    with styled():
        made = Figure(figsize=(WIDTH, 0.44 * len(wires) + 1.6), dpi=DPI, layout="constrained")
        bars, dots = made.subplots(1, 2, sharey=True, width_ratios=(2, 3))
        for cost in costs:
            if cost.rows == GAUSSIAN:
                bars.barh(places[cost.wire], cost.bytes_an_element, height=0.62, color=colours[cost.wire])
                bars.text(cost.bytes_an_element + 0.04, places[cost.wire], f"{cost.bytes_an_element:.3f}", va="center")
            if cost.relative_error > 0:
                style = {"color": colours[cost.wire], "linestyle": "none", **_MARKERS[cost.rows]}
                dots.plot([cost.relative_error], [places[cost.wire] + _OFFSETS[cost.rows]], **style)
        errors = [cost.relative_error for cost in costs if cost.relative_error > 0] or [1.0]
        low, high = min(errors) / 1.6, max(errors) * 1.6
        log_axis(dots.xaxis, decimal_ticks(low, high), lambda error: f"{100 * error:g} %")
        dots.set(xlabel="relative error (L2)", xlim=(low, high))
        for wire in {cost.wire for cost in costs} - {cost.wire for cost in costs if cost.relative_error > 0}:
            dots.text(low * 1.08, places[wire], "exact", va="center", color=GREY)
        dots.tick_params(axis="y", left=False)
        bars.set(xlabel=f"bytes an element, rows of {_HIDDEN:,}", xlim=(0, 2.45), yticks=range(len(wires)))
        bars.set_yticklabels(wires)
        bars.set_ylim(len(wires) - 0.5, -0.5)
        for axes in (bars, dots):
            axes.grid(False, axis="y")
            for place in range(0, len(wires), 2):
                axes.axhspan(place - 0.5, place + 0.5, color=STRIPE, zorder=0)
        bars.set_title("Bytes on the wire")
        dots.set_title("Error of one pass")
        handles = [Line2D([], [], color=DARK, linestyle="none", **_MARKERS[kind]) for kind in _MARKERS]
        made.legend(handles, list(_MARKERS), loc="outside lower center", ncols=len(handles), handletextpad=0.1)
    return made
