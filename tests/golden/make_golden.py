"""Writes records.json, the bytes that every format gives for one fixed row: `python -m tests.golden.make_golden`.

The row is made from integers, so that no random number generator has a say. Run it only when the wire's version
changes.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tests.helpers.wires import WIRES
from thinwire.triton_kernels.codec_reference import quantize_reference
from thinwire.wire import WIRE_VERSION, WireFormat

PATH = Path(__file__).with_name("records.json")
HIDDEN = 77


def golden_row() -> torch.Tensor:
    """float32 [1, 77]: both signs, zeros, -0.0, ties, and magnitudes from 2**-4 to 2**10."""
    numerators = (torch.arange(HIDDEN) * 7919 % 257 - 128).float()
    return (numerators * 2.0 ** ((torch.arange(HIDDEN) * 31 % 8) - 4).float()).view(1, HIDDEN)


def golden_records() -> dict[str, str]:
    """Hexadecimal record of the golden row in every format, and of its bfloat16 form."""
    row = golden_row()
    rows = {"float32": row, "bfloat16": row.bfloat16()}
    return {
        f"{spec} {name}": quantize_reference(x, WireFormat.parse(spec)).numpy().tobytes().hex()
        for spec in WIRES
        for name, x in rows.items()
    }


if __name__ == "__main__":
    PATH.write_text(json.dumps({"wire_version": WIRE_VERSION, "records": golden_records()}, indent=1) + "\n")
