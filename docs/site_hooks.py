"""What `make docs` does beside mkdocs: the README is the home page, and files that pages point to come with them.

A link of a page to a file outside of docs/ works in the clone and where the repository is shown. On the site the file
is a page of its own under source/, so that such links are checked as strictly as all others.
"""

from __future__ import annotations

import argparse
import importlib
import os
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
#: What a link or picture points to, without an anchor; in HTML, `src` and `srcset`.
_TARGET = re.compile(r"(?:(?<=\]\()|(?<=src=\")|(?<=srcset=\"))([^)#:\s\"]+)(?=[)#\"])")
_LANGUAGES = {".py": "python", ".json": "json", ".txt": "text"}


def on_config(config: MkDocsConfig) -> None:
    """Shows the version at the foot of every page."""
    (version,) = re.findall(r'^VERSION = "(.*)"', (ROOT / "src/thinwire/version.py").read_text(), re.MULTILINE)
    config.copyright = f"thinwire {version}, Apache-2.0"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the home page, the command line's, and those of files that others point to."""
    _add(files, config, _page_of("README.md"), (ROOT / "README.md").read_text())
    _add(files, config, "reference/command-line.md", _command_line())
    left = list(files.documentation_pages())
    while left:
        page = left.pop()
        for match in _TARGET.finditer(page.content_string):
            path = _pointed_at(page.src_uri, match[1])
            if path is not None and files.get_file_from_path(_page_of(path)) is None:
                left.append(_add(files, config, _page_of(path), _shown(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links to files of the clone into links to their pages."""
    here = posixpath.dirname(page.file.src_uri) or "."

    def target(match: re.Match[str]) -> str:
        path = _pointed_at(page.file.src_uri, match[1])
        return match[1] if path is None else posixpath.relpath(_page_of(path), here)

    return _TARGET.sub(target, markdown)


def _folder_of(page: str) -> str:
    """Where in the clone the text of a page lies."""
    if page == "index.md":
        return ""
    path = page.removeprefix("source/") if page.startswith("source/") else f"docs/{page}"
    return posixpath.dirname(path)


def _pointed_at(page: str, target: str) -> str | None:
    """The path in the clone of the file that a page's link means; None where it is none."""
    path = posixpath.normpath(posixpath.join(_folder_of(page), target))
    return path if not path.startswith("..") and (ROOT / path).is_file() else None


def _page_of(path: str) -> str:
    """The page of the site, or its file, that shows a file of the clone."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path}" if path.endswith(".md") else f"source/{path}.md"


def _shown(path: str) -> str:
    text = (ROOT / path).read_text()
    if path.endswith(".md"):
        return text
    return f"# {path}\n\n````{_LANGUAGES.get(Path(path).suffix, 'text')}\n{text}````\n"


def _add(files: Files, config: MkDocsConfig, path: str, content: str) -> File:
    file = File.generated(config, path, content=content)
    files.append(file)
    return file


def _command_line() -> str:
    """`--help` of every command, as wide as the site's boxes."""
    os.environ["COLUMNS"] = "110"
    sys.path.insert(0, str(ROOT / "src"))
    try:
        parser: argparse.ArgumentParser = importlib.import_module("thinwire.tools.cli").make_parser()
    finally:
        sys.path.pop(0)
    parts = ["# Command line", f"```text\n{parser.format_help()}```"]
    chosen: Any = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    for name, command in chosen.choices.items():
        parts.append(f"## thinwire {name}\n\n```text\n{command.format_help()}```")
    return "\n\n".join(parts) + "\n"
