"""A rank's experts as modules of any kind, each with weights that do not depend on which rank holds it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.comm.tensors import require_dense
from thinwire.errors import ArgumentError, RoutingError
from thinwire.moe.experts import require_integers

if TYPE_CHECKING:
    from thinwire.moe.parallel import ExpertParallel


_T = TypeVar("_T")


def made_alone(seed: int, make: Callable[[], _T]) -> _T:
    """What `make` makes of random numbers of this seed; the random numbers of the program go on as if it had not."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        torch.default_generator.manual_seed(seed)
        if devices:  # otherwise a seed would wait for CUDA's start
            torch.cuda.manual_seed(seed)
        return make()


def seed_of_experts() -> int:
    """A random number for the experts of a layer: the same on ranks that were seeded alike, which go on alike."""
    return int(torch.randint(1 << 62, (), device="cpu"))


def require_parallel(ep: object) -> None:
    """Raises ArgumentError for what is no ExpertParallel."""
    if not hasattr(ep, "local_experts") or not hasattr(ep, "next_layer"):
        raise ArgumentError(f"ep is a {type(ep).__name__}; accepted: an ExpertParallel")


def require_ignored(experts: nn.Module) -> None:
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
        require_parallel(ep)
        if isinstance(factory, nn.Module) or not callable(factory):
            raise ArgumentError(
                f"factory is a {type(factory).__name__}; expected a function of an expert's number that makes its "
                "module, such as lambda number: nn.Linear(8, 8)"
            )
        self.ep, seed = ep, seed_of_experts()
        self.local_experts = ep.local_experts
        for number in self.local_experts:
            self[str(number)] = made_alone(seed + number, partial(factory, number))

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
            require_ignored(self)
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
