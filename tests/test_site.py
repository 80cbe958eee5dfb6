"""The site in a browser: on a wide screen no code is cut, on a telephone no page is wider than the screen."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from html import unescape
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="the site needs mkdocs")
pytest.importorskip("mkdocstrings", reason="the site needs mkdocstrings")

CHROMIUM = shutil.which("chromium")
pytestmark = [pytest.mark.exhaustive, pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")]
ROOT = Path(__file__).parents[1]
PAGES = (
    "index.html", "quick-start.html", "rounds.html", "training.html", "performance.html", "compatibility.html",
    "reference/command-line.html", "reference/expert-parallelism.html",
)  # fmt: skip
TELEPHONE, WIDE = 390, 1440

#: Loads each page in a frame of each width, one after the other, and tells what does not fit.
_LOOK = """<!DOCTYPE html><title></title><body><script>
const found = [], left = WANTED;
function next() {
  if (!left.length) { document.title = 'measured ' + JSON.stringify(found); return; }
  const [name, width] = left.shift(), frame = document.createElement('iframe');
  frame.width = width; frame.height = 1000; frame.src = name;
  frame.onload = () => setTimeout(() => {
    const page = frame.contentDocument, tell = (what) => found.push([name, width, what]);
    if (page.documentElement.scrollWidth > width) tell('page');
    for (const code of page.querySelectorAll('pre > code'))
      if (code.scrollWidth > code.clientWidth + 1) tell('code');
    for (const picture of page.querySelectorAll('.md-content img')) {
      if (!picture.naturalWidth) tell('no picture');
      tell(picture.currentSrc.split('/').pop());
    }
    frame.remove(); next();
  }, 300);
  document.body.append(frame);
}
next();
</script></body>"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def _look(site: Path, tmp_path: Path, pages: Sequence[tuple[str, int]]) -> list[tuple[str, int, str]]:
    wrapper = site / "looked_at.html"
    wrapper.write_text(_LOOK.replace("WANTED", json.dumps(list(pages))))
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
        "--allow-file-access-from-files", "--window-size=1600,1200", "--virtual-time-budget=60000", "--dump-dom",
        wrapper.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    (title,) = re.findall(r"<title>measured (.*?)</title>", done.stdout)
    return [(name, width, what) for name, width, what in json.loads(unescape(title))]


def test_pages_fit_a_telephone_and_code_fits_a_wide_screen(site: Path, tmp_path: Path) -> None:
    found = _look(site, tmp_path, [(page, width) for page in PAGES for width in (TELEPHONE, WIDE)])
    cut = [(page, width, what) for page, width, what in found if what == "page" or (what, width) == ("code", WIDE)]
    assert not cut and not [page for page, _, what in found if what == "no picture"]
    drawings = {width: what for page, width, what in found if page == "index.html" and what.startswith("dispatch")}
    assert drawings == {TELEPHONE: "dispatch_combine_narrow.svg", WIDE: "dispatch_combine.svg"}


def test_code_that_is_cut_is_found(site: Path, tmp_path: Path) -> None:
    (site / "long.html").write_text(
        f"<pre style='overflow: auto'><code style='display: block; overflow: auto'>{'x' * 400}"
    )
    assert ("long.html", WIDE, "code") in _look(site, tmp_path, [("long.html", WIDE)])
