"""`flashinfer.comm`'s all-to-all for ranks that are threads on the CPU: its calls, what it checks, where it puts rows.

Rows of a rank arrive in any order, and places that got none hold whatever was there before.
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

import torch

AUXILIARY_BYTES = 1000
TOP_K = (1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 22)


def _check(condition: bool, text: str) -> None:
    if not condition:
        raise RuntimeError(f"Check failed: {text}")


@dataclass
class MnnvlConfig:
    comm_backend: Any = None


class Mapping:
    def __init__(self, world_size: int, rank: int, *, tp_size: int, moe_ep_size: int) -> None:
        if tp_size != world_size:
            raise ValueError("world_size must equal to tp_size * pp_size * cp_size")
        self.rank, self.moe_ep_size = rank, moe_ep_size
        self.moe_ep_rank = rank % moe_ep_size


def moe_a2a_get_workspace_size_per_rank(ep_size: int, max_num_tokens: int, dispatch: int, combine: int) -> int:
    parts = (AUXILIARY_BYTES, ep_size * max_num_tokens * dispatch, ep_size * max_num_tokens * combine)
    return sum(-(-part // 128) * 128 for part in parts)


class MoeAlltoAll:
    def __init__(
        self,
        mapping: Mapping,
        max_num_tokens: int,
        top_k: int,
        num_experts: int,
        workspace_size_per_rank: int,
        *,
        mnnvl_config: MnnvlConfig,
    ) -> None:
        self.ranks = mnnvl_config.comm_backend.Split(0, mapping.rank)
        assert (self.ranks.Get_rank(), self.ranks.Get_size()) == (mapping.moe_ep_rank, mapping.moe_ep_size)
        assert len(set(self.ranks.allgather(workspace_size_per_rank))) == 1, "Not all rank allocating same size."
        self.rank, self.size = mapping.moe_ep_rank, mapping.moe_ep_size
        self.most, self.top_k, self.experts = max_num_tokens, top_k, num_experts
        self.bytes = workspace_size_per_rank
        self.payload: torch.Tensor | None = None
        self.phase = "idle"

    def dispatch(
        self,
        token_selected_experts: torch.Tensor,
        input_payloads: list[torch.Tensor],
        runtime_max_tokens_per_rank: int,
        invalid_token_expert_id: int,
        expert_id_payload_index: int,
    ) -> list[torch.Tensor]:
        assert self.phase == "idle", "dispatch called twice without combine"
        ids, most = token_selected_experts, runtime_max_tokens_per_rank
        _check(
            ids.dtype == torch.int32 and ids.is_contiguous() and ids.shape[1] == self.top_k, "token_selected_experts"
        )
        _check(most <= self.most and 0 < len(input_payloads) <= 6 and self.experts >= self.size, "sizes")
        _check(self.top_k in TOP_K, "Unsupported top_k")
        offset = 0
        for payload in input_payloads:
            _check(payload.dim() == 2 and len(payload) == len(ids) and payload.is_contiguous(), "payload")
            width = payload.shape[1] * payload.itemsize
            vector = next(each for each in (16, 8, 4, 2, 1) if width % each == 0)
            assert offset % vector == 0, "a misaligned address ends the context"
            offset += self.size * most * width
            _check(offset % payload.itemsize == 0, "Misaligned payload buffer")
        self.offset = -(-offset // 128) * 128
        _check(1024 + offset <= self.bytes, "workspace size per rank insufficient")
        assert bool((ids >= 0).all()), "an id below zero has no rank"
        base, more = divmod(self.experts, self.size)
        first = [rank * base + min(rank, more) for rank in range(self.size + 1)]
        out = [torch.full((self.size, most, payload.shape[1]), 77, dtype=payload.dtype) for payload in input_payloads]
        self.arrived = []
        for source, (theirs, payloads) in enumerate(self.ranks.allgather((ids, input_payloads))):
            here = ((theirs >= first[self.rank]) & (theirs < first[self.rank + 1])).any(1).nonzero()[:, 0]
            here = here[torch.randperm(len(here))]
            self.arrived.append(here)
            for place, payload in zip(out, payloads, strict=True):
                place[source, : len(here)] = payload[here]
            out[expert_id_payload_index][source, len(here) :] = invalid_token_expert_id
        self.tokens, self.phase = len(ids), "dispatched"
        return out

    def get_combine_payload_tensor_in_workspace(self, most: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
        if self.phase != "dispatched":
            raise RuntimeError("called before successful dispatch")
        _check(1024 + self.offset + self.size * most * hidden * dtype.itemsize <= self.bytes, "workspace insufficient")
        self.payload = torch.full((self.size, most, hidden), float("nan"), dtype=dtype)
        return self.payload

    def combine(self, payload: torch.Tensor, most: int, payload_in_workspace: bool) -> torch.Tensor:
        assert self.phase == "dispatched", "combine called before successful dispatch"
        _check(payload_in_workspace and payload is self.payload and payload.shape[:2] == (self.size, most), "payload")
        total = torch.zeros(self.tokens, payload.shape[2])
        for theirs, arrived in self.ranks.allgather((payload, self.arrived)):
            total[arrived[self.rank]] += theirs[self.rank, : len(arrived[self.rank])].float()
        self.phase = "idle"
        return total.to(payload.dtype)


def modules() -> dict[str, types.ModuleType]:
    """It, to be put into `sys.modules`."""
    made = {name: types.ModuleType(name) for name in ("flashinfer", "flashinfer.comm", "flashinfer.comm.mnnvl")}
    comm = made["flashinfer.comm"]
    for each in (Mapping, MoeAlltoAll, moe_a2a_get_workspace_size_per_rank):
        setattr(comm, each.__name__, each)
    made["flashinfer.comm.mnnvl"].MnnvlConfig = MnnvlConfig  # type: ignore[attr-defined]
    return made
