"""Named numbers in memory: what a kernel must know that is the same from call to call.

One argument instead of forty, and numba looks at each argument of a call.
"""

from __future__ import annotations

from typing import Any

from thinwire.triton_kernels.cpu.compat import intrinsic, types
from thinwire.triton_kernels.cpu.ir.vectors import constant, load


def reader_of(fields: Any) -> Any:
    """An intrinsic `(address) -> fields`, for a NamedTuple whose fields lie at the address as int64."""
    count = len(fields._fields)

    def numbers_at(typing_context, address):
        def codegen(context, builder, signature, args):
            addresses = (builder.add(args[0], constant(8 * field)) for field in range(count))
            word = context.get_value_type(types.int64)
            return context.make_tuple(
                builder, signature.return_type, [load(builder, address, word, 8) for address in addresses]
            )

        return types.NamedUniTuple(types.int64, count, fields)(types.int64), codegen

    return intrinsic(numbers_at)
