"""What a collective is given, checked before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.errors import ArgumentError, CountsError


def check_rank(name: str, rank: object, size: int) -> int:
    """The rank itself, or ArgumentError."""
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < size:
        raise ArgumentError(f"{name} is {rank!r}, expected a rank of this group, an int from 0 to {size - 1}")
    return rank


def check_tensor(name: str, tensor: object, device: torch.device) -> Tensor:
    """The tensor itself, cut off from autograd, as what a collective writes has no history; or ArgumentError."""
    if not isinstance(tensor, Tensor):
        raise ArgumentError(f"{name} is a {type(tensor).__name__}, expected a torch.Tensor")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise ArgumentError(f"{name} has layout {tensor.layout}, dtype {tensor.dtype}; expected a plain dense tensor")
    if tensor.is_conj() or tensor.is_neg():
        raise ArgumentError(f"{name} is a conjugate or negative view; expected resolve_conj() or resolve_neg() of it")
    if tensor.device.type != device.type:
        raise ArgumentError(f"{name} lives on {tensor.device}, but this communicator's tensors live on {device}")
    return tensor.detach()


def check_splits(name: str, splits: object, tensor_name: str, tensor: Tensor, size: int) -> list[int]:
    """How many rows of dim 0 belong to each rank, equal shares for None; or CountsError."""
    if tensor.dim() == 0:
        raise CountsError(f"{tensor_name} has no dimensions, expected at least one, which is split")
    rows = tensor.shape[0]
    if splits is None or (isinstance(splits, Sequence) and not len(splits)):  # torch takes [] for equal shares, too
        if rows % size:
            raise CountsError(f"{tensor_name} has {rows} rows, which {size} ranks cannot share equally; pass {name}")
        return [rows // size] * size
    if not isinstance(splits, Sequence) or len(splits) != size:
        raise CountsError(f"{name} is {splits!r}, expected {size} ints, one for each rank")
    for rank, share in enumerate(splits):
        if isinstance(share, bool) or not isinstance(share, int) or share < 0:
            raise CountsError(f"{name}[{rank}] is {share!r}, expected an int of at least 0")
    if sum(splits) != rows:
        raise CountsError(f"{name} is {list(splits)!r}, {sum(splits)} rows in all, but {tensor_name} has {rows}")
    return list(splits)


def extent(tensor: Tensor) -> tuple[int, int]:
    """Addresses of a tensor's first byte and of the one behind its last; of any strides."""
    if not tensor.numel():
        return tensor.data_ptr(), tensor.data_ptr()
    if tensor.is_contiguous():
        return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize
