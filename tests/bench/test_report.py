"""The page holds everything, needs nothing, takes no markup from a file, and fits a narrow and a wide window."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="pictures need matplotlib")

from tests.bench.synthetic import figure, odd_runs, results, whole_run
from thinwire.errors import ThinwireError
from thinwire.tools.bench.report import write_reports
from thinwire.tools.bench.results import parse_results
from thinwire.tools.bench.summary import summarise
from thinwire.tools.cli import main

CHROMIUM = shutil.which("chromium")


def write_report(run: dict[str, Any], folder: Path) -> list[Path]:
    return write_reports([parse_results(run, "results")], folder)


def page(run: dict[str, Any], folder: Path) -> str:
    return write_report(run, folder)[0].read_text()


class Tags(HTMLParser):
    """The tags of a page with the names of their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, ...]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, *(name for name, _ in attrs)))


def test_the_page_holds_the_pictures_that_lie_beside_it(tmp_path: Path) -> None:
    first, *pictures = write_report(whole_run(operations=["moe"]), tmp_path / "new" / "folder")
    assert [path.name for path in (first, *pictures)] == ["report.html", "latency_moe.png"]
    held = re.findall(r'src="data:image/png;base64,([^"]*)"', first.read_text())
    assert [base64.b64decode(data) for data in held] == [picture.read_bytes() for picture in pictures]
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)


def test_the_page_tells_all_that_the_file_tells(tmp_path: Path) -> None:
    run = whole_run(operations=["moe", "all_reduce"]) | {
        "skipped": [{"implementation": "Open MPI", "reason": "no GPU", "operation": "moe"}] * 2
    }
    text = unescape(page(run, tmp_path))
    for told in (run["command"], run["commit"], "A processor", "4 on 1 host, processes of one host", "4096"):
        assert told in text
    assert text.count("<tr>") == 1 + len(run["figures"]) and text.count("Open MPI (moe): no GPU") == 1
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", text)
    for shown in ("all_reduce", "quantize, gloo", "staged", "33,554,432", "6.50e-03", "2.00"):
        assert shown in cells
    assert f"{1e6 * run['figures'][0]['seconds']['median']:,.1f}" in cells
    assert text.count("Speed-up of moe against skew: the run has no speed-ups") == 1


def test_who_was_fastest_stands_before_everything_else(tmp_path: Path) -> None:
    run = whole_run(operations=["moe"])
    text = unescape(page(run, tmp_path))
    (sentence,) = summarise(parse_results(run, "results").figures)
    heads = re.findall(r"<h[23]>([^<]*)</h", text)
    assert heads == ["Summary", "Pictures", "Not drawn", "All figures", "Skipped", "Machine and settings", "Settings"]
    assert sentence.startswith("moe: thinwire int8 direct is fastest from 1 to 4,096 tokens")
    assert text.index("Summary") < text.index(f"<li>{sentence}</li>") < text.index("Pictures")


def test_wrong_elements_stand_out(tmp_path: Path) -> None:
    assert "<td class=wrong>7</td>" in page(results([figure(wrong=7)]), tmp_path)
    assert "class=wrong" not in page(results([figure(wrong=0)]), tmp_path)


def test_a_wrong_result_has_a_line_and_no_time(tmp_path: Path) -> None:
    nothing = dict.fromkeys(("seconds", "algorithm_bandwidth", "bus_bandwidth", "wire_bandwidth", "speedup"))
    text = page(results([figure(wrong=7) | nothing, figure()]), tmp_path)
    assert "<td class=wrong>7</td>" in text and "<td></td>" in text
    assert page(results([figure(wrong=7) | nothing]), tmp_path)  # without pictures


def test_the_page_asks_for_nothing(tmp_path: Path) -> None:
    text = page(results([figure()]), tmp_path)
    assert not re.search(r"https?:|<script|<link|@import|url\(", text)
    assert set(re.findall(r'(?:src|href)="(.{5})', text)) == {"data:"}
    assert "default-src 'none'" in text


MARKUP = "\"'><script>alert(1)</script><img src=x onerror=alert(2)>&lt;b&gt;"


def test_markup_in_a_file_is_text_on_the_page(tmp_path: Path) -> None:
    def run(text: str) -> dict[str, Any]:
        fields = {"implementation": text, "wire": text, "transport": text, "reference": text}
        figures = [
            figure(operation, routing=f"{text}{skew}", skew=skew, **fields)
            for operation in ("dispatch", "all_reduce")
            for skew in (1.0, 2.0)
        ]
        return results(
            figures, command=text, commit=text, launched=text, machine={text: text}, settings={text: [text]},
            skipped=[{"implementation": text, "reason": text, "operation": text}],
        )  # fmt: skip

    harmless, hostile = page(run("harmless"), tmp_path / "a"), page(run(MARKUP), tmp_path / "b")
    assert Tags(hostile).found == Tags(harmless).found
    assert "<script" not in hostile and hostile.count("alert(1)") > 15


def test_the_command_takes_several_files_and_refuses_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.json").write_text(json.dumps(results([figure()])))
    (tmp_path / "b.json").write_text(json.dumps(results([figure("moe")])))
    (tmp_path / "c.json").write_text(json.dumps(results([figure(tokens=-1)])))
    files = [str(tmp_path / name) for name in ("a.json", "b.json", "c.json")]
    output = tmp_path / "output"
    assert main(["report", *files, "--output", str(output)]) == 2 and not output.exists()
    assert f"error: {files[2]}: figures[0]: tokens is -1, expected an int from 0" in capsys.readouterr().err
    assert main(["report", *files[:2], "--output", str(output)]) == 0
    names = ["report.html", "latency_dispatch.png", "2_latency_moe.png"]
    assert capsys.readouterr().out.split() == [str(output / name) for name in names]
    assert (output / "report.html").read_text().count("<section>") == 2
    assert main(["report", files[0], "--output", files[1]]) == 2
    assert "b.json" in capsys.readouterr().err


def test_one_series_may_have_no_transport_where_others_have_one(tmp_path: Path) -> None:
    run = results([figure(), figure(transport=None), figure(tokens=128, transport=None)])
    assert "report.html" in [path.name for path in write_report(run, tmp_path)]


@pytest.mark.parametrize("name", ["report.html", "latency_dispatch.png"])
def test_no_link_is_followed_to_where_somebody_else_wants_it_written(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.json").write_text(json.dumps(results([figure()])))
    (tmp_path / "own").write_text("kept")
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / name).symlink_to(tmp_path / "own")
    assert main(["report", str(tmp_path / "a.json"), "--output", str(tmp_path / "shared")]) == 2
    assert (tmp_path / "own").read_text() == "kept"
    assert f"a symbolic link, which is not followed: name its target: '{tmp_path / 'shared' / name}'" in (
        capsys.readouterr().err
    )


def test_a_dict_that_is_no_run_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ThinwireError, match="results: ranks is 0"):
        write_report(results(ranks=0), tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("module", "status"), [("torch", 0), ("matplotlib", 2)])
def test_it_needs_matplotlib_and_no_torch(module: str, status: int, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(results([figure()])))
    options = ["report", str(tmp_path / "a.json"), "--output", str(tmp_path / "output")]
    code = (
        f"import sys; sys.modules[{module!r}] = None; from thinwire.tools.cli import main; sys.exit(main({options!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    assert (tmp_path / "output").exists() == (status == 0)
    assert status == 0 or "matplotlib, which is not installed: pip install matplotlib" in done.stderr


# ---------------------------------------------------------------------------------------------------------------------
# In a browser

#: Writes what is wrong with the page into its title.
MEASURE = """<script>
const found = [], root = document.documentElement, width = root.clientWidth;
const rounded = (box) => [box.left, box.top, box.right, box.bottom].map(Math.round).join(' ');
if (root.scrollWidth > width) found.push(`page is ${root.scrollWidth} wide of ${width}`);
const blocks = [...document.querySelectorAll('h1, h2, h3, p, pre, dt, dd, img, figcaption, li, .scrolls')];
const boxes = blocks.map((block) => block.getBoundingClientRect());
blocks.forEach((block, i) => {
  const name = `${block.tagName} "${(block.alt || block.textContent).slice(0, 30)}"`;
  if (boxes[i].left < 0 || boxes[i].right > width) found.push(`${name} leaves the page: ${rounded(boxes[i])}`);
  if (!block.matches('.scrolls, img') && block.scrollWidth > block.clientWidth) found.push(`${name} overflows`);
  if (block.matches('dd') && boxes[i].width < 0.5 * Math.min(width, 560)) found.push(`${name} is squeezed`);
  if (parseFloat(getComputedStyle(block).fontSize) < 12) found.push(`${name} is too small`);
  for (let j = 0; j < i; j++) {
    const a = boxes[i], b = boxes[j];
    if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1)
      found.push(`${name} overlaps ${blocks[j].tagName} "${blocks[j].textContent.slice(0, 30)}"`);
  }
});
document.querySelectorAll('img').forEach((img) => {
  if (!img.naturalWidth) found.push(`${img.alt} does not load`);
  if (img.width < 0.45 * Math.min(width, 800)) found.push(`${img.alt} is shown ${img.width} wide`);
  if (Math.abs(img.width / img.height - img.naturalWidth / img.naturalHeight) > 0.02) found.push(`${img.alt} is bent`);
});
const images = [...document.images], right = Math.max(0, ...images.map((img) => img.getBoundingClientRect().right));
if (width >= 1400 && images.length > 1 && right < 0.85 * width) found.push('pictures leave the width unused');
document.querySelectorAll('td').forEach((cell) => {
  if (cell.scrollWidth > cell.clientWidth + 1) found.push(`cell "${cell.textContent.slice(0, 30)}" overflows`);
});
if (document.scripts.length !== 1) found.push('the page has scripts');
document.title = 'measured ' + JSON.stringify({images: document.images.length, found});
</script>"""


def measured(text: str, width: int, folder: Path, script: str = MEASURE) -> dict[str, Any]:
    """What a script at its end finds in a page that Chromium shows in a window of that width."""
    text = text.replace("default-src 'none'", "default-src 'none'; script-src 'unsafe-inline'")
    copy = folder / "measured.html"
    copy.write_text(text.replace("</body>", f"{script}</body>"), encoding="utf-8")
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}",
        f"--window-size={width},2000", "--dump-dom", copy.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    (title,) = re.findall(r"<title>measured (.*?)</title>", done.stdout)
    found: dict[str, Any] = json.loads(unescape(title))
    return found


in_browser = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


@in_browser
@pytest.mark.exhaustive
@pytest.mark.parametrize("width", [390, 800, 1440])
@pytest.mark.parametrize("name", ["a whole run", "long names", "all skipped", "eight ranks", "one figure"])
def test_nothing_overlaps_or_overflows_in_a_browser(name: str, width: int, tmp_path: Path) -> None:
    text = page(odd_runs()[name], tmp_path)
    assert measured(text, width, tmp_path) == {"images": text.count("<img "), "found": []}


@in_browser
@pytest.mark.exhaustive
def test_the_browser_sees_what_is_wrong(tmp_path: Path) -> None:
    text = page(whole_run(), tmp_path)
    for change, told, width in (
        ((".scrolls { overflow-x: auto;", ".scrolls {"), "page is", 800),
        (("img { display: block; max-width: 100%;", "img { display: block;"), "page is", 800),
        (("figcaption { color: #424a53; margin-top: .3rem", "figcaption { margin-top: -3rem"), "overlaps", 800),
        (("dl, figcaption { font-size: .9rem", "dl, figcaption { font-size: .6rem"), "too small", 800),
        (("overflow-wrap: anywhere", "min-width: 70rem"), "page is", 800),
        (("base64,iVBOR", "base64,iVBxR"), "does not load", 800),
        (("{ dl { grid-template-columns: 1fr }", "{ dl { grid-template-columns: 12rem 1fr }"), "squeezed", 500),
        (("max-width: 100rem", "max-width: 62rem"), "leave the width unused", 1440),
        (("</h1>", "</h1><script>1</script>"), "scripts", 800),
    ):
        assert change[0] in text
        found = measured(text.replace(*change), width, tmp_path)["found"]
        assert any(told in problem for problem in found), (change, found)
