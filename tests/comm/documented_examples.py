"""The examples of well-known documentation pages, run by every way of starting ranks; rank 0 prints what ranks got.

Each function is one example, of four ranks, and returns what its page prints on this rank. Sources: the pages of
`mindspore.ops.AllReduce`, `AllGather`, `ReduceScatter`, `Broadcast` and `Reduce`, and PyTorch's "Distributed
communication package - torch.distributed".
"""

from __future__ import annotations

import sys

import torch

import thinwire as tw


def mindspore_all_reduce(comm):
    x = torch.full((1,), float(comm.rank))
    comm.all_reduce(x)
    return x.tolist()


def mindspore_all_gather(comm):
    rows = [torch.zeros(1, 1) for _ in range(comm.size)]
    comm.all_gather(rows, torch.tensor([[float(comm.rank)]]))
    return torch.cat(rows).tolist()


def mindspore_reduce_scatter(comm):
    output = torch.zeros(1)
    comm.reduce_scatter(output, list(torch.arange(4.0).split(1)))
    return output.tolist()


def mindspore_broadcast(comm):
    x = torch.tensor([[float(comm.rank + 1)] * 4] * 2)
    comm.broadcast(x, 0)
    return x.tolist()


def mindspore_reduce(comm):
    x = torch.tensor([float(comm.rank)] * 2)
    comm.reduce(x, 1)
    return x.tolist()


def torch_all_gather(comm):
    tensors = [torch.zeros(2, dtype=torch.int64) for _ in range(comm.size)]
    comm.all_gather(tensors, torch.arange(2) + 1 + 2 * comm.rank)
    return [tensor.tolist() for tensor in tensors]


def torch_all_gather_complex(comm):
    tensors = [torch.zeros(2, dtype=torch.cfloat) for _ in range(comm.size)]
    comm.all_gather(tensors, torch.tensor([1 + 1j, 2 + 2j], dtype=torch.cfloat) + 2 * comm.rank * (1 + 1j))
    return [tensor.tolist() for tensor in tensors]


def torch_all_gather_into_tensor(comm):
    joined = torch.zeros(comm.size * 2, dtype=torch.int64)
    comm.all_gather(joined.chunk(comm.size), torch.arange(2) + 1 + 2 * comm.rank)
    stacked = torch.zeros(comm.size, 2, dtype=torch.int64)
    comm.all_gather(list(stacked), torch.arange(2) + 1 + 2 * comm.rank)
    return joined.tolist(), stacked.tolist()


def torch_all_reduce(comm):
    x = torch.arange(2) + 1 + 2 * comm.rank
    comm.all_reduce(x, op=torch.distributed.ReduceOp.SUM)
    return x.tolist()


def torch_all_reduce_complex(comm):
    x = torch.tensor([1 + 1j, 2 + 2j], dtype=torch.cfloat) + 2 * comm.rank * (1 + 1j)
    comm.all_reduce(x)
    return x.tolist()


def torch_gather(comm):
    rows = [torch.zeros(2) for _ in range(comm.size)] if comm.rank == 0 else None
    comm.gather(torch.ones(2) * comm.rank, rows, dst=0)
    return None if rows is None else [row.tolist() for row in rows]


def torch_scatter(comm):
    rows = [torch.ones(2), torch.ones(2) * 5, torch.ones(2) * 7, torch.ones(2) * 9] if comm.rank == 0 else None
    output = torch.zeros(2)
    comm.scatter(output, rows, src=0)
    return output.tolist()


def torch_reduce_scatter(comm):
    output = torch.zeros(2, dtype=torch.int64)
    comm.reduce_scatter(output, torch.arange(comm.size * 2).chunk(comm.size))
    return output.tolist()


def torch_all_to_all(comm):
    inputs = list((torch.arange(4) + 4 * comm.rank).chunk(4))
    outputs = list(torch.empty(4, dtype=torch.int64).chunk(4))
    comm.all_to_all(outputs, inputs)
    return [output.tolist() for output in outputs]


UNEVEN_INPUTS = (range(6), range(10, 19), range(20, 25), range(30, 37))
UNEVEN_SENDS = ([2, 2, 1, 1], [3, 2, 2, 2], [2, 1, 1, 1], [2, 2, 2, 1])
UNEVEN_RECEIVES = ([2, 3, 2, 2], [2, 2, 1, 2], [1, 2, 1, 2], [1, 2, 1, 1])


def torch_all_to_all_uneven(comm):
    mine = torch.tensor(UNEVEN_INPUTS[comm.rank])
    outputs = [torch.empty(count, dtype=torch.int64) for count in UNEVEN_RECEIVES[comm.rank]]
    comm.all_to_all(outputs, mine.split(UNEVEN_SENDS[comm.rank]))
    return [output.tolist() for output in outputs]


def torch_all_to_all_single(comm):
    output = torch.empty(4, dtype=torch.int64)
    comm.all_to_all_v(output, torch.arange(4) + comm.rank * 4)
    return output.tolist()


def torch_all_to_all_single_uneven(comm):
    mine = torch.tensor(UNEVEN_INPUTS[comm.rank])
    output = torch.empty(sum(UNEVEN_RECEIVES[comm.rank]), dtype=torch.int64)
    comm.all_to_all_v(output, mine, UNEVEN_RECEIVES[comm.rank], UNEVEN_SENDS[comm.rank])
    return output.tolist()


def torch_all_to_all_single_complex(comm):
    mine = torch.tensor([1 + 1j, 2 + 2j, 3 + 3j, 4 + 4j], dtype=torch.cfloat) + 4 * comm.rank * (1 + 1j)
    output = torch.empty(4, dtype=torch.cfloat)
    comm.all_to_all_v(output, mine)
    return output.tolist()


EXAMPLES = {name: function for name, function in list(globals().items()) if name.startswith(("mindspore_", "torch_"))}


def run_examples(comm):
    """What each example gave on this rank."""
    return {name: example(comm) for name, example in EXAMPLES.items()}


def run_spawned(rank: int, world_size: int) -> None:
    """For `torch.multiprocessing.spawn(run_spawned, args=(world_size,), nprocs=world_size)`."""
    print_results(tw.init(rank=rank, world_size=world_size, device="cpu"))


def print_results(comm) -> None:
    """Rank 0 prints every rank's results, in one line."""
    results = comm.all_gather_object(run_examples(comm))
    comm.all_gather_object(None)  # nobody leaves before all have what they wait for
    if comm.rank == 0:
        print("RESULTS", results)
    comm.close()


if __name__ == "__main__":
    if sys.argv[1:] == ["spawn"]:
        torch.multiprocessing.spawn(run_spawned, args=(4,), nprocs=4)
    else:
        print_results(tw.init(device="cpu"))
