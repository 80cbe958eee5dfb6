"""A model of transformers whose experts `tw.MoELayer` holds: trained, saved and resumed on ranks as the whole one."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint

pytest.importorskip("transformers", reason="`make test-all` installs transformers and runs this")
pytest.importorskip("numba", reason="CPU ranks need numba")

import transformers

import thinwire as tw
from tests.helpers.speeds import exhaustive_but
from thinwire.comm import Communicator
from thinwire.testing import run_ranks

WORDS, HIDDEN, EXPERTS, TOP_K, TEXTS, LENGTH = 64, 32, 4, 2, 6, 12


def whole_model() -> Any:
    config = transformers.Qwen3MoeConfig(
        vocab_size=WORDS, hidden_size=HIDDEN, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_experts=EXPERTS, num_experts_per_tok=TOP_K,
        norm_topk_prob=True, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.Qwen3MoeForCausalLM(config)


def steps(comm: Communicator | None, model: torch.nn.Module, optimizer: Any, numbers: range) -> list[float]:
    """Losses, and the norms of gradients."""
    rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
    told = []
    for number in numbers:
        texts = torch.randint(WORDS, (TEXTS, LENGTH), generator=torch.Generator().manual_seed(number))[rank::size]
        optimizer.zero_grad()
        loss = model(input_ids=texts, labels=texts).loss
        loss.backward()
        norm = tw.clip_grad_norm_(model, 1.0)
        optimizer.step()
        mean = loss.detach() / size
        if comm is not None:
            comm.all_reduce(mean)
        told += [mean.item(), norm.item()]
    return told


def over_ranks(comm: Communicator, folder: str, fused: bool, saves: bool) -> list[float]:
    ep = tw.ExpertParallel(comm, EXPERTS, TOP_K, HIDDEN, TEXTS * LENGTH, wire="none")
    model = whole_model()
    for number, layer in enumerate(model.model.layers):
        layer.mlp = tw.load_moe_layer(f"{folder}/whole", layer=number, ep=ep)
    if not saves:
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, 0.1)
    parallel = tw.distributed(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 if saves else 9.0, fused=fused)
    state = {"training": tw.TrainingState(parallel, optimizer)}
    if saves:
        told = steps(comm, parallel, optimizer, range(2))
        checkpoint.save(state, checkpoint_id=f"{folder}/saved")
    else:
        checkpoint.load(state, checkpoint_id=f"{folder}/saved")
        told = steps(comm, parallel, optimizer, range(2, 4))
    ep.close()
    return told


@pytest.mark.parametrize(
    ("fused", "ranks"), exhaustive_but([(True, 3)], [*itertools.product((False, True), (3, 1, 2))], several=True)
)
def test_ranks_save_and_others_resume_as_transformers_own_model_trains(fused: bool, ranks: int, tmp_path: Path) -> None:
    model = whole_model()
    model.save_pretrained(tmp_path / "whole")
    wanted = steps(None, model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused), range(4))
    for told in run_ranks(over_ranks, 2, str(tmp_path), fused, True):
        assert told == pytest.approx(wanted[:4], rel=2e-5)
    for told in run_ranks(over_ranks, ranks, str(tmp_path), fused, False):
        assert told == pytest.approx(wanted[4:], rel=2e-5)
