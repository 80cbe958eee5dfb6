"""The trainer of torchtitan on CPU ranks: a tiny Qwen3-MoE learns to count, with one dispatcher or another.

torchtitan is meant for GPUs. What stands in for one is all in `_pretend_that_cpus_are_enough`.
"""

from __future__ import annotations

import os
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from thinwire.comm import Communicator

VOCABULARY = 256


def losses(
    comm: Communicator, folder: str, steps: int, tensor_parallel: int, runs: list[dict[str, str] | None]
) -> list[list[float]]:
    """The loss of each step, for runs with these settings of thinwire's dispatcher; None for torchtitan's own.

    Experts are over two ranks, batches over as many as tensor parallelism leaves.
    """
    _pretend_that_cpus_are_enough(comm)
    return [_train(Path(folder), steps, tensor_parallel, settings) for settings in runs]


def _pretend_that_cpus_are_enough(comm: Communicator) -> None:
    os.environ |= {"LOCAL_RANK": str(comm.rank), "RANK": str(comm.rank), "WORLD_SIZE": str(comm.size)}
    vars(torch._utils)["_get_available_device_type"] = lambda: "cpu"
    vars(torch.cpu).update(
        get_device_name=lambda *_: "cpu",
        get_device_properties=lambda *_: types.SimpleNamespace(total_memory=1 << 34),
        memory_stats=lambda *_: {},
        reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
    )
    from torchtitan.distributed import utils

    vars(utils)["set_pg_timeouts"] = lambda *_, **__: None  # a barrier with numbers of devices


def _train(folder: Path, steps: int, tensor_parallel: int, settings: dict[str, str] | None) -> list[float]:
    from torch.distributed.fsdp import FSDPModule
    from torchtitan import trainer
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.config.override import OverrideConfig
    from torchtitan.models import qwen3
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention

    class Counting(BaseDataLoader):
        """Sequences whose tokens grow by 3."""

        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config: Config, *, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any) -> None:
            self.shape = (local_batch_size, seq_len)
            self.generator = torch.Generator().manual_seed(dp_rank)

        def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
            batch, length = self.shape
            positions = torch.arange(length).repeat(batch, 1)
            while True:
                first = torch.randint(0, VOCABULARY, (batch, 1), generator=self.generator)
                tokens = (first + 3 * torch.arange(length + 1)) % VOCABULARY
                yield {"input": tokens[:, :-1].contiguous(), "positions": positions}, tokens[:, 1:].contiguous()

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            assert not state_dict

    class NoTokenizer(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Config, **_: Any) -> None:
            super().__init__()

        def encode(self, *_: Any, **__: Any) -> list[int]:
            raise NotImplementedError

        def decode(self, *_: Any, **__: Any) -> str:
            raise NotImplementedError

        def get_vocab_size(self) -> int:
            return VOCABULARY

    def small(attn_backend: str, moe_comm_backend: str = "standard") -> Any:
        width = 64
        made = qwen3.Qwen3Model.Config(
            vocab_size=VOCABULARY,
            dim=width,
            norm=qwen3._qwen3_norm(width),
            tok_embeddings=qwen3.Embedding.Config(
                num_embeddings=VOCABULARY, embedding_dim=width, param_init=qwen3._EMBEDDING_INIT
            ),
            lm_head=qwen3.Linear.Config(in_features=width, out_features=VOCABULARY, param_init=qwen3._LINEAR_INIT),
            layers=qwen3._build_qwen3_moe_layers(
                n_layers=2, dim=width, n_heads=4, n_kv_heads=2, head_dim=16, moe_hidden_dim=96, num_experts=8, top_k=2,
                attn_backend=attn_backend, moe_comm_backend=moe_comm_backend,
                rope=qwen3.CosSinRoPE.Config(dim=16, max_seq_len=256, theta=1e6),
            ),
        )  # fmt: skip
        for _, _, parent, name in made.traverse(FlexAttention.Config):  # which has no backward on CPUs
            setattr(parent, name, ScaledDotProductAttention.Config())
        return made

    qwen3.qwen3_configs["small"] = small
    imports = [] if settings is None else [("thinwire.integrations.torchtitan.dispatcher", settings)]
    config = trainer.Trainer.Config(
        model_spec=qwen3.model_registry("small"),
        tokenizer=NoTokenizer.Config(),
        dataloader=Counting.Config(),
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY),
        metrics=MetricsProcessor.Config(log_freq=1),
        optimizer=default_adamw(lr=3e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=1),
        training=TrainingConfig(
            local_batch_size=2, seq_len=64, steps=steps, disable_cuda_graphs=True, mixed_precision_param="float32"
        ),
        parallelism=ParallelismConfig(
            # torch 2.13's fully_shard refuses the parameters of the other one, spmd_types.
            spmd_backend="partial_dtensor", expert_parallel_degree=2, tensor_parallel_degree=tensor_parallel,
        ),
        checkpoint=CheckpointManager.Config(enable=False),
        debug=trainer.DebugConfig(seed=7),
        override=OverrideConfig(imports=imports),
        dump_folder=str(folder),
    )  # fmt: skip
    run = config.build()
    for part in run.model_parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):  # else it divides in a reduction that Gloo does not have
                module.set_force_sum_reduction_for_comms(True)
    found: list[float] = []
    run.metrics_processor.log = lambda step, average, *_, **__: found.append(average)
    run.train()
    run.close()
    return found
