"""Tensors that look like others, and are not plain: what checks of arguments must not take for what they know."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode


def odd(rng: random.Random, x: torch.Tensor) -> Any:
    """What looks like x, and is not plain."""
    kind = rng.randrange(8)
    if kind == 0 and x.dim():
        return x.repeat_interleave(2, 0)[::2]
    if kind == 1 and x.is_floating_point():
        return torch._neg_view(-x)  # the memory has the other sign
    if kind == 2:
        return x.to_sparse() if x.dim() and x.dtype != torch.bfloat16 else x
    if kind == 3:
        with FakeTensorMode() as mode:
            return mode.from_tensor(x)
    if kind == 4:
        return x.to("meta")
    if kind == 5 and x.dim() > 1 and x.dtype == torch.float32:
        return torch.nested.nested_tensor([torch.zeros(x.shape[1:])] * 2)
    if kind == 6 and x.is_floating_point():
        return x.clone().requires_grad_()
    return torch.nn.Parameter(x.clone(), requires_grad=False)
