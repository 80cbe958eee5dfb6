"""The pages: what they point to is there, what they show is what was measured, and their first example runs."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch

import thinwire
import thinwire as tw
import thinwire.errors
from thinwire.testing import run_ranks

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
ROOMS = ("comm", "fused", "moe", "triton_kernels")
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
#: What the site makes of the README and of `--help`.
MADE = {"index.md", "reference/command-line.md"}


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _headings(page: Path) -> set[str]:
    """The anchors of a page."""
    found = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_points_to_is_there(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    pictures = [(target, "") for target in re.findall(r'src(?:set)?="([^":]*)"', text)]
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]*))?\)", text) + pictures:
        there = page.parent / target if target else page
        made = page.is_relative_to(DOCS) and os.path.relpath(there, DOCS) in MADE
        assert there.exists() or made, f"{page.name} points to {target}"
        if anchor and there.suffix == ".md" and not made:
            assert anchor in _headings(there), f"{page.name} points to {target}#{anchor}"


def test_every_environment_variable_has_its_line() -> None:
    shown = set(re.findall(r"^\| `(THINWIRE_\w+)`", (DOCS / "environment.md").read_text(), re.MULTILINE))
    package = [*(ROOT / "src").rglob("*.py"), *(p for room in ROOMS for p in (ROOT / room).rglob("*.py"))]
    used = {name for path in package for name in re.findall(r"\b(THINWIRE_[A-Z_]*[A-Z])\b", path.read_text())}
    assert shown == used


def test_the_navigation_has_every_page() -> None:
    listed = re.findall(r":\s+(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    there = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} | MADE
    assert sorted(listed) == sorted(there)


def test_the_reference_has_every_public_name() -> None:
    shown = "\n".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
    names = [name for name in thinwire.__all__ if isinstance(getattr(thinwire, name), type | FunctionType)]
    missing = [name for name in names if f"::: thinwire.{name}\n" not in shown and name not in vars(thinwire.errors)]
    assert len(names) > 30 and not missing


def test_performance_is_what_the_results_say() -> None:
    assert (DOCS / "performance.md").read_text() == _script("write_performance").page()
    assert (DOCS.parent / "README.md").read_text() == _script("write_readme_figures").page()
    assert (DOCS / "wire-formats.md").read_text() == _script("write_wire_price").page()


def test_the_citation_says_what_the_package_says() -> None:
    citation = dict(re.findall(r"^([\w-]+): (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE))
    project = (ROOT / "pyproject.toml").read_text()
    assert citation["version"] == thinwire.__version__
    assert f'license = "{citation["license"]}"' in project
    (description,) = re.findall(r'^description = "(.*)"$', project, re.MULTILINE)
    assert citation["title"] == f'"thinwire: {description[0].lower()}{description[1:]}"'
    (author,) = re.findall(r'^authors = \[\{ name = "(.*)" \}\]$', project, re.MULTILINE)
    assert f"authors:\n  - name: {author}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_least_versions_are_the_packages() -> None:
    page = (ROOT / "docs" / "compatibility.md").read_text()
    shown = dict(re.findall(r"^\| (\w+) \| ([\d.]+) or newer", page, re.MULTILINE))
    project = (ROOT / "pyproject.toml").read_text()
    names = {"torch": "PyTorch", "triton": "Triton", "numba": "numba", "transformers": "transformers"}
    needed = {names[key]: [version] for key, version in re.findall(rf'"({"|".join(names)})>=([\d.]+)"', project)}
    needed["Python"] = re.findall(r'^requires-python = ">=([\d.]+)"', project, re.MULTILINE)
    assert needed == {name: [version] for name, version in shown.items()}
    for name in ("Python", "PyTorch", "Triton"):
        assert f"{name} {shown[name]}" in page.partition("## Version policy")[2].partition("\n## ")[0]


def _quick_start() -> str:
    example = re.search(
        r"<!-- quick start example -->\n```python\n(.*?)```", (DOCS / "quick-start.md").read_text(), re.DOTALL
    )
    assert example is not None
    return example[1]


def _layer_of_the_quick_start(comm: tw.Communicator) -> tuple[torch.Tensor, torch.Tensor]:
    names: dict[str, Any] = {}
    exec(_quick_start().partition("\ncomm = tw.init()")[0], names)
    with tw.ExpertParallel(comm, num_experts=8, top_k=2, hidden_size=16, max_tokens=8) as ep:
        layer = names["MoE"](ep, hidden=16, experts=8, top_k=2)
        return layer.router.weight.detach(), torch.stack([expert.weight.detach() for expert in layer.experts.values()])


def test_ranks_of_the_quick_start_have_one_router_and_different_experts() -> None:
    (router, first), (other, second) = run_ranks(_layer_of_the_quick_start, 2)
    experts = torch.cat((first, second)).flatten(1)
    assert torch.equal(router, other) and len(experts.unique(dim=0)) == 8


def test_the_training_page_shows_its_example() -> None:
    example = (DOCS.parent / "examples" / "train_and_resume.py").read_text()
    shown = re.findall(r"```python\n(.*?)```", (DOCS / "training.md").read_text(), re.DOTALL)
    assert any(len(block) > 1000 and example.endswith(block) for block in shown)


@pytest.mark.exhaustive
def test_the_quick_start_runs_alone_and_on_two_ranks(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(_quick_start() + "assert y.isfinite().all() and layer.router.weight.grad.any()\n")
    environment = os.environ | {
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "OMP_NUM_THREADS": "1",
    }
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for command in ([], launcher):
        done = subprocess.run([sys.executable, *command, str(script)], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "outputs (100, 256)" in done.stdout
