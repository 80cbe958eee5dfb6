"""thinwire as an `ep_implementation` of Hugging Face's transformers, 5.23 or newer, for inference and training.

    import thinwire.integrations.transformers  # registers "thinwire", "thinwire:int8", "thinwire:none", ...

    config = DistributedConfig(tp_size=4, ep_size=4, ep_implementation="thinwire")
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)

Attention, routers and the experts themselves stay transformers' own. Only the way of tokens to their experts and back
changes. docs/integrations.md has the requirements and the comparisons.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from thinwire.comm import Communicator, as_communicator
from thinwire.compiler import opaque
from thinwire.fused.codec import resolve_wire
from thinwire.moe.parallel import ExpertParallel

try:
    from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface
except ImportError as error:
    try:
        found = f"{importlib.metadata.version('transformers')} is installed"
    except importlib.metadata.PackageNotFoundError:
        found = "it is not installed"
    raise ImportError(
        "thinwire.integrations.transformers needs transformers 5.23 or newer, where implementations of expert "
        f"parallelism can be registered, and {found}: pip install 'transformers>=5.23' accelerate"
    ) from error

__all__ = ["NAMES", "ThinwireEP", "register"]


class ThinwireEP(EPImplementation):
    """The experts of one layer: their tokens come and go through an `ExpertParallel` that all layers share.

    The ranks of an expert group may hold different batches. Those of a tensor-parallel group hold the same batch, and
    each sends a slice. Ranks call the layers in the same order, with any number of tokens, even none. If a rank skips a
    layer, it and the others get RoutingError.
    """

    settings: dict[str, Any] = {}  # of ExpertParallel
    max_tokens: int | None = None

    def __init__(self, experts: torch.nn.Module, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self.experts = experts
        self._comm: Communicator | None = None
        self._capacity = 0 if self.max_tokens is None else self.max_tokens
        self._layer: int | None = None  # for `ExpertParallel.dispatch`, from the first call on

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[tokens, hidden], and each token's expert ids and router weights [tokens, top_k] -> [tokens, hidden]."""
        if self.tp_mesh.size() == 1:
            return self._exchange(hidden_states, top_k_index, top_k_weights)
        parts = [
            DTensor.from_local(tensor, self.tp_mesh, [Replicate()], run_check=False)
            .redistribute(self.tp_mesh, [Shard(0)])
            .to_local()
            for tensor in (hidden_states, top_k_index, top_k_weights)
        ]
        part, (tokens, hidden) = self._exchange(*parts), hidden_states.shape
        whole = DTensor.from_local(
            part, self.tp_mesh, [Shard(0)], shape=torch.Size((tokens, hidden)), stride=(hidden, 1)
        )
        return whole.full_tensor()

    def _exchange(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        ep = self._expert_parallel(x, ids)
        if self._layer is None:
            self._layer = ep.next_layer()
        wanted = x.requires_grad or weights.requires_grad
        wanted = wanted or any(weight.requires_grad for weight in self.experts.parameters())
        with torch.set_grad_enabled(torch.is_grad_enabled() and wanted):  # or results would want one of frozen layers
            d = ep.dispatch(x, ids, weights, layer=self._layer)
            return ep.combine(self._run_experts(d.tokens, d.expert_counts), d)

    def _run_experts(self, rows: torch.Tensor, expert_counts: torch.Tensor) -> torch.Tensor:
        """The experts' own forward, on rows that each have one expert with weight 1: combine weights them."""
        # Without rows there is one made of none, so that parameters get gradients, for which other ranks may wait.
        given = rows if len(rows) else rows.sum(0, keepdim=True)
        experts = torch.zeros(len(given), 1, dtype=torch.int64, device=rows.device)
        if len(rows):
            local = torch.arange(self.num_local_experts, device=rows.device)
            experts[:, 0] = local.repeat_interleave(expert_counts, output_size=len(rows))
        expert_out: torch.Tensor = self.experts_forward(given, experts, given.new_ones(len(given), 1))
        return expert_out[: len(rows)]

    @opaque
    def _expert_parallel(self, x: torch.Tensor, ids: torch.Tensor) -> ExpertParallel:
        """The group's, with room for every rank's tokens. Collective."""
        if self._comm is None or self._comm.closed:
            # Ranks load models at different speeds, so here they wait as long as the group itself allows.
            dist.barrier(self.ep_mesh.get_group())
            self._comm = as_communicator(self.ep_mesh)
        if self.max_tokens is None:
            need = max(self._comm.exchange_counts([len(x)] * self._comm.size))
            # Smaller ones stay open, as gradients may still have to travel; together they are no larger than this one.
            if need > self._capacity:
                self._capacity = 1 << (need - 1).bit_length()
        num_experts = self.num_local_experts * self._comm.size
        return ExpertParallel.shared(self._comm, num_experts, ids.shape[1], x.shape[1], self._capacity, **self.settings)


def register(
    name: str,
    *,
    wire: str | None = None,
    combine_wire: str | None = None,
    grad_wire: str = "none",
    transport: str = "auto",
    max_tokens: int | None = None,
) -> None:
    """Registers a name for `DistributedConfig(ep_implementation=name)`, on every rank.

    Args:
        name: such as "thinwire:int8:64". An existing name is replaced, for models that are loaded later.
        wire, combine_wire, grad_wire, transport: see :class:`thinwire.ExpertParallel`.
        max_tokens: the most tokens that a rank passes to a layer at once. None: any number; ranks then exchange their
            token counts in every call.

    Raises:
        WireFormatError: a format is unknown.
    """
    for spec in (wire, combine_wire, grad_wire):
        resolve_wire(spec)
    settings = {"wire": wire, "combine_wire": combine_wire, "grad_wire": grad_wire, "transport": transport}
    kind = type("ThinwireEP", (ThinwireEP,), {"settings": settings, "max_tokens": max_tokens, "__module__": __name__})
    EPImplementationInterface.register(name, kind)


#: What is registered by importing this, with each one's format; "thinwire" means THINWIRE_WIRE, else int8+h64.
NAMES: dict[str, str | None] = {
    "thinwire": None,
    **{f"thinwire:{wire}": wire for wire in ("int8", "int8+h64", "int8:row", "int6+h64", "int4", "fp8", "none")},
}  # fmt: skip
for _name, _wire in NAMES.items():
    register(_name, wire=_wire)
