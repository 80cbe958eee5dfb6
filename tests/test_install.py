"""What is built has all of the package, or is not built."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.exhaustive
ROOT = Path(__file__).parents[1]
ROOMS = ("comm", "fused", "moe", "triton_kernels")


def copied(target: Path) -> Path:
    """The clone's package, with its links."""
    for name in ("src", *ROOMS):
        shutil.copytree(
            ROOT / name, target / name, symlinks=True, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__")
        )
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, target / name)
    return target


def build(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    """A wheel."""
    command = ["-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(target), str(source)]
    return subprocess.run([sys.executable, *command], capture_output=True, text=True)


def test_a_wheel_has_every_module(tmp_path: Path) -> None:
    done = build(copied(tmp_path / "source"), tmp_path / "wheels")
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "wheels").iterdir()
    assert wheel.name.endswith("-py3-none-any.whl")
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("thinwire/")}
    wanted = {
        f"thinwire/{path.relative_to(ROOT / 'src' / 'thinwire')}" for path in (ROOT / "src" / "thinwire").rglob("*.py")
    }
    wanted |= {f"thinwire/{path.relative_to(ROOT)}" for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    assert len(wanted) > 100 and wanted <= inside


def sdist(source: Path, target: Path) -> Path:
    """A source archive of the package."""
    target.mkdir()
    code = f"from setuptools import build_meta; print(build_meta.build_sdist({str(target)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target / done.stdout.splitlines()[-1]


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_it_runs_the_readmes_program_in_an_environment_of_its_own(kind: str, tmp_path: Path) -> None:
    source, environment = copied(tmp_path / "source"), tmp_path / "environment"
    if kind == "wheel":
        done = build(source, tmp_path / "wheels")
        assert done.returncode == 0, done.stderr
        (archive,) = (tmp_path / "wheels").iterdir()
    else:
        archive = sdist(source, tmp_path / "archives")
    shutil.rmtree(source)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    # What it depends on is this environment's, of whose folder links into the clone are not followed.
    (folder,) = (environment / "lib").glob("python*/site-packages")
    (folder / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    command = ["-m", "pip", "install", "--no-index", "--no-deps", "--no-build-isolation", archive]
    done = subprocess.run([python, *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = re.search(r"```python\n(import torch, thinwire as tw\n.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found is not None
    (tmp_path / "program.py").write_text(f"{found[1]}print(tw.__file__)\n")
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables["THINWIRE_BACKEND"] = "torch"  # compiles nothing
    done = subprocess.run([python, "program.py"], cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    error, sent, place = done.stdout.splitlines()
    assert error.startswith("relative error 0.0") and sent.startswith("sent 0 bytes"), done.stdout  # a rank alone
    assert Path(place).is_relative_to(environment), done.stdout


def test_without_its_links_it_is_not_built(tmp_path: Path) -> None:
    source = copied(tmp_path / "source")
    for room in ROOMS:  # as git leaves them with core.symlinks=false: files that hold the link's target
        link = source / "src" / "thinwire" / room
        link.unlink()
        link.write_text(f"../../{room}")
    done = build(source, tmp_path / "wheels")
    assert done.returncode != 0
    assert "src/thinwire has no folder comm, fused, moe, triton_kernels" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("torch", "wanted"),
    [
        (None, "pip install --constraint constraints.txt torch\n"),
        (
            "torch --index-url https://x/cpu",
            "pip install --constraint constraints.txt torch --index-url https://x/cpu\n",
        ),
        ("cpu", "pip install --constraint constraints.txt torch --index-url https://download.pytorch.org/whl/cpu\n"),
        ("system", "import torch; print("),
    ],
)
def test_make_demo_says_what_pytorch_it_takes_and_takes_the_one_that_is_asked_for(
    torch: str | None, wanted: str, tmp_path: Path
) -> None:
    command = ["make", "--dry-run", "demo", f"VENV={tmp_path}/venv", *([] if torch is None else [f"TORCH={torch}"])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said, _, rest = done.stdout.partition(" -m venv ")
    assert "gigabytes" in said and "TORCH=cpu" in said and "TORCH=system" in said and wanted in rest
    assert ("constraints.txt" in rest) == (torch != "system")  # its version is what it is
