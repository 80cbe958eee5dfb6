"""Measures the collectives' error from quantising, in groups of 2 to 8 ranks.

    python -m benchmarks.bench_accuracy --json benchmarks/results/cpu/accuracy.json

Errors are relative L2 against float64, for int8 with a scale for every 128 elements. Ranks are threads. Rows have 7168
Gaussian elements in bfloat16, different on every rank. Columns:

    reduce_scatter   one leg
    16-bit gather    all_reduce(gather_wire="none")
    int8 both legs   all_reduce
    bias             of int8 both legs: how much longer or shorter the result is along the exact one
    beside outliers  the other channels, if four are fifty times as large; 16-bit gather
    cancelling       sums that are a hundredth of their summands; 16-bit gather
    of the summands  the same error relative to the length of a summand

The last three do not follow from those above: a group's error depends on its largest element, and a sum's on its
summands.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks import timing
from thinwire.comm import Communicator
from thinwire.fused.ops import all_reduce, reduce_scatter
from thinwire.testing import run_ranks

HIDDEN, ROWS = 7168, 8
COLUMNS = {
    "ranks": "d",
    "reduce_scatter": ".5f",
    "16-bit gather": ".5f",
    "int8 both legs": ".5f",
    "bias": "+.1e",
    "beside outliers": ".4f",
    "cancelling": ".3f",
    "of the summands": ".5f",
}


def errors_of_collectives(comm: Communicator, wire: str = "int8") -> dict[str, float]:
    """One rank's part: its errors in a wire format, by column. Collective.

    Raises:
        AssertionError: ranks ended with different bits.
    """
    generator = torch.Generator().manual_seed(7)
    tensors = [torch.randn(comm.size * ROWS, HIDDEN, generator=generator).bfloat16() for _ in range(comm.size)]
    noise = torch.randn(ROWS, HIDDEN, generator=generator).bfloat16()
    exact = torch.stack([tensor.double() for tensor in tensors]).sum(0)
    found = {}

    def note(name: str, got: torch.Tensor | object, wanted: torch.Tensor) -> None:
        assert isinstance(got, torch.Tensor)
        found[name] = float((got.double() - wanted).norm() / wanted.norm())

    x = tensors[comm.rank]
    note("reduce_scatter", reduce_scatter(x, wire=wire, comm=comm), exact.chunk(comm.size)[comm.rank])
    for name, gather_wire in (("16-bit gather", "none"), ("int8 both legs", wire)):
        got = all_reduce(x, wire=wire, gather_wire=gather_wire, comm=comm)
        assert isinstance(got, torch.Tensor)
        note(name, got, exact)
        assert all(torch.equal(other, got) for other in comm.all_gather_object(got)), "ranks disagree"
        found["bias"] = float((got.double() * exact).sum() / (exact * exact).sum() - 1)
    loud = x.clone()
    loud[:, :4] *= 50
    got = all_reduce(loud, wire=wire, gather_wire="none", comm=comm)
    assert isinstance(got, torch.Tensor)
    note("beside outliers", got[:, 4:], exact[:, 4:])
    # Ranks in pairs of opposite sign; in an odd group the last one has nothing.
    sign = 0.0 if comm.rank == comm.size // 2 * 2 else 1.0 if comm.rank % 2 else -1.0
    mine = (sign * noise + abs(sign) * 0.01 * x[:ROWS]).bfloat16()
    wanted = torch.stack([other.double() for other in comm.all_gather_object(mine)]).sum(0)
    note("cancelling", all_reduce(mine, wire=wire, gather_wire="none", comm=comm), wanted)
    found["of the summands"] = found["cancelling"] * float(wanted.norm() / noise.double().norm())
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = timing.parser(__doc__, repeats=None)
    parser.add_argument("--ranks", type=int, nargs="+", default=list(range(2, 9)))
    options = parser.parse_args(arguments)
    described = timing.machine(timing.check_device("cpu"))
    timing.print_machine(described)
    lines = [
        {"ranks": size, **run_ranks(errors_of_collectives, size, mode="thread", timeout=300)[0]}
        for size in options.ranks
    ]
    timing.finish(options, "accuracy", described, (lines, COLUMNS), lines)


if __name__ == "__main__":
    main()
