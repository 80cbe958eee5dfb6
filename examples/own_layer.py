"""A layer of one's own, with experts of any kind in a ModuleList, split over three CPU ranks and trained.

python examples/own_layer.py
"""

from __future__ import annotations

import torch
from torch import nn

import thinwire as tw

HIDDEN, EXPERTS, TOP_K, TOKENS = 64, 8, 2, 48


class OwnLayer(nn.Module):
    """A router, the same on every rank, and this rank's experts."""

    def __init__(self, ep: tw.ExpertParallel) -> None:
        super().__init__()
        self.ep, self.layer = ep, ep.next_layer()  # so that ranks never meet in two layers
        torch.manual_seed(0)  # on every rank: all have the same router, and each expert is the same wherever it is
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.experts = tw.LocalExperts(ep, make_expert)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(x).softmax(-1).topk(TOP_K)
        d = self.ep.dispatch(x, ids, weights, layer=self.layer)
        return self.ep.combine(self.experts(d.tokens, d.expert_counts), d)  # d.tokens: this rank's rows, by expert


class ByToken(OwnLayer):
    """The same over one row a token, for experts that want it so: they are weighted and summed here."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(x).softmax(-1).topk(TOP_K)
        d = self.ep.dispatch(x, ids, weights, layer=self.layer)
        records, ids, weights = d.records, d.record_ids, d.record_weights  # ids of this rank's experts, -1 for others
        experts = enumerate(self.experts.values())
        parts = [(weights * (ids == e)).sum(1, keepdim=True) * expert(records) for e, expert in experts]
        return self.ep.combine(torch.stack(parts).sum(0), d, weighted=True)


def make_expert(number: int) -> nn.Module:
    """Any module that takes and gives rows. Its weights are drawn for its number."""
    return nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN))


def train(comm: tw.Communicator, kind: type[OwnLayer], wire: str, tokens: torch.Tensor, steps: int) -> list[float]:
    """Teaches the layer to turn tokens around, each rank with its share of them; gives the mean loss of each step."""
    mine, losses = tokens[comm.rank :: comm.size], []
    with tw.ExpertParallel(comm, EXPERTS, TOP_K, HIDDEN, max_tokens=TOKENS, wire=wire) as ep:
        layer = tw.distributed(kind(ep))  # gradients become means over ranks: the router's, and each expert's
        optimizer = torch.optim.Adam(layer.parameters(), lr=3e-3)
        for _ in range(steps):
            optimizer.zero_grad()
            loss = (layer(mine) - mine.flip(1)).square().sum() * comm.size / tokens.numel()
            loss.backward()
            optimizer.step()
            mean = loss.detach() / comm.size
            comm.all_reduce(mean)
            losses.append(float(mean))
    return losses


def main() -> None:
    tokens = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))
    for ranks, kind, wire in (
        (1, OwnLayer, "none"),
        (3, OwnLayer, "none"),
        (3, OwnLayer, "int8"),
        (3, ByToken, "int8"),
    ):
        losses = tw.testing.run_ranks(train, ranks, kind, wire, tokens, 20)[0]
        print(f"{ranks} ranks, {kind.__name__}, {wire}: loss {', '.join(f'{loss:.5f}' for loss in losses[::6])}")


if __name__ == "__main__":
    main()
