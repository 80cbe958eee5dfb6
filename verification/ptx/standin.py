"""In place of a GPU: tests/gpu on this machine's memory, its kernels run as compiled for one.

    python -m pytest -p verification.ptx.standin tests/gpu

Ranks are threads. Whatever names a CUDA device gets the CPU; what kernels are launched on it runs as PTX, a few
instructions of one rank and then of another. So the host's code is that for the CPU, which looks at every report, and
streams, graphs and processes are not there: tests of those are skipped, with the reason.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from triton.runtime import JITFunction

import tests.gpu.sharing
from thinwire.comm.memory.symmetric import SymmetricMemory
from thinwire.testing import run_ranks
from thinwire.triton_kernels import all_to_all_v, codec, collective, combine, permute, sums  # noqa: F401
from thinwire.triton_kernels import expert_gemm as _expert_gemm  # noqa: F401
from thinwire.triton_kernels.round_layout import Lane
from verification.ptx.device import Device

_TURNS = 8  # of a launch, before other ranks' threads get a chance
_MOST_RANKS = 3
#: CPU tensors are for Triton's kernels. What has kernels is imported above, so that none becomes the interpreter's.
_AS_INTERPRETED = {"TRITON_INTERPRET": "1", "THINWIRE_BACKEND": "triton"}

_AT_ONCE = "of CPU tensors the host looks at every report, and raises in the call itself"
_NEVER_WAITS = "there is nothing to wait for, so nobody can be seen to wait"
#: Parts of names of tests that cannot run here, and why not.
CANNOT = {
    "graphs": "CUDA graphs",
    "wait_for_the_device": _NEVER_WAITS,
    "waits_for_the_device": _NEVER_WAITS,
    "test_doctor": "it asks CUDA for its GPUs",
    "test_symmetric": "memory of CUDA, its streams, and processes",
    "whatever_stream": "streams",
    "processes": "processes, each of which would have a device of its own",
    "survivors_name": _AT_ONCE,
    "waits_end": _AT_ONCE,
    "told_later": _AT_ONCE,
    "a_count_that_differs": _AT_ONCE,
    "all_told_in_that_call": _AT_ONCE,
}


class _OnTheCpu(TorchFunctionMode):
    """CUDA devices are the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.cuda:
            return args[0].clone()
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        args = tuple(
            "cpu" if isinstance(argument, str) and argument.startswith("cuda") else argument for argument in args
        )
        return function(*args, **kwargs)


def _threads_on_the_cpu(fn: Callable[..., Any], world_size: int, *args: Any, **options: Any) -> list[Any]:
    """`run_ranks` with ranks that are threads of this process, and fewer than a GPU would have."""
    return run_ranks(fn, min(world_size, _MOST_RANKS), *args, mode="thread", timeout=options.get("timeout", 60.0))


@contextmanager
def stand_in() -> Iterator[Device]:
    """Within it, threads' launches on CPU tensors run as PTX, each as if on a GPU of its own."""
    device, lock = Device(), threading.Lock()
    device.look_at_clock = time.monotonic_ns
    with device.patch(queued=True):
        queue = JITFunction.run

        def run(kernel: Any, *positional: Any, **named: Any) -> None:
            with lock:
                queue(kernel, *positional, **named)
                turns = device.begin_queued()
            with np.errstate(all="ignore"):
                while True:
                    with lock:
                        for _ in range(_TURNS):
                            if next(turns, device) is device:
                                return
                    time.sleep(0)

        def register(memory: SymmetricMemory, *args: Any) -> None:
            made(memory, *args)
            with lock:
                device.register("a symmetric buffer", memory.local)

        def lane_of(*args: Any) -> Lane:
            lane = of(*args)
            with lock:
                device.register("a lane's buffer", lane.buffer)
            return lane

        made, of = SymmetricMemory.__init__, Lane.of
        with (
            mock.patch.dict(os.environ, _AS_INTERPRETED),
            mock.patch.object(JITFunction, "run", run),
            mock.patch.object(SymmetricMemory, "__init__", register),
            mock.patch.object(Lane, "of", lane_of),
        ):
            yield device


@pytest.fixture(autouse=True)
def _in_place_of_a_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (request.module, tests.gpu.sharing):
        if hasattr(module, "run_ranks"):
            monkeypatch.setattr(module, "run_ranks", _threads_on_the_cpu)
    with stand_in(), _OnTheCpu():
        yield


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.own_markers[:] = [marker for marker in item.own_markers if marker.name != "skip"]
        for part, reason in CANNOT.items():
            if part in item.nodeid:
                item.add_marker(pytest.mark.skip(reason=f"not on this stand-in: {reason}"))
