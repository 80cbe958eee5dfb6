"""MoE feed-forward layers and the experts of a rank, all in one process or spread over an expert-parallel group."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from einops import rearrange
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from thinwire.comm.tensors import is_int, require_dense
from thinwire.errors import ArgumentError, RoutingError
from thinwire.moe.experts import ClampedSwiGLU, GroupedExperts, require_integers
from thinwire.moe.routing import RouterConfig, top_k_route

if TYPE_CHECKING:
    from thinwire.moe.parallel import ExpertParallel

_T = TypeVar("_T")


class Routing(NamedTuple):
    """What the router decided for T tokens: the input of `thinwire.moe.routing.load_balancing_loss`."""

    router_logits: torch.Tensor  # floating point [T, E]
    topk_ids: torch.Tensor  # int32 [T, K]
    topk_weights: torch.Tensor  # fp32 [T, K]


class MoELayer(nn.Module):
    """A mixture-of-experts feed-forward layer: ``y = sum over the top-k experts e of weight_e * expert_e(x)``.

    With ``shared_ff_size`` above 0 one more expert of that inner size, without biases, is added for every token, with
    weight 1, on the token's own rank (DeepSeek's shared experts, side by side). ``router_config`` says how experts are
    chosen and weighted; activation, gate and biases are those of `GroupedExperts`.

    Without ``ep`` all experts are local. With ``ep`` only those in ``ep.local_experts`` are held here, and the layer is
    collective: every rank of the group calls it as often as the others, with any number of tokens, also none, and so it
    is with backward. All ranks make the layers of a model in the same order: a layer knows itself by its place among
    those of ``ep``, so that a rank which leaves one out gets an error. In backward an expert gets the gradient of all
    ranks' tokens, and the router that of this rank's: add the router's up over the ranks. Built with ``ep`` on ranks
    that were seeded alike, they all have the same router, and each expert is the same on whichever rank it is;
    not so on ranks that are threads, which share their random numbers.

    The weighted sum is taken in fp32, from +0.0, in ascending expert id (within a rank, when sharded). The output of a
    shared expert is added to it in the dtype of ``x``.

    Raises:
        ValueError: sizes that `GroupedExperts` refuses, ``top_k`` outside 1..num_experts, groups of
            ``router_config`` that do not fit these, or an ``ep`` whose local experts are not among ``num_experts``.

    >>> layer = MoELayer(hidden_size=8, ff_size=16, num_experts=4, top_k=2)
    >>> layer(torch.zeros(2, 3, 8)).shape
    torch.Size([2, 3, 8])
    """

    correction_bias: torch.Tensor | None

    def __init__(
        self,
        hidden_size: int,
        ff_size: int,
        num_experts: int,
        top_k: int,
        *,
        activation: str | ClampedSwiGLU = "silu",
        gated: bool = False,
        expert_bias: bool = False,
        shared_ff_size: int = 0,
        router_config: RouterConfig | None = None,
        ep: ExpertParallel | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        for name, size in (("hidden_size", hidden_size), ("ff_size", ff_size), ("num_experts", num_experts)):
            if not is_int(size, 1):
                raise ValueError(f"{name} must be an int of at least 1, and below 2**31, got {size!r}")
        if not is_int(top_k, 1, num_experts):
            raise ValueError(f"top_k must lie in 1..{num_experts} (the number of experts), got {top_k!r}")
        if not is_int(shared_ff_size, 0):
            raise ValueError(f"shared_ff_size must be an int of at least 0, and below 2**31, got {shared_ff_size!r}")
        self.router_config = RouterConfig() if router_config is None else router_config
        self.router_config.check_sizes(num_experts, top_k)
        self.hidden_size = hidden_size
        self.num_experts = num_experts
        self.top_k = top_k
        self.ep = ep
        self.local_experts = range(num_experts) if ep is None else self._owned(ep)
        self._layer = 0 if ep is None else ep.next_layer()  # for `ExpertParallel.dispatch`
        bias = self.router_config.bias
        self.router = nn.Linear(hidden_size, num_experts, bias=bias, dtype=dtype, device=device)
        correction = torch.zeros(num_experts, dtype=torch.float32, device=device)
        self.register_buffer("correction_bias", correction if self.router_config.correction_bias else None)

        experts = partial(GroupedExperts, activation=activation, gated=gated, dtype=dtype, device=device)
        make = partial(experts, len(self.local_experts), hidden_size, ff_size, bias=expert_bias)
        if ep is None:
            self.experts = make()
        else:  # each from random numbers of its own, or ranks that were seeded alike would all have the same ones
            seed = _seed_of_experts()
            self.experts = _made_alone(seed, make)
            for place, number in enumerate(self.local_experts):
                _made_alone(seed + number, partial(self.experts.draw, place))
        self._name_experts()
        self.shared = experts(1, hidden_size, shared_ff_size) if shared_ff_size else None

    def _name_experts(self) -> None:
        if len(self.local_experts) < self.num_experts:
            self.experts.name_tensors(self.local_experts)

    def _owned(self, ep: ExpertParallel) -> range | tuple[int, ...]:
        _require_parallel(ep)
        for name in ("num_experts", "top_k", "hidden_size"):
            mine, its = getattr(self, name), getattr(ep, name)
            if mine != its:
                raise ValueError(f"this layer has {name} {mine}, its ep {its}: they must be the same")
        owned = ep.local_experts
        if not all(0 <= expert < self.num_experts for expert in owned):
            raise ValueError(f"ep.local_experts must lie in 0..{self.num_experts - 1}, got {owned}")
        return owned

    def shard(self, ep: ExpertParallel) -> MoELayer:
        """Keep only the experts in ``ep.local_experts``, in place, and use ``ep`` from now on. Returns the layer.

        The parameters stay the same objects, which an optimiser may have; their values are copies of those that are
        kept, so that the memory of the others is freed, and their names end with the experts' numbers.

        Raises:
            ValueError: the layer is sharded already, or shares parameters with one that is; or ``ep`` does not fit it.
        """
        if self.ep is not None:
            raise ValueError(f"this layer is sharded already and holds only experts {self.local_experts}")
        owned = self._owned(ep)
        weights = [*self.experts.parameters()]
        if any(len(weight) != self.num_experts for weight in weights):
            raise ValueError("this layer shares the parameters of its experts with one that was sharded before")
        for weight in weights:
            weight.data, weight.grad = weight.detach()[list(owned)], None  # a copy
        self.local_experts = owned
        self._name_experts()
        self.ep, self._layer = ep, ep.next_layer()
        return self

    def route(self, x: torch.Tensor) -> Routing:
        """The router's decision for tokens [T, hidden_size]."""
        if self.router_config.scoring == "sigmoid":
            bias = None if self.router.bias is None else self.router.bias.float()
            with torch.autocast(x.device.type, enabled=False):
                router_logits = F.linear(x.float(), self.router.weight.float(), bias)
        else:
            router_logits = self.router(x)
        topk_ids, topk_weights = top_k_route(router_logits, self.top_k, self.router_config, self.correction_bias)
        return Routing(router_logits, topk_ids, topk_weights)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden_size] -> the same shape and dtype.

        Raises:
            RoutingError: the last dimension of ``x`` is not ``hidden_size``, or it is not floating point. On the CPU
                also, with ``ep``, what another rank refused; see `ExpertParallel.dispatch`.
            ArgumentError: ``x`` is no dense tensor; within a DistributedDataParallel that `distributed` has not made.
        """
        return self.forward_with_routing(x)[0]

    def forward_with_routing(self, x: torch.Tensor) -> tuple[torch.Tensor, Routing]:
        """Like `forward`, and the routing besides, which a load-balancing loss needs."""
        try:
            require_dense("x", x, in_memory=False)
            if x.dim() < 1 or x.shape[-1] != self.hidden_size or not x.is_floating_point():
                raise RoutingError(
                    f"x must be floating point [..., {self.hidden_size}], got {x.dtype} {tuple(x.shape)}"
                )
            if self.ep is not None and self.ep.local_experts != self.local_experts:
                raise RoutingError(
                    f"this layer holds experts {self.local_experts}, and its ep has {self.ep.local_experts} since it "
                    "was rebuilt: rebuild with the same ranks in their order and the same map, or load it anew"
                )
            if len(self.local_experts) < self.num_experts:
                _require_ignored(self.experts)
            x2d = x.reshape(-1, self.hidden_size)
            routing = self.route(x2d)
        except Exception as error:
            if self.ep is not None:
                self.ep.refuse(error)  # or the peers would wait in their dispatch until their time is up
            raise
        if self.ep is None:
            y = self._forward_local(x2d, routing)
        else:
            wanted = x2d.requires_grad or routing.topk_weights.requires_grad
            wanted = wanted or any(weight.requires_grad for weight in self.experts.parameters())
            with torch.set_grad_enabled(torch.is_grad_enabled() and wanted):  # or y would want one of frozen layers
                dispatched = self.ep.dispatch(x2d, routing.topk_ids, routing.topk_weights, layer=self._layer)
                expert_out = self.experts(dispatched.tokens, dispatched.expert_counts, dispatched.expert_offsets)
                y = self.ep.combine(expert_out, dispatched)
        if self.shared is not None:
            y = y + self.shared(x2d, torch.tensor([x2d.shape[0]], device="cpu"))
        return y.reshape(x.shape), routing

    def _forward_local(self, x2d: torch.Tensor, routing: Routing) -> torch.Tensor:
        ids = routing.topk_ids.long()
        by_expert = ids.argsort(dim=1)
        weights = routing.topk_weights.gather(1, by_expert)
        # Stable: the rows of one expert stay in token order, which is also the order of a sharded layer's rows.
        order = ids.flatten().argsort(stable=True)
        counts = torch.bincount(ids.flatten(), minlength=self.num_experts)
        expert_out = self.experts(x2d.index_select(0, order // self.top_k), counts)
        row_of = torch.empty_like(order)
        row_of[order] = torch.arange(order.numel(), device=order.device)
        row_of = rearrange(row_of, "(tokens choices) -> tokens choices", choices=self.top_k).gather(1, by_expert)
        y = torch.zeros(x2d.shape, dtype=torch.float32, device=x2d.device)
        for choice in range(self.top_k):
            y = y + weights[:, choice, None] * expert_out.index_select(0, row_of[:, choice]).float()
        return y.to(x2d.dtype)


class LocalExperts(nn.ModuleDict):
    """The experts of this rank, by their numbers: modules that take rows [n, hidden] and give as many.

    Expert e is ``factory(e)``, made of random numbers of its own. So experts differ from each other, and each is the
    same on whichever rank it is, if all ranks were seeded alike. The random numbers that follow are alike on all ranks,
    too, so whatever is made next on every rank, such as a router, is the same. Ranks that are threads of one process
    share their random numbers; there this does not hold.

    Args:
        ep: whose ``local_experts`` are made.
        factory: makes the expert of a number.

    Raises:
        ArgumentError: ``ep`` is no ExpertParallel; factory is a module, or no function.

    >>> import thinwire as tw
    >>> with tw.init() as comm, tw.ExpertParallel(comm, 4, 2, 8, max_tokens=16) as ep:
    ...     experts = tw.LocalExperts(ep, lambda number: nn.Linear(8, 8))
    >>> list(experts), experts(torch.zeros(3, 8), torch.tensor([1, 0, 2, 0])).shape
    (['0', '1', '2', '3'], torch.Size([3, 8]))
    """

    def __init__(self, ep: ExpertParallel, factory: Callable[[int], nn.Module]) -> None:
        super().__init__()
        _require_parallel(ep)
        if isinstance(factory, nn.Module) or not callable(factory):
            raise ArgumentError(
                f"factory is a {type(factory).__name__}; expected a function of an expert's number that makes its "
                "module, such as lambda number: nn.Linear(8, 8)"
            )
        self.ep, seed = ep, _seed_of_experts()
        self.local_experts = ep.local_experts
        for number in self.local_experts:
            self[str(number)] = _made_alone(seed + number, partial(factory, number))

    def forward(self, rows: torch.Tensor, expert_counts: torch.Tensor) -> torch.Tensor:
        """Runs each expert on its rows; for `ExpertParallel.combine`.

        Args:
            rows: ``d.tokens``, [rows, hidden], sorted by expert, of a round without padding (``align=1``).
            expert_counts: ``d.expert_counts``, int64 [local experts]. On CUDA this waits for them.

        Raises:
            ArgumentError: what is no dense tensor; within a DistributedDataParallel that `distributed` has not made.
            RoutingError: counts of other experts, or of more or fewer rows; or ``ep`` was rebuilt, and has other ones.
        """
        if len(self.local_experts) < self.ep.num_experts:
            _require_ignored(self)
        if self.ep.local_experts != self.local_experts:
            raise RoutingError(
                f"these are experts {self.local_experts}, and ep has {self.ep.local_experts} since it was rebuilt: "
                "make them anew, and load their weights"
            )
        require_dense("rows", rows, in_memory=False)
        require_integers("expert_counts", expert_counts)
        if expert_counts.is_meta:
            raise RoutingError("expert_counts are on meta, where tensors have no values; expected a tensor in memory")
        counts = expert_counts.flatten().tolist()
        fits = expert_counts.dim() == 1 and len(counts) == len(self) and min(counts, default=0) >= 0
        if not fits or rows.shape[:1] != (sum(counts),):
            raise RoutingError(
                f"expert_counts are {counts}, for rows {list(rows.shape)}; {len(self)} numbers that sum to the rows: "
                "LocalExperts takes d.tokens and d.expert_counts of an ExpertParallel with align=1"
            )
        parts = [expert(part) for expert, part in zip(self.values(), rows.split(counts), strict=True)]
        return torch.cat(parts) if parts else rows


def _made_alone(seed: int, make: Callable[[], _T]) -> _T:
    """Calls `make` with random numbers of this seed; those of the program go on as if it had not."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        torch.default_generator.manual_seed(seed)
        if devices:  # otherwise a seed would wait for CUDA's start
            torch.cuda.manual_seed(seed)
        return make()


def _seed_of_experts() -> int:
    """A random number for the experts of a layer: the same on ranks that were seeded alike, which go on alike."""
    return int(torch.randint(1 << 62, (), device="cpu"))


def _require_parallel(ep: object) -> None:
    """Raises ArgumentError for what is no ExpertParallel."""
    if not hasattr(ep, "local_experts") or not hasattr(ep, "next_layer"):
        raise ArgumentError(f"ep is a {type(ep).__name__}; accepted: an ExpertParallel")


def _require_ignored(experts: nn.Module) -> None:
    """Raises ArgumentError within a DistributedDataParallel that has not been told to ignore these experts.

    It has overwritten them with rank 0's then, and averages the gradients of different experts.
    """
    if torch.compiler.is_compiling():
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not DistributedDataParallel.forward.__code__:
        frame = frame.f_back
    if frame is None:
        return
    wrapper = frame.f_locals["self"]
    own = {id(parameter) for parameter in experts.parameters()}
    reduced = (name for name, parameter in wrapper.module.named_parameters() if id(parameter) in own)
    if taken := [name for name in reduced if name not in wrapper.parameters_to_ignore]:
        raise ArgumentError(
            f"DistributedDataParallel has overwritten this rank's experts with rank 0's ({taken[0]}): make the model "
            "anew, and pass it to tw.distributed(model) instead"
        )
