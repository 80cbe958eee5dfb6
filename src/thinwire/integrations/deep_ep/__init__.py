"""DeepEP's Python API over thinwire, for programs that import `deep_ep`; it needs no CUDA build, NVLink or RDMA.

    import thinwire.integrations.deep_ep as deep_ep
    deep_ep.install()  # before what imports deep_ep

docs/integrations-deep-ep.md has what differs from DeepEP, and what was run.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
import types
from typing import Any

from thinwire.fused.codec import resolve_wire
from thinwire.integrations.deep_ep.elastic import ElasticBuffer, EPHandle
from thinwire.integrations.deep_ep.events import EventHandle, EventOverlap
from thinwire.integrations.deep_ep.legacy import Buffer, Config
from thinwire.integrations.deep_ep.routes import GroupOfBuffer, topk_idx_t
from thinwire.log import LOGGER

__version__ = "2.1.0"  # of the API
__all__ = ["Buffer", "Config", "EPHandle", "ElasticBuffer", "EventHandle", "EventOverlap", "install", "topk_idx_t"]


def install(
    *, wire: str | None = None, combine_wire: str | None = None, grad_wire: str | None = None, replace: bool = False
) -> Any:
    """Registers `deep_ep` and `deep_ep.utils` in `sys.modules`, before what imports them, and returns the first.

    Args:
        wire, combine_wire, grad_wire: formats of tokens, sums and gradients, of all buffers made from now on. None
            means that of THINWIRE_DEEP_EP_WIRES, which has the three by commas; else THINWIRE_WIRE or int8 for tokens,
            the same for sums, and `none` for gradients.
        replace: also where DeepEP itself is installed; else that stays in use, and a warning says so.

    Raises:
        WireFormatError: a format is unknown.
    """
    for each in (wire, combine_wire, grad_wire):
        resolve_wire(each)
    ours = isinstance(sys.modules.get("deep_ep"), _Module)
    if not ours and not replace and importlib.util.find_spec("deep_ep") is not None:
        LOGGER.warning("DeepEP is installed and stays in use: install(replace=True) puts thinwire in its place")
        return importlib.import_module("deep_ep")
    GroupOfBuffer.installed = wire, combine_wire, grad_wire
    module = _register("deep_ep", (*__all__, "__version__"))
    module.utils = _register("deep_ep.utils", ("EventHandle", "EventOverlap"))
    return module


class _Module(types.ModuleType):
    """One that stands for another package's."""


def _register(name: str, names: tuple[str, ...]) -> Any:
    module: Any = _Module(name, __doc__)
    module.__path__, module.__spec__ = [], importlib.machinery.ModuleSpec(name, None, is_package=True)
    for each in names:
        setattr(module, each, globals()[each])
    sys.modules[name] = module
    return module
