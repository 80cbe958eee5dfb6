"""GPUs to compile for, on this machine or not: what a function would launch there, compiled and not launched.

Launchers are called as ever, with tensors that have no memory ("meta"), and Triton specialises, keys and compiles as it
would for a GPU's: nothing of that is done here a second time. Only its executor for compiling in the background is one
that keeps the work for later.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import Executor, Future
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import torch

from thinwire.errors import ArgumentError
from thinwire.triton_kernels.compat import triton
from thinwire.triton_kernels.launch import settle_cache_keys

if TYPE_CHECKING:
    from triton.backends.compiler import GPUTarget


def find_target(arch: str) -> GPUTarget:
    """Triton's target for a GPU of this architecture.

    Args:
        arch: "sm_90" and so on; with PyTorch for ROCm "gfx942" and so on.

    Raises:
        ArgumentError: the name is unknown, or this PyTorch is for another maker's GPUs.
    """
    from triton.backends.compiler import GPUTarget

    on_amd = torch.version.hip is not None
    if found := re.fullmatch(r"sm_(\d{2,3})a?", arch):
        if on_amd:
            raise ArgumentError(f"arch is {arch!r}, and this PyTorch is for ROCm: expected one such as gfx942")
        return GPUTarget("cuda", int(found[1]), 32)
    if re.fullmatch(r"gfx[0-9a-f]{3,4}", arch):
        if not on_amd:
            raise ArgumentError(f"arch is {arch!r}, and this PyTorch is not for ROCm: expected one such as sm_90")
        return GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)
    raise ArgumentError(f"arch is {arch!r}, expected one such as {'gfx942' if on_amd else 'sm_90'}")


def archs_here() -> list[str]:
    """The architectures of this machine's GPUs, each once.

    Raises:
        ArgumentError: it has none.
    """
    if not torch.cuda.is_available():
        raise ArgumentError("this machine has no GPU to compile for: name an arch, such as sm_90 for an H100")
    devices = range(torch.cuda.device_count())
    if torch.version.hip is not None:
        found = [torch.cuda.get_device_properties(device).gcnArchName.split(":")[0] for device in devices]
    else:
        found = ["sm_{}{}".format(*torch.cuda.get_device_capability(device)) for device in devices]
    return list(dict.fromkeys(found))


class AbsentDriver:
    """What Triton asks of a driver before it launches, answered for a GPU that need not be here."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        """The GPU to compile for."""
        return self._target

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """One that nothing is launched on."""
        return 0


class _NotLaunched:
    """A kernel that is not compiled yet, as whoever launches it sees it."""

    function = packed_metadata = None

    def launch_metadata(self, *arguments: Any) -> None:
        """There is nothing to tell of a launch that is none."""

    def run(self, *arguments: Any) -> None:
        """Launches nothing."""


class _Later(Executor):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.kept: list[Callable[[], Any]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.kept.append(lambda: fn(*args, **kwargs))
        future: Future[Any] = Future()
        future.set_result(_NotLaunched())
        return future


def collect(launch: Callable[[], None], target: GPUTarget) -> dict[str, Callable[[], Any]]:
    """What compiles each kernel that `launch()` launches, by Triton's key of it, the same in every process.

    The process can launch nothing any more: Triton takes the GPU to be the target, and the kernels to be loaded.
    """
    settle_cache_keys()
    triton.runtime.driver.set_active(AbsentDriver(target))
    later = _Later()
    with triton.AsyncCompileMode(later) as mode:
        launch()
    names = [sha256(key.encode()).hexdigest() for key in mode.future_kernels]
    return dict(zip(names, later.kept, strict=True))
