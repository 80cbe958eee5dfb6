"""A token dispatcher for the mixture-of-experts layers of torchtitan 0.3: docs/integrations-torchtitan.md.

--override.imports 'thinwire.integrations.torchtitan.dispatcher={"wire": "int8+h64"}'
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from thinwire.fused.codec import resolve_wire
from thinwire.moe.parallel import ExpertParallel

try:
    from torchtitan.config.override import derive, override
    from torchtitan.models.common import token_dispatcher as theirs
except ImportError as error:
    raise ImportError(
        f"thinwire.integrations.torchtitan needs torchtitan 0.3 ({error}): pip install torchtitan==0.3.0"
    ) from error

__all__ = ["ThinwireTokenDispatcher", "dispatcher"]


class ThinwireTokenDispatcher(theirs.BaseEPTokenDispatcher):
    """One layer's way to its experts and back, through an `ExpertParallel` that all layers of its sizes share.

    `combine` applies the scores, in float32. Ranks call the layers in the same order: if one skips a layer, it and the
    others get RoutingError. Without expert parallelism it is torchtitan's LocalTokenDispatcher.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(theirs.BaseEPTokenDispatcher.Config):
        """What `RoutedExperts.Config.token_dispatcher` is set to, or replaced with by `dispatcher`.

        Args:
            wire, combine_wire, grad_wire: see :class:`thinwire.ExpertParallel`.
            num_max_tokens_per_rank: the most tokens that a rank passes to the layer at once, the same on all ranks.
                None: as many as it passes, which is the same number on all ranks in torchtitan's own models.
            hidden_dim: elements of a token. If both are given, memory is allocated when meshes are wired, otherwise by
                the first call.
        """

        wire: str | None = None
        combine_wire: str | None = None
        grad_wire: str | None = "none"
        num_max_tokens_per_rank: int | None = None
        hidden_dim: int | None = None

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        for spec in (config.wire, config.combine_wire, config.grad_wire):
            resolve_wire(spec)
        self.config = config
        self._layer: int | None = None  # for `ExpertParallel.dispatch`, from the first call on

    def init_buffer(self) -> None:
        """Allocates what the config has the sizes of. Collective."""
        c = self.config
        if self.ep_mesh is not None and c.hidden_dim is not None and c.num_max_tokens_per_rank is not None:
            # Ranks build models at different speeds, so here they wait as long as the group itself allows.
            dist.barrier(self.ep_mesh.get_group())
            self._expert_parallel(0, c.hidden_dim)

    def dispatch(
        self, x: torch.Tensor, scores: torch.Tensor, expert_ids: torch.Tensor, counts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Tokens [T, D], their scores and experts [T, K] -> rows by expert, each expert's number, and for `combine`."""
        if self.ep_mesh is None:
            return theirs.LocalTokenDispatcher.dispatch(self, x, scores, expert_ids, counts)
        ep = self._expert_parallel(*x.shape)
        if self._layer is None:
            self._layer = ep.next_layer()
        d = ep.dispatch(x, expert_ids, scores, layer=self._layer)
        return d.tokens, d.expert_counts, theirs.EPDispatchMetadata(state=(ep, d))

    def combine(self, expert_out: torch.Tensor, metadata: Any, x: torch.Tensor) -> torch.Tensor:
        """What experts made of the rows -> [T, D], for each token the sum of its experts, weighted by its scores."""
        if self.ep_mesh is None:
            return theirs.LocalTokenDispatcher.combine(self, expert_out, metadata, x)
        ep, d = metadata.state
        return ep.combine(expert_out, d)

    def _expert_parallel(self, tokens: int, hidden: int) -> ExpertParallel:
        c, room = self.config, self.config.num_max_tokens_per_rank
        return ExpertParallel.shared(
            self.ep_mesh, self.num_experts, self.top_k, hidden, tokens if room is None else room,
            wire=c.wire, combine_wire=c.combine_wire, grad_wire=c.grad_wire,
        )  # fmt: skip


@override(target=theirs.BaseEPTokenDispatcher.Config, description="tokens travel by thinwire")
def dispatcher(config: Any, **settings: Any) -> Any:
    """For `--override.imports`: a layer's dispatcher becomes thinwire's, with sizes of the one that it replaces."""
    return derive(config, ThinwireTokenDispatcher.Config, **settings)
