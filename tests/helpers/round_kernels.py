"""Triton's kernels of a round, as `run_round` of `rounds.py` calls them; interpreted or not, as Triton was imported."""

from __future__ import annotations

from types import SimpleNamespace

from thinwire.triton_kernels import combine, dispatch, permute

KERNELS = SimpleNamespace(
    send_tokens=dispatch.send_tokens,
    close_round=dispatch.close_round,
    wait=dispatch.wait,
    route=permute.route,
    gather=permute.gather,
    send_sums=combine.send_sums,
    sum_home=combine.sum_home,
)
