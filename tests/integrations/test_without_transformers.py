"""Where transformers is missing, or too old, or torchtitan, importing thinwire's part of it says what is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

_ABSENT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "transformers":
            raise ModuleNotFoundError("No module named 'transformers'", name="transformers")
sys.meta_path.insert(0, Absent())
import importlib.metadata
def version(name, real=importlib.metadata.version):
    if name == "transformers":
        raise importlib.metadata.PackageNotFoundError(name)
    return real(name)
importlib.metadata.version = version
"""
_OLD = """
import sys, types, importlib.metadata
sys.modules["transformers"] = types.ModuleType("transformers")
importlib.metadata.version = lambda name: "4.57.0"
"""


@pytest.mark.parametrize(
    ("prelude", "found"), [(_ABSENT, "it is not installed"), (_OLD, "4.57.0 is installed")], ids=["absent", "old"]
)
def test_what_is_needed_is_said(prelude: str, found: str) -> None:
    code = (
        prelude
        + """
try:
    import thinwire.integrations.transformers
except ImportError as error:
    print(error)
"""
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (
        "needs transformers 5.23 or newer" in done.stdout
        and "pip install 'transformers>=5.23' accelerate" in done.stdout
    )
    assert found in done.stdout


def test_so_it_is_without_torchtitan() -> None:
    code = _ABSENT.replace('"transformers"', '"torchtitan"') + "import thinwire.integrations.torchtitan"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and "needs torchtitan 0.3" in done.stderr
    assert "pip install torchtitan==0.3.0" in done.stderr
