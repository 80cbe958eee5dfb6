"""What a function would launch, compiled and not launched.

Launchers are called as ever, with tensors that have no memory ("meta"), and Triton specialises, keys and compiles as it
would for a GPU's: nothing of that is done here a second time. Only its executor for compiling in the background is one
that keeps the work for later.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from thinwire.tools.warmup.target import AbsentDriver
from thinwire.triton_kernels.cache_keys import settle_cache_keys
from thinwire.triton_kernels.compat import triton

if TYPE_CHECKING:
    from triton.backends.compiler import GPUTarget


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
