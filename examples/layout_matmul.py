"""A matrix product over eight CPU ranks in named layouts: Y = X W, its partial sums reduce-scattered in int8.

    python examples/layout_matmul.py

X's columns and W's rows are cut over the axes sp and dp, so each rank of a group of four has a summand of the rows of Y
that mp gives it; the sum is made while it is cut over the same four ranks.
"""

from __future__ import annotations

import torch

import thinwire as tw
from thinwire.comm.layout import Layout, plan_redistribute
from thinwire.fused.redistribute import redistribute

LAYOUT = Layout((2, 2, 2), ("dp", "sp", "mp"))
X, W, Y = LAYOUT("mp", ("sp", "dp")), LAYOUT(("sp", "dp"), "None"), LAYOUT(("mp", "sp", "dp"), "None")
PRODUCT = LAYOUT("mp", "None").partial("sp", "dp")
ROWS, INNER, COLUMNS = 512, 1024, 2048
WIRES = ("none", "int8")


def run_rank(comm: tw.Communicator, wires: tuple[str, ...]) -> tuple[list[list[int]], list[float]]:
    """One rank: multiplies what it holds. Returns the shapes on the way, and each wire's error of its rows of Y."""
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(ROWS, INNER, generator=generator), torch.randn(INNER, COLUMNS, generator=generator)
    local_x, local_w = x[X.slices(x.shape, comm.rank)], w[W.slices(w.shape, comm.rank)]
    summand = local_x @ local_w
    expected = (x.double() @ w.double())[Y.slices((ROWS, COLUMNS), comm.rank)]
    local_ys = [redistribute(summand, PRODUCT, Y, wire=wire, comm=comm) for wire in wires]
    errors = [((local_y - expected).norm() / expected.norm()).item() for local_y in local_ys]
    return [list(part.shape) for part in (local_x, local_w, summand, local_ys[0])], errors


def main() -> None:
    plan = plan_redistribute((ROWS, COLUMNS), PRODUCT, Y)
    print(plan.explain())
    rows_sent = sum(step.elements for step in plan.steps) // COLUMNS
    for name in WIRES:
        record = tw.WireFormat.parse(name).row_bytes(COLUMNS, torch.float32)
        print(f"{name}: a rank sends {rows_sent} rows of {record} bytes, {rows_sent * record:,} in all")
    print("\nrank  X part     W part      summand of Y  Y part      relative errors: " + ", ".join(WIRES))
    for rank, (shapes, errors) in enumerate(tw.testing.run_ranks(run_rank, LAYOUT.size, WIRES)):
        x, w, summand, y = (f"{shape[0]} x {shape[1]}" for shape in shapes)
        shown = ", ".join(f"{error:.1e}" for error in errors)
        print(f"{rank:4}  {x:9}  {w:10}  {summand:12}  {y:10}  {shown}")


if __name__ == "__main__":
    main()
