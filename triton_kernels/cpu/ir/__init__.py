"""What numba's kernels are made of: loads, stores, vectors and loops in LLVM's own words, where numba has none."""
