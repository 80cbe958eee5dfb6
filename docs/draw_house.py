"""Draws docs/house.svg from the sources: the rooms, who imports whom, and the way of a row through them.

    python docs/draw_house.py            writes the picture
    python docs/draw_house.py --check    exits non-zero where the picture is not what the sources say

Files and imports are read, not listed here; of each step of the way it is checked that its function is there.
"""

from __future__ import annotations

import ast
import sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURE = Path(__file__).with_name("house.svg")

#: From the bottom to the top: what stands higher may import what stands lower.
FLOORS = (
    ("triton_kernels", "device code: Triton's kernels; cpu/: numba's"),
    ("comm", "who talks to whom, through what memory"),
    ("fused", "kernels joined to a transport"),
    ("moe", "expert parallelism"),
)
#: The way of a token and of its experts' sum: where, the file, the function, what happens.
WAY = (
    ("home", "moe/parallel.py", "dispatch", "checks what is passed"),
    ("home", "moe/direct.py", "begin", "launches what follows"),
    ("home", "triton_kernels/dispatch.py", "send_tokens", "quantises each row, stores it at its peers"),
    ("home", "triton_kernels/signal.py", "publish", "sets this rank's flag at every peer"),
    ("expert", "triton_kernels/dispatch.py", "wait", "for all flags"),
    ("expert", "triton_kernels/permute.py", "route", "sorts what came by expert"),
    ("expert", "triton_kernels/permute.py", "gather", "dequantises it for the experts"),
    ("expert", "moe/parallel.py", "combine", "takes what the experts made of it"),
    ("expert", "triton_kernels/combine.py", "send_sums", "sums, quantises, stores at home; then the flag"),
    ("home", "triton_kernels/combine.py", "sum_home", "dequantises and adds, by rank"),
)

WIDTH, MARGIN, LINE, COLUMN = 1060, 20, 15, 620
STYLE = """
text { white-space: pre; font: 12px ui-monospace, Menlo, Consolas, monospace; fill: #1b1f24 }
.name { font-weight: bold; font-size: 14px } .note { fill: #57606a } .count { fill: #0a5c91; font-size: 11px }
rect { fill: #f6f8fa; stroke: #8c959f } .cpu { fill: #eef4ea } .expert { fill: #fdf3e1 } .home { fill: #e8f1fa }
path { stroke: #0a5c91; fill: none }
"""


def files_of(folder: Path) -> list[str]:
    """The modules of a folder, by name."""
    return sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")


def imports() -> dict[tuple[str, str], int]:
    """How many files of one room import something of another."""
    rooms = [name for name, _ in FLOORS]
    found: dict[tuple[str, str], int] = {}
    for room in rooms:
        for path in (ROOT / room).rglob("*.py"):
            named = {
                node.module.split(".")[1]
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("thinwire.")
            }
            for other in sorted(named & set(rooms) - {room}):
                found[room, other] = found.get((room, other), 0) + 1
    return found


def has_function(path: str, name: str) -> bool:
    """Whether a file has a function or method of that name."""
    tree = ast.parse((ROOT / path).read_text())
    return any(isinstance(node, ast.FunctionDef) and node.name == name for node in ast.walk(tree))


def wrapped(words: list[str], columns: int) -> list[str]:
    """Words in lines of at most so many characters."""
    lines = [""]
    for word in words:
        if len(lines[-1]) + len(word) + 2 > columns:
            lines.append("")
        lines[-1] += f"{word}  "
    return [line.rstrip() for line in lines]


def text(x: int, y: int, content: str, kind: str = "") -> str:
    return f'<text x="{x}" y="{y}"{f" class={kind!r}" if kind else ""}>{escape(content)}</text>'


def rooms() -> tuple[list[str], int]:
    """The left half: the rooms, the highest on top, with their imports."""
    known = imports()
    parts, y = [], MARGIN + 30
    for name, note in reversed(FLOORS):
        folder = ROOT / name
        blocks = [(wrapped(files_of(folder), 74), "")]
        blocks += [
            (wrapped([f"{path.relative_to(folder)}/:", *files_of(path)], 74), "cpu")
            for path in sorted(folder.rglob("*"))
            if path.is_dir() and files_of(path)
        ]
        height = 44 + sum(LINE * len(lines) + 8 for lines, _ in blocks)
        parts.append(f'<rect x="{MARGIN}" y="{y}" width="{COLUMN - 2 * MARGIN}" height="{height}" rx="6"/>')
        parts.append(text(MARGIN + 12, y + 20, f"{name}/", "name"))
        parts.append(text(MARGIN + 150, y + 20, note, "note"))
        line_y = y + 42
        for lines, kind in blocks:
            if kind:
                box = f'x="{MARGIN + 6}" y="{line_y - 13}" width="{COLUMN - 2 * MARGIN - 12}"'
                parts.append(f'<rect class="{kind}" {box} height="{LINE * len(lines) + 5}" rx="4"/>')
            for line in lines:
                parts.append(text(MARGIN + 12, line_y, line))
                line_y += LINE
            line_y += 8
        y += height
        below = [f"{other} ({known[name, other]})" for other, _ in FLOORS if (name, other) in known]
        if below:
            parts.append(f'<path d="M {MARGIN + 30} {y} v 22 m -4 -6 l 4 6 l 4 -6"/>')
            parts.append(text(MARGIN + 46, y + 16, f"files that import: {', '.join(below)}", "count"))
        y += 26
    return parts, y


def way() -> tuple[list[str], int]:
    """The right half: a row's way, step by step."""
    parts, y, x = [], MARGIN + 30, COLUMN + MARGIN
    for number, (rank, path, name, note) in enumerate(WAY, 1):
        if not has_function(path, name):
            raise SystemExit(f"{path} has no function {name}, which the picture tells of")
        parts.append(f'<rect class="{rank}" x="{x}" y="{y}" width="{WIDTH - x - MARGIN}" height="50" rx="6"/>')
        side = "at the token's home" if rank == "home" else "at the expert's rank"
        parts.append(text(x + 10, y + 19, f"{number}. {path}  {name}"))
        turned = number == 1 or WAY[number - 2][0] != rank
        parts.append(text(x + 10, y + 39, f"{side}: {note}" if turned else note, "note"))
        if number < len(WAY):
            parts.append(f'<path d="M {x + 30} {y + 50} v 12 m -4 -5 l 4 5 l 4 -5"/>')
        y += 62
    return parts, y


def picture() -> str:
    left, left_end = rooms()
    right, right_end = way()
    height = max(left_end, right_end) + MARGIN
    head = [
        text(MARGIN, MARGIN + 12, "The rooms: what stands higher imports what stands lower", "name"),
        text(COLUMN + MARGIN, MARGIN + 12, "The way of a row", "name"),
    ]
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    back = f'<rect width="{WIDTH}" height="{height}" style="fill: white; stroke: none"/>'
    body = "\n".join([back, *head, *left, *right])
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{STYLE}</style>\n{body}\n</svg>\n'


def main() -> int:
    drawn = picture()
    if "--check" in sys.argv[1:]:
        return int(not PICTURE.exists() or PICTURE.read_text() != drawn)
    PICTURE.write_text(drawn)
    return 0


if __name__ == "__main__":
    sys.exit(main())
