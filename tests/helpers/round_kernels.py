"""Triton's kernels of a round, as `run_round` of `rounds.py` calls them; interpreted or not, as Triton was imported."""

from __future__ import annotations

from types import SimpleNamespace

from thinwire.triton_kernels import combine, dispatch, permute
from thinwire.triton_kernels.list_records import list_records

KERNELS = SimpleNamespace(
    send_tokens=dispatch.send_tokens,
    close_round=dispatch.close_round,
    wait=dispatch.wait,
    route=permute.route,
    gather=permute.gather,
    list_records=list_records,
    send_sums=combine.send_sums,
    sum_home=combine.sum_home,
)
