"""Models that transformers sharded by FSDP2, with their parameters and gradients in wire formats; and its Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="`make test-all` installs transformers and runs this")
pytest.importorskip("numba", reason="CPU ranks need numba")

import transformers
from transformers.distributed import DistributedConfig

from tests.helpers.wires import relative_error
from tests.integrations.models import quiet
from thinwire.comm import Communicator
from thinwire.integrations import fsdp
from thinwire.testing import run_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=128, hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, initializer_range=0.2,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(made)
    return made


def _model(comm: Communicator, folder: str) -> Any:
    quiet()
    torch.set_num_threads(1)
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=DistributedConfig(fsdp_size=comm.size)
    )


def _step(comm: Communicator, folder: str) -> None:
    results = []
    for wires in (None, ("none", "none"), (None, "int8"), ("int8", "int8")):
        model = _model(comm, folder)
        if wires is not None:
            fsdp.quantize(model, *wires)
        batch = torch.randint(0, 128, (2, 17), generator=torch.Generator().manual_seed(comm.rank))
        found = model(input_ids=batch, labels=batch)
        found.loss.backward()
        gradients = [parameter.grad.full_tensor().flatten() for parameter in model.parameters()]
        results.append((found.logits.detach(), torch.cat(gradients)))
    (logits, gradients), exact, scattered, both = results
    assert torch.equal(exact[0], logits) and torch.equal(exact[1], gradients)
    assert torch.equal(scattered[0], logits)
    # Gradients of independent batches; then those of other parameters, in a model of large random ones.
    errors = (
        relative_error(gradients, scattered[1]),
        relative_error(logits, both[0]),
        relative_error(gradients, both[1]),
    )
    print(errors)
    assert 0.003 < errors[0] < 0.009 and 0.003 < errors[1] < 0.04 and errors[1] < errors[2] < 0.06, errors


def test_a_model_that_transformers_sharded(folder: Path) -> None:
    run_ranks(_step, 2, str(folder), timeout=120)


class _Quantize(transformers.TrainerCallback):
    """What the page shows."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        fsdp.quantize(model)


def _train(comm: Communicator, folder: str, out: str) -> list[float]:
    """The losses without and with the callback."""
    data = []
    for place in range(32):
        ids = torch.randint(0, 128, (16,), generator=torch.Generator().manual_seed(place))
        data.append({"input_ids": ids, "labels": ids})
    losses = []
    for callbacks in ([], [_Quantize()]):
        trainer = transformers.Trainer(
            model=_model(comm, folder),
            args=transformers.TrainingArguments(
                out, use_cpu=True, max_steps=6, per_device_train_batch_size=4, learning_rate=1e-2, report_to=[],
                save_strategy="no", disable_tqdm=True, logging_steps=100,
            ),
            train_dataset=data,
            callbacks=callbacks,
        )  # fmt: skip
        losses.append(trainer.train().training_loss)
    return losses


def test_the_trainer_of_transformers_with_a_callback(folder: Path, tmp_path: Path) -> None:
    for stock, quantised in run_ranks(_train, 2, str(folder), str(tmp_path), timeout=120):
        assert stock != quantised and abs(stock - quantised) < 0.01 * stock, (stock, quantised)
