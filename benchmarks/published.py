"""Published figures of expert-parallel kernels, and what the model of `thinwire plan` says of the same legs.

None of these kernels is thinwire's. Their times are their authors' claims, taken on their machines; where they publish
a rate, the time is what was sent by that rate. `python -m benchmarks.published` prints the table that
docs/planning.md shows.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from thinwire.tools.planning.model import LINKS, seconds_over
from thinwire.tools.planning.plan import reach

_HIDDEN, _EXPERTS, _TOP_K = 7168, 256, 8
_ROW_BYTES = {
    "fp8": _HIDDEN + _HIDDEN // 128 * 4,  # a float32 scale for 128 elements
    "bf16": 2 * _HIDDEN,
}


@dataclass(frozen=True)
class Published:
    """One leg, of rows of 7168 elements; a token has 8 of 256 experts.

    Attributes:
        link: the machine's, one of LINKS.
        tokens: of a rank.
        sends: "fp8" or "bf16".
        seconds: as published; None where `rate` is, logical bytes a second, rows that stay included.
        assumed: what the source leaves open, and is taken to be so.
        per_expert: a row for each expert of a token, not for each rank.
        ranks: where they are not 8, each row goes to one of them.
    """

    kernels: str
    machine: str
    link: str
    leg: str
    tokens: int
    sends: str
    seconds: float | None
    rate: float | None = None
    per_expert: bool = False
    ranks: int = 8
    assumed: str = ""

    @property
    def logical_bytes(self) -> float:
        """What a rank sends, with rows that stay."""
        copies = _TOP_K if self.per_expert else sum(reach(_EXPERTS, _TOP_K, 8)) if self.ranks == 8 else 1
        return self.tokens * copies * _ROW_BYTES[self.sends]

    @property
    def link_bytes(self) -> float:
        """What of that crosses the link."""
        return self.logical_bytes * (self.ranks - 1) / self.ranks

    @property
    def measured(self) -> float:
        """Seconds, as published."""
        if self.seconds is not None:
            return self.seconds
        assert self.rate is not None
        return self.logical_bytes / self.rate

    def predicted(self, efficiency: float | None = None) -> float:
        """Seconds, by the model; with another efficiency, if one is given."""
        link = LINKS[self.link]
        return seconds_over(link if efficiency is None else replace(link, efficiency=efficiency), self.link_bytes)

    @property
    def share(self) -> float:
        """Of the link's nominal rate, which the published time reaches once alpha is over; 0 if it is shorter."""
        link = LINKS[self.link]
        beside = self.measured - link.alpha
        return self.link_bytes / (beside * link.beta) if beside > 0 else 0.0


@dataclass(frozen=True)
class BetweenHosts:
    """One leg over hosts of 8 GPUs, each with a card of 400 Gbit/s; a rank's 8192 tokens have 8 of 256 experts.

    Attributes:
        rate: logical bytes a second of a rank: of a row for each host that a token goes to, its own host included.
    """

    hosts: int
    leg: str
    sends: str
    rate: float

    @property
    def copies(self) -> float:
        """Hosts that a token goes to, its own included."""
        return sum(reach(_EXPERTS, _TOP_K, self.hosts))

    @property
    def measured(self) -> float:
        """Seconds, by the published rate."""
        return BETWEEN_TOKENS * self.copies * _ROW_BYTES[self.sends] / self.rate

    @property
    def link_bytes(self) -> float:
        """What crosses between hosts."""
        return BETWEEN_TOKENS * self.copies * _ROW_BYTES[self.sends] * (self.hosts - 1) / self.hosts


#: DeepEP v2, from its README: SM90 with CX7, "EP 8 x 2" and "EP 8 x 4", logical rates "(RDMA)", local traffic included,
#: 8K tokens. That they count hosts is what its tests/elastic/test_ep.py does (which adds ids and weights, about 1 %).
BETWEEN_TOKENS = 8192
BETWEEN = (
    BetweenHosts(2, "dispatch", "fp8", 90e9),
    BetweenHosts(2, "combine", "bf16", 81e9),
    BetweenHosts(4, "dispatch", "fp8", 61e9),
    BetweenHosts(4, "combine", "bf16", 61e9),
)

# 33.5 MB a rank over two ranks, of which half stays: 2337 rows of bfloat16.
_KRAKEN_ROWS = round(33.5e6 / _ROW_BYTES["bf16"])
_FP8_ASSUMED = "fp8 out, bf16 back"

PREFILL = (
    Published("DeepEP v1", "8 x H800", "nvlink4-h800", "dispatch", 4096, "fp8", None, 153e9),
    Published("DeepEP v1", "8 x H800", "nvlink4-h800", "combine", 4096, "bf16", None, 158e9),
    Published("UCCL-EP", "8 x H200", "nvlink4", "dispatch", 4096, "fp8", 500e-6),
    Published("UCCL-EP", "8 x H200", "nvlink4", "combine", 4096, "bf16", 973e-6),
    Published("DeepEP v2", "8 x B300", "nvlink5", "dispatch", 4096, "fp8", None, 732e9, assumed=_FP8_ASSUMED),
    Published("DeepEP v2", "8 x B300", "nvlink5", "combine", 4096, "bf16", None, 741e9, assumed=_FP8_ASSUMED),
    Published("MORI", "8 x MI300X", "xgmi3", "dispatch", 4096, "fp8", None, 307e9, assumed=_FP8_ASSUMED),
    Published("MORI", "8 x MI300X", "xgmi3", "combine", 4096, "bf16", None, 330e9, assumed=_FP8_ASSUMED),
    Published("kraken PR 32", "2 x H100", "nvlink4", "dispatch", _KRAKEN_ROWS, "bf16", 80e-6, ranks=2),
    Published("kraken PR 32", "2 x H100", "nvlink4", "combine", _KRAKEN_ROWS, "bf16", 83e-6, ranks=2),
)
_GARDEN = "NVLink of an H100, fp8 out, bf16 back, a row for each rank"
_PER_EXPERT = "fp8 out, bf16 back, a row for each expert"
DECODE = (
    Published("pplx-garden", "8 GPUs, CX7", "nvlink4", "dispatch", 128, "fp8", 50.5e-6, assumed=_GARDEN),
    Published("pplx-garden", "8 GPUs, CX7", "nvlink4", "combine", 128, "bf16", 65.3e-6, assumed=_GARDEN),
    Published("NCCL-EP", "8 x B200", "nvlink5", "dispatch", 128, "bf16", 43.9e-6, assumed="a row for each rank"),
    Published("NCCL-EP", "8 x B200", "nvlink5", "combine", 128, "bf16", 43.8e-6, assumed="a row for each rank"),
    Published("Triton-distributed LL v2", "8 x H800", "nvlink4-h800", "dispatch", 128, "fp8", 76e-6, None, True,
              assumed=_PER_EXPERT),
    Published("Triton-distributed LL v2", "8 x H800", "nvlink4-h800", "combine", 128, "bf16", 126e-6, None, True,
              assumed=_PER_EXPERT),
    Published("DeepEP LL", "8 x H800", "nvlink4-h800", "dispatch", 128, "fp8", 77e-6, None, True),
    Published("DeepEP LL", "8 x H800", "nvlink4-h800", "combine", 128, "bf16", 114e-6, None, True),
    Published("MORI", "8 x MI355X", "xgmi4", "dispatch", 128, "fp8", 31e-6, assumed=_FP8_ASSUMED),
    Published("MORI", "8 x MI355X", "xgmi4", "combine", 128, "bf16", 36e-6, assumed=_FP8_ASSUMED),
)  # fmt: skip


def efficiency_without(row: Published, rows: Sequence[Published] = PREFILL) -> float:
    """The median share that the other kernels of long messages reach: what could be known without this one."""
    return statistics.median(other.share for other in rows if other.kernels != row.kernels)


def table() -> str:
    """Markdown: published and predicted times, the model's error, and its error had the kernels not been looked at."""
    lines = [
        "| kernels, machine | leg | tokens | sends | published us | predicted us | error | without it |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in (*PREFILL, *DECODE):
        blind = row.predicted(efficiency_without(row))
        errors = (f"{100 * (seconds / row.measured - 1):+.0f} %" for seconds in (row.predicted(), blind))
        sends = f"{row.sends} x expert" if row.per_expert else row.sends
        times = " | ".join(f"{1e6 * seconds:.0f}" for seconds in (row.measured, row.predicted()))
        name = f"{row.kernels}, {row.machine}" + (" *" if row.assumed else "")
        lines.append(f"| {name} | {row.leg} | {row.tokens} | {sends} | {times} | {' | '.join(errors)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
