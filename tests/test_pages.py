"""The pages: what they point to is there, what they show is what was recorded, and their programs and commands run."""

from __future__ import annotations

import ast
import importlib.util
import json
import operator
import os
import re
import runpy
import shlex
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import thinwire as tw
import thinwire.errors
from benchmarks import published, record_demo
from tests.helpers import map_of_tests, proofs
from tests.helpers.speeds import exhaustive_but
from thinwire.comm.launch.bootstrap import current_domains
from thinwire.testing import run_ranks
from thinwire.tools.cli import main

ROOT = Path(__file__).parents[1]
DOCS, RESULTS = ROOT / "docs", ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
#: What the site makes of the README and of `--help`.
MADE = {"index.md", "reference/command-line.md"}

# ---------------------------------------------------------------------------------------------------------------------
# What pages point to and list


def _headings(page: Path) -> set[str]:
    """The anchors of a page."""
    found = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in found}


def test_what_pages_point_to_is_there() -> None:
    for page in PAGES:
        text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
        pictures = [(target, "") for target in re.findall(r'src(?:set)?="([^":]*)"', text)]
        for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]*))?\)", text) + pictures:
            there = page.parent / target if target else page
            made = page.is_relative_to(DOCS) and os.path.relpath(there, DOCS) in MADE
            assert there.exists() or made, f"{page} points to {target}"
            if anchor and there.suffix == ".md" and not made:
                assert anchor in _headings(there), f"{page} points to {target}#{anchor}"


def test_every_environment_variable_page_and_public_name_is_listed() -> None:
    shown = set(re.findall(r"^\| `(THINWIRE_\w+)`", (DOCS / "environment.md").read_text(), re.MULTILINE))
    rooms = [ROOT / room for room in ("src", "comm", "fused", "moe", "triton_kernels")]
    sources = "\n".join(path.read_text() for room in rooms for path in room.rglob("*.py"))
    assert shown == set(re.findall(r"\b(THINWIRE_[A-Z_]*[A-Z])\b", sources))
    listed = re.findall(r":\s+(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted({path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} | MADE)
    reference = "\n".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
    names = [name for name in tw.__all__ if isinstance(getattr(tw, name), type | FunctionType)]
    lacking = [name for name in names if f"::: thinwire.{name}\n" not in reference and name not in vars(tw.errors)]
    assert len(names) > 30 and not lacking


def test_versions_license_and_authors_are_the_packages() -> None:
    project, cited = (ROOT / "pyproject.toml").read_text(), (ROOT / "CITATION.cff").read_text()
    citation = dict(re.findall(r"^([\w-]+): (.+)$", cited, re.MULTILINE))
    assert citation["version"] == tw.__version__ and f'license = "{citation["license"]}"' in project
    (description,) = re.findall(r'^description = "(.*)"$', project, re.MULTILINE)
    assert citation["title"] == f'"thinwire: {description[0].lower()}{description[1:]}"'
    (author,) = re.findall(r'^authors = \[\{ name = "(.*)" \}\]$', project, re.MULTILINE)
    assert f"authors:\n  - name: {author}\n" in cited
    page = (DOCS / "compatibility.md").read_text()
    shown = dict(re.findall(r"^\| (\w+) \| ([\d.]+) or newer", page, re.MULTILINE))
    names = {"torch": "PyTorch", "triton": "Triton", "numba": "numba", "transformers": "transformers"}
    needed = {names[key]: [version] for key, version in re.findall(rf'"({"|".join(names)})>=([\d.]+)"', project)}
    needed["Python"] = re.findall(r'^requires-python = ">=([\d.]+)"', project, re.MULTILINE)
    assert needed == {name: [version] for name, version in shown.items()}
    for name in ("Python", "PyTorch", "Triton"):
        assert f"{name} {shown[name]}" in page.partition("## Version policy")[2].partition("\n## ")[0]


# ---------------------------------------------------------------------------------------------------------------------
# Numbers and pictures come from files


def _script(path: str) -> dict[str, Any]:
    return runpy.run_path(str(ROOT / path))


def _recorded(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def _models() -> list[str]:
    """The tables of fine-tuning and of generation."""
    recorded, table = _recorded("cpu/generate"), _script("examples/generate.py")["table"]
    return [
        _script("examples/fine_tune.py")["table"](_recorded("cpu/fine_tune")["runs"]),
        table("the model that thinwire ships", recorded["tiny_moe"], 0)
        + "\n\n" + table("SmolLM2 split into experts", recorded["ranks"], recorded["tokens"]),
    ]  # fmt: skip


def _wire_table() -> list[str]:
    pytest.importorskip("matplotlib", reason="the script draws, too")
    from benchmarks.wire_table import BEGIN, END, Row, markdown

    return [BEGIN + markdown([Row(**row) for row in _recorded("cpu/wire_table")["figures"]]) + END]


def _training() -> list[str]:
    (long,) = (block.code for block in BLOCKS if block.page == "docs/training.md" and len(block.code) > 1000)
    assert (ROOT / "examples" / "train_and_resume.py").read_text().endswith(long)
    return [long]


#: A page with all of its text, or with parts of it in a list, as scripts make them of what was recorded.
WRITTEN: list[tuple[str, Callable[[], str | list[str]]]] = [
    ("docs/performance.md", lambda: _script("docs/write_performance.py")["page"]()),
    ("README.md", lambda: _script("docs/write_readme_figures.py")["page"]()),
    ("docs/wire-formats.md", lambda: _script("docs/write_wire_price.py")["page"]()),
    ("docs/wire-formats.md", _wire_table),
    ("docs/slow-links.md", lambda: _script("docs/write_slow_links.py")["page"]()),
    ("docs/reliability.md", lambda: [f"{proofs.BEGIN}\n{proofs.section()}\n{proofs.END}"]),
    ("docs/quick-start.md", lambda: [record_demo.recorded_table()]),
    ("docs/planning.md", lambda: [published.table()]),
    ("docs/models.md", _models),
    ("docs/training.md", _training),
    ("tests/MAP.md", lambda: map_of_tests.page().replace("|  |", "a module without tests")),
]


@pytest.mark.parametrize(
    ("page", "made"), WRITTEN, ids=[f"{page}-{number}" for number, (page, _) in enumerate(WRITTEN)]
)
def test_pages_show_what_was_recorded(page: str, made: Callable[[], str | list[str]]) -> None:
    text, wanted = (ROOT / page).read_text(), made()
    assert text == wanted if isinstance(wanted, str) else all(part in text for part in wanted), "write it anew"


@pytest.mark.parametrize("script", ["docs/draw_dispatch_combine.py", "docs/draw_speedups.py", "docs/draw_house.py"])
def test_drawings_are_what_their_scripts_draw(script: str) -> None:
    assert subprocess.run([sys.executable, script, "--check"], cwd=ROOT).returncode == 0, f"draw it anew: {script}"


def test_the_least_times_are_what_the_code_says_and_nothing_published_is_faster() -> None:
    pytest.importorskip("triton", reason="recording launches needs Triton")
    from benchmarks import model
    from benchmarks.speed_of_light import least_published

    written = _recorded("model")
    found = re.search(r" --machine-code (\S+)", written.pop("command"))
    assert written == json.loads(json.dumps(model.results(ROOT / found[1] if found else None)))
    assert all(row.measured > least_published(row) for row in (*published.PREFILL, *published.DECODE))


#: Relative errors of one pass of Gaussian rows: what uniform rounding gives by theory, and bfloat16 on top; those of
#: others' formats follow from their bits.
THEORY = {
    "int8:32": 0.0056, "int8": 0.0066, "int8:row": 0.0092, "fp8": 0.0257, "int4": 0.097, "bfloat16": 0.0017,
    "LogFMT-10": 0.0035, "spike int8": 0.0051, "DeepEP fp8": 0.0257, "mxfp8": 0.029, "nvfp4": 0.095, "mxfp4": 0.115,
}  # fmt: skip


@pytest.mark.exhaustive
def test_recorded_errors_are_those_of_the_formats() -> None:
    pytest.importorskip("matplotlib", reason="the scripts draw, too")
    from benchmarks.error_bytes import GAUSSIAN, OUTLIERS, measure
    from benchmarks.wire_table import measure as measure_rows

    costs = {(cost.wire, cost.rows): cost for cost in measure()}
    assert costs["int8:row", OUTLIERS].relative_error > 5 * costs["int8", OUTLIERS].relative_error
    for cost, held in zip(costs.values(), _recorded("cpu/error_bytes")["figures"], strict=True):
        assert held == vars(cost) | {"relative_error": pytest.approx(cost.relative_error, rel=1e-3)}
    rows, table = measure_rows(), _recorded("cpu/wire_table")["figures"]
    gaussian = {row.name: row.gaussian for row in rows}
    gaussian |= {wire: cost.relative_error for (wire, kind), cost in costs.items() if kind == GAUSSIAN}
    assert {name: gaussian[name] for name in THEORY} == pytest.approx(THEORY, rel=0.1)
    for row, held in zip(rows, table, strict=True):
        found = {name: getattr(row, name) for name in ("name", "gaussian", "outliers", "model")}
        assert found == {name: held[name] if name == "name" else pytest.approx(held[name], rel=1e-3) for name in found}


# ---------------------------------------------------------------------------------------------------------------------
# Commands and programs run


def test_pages_show_what_their_plans_print(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("THINWIRE_WIRE", raising=False)
    page = (DOCS / "planning.md").read_text()
    samples = re.findall(r"```sh\n(thinwire plan [^\n]*)\n```\n\n```text\n(.*?)```", page, re.DOTALL)
    assert len(samples) == 2
    for command, shown in samples:
        assert main(shlex.split(command)[1:]) == 0
        assert capsys.readouterr().out == shown, f"paste what {command} prints"
    page = (DOCS / "slow-links.md").read_text()
    (command,) = re.findall(r"`(thinwire plan [^`]*--hosts [^`]*)`", page)
    assert main([*command.split()[1:], "--wire", "int8", "--json", "-"]) == 0
    legs = json.loads(capsys.readouterr().out)["crossings"]["legs"]
    (leg,) = (leg for leg in legs if (leg["name"], leg["level"], leg["wire"]) == ("combine", "two levels", "int8"))
    assert re.findall(r"(\d+) MB", page) == [f"{leg['within'] / 1e6:.0f}", f"{leg['sent'] / 1e6:.0f}"]


#: Blocks that run elsewhere or nowhere: the page, a line that no other block has, and why.
NOT_RUN = {
    ("docs/checkpoints.md", 'layer = tw.load_moe_layer("Qwen3-30B-A3B"'): "reads a checkpoint of 60 GB",
    ("docs/cuda-graphs.md", "graph = torch.cuda.CUDAGraph()"): "needs GPUs",
    ("docs/integrations-deep-ep.md", "sharded_moe._AllToAll = Exchange"): "needs DeepSpeed",
    ("docs/integrations-fsdp.md", "class Quantize(transformers.TrainerCallback)"): "needs transformers",
    ("docs/integrations.md", 'ep_implementation="thinwire:int8+h64"'): "needs transformers and a checkpoint of 60 GB",
    ("docs/integrations.md", 'register("int8 both ways"'): "needs transformers",
    ("docs/integrations-torchtitan.md", "config.override = OverrideConfig("): "needs torchtitan and a model's config",
    ("docs/launch.md", 'comm = tw.init(rank_table="rank_table.json", rank=2)'): "needs the hosts of its rank table",
    ("docs/quick-start.md", 'ep_implementation="thinwire"'): "needs transformers and a checkpoint of 60 GB",
}
#: A page that is for another number of ranks than two, which are threads then.
RANKS = {"docs/layout.md": 8}


@dataclass(frozen=True)
class Block:
    """A Python block of a page.

    Attributes:
        line: the page's line of its first line of code.
        output: what the page says that it prints: the next `text` block, if that comes before the next Python block.
    """

    page: str
    line: int
    code: str
    output: str | None

    @property
    def is_script(self) -> bool:
        """A program of its own, which starts ranks by itself."""
        return 'if __name__ == "__main__":' in self.code

    @property
    def is_run(self) -> bool:
        """Whether it is none of those that are not."""
        return not any(self.page == page and line in self.code for page, line in NOT_RUN)


def blocks_of(page: Path) -> list[Block]:
    """In the page's order."""
    found: list[Block] = []
    text, waiting = page.read_text(), False
    for fence in re.finditer(r"^```([\w-]*)[^\n]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if fence[1] in ("python", "py", "python3", "pycon"):
            line = text[: fence.start()].count("\n") + 2
            found.append(Block(str(page.relative_to(ROOT)), line, fence[2], None))
            waiting = True
        elif fence[1] == "text" and waiting:
            found[-1] = Block(found[-1].page, found[-1].line, found[-1].code, fence[2])
            waiting = False
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def programs(ranks: int) -> list[list[Block]]:
    """Blocks that go on from each other: one that imports thinwire, as a file does, begins the next program."""
    made: list[list[Block]] = []
    for block in (block for block in BLOCKS if block.is_run and not block.is_script):
        if RANKS.get(block.page, 2) == ranks:
            if not made or block.page != made[-1][0].page or "thinwire as tw" in block.code:
                made.append([])
            made[-1].append(block)
    return made


def run_program(blocks: list[Block]) -> tuple[list[str], str]:
    """Runs blocks one after the other; returns what each printed, and the traceback of one that raised.

    `print` alone is caught: ranks may be threads of this process.
    """
    printed: list[str] = []

    def write(*values: object, flush: bool = False) -> None:
        printed[-1] += " ".join(map(str, values)) + "\n"

    names: dict[str, Any] = {"__name__": "__main__", "print": write}
    try:
        for block in blocks:
            printed.append("")
            # Line numbers in a traceback are the page's.
            exec(compile("\n" * (block.line - 1) + block.code, block.page, "exec", dont_inherit=True), names)
    except Exception:
        return printed, traceback.format_exc()
    finally:
        torch.set_default_device(None)
    return printed, ""


def run_programs(comm: tw.Communicator, ports: list[int], folder: str) -> list[tuple[list[str], str]]:
    """A rank of `run_ranks` runs programs as it would under torchrun: in each it joins the others anew.

    Programs behind one that raised are not run, as other ranks may be elsewhere.

    Args:
        ports: of a `torch.distributed.TCPStore` on this host for each program, as torchrun has one. A store keeps what
            an earlier process group left in it, so none is used twice.
    """
    rank, size = comm.rank, comm.size
    comm.close()
    dist.destroy_process_group()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", TORCHELASTIC_USE_AGENT_STORE="True")
    os.chdir(folder)
    sys.argv = ["program.py", "checkpoints"]
    results = []
    for blocks, port in zip(programs(2), ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        results.append(run_program(blocks))
        if results[-1][1]:
            break
        world = current_domains().find(None)
        if world is not None:  # the program left it open
            world.close()
        if dist.is_initialized():
            dist.destroy_process_group()
    return results


def _require_shown(results: list[list[tuple[list[str], str]]], of: list[list[Block]], compared: bool = True) -> None:
    """Fails where a rank's program raised, or where the first rank's printed other than its page shows."""
    failures = [failure for rank in results for _, failure in rank if failure]
    assert not failures, "\n".join(failures)
    for blocks, (printed, _) in zip(of, results[0], strict=True):
        for block, found in zip(blocks, printed, strict=True):
            if block.output is not None and compared:
                assert found == block.output, f"{block.page}:{block.line} prints other than the page shows"


@pytest.mark.parametrize("ranks", exhaustive_but([2], [1, 2]))
def test_programs_run_on_two_ranks_and_print_what_the_pages_show(ranks: int, tmp_path: Path) -> None:
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in programs(2)]
    interface = {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}
    ports = [store.port for store in stores]
    results = run_ranks(run_programs, ranks, ports, str(tmp_path), timeout=120, env=interface)
    _require_shown(results, programs(2), compared=ranks == 2)


def test_the_page_of_layouts_runs_on_eight_ranks() -> None:
    (blocks,) = programs(8)
    results = run_ranks(lambda comm: [run_program(blocks)], 8, mode="thread", timeout=120)
    _require_shown(results, [blocks])


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.is_script], ids=lambda block: f"{block.page}:{block.line}")
def test_programs_that_start_ranks_run_alone(block: Block, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    script = tmp_path / "program.py"
    script.write_text(block.code.replace("29500", str(port)))
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert block.output is None or done.stdout == block.output


@pytest.mark.exhaustive
def test_the_readmes_program_runs_under_torchrun(tmp_path: Path) -> None:
    (block,) = (block for block in BLOCKS if block.page == "README.md" and block.code.startswith("import torch, thin"))
    script = tmp_path / "program.py"
    script.write_text(block.code)
    environment = {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"), "OMP_NUM_THREADS": "1"}
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run([sys.executable, *command], env=os.environ | environment, capture_output=True, text=True)
    assert done.stdout == block.output and len(block.code.splitlines()) <= 15, done.stderr


def _layer_of_the_quick_start(comm: tw.Communicator) -> tuple[torch.Tensor, torch.Tensor]:
    (code,) = (block.code for block in BLOCKS if block.page == "docs/quick-start.md" and "class MoE" in block.code)
    names: dict[str, Any] = {}
    exec(code.partition("\ncomm = tw.init()")[0], names)
    with tw.ExpertParallel(comm, num_experts=8, top_k=2, hidden_size=16, max_tokens=8) as ep:
        layer = names["MoE"](ep, hidden=16, experts=8, top_k=2)
        return layer.router.weight.detach(), torch.stack([expert.weight.detach() for expert in layer.experts.values()])


def test_ranks_of_the_quick_start_have_one_router_and_different_experts() -> None:
    (router, first), (other, second) = run_ranks(_layer_of_the_quick_start, 2)
    experts = torch.cat((first, second)).flatten(1)
    assert torch.equal(router, other) and len(experts.unique(dim=0)) == 8


def test_what_is_not_run_compiles_and_names_what_there_is() -> None:
    for page, line in NOT_RUN:
        assert sum(block.page == page and line in block.code for block in BLOCKS) == 1, f"{page}: {line}"
    fences = (re.findall(r"^ *(?:```|~~~) *(?:py|\{\.? *py)", page.read_text(), re.MULTILINE) for page in PAGES)
    assert len(BLOCKS) == sum(map(len, fences)) > 30, "a Python block that is none here: write ```python, not indented"
    for block in (block for block in BLOCKS if not block.is_run):
        compile(block.code, block.page, "exec", dont_inherit=True)
        _require_names(block.code)


def _require_names(code: str) -> None:
    """Fails where thinwire does not have what code imports from it, or reaches from `tw`."""
    tree = ast.parse(code)
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and "thinwire" in str(node.module)]
    plain = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert imported or any(name.startswith("thinwire") for name in plain), "thinwire is not imported"
    assert all(importlib.util.find_spec(name) for name in plain if name.startswith("thinwire")), plain
    for node in imported:
        spec = importlib.util.find_spec(str(node.module))
        assert spec is not None and spec.origin is not None, node.module
        # Read, not imported: what an integration is for may not be installed.
        there = {getattr(line, "name", None) for line in ast.parse(Path(spec.origin).read_text()).body}
        assert {alias.name for alias in node.names} <= there, ast.unparse(node)
    for reached in (ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)):
        if re.fullmatch(r"tw\.[\w.]+", reached):
            operator.attrgetter(reached.removeprefix("tw."))(thinwire)
