"""The kernels of `thinwire.triton_kernels` for CPU ranks, compiled by numba; equal to them to the last bit."""

import importlib.util
import os

#: Environment variable that overrides the choice of kernels: `triton`, `numba` or `torch` (slow; the reference).
BACKEND_VARIABLE = "THINWIRE_BACKEND"
BACKENDS = ("triton", "numba", "torch")
#: Whether numba is told to compile nothing; of these kernels, parts are written as compiled code.
JIT_DISABLED = os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0")
#: Whether numba is installed, and compiles. The modules of this folder import without it, and say so when called.
HAS_NUMBA = importlib.util.find_spec("numba") is not None and not JIT_DISABLED
