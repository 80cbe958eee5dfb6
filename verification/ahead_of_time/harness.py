"""Compiles kernels for GPUs that are not there, exactly as their launchers would launch them, and reads what came out.

A launcher is called with ordinary CPU tensors while `JITFunction.run` is replaced by a recorder, so the arguments,
their alignment, the compile-time constants and the options are the launcher's own.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import JITFunction

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
_POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass
class Launch:
    """One recorded launch."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)


def record_launches(function: Callable[..., object], *args: object) -> list[Launch]:
    """Calls `function(*args)` and returns what it would have launched."""
    launches: list[Launch] = []

    def run(kernel: Any, *positional: Any, grid: Any, warmup: bool, **named: Any) -> None:
        arguments = dict(zip(kernel.arg_names, positional, strict=False))
        arguments |= {name: value for name, value in named.items() if name in kernel.arg_names}
        options = {name: value for name, value in named.items() if name not in kernel.arg_names}
        launches.append(Launch(kernel, arguments, options))

    with mock.patch.object(JITFunction, "run", run):
        function(*args)
    return launches


def specialise(launch: Launch, target: str) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], list[Any]]]:
    """Types, constants and attributes that the just-in-time compiler gives to a launch's arguments.

    Of numbers 1 becomes a constant, and multiples of 16 are marked, as pointers to such places are.
    """
    signature, constants, attributes = {}, {}, {}
    for position, parameter in enumerate(launch.kernel.params):
        name = parameter.name
        value = launch.arguments[name]
        if name == "LAUNCH":  # the launcher took the device that recorded it for the interpreter's
            value = replace(value, PLATFORM=TARGETS[target].backend)
        specialised = not parameter.do_not_specialize
        constant = parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1 and specialised)
        if constant:
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = _POINTERS[value.dtype]
            if value.data_ptr() % 16 == 0 and specialised and not parameter.do_not_specialize_on_alignment:
                attributes[(position,)] = [["tt.divisibility", 16]]
        else:
            narrow = "i32" if -(2**31) <= value < 2**31 else "i64"
            signature[name] = parameter.annotation_type or narrow
            if value % 16 == 0 and specialised:
                attributes[(position,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def compile_launch(launch: Launch, target: str) -> Any:
    """Compiles for a target as the just-in-time compiler would."""
    signature, constants, attributes = specialise(launch, target)
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=TARGETS[target], options=launch.options)


@dataclass(frozen=True)
class Report:
    """What the machine code of one kernel uses.

    `fused` counts fused multiply-adds: in the PTX for NVIDIA, where a division is one instruction still; in the
    assembly for AMD, less the five that belong to each correctly rounded division. Widths are of the widest global
    load and store, in bytes.
    """

    registers: int
    spills: int
    fused: int
    load_bytes: int
    store_bytes: int
    barriers: int


@dataclass(frozen=True)
class Signals:
    """How a kernel for NVIDIA GPUs tells peers something, and learns from them.

    `system_fences` counts full fences at system scope in the machine code; a release costs one. `after_barrier` says
    whether a barrier stands between the last store and each release at system scope; `arrivals` and `acquires` count
    atomic adds with acquire and release order on the GPU, and reads with acquire order at system scope. `exchanges`
    counts exchanges at system scope, which would ask a link for atomics.
    """

    system_fences: int
    after_barrier: bool
    arrivals: int
    acquires: int
    exchanges: int


_RELEASE = re.compile(r"(?:atom\.global\.sys\.release|fence\.(?:acq_rel|release|sc)\.sys|st\.release\.sys)\S*")


def inspect_signals(compiled: Any) -> Signals:
    """Reads the order of stores, barriers and releases in a kernel compiled for an NVIDIA GPU."""
    ptx = compiled.asm["ptx"]
    stores = [match.end() for match in re.finditer(r"\bst\.global\S*", ptx)]
    barriers = [match.start() for match in re.finditer(r"\bbar(?:rier)?\.\S*sync", ptx)]
    # A fence and the store behind it are one release: the second of the two needs no barrier of its own.
    releases = [match.start() for match in _RELEASE.finditer(ptx)]
    machine_code = cuobjdump(compiled.asm["cubin"], "-sass")
    return Signals(
        system_fences=len(re.findall(r"\bMEMBAR\.\w+\.SYS\b", machine_code)),
        after_barrier=bool(releases)
        and all(
            any(max((end for end in stores if end < release), default=0) < barrier < release for barrier in barriers)
            for release in releases
        ),
        arrivals=len(re.findall(r"atom\.global\.gpu\.acq_rel\.add", ptx)),
        acquires=len(re.findall(r"atom\.global\.sys\.acquire|ld\.acquire\.sys", ptx)),
        exchanges=len(re.findall(r"(?:atom|red)\.global\.sys\.\w+\.(?:exch|cas)", ptx)),
    )


def inspect(compiled: Any, target: str) -> Report:
    """Reads the resource usage and the memory accesses of a compiled kernel."""
    return _inspect_cuda(compiled) if target.startswith("sm_") else _inspect_amd(compiled)


def cuobjdump(cubin: bytes, *flags: str) -> str:
    """What the tool, which Triton brings along, prints of a kernel's machine code."""
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, *flags, file.name], capture_output=True, text=True, check=True).stdout


def _inspect_cuda(compiled: Any) -> Report:
    ptx = compiled.asm["ptx"]
    usage = cuobjdump(compiled.asm["cubin"], "--dump-resource-usage")
    local = sum(int(bytes_) for bytes_ in re.findall(r"\b(?:STACK|LOCAL):(\d+)", usage))

    def widest(operation: str) -> int:
        widths = [0]
        for vector, bits in re.findall(rf"\b{operation}\.global(?:\.\w+)*?(?:\.v(\d))?\.[bsuf](\d+)\b", ptx):
            widths.append(int(vector or 1) * int(bits) // 8)
        return max(widths)

    return Report(
        registers=int(re.search(r"REG:(\d+)", usage)[1]),
        spills=local,
        fused=len(re.findall(r"\bfma\.", ptx)),
        load_bytes=widest("ld"),
        store_bytes=widest("st"),
        barriers=len(re.findall(r"\bbar(?:rier)?\.(?:cta\.)?sync", ptx)),
    )


_AMD_WIDTH = {"byte": 1, "ubyte": 1, "sbyte": 1, "short": 2, "ushort": 2, "sshort": 2}


def _inspect_amd(compiled: Any) -> Report:
    assembly = compiled.asm["amdgcn"]
    multiply_adds = len(re.findall(r"\bv_(?:pk_)?(?:fma|fmac|mac|mad|dot\d)\w*_f(?:16|32|64)", assembly))
    divisions = len(re.findall(r"\bv_div_fixup_f32", assembly))

    def number(name: str) -> int:
        return int(re.search(rf"\.{name}:\s*(\d+)", assembly)[1])

    def widest(operation: str) -> int:
        widths = [0]
        for kind in re.findall(rf"\b(?:global|buffer|flat)_{operation}_(\w+)", assembly):
            dwords = re.match(r"dword(?:x(\d))?", kind)
            widths.append(4 * int(dwords[1] or 1) if dwords else _AMD_WIDTH.get(kind.split("_")[0], 0))
        return max(widths)

    return Report(
        registers=number("vgpr_count"),
        # A scalar register that is spilled goes into a lane of a vector register, and none of it to memory.
        spills=number("vgpr_spill_count") + number("private_segment_fixed_size"),
        fused=multiply_adds - 5 * divisions,
        load_bytes=widest("load"),
        store_bytes=widest("store"),
        barriers=len(re.findall(r"\bs_barrier\b", assembly)),
    )
