"""Finds the host calls that wait for a kernel on another stream: `python -m benchmarks.gpu_host_waits`.

Ranks that are threads share a device, and a kernel of one may wait for another's. A call that waits for that kernel, or
keeps other threads from launching while it waits for its own stream, then ends in a timeout. Each call here is made
while a kernel that only sleeps runs: on another stream, or on the stream of another thread that is in that call.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Callable

# As `thinwire.testing.run_ranks` sets them, before CUDA starts.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")

import torch
import triton
import triton.language as tl

from benchmarks import timing

_ASLEEP = 0.3  # seconds


@triton.jit
def add_kernel(x_ptr, SIZE: tl.constexpr):
    """Adds 1 to SIZE numbers; each SIZE is another kernel to load."""
    places = x_ptr + tl.arange(0, SIZE)
    tl.store(places, tl.load(places) + 1)


def calls(device: torch.device) -> dict[str, Callable[[], object]]:
    """Name and call; each makes what it needs on the current stream, and is made once before, but what loads code."""
    x, host, pinned = torch.ones(1 << 16, device=device), torch.ones(1 << 22), torch.ones(1 << 22).pin_memory()
    sizes = iter(2**power for power in range(4, 16))
    return {
        "torch kernel": lambda: x + 1,
        "event": lambda: torch.cuda.Event().record(),
        "new memory": lambda: torch.empty(64 << 20, dtype=torch.uint8, device=device),
        "new pinned memory": lambda: torch.empty(1 << 20).pin_memory(),
        "load a Triton kernel": lambda: add_kernel[(1,)](x, next(sizes)),
        "synchronize the stream": lambda: torch.cuda.current_stream().synchronize(),
        "copy to the host": lambda: x.cpu(),
        "read an element": lambda: x[0].item(),
        "assign an element": lambda: x.__setitem__(0, 2),
        "copy 128 bytes from the host": lambda: host[:32].to(device),
        "copy 16 MiB from the host": lambda: host.to(device),
        "copy from pinned memory": lambda: pinned.to(device, non_blocking=True),
    }


def main() -> None:
    """Prints and writes milliseconds of each call beside a kernel of `_ASLEEP` seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the figures here")
    options = parser.parse_args()
    device = timing.check_device("cuda")
    described = timing.machine(device)
    timing.print_machine(described)
    asleep, awake, third = (torch.cuda.Stream() for _ in range(3))
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()
    started = time.perf_counter()
    torch.cuda._sleep(10**8)
    torch.cuda.synchronize()
    cycles = int(10**8 * _ASLEEP / (time.perf_counter() - started))
    small = torch.ones(16, device=device)

    def timed(call: Callable[[], object]) -> float:
        begun = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - begun)

    def on(stream: torch.cuda.Stream, call: Callable[[], object], into: list[float]) -> None:
        with torch.cuda.device(device), torch.cuda.stream(stream):
            into.append(timed(call))

    results = []
    for name, call in calls(device).items():
        for stream in (asleep, awake):
            with torch.cuda.stream(stream):
                call()
        torch.cuda.synchronize()
        beside: list[float] = []
        with torch.cuda.stream(asleep):
            torch.cuda._sleep(cycles)
        on(awake, call, beside)
        torch.cuda.synchronize()
        behind: list[float] = []
        others: list[float] = []
        with torch.cuda.stream(asleep):
            torch.cuda._sleep(cycles)
        thread = threading.Thread(target=on, args=(asleep, call, behind))
        thread.start()
        time.sleep(_ASLEEP / 10)  # until it is in the call
        on(third, lambda: small.add_(1), others)
        thread.join()
        torch.cuda.synchronize()
        results.append({"call": name, "beside_ms": beside[0], "behind_ms": behind[0], "other_thread_ms": others[0]})
        print(
            f"{name:30s} beside it {beside[0]:8.2f} ms, behind it {behind[0]:8.2f} ms; another thread launches in "
            f"{others[0]:8.2f} ms",
            flush=True,
        )
    if options.json:
        timing.write_json(options.json, machine=described, kernel_ms=1e3 * _ASLEEP, calls=results)


if __name__ == "__main__":
    main()
