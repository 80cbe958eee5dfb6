"""Named numbers in memory: what a kernel must know that is the same from call to call.

One argument instead of forty, and numba looks at each argument of a call.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any, cast

import numpy as np

from thinwire.triton_kernels.cpu.compat import intrinsic, types
from thinwire.triton_kernels.cpu.ir.vectors import constant, load


def reader_of(*names: str) -> Any:
    """An intrinsic `(address) -> named tuple`, for numbers that lie at the address as int64."""
    fields = cast(Any, namedtuple("Numbers", names))

    def numbers_at(typing_context, address):
        def codegen(context, builder, signature, args):
            addresses = (builder.add(args[0], constant(8 * field)) for field in range(len(names)))
            word = context.get_value_type(types.int64)
            return context.make_tuple(
                builder, signature.return_type, [load(builder, address, word, 8) for address in addresses]
            )

        return types.NamedUniTuple(types.int64, len(names), fields)(types.int64), codegen

    return intrinsic(numbers_at)


def struct_of(*names: str) -> Any:
    """An intrinsic `(address) -> struct`, for numbers that change: each is read where it is used."""

    def struct_at(typing_context, address):
        struct = types.Record.make_c_struct([(name, types.int64) for name in names])

        def codegen(context, builder, signature, args):
            return builder.inttoptr(args[0], context.get_value_type(struct))

        return struct(types.int64), codegen

    return intrinsic(struct_at)


def in_memory(*numbers: int) -> tuple[np.ndarray, int]:
    """Numbers for such a reader, and their address. The caller holds on to both while a kernel reads from there."""
    words = np.array(numbers, dtype=np.int64)
    words.flags.writeable = False
    return words, words.ctypes.data
