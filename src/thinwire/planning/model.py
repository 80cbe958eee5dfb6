"""How long a leg takes, by a model of a latency and a bandwidth: a prediction, never a measurement."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.planning.traffic import Leg

#: The share of a link's nominal rate that rows of a round are taken to reach. Published kernels for GPUs reach 0.60 to
#: 0.72 of it with thousands of tokens, see docs/planning.md.
EFFICIENCY = 0.65


@dataclass(frozen=True)
class Link:
    """What connects a rank to its peers.

    Attributes:
        alpha: seconds that a leg takes with no bytes: launches, flags, and the way of the first byte.
        beta: bytes a second in one direction, of one GPU (or one network card, taken to be one GPU's).
        source: where beta is from.
    """

    alpha: float
    beta: float
    source: str


# Alpha is an assumption where GPUs are meant: 20 us is what published decode kernels need beside their bytes
# (docs/planning.md), with about as much again over a network card; Ethernet's is that of TCP between two processes.
LINKS = {
    "nvlink4": Link(20e-6, 450e9, "H100, H200: 18 links of 25 GB/s in each direction"),
    "nvlink4-h800": Link(20e-6, 200e9, "H800: 8 links of 25 GB/s in each direction; kernels end near 160 GB/s"),
    "nvlink5": Link(20e-6, 900e9, "B200, B300: 18 links of 50 GB/s in each direction"),
    "xgmi3": Link(20e-6, 448e9, "MI300X: 7 links of 64 GB/s in each direction"),
    "xgmi4": Link(20e-6, 537.6e9, "MI355X: 7 links of 76.8 GB/s in each direction"),
    "pcie4": Link(20e-6, 31.5e9, "16 lanes of 16 GT/s, 128b/130b"),
    "pcie5": Link(20e-6, 63e9, "16 lanes of 32 GT/s, 128b/130b"),
    "ib400": Link(40e-6, 50e9, "InfiniBand NDR, 400 Gbit/s, a card for each GPU"),
    "100gbe": Link(60e-6, 12.5e9, "Ethernet, 100 Gbit/s"),
    "10gbe": Link(60e-6, 1.25e9, "Ethernet, 10 Gbit/s"),
    "1gbe": Link(100e-6, 0.125e9, "Ethernet, 1 Gbit/s"),
}


@dataclass(frozen=True)
class Model:
    """Seconds of a leg: `alpha + bytes / (beta * efficiency)`, bytes being those of the busiest rank.

    With `between`, the links of two levels work at once, and the leg takes as long as the slower one: a token goes to
    each rank by itself, to those of one other host as well. Kernels that quantise, route and sum are taken to be hidden
    behind the link.
    """

    within: Link
    between: Link | None = None
    efficiency: float = EFFICIENCY

    def seconds(self, leg: Leg) -> float:
        """Of one leg."""
        if self.between is None:
            return self._over(self.within, leg.wire_bytes)
        return max(self._over(self.within, leg.within_bytes), self._over(self.between, leg.between_bytes))

    def _over(self, link: Link, num_bytes: float) -> float:
        return link.alpha + num_bytes / (link.beta * self.efficiency)
