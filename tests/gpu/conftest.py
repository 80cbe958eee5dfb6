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


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A run may be cut off, and must have told what failed until then; not when it ends, as pytest does."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\n{report.nodeid} failed:\n{report.longreprtext}", flush=True)


@pytest.fixture(scope="session", autouse=True)
def _kernels_are_compiled(request: pytest.FixtureRequest) -> None:
    if request.config.pluginmanager.has_plugin("verification.ptx.standin"):
        return  # which compiles what it runs
    if "PYTEST_XDIST_WORKER" in os.environ:
        return  # several would compile the same
    from tests.gpu.warm import compile_all

    compile_all()
