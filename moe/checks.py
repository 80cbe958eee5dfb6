"""What `ExpertParallel` refuses, and what it says then."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from thinwire.errors import CapacityError, RoutingError
from thinwire.fused.codec import FLOAT_DTYPES

if TYPE_CHECKING:
    from thinwire.moe.dispatched import Dispatched
    from thinwire.moe.parallel import ExpertParallel

__all__ = ["check_expert_out", "check_out", "check_tokens"]


def check_tokens(ep: ExpertParallel, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> None:
    """What `dispatch` refuses before anything is sent."""
    for name, tensor in (("x", x), ("topk_ids", topk_ids), ("topk_weights", topk_weights)):
        ep.comm.check_device(name, tensor)
    dtypes = FLOAT_DTYPES if ep.dtype is None else (ep.dtype,)
    if x.dtype not in dtypes or x.dim() != 2 or x.shape[1] != ep.hidden_size:
        accepted = "float32, float16 or bfloat16" if ep.dtype is None else ep.dtype
        raise RoutingError(f"x is {x.dtype} {list(x.shape)}; {accepted} [tokens, {ep.hidden_size}] is needed")
    if x.shape[0] > ep.max_tokens:
        raise CapacityError(f"{x.shape[0]} tokens were passed; this ExpertParallel was made for {ep.max_tokens}")
    shape = (x.shape[0], ep.top_k)
    if topk_ids.dtype not in (torch.int32, torch.int64) or topk_ids.shape != shape:
        raise RoutingError(
            f"topk_ids is {topk_ids.dtype} {list(topk_ids.shape)}; int32 or int64 {list(shape)} is needed"
        )
    if not topk_weights.is_floating_point() or topk_weights.shape != shape:
        raise RoutingError(
            f"topk_weights is {topk_weights.dtype} {list(topk_weights.shape)}; floats {list(shape)} are needed"
        )
    # On CUDA the ids' range would cost a synchronisation: the direct kernels look at it, and `check` tells.
    if topk_ids.numel() and not (topk_ids.is_cuda and ep.transport == "direct"):
        lowest, highest = (int(bound) for bound in topk_ids.aminmax())
        if lowest < -1 or highest >= ep.num_experts:
            raise RoutingError(
                f"topk_ids runs from {lowest} to {highest}; experts are 0 ... {ep.num_experts - 1}, and -1 "
                "stands for none"
            )
    if torch.is_grad_enabled() and (x.requires_grad or topk_weights.requires_grad):
        raise RoutingError("dispatch has no backward: call it under torch.no_grad() or torch.inference_mode()")


def check_expert_out(ep: ExpertParallel, expert_out: torch.Tensor, d: Dispatched) -> None:
    """What `combine` refuses before anything is sent."""
    ep.comm.check_device("expert_out", expert_out)
    accepted = [rows for rows in (d._num_rows, d._capacity) if rows is not None]
    if not accepted and not (expert_out.is_cuda and ep.transport == "direct"):
        accepted = [d._round.num_rows()]
    right_shape = expert_out.dim() == 2 and expert_out.shape[1] == ep.hidden_size
    # On CUDA the host may not know how many rows there are, and experts may read d.rows through d.index themselves.
    right_rows = not accepted or expert_out.shape[0] in (*accepted, d.index.shape[0])
    if expert_out.dtype not in FLOAT_DTYPES or not right_shape or not right_rows:
        rows = " or ".join(map(str, accepted)) or "rows"
        raise RoutingError(
            f"expert_out is {expert_out.dtype} {list(expert_out.shape)}; float32, float16 or bfloat16 "
            f"[{rows}, {ep.hidden_size}], a row for each of the round's tokens, is needed"
        )
    if torch.is_grad_enabled() and expert_out.requires_grad:
        raise RoutingError("combine has no backward: call it under torch.no_grad() or torch.inference_mode()")


def check_out(ep: ExpertParallel, out: torch.Tensor, d: Dispatched) -> None:
    """What `combine` refuses to write to."""
    ep.comm.check_device("out", out)
    shape = (d._round.num_tokens, ep.hidden_size)
    if out.shape != shape or out.dtype != d._round.dtype or not out.is_contiguous():
        raise RoutingError(
            f"out is {out.dtype} {list(out.shape)}, strides {list(out.stride())}; contiguous {d._round.dtype} "
            f"{list(shape)} is needed"
        )
