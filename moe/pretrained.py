"""Mixture-of-experts layers of Hugging Face checkpoints: read, each rank its own experts' bytes, and written back."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from thinwire.comm.tensors import is_int
from thinwire.errors import ArgumentError, CheckpointError
from thinwire.moe.checkpoint_folder import CheckpointFolder
from thinwire.moe.layer import MoELayer
from thinwire.moe.pretrained_families import LayerPlan, Piece, plan_layer
from thinwire.moe.safetensors_header import StoredTensor
from thinwire.moe.together import agree_on_path, together, unfinished_folder

if TYPE_CHECKING:
    from thinwire.comm.communicator import Communicator
    from thinwire.moe.parallel import ExpertParallel

__all__ = ["load_moe_layer", "save_moe_layers"]

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def load_moe_layer(
    folder: str | os.PathLike[str],
    layer: int,
    ep: ExpertParallel | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> MoELayer:
    """Read the mixture-of-experts block of one layer from a Hugging Face checkpoint.

    The folder holds config.json and safetensors files, one, or several with an index. Model types: mixtral, qwen3_moe,
    olmoe, deepseek_v3, gpt_oss; experts in tensors of their own, or fused (docs/checkpoints.md). With ``ep`` only the
    bytes of this rank's experts are read, and those of router and shared experts. What is read at once is one tensor,
    or, of a tensor with all experts, one expert's part: a rank never holds more than its layer and one such piece.
    Not collective: each rank reads by itself.

    Args:
        folder: the checkpoint. Nothing in it is run; what is read is checked before it is used.
        layer: its number, from 0.
        ep: the group that shares the experts; None to hold all of them.
        dtype: of the layer's weights: float64, float32, float16 or bfloat16; None for that of the file.
        device: where the layer is to be; None for torch's default device.

    Returns:
        A layer that computes what transformers' block does, to rounding; its sums and the weights of experts are
        float32 where transformers may round them to the layer's dtype.

    Raises:
        FileNotFoundError: there is no such folder.
        CheckpointError: the layer has no experts; the model is of another type, or quantised; or a file lacks
            something, or holds something more, or something of another shape or dtype.
        ArgumentError: ``layer`` is no number of a layer, or ``dtype`` none of these.
        ValueError: ``ep`` has other sizes than the layer.
    """
    if dtype is not None and dtype not in _DTYPES:
        raise ArgumentError(f"dtype is {dtype!r}, expected None or one of {', '.join(map(str, _DTYPES))}")
    with CheckpointFolder(folder) as source:
        plan, first = _checked_plan(source, _layer_number(layer))
        common = source.describe(first.name)
        made = _empty_layer(plan, ep, dtype or common.float_dtype)
        pieces = list(plan.pieces(made.local_experts))
        largest = 0
        for piece in pieces:
            found = _described(source, piece)
            largest = max(largest, found.bytes_of(piece.row))
            if dtype is None and found.dtype != common.dtype and piece.slots[0].parameter != "correction_bias":
                raise CheckpointError(
                    f"{source.path}: {piece.name} is {found.dtype}, {first.name} {common.dtype}: pass the dtype that "
                    "the layer is to have"
                )
        made = made.to_empty(device=torch.get_default_device() if device is None else device)
        # One for all pieces: the allocator may keep what is freed, and take more for the next.
        buffer = torch.empty(largest, dtype=torch.uint8, device="cpu")
        for piece in pieces:
            for value, view in _slots(piece, made, source.read(piece.name, piece.row, buffer)):
                value.copy_(view)
    return made


def save_moe_layers(
    layers: Mapping[int, MoELayer], source: str | os.PathLike[str], target: str | os.PathLike[str]
) -> None:
    """Write a copy of a Hugging Face checkpoint in which these layers' values stand in place of its own.

    Names, files, layout and dtypes stay as they are in ``source``: values are rounded to its dtypes. The copy has
    config.json, the index if there is one, and all of the safetensors files; tokenizers and the like are the caller's
    to copy. ``target`` appears only when it is complete. With sharded layers this is collective, and each rank writes
    its own experts: all ranks must see the folder that ``target`` is in.

    Args:
        layers: by number; what `load_moe_layer` returns for ``source``, trained or not. All whole, or all sharded
            over the same group.
        source: the checkpoint to copy; read on rank 0 only.
        target: the folder to make; there must be nothing yet.

    Raises:
        FileNotFoundError: there is no folder ``source``, or none that ``target`` could be in.
        ConfigMismatch: ranks give different targets.
        CheckpointError: ``source`` is refused, as `load_moe_layer` does; a layer does not
            fit it; ``target`` is there; or another rank could not write.
        ArgumentError: ``layers`` is empty or of several groups, or a key is no number of a layer.
        OSError: what the system says of writing.
    """
    comm, is_first = _group(layers)
    place = agree_on_path(comm, target)
    with contextlib.ExitStack() as stack:

        def copy() -> str:
            if os.path.lexists(place):
                raise CheckpointError(f"{target} is there already, expected the name of a folder to make")
            unfinished = Path(stack.enter_context(unfinished_folder(place))) / "checkpoint"
            with CheckpointFolder(source) as checkpoint:
                for number, layer in layers.items():
                    _check_fits(checkpoint, _checked_plan(checkpoint, number)[0], number, layer)
                checkpoint.copy_to(unfinished)
            return str(unfinished.resolve())

        unfinished = together(comm, "copy the checkpoint", copy if is_first else lambda: "")

        def overwrite() -> str:
            with CheckpointFolder(unfinished, writable=True) as checkpoint:
                for number, layer in layers.items():
                    plan, _ = _checked_plan(checkpoint, number)
                    _check_fits(checkpoint, plan, number, layer)
                    for piece in plan.pieces(layer.local_experts):
                        if piece.expert is not None or is_first:
                            _write(checkpoint, piece, layer)
            return ""

        together(comm, "write its experts", overwrite)

        def finish() -> str:
            os.rename(unfinished, place)
            return ""

        together(comm, "give the checkpoint its name", finish if is_first else lambda: "")


def _layer_number(layer: object) -> int:
    if not isinstance(layer, int) or not is_int(layer, 0):
        raise ArgumentError(f"layer is {layer!r}, expected an int of at least 0")
    return layer


def _checked_plan(folder: CheckpointFolder, layer: int) -> tuple[LayerPlan, Piece]:
    """A plan whose sizes are those of tensors that are there, and the first of its experts' pieces."""
    plan = plan_layer(folder, layer)
    for piece in plan.pieces(range(1)):
        _described(folder, piece)
        if piece.expert is not None:  # it has all sizes that are left, and is the same on all ranks
            return plan, piece
    raise AssertionError("a plan without experts")


def _empty_layer(plan: LayerPlan, ep: ExpertParallel | None, dtype: torch.dtype | None) -> MoELayer:
    """On meta: no memory is taken, and no random number, before everything is known to fit."""
    return MoELayer(
        plan.hidden_size,
        plan.ff_size,
        plan.num_experts,
        plan.top_k,
        activation=plan.activation,
        gated=True,
        expert_bias=plan.expert_bias,
        shared_ff_size=plan.shared_ff_size,
        router_config=plan.router_config,
        ep=ep,
        dtype=dtype,
        device="meta",
    )


def _described(folder: CheckpointFolder, piece: Piece) -> StoredTensor:
    """What a file holds for a piece, if it is as it should be."""
    found = folder.describe(piece.name)
    if found.shape != piece.shape or found.float_dtype is None:
        raise CheckpointError(
            f"{folder.path}: {piece.name} is {found.dtype} {list(found.shape)}, expected F64, F32, F16 or BF16 "
            f"{list(piece.shape)}"
        )
    return found


def _slots(piece: Piece, layer: MoELayer, stored: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The values of a layer that are in a piece, each beside its place in the piece."""
    values = layer.state_dict()
    pairs = []
    for slot in piece.slots:
        value = values[slot.parameter + layer.experts.held * slot.parameter.startswith("experts.")]
        if piece.expert is not None:
            value = value[layer.local_experts.index(piece.expert)]
        pairs.append((value, slot.view(stored)))
    return pairs


def _write(folder: CheckpointFolder, piece: Piece, layer: MoELayer) -> None:
    shape = piece.shape if piece.row is None else piece.shape[1:]
    stored = torch.empty(shape, dtype=_described(folder, piece).float_dtype, device="cpu")
    for value, view in _slots(piece, layer, stored):
        view.copy_(value)
    folder.write(piece.name, stored, piece.row)


def _check_fits(folder: CheckpointFolder, plan: LayerPlan, number: int, layer: MoELayer) -> None:
    fitting = _empty_layer(plan, layer.ep, None)
    expected, found = (
        {name: tuple(tensor.shape) for name, tensor in each.state_dict().items()}
        | {"top_k": each.top_k, "activation": each.experts.activation, "router": each.router_config}
        for each in (fitting, layer)
    )
    different = [name for name in {**expected, **found} if expected.get(name) != found.get(name)]
    if different:
        told = "; ".join(f"{name} {found.get(name)}, expected {expected.get(name)}" for name in different[:3])
        raise CheckpointError(f"layer {number} does not fit {folder.path}: it has {told}")


def _group(layers: Mapping[int, MoELayer]) -> tuple[Communicator | None, bool]:
    """The communicator that the layers are sharded over, if they are, and whether this rank is its first."""
    if not isinstance(layers, Mapping) or not layers or not all(isinstance(x, MoELayer) for x in layers.values()):
        raise ArgumentError(f"layers is {repr(layers)[:200]}, expected a dict of at least one MoELayer by number")
    for number in layers:
        _layer_number(number)
    comms = {id(comm): comm for comm in (None if layer.ep is None else layer.ep.comm for layer in layers.values())}
    if len(comms) != 1:
        raise ArgumentError("layers is sharded over different groups, expected all whole or all of one group")
    (comm,) = comms.values()
    return comm, comm is None or comm.rank == 0
