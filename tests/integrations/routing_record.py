"""Which experts vLLM's router has chosen for each token, so that a token whose router changed its mind can be told.

vLLM returns that itself (`enable_return_routed_experts`) where it runs with Triton, which it does not on CPUs. Here a
plugin wraps its functions, and each of its processes appends a line for each run of the model.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

Choices = dict[tuple[int, int, int], list[list[int]]]  # of (first token of a text, place, token): of each layer

VARIABLE = "ROUTING_RECORD"  # in the environment: the beginning of the names of files that processes write


def plugin(folder: Path) -> str:
    """Writes the metadata of a plugin of vLLM's, which vLLM finds in each of its processes by this PYTHONPATH."""
    metadata = folder / "routing_record-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: routing_record\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(f"[vllm.general_plugins]\nrouting_record = {__name__}:register\n")
    clone = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join([str(folder), clone, *filter(None, [os.environ.get("PYTHONPATH")])])


def register() -> None:
    """What vLLM calls in each of its processes, perhaps twice."""
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
    from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

    route, run = CPURouter._compute_routing, Qwen3MoeForCausalLM.forward
    if VARIABLE not in os.environ or route.__module__ == __name__:
        return
    to = Path(f"{os.environ[VARIABLE]}.{os.getpid()}.routing")
    layers: list[list[list[int]]] = []

    def routed(self: Any, *args: Any, **kwargs: Any) -> Any:
        weights, ids = route(self, *args, **kwargs)
        layers.append(ids.tolist())
        return weights, ids

    def ran(self: Any, input_ids: Any, positions: Any, *args: Any, **kwargs: Any) -> Any:
        layers.clear()
        result = run(self, input_ids, positions, *args, **kwargs)
        if not get_forward_context().attn_metadata:
            return result  # a run without requests, for ranks that have some: its tokens are left from an earlier one
        line = {"tokens": input_ids.tolist(), "places": positions.tolist(), "layers": layers}
        with to.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return result

    CPURouter._compute_routing, Qwen3MoeForCausalLM.forward = routed, ran


def chosen(beginning: Path) -> Choices:
    """What has been written into files of that beginning, by processes that had one text at a time.

    Ids of a layer are sorted: their order changes no sum.
    """
    found: Choices = {}
    for file in sorted(beginning.parent.glob(f"{beginning.name}*.routing")):
        text = -1
        for line in file.read_text().splitlines():
            ran = json.loads(line)
            text = ran["tokens"][0] if ran["places"][0] == 0 else text
            for row, (token, place) in enumerate(zip(ran["tokens"], ran["places"], strict=True)):
                found[text, place, token] = [sorted(layer[row]) for layer in ran["layers"]]
    return found


def same_routing(tokens: list[int], ours: Choices, theirs: Choices) -> list[bool]:
    """Of each place in a text, whether its token and all before it went to the same experts in both.

    Raises ValueError where a token at its place has not been seen in both.
    """
    so_far, same = True, []
    for place, token in enumerate(tokens):
        key = tokens[0], place, token
        if key not in ours or key not in theirs:
            raise ValueError(
                f"token {token} at place {place} was routed in {(key in ours) + (key in theirs)} of 2 runs"
            )
        so_far &= ours[key] == theirs[key]
        same.append(so_far)
    return same
