"""Train a mixture-of-experts layer among dense ones, save it with its optimiser, and resume, also on other ranks.

    torchrun --nproc-per-node 2 examples/train_and_resume.py checkpoints --steps 20
    torchrun --nproc-per-node 3 examples/train_and_resume.py checkpoints --steps 40

The second command goes on where the first one ended. So it is after a crash or a SIGTERM: run the same command again.
"""

import argparse
import shutil
import signal
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import thinwire as tw
from thinwire.moe.routing import load_balancing_loss

BATCH, HIDDEN, EXPERTS, TOP_K = 96, 64, 6, 2


class Block(nn.Module):
    def __init__(self, ep: tw.ExpertParallel) -> None:
        super().__init__()
        self.dense = nn.Linear(HIDDEN, HIDDEN)
        self.moe = tw.MoELayer(HIDDEN, 2 * HIDDEN, EXPERTS, TOP_K).shard(ep)  # made whole, then cut

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, routing = self.moe.forward_with_routing(self.dense(x))
        return y, load_balancing_loss(routing.router_logits, routing.topk_ids, EXPERTS)


parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--every", type=int, default=10, help="steps from one save to the next")
options = parser.parse_args()

signals: list[int] = []
signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
comm = tw.init()
ep = tw.ExpertParallel(comm, EXPERTS, TOP_K, HIDDEN, max_tokens=BATCH)
torch.manual_seed(0)  # on every rank: what all of them hold is the same
model = Block(ep).to(comm.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
parallel = tw.distributed(model)  # each rank keeps its experts; all gradients become means over ranks
state = {"training": tw.TrainingState(parallel, optimizer), "steps": 0}
saved = sorted(options.folder.glob("*/.metadata"))  # which is written last
if saved:
    dcp.load(state, checkpoint_id=saved[-1].parent)

for step in range(state["steps"], options.steps):
    batch = torch.randn(BATCH, HIDDEN, generator=torch.Generator().manual_seed(step))  # the whole one, cut by rank
    mine = batch[comm.rank :: comm.size].to(comm.device)
    y, balance = parallel(mine)
    loss = (y - mine.flip(1)).square().sum() * comm.size / batch.numel() + 0.01 * balance
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    state["steps"] = done = step + 1
    if done % 10 == 0:
        mean = loss.detach() / comm.size
        comm.all_reduce(mean)
        if comm.rank == 0:
            print(f"step {done}: loss {float(mean):.6f}", flush=True)
    stop = torch.tensor([len(signals)], device=comm.device)
    comm.all_reduce(stop)  # ranks may get a signal in different steps, and all must stop after the same one
    if done % options.every == 0 or done == options.steps or stop.item():
        new = options.folder / f"{done:08}"
        dcp.save(state, checkpoint_id=new)
        if comm.rank == 0:  # it is complete: others may go
            for old in options.folder.glob("[0-9]" * 8):
                if old != new:
                    shutil.rmtree(old)
    if stop.item():
        break

comm.close()
