"""Fits alpha and beta to measured points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from thinwire.errors import ArgumentError
from thinwire.tools.bench.results import Results


@dataclass(frozen=True)
class Point:
    """What was measured: bytes that leave a rank, on average, and the median of seconds of the slowest rank."""

    wire_bytes: float
    seconds: float


@dataclass(frozen=True)
class Fit:
    """What fits the points of one operation, implementation, wire, transport and routing best.

    Attributes:
        alpha: seconds.
        beta: bytes a second; infinite if more bytes take no longer.
        points: the measured points, by bytes.
        residuals: for each, (fitted - measured) / measured.
        r2: 1 - squares of the residuals in seconds / squares of the distances from their mean; 1 if all are equal.
    """

    alpha: float
    beta: float
    points: tuple[Point, ...]
    residuals: tuple[float, ...]
    r2: float

    def seconds(self, num_bytes: float) -> float:
        """Of a leg with so many bytes."""
        return self.alpha + num_bytes / self.beta


def fit_points(points: Sequence[Point]) -> Fit:
    """The alpha >= 0 and 1 / beta >= 0 with the least squares of relative residuals.

    Raises:
        ArgumentError: there are fewer than two different numbers of bytes.
    """
    if len({point.wire_bytes for point in points}) < 2:
        raise ArgumentError(
            f"{len(points)} points with one number of bytes were passed, expected at least two different ones"
        )
    points = sorted(points, key=lambda point: point.wire_bytes)
    num_bytes, seconds = (np.array([getattr(point, name) for point in points]) for name in ("wire_bytes", "seconds"))
    # Divided by what was measured, each point is one equation: alpha / t + bytes / (beta t) = 1.
    ones, slopes = 1 / seconds, num_bytes / seconds
    (alpha, inverse), *_ = np.linalg.lstsq(np.stack((ones, slopes), 1), np.ones(len(points)), rcond=None)
    # Where the best line has a negative part, the best without one lies on the border.
    if alpha < 0:
        alpha, inverse = 0.0, slopes.sum() / (slopes @ slopes)
    elif inverse < 0:
        alpha, inverse = ones.sum() / (ones @ ones), 0.0
    fitted = alpha + inverse * num_bytes
    spread = ((seconds - seconds.mean()) ** 2).sum()
    return Fit(
        float(alpha),
        float(1 / inverse) if inverse > 0 else float("inf"),
        tuple(points),
        tuple(((fitted - seconds) / seconds).tolist()),
        float(1 - ((fitted - seconds) ** 2).sum() / spread) if spread else 1.0,
    )


_Key = tuple[str, str, str, str | None, str | None]


def fit_results(results: Results) -> dict[_Key, Fit]:
    """Fits by operation, implementation, wire, transport and routing; leaves out those measured at one size only."""
    groups: dict[_Key, list[Point]] = {}
    for figure in results.figures:
        key = figure.operation, figure.implementation, figure.wire, figure.transport, figure.routing
        if figure.seconds is not None:  # a wrong result has none
            groups.setdefault(key, []).append(Point(figure.wire_bytes, figure.seconds.median))
    usable = {key: group for key, group in groups.items() if len({point.wire_bytes for point in group}) > 1}
    return {key: fit_points(group) for key, group in usable.items()}
