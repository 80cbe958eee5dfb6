"""Tests that need a GPU; elsewhere they are reported as skipped."""

from __future__ import annotations

import os
from pathlib import Path

# Before anything asks CUDA for something: ranks that are threads need them, see `thinwire.testing.run_ranks`.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(scope="session", autouse=True)
def _kernels_are_compiled(request: pytest.FixtureRequest) -> None:
    """By several processes at once; a test that needs others compiles them by itself."""
    if request.config.pluginmanager.has_plugin("tests.ptx.standin"):
        return  # which compiles what it runs
    from tests.gpu.warm import configurations
    from thinwire.progress import Report
    from thinwire.warmup.compile import compile_ahead
    from thinwire.warmup.target import archs_here

    compile_ahead([*configurations()], archs_here(), len(os.sched_getaffinity(0)), Report(None))
