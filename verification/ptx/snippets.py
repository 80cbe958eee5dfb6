"""A few lines of PTX, run on values of one's own: what instructions are tested with."""

from __future__ import annotations

import numpy as np
import torch

from verification.ptx.device import Device

_REGISTER = {1: "%rs", 2: "%rs", 4: "%r", 8: "%rd"}


def kernel(body: str, parameters: int = 1, threads: int = 32, shared_bytes: int = 0, name: str = "snippet") -> str:
    """A PTX file with one kernel; its parameters are 64 bits wide, and in %rd1 ... when `body` begins.

    There are registers %p0 ... %p31, and so on for %rs, %r and %rd of 16, 32 and 64 bits; shared memory has the
    name `buffer`.
    """
    declared = ", ".join(f".param .u64 {name}_{number}" for number in range(parameters))
    loads = "\n".join(f"ld.param.u64 %rd{number + 1}, [{name}_{number}];" for number in range(parameters))
    shared = f".shared .align 16 .b8 buffer[{shared_bytes}];" if shared_bytes else ""
    return f"""
.version 8.7
.target sm_90a
.address_size 64
.visible .entry {name}({declared})
.reqntid {threads}
{{
.reg .pred %p<32>; .reg .b16 %rs<32>; .reg .b32 %r<32>; .reg .b64 %rd<32>;
{shared}
{loads}
{body}
ret;
}}
"""


def evaluate(body: str, *values: np.ndarray, result: type = np.uint32) -> np.ndarray:
    """What `body` leaves in `{d}`, of the width of `result`, for values of `{a}`, `{b}`, `{c}`, one for each thread.

    Values are loaded and stored as bits; `{d}` has the bits of `result`'s type.
    """
    count = len(values[0])
    padded = -(-count // 32) * 32
    names, lines, arguments = {}, ["mov.u32 %r31, %tid.x;", "mov.u32 %r30, %ctaid.x;", "mov.u32 %r29, %ntid.x;"], {}
    lines.append("mad.lo.s32 %r31, %r30, %r29, %r31;")
    for number, (name, value) in enumerate(zip("abc", values, strict=False)):
        width = value.itemsize
        register = f"{_REGISTER[width]}{number + 10}"
        names[name] = register
        lines += [
            f"mad.wide.u32 %rd30, %r31, {width}, %rd{number + 1};",
            f"ld.global.b{8 * width} {register}, [%rd30];",
        ]
        octets = np.zeros(padded * width, np.uint8)
        octets[: count * width] = np.ascontiguousarray(value).view(np.uint8)
        arguments[name] = torch.from_numpy(octets)
    width = np.dtype(result).itemsize
    names["d"] = f"{_REGISTER[width]}20"
    out = torch.zeros(padded * width, dtype=torch.uint8)
    last = len(values) + 1
    store = f"mad.wide.u32 %rd30, %r31, {width}, %rd{last}; st.global.b{8 * width} [%rd30], {names['d']};"
    threads = next(size for size in (512, 256, 128, 64, 32) if padded % size == 0)
    ptx = kernel("\n".join([*lines, body.format(**names), store]), last, threads)
    Device().launch(ptx, arguments | {"out": out}, (padded // threads,))
    return out.numpy().view(result)[:count].copy()
