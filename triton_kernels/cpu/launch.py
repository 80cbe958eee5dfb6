"""What launchers look up once: a small call is over in microseconds, and asking torch takes one for each few questions.

An end has `kept` for it, which ends with it.
"""

from __future__ import annotations

import torch

from thinwire.triton_kernels.end import End


def addresses(owner: End, *names: str) -> tuple[int, ...]:
    """Where its tensors of these names lie."""
    found: tuple[int, ...] | None = owner.kept.get(names)
    if found is None:
        found = owner.kept[names] = tuple(getattr(owner, name).data_ptr() for name in names)
    return found


def scratch_of(owner: End, num_bytes: int) -> int:
    """The address of so many bytes, for one kernel at a time; what they hold is not known."""
    found: tuple[int, int, torch.Tensor] | None = owner.kept.get("scratch")
    if found is None or found[1] < num_bytes:
        scratch = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        found = owner.kept["scratch"] = scratch.data_ptr(), num_bytes, scratch
    return found[0]
