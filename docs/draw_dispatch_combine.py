"""Draws a token's path out to its experts and back, and what each leg puts on the wire.

    python docs/draw_dispatch_combine.py            writes the pictures
    python docs/draw_dispatch_combine.py --check    exits non-zero where a picture is not what this draws

docs/dispatch_combine.svg is for wide screens, docs/dispatch_combine_narrow.svg for telephones. Bytes come from the wire
format itself. The pictures bring their own white ground, so they read the same on a dark page.
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

from thinwire.wire import WireFormat

HERE = Path(__file__).parent

HIDDEN = 7168
BF16 = 2 * HIDDEN
INT8 = WireFormat.parse("int8").row_bytes(HIDDEN)
#: As peers send it: e4m3 with a float32 scale for each 128 elements.
FP8 = HIDDEN + HIDDEN // 128 * 4
#: Who sends what: each leg's format and bytes.
LEGS = (
    ("thinwire, int8+h64", ("int8", INT8), ("int8", INT8)),
    ("fp8 both ways", ("fp8", FP8), ("fp8", FP8)),
    ("fp8 out, bfloat16 back", ("fp8", FP8), ("bfloat16", BF16)),
    ("bfloat16 both ways", ("bfloat16", BF16), ("bfloat16", BF16)),
)

WIDTH, HEIGHT = 1000, 588
NARROW, TALL = 400, 992
BAR_LEFT, BAR_WIDTH = 230, 640
STYLE = """
text { font: 15px system-ui, "Segoe UI", "Helvetica Neue", "DejaVu Sans", sans-serif; fill: #24292f }
.title { font-size: 17px; font-weight: 700 } .name { font-weight: 700 } .note { fill: #57606a; font-size: 14px }
.middle { text-anchor: middle } .white { fill: #fff } .blue { fill: #00568a; font-weight: 700 }
.ground { fill: #fff; stroke: #d0d7de } .rank { fill: #f6f8fa; stroke: #8c959f } .step { fill: #fff; stroke: #8c959f }
.int8 { fill: #0072b2 } .memory { fill: #dceefa; stroke: #0072b2 } .bfloat16 { fill: #57606a } .fp8 { fill: #7a3bd0 }
.wire { stroke: #0072b2; stroke-width: 3; fill: none } .flow { stroke: #57606a; stroke-width: 1.6; fill: none }
"""
MARKERS = """<defs>
<marker id="wire" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="5" markerHeight="5" orient="auto">\
<path d="M0 0 8 4 0 8z" fill="#0072b2"/></marker>
<marker id="flow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">\
<path d="M0 0 8 4 0 8z" fill="#57606a"/></marker>
</defs>"""


def text(x: float, y: float, content: str, kind: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(content)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str, *lines: str) -> str:
    """A rectangle with lines of text in its middle."""
    top = y + height / 2 + 5.5 - 10 * (len(lines) - 1)
    inner = [text(x + width / 2, top + 20 * i, line, "middle") for i, line in enumerate(lines)]
    return "\n".join(
        [f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" class="{kind}"/>', *inner]
    )


def arrow(kind: str, x: float, y: float, to_x: float, to_y: float) -> str:
    middle = (x + to_x) / 2
    path = f"M{x:g} {y:g} C{middle:g} {y:g} {middle:g} {to_y:g} {to_x:g} {to_y:g}"
    return f'<path d="{path}" class="{kind}" marker-end="url(#{kind})"/>'


def way() -> list[str]:
    """The upper half: home, the experts' ranks, home again."""
    parts = [text(20, 36, "The path of a token where ranks can map each other's memory", "title")]
    parts += [box(20, 60, 170, 250, "rank"), text(36, 86, "rank 0, its home", "name")]
    parts += [box(810, 60, 170, 250, "rank"), text(826, 86, "rank 0 again", "name")]
    parts += [box(36, 150, 138, 70, "step", "token", "in bfloat16")]
    for number, y in ((1, 60), (2, 195)):
        parts += [box(340, y, 320, 115, "rank"), text(356, y + 26, f"rank {number}, with some of the experts", "name")]
        parts += [box(356, y + 40, 104, 60, "memory", "its memory:", "int8 row")]
        parts += [box(500, y + 40, 144, 60, "step", "dequantise,", "experts")]
        parts += [arrow("flow", 462, y + 70, 498, y + 70)]
        parts += [arrow("wire", 176, 185, 352, y + 70), arrow("wire", 646, y + 70, 822, 125 if number == 1 else 167)]
    for y, number in ((107, 1), (149, 2)):
        parts += [box(826, y, 138, 36, "memory", f"int8 from rank {number}")]
    parts += [arrow_down(895, 187, 222), box(826, 226, 138, 66, "step", "dequantise,", "sum in order")]
    for x, title, what in ((265, "dispatch", "quantise + store"), (735, "combine", "sum + quantise + store")):
        parts += [text(x, 338, f"{title}: one kernel", "middle blue"), text(x, 358, what, "middle note")]
    parts += [text(500, 338, "no pack buffer, no collective call,", "middle note")]
    parts += [text(500, 358, "no wait for the host", "middle note")]
    return parts


def arrow_down(x: float, y: float, to_y: float) -> str:
    return f'<path d="M{x:g} {y:g} V{to_y:g}" class="flow" marker-end="url(#flow)"/>'


def bars() -> list[str]:
    """The lower half: bytes of a row on each leg, drawn to scale."""
    parts = [text(20, 404, f"Bytes on the wire for one row of {HIDDEN:,} elements, out and back", "title")]
    for place, leg in enumerate(LEGS):
        y = 422 + 40 * place
        parts += [text(20, y + 21, leg[0], "" if place else "blue"), *bar(BAR_LEFT, y, BAR_WIDTH, leg)]
    return parts


def bar(left: float, y: float, width: float, leg: tuple[str, tuple[str, int], tuple[str, int]]) -> list[str]:
    """One sender's two legs, and their share of bfloat16's bytes; the latter fill the width."""
    parts, x = [], left
    for form, size in leg[1:]:
        of_leg = width * size / (2 * BF16)
        parts.append(f'<rect x="{x:g}" y="{y}" width="{of_leg - 2:.1f}" height="30" rx="3" class="{form}"/>')
        # Where a leg is too narrow for its name, its colour and the line above have it.
        wide = 8.2 * len(f"{form}: {size:,}") < of_leg
        parts.append(
            text(round(x + of_leg / 2), y + 20.5, f"{form}: {size:,}" if wide else f"{size:,}", "middle white")
        )
        x += of_leg
    total = sum(size for _, size in leg[1:])
    return [*parts, text(round(x + 8), y + 21, f"{100 * total / (2 * BF16):.0f} %", "name")]


def way_down() -> list[str]:
    """The same on a narrow screen, from top to bottom."""
    parts = [
        text(20, 34, "The path of a token where ranks", "title"),
        text(20, 56, "can map each other's memory", "title"),
    ]
    parts += [box(20, 72, 360, 84, "rank"), text(36, 98, "rank 0, its home", "name")]
    parts += [box(36, 108, 328, 36, "step", "token in bfloat16")]
    for number, x, title, out in ((1, 20, 68, 52), (2, 208, 222, 348)):
        middle = x + 86
        parts += [box(x, 222, 172, 196, "rank"), text(title, 248, f"rank {number},", "name")]
        parts += [text(title, 268, "some experts", "name")]
        parts += [box(x + 20, 280, 132, 52, "memory", "its memory:", "int8 row"), arrow_down(middle, 334, 352)]
        parts += [box(x + 20, 356, 132, 52, "step", "dequantise,", "experts")]
        parts += [curve("wire", out, 146, out, 276), curve("wire", middle, 410, middle, 516)]
        parts += [box(x + 10, 520, 152, 36, "memory", f"int8 from rank {number}")]
    parts.insert(0, box(20, 484, 360, 150, "rank"))
    parts += [text(200, 506, "rank 0 again", "middle name")]
    parts += [curve("flow", 106, 558, 170, 578), curve("flow", 294, 558, 230, 578)]
    parts += [box(88, 582, 224, 40, "step", "dequantise, sum in order")]
    for y, title, what in (
        (180, "dispatch: one kernel", "quantise + store"),
        (444, "combine: one kernel", "sum + quantise + store"),
    ):
        parts += [text(200, y, title, "middle blue"), text(200, y + 20, what, "middle note")]
    parts += [text(200, 658, "no pack buffer, no collective call,", "middle note")]
    parts += [text(200, 678, "no wait for the host", "middle note")]
    return parts


def curve(kind: str, x: float, y: float, to_x: float, to_y: float) -> str:
    """An arrow that begins and ends downwards."""
    middle = (y + to_y) / 2
    path = f"M{x:g} {y:g} C{x:g} {middle:g} {to_x:g} {middle:g} {to_x:g} {to_y:g}"
    return f'<path d="{path}" class="{kind}" marker-end="url(#{kind})"/>'


def bars_below() -> list[str]:
    parts = [text(20, 716, "Bytes on the wire, out and back,", "title")]
    parts += [text(20, 738, f"for one row of {HIDDEN:,} elements", "title")]
    for place, leg in enumerate(LEGS):
        y = 754 + 58 * place
        parts += [text(20, y + 12, leg[0], "" if place else "blue"), *bar(20, y + 18, 300, leg)]
    return parts


def picture(width: int, height: int, parts: list[str]) -> str:
    ground = f'<rect x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="10" class="ground"/>'
    title = "The path of a token through dispatch and combine, in int8 both ways"
    body = "\n".join([f"<title>{title}</title>", f"<style>{STYLE}</style>", MARKERS, ground, *parts])
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{body}\n</svg>\n'


def main() -> int:
    pictures = {
        "dispatch_combine.svg": picture(WIDTH, HEIGHT, [*way(), *bars()]),
        "dispatch_combine_narrow.svg": picture(NARROW, TALL, [*way_down(), *bars_below()]),
    }
    stale = 0
    for name, drawn in pictures.items():
        if "--check" in sys.argv[1:]:
            stale += not (HERE / name).exists() or (HERE / name).read_text() != drawn
        else:
            (HERE / name).write_text(drawn)
    return int(stale > 0)


if __name__ == "__main__":
    sys.exit(main())
