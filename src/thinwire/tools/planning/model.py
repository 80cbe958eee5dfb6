"""The time of a leg, by a model of latency and bandwidth: a prediction, never a measurement. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from thinwire.errors import ArgumentError


@dataclass(frozen=True)
class Link:
    """The connection of a rank to its peers.

    Attributes:
        alpha: seconds of a leg without bytes: launches, flags, and the way of the first byte.
        beta: nominal bytes a second in one direction, of one GPU, or of one network card, assumed to serve one GPU.
        efficiency: the share of beta that a leg is assumed to reach.
        source: the source of beta.
    """

    alpha: float
    beta: float
    efficiency: float
    source: str


# Assumptions, all but beta. Between GPUs: 20 us is about what published decode kernels need beside their bytes, and
# published kernels with thousands of tokens reach 0.59 to 0.78 of the nominal rate (docs/planning.md). InfiniBand:
# DeepEP states 43 to 47 of 50 GB/s. Ethernet: TCP between processes.
LINKS = {
    "nvlink3": Link(20e-6, 300e9, 0.65, "A100: 12 links of 25 GB/s in each direction"),
    "nvlink4": Link(20e-6, 450e9, 0.65, "H100, H200: 18 links of 25 GB/s in each direction"),
    "nvlink4-h800": Link(20e-6, 200e9, 0.65, "H800: 8 links of 25 GB/s in each direction; kernels end near 160 GB/s"),
    "nvlink5": Link(20e-6, 900e9, 0.65, "B200, B300: 18 links of 50 GB/s in each direction"),
    "xgmi3": Link(20e-6, 448e9, 0.65, "MI300X: 7 links of 64 GB/s in each direction"),
    "xgmi4": Link(20e-6, 537.6e9, 0.65, "MI355X: 7 links of 76.8 GB/s in each direction"),
    "pcie4": Link(20e-6, 31.5e9, 0.65, "16 lanes of 16 GT/s, 128b/130b"),
    "pcie5": Link(20e-6, 63e9, 0.65, "16 lanes of 32 GT/s, 128b/130b"),
    "ib400": Link(40e-6, 50e9, 0.88, "InfiniBand NDR, 400 Gbit/s"),
    "100gbe": Link(60e-6, 12.5e9, 0.9, "Ethernet, 100 Gbit/s"),
    "10gbe": Link(60e-6, 1.25e9, 0.9, "Ethernet, 10 Gbit/s"),
    "1gbe": Link(100e-6, 0.125e9, 0.9, "Ethernet, 1 Gbit/s"),
}


@dataclass(frozen=True)
class Gpu:
    """A card with so much memory as its maker states, in 10^9 bytes, and its link to others of its host."""

    memory_gb: int
    link: str


GPUS = {
    "a100-40g": Gpu(40, "nvlink3"),
    "a100-80g": Gpu(80, "nvlink3"),
    "h100": Gpu(80, "nvlink4"),
    "h200": Gpu(141, "nvlink4"),
    "h800": Gpu(80, "nvlink4-h800"),
    "b200": Gpu(180, "nvlink5"),
    "mi300x": Gpu(192, "xgmi3"),
    "mi355x": Gpu(288, "xgmi4"),
}


@dataclass(frozen=True)
class Leg:
    """One leg of a round, as expected with uniform routing; bytes and rows of the rank that sends or receives most.

    Attributes:
        wire: its format.
        record_bytes: of one record.
        rows: records that leave the rank, or arrive there; `own_rows`: records that it keeps, which cross no link.
        within_bytes, between_bytes: bytes over the links within its host, and over those to other hosts.
    """

    name: str
    wire: str
    record_bytes: int
    rows: float
    own_rows: float
    within_bytes: float
    between_bytes: float

    @property
    def wire_bytes(self) -> float:
        """All bytes that leave the rank, or arrive there."""
        return self.within_bytes + self.between_bytes


@dataclass(frozen=True)
class Model:
    """Seconds of a leg: `alpha + bytes / (beta * efficiency)`, bytes being those of the busiest rank.

    With `between`, the links of two levels work at once, and the leg takes as long as the slower one. A token goes to
    each rank separately, even to ranks of one other host. Kernels that quantise, route and sum are assumed to be hidden
    behind the link.
    """

    within: Link
    between: Link | None = None

    def seconds(self, leg: Leg) -> float:
        """Predicts one leg."""
        if self.between is None:
            return seconds_over(self.within, leg.wire_bytes)
        return max(seconds_over(self.within, leg.within_bytes), seconds_over(self.between, leg.between_bytes))


def seconds_over(link: Link, num_bytes: float) -> float:
    """Predicts so many bytes over one link."""
    return link.alpha + num_bytes / (link.beta * link.efficiency)


def find_link(name: str) -> Link:
    """The link of that name.

    Raises:
        ArgumentError: there is none; the message names all links.
    """
    if name not in LINKS:
        raise ArgumentError(f"link {name!r} is not known; accepted: {', '.join(LINKS)}, or alpha and beta")
    return LINKS[name]


def find_gpu(name: str) -> Gpu:
    """The card of that name; raises as `find_link` does."""
    if name not in GPUS:
        raise ArgumentError(f"gpu {name!r} is not known; accepted: {', '.join(GPUS)}")
    return GPUS[name]


def chosen_model(
    link: str | None,
    alpha: float | None,
    beta: float | None,
    efficiency: float | None,
    hosts: int,
    inter_link: str | None,
) -> Model | None:
    """The model for these arguments; None without a link and a bandwidth.

    Args:
        alpha: microseconds, instead of the link's.
        beta: GB/s, instead of the link's; assumed to be reached, unless `efficiency` says otherwise.
        efficiency: instead of the links'.

    Raises:
        ArgumentError: a link is unknown, a number is out of range, or several hosts have no link between them.
    """
    for name, value, most in (("alpha", alpha, 1e9), ("beta", beta, 1e9), ("efficiency", efficiency, 1.0)):
        least = 0.0 if name == "alpha" else 1e-9
        if value is not None and not least <= value <= most:
            raise ArgumentError(f"{name} is {value!r}, expected a number from {least:g} to {most:g}")
    if link is None and beta is None:
        if alpha is not None or efficiency is not None or inter_link is not None:
            raise ArgumentError("no link and no beta was given, which alpha, efficiency or inter_link need")
        return None
    within = Link(0.0, 0.0, 1.0, "as given") if link is None else find_link(link)
    if alpha is not None:
        within = replace(within, alpha=alpha * 1e-6)
    if beta is not None:
        within = replace(within, beta=beta * 1e9, efficiency=1.0, source="as given")
    if hosts > 1 and inter_link is None:
        raise ArgumentError(f"no inter_link was given for {hosts} hosts, expected one of: {', '.join(LINKS)}")
    if hosts == 1 and inter_link is not None:
        raise ArgumentError(f"inter_link {inter_link} was given for one host, expected hosts of at least 2 with it")
    between = None if inter_link is None else find_link(inter_link)
    if efficiency is not None:
        within = replace(within, efficiency=efficiency)
        between = None if between is None else replace(between, efficiency=efficiency)
    return Model(within, between)
