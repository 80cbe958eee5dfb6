"""Every Python block of the pages runs as it is pasted, on two ranks: behind those that it goes on from."""

from __future__ import annotations

import ast
import importlib.util
import operator
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

import thinwire
from tests.helpers.code_on_pages import ROOT, Block, blocks_of, programs_of, run_program, run_programs
from tests.helpers.speeds import exhaustive_but
from thinwire.testing import run_ranks

#: Pages that a user reads; others point to code, or show none.
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [block for page in PAGES for block in blocks_of(str(page.relative_to(ROOT)), page.read_text())]

#: What runs elsewhere or nowhere: its page, a line of it that no other block has, and why.
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


def _reason(block: Block) -> str:
    """Why a block is not run; empty for one that is."""
    return next((why for (page, line), why in NOT_RUN.items() if page == block.page and line in block.code), "")


def _to_run(ranks: int) -> list[list[Block]]:
    run = [
        block for block in BLOCKS if not _reason(block) and not block.is_script and RANKS.get(block.page, 2) == ranks
    ]
    return programs_of(run)


def _require_shown(blocks: list[Block], printed: list[str]) -> None:
    for block, found in zip(blocks, printed, strict=True):
        if block.output is not None:
            assert found == block.output, f"{block.page}:{block.line} prints other than the page shows"


@pytest.mark.parametrize("ranks", exhaustive_but([2], [1, 2]))
def test_blocks_run_in_order_and_print_on_two_ranks_what_the_pages_show(ranks: int, tmp_path: Path) -> None:
    programs = _to_run(2)
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in programs]
    ports = [store.port for store in stores]
    interface = {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}
    results = run_ranks(run_programs, ranks, programs, ports, str(tmp_path), timeout=120, env=interface)
    failures = [failure for rank in results for _, failure in rank if failure]
    assert not failures, "\n".join(failures)
    for blocks, (printed, _) in zip(programs, results[0], strict=True):
        if ranks == 2:
            _require_shown(blocks, printed)


def test_the_page_of_layouts_runs_on_eight_ranks() -> None:
    (blocks,) = _to_run(8)
    results = run_ranks(lambda comm: run_program(blocks), 8, mode="thread", timeout=120)
    failures = [failure for _, failure in results if failure]
    assert not failures, "\n".join(failures)
    _require_shown(blocks, results[0][0])


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.is_script], ids=lambda block: f"{block.page}:{block.line}"
)
def test_programs_that_start_ranks_run_alone(block: Block, tmp_path: Path) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    script = tmp_path / "program.py"
    script.write_text(block.code.replace("29500", str(port)))
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert block.output is None or done.stdout == block.output


def test_what_is_not_run_is_listed_and_its_list_is_true() -> None:
    for page, line in NOT_RUN:
        assert sum(block.page == page and line in block.code for block in BLOCKS) == 1, f"{page}: {line}"
    unnoticed = sum(
        len(re.findall(r"^ *(?:```|~~~) *(?:py|\{\.? *py)", page.read_text(), re.MULTILINE)) for page in PAGES
    )
    assert len(BLOCKS) == unnoticed > 30, "a Python block that no test knows: write it as ```python, not indented"


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if _reason(block)], ids=lambda block: f"{block.page}:{block.line}"
)
def test_blocks_that_are_not_run_compile_and_name_what_there_is(block: Block) -> None:
    compile(block.code, block.page, "exec", dont_inherit=True)
    _require_names(block.code)


def _require_names(code: str) -> None:
    """Fails where thinwire does not have what code imports from it, or reaches from `tw`."""
    tree = ast.parse(code)
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and "thinwire" in str(node.module)]
    plain = [alias for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    ours = [alias.name for alias in plain if alias.name.startswith("thinwire")]
    assert imported or ours, "thinwire is not imported"
    for name in ours:
        assert importlib.util.find_spec(name) is not None, name
    for node in imported:
        spec = importlib.util.find_spec(str(node.module))
        assert spec is not None and spec.origin is not None, node.module
        # Read, not imported: what an integration is for may not be installed.
        there = {getattr(line, "name", None) for line in ast.parse(Path(spec.origin).read_text()).body}
        assert {alias.name for alias in node.names} <= there, ast.unparse(node)
    for reached in (ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)):
        if re.fullmatch(r"tw\.[\w.]+", reached):
            operator.attrgetter(reached.removeprefix("tw."))(thinwire)


@pytest.mark.parametrize(
    "line", ["tw.al_reduce(x)", "tw.testing.run_rank", "from thinwire.wire import WireFormats", ""]
)
def test_a_name_that_is_not_there_is_found(line: str) -> None:
    with pytest.raises((AssertionError, AttributeError)):
        _require_names(f"import thinwire as tw\n{line}" if line else "import torch")
