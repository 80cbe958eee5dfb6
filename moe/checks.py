"""What `ExpertParallel` refuses, and what it says then."""

from __future__ import annotations

import torch

from thinwire.errors import CapacityError, RoutingError
from thinwire.fused.codec import FLOAT_DTYPES
from thinwire.moe.config import ParallelConfig
from thinwire.moe.dispatched import Dispatched

__all__ = ["check_expert_out", "check_out", "check_tokens"]


def check_tokens(
    config: ParallelConfig, transport: str, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
) -> None:
    """What `dispatch` refuses before anything is sent."""
    for name, tensor in (("x", x), ("topk_ids", topk_ids), ("topk_weights", topk_weights)):
        config.comm.check_device(name, tensor)
    dtypes = FLOAT_DTYPES if config.dtype is None else (config.dtype,)
    if x.dtype not in dtypes or x.dim() != 2 or x.shape[1] != config.hidden_size:
        accepted = "float32, float16 or bfloat16" if config.dtype is None else config.dtype
        raise RoutingError(f"x is {x.dtype} {list(x.shape)}; {accepted} [tokens, {config.hidden_size}] is needed")
    if x.shape[0] > config.max_tokens:
        raise CapacityError(f"{x.shape[0]} tokens were passed; this ExpertParallel was made for {config.max_tokens}")
    shape = (x.shape[0], config.top_k)
    if topk_ids.dtype not in (torch.int32, torch.int64) or topk_ids.shape != shape:
        raise RoutingError(
            f"topk_ids is {topk_ids.dtype} {list(topk_ids.shape)}; int32 or int64 {list(shape)} is needed"
        )
    if not topk_weights.is_floating_point() or topk_weights.shape != shape:
        raise RoutingError(
            f"topk_weights is {topk_weights.dtype} {list(topk_weights.shape)}; floats {list(shape)} are needed"
        )
    # On CUDA the ids' range would cost a synchronisation: the direct kernels look at it, and `check` tells.
    if topk_ids.numel() and not (topk_ids.is_cuda and transport == "direct"):
        lowest, highest = (int(bound) for bound in topk_ids.aminmax())
        if lowest < -1 or highest >= config.num_experts:
            raise RoutingError(
                f"topk_ids runs from {lowest} to {highest}; experts are 0 ... {config.num_experts - 1}, and -1 "
                "stands for none"
            )
    if torch.is_grad_enabled() and (x.requires_grad or topk_weights.requires_grad):
        raise RoutingError("dispatch has no backward: call it under torch.no_grad() or torch.inference_mode()")


def check_expert_out(config: ParallelConfig, transport: str, expert_out: torch.Tensor, d: Dispatched) -> None:
    """What `combine` refuses before anything is sent."""
    config.comm.check_device("expert_out", expert_out)
    accepted = [rows for rows in (d._num_rows, d._capacity) if rows is not None]
    if not accepted and not (expert_out.is_cuda and transport == "direct"):
        accepted = [d._read_num_rows()]
    right_shape = expert_out.dim() == 2 and expert_out.shape[1] == config.hidden_size
    # On CUDA the host may not know how many rows there are, and experts may read d.rows through d.index themselves.
    right_rows = not accepted or expert_out.shape[0] in (*accepted, d.index.shape[0])
    if expert_out.dtype not in FLOAT_DTYPES or not right_shape or not right_rows:
        rows = " or ".join(map(str, accepted)) or "rows"
        raise RoutingError(
            f"expert_out is {expert_out.dtype} {list(expert_out.shape)}; float32, float16 or bfloat16 "
            f"[{rows}, {config.hidden_size}], a row for each of the round's tokens, is needed"
        )
    if torch.is_grad_enabled() and expert_out.requires_grad:
        raise RoutingError("combine has no backward: call it under torch.no_grad() or torch.inference_mode()")


def check_out(config: ParallelConfig, out: torch.Tensor, d: Dispatched) -> None:
    """What `combine` refuses to write to."""
    config.comm.check_device("out", out)
    shape = (d._num_sent, config.hidden_size)
    if out.shape != shape or out.dtype != d._dtype or not out.is_contiguous():
        raise RoutingError(
            f"out is {out.dtype} {list(out.shape)}, strides {list(out.stride())}; contiguous {d._dtype} "
            f"{list(shape)} is needed"
        )
