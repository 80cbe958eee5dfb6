"""Launches of kernels whose arguments are mostly the same each time, at a third of what Triton takes for one.

Triton finds out at every launch which compiled kernel it is for: it hashes each compile-time constant, writes out all
options, and compares the constants of the kernel's module with what they were. That is 10 to 50 us. A `Launcher` knows
which arguments stay, asks Triton once for each *kind* of those that change, and calls what Triton compiled for it.

Why no compiled kernel ever gets arguments that it was not compiled for. What Triton compiles depends on the constants
and options, on types, and on what it specialises on: whether a pointer is a multiple of 16; of an integer whether it is
1, whether it is a multiple of 16, and how many bits it takes. Arguments that stay are the same objects and numbers at
every launch. Those that change have a kind, which tells apart at least as much: of tensors dtypes and alignments; of
*strides*, which are the integers that Triton specialises on, their values; of *counts*, on which it is told not to,
their values, if one that the kernel gives no type does not fit into 32 bits. So launches of one kind are launches of
one compiled kernel, and the first of each kind goes through Triton. So does one where somebody has hooks on launches,
or the current device is another one; and each on AMD, where Triton looks at the sizes of tensors, too, and under the
interpreter. What is launched under hooks is not remembered: a profiler that has them compiles kernels of its own, which
nobody may launch when it is done.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from thinwire import first_run, triton_kernels
from thinwire.triton_kernels.compat import HAS_TRITON, triton
from thinwire.triton_kernels.end import End
from thinwire.triton_kernels.signal import INTERPRETED

_T = TypeVar("_T")
_K = TypeVar("_K", bound=End)


@functools.cache
def settle_cache_keys() -> None:
    """Hashes every function of these files; to be called before the first launch of a process. A tenth of a second.

    So Triton's cache on disk knows kernels by the same keys in every process, whatever it launched before. Triton
    hashes a function with what it calls, and with the constants of its module that these use: but with those alone of
    functions that were hashed before it. A kernel's key, and whether the cache has it, would depend on which other
    kernel the process happened to launch first. Here all functions are hashed at once, always in the same order.

    At every launch Triton also compares these constants with what they were, one after the other. Nobody changes those
    of these files, and the keys have them, so they are forgotten.
    """
    if not HAS_TRITON or INTERPRETED:
        return
    functions = [
        value
        for module in pkgutil.iter_modules(triton_kernels.__path__, f"{triton_kernels.__name__}.")
        if not module.ispkg
        for value in vars(importlib.import_module(module.name)).values()
        if isinstance(value, triton.JITFunction)
    ]
    for function in functions:
        _ = function.cache_key
    for function in functions:
        function.used_global_vals = {}


def kept(end: _K, make: Callable[..., _T], *arguments: object) -> _T:
    """What `make(end, *arguments)` gave the first time, for as long as the end is in use."""
    key, known = (make, *arguments), end.kept
    if key not in known:
        known[key] = make(end, *arguments)
    found: _T = known[key]
    return found


def launcher_of(
    end: End,
    kernel: Any,
    staying: Mapping[str, Any],
    tensors: Sequence[str] = (),
    strides: Sequence[str] = (),
    counts: Sequence[str] = (),
    **options: Any,
) -> Launcher:
    """The `Launcher` of a kernel that gets what `End.arguments` has, by the names of its parameters, and `staying`."""
    of_end = end.arguments()
    direct = of_end["LAUNCH"].PLATFORM == "cuda"
    return Launcher(kernel, tensors, strides, counts, of_end | {**staying}, end.buffer_ptrs, direct, **options)


class Launcher:
    """A kernel with what is the same at each of its launches.

    Args:
        kernel: what `triton.jit` made. Its first parameters are `tensors`, `strides` and `counts`, whose arguments
            change; tensors of bool and uint8 are int8 to it.
        counts: among its `do_not_specialize`.
        staying: the arguments of all other parameters by name, among more. Tensors stay where they are.
        tensor: one on the device of all tensors.
        direct: whether kernels that Triton has compiled before are launched without asking it again.
        options: Triton's.

    Raises:
        ValueError: the kernel's parameters are in another order, or a count is specialised on.
    """

    def __init__(
        self,
        kernel: Any,
        tensors: Sequence[str],
        strides: Sequence[str],
        counts: Sequence[str],
        staying: Mapping[str, Any],
        tensor: torch.Tensor,
        direct: bool,
        **options: Any,
    ) -> None:
        names = kernel.arg_names
        self._changing = [*tensors, *strides, *counts]
        number = len(self._changing)
        if names[:number] != self._changing:
            raise ValueError(f"{kernel.__name__} takes {names[:number]} first; {self._changing} are what changes")
        if direct and not {*counts} <= {*(kernel.do_not_specialize or ())}:
            raise ValueError(f"{kernel.__name__} specialises on one of {counts}: name them in do_not_specialize")
        self._kernel, self._tensor, self.direct = kernel, tensor, direct
        typed = {parameter.name for parameter in kernel.params if parameter.annotation_type} if direct else set()
        self._untyped = [name not in typed for name in counts]
        self._staying = {name: staying[name] for name in names[number:]}
        self._options = options
        self._last_arguments = tuple(map(_address, self._staying.values()))
        self._compiled: dict[tuple[object, ...], tuple[Any, ...]] = {}
        self._device = -1  # the current one at the last launch through Triton

    def __call__(
        self,
        programs: int,
        blocks: int = 1,
        tensors: tuple[torch.Tensor | None, ...] = (),
        strides: tuple[int, ...] = (),
        counts: tuple[int, ...] = (),
    ) -> None:
        """Launches [programs, blocks] on the current stream of the tensors' device."""
        if not self.direct:
            self._launch_by_triton(programs, blocks, tensors, strides, counts)
            return
        kind: tuple[object, ...] = strides
        addresses: list[int | None] = []
        for tensor in tensors:
            if tensor is None:
                kind += (None,)
                addresses.append(None)
            else:
                address = tensor.data_ptr()
                kind += tensor.dtype, address & 15 == 0
                addresses.append(address)
        for count, untyped in zip(counts, self._untyped, strict=True):
            if untyped and not -(2**31) <= count < 2**31:
                kind += counts
                break
        device, stream, hooks = _current()
        hooked = hooks or self._kernel.pre_run_hooks
        found = None if hooked or device != self._device else self._compiled.get(kind)
        if found is None:
            is_new = not hooked and kind not in self._compiled
            with first_run.compiling(self._kernel.__name__) if is_new else contextlib.nullcontext():
                compiled = self._launch_by_triton(programs, blocks, tensors, strides, counts)
            if compiled is not None and not hooked:  # it is None where another hook keeps Triton from launching
                # No metadata for hooks, and no hooks.
                self._compiled[kind] = compiled.run, (compiled.function, compiled.packed_metadata, None, None, None)
            return
        run, always = found
        run(programs, blocks, 1, stream, *always, *addresses, *strides, *counts, *self._last_arguments)

    def _launch_by_triton(
        self,
        programs: int,
        blocks: int,
        tensors: Sequence[torch.Tensor | None],
        strides: Sequence[int],
        counts: Sequence[int],
    ) -> Any:
        # A bool has another type, and is equal to an integer.
        given = (*map(_in_bytes, tensors), *map(int, strides), *map(int, counts))
        changing = dict(zip(self._changing, given, strict=True))
        with torch.cuda.device_of(self._tensor):  # Triton launches on the current device
            compiled = self._kernel[(programs, blocks)](**changing, **self._staying, **self._options)
            if self.direct:
                self._device = triton.runtime.driver.active.get_current_device()
        return compiled


def _current() -> tuple[int, int, object]:
    """Device and stream, and what Triton calls before or after a launch, if there is anything."""
    driver, hooks = triton.runtime.driver.active, triton.knobs.runtime
    device = driver.get_current_device()
    # Chains of hooks, usually; Triton also takes a function, and None.
    enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
    return device, driver.get_current_stream(device), getattr(enter, "calls", enter) or getattr(leave, "calls", leave)


def _in_bytes(tensor: torch.Tensor | None) -> torch.Tensor | None:
    # Triton's bool is a bit, and its uint8 another kind of number than that of the bytes that kernels read and write.
    # A view costs half a microsecond, and all but the first launches of a kind do without.
    return tensor if tensor is None or tensor.dtype not in (torch.bool, torch.uint8) else tensor.view(torch.int8)


def _address(value: Any) -> Any:
    # Pinned memory may have another address on the device, for which Triton asks the driver.
    return value.data_ptr() if isinstance(value, torch.Tensor) and not value.is_pinned() else value
