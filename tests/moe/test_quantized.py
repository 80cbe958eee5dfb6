"""What arrived in int8 is handed over in int8, in place, and nothing else is."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.speeds import exhaustive_but
from thinwire.comm.communicator import Communicator
from thinwire.errors import LaneError
from thinwire.moe.parallel import ExpertParallel
from thinwire.testing import run_ranks

HIDDEN, NUM_EXPERTS, TOP_K = 200, 5, 2


def _rows(comm: Communicator, transport: str, wires: list[str], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(comm.rank)
    for wire in wires:
        count = 7 - 7 * (comm.rank == 1)  # a rank has none
        with ExpertParallel(
            comm, num_experts=NUM_EXPERTS, top_k=TOP_K, hidden_size=HIDDEN, max_tokens=9, wire=wire,
            transport=transport, align=4,
        ) as ep:  # fmt: skip
            for _ in range(2):
                x = torch.randn(count, HIDDEN, generator=generator).to(dtype)
                if count:
                    x[0, 3] = torch.nan
                ids = torch.randint(-1, NUM_EXPERTS, (count, TOP_K), generator=generator)
                d = ep.dispatch(x, ids, torch.rand(count, TOP_K, generator=generator))
                q, tokens = d.quantized, d.tokens
                assert q.payload.dtype == torch.int8 and q.payload.data_ptr() == d.rows.data_ptr()
                assert q.scales.dtype == torch.float32 and q.index is d.index
                scales = q.scales.repeat_interleave(q.group, dim=1)[:, :HIDDEN]
                index = q.index[: len(tokens)]
                expected = torch.where((index >= 0)[:, None], (q.payload * scales)[index].to(dtype), 0)
                torch.testing.assert_close(tokens, expected, rtol=0, atol=0, equal_nan=True)
                ep.combine(tokens, d)
            with pytest.raises(LaneError):
                _ = d.quantized
            d = ep.dispatch(x.requires_grad_(), ids, torch.rand(count, TOP_K))
            with torch.no_grad():  # a round with gradients has them, too
                assert d.quantized.payload.shape == q.payload.shape
            d.abandon()


@pytest.mark.parametrize("transport", exhaustive_but(["direct"], ["direct", "staged"]))
def test_payload_times_scale_is_what_tokens_hold(transport: str) -> None:
    run_ranks(_rows, 2, transport, ["int8", "int8:32", "int8:row"], torch.float32, mode="thread", timeout=120)
    run_ranks(_rows, 2, transport, ["int8"], torch.bfloat16, mode="thread", timeout=120)
