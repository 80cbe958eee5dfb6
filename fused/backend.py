"""Which implementation of the kernels runs where: Triton on GPUs, numba on CPUs, plain torch when asked for."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.torch_version import TorchVersion

from thinwire.errors import TransportUnavailable
from thinwire.log import LOGGER
from thinwire.triton_kernels import expert_gemm, pack, sums
from thinwire.triton_kernels.compat import HAS_TRITON, triton
from thinwire.triton_kernels.cpu import BACKEND_VARIABLE, BACKENDS, HAS_NUMBA, JIT_DISABLED
from thinwire.triton_kernels.launch import settle_cache_keys
from thinwire.wire import WireFormat

_FP8_CAPABILITY = (8, 9)


@dataclass(frozen=True)
class Backend:
    """One implementation of the kernels, and why it was chosen.

    The functions have the contracts of the launchers of the same names in `thinwire.triton_kernels`.
    """

    name: str
    reason: str
    pack_rows: Callable[..., None]
    unpack_rows: Callable[..., None]
    pack_weighted_sums: Callable[..., None]
    sum_records: Callable[..., None]


def select_backend(device: torch.device, wire: WireFormat, threads: int = 1) -> Backend:
    """The backend for tensors on `device` in format `wire`; up to `threads` threads share rows of large CPU tensors.

    Raises:
        TransportUnavailable: it is not installed (the message names the extra), the variable names none of them, or
            the GPU does not take the format.
    """
    # Small calls are over in microseconds, and most of a choice is looking things up.
    requested, interpreted = os.environ.get(BACKEND_VARIABLE), os.environ.get("TRITON_INTERPRET")
    return _select(device, wire, threads, requested, interpreted, HAS_NUMBA)


@functools.lru_cache(maxsize=256)
def _select(
    device: torch.device,
    wire: WireFormat,
    threads: int,
    requested: str | None,
    interpreted: str | None,
    has_numba: bool,
) -> Backend:
    if device.type not in ("cpu", "cuda"):
        raise TransportUnavailable(f"tensors on {device} have no kernels; accepted: tensors on the CPU or on CUDA")
    if device.type == "cuda":
        require_wire_support(wire, torch.cuda.get_device_capability(device))
    if requested:
        name, reason = requested, f"{BACKEND_VARIABLE}={requested}"
    elif device.type == "cpu" and JIT_DISABLED:
        name, reason = "torch", "NUMBA_DISABLE_JIT is set"
    else:
        name = "numba" if device.type == "cpu" else "triton"
        reason = f"tensors on {device.type}"
    if name == "triton":
        if device.type == "cuda" and wire.rotated and not torch.version.hip:
            _warn_of_spills(str(wire), triton.__version__)
        backend = _triton(device, reason)
    elif name == "numba":
        backend = _numba(device, reason, threads)
    elif name == "torch":
        backend = reference_backend(reason)
    else:
        raise TransportUnavailable(f"{BACKEND_VARIABLE}={name!r} names no backend; accepted: {', '.join(BACKENDS)}")
    LOGGER.info("kernels for %s on %s: %s (%s)", wire, device, backend.name, backend.reason)
    return backend


@functools.cache
def _warn_of_spills(wire: str, version: str) -> None:
    if TorchVersion(version) < "3.7":
        warnings.warn(
            f"wire format {wire!r} is slow with Triton {version}, whose kernels for rotated rows spill registers (a "
            f"round took 1.36 times int8's time on an H100): install Triton 3.7, or use {wire.split('+')[0]!r}",
            RuntimeWarning,
            stacklevel=2,
        )


def require_wire_support(wire: WireFormat, capability: tuple[int, int]) -> None:
    """Refuses a wire format that a CUDA device of this compute capability does not support.

    The codec's e4m3 arithmetic is integer arithmetic and would compile for sm_80; Triton's own float8 type does not,
    nor do experts that compute in float8, so the error advises int8 there: as many bytes, a quarter of the error.

    Raises:
        TransportUnavailable: `fp8` below compute capability 8.9.

    >>> require_wire_support(WireFormat.parse("int8"), (8, 0))
    """
    if wire.name == "fp8" and capability < _FP8_CAPABILITY:
        raise TransportUnavailable(
            f"wire format {str(wire)!r} needs a GPU of compute capability 8.9 or newer, this one has "
            f"{capability[0]}.{capability[1]}; use int8, which takes as many bytes with a quarter of the error"
        )


def select_expert_gemm(device: torch.device, wire: WireFormat) -> Callable[..., None]:
    """The product, with the contract of `thinwire.triton_kernels.expert_gemm.expert_gemm`.

    Raises:
        TransportUnavailable: there are no kernels for the device.
    """
    on_triton = select_backend(device, wire).name == "triton"
    return expert_gemm.expert_gemm if on_triton else expert_gemm.expert_gemm_reference


def _triton(device: torch.device, reason: str) -> Backend:
    if not HAS_TRITON:
        raise TransportUnavailable(f"tensors on {device} need Triton: pip install triton")
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise TransportUnavailable(
            "Triton runs on CPU tensors only under its interpreter: set TRITON_INTERPRET=1 before Triton is imported, "
            f"or choose {BACKEND_VARIABLE}=numba"
        )
    settle_cache_keys()
    return Backend("triton", reason, pack.pack_rows, pack.unpack_rows, sums.pack_weighted_sums, sums.sum_records)


def _numba(device: torch.device, reason: str, threads: int) -> Backend:
    if device.type != "cpu":
        raise TransportUnavailable(f"the numba backend takes CPU tensors, not tensors on {device}")
    if not HAS_NUMBA:
        raise TransportUnavailable(
            f"CPU tensors need numba: {'unset NUMBA_DISABLE_JIT' if JIT_DISABLED else 'pip install numba'} (or set "
            f"{BACKEND_VARIABLE}=torch, many times slower)"
        )
    # Here, not above: loading numba takes a while, and GPU ranks do without it.
    from thinwire.triton_kernels.cpu import pack as cpu_pack
    from thinwire.triton_kernels.cpu import sums as cpu_sums

    return Backend(
        "numba",
        reason,
        functools.partial(cpu_pack.pack_rows, threads=threads),
        functools.partial(cpu_pack.unpack_rows, threads=threads),
        cpu_sums.pack_weighted_sums,
        cpu_sums.sum_records,
    )


def reference_backend(reason: str) -> Backend:
    """Plain torch; alone in that it takes float64 rows, as `none`."""

    def pack_rows(x: torch.Tensor, wire: WireFormat, row_index: torch.Tensor | None, records: torch.Tensor) -> None:
        records.copy_(pack.pack_rows_reference(x[: records.shape[0]] if row_index is None else x, wire, row_index))

    def pack_weighted_sums(
        rows: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor, *others: Any, hidden: int | None = None
    ) -> None:
        wire, dtype, records = others
        records.copy_(sums.pack_weighted_sums_reference(rows, positions, weights, wire, dtype, hidden))

    def sum_records(records: torch.Tensor, record_index: torch.Tensor, wire: WireFormat, out: torch.Tensor) -> None:
        out.copy_(sums.sum_records_reference(records, record_index, wire, out.shape[1], out.dtype))

    return Backend("torch", reason, pack_rows, pack.unpack_rows_reference, pack_weighted_sums, sum_records)
