"""Compiles kernels ahead of time: `thinwire warmup`."""
