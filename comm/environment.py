"""Reads thinwire's environment variables when a communicator is made; its ranks then compare them."""

from __future__ import annotations

import os
from collections.abc import Sequence

from thinwire.comm.hosts import name_problem
from thinwire.comm.resources import cpu_share
from thinwire.errors import ArgumentError, ThinwireError
from thinwire.log import follow_environment
from thinwire.triton_kernels import arrive_scope, collective_launches
from thinwire.triton_kernels.cpu import BACKEND_VARIABLE, BACKENDS
from thinwire.wire import WIRE_VARIABLE, WireFormat


def environment_problem() -> str | None:
    """The first variable of this process that cannot be used, and what is accepted; None: all can be."""
    try:
        follow_environment()
        cpu_share(None)
        arrive_scope()
        collective_launches()
        if (problem := name_problem()) is not None:
            raise ArgumentError(f"{problem}, in the environment")
        name = os.environ.get(BACKEND_VARIABLE)
        if name and name not in BACKENDS:
            raise ArgumentError(f"{BACKEND_VARIABLE}={name!r} names no backend; accepted: {', '.join(BACKENDS)}")
        try:
            WireFormat.parse(os.environ.get(WIRE_VARIABLE) or "none")
        except ThinwireError as error:
            raise ArgumentError(f"{WIRE_VARIABLE} in the environment: {error}") from None
    except ThinwireError as error:
        return str(error)
    return None


def require_usable(problems: Sequence[str | None]) -> None:
    """Raises ArgumentError if ranks reported one; names each rank."""
    found = [f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem is not None]
    if found:
        raise ArgumentError("; ".join(found))
