"""Three matrix products trained on eight CPU ranks, each operator in a layout of its own, in none and in int8 transit.

    pip install scikit-learn
    python examples/layout_train.py

The network and its strategies are those of MindSpore's tutorial on layouts, with the digits that scikit-learn ships in
place of MNIST:

    matmul1  x: layout("mp", ("sp", "dp")), w: layout(("sp", "dp"), "None")
    relu1    (4, 1)
    matmul2  x: tp("None", "tp"), w: tp("tp", "None")
    relu2    (8, 1)
    matmul3  x: (8, 1), w: (1, 1), data parallel, as MindSpore takes operators without a strategy

Between them activations are redistributed, and their gradients on the way back, in the wire format of the run. Sums of
a weight's gradient travel exactly.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F

import thinwire as tw
from thinwire.comm.layout import Layout, TensorLayout, as_tensor_layout
from thinwire.fused.redistribute import redistribute

LAYOUT, TP = Layout((2, 2, 2), ("dp", "sp", "mp")), Layout((8,), ("tp",))
X1, W1 = LAYOUT("mp", ("sp", "dp")), LAYOUT(("sp", "dp"), "None")
X2, W2 = TP("None", "tp"), TP("tp", "None")
W3 = TP("None", "None")
# What a product leaves: summands, over the axes that cut the dimension that it sums over.
Y1, Y2 = LAYOUT("mp", "None").partial("sp", "dp"), TP("None", "None").partial("tp")
# Ranks that repeat a weight have seen different rows, so that their gradients of it are summands.
GRADIENTS = (W1.partial("mp"), W2, W3.partial("tp"))

HIDDEN, BATCH, STEPS, REPORT_EVERY, RATE = 512, 256, 40, 5, 0.1


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """[1797, 64] images of 8 x 8 pixels and [1797] labels, in random order."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]


def initial_weights() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    sizes = ((64, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 10))
    return [torch.randn(size, generator=generator) * (2 / size[0]) ** 0.5 for size in sizes]


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    images, labels = digits()
    starts = [step * BATCH % (len(labels) - BATCH) for step in range(STEPS)]
    return [(images[start : start + BATCH], labels[start : start + BATCH]) for start in starts]


def train_whole() -> list[float]:
    """One process: the loss of every step."""
    weights = [weight.requires_grad_() for weight in initial_weights()]
    losses = []
    for images, labels in batches():
        hidden = torch.relu(torch.relu(images @ weights[0]) @ weights[1])
        loss = F.cross_entropy(hidden @ weights[2], labels)
        loss.backward()
        descend(weights)
        losses.append(loss.item())
    return losses


@torch.no_grad()
def descend(weights: list[torch.Tensor]) -> None:
    for weight in weights:
        assert weight.grad is not None
        weight -= RATE * weight.grad
        weight.grad = None


def train_rank(comm: tw.Communicator, wire: str) -> list[float]:
    """One of eight ranks: the loss of every step, over all ranks' rows."""
    layouts: tuple[TensorLayout, ...] = (W1, W2, W3)
    wholes = initial_weights()
    weights = [
        whole[layout.slices(whole.shape, comm.rank)].clone().requires_grad_()
        for whole, layout in zip(wholes, layouts, strict=True)
    ]
    losses = []
    for images, labels in batches():
        x1 = images[X1.slices(images.shape, comm.rank)]
        a1 = torch.relu(redistribute(x1 @ weights[0], Y1, (4, 1), wire=wire, comm=comm))
        x2 = redistribute(a1, (4, 1), X2, wire=wire, comm=comm)
        a2 = torch.relu(redistribute(x2 @ weights[1], Y2, (8, 1), wire=wire, comm=comm))
        own = as_tensor_layout((8, 1), comm.size).slices((BATCH, 10), comm.rank)[0]
        loss = F.cross_entropy(a2 @ weights[2], labels[own], reduction="sum") / BATCH
        loss.backward()
        for weight, summands, layout in zip(weights, GRADIENTS, layouts, strict=True):
            weight.grad = redistribute(weight.grad, summands, layout, wire="none", comm=comm)
        descend(weights)
        losses.append(redistribute(loss.detach(), TP().partial("tp"), TP(), wire="none", comm=comm).item())
    return losses


def run_rank(comm: tw.Communicator, wires: tuple[str, ...]) -> dict[str, list[float]]:
    torch.set_num_threads(1)  # eight processes share the cores
    return {wire: train_rank(comm, wire) for wire in wires}


def main() -> None:
    by_rank = tw.testing.run_ranks(run_rank, 8, ("none", "int8"), timeout=180.0)
    assert all(losses == by_rank[0] for losses in by_rank)
    columns = {"unsharded": train_whole()} | by_rank[0]
    print("step  " + "  ".join(f"{name:>9}" for name in columns))
    for step in [*range(0, STEPS, REPORT_EVERY), STEPS - 1]:
        print(f"{step + 1:4}  " + "  ".join(f"{losses[step]:9.5f}" for losses in columns.values()))


if __name__ == "__main__":
    main()
