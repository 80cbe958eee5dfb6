"""Imported by the servers that tests' ranks are forked from: all that ranks import, and numba's compiled kernels.

A rank of its own would take a second of CPU to import numba, and more to read its kernels from the disk cache and to
bring numba's registries up to date, for a test that then takes milliseconds. All of that survives a fork; threads do
not, so nothing here may start one. Where the cache lacks a kernel, as in a fresh clone, a new process, which may have
threads, compiles all of them, once, however many servers ask.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import importlib.util
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

# What test modules import at their tops.
import hypothesis.strategies  # noqa: F401
import pytest  # noqa: F401

import thinwire
from thinwire.tools.warmup.cpu import cpu_kernels
from thinwire.triton_kernels.cpu.compat import FINGERPRINT

__all__ = ["load_kernels", "loaded_kernels", "run_in_new_process"]

HAS_NUMBA = importlib.util.find_spec("numba") is not None


def _import_everything() -> None:
    for module in pkgutil.walk_packages(thinwire.__path__, "thinwire."):
        # Those who use a framework import its module, after the framework; it has no kernels.
        if module.name != "thinwire.__main__" and not module.name.startswith("thinwire.integrations."):
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                if error.name != "matplotlib":  # what draws is optional, and no rank draws
                    raise


def loaded_kernels() -> list[str]:
    """The kernels that this process has machine code of."""
    return [f"{kernel.py_func.__module__}.{kernel.__name__}" for kernel in cpu_kernels() if kernel.overloads]


def load_kernels() -> list[str]:
    """Loads every kernel that is in numba's cache, for all types that it was compiled for, and names the others."""
    missing = []
    for kernel in cpu_kernels():
        index = kernel._cache._files._cache_file._load_index()
        current = kernel._cache._files._index_key
        for key in index:
            signature, fingerprint = key[0]  # those of older sources are kept, too
            if fingerprint == FINGERPRINT and key == current(key[0], kernel.targetctx.codegen()):
                kernel.compile(signature)
        if not kernel.overloads:
            missing.append(f"{kernel.py_func.__module__}.{kernel.__name__}")
    return missing


def run_in_new_process(code: str) -> None:
    """Runs Python code in an interpreter of its own: a forked one would wait for threads of torch's that stayed behind.

    Raises:
        RuntimeError: it failed; with what it printed.
    """
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"a new process ended with exit code {done.returncode}, and printed:\n{done.stdout}")


def _warm_up() -> None:
    from numba.core.registry import cpu_target

    # As a first call does, which looks at all that numba has registered since it was imported.
    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()
    if not load_kernels():
        return
    with Path(__file__).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if load_kernels():
            run_in_new_process("from thinwire.tools.warmup.cpu import call_every_kernel as call; call()")
            load_kernels()


_import_everything()
# The few ranks that run numba's kernels beside interpreted ones load what they need.
if HAS_NUMBA and "TRITON_INTERPRET" not in os.environ:
    _warm_up()
# A rank that collects garbage, as one does that counts what it has left, would look at all that was imported here, and
# get a copy of its own of each page: a quarter of a second of CPU.
gc.collect()
gc.freeze()
