"""One page of results: self-contained and without scripts, so it can be mailed.

Everything that comes from a results file is escaped, and the page's own policy forbids scripts and any address, so that
a hostile file can put nothing into it but text.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.errors import TransportUnavailable
from thinwire.files import write_file
from thinwire.tools.bench.results import Figure, Results, Skipped
from thinwire.tools.bench.summary import summarise
from thinwire.tools.bench.units import significant

if TYPE_CHECKING:
    from thinwire.tools.bench.plots import Picture

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_STYLE = """
:root { color-scheme: light }
body { margin: 0 auto; padding: 1.5rem; max-width: 100rem; background: #fff; color: #24292f;
  font: 16px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; overflow-wrap: anywhere }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 1rem }
h2 { font-size: 1.25rem; margin: 2.2rem 0 .6rem }
h3 { font-size: 1.05rem; margin: 1.6rem 0 .5rem }
h1, h2, h3, p, pre, dl, ul { max-width: 62rem }
section + section { border-top: 2px solid #d8dee4; margin-top: 3rem; padding-top: 1.5rem }
pre { background: #f6f8fa; padding: .7rem .9rem; border-radius: 6px; white-space: pre-wrap; font-size: .85rem }
dl { display: grid; grid-template-columns: minmax(8rem, 16rem) 1fr; gap: .15rem 1.2rem; margin: 0 }
dl, figcaption { font-size: .9rem }
dt { color: #57606a }
dd { margin: 0 }
@media (max-width: 36rem) { dl { grid-template-columns: 1fr } dd { margin-bottom: .4rem } }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 40rem), 1fr)); gap: 2.2rem }
figure { margin: 0; max-width: 800px }
figcaption { color: #424a53; margin-top: .3rem }
img { display: block; max-width: 100%; height: auto }
.scrolls { overflow-x: auto; border: 1px solid #d8dee4; border-radius: 6px }
table { border-collapse: collapse; font-size: .8rem; white-space: nowrap; font-variant-numeric: tabular-nums }
th, td { padding: .3rem .65rem; text-align: right }
th { background: #f6f8fa; vertical-align: bottom; white-space: normal; overflow-wrap: normal }
.text { text-align: left }
tr + tr td { border-top: 1px solid #eaeef2 }
.wrong { color: #b3261e; font-weight: bold }
"""


def require_matplotlib() -> None:
    """Checks for matplotlib before a long run that ends in pictures.

    Raises:
        TransportUnavailable: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise TransportUnavailable(
            "a report needs matplotlib, which is not installed: pip install matplotlib"
        ) from None


def write_reports(runs: Sequence[Results], folder: Path) -> list[Path]:
    """Writes `report.html` and a PNG for each of its pictures, the second run's with `2_` before their names.

    Returns:
        The written files, the page first.

    Raises:
        TransportUnavailable: matplotlib is not installed.
        OSError: the folder cannot be made or written to.
    """
    require_matplotlib()
    from thinwire.tools.bench.plots import draw
    from thinwire.tools.bench.style import png

    folder.mkdir(parents=True, exist_ok=True)
    page, sections = folder / "report.html", []
    written = [page]
    for place, run in enumerate(runs):
        pictures, missing = draw(run)
        files = [png(picture.canvas) for picture in pictures]
        for picture, content in zip(pictures, files, strict=True):
            written.append(folder / f"{f'{place + 1}_' if place else ''}{picture.name}.png")
            write_file(written[-1], content)
        sections.append(_section(run, list(zip(pictures, files, strict=True)), missing))
    write_file(page, _page(sections).encode())
    return written


def _page(sections: Iterable[str]) -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>thinwire bench</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(sections)
        + "\n</body>\n</html>\n"
    )


def _section(run: Results, pictures: Sequence[tuple[Picture, bytes]], missing: Sequence[str]) -> str:
    operations = ", ".join(dict.fromkeys(figure.operation for figure in run.figures)) or "nothing measured"
    facts = {
        "ranks": f"{run.ranks} on {run.hosts} host{'s' if run.hosts > 1 else ''}, {run.launched}",
        "commit": run.commit or "not known",
    }
    rates = {"plain copy, read and written": run.copy_bandwidth, "link, as given": run.link_bandwidth}
    facts |= {name: f"{rate / 1e9:.3g} GB/s" for name, rate in rates.items() if rate is not None}
    shown = "\n".join(_picture(picture, content) for picture, content in pictures)
    parts = [
        f"<h1>{escape(operations)}: {run.ranks} rank{'s' if run.ranks > 1 else ''}</h1>",
        f"<p>{escape(Path(run.source).name)}, written by</p>\n<pre>{escape(run.command)}</pre>",
        _items("Summary", summarise(run.figures)),
        f'<h2>Pictures</h2>\n<div class="pictures">\n{shown}\n</div>' if shown else "",
        _items("Not drawn", missing),
        "<h2>All figures</h2>",
        _table(run.figures) if run.figures else "<p>None was measured.</p>",
        _items("Skipped", _skipped(run.skipped)),
        "<h2>Machine and settings</h2>",
        _list(facts | run.machine),
        "<h3>Settings</h3>" if run.settings else "",
        _list(run.settings),
    ]
    return "<section>\n" + "\n".join(filter(None, parts)) + "\n</section>"


def _picture(picture: Picture, content: bytes) -> str:
    data = base64.b64encode(content).decode()
    width, height = (round(inches * 100) for inches in picture.canvas.get_size_inches())
    return (
        f'<figure>\n<img width="{width}" height="{height}" alt="{escape(picture.title)}" '
        f'src="data:image/png;base64,{data}">\n'
        f"<figcaption><strong>{escape(picture.title)}.</strong> {escape(picture.caption)}</figcaption>\n</figure>"
    )


def _list(entries: Mapping[str, str]) -> str:
    rows = "\n".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in entries.items())
    return f"<dl>\n{rows}\n</dl>" if rows else ""


def _items(title: str, items: Sequence[str]) -> str:
    rows = "\n".join(f"<li>{escape(item)}</li>" for item in items)
    return f"<h2>{title}</h2>\n<ul>\n{rows}\n</ul>" if rows else ""


def _skipped(skipped: Iterable[Skipped]) -> list[str]:
    """One line for all operations that were skipped alike."""
    operations: dict[tuple[str, str], list[str]] = {}
    for each in skipped:
        what = ", ".join(filter(None, (each.implementation, each.wire, each.transport)))
        operations.setdefault((what, each.reason), []).append(each.operation or "all operations")
    return [f"{what} ({', '.join(dict.fromkeys(of))}): {reason}" for (what, reason), of in operations.items()]


def _number(form: str, scale: float = 1.0) -> Callable[[Any], str]:
    return lambda value: "" if value is None else format(value / scale, form)


def _text(value: str | None) -> str:
    return value or ""


def _rate(value: float | None) -> str:
    return "" if value is None else significant(value / 1e9, 3)


#: Head of a column, what is in it, how that is shown, and whether it is text; what one looks for first comes first.
_COLUMNS: tuple[tuple[str, Callable[[Figure], Any], Callable[[Any], str], bool], ...] = (
    ("operation", lambda f: f.operation, _text, True),
    ("implementation", lambda f: f.implementation, _text, True),
    ("wire", lambda f: f.wire, _text, True),
    ("transport", lambda f: f.transport, _text, True),
    ("routing", lambda f: f.routing, _text, True),
    ("tokens", lambda f: f.tokens, _number(",.0f"), False),
    ("size, bytes", lambda f: f.size_bytes, _number(",.0f"), False),
    ("median, µs", lambda f: f.seconds and f.seconds.median, _number(",.1f", 1e-6), False),
    ("speed-up", lambda f: f.speedup, _number(".2f"), False),
    ("over", lambda f: f.reference, _text, True),
    ("relative error", lambda f: f.relative_error, _number(".2e"), False),
    ("wrong", lambda f: f.wrong, _number(",.0f"), False),
    ("p99, µs", lambda f: f.seconds and f.seconds.p99, _number(",.1f", 1e-6), False),
    ("minimum, µs", lambda f: f.seconds and f.seconds.minimum, _number(",.1f", 1e-6), False),
    ("maximum, µs", lambda f: f.seconds and f.seconds.maximum, _number(",.1f", 1e-6), False),
    ("algorithm bandwidth, GB/s", lambda f: f.algorithm_bandwidth, _rate, False),
    ("bus bandwidth, GB/s", lambda f: f.bus_bandwidth, _rate, False),
    ("wire bandwidth, GB/s", lambda f: f.wire_bandwidth, _rate, False),
    ("logical bytes", lambda f: f.logical_bytes, _number(",.0f"), False),
    ("wire bytes", lambda f: f.wire_bytes, _number(",.0f"), False),
    ("paired speed-up", lambda f: f.paired_speedup, _number(".2f"), False),
    ("skew", lambda f: f.skew, _number(".2f"), False),
    ("MaxVio", lambda f: f.max_violation, _number(".2f"), False),
    ("fastest rank, µs", lambda f: f.fastest_rank, _number(",.1f", 1e-6), False),
    ("rank spread, µs", lambda f: f.rank_spread, _number(",.1f", 1e-6), False),
    ("called", lambda f: f.called, _text, True),
    ("period, µs", lambda f: f.period, _number(",.1f", 1e-6), False),
)


def _table(figures: Sequence[Figure]) -> str:
    """In a box that scrolls by itself, as it is wider than most pages."""
    heads = "".join(f"<th{' class=text' * is_text}>{escape(head)}</th>" for head, _, _, is_text in _COLUMNS)
    rows = []
    for figure in figures:
        cells = []
        for head, value, shown, is_text in _COLUMNS:
            kind = " class=text" * is_text + " class=wrong" * bool(head == "wrong" and figure.wrong)
            cells.append(f"<td{kind}>{escape(shown(value(figure)))}</td>")
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div class="scrolls" tabindex="0"><table>\n<tr>{heads}</tr>\n' + "\n".join(rows) + "\n</table></div>"
