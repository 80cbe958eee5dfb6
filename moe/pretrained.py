"""Mixture-of-experts layers of Hugging Face checkpoints: read, each rank its own experts' bytes, and written back."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from thinwire.comm.tensors import is_int
from thinwire.errors import ArgumentError, CheckpointError
from thinwire.fields import Fields, Refused, parse_json, read_bytes, shown
from thinwire.moe.checkpoint import DTYPES, open_file, places_in, write_rows, write_together
from thinwire.moe.layer import MoELayer
from thinwire.moe.pretrained_families import LayerPlan, Piece, plan_layer

if TYPE_CHECKING:
    from thinwire.comm.communicator import Communicator
    from thinwire.moe.parallel import ExpertParallel

__all__ = ["load_moe_layer", "save_moe_layers"]

_FLOATS = ("F64", "F32", "F16", "BF16")
_DTYPES = tuple(DTYPES[name] for name in _FLOATS)
_CONFIG, _SINGLE, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"


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
    source = _Folder(folder)
    plan, first, common = _checked_plan(source, _layer_number(layer))
    made = _empty_layer(plan, ep, dtype or DTYPES[common])
    pieces = list(plan.pieces(made.local_experts))
    for piece in pieces:
        stored = _dtype_of(source, piece)
        if dtype is None and stored != common and "correction_bias" not in piece.views:
            raise CheckpointError(
                f"{source.path}: {piece.name} is {stored}, {first.name} {common}: pass the dtype that the layer is to "
                "have"
            )
    made = made.to_empty(device=torch.get_default_device() if device is None else device)
    for piece in pieces:
        part = source.tensor(piece.name)
        for value, view in _values_in(piece, made, part[:] if piece.row is None else part[piece.row]):
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
    comm = _group_of(layers)
    is_first = comm is None or comm.rank == 0

    def copy(unfinished: Path) -> None:
        if os.path.lexists(os.path.abspath(target)):
            raise CheckpointError(f"{target} is there already, expected the name of a folder to make")
        checkpoint = _Folder(source)
        for number, layer in layers.items():
            _fitting_plan(checkpoint, number, layer)
        checkpoint.copy_to(unfinished)

    def overwrite(unfinished: str) -> None:
        checkpoint = _Folder(unfinished)
        for number, layer in layers.items():
            for piece in _fitting_plan(checkpoint, number, layer).pieces(layer.local_experts):
                if piece.expert is not None or is_first:
                    shape = piece.shape if piece.row is None else piece.shape[1:]
                    stored = torch.empty(shape, dtype=DTYPES[_dtype_of(checkpoint, piece)], device="cpu")
                    for value, view in _values_in(piece, layer, stored):
                        view.copy_(value)
                    checkpoint.overwrite(piece.name, stored, piece.row)

    write_together(comm, target, "checkpoint", copy, overwrite)


class _Folder:
    """A Hugging Face checkpoint folder: config.json, and model.safetensors or an index with the files that it names.

    Attributes:
        path: the folder.
        settings: what config.json holds.
        file_of: the name of the file that each tensor is in.

    Raises:
        FileNotFoundError: there is no such folder.
        CheckpointError: a file is missing, or is not as it must be.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, str | os.PathLike):
            raise CheckpointError(f"the folder is a {type(path).__name__}, expected a str or a path")
        self.path = Path(path)
        if not self.path.exists():
            raise FileNotFoundError(f"there is no folder {path}")
        self.settings = self._read_json(_CONFIG)
        self._opened: dict[str, Any] = {}
        self._places: dict[str, dict[str, int]] = {}
        self.file_of: dict[str, str] = {}
        found = [name for name in (_SINGLE, _INDEX) if (self.path / name).exists()]
        if len(found) != 1:
            raise CheckpointError(
                f"{path} has {'both' if found else 'neither'} of {_SINGLE} and {_INDEX}, expected one of them; other "
                "kinds of file, such as pickles, are not read"
            )
        if found == [_SINGLE]:
            self.file_of = dict.fromkeys(self._open(_SINGLE).keys(), _SINGLE)
        else:
            self.file_of = self._read_json(_INDEX).get("weight_map", _weight_map)

    def tensor(self, name: str) -> Any:
        """A tensor's slice, as safetensors has it, of which nothing is read yet."""
        file = self._open(self.file_of[name])
        try:
            return file.get_slice(name)
        except SafetensorError as error:
            raise CheckpointError(f"{self.path / self.file_of[name]}: {error}") from error

    def overwrite(self, name: str, values: torch.Tensor, row: int | None) -> None:
        """Puts values of the file's dtype and shape in a tensor's place, or its row's."""
        file_name = self.file_of[name]
        path = self.path / file_name
        if file_name not in self._places:
            self._places[file_name] = places_in(path)
        with open(path, "r+b") as file:
            write_rows(file, self._places[file_name][name], values, None if row is None else [row])

    def copy_to(self, target: Path) -> None:
        """Makes a folder with copies of config.json, the index if there is one, and all files that hold tensors."""
        target.mkdir()
        files = set(self.file_of.values())
        for name in (_CONFIG, *([] if files == {_SINGLE} else [_INDEX]), *files):
            shutil.copyfile(self.path / name, target / name)

    def _open(self, name: str) -> Any:
        if name not in self._opened:
            try:
                self._opened[name] = open_file(self.path / name)
            except FileNotFoundError as error:
                raise CheckpointError(f"{self.path / name} cannot be read: {error}") from error
        return self._opened[name]

    def _read_json(self, name: str) -> Fields:
        content, source = read_bytes(self.path / name, CheckpointError)
        return Fields(parse_json(content, source, CheckpointError), source, CheckpointError)


def _weight_map(value: object) -> dict[str, str]:
    """Names of files in the folder itself, by tensor: what is written goes to the same names in another folder."""
    if not isinstance(value, dict):
        raise Refused("an object of file names")
    for name, file in value.items():
        if not isinstance(file, str) or file != os.path.basename(file) or not file.endswith(".safetensors"):
            raise CheckpointError(f" says that {shown(name)} is in {shown(file)}, expected a .safetensors file's name")
    return value


def _layer_number(layer: object) -> int:
    if not isinstance(layer, int) or not is_int(layer, 0):
        raise ArgumentError(f"layer is {layer!r}, expected an int of at least 0")
    return layer


def _checked_plan(folder: _Folder, layer: int) -> tuple[LayerPlan, Piece, str]:
    """A plan whose sizes are those of tensors that are there; the first of its experts' pieces, and its dtype."""
    plan = plan_layer(folder.path, folder.settings, folder.file_of.keys(), layer)
    for piece in plan.pieces(range(1)):
        dtype = _dtype_of(folder, piece)
        if piece.expert is not None:  # it has all sizes that are left, and is the same on all ranks
            return plan, piece, dtype
    raise AssertionError("a plan without experts")


def _empty_layer(plan: LayerPlan, ep: ExpertParallel | None, dtype: torch.dtype | None) -> MoELayer:
    """On meta: no memory is taken, and no random number, before everything is known to fit."""
    return MoELayer(**plan.arguments, gated=True, ep=ep, dtype=dtype, device="meta")


def _dtype_of(folder: _Folder, piece: Piece) -> str:
    """safetensors' name of the dtype of what a file holds for a piece, if it is as it should be."""
    found = folder.tensor(piece.name)
    dtype, shape = found.get_dtype(), found.get_shape()
    if shape != list(piece.shape) or dtype not in _FLOATS:
        raise CheckpointError(
            f"{folder.path}: {piece.name} is {dtype} {shape}, expected {' or '.join(_FLOATS)} {list(piece.shape)}"
        )
    return str(dtype)


def _values_in(piece: Piece, layer: MoELayer, stored: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The values of a layer that are in a piece, each beside its place in the piece."""
    values = layer.state_dict()
    pairs = []
    for parameter, view in piece.views.items():
        value = values[parameter + layer.experts.held * parameter.startswith("experts.")]
        if piece.expert is not None:
            value = value[layer.local_experts.index(piece.expert)]
        pairs.append((value, view(stored)))
    return pairs


def _fitting_plan(folder: _Folder, number: int, layer: MoELayer) -> LayerPlan:
    """The plan of a layer of the folder. Raises CheckpointError where this layer has other sizes or settings."""
    plan, *_ = _checked_plan(folder, number)
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
    return plan


def _group_of(layers: Mapping[int, MoELayer]) -> Communicator | None:
    """The communicator that the layers are sharded over, if they are."""
    if not isinstance(layers, Mapping) or not layers or not all(isinstance(x, MoELayer) for x in layers.values()):
        raise ArgumentError(f"layers is {repr(layers)[:200]}, expected a dict of at least one MoELayer by number")
    for number in layers:
        _layer_number(number)
    comms = {id(comm): comm for comm in (None if layer.ep is None else layer.ep.comm for layer in layers.values())}
    if len(comms) != 1:
        raise ArgumentError("layers is sharded over different groups, expected all whole or all of one group")
    return next(iter(comms.values()))
