"""The package as a stranger gets it: what the wheel holds, what it needs, and that it runs from anywhere."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("comm", "fused", "moe", "triton_kernels")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of what git tracks."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    archive = subprocess.run(
        ["tar", "-cf", "-", "-T", "-"], cwd=ROOT, input=files.encode(), capture_output=True, check=True
    )
    subprocess.run(["tar", "-xf", "-"], cwd=source, input=archive.stdout, check=True)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(target), "."]
    subprocess.run(command, cwd=source, check=True)
    return next(target.glob("thinwire-*.whl"))


def test_the_wheel_holds_exactly_the_tracked_package_files(wheel: Path) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "src/thinwire", *ROOMS], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    expected = {
        "thinwire/" + path.removeprefix("src/thinwire/")
        for path in tracked
        if not (ROOT / path).is_symlink()  # the links to the rooms
    }
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == expected >= {"thinwire/tools/demo/tiny_moe.safetensors", "thinwire/py.typed"}


@pytest.mark.exhaustive
def test_the_demo_runs_with_only_the_wheel_from_the_clone_and_from_elsewhere(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    # As PYTHONPATH, site-packages gives torch but not the editable install: that hangs on a .pth file there.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(site), sysconfig.get_path("purelib")))}
    code = "import thinwire; print(thinwire.__file__); from thinwire.tools.cli import main; main(['demo', '--help'])"
    for folder in (ROOT, tmp_path):
        command = [sys.executable, "-S", "-c", code]
        shown = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True).stdout
        assert shown.startswith(str(site)) and "--ranks" in shown, "another thinwire was found"


_BLOCKED = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("triton", "numba", "llvmlite"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.split(".")[0])
sys.meta_path.insert(0, Block())
import importlib.util
find_spec = importlib.util.find_spec
missing = ("triton", "numba")
importlib.util.find_spec = lambda name, *rest: None if name.split(".")[0] in missing else find_spec(name, *rest)
"""


def _run_blocked(code: str, **environment: str) -> str:
    """Runs code in a process in which neither Triton nor numba can be imported."""
    command = [sys.executable, "-c", _BLOCKED + code]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_everything_imports_without_triton_and_numba() -> None:
    code = """
import pkgutil, importlib, thinwire
names = [m.name for m in pkgutil.walk_packages(thinwire.__path__, "thinwire.")]
for name in names:
    if name != "thinwire.__main__" and not name.startswith("thinwire.integrations."):  # which need others' packages
        importlib.import_module(name)
for name in thinwire.__all__:
    getattr(thinwire, name)
print(len(names))
"""
    assert int(_run_blocked(code)) > 20


def test_what_needs_triton_or_numba_says_which_extra_to_install_and_the_reference_can_be_asked_for() -> None:
    code = """
import torch, thinwire as tw
from thinwire.triton_kernels.pack import pack_rows
records = torch.zeros(1, 32, dtype=torch.uint8)
for call in (
    lambda: print(tw.dequantize(tw.quantize(torch.ones(1, 8)))[0, 0].item()),
    lambda: pack_rows(torch.zeros(1, 8), tw.WireFormat.parse("int8"), None, records),
):
    try:
        call()
    except tw.TransportUnavailable as error:
        print(error)
"""
    numba, triton = _run_blocked(code).splitlines()
    assert "pip install numba" in numba and "pip install triton" in triton
    assert abs(float(_run_blocked(code, THINWIRE_BACKEND="torch").splitlines()[0]) - 1) < 0.004


def test_triton_kernels_find_a_ranks_memory_in_one_place() -> None:
    sources = [path for path in (ROOT / "triton_kernels").glob("*.py") if path.name != "put.py"]
    assert len(sources) > 10
    assert [path.name for path in sources if "load(buffer_ptrs" in path.read_text()] == []


def test_importing_thinwire_loads_no_room() -> None:
    code = "import sys, thinwire; print([name for name in sys.modules if name.startswith('thinwire.')])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['thinwire.version']"
