"""A tensor as the bytes that it is, for what moves it without asking what it holds."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.errors import ArgumentError


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor of any dtype and shape: uint8 [tensor.nbytes], which shares its storage.

    Raises:
        ArgumentError: a tensor whose memory is not its values in order: strided, sparse or quantised, or a conjugate or
            negative view.

    >>> as_bytes(torch.empty_strided((1,), (2,), dtype=torch.int16).fill_(258)).tolist()
    [2, 1]
    """
    if tensor.layout != torch.strided or tensor.is_quantized or not tensor.is_contiguous():
        raise ArgumentError(f"{tensor.dtype} {list(tensor.shape)} in layout {tensor.layout} is not contiguous")
    if tensor.is_conj() or tensor.is_neg():
        raise ArgumentError(f"{tensor.dtype} {list(tensor.shape)} is a conjugate or negative view, not what it shows")
    # Whatever its strides are, a tensor of one element is contiguous, and any view but this one keeps them.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
