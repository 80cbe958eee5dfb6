"""CUDA's driver for a GPU that is not there: launchers run to their end, and what they would launch is written down.

`stub_driver.c` stands for `libcuda.so.1`, below Triton's own launcher, which is compiled and called as on a GPU. So
what the host does for a launch, Triton's Python and C included, is real, and may be timed. What it cannot show: what
the driver itself takes for a launch, and whatever a GPU does.

Tensors are the CPU's, and stand for a GPU's. What of torch.cuda launchers and the direct transport ask is answered by
stand-ins. A process that has loaded it keeps it as its libcuda: use one that does nothing else.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import triton
from triton.backends.nvidia.driver import CudaDriver

from thinwire.triton_kernels import signal, small_collective

#: Of tests that use it: Triton's launcher is compiled, and a driver that is there is not replaced.
needs_stub = pytest.mark.skipif(
    shutil.which("cc") is None or torch.cuda.is_available(), reason="the stub needs a C compiler, and no CUDA driver"
)
#: The stream that is the current one until a test makes another so.
STREAM = 0x57AE
_MOST_PARAMETERS, _MOST_LAUNCHES = 48, 4096
_SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}
_HEADERS = Path(triton.__file__).parent / "backends" / "nvidia" / "include"


@dataclass(frozen=True)
class Launched:
    """What the driver was told of a launch; `parameters` are as many bytes each as the kernel takes.

    Two specialisations of a kernel are two functions, of one name. A cooperative grid larger than the GPU is refused.
    """

    name: str
    function: int
    parameters: tuple[int, ...]
    grid: tuple[int, int, int]
    threads: int
    shared: int
    stream: int
    device: int
    cooperative: bool


class _Launch(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.c_uint64),
        ("stream", ctypes.c_uint64),
        ("grid", ctypes.c_int32 * 3),
        ("threads", ctypes.c_int32),
        ("shared", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("cooperative", ctypes.c_int32),
        ("num_parameters", ctypes.c_int32),
        ("parameters", ctypes.c_uint64 * _MOST_PARAMETERS),
    )


class StubDriver:
    """The driver, once it is loaded; see `stub_driver`.

    Attributes:
        device: index of the current device; torch.cuda's `device_of` does not change it, as tensors are the CPU's.
        stream: the current stream.
        capturing: whether it is being captured.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        library.stub_launch.restype = ctypes.POINTER(_Launch)
        library.stub_launch.argtypes = [ctypes.c_uint64]
        library.stub_num_launches.argtypes = []
        library.stub_num_launches.restype = ctypes.c_uint64
        library.stub_name.restype, library.stub_name.argtypes = ctypes.c_char_p, [ctypes.c_uint64]
        library.stub_describe.argtypes = [ctypes.c_uint64, ctypes.c_int, ctypes.c_char_p]
        self._library, self._device = library, 0
        self.stream, self.capturing = STREAM, False

    @property
    def device(self) -> int:
        return self._device

    @device.setter
    def device(self, index: int) -> None:
        self._device = index
        self._library.stub_set_device(index)

    @property
    def num_launches(self) -> int:
        """Launches since it was loaded."""
        return int(self._library.stub_num_launches())

    def launched(self, since: int) -> list[Launched]:
        """The launches from a number of them on; only the last few thousand are known."""
        if self.num_launches - since > _MOST_LAUNCHES:
            raise ValueError(f"launch {since} is of long ago: {_MOST_LAUNCHES} of {self.num_launches} are known")
        return [self._read(number) for number in range(since, self.num_launches)]

    def _read(self, number: int) -> Launched:
        launch = self._library.stub_launch(number).contents
        return Launched(
            self._library.stub_name(launch.function).decode(),
            launch.function,
            tuple(launch.parameters[: launch.num_parameters]),
            tuple(launch.grid),
            launch.threads,
            launch.shared,
            launch.stream,
            launch.device,
            bool(launch.cooperative),
        )

    def describe(self, module: int, function: int, name: str, files: dict[str, str], key: str) -> None:
        """Triton's hook when a kernel is loaded: tells the library of the parameters that its PTX names."""
        ptx = next(Path(path).read_text() for file, path in files.items() if file.endswith(".ptx"))
        head = ptx[ptx.index(f".entry {name}(") :]
        bits = re.findall(r"\.param \.[bsuf](\d+)", head[: head.index(")")])
        self._library.stub_describe(function, len(bits), bytes(_SIZES[bit] for bit in bits))


@contextlib.contextmanager
def stub_driver(capability: int = 90, multiprocessors: int = 132) -> Iterator[StubDriver]:
    """Triton launches on a GPU of this compute capability that is not there, and torch.cuda speaks of it."""
    if torch.cuda.is_available():
        raise RuntimeError("the stub of CUDA's driver is for machines without one")
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        path = Path(folder) / "libcuda.so.1"
        flags = ["-O2", "-shared", "-fPIC", f"-Wl,-soname,{path.name}", f"-I{_HEADERS}"]
        subprocess.run(["cc", *flags, str(Path(__file__).with_suffix(".c")), "-o", str(path)], check=True)
        library = ctypes.CDLL(str(path))  # by its name the loader gives it to whoever asks for the driver
        library.stub_set(capability, multiprocessors)
        stub = StubDriver(library)
        stack.enter_context(mock.patch.object(triton.knobs.nvidia, "libcuda_path", folder))
        for name, stand_in in _torch_cuda(stub, capability, multiprocessors).items():
            stack.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        stack.enter_context(mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor))
        stack.enter_context(mock.patch.object(signal, "_platform_of", lambda device: "cuda"))
        for module in (signal, small_collective):
            stack.enter_context(mock.patch.object(module, "num_multiprocessors", lambda device: multiprocessors))
        signal._launch.cache_clear()
        stack.callback(signal._launch.cache_clear)
        raw_stream = "_cuda_getCurrentRawStream"  # which torch has where it is made for CUDA
        stack.enter_context(mock.patch.object(torch._C, raw_stream, lambda device: stub.stream, create=True))
        triton.runtime.driver.set_active(CudaDriver())
        hooks = triton.knobs.runtime.kernel_load_end_hook
        hooks.add(stub.describe)
        stack.callback(hooks.remove, stub.describe)
        yield stub


def _torch_cuda(stub: StubDriver, capability: int, multiprocessors: int) -> dict[str, Any]:
    properties = SimpleNamespace(multi_processor_count=multiprocessors, uuid="none", name="none")

    def stream(device: object = None) -> SimpleNamespace:
        return SimpleNamespace(
            cuda_stream=stub.stream,
            synchronize=lambda: None,
            wait_stream=lambda other: None,
            wait_event=lambda event: None,
        )

    return {
        "current_device": lambda: stub.device,
        "current_stream": stream,
        "get_device_capability": lambda device=None: divmod(capability, 10),
        "get_device_properties": lambda device=None: properties,
        "is_current_stream_capturing": lambda: stub.capturing,
        "Stream": stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "synchronize": lambda device=None: None,
    }
