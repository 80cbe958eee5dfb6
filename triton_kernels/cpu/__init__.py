"""The kernels of `thinwire.triton_kernels` for CPU ranks, compiled by numba; equal to them to the last bit."""

import importlib.util

#: Environment variable that overrides the choice of kernels: `triton`, `numba` or `torch` (slow; the reference).
BACKEND_VARIABLE = "THINWIRE_BACKEND"
#: Whether numba is installed. The modules of this folder import without it and say what is missing when called.
HAS_NUMBA = importlib.util.find_spec("numba") is not None
