"""Pictures are legible whatever was measured: texts are apart and on the canvas, and legends cover no data."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="pictures need matplotlib")
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from tests.bench.synthetic import SERIES, figure, odd_runs, results, whole_run
from thinwire.tools.bench.plots import Picture, draw
from thinwire.tools.bench.results import parse_results
from thinwire.tools.bench.style import (
    COLOURS,
    MARKERS,
    OTHER_COLOURS,
    WIDTH,
    WIRE_COLOURS,
    Series,
    Styles,
    binary_ticks,
    decimal_ticks,
)

#: Pixels of a page 800 wide that are left for a picture, which is drawn for 100 an inch.
SHOWN_WIDTH = 752
ROUTINGS = (("uniform", 1.0), ("hot:0.5", 2.0))


def drawn(run: dict[str, Any]) -> dict[str, Picture]:
    return {picture.name: picture for picture in draw(parse_results(run, "a run"))[0]}


def require_legible(made: Figure) -> None:
    """Fails where texts overlap, leave the canvas or are too small, or where a legend covers axes."""
    canvas = FigureCanvasAgg(made)
    canvas.draw()
    renderer = canvas.get_renderer()
    texts = [text for text in made.findobj(Text) if text.get_visible() and text.get_text().strip()]
    texts = [text for text in texts if text not in out_of_view(made)]
    shown = [(text.get_text(), text.get_window_extent(renderer)) for text in texts]
    width, height = canvas.get_width_height()
    for name, box in shown:
        assert -1 <= box.x0 and box.x1 <= width + 1 and -1 <= box.y0 and box.y1 <= height + 1, f"{name!r} is cut off"
    for (name, box), (other, other_box) in itertools.combinations(shown, 2):
        apart = (
            box.x1 <= other_box.x0 + 1
            or other_box.x1 <= box.x0 + 1
            or box.y1 <= other_box.y0 + 1
            or other_box.y1 <= box.y0 + 1
        )
        assert apart, f"{name!r} and {other!r} overlap"
    scale = min(1, SHOWN_WIDTH / (100 * made.get_figwidth()))
    smallest = min(texts, key=lambda text: text.get_fontsize())
    assert smallest.get_fontsize() * scale >= 8, f"{smallest.get_text()!r} is too small"
    legends = [*made.legends, *filter(None, (axes.get_legend() for axes in made.axes))]
    for legend, axes in itertools.product(legends, made.axes):
        covered = legend.get_window_extent(renderer), axes.get_window_extent(renderer)
        assert not covered[0].overlaps(covered[1]), "a legend covers data"
    for axes in made.axes:
        box = axes.get_window_extent(renderer)
        assert box.width > 0.25 * width or axes.get_label() == "<colorbar>", "the names leave no room for the data"


def out_of_view(made: Figure) -> set[Text]:
    """Labels of ticks beyond their axis; matplotlib keeps them and does not draw them."""
    found = set()
    for axis in (axis for axes in made.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
            if not low <= tick.get_loc() <= high:
                found |= {tick.label1, tick.label2}
    return found


QUICK = ("one figure", "no speed-up", "one rank", "eight ranks", "all skipped")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.exhaustive) for name in odd_runs()]
)
def test_every_picture_of_every_run_is_legible(name: str) -> None:
    for picture in drawn(odd_runs()[name]).values():
        require_legible(picture.canvas)


def test_the_check_itself_sees_what_is_not_legible() -> None:
    (picture, *_) = drawn(results([figure()])).values()
    for x, y, size, complaint in ((0.5, 0.5, 30, "overlap"), (0.95, 0.02, 20, "cut off"), (0.8, 0.3, 5, "too small")):
        made = drawn(results([figure()]))["latency_dispatch"].canvas
        made.text(x, y, "one more text", fontsize=size)
        if complaint == "overlap":
            made.text(x, y, "and another", fontsize=size)
        with pytest.raises(AssertionError, match=complaint):
            require_legible(made)
    picture.canvas.axes[0].get_legend().set_bbox_to_anchor((0.5, 0.7))
    with pytest.raises(AssertionError, match="a legend covers data"):
        require_legible(picture.canvas)


def test_lines_are_the_figures() -> None:
    run = whole_run(series=SERIES[:2], operations=["combine"])
    line, other = drawn(run)["latency_combine"].canvas.axes[0].lines
    wanted = [f for f in run["figures"] if f["operation"] == "combine" and f["wire"] == "int8"]
    assert list(line.get_xdata()) == [f["tokens"] for f in wanted]
    assert list(line.get_ydata()) == [f["seconds"]["median"] for f in wanted]
    assert line.get_color() == WIRE_COLOURS["int8"] != other.get_color()


@pytest.mark.parametrize("operation", ["moe", "all_reduce"])
def test_a_band_goes_from_quartile_to_quartile(operation: str) -> None:
    run = whole_run(series=SERIES[:1], operations=[operation])
    axes = drawn(run)[f"{'latency' if operation == 'moe' else 'bandwidth'}_{operation}"].canvas.axes[0]
    heights = {float(y) for _, y in axes.collections[0].get_paths()[0].vertices}
    expected = set()
    for taken in run["figures"]:
        for name in ("lower_quartile", "upper_quartile"):
            seconds = taken["seconds"][name]
            expected.add(seconds if operation == "moe" else taken["logical_bytes"] / seconds / 1e9)
    assert all(any(height == pytest.approx(end) for end in expected) for height in heights) and len(expected) == 8


def test_pictures_of_files_without_quartiles_have_lines_alone() -> None:
    older = [figure(tokens=n, seconds={"minimum": 1, "median": 2, "maximum": 3}) for n in (1, 2)]
    axes = drawn(results(older))["latency_dispatch"].canvas.axes[0]
    assert {float(y) for _, y in axes.collections[0].get_paths()[0].vertices} == {2.0}


def test_under_a_title_are_the_ranks_the_sizes_and_the_machine() -> None:
    settings = {"hidden": 7168, "experts": 256, "top_k": 8, "dtype": "bfloat16", "tokens": [1, 2]}
    pictures = drawn(whole_run(operations=["moe", "all_reduce"]) | {"settings": settings})
    told = {"latency": "hidden 7168, experts 256, top-k 8, dtype bfloat16", "bandwidth": "dtype bfloat16"}
    for name, picture in pictures.items():
        subtitle = picture.canvas.axes[0].texts[0].get_text()
        assert subtitle == f"4 ranks, {told.get(name.partition('_')[0], told['latency'])}, A processor"


def test_a_line_goes_by_tokens_whatever_the_order_of_the_file() -> None:
    made = drawn(results([figure(tokens=n) for n in (256, 1, 16)]))["latency_dispatch"].canvas
    assert list(made.axes[0].lines[0].get_xdata()) == [1, 16, 256]


def test_bandwidth_has_the_limits_that_are_known() -> None:
    run = whole_run(operations=["all_reduce"]) | {"copy_bandwidth": 9e9, "link_bandwidth": 2e9}
    heights = {line.get_ydata()[0] for line in drawn(run)["bandwidth_all_reduce"].canvas.axes[0].lines[:2]}
    assert heights == {4.5, 2.0}  # a copied byte is read and written
    labels = legend_of(drawn(run)["bandwidth_all_reduce"])
    assert "copy limit, 4.5 GB/s" in labels and "link's rate, 2 GB/s" in labels
    without = drawn(run | {"copy_bandwidth": None, "link_bandwidth": None})["bandwidth_all_reduce"]
    assert len(legend_of(without)) == len(SERIES) and "dotted" not in without.caption


def legend_of(picture: Picture) -> list[str]:
    return [text.get_text().replace("\n", " ") for text in picture.canvas.axes[0].get_legend().get_texts()]


def test_a_legend_has_the_order_in_which_lines_end() -> None:
    assert legend_of(drawn(whole_run(operations=["moe"]))["latency_moe"]) == [
        "quantize, gloo int8", "gloo", "thinwire int8 staged", "thinwire none direct", "thinwire int8 direct"
    ]  # fmt: skip


def test_one_routing_is_told_and_several_are_drawn() -> None:
    pictures, (told,) = draw(parse_results(whole_run(operations=["dispatch"]), "a run"))
    assert "speedup_dispatch" not in {picture.name for picture in pictures}
    assert told.startswith("Speed-up of dispatch against skew: the run has no speed-ups at two routings")
    several = drawn(whole_run(routings=ROUTINGS, operations=["dispatch"]))["speedup_dispatch"]
    assert "4,096 tokens" in several.canvas.axes[0].get_title(loc="left")
    assert "uniform 1, hot:0.5 2" in several.caption
    assert "gloo" not in legend_of(several) and "as fast as gloo" in legend_of(several)


def test_a_picture_of_latency_names_the_routings_that_it_leaves_out() -> None:
    caption = drawn(whole_run(routings=ROUTINGS, operations=["moe"]))["latency_moe"].caption
    assert caption.endswith("Other routings are in the table alone: hot:0.5.")


def test_what_cannot_be_drawn_is_told() -> None:
    pictures, missing = draw(parse_results(odd_runs()["no tokens"], "a run"))
    assert not pictures and [told.partition(":")[0] for told in missing] == [
        "Latency of dispatch", "Speed-up of dispatch against skew", "Bandwidth of all_reduce"
    ]  # fmt: skip


def test_a_series_looks_the_same_whatever_else_was_measured() -> None:
    own = Series("thinwire", "int8", "direct")
    alone, among = Styles([own]), Styles([own, *(Series(name, "none", None) for name in ("a", "b", *COLOURS))])
    for name in COLOURS:
        assert among.colour(Series(name, "none", None)) == COLOURS[name]
    assert alone.colour(own) == among.colour(own) == WIRE_COLOURS["int8"]
    assert alone.handle(own).get_marker() == MARKERS["int8"]
    assert alone.handle(Series("thinwire", "int8", "staged")).get_linestyle() == "--"


# What the three kinds of colour-blindness make of linear RGB (Machado, Oliveira and Fernandes, 2009, severity 1).
BLINDNESS = {
    "none": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.3039)),
}


def seen(colour: str, blindness: str) -> tuple[float, float, float]:
    """A colour in CIELAB, as the eye sees it."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    red, green, blue = (
        min(1.0, max(0.0, sum(a * b for a, b in zip(row, linear, strict=True)))) for row in BLINDNESS[blindness]
    )
    xyz = (
        (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.95047,
        0.2126 * red + 0.7152 * green + 0.0722 * blue,
        (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.08883,
    )
    x, y, z = (c ** (1 / 3) if c > 0.008856 else 7.787 * c + 16 / 116 for c in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("blindness", BLINDNESS)
def test_colours_are_apart_for_the_colour_blind_and_from_white(blindness: str) -> None:
    named = WIRE_COLOURS | COLOURS
    for (a, colour), (b, other) in itertools.combinations(named.items(), 2):
        distance = (
            sum((p - q) ** 2 for p, q in zip(seen(colour, blindness), seen(other, blindness), strict=True)) ** 0.5
        )
        assert distance > 15, f"{a} and {b} look alike"
    assert all(seen(colour, blindness)[0] < 75 for colour in named.values())


def test_int8_is_the_one_saturated_colour() -> None:
    chroma = {}
    for name, colour in (WIRE_COLOURS | COLOURS | {colour: colour for colour in OTHER_COLOURS}).items():
        _, a, b = seen(colour, "none")
        chroma[name] = (a * a + b * b) ** 0.5
    assert chroma.pop("int8") > 40 and max(chroma.values()) < 26


def test_ticks_are_few_and_within_the_axis() -> None:
    for low, high in ((1, 2), (1e-9, 1e6), (0.3, 0.31), (5, 5e11), (1, 1.0001)):
        for ticks in (decimal_ticks(low, high), binary_ticks(low, high)):
            assert len(ticks) <= 8 and all(low <= tick <= high for tick in ticks)
    assert decimal_ticks(2e-5, 4e-4) == [2e-5, 5e-5, 1e-4, 2e-4] and WIDTH == 8
