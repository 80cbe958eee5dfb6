"""Properties of the small language model, and of the trained one that the package ships."""

from __future__ import annotations

import hashlib
import importlib.util
import math
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from tests.helpers.files import unnumbered
from thinwire.errors import CheckpointError
from thinwire.moe.checkpoint import save_checkpoint
from thinwire.tools.demo.tiny_moe import (
    HELD_OUT_PATH,
    TINY_MOE_PATH,
    TinyMoE,
    TinyMoEConfig,
    bits_per_byte,
    load_tiny_moe,
    text_windows,
)

SMALL = TinyMoEConfig(hidden_size=32, num_layers=2, num_heads=2, num_experts=4, ff_size=16, context=24)
CARD = TINY_MOE_PATH.with_name("MODEL_CARD.md")


class Peerless:
    """A stand-in for an ExpertParallel on a rank that receives nothing; it counts the rounds."""

    def __init__(self, local_experts: range, config: TinyMoEConfig) -> None:
        self.local_experts, self.comm = local_experts, SimpleNamespace(size=2)
        self.num_experts, self.top_k, self.hidden_size = config.num_experts, config.top_k, config.hidden_size
        self.rounds = 0

    def next_layer(self) -> int:
        return 1

    def dispatch(self, x, topk_ids, topk_weights, layer):
        counts = torch.zeros(len(self.local_experts), dtype=torch.int32)
        offsets = torch.zeros(len(self.local_experts) + 1, dtype=torch.int32)
        return SimpleNamespace(tokens=x[:0], expert_counts=counts, expert_offsets=offsets, like=x)

    def combine(self, expert_out, dispatched):
        self.rounds += 1
        return torch.zeros_like(dispatched.like)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors on a busy machine: threads that wait for each other cost far more than they save."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def shipped() -> TinyMoE:
    return load_tiny_moe()


@pytest.fixture(scope="module")
def training_script() -> ModuleType:
    path = Path(__file__).resolve().parents[1] / "examples" / "train_tiny_moe.py"
    spec = importlib.util.spec_from_file_location("train_tiny_moe", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def random_bytes(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(seed))


def test_a_later_byte_changes_no_earlier_logit():
    torch.manual_seed(0)
    model = TinyMoE(SMALL).eval()
    tokens = random_bytes(3, 20)
    changed = tokens.clone()
    changed[:, 12:] = (changed[:, 12:] + 100) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :12], after[:, :12], rtol=0, atol=2e-5)
    assert (before[:, 12:] - after[:, 12:]).abs().max() > 0.1


def test_the_order_of_earlier_bytes_matters():
    torch.manual_seed(0)
    # One layer: in a deeper model the causal mask alone tells positions apart.
    model = TinyMoE(TinyMoEConfig(**{**vars(SMALL), "num_layers": 1})).eval()
    tokens = random_bytes(1, 20)
    swapped = tokens.clone()
    swapped[:, [3, 9]] = swapped[:, [9, 3]]
    assert (model(tokens)[:, -1] - model(swapped)[:, -1]).abs().max() > 1e-3


@pytest.mark.parametrize("length", [0, 1, 24])
def test_no_sequences_still_take_one_round_per_layer(length: int):
    ep = Peerless(range(0, 2), SMALL)
    logits = TinyMoE(SMALL, ep=ep)(torch.zeros(0, length, dtype=torch.int64))
    assert logits.shape == (0, length, 256) and logits.dtype == torch.float32
    assert ep.rounds == SMALL.num_layers
    assert TinyMoE(SMALL)(torch.zeros(0, length, dtype=torch.int64)).shape == (0, length, 256)


def test_tokens_beyond_the_context_are_refused():
    with pytest.raises(ValueError, match="at most 24"):
        TinyMoE(SMALL)(torch.zeros(1, 25, dtype=torch.int64))
    with pytest.raises(ValueError, match="multiple"):
        TinyMoE(TinyMoEConfig(hidden_size=30, num_heads=4))


@pytest.mark.parametrize("length,context", [(2, 5), (6, 5), (7, 5), (11, 5), (23, 1), (1, 5), (0, 5)])
def test_windows_make_every_byte_but_the_first_a_target_once(length: int, context: int):
    text = bytes((7 * i) % 256 for i in range(length))
    targets: list[int] = []
    for inputs, expected in text_windows(text, context):
        assert inputs.shape == expected.shape and inputs.shape[1] <= context
        assert torch.equal(inputs[:, 1:], expected[:, :-1])
        targets += expected.flatten().tolist()
    assert targets == list(text[1:])


def test_bits_per_byte_is_eight_for_a_model_that_knows_nothing():
    model = TinyMoE(SMALL)
    torch.nn.init.zeros_(model.embedding.weight)
    assert bits_per_byte(model, bytes(range(100))) == pytest.approx(8.0, rel=1e-12)


def test_bits_per_byte_equals_a_loop_over_bytes_whatever_the_batch():
    torch.manual_seed(0)
    model = TinyMoE(TinyMoEConfig(**{**vars(SMALL), "dropout": 0.5})).train()
    text = bytes(random_bytes(1, 60)[0].tolist())
    got = [bits_per_byte(model, text, batch=batch) for batch in (1, 2, 16)]
    assert model.training
    model.eval()
    nats = 0.0
    for i in range(1, len(text)):
        start = (i - 1) // SMALL.context * SMALL.context
        logits = model(torch.tensor([list(text[start:i])]))[0, -1].double()
        nats -= F.log_softmax(logits, dim=0)[text[i]].item()
    assert got == pytest.approx([nats / math.log(2) / 59] * 3, rel=1e-6)
    with pytest.raises(ValueError, match="2 bytes"):
        bits_per_byte(model, b"a")


def test_configuration_survives_its_json_and_foreign_ones_are_refused():
    assert TinyMoEConfig.from_json(SMALL.to_json()) == SMALL
    for text in ("{", '{"depth": 3}', "[1]", "3"):
        with pytest.raises(CheckpointError, match="configuration"):
            TinyMoEConfig.from_json(text)


def test_a_file_without_a_configuration_is_refused(tmp_path: Path):
    save_checkpoint(TinyMoE(SMALL), tmp_path / "bare.safetensors", {"note": "none"})
    with pytest.raises(CheckpointError, match="'config'"):
        load_tiny_moe(tmp_path / "bare.safetensors")


def test_a_loaded_shard_holds_only_its_own_experts(shipped: TinyMoE):
    shard = load_tiny_moe(ep=Peerless(range(3, 6), TinyMoEConfig()))
    for name, tensor in shard.state_dict().items():
        whole = shipped.state_dict()[unnumbered(name)]
        assert torch.equal(tensor, whole[3:6] if ".experts." in name else whole), name


def test_shipped_model_has_the_promised_size(shipped: TinyMoE):
    assert TINY_MOE_PATH.stat().st_size <= 6_000_000
    assert 2_000_000 <= sum(p.numel() for p in shipped.parameters()) <= 3_000_000
    assert shipped.config.num_layers >= 3 and not shipped.training
    assert (shipped.config.num_experts, shipped.config.top_k, shipped.config.hidden_size) == (8, 2, 256)
    assert all(p.dtype == torch.float32 for p in shipped.parameters())


def test_shipped_model_scores_what_its_card_says_on_the_held_out_text(shipped: TinyMoE):
    bits = bits_per_byte(shipped, HELD_OUT_PATH.read_bytes())
    stated = re.search(r"held-out text\*\* \| \*\*([\d.]+) bits per byte", CARD.read_text(encoding="utf-8"))
    assert stated is not None
    assert bits == pytest.approx(float(stated[1]), abs=1e-3)
    assert bits <= 2.6


def test_held_out_text_is_what_the_card_says():
    digest = hashlib.sha256(HELD_OUT_PATH.read_bytes()).hexdigest()
    assert f"| held-out | `{digest}` |" in CARD.read_text(encoding="utf-8")
    assert 16 * 1024 <= HELD_OUT_PATH.stat().st_size <= 24 * 1024


def test_no_long_passage_of_the_held_out_text_is_in_the_training_text(training_script: ModuleType):
    names = training_script.heldout_topic_names()
    train_text, heldout = training_script.split_text(names)
    if heldout != HELD_OUT_PATH.read_bytes():
        pytest.skip("this Python has another version of the documentation text than the model was trained on")
    digest = hashlib.sha256(train_text).hexdigest()
    assert f"| training | `{digest}` |" in CARD.read_text(encoding="utf-8")
    seen = {train_text[i : i + 120] for i in range(len(train_text) - 119)}
    assert not any(heldout[i : i + 120] in seen for i in range(len(heldout) - 119))
