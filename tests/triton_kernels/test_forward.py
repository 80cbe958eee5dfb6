"""Forwarding a message by Triton's interpreter: whatever is in it, stores stay where its source may store."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.helpers.rounds import make_lanes
from thinwire.comm import Communicator
from thinwire.testing import run_ranks
from thinwire.triton_kernels.round_layout import CONTROL_ROWS, Lane

pytest.importorskip("triton", reason="the kernel is Triton's")

SOURCE, NEAR, WORLD, TOP_K, MOST = 1, (2, 3), 4, 3, 3


def _lanes_on_two_hosts() -> list[Lane]:
    """Of two hosts of two ranks; those of the other host cannot be reached."""
    lanes = make_lanes(WORLD, 8, TOP_K, 64, MOST)
    made = []
    for lane in lanes:
        layout, bases = replace(lane.layout, MEMBERS=2), lane.buffer_ptrs.clone()
        bases[[rank for rank in range(WORLD) if rank // 2 != lane.rank // 2]] = int(bases[lane.rank])
        made.append(replace(lane, layout=layout, buffer_ptrs=bases))
    return made


def _forward_anything(comm: Communicator) -> None:
    from thinwire.triton_kernels.forward import forward_tokens

    for seed, told in enumerate((2, -1, -(2**31), 2**31 - 1)):
        generator = torch.Generator().manual_seed(seed)
        lanes = _lanes_on_two_hosts()
        lane, layout = lanes[NEAR[1]], lanes[0].layout
        size = layout.MESSAGE_RECORDS + MOST * layout.RECORD_BYTES
        message = torch.randint(-128, 128, (size,), generator=generator, dtype=torch.int8)
        words = message.view(torch.int32)
        words[:3] = torch.tensor([7, told, 9], dtype=torch.int32)
        for one in lanes:
            one.buffer.fill_(0x5A)
        forward_tokens(lane, message, SOURCE, torch.bfloat16)
        for one in lanes:
            allowed = torch.zeros(layout.NUM_BYTES, dtype=torch.bool)
            if one.rank in NEAR:
                for offset, each in (
                    (layout.IDS, MOST * TOP_K * 4), (layout.WEIGHTS, MOST * TOP_K * 4),
                    (layout.RECORDS, MOST * layout.RECORD_BYTES), (layout.SIGNALS, layout.LINE_BYTES),
                ):  # fmt: skip
                    allowed[offset + SOURCE * each :][:each] = True
                lines = one.buffer[layout.SIGNALS :].view(torch.int32).view(-1, layout.LINE_BYTES // 4)
                assert lines[SOURCE, :3].tolist() == [7, told, 9]
            if one.rank == lane.rank:  # the combine lines of the other host's ranks
                allowed[layout.COMBINE_SIGNALS :][: 2 * layout.LINE_BYTES] = True
            assert bool((one.buffer[~allowed] == 0x5A).all()), (told, one.rank)
        assert not lane.control[CONTROL_ROWS:].any()


def test_whatever_a_message_says_stores_stay_in_their_places() -> None:
    run_ranks(_forward_anything, 1, env={"TRITON_INTERPRET": "1"}, timeout=100)
