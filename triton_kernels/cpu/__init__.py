"""The kernels of `thinwire.triton_kernels` for CPU ranks, compiled by numba; equal to them to the last bit."""

import importlib.util

#: Whether numba is installed. The modules of this folder import without it and say what is missing when called.
HAS_NUMBA = importlib.util.find_spec("numba") is not None
