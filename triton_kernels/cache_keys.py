"""Keys by which Triton's cache on disk knows the kernels: the same in every process, whatever it launched before.

Triton hashes a function with what it calls, and with the constants of its module that these use: but with those alone
of functions that were hashed before it. So a kernel's key, and whether the cache has it, would depend on which other
kernel the process happened to launch first. Here all functions are hashed at once, always in the same order.

At every launch Triton also compares these constants with what they were, one after the other. Nobody changes those of
these files, and the keys have them, so they are forgotten.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil

from thinwire import triton_kernels
from thinwire.triton_kernels.compat import HAS_TRITON, triton
from thinwire.triton_kernels.signal import INTERPRETED


@functools.cache
def settle_cache_keys() -> None:
    """Hashes every function of these files; to be called before the first launch of a process. A tenth of a second."""
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
