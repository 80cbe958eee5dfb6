"""Which implementation of the product of experts on int8 records runs where."""

from __future__ import annotations

from collections.abc import Callable

import torch

from thinwire.fused.backend import select_backend
from thinwire.triton_kernels import expert_gemm
from thinwire.wire import WireFormat


def select_expert_gemm(device: torch.device, wire: WireFormat) -> Callable[..., None]:
    """The product, with the contract of `thinwire.triton_kernels.expert_gemm.expert_gemm`.

    Raises:
        TransportUnavailable: there are no kernels for the device.
    """
    name = select_backend(device, wire).name
    if name == "triton":
        return expert_gemm.expert_gemm
    if name == "numba":
        from thinwire.triton_kernels.cpu import expert_gemm as cpu_expert_gemm  # GPU ranks do without numba

        return cpu_expert_gemm.expert_gemm
    return expert_gemm.expert_gemm_reference
