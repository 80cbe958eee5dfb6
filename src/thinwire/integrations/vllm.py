"""vLLM sends the tokens of its mixture-of-experts layers through thinwire: docs/integrations-vllm.md.

With THINWIRE_VLLM=1 it replaces vLLM's all-gather and reduce-scatter between ranks that share the experts.
"""

from __future__ import annotations

import functools
import importlib
import os
import weakref
from typing import Any, cast

import torch

from thinwire.comm.communicator import Communicator
from thinwire.errors import ArgumentError, CapacityError, ConfigMismatch, TransportUnavailable
from thinwire.moe.dispatched import Dispatched
from thinwire.moe.parallel import ExpertParallel

VARIABLE = "THINWIRE_VLLM"
_LOG, _BACKEND = "vllm.thinwire", "allgather_reducescatter"
_MOE, _FACTORY = "vllm.model_executor.layers.fused_moe", "make_moe_prepare_and_finalize_naive_dp_ep"
_SELECTION = "_select_forward"  # vLLM's own choice of how a layer is called


def register() -> None:
    """What vLLM calls in each of its processes, perhaps twice; TransportUnavailable if it has no place for it."""
    if (value := os.environ.get(VARIABLE) or "0") not in ("0", "1"):
        raise ArgumentError(f"{VARIABLE} is {value[:40]!r} in the environment, expected 0 or 1")
    if value == "0":
        return
    all2all = importlib.import_module(f"{_MOE}.all2all_utils")
    runner = getattr(importlib.import_module(f"{_MOE}.runner.moe_runner"), "MoERunner", None)
    for place, name in ((all2all, _FACTORY), (runner, _SELECTION)):
        if not hasattr(place, name):
            raise TransportUnavailable(f"this vLLM has no {name}, which thinwire takes the place of: use vLLM 0.32")
    if not isinstance(stock := getattr(all2all, _FACTORY), functools.partial):  # else it is done
        setattr(all2all, _FACTORY, functools.partial(_make, stock, weakref.WeakKeyDictionary()))
        setattr(runner, _SELECTION, _operator)


def _operator(runner: Any) -> Any:
    """vLLM's operator for all of a layer, into which torch.compile does not look; on CPUs vLLM would have it traced.

    It is asked for each layer, whatever carries its tokens; where that is not thinwire, vLLM's log says so, once.
    """
    parallel = runner.moe_config.moe_parallel_config
    if parallel.use_all2all_kernels and parallel.all2all_backend != _BACKEND:
        importlib.import_module("vllm.logger").init_logger(_LOG).warning_once(
            f"{VARIABLE}=1 has no effect with --all2all-backend {parallel.all2all_backend}, which carries the tokens; "
            f"thinwire takes the place of {_BACKEND}"
        )
    return torch.ops.vllm.moe_forward if runner._shared_experts is None else torch.ops.vllm.moe_forward_shared


def _make(stock: Any, groups: Any, use_monolithic: bool, **settings: Any) -> Any:
    """The prepare and finalize of one layer, in place of vLLM's own. `groups`: of each of vLLM's, what layers share."""
    config = importlib.import_module("vllm.config").get_current_vllm_config()
    if not config.parallel_config.enable_expert_parallel:
        return stock(use_monolithic, **settings)  # every rank has a part of every expert: no token has a place to go
    if use_monolithic or config.parallel_config.enable_elastic_ep:
        what = "experts that route by themselves: choose another --moe-backend" if use_monolithic else "elastic EP"
        raise TransportUnavailable(f"{VARIABLE}=1 does not work with {what}")
    coordinator = importlib.import_module("vllm.distributed").get_ep_group()
    if coordinator not in groups:
        groups[coordinator] = group = Group(coordinator.device_group, coordinator.device)
        weakref.finalize(coordinator, group.close)  # when the process ends at the latest
    return groups[coordinator].prepare_and_finalize(config.model_config.enforce_eager)


class Group:
    """What the layers on one of vLLM's groups share: a communicator, lanes for each kind of layer, and counts."""

    def __init__(self, group: torch.distributed.ProcessGroup, device: torch.device) -> None:
        timeout = float(importlib.import_module("vllm.envs").VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS)
        self.comm = Communicator(group, device=device, timeout=timeout)  # vLLM's own for a step
        self.log = importlib.import_module("vllm.logger").init_logger(_LOG).info
        self.made: dict[tuple[Any, ...], ExpertParallel] = {}
        self.rounds = self.sent = self.logical = 0

    def prepare_and_finalize(self, eager: bool = True) -> PrepareAndFinalize:
        """For one layer; vLLM tells it its sizes later. It is of vLLM's class for rows that are with their experts."""
        base = importlib.import_module(f"{_MOE}.prepare_finalize").MoEPrepareAndFinalizeNoDPEPModular
        return type("ThinwirePrepareAndFinalize", (PrepareAndFinalize, base), {})(self, eager)

    def count(self, d: Dispatched) -> None:
        """Adds a round that is about to be combined; logs at each power of two."""
        self.rounds += 1
        for leg in (d.dispatch_traffic, d.combine_traffic):
            self.sent += leg.wire_bytes
            self.logical += leg.logical_bytes
        if self.rounds & (self.rounds - 1) == 0:
            self.report()

    def report(self) -> None:
        """Logs what was sent to other ranks so far."""
        self.log(f"thinwire: rank {self.comm.rank}, {self.rounds} rounds, {self.sent} bytes in place of {self.logical}")

    def close(self) -> None:
        """Gives memory back."""
        self.report()
        for ep in self.made.values():
            ep.close()
        self.comm.close()


class PrepareAndFinalize:
    """One layer's way to its experts and back, as vLLM's modular kernels want it.

    Experts get a row for each token that came, with the ids and float32 weights of this rank's experts, as they would
    from vLLM's all-gather, and return their weighted sum. vLLM's experts for CPUs know no absent expert: they would
    compute something for each of `top_k` places. So they get a row for each token and expert, with a weight of 1, and
    combine applies router weights.
    """

    def __init__(self, group: Group, eager: bool) -> None:
        self._group, self._eager = group, eager
        self.num_dispatchers, self.topk_indices_dtype = lambda: group.comm.size, lambda: torch.int32
        self.output_is_reduced, self.supports_deferred_moe_finalize = lambda: self._copies == 1, lambda: False

    def post_init_setup(self, fused_experts: Any) -> None:
        """Collective for the first layer of its sizes. Raises what tokens cannot be carried for."""
        moe, comm, made = fused_experts.moe_config, self._group.comm, self._group.made
        if moe.is_lora_enabled:
            raise TransportUnavailable(f"{VARIABLE}=1 does not work with LoRA on experts")
        parallel = moe.moe_parallel_config
        shares = parallel.ep_size // (parallel.dp_size * parallel.pcp_size)  # tensor-parallel ranks share a batch
        self._copies = shares // parallel.sp_size  # all of them have all of it, unless the model splits it beforehand
        most = -(-moe.max_num_tokens // shares)
        kind = (moe.num_experts, moe.experts_per_token, moe.hidden_dim, most, moe.in_dtype)
        if kind not in made:
            made[kind] = ExpertParallel(comm, *kind[:-1], dtype=moe.in_dtype)
            self._group.log("thinwire carries tokens: %s", made[kind].explain().replace("\n", "; "))
        self._ep = ep = made[kind]
        self._layer = ep.next_layer()
        ours, theirs = (comm.rank, len(ep.local_experts)), (moe.ep_rank, moe.num_local_experts)
        if ours != theirs:
            raise ConfigMismatch(f"(rank, its experts) is {ours} here, but {theirs} in vLLM; they must be equal")
        self._by_expert, self._fixed = (cpu := comm.device.type == "cpu"), not cpu and ep.transport == "direct"
        if not (self._fixed or self._eager or cpu):
            raise TransportUnavailable(f"--enforce-eager is needed on GPUs without direct transport; {ep.explain()}")

    def prepare(
        self, a1: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, num_experts: int, expert_map: Any,
        apply_router_weight_on_input: bool, quant_config: Any, defer_input_quant: bool = False,
    ) -> tuple[Any, ...]:  # fmt: skip
        """Dispatches a1 [tokens, hidden]; rows for this rank's experts, their scales, None, ids and weights."""
        if apply_router_weight_on_input:
            a1, topk_weights = a1 * topk_weights.to(a1.dtype), torch.ones_like(topk_weights)
        room = self._room(len(a1)) if self._fixed else 0
        # Of tokens that several ranks have, each dispatches a part; vLLM's all-reduce after finalize adds parts up.
        each, place = -(-len(a1) // self._copies), self._group.comm.rank % self._copies
        self._part = part = slice(place * each, (place + 1) * each)
        self._round = d = self._ep.dispatch(a1[part], topk_ids[part], topk_weights[part], layer=self._layer)
        local = cast(range, self._ep.local_experts)  # as it has no map
        if self._by_expert:
            rows, weights = d.tokens, topk_weights.new_ones(len(d.tokens), 1)
            places = torch.arange(len(local), device=rows.device)  # of experts among the rank's weights
            ids = places.repeat_interleave(d.expert_counts)[:, None]
        else:
            if self._fixed:  # more cannot come in this step
                rows, ids, weights, _, overflow = d.gather_records(room)
                # Rows would be missing without a word, and the host cannot look in a graph: all become NaN.
                weights = weights.masked_fill(overflow, float("nan"))
            else:
                rows, ids, weights = d.records, d.record_ids, d.record_weights
            # vLLM's kernels skip an expert of another rank, and do not all know -1.
            ids = torch.where(ids >= 0, ids + local.start, 0 if local.start else num_experts - 1)
        ids, here = ids.int(), cast(Any, super())
        quantised = here.prepare(rows, weights, ids, num_experts, expert_map, False, quant_config, defer_input_quant)
        return *quantised[:3], ids, weights

    def _room(self, num_tokens: int) -> int:
        """As many tokens as all ranks have in this step; CapacityError where this one has more than vLLM told all."""
        sizes = importlib.import_module("vllm.forward_context").get_forward_context().dp_metadata.local_sizes
        rank, size = self._group.comm.rank, self._group.comm.size
        if num_tokens > (told := sizes[rank * len(sizes) // size]):
            raise CapacityError(f"rank {rank} has {num_tokens} tokens in a step in which vLLM says that it has {told}")
        return sum(sizes)

    def finalize(self, output: torch.Tensor, fused_expert_output: torch.Tensor, *reduction: Any) -> None:
        """Combines what experts made of the rows into output [tokens, hidden]."""
        rows = fused_expert_output
        if rows.shape != (len(reduction[1]), output.shape[1]) or rows.data_ptr() == output.data_ptr():
            rows = output.new_empty(len(reduction[1]), output.shape[1])
        if len(rows):
            cast(Any, super()).finalize(rows, fused_expert_output, *reduction)
        if self._by_expert:  # elsewhere it would wait for the device
            self._group.count(self._round)
        if self._copies > 1:
            output.zero_()
        self._ep.combine(rows, self._round, out=output[self._part], weighted=not self._by_expert)
