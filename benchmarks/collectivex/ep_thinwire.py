"""thinwire as a backend of CollectiveX, InferenceX's benchmark of dispatch and combine.

It belongs beside that benchmark's other adapters: put this file into its `bench` folder, and have `run_ep.py` take
`ThinwireBackend` for `--backend thinwire`. With `--precision bf16` tokens travel in bfloat16, with `--precision fp8` in
THINWIRE_WIRE, else int8+h64; sums come back in bfloat16, as the benchmark's oracle wants. `args.wire` and
`args.combine_wire` choose otherwise; where sums come back quantised, `quantised_combine` tells the oracle so.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from ep_backend import EPBackend  # the benchmark's

import thinwire as tw
from thinwire.fused.codec import resolve_wire


class ThinwireBackend(EPBackend):  # type: ignore[misc]
    """Rounds of one `ExpertParallel`: one row for a token and rank, and back comes its experts' weighted sum there."""

    name = "thinwire"
    maturity = "candidate"
    SUPPORTED_MODES = ("normal",)
    SUPPORTED_PRECISIONS = ("bf16", "fp8")
    kernel_generation = "rounds"
    stage_device_work = True  # rows of the combine input are unpacked from what came
    requires_fresh_pair = True  # a round is dispatched and combined once
    receive_layout = "token-rank"
    combine_weight_semantics = "unweighted-rank-sum"

    def __init__(self, args: Any, rank: int, world_size: int, local_rank: int, device: torch.device) -> None:
        super().__init__(args, rank, world_size, local_rank, device)
        self.library_version = tw.__version__
        self.wire = resolve_wire(getattr(args, "wire", "none" if self.precision == "bf16" else None))
        self.combine_wire = resolve_wire(getattr(args, "combine_wire", "none"))
        if self.wire.quantized:
            self.dispatch_dtype, self.dispatch_value_bytes = str(self.wire), 1
            self.dispatch_scale_bytes_per_copy = self.wire.row_bytes(args.hidden) - args.hidden
            if self.dispatch_scale_bytes_per_copy < 0:
                raise ValueError(f"the wire is {str(self.wire)!r}; the benchmark counts whole bytes: use one of 8 bits")
        if self.combine_wire.quantized:
            self.combine_dtype = str(self.combine_wire)

    def create_buffer(self, spec: Any) -> None:
        """Allocates room for the largest number of tokens. Collective."""
        args = self.args
        self.ep = tw.ExpertParallel(
            dist.group.WORLD, args.experts, args.topk, args.hidden, spec.max_tokens_per_rank,
            wire=self.wire, combine_wire=self.combine_wire, dtype=torch.bfloat16,
        )  # fmt: skip

    def finalize(self, rc: int) -> int:
        """Gives the memory back, and ends the process group. Collective."""
        self.ep.close()
        code: int = super().finalize(rc)
        return code

    def semantic_payload(self, x: torch.Tensor) -> torch.Tensor:
        """What experts get of x: quantised and dequantised, where that is how it travels."""
        return tw.dequantize(tw.quantize(x, wire=self.wire)) if self.wire.quantized else x

    def dispatch(self, problem: Any) -> Any:
        """Sends the tokens; the handle has the round."""
        d = self.ep.dispatch(problem.dispatch_x, problem.topk_idx, problem.topk_weights)
        return types.SimpleNamespace(d=d)

    def stage(self, problem: Any, handle: Any) -> None:
        """The experts' stand-in: what came, one row a token."""
        known = getattr(problem, "recv_tokens", None)  # a number that would have to be waited for on a GPU
        handle.combine_input = handle.d.records if known is None else handle.d.gather_records(known).tokens

    def combine(self, problem: Any, handle: Any) -> torch.Tensor:
        """Sends the rows home, where those of a token are added."""
        return self.ep.combine(handle.combine_input, handle.d, weighted=True)

    def recv_tokens(self, handle: Any) -> int:
        """Rows that came."""
        return len(handle.d.records)

    def inspect_dispatch(self, problem: Any, handle: Any) -> Any:
        """What came: rows, their experts' ids among all ranks', -1 for none, weights, and rows of each expert here."""
        d = handle.d
        ids = torch.where(d.record_ids >= 0, d.record_ids + self.ep.local_experts.start, -1)
        return types.SimpleNamespace(
            payload=d.records, expert_ids=ids, weights=d.record_weights, local_expert_counts=d.expert_counts
        )

    def combine_transformed(self, problem: Any, handle: Any, transformed: torch.Tensor) -> torch.Tensor:
        """Combines the rows that the oracle made of those that came."""
        return self.ep.combine(transformed, handle.d, weighted=True)


@contextlib.contextmanager
def quantised_combine(harness: Any, ep: tw.ExpertParallel) -> Iterator[None]:
    """Meanwhile the oracle of `harness`, the benchmark's `ep_harness`, expects what `ep.combine` gives, not bfloat16.

    The benchmark models that each rank sends a row for each token in bfloat16. Here each such row is one of its own
    model, for the experts of one rank alone, and is quantised and dequantised before the rows are added. Its tolerance
    stays. A row's experts are summed in the order in which that rank has them, as another order may round to another
    bfloat16, and that to another step.
    """
    plain = harness._expected_transformed_combine

    def expected(torch_: Any, problem: Any, experts_per_rank: int, _: int, semantics: str, *reduction: Any) -> Any:
        ids, total = problem.topk_idx, torch.zeros_like(problem.oracle_x, dtype=torch.float32)
        for rank in range(ep.comm.size):
            here = (ids >= 0) & (ids // experts_per_rank == rank)
            sorted_ids, weights = harness._normalized_expert_metadata(
                torch_, torch.where(here, ids, -1), problem.topk_weights
            )
            alone = types.SimpleNamespace(**vars(problem) | {"topk_idx": sorted_ids, "topk_weights": weights})
            # All ranks are one domain: none adds up rows of others.
            rows = plain(torch_, alone, experts_per_rank, ep.comm.size, semantics, *reduction)
            sent = tw.quantize(rows.to(problem.oracle_x.dtype), wire=ep.combine_wire)
            total += tw.dequantize(sent, dtype=torch.float32)
        return total

    harness._expected_transformed_combine = expected
    try:
        yield
    finally:
        harness._expected_transformed_combine = plain
