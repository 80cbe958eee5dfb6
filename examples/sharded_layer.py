"""A mixture-of-experts layer split over three CPU ranks, its experts read from one checkpoint.

    python examples/sharded_layer.py

Under a launcher, `tw.init()` takes the place of `run_ranks`: `torchrun --nproc-per-node 8 your_program.py`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

import thinwire as tw

HIDDEN, FF, EXPERTS, TOP_K, TOKENS = 256, 512, 8, 2, 100


def run_rank(comm: tw.Communicator, path: str, tokens: torch.Tensor, wire: str) -> torch.Tensor:
    """One rank: holds its own experts only, and runs its share of the tokens through all of them."""
    with tw.ExpertParallel(comm, EXPERTS, TOP_K, HIDDEN, max_tokens=TOKENS, wire=wire) as ep, torch.inference_mode():
        if comm.rank == 0:
            print(ep.explain())
        layer = tw.MoELayer(HIDDEN, FF, EXPERTS, TOP_K, ep=ep)
        tw.load_checkpoint(layer, path)  # the router, the same everywhere, and this rank's experts
        return layer(tokens[comm.rank :: comm.size])


def main() -> None:
    torch.manual_seed(0)
    whole, tokens = tw.MoELayer(HIDDEN, FF, EXPERTS, TOP_K), torch.randn(TOKENS, HIDDEN)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        path = str(Path(folder) / "layer.safetensors")
        tw.save_checkpoint(whole, path)
        expected = whole(tokens)
        for wire in ("none", "int8"):
            outputs = tw.testing.run_ranks(run_rank, 3, path, tokens, wire)
            errors = [(got - expected[rank::3]).norm() / expected[rank::3].norm() for rank, got in enumerate(outputs)]
            print(f"{wire}: relative error of each rank's outputs {', '.join(f'{float(e):.1e}' for e in errors)}\n")


if __name__ == "__main__":
    main()
