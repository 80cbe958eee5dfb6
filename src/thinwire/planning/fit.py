"""Alpha and beta from measured points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from thinwire.errors import ArgumentError
from thinwire.planning.results import Figure, Results


@dataclass(frozen=True)
class Fit:
    """What fits the points of one operation, implementation, wire, transport and routing best.

    Attributes:
        alpha: seconds.
        beta: bytes a second; infinite where more bytes take no longer.
        figures: the points, by bytes.
        residuals: for each, (fitted - measured) / measured.
        r2: 1 - squares of the residuals in seconds / squares of the distances from their mean; 1 if all are equal.
    """

    alpha: float
    beta: float
    figures: tuple[Figure, ...]
    residuals: tuple[float, ...]
    r2: float

    def seconds(self, num_bytes: float) -> float:
        """Of a leg with so many bytes."""
        return self.alpha + num_bytes / self.beta


def fit_figures(figures: Sequence[Figure]) -> Fit:
    """The alpha >= 0 and 1 / beta >= 0 with the least squares of relative residuals.

    Raises:
        ArgumentError: fewer than two different numbers of bytes, from which no line follows.
    """
    if len({figure.wire_bytes for figure in figures}) < 2:
        raise ArgumentError(
            f"{len(figures)} points with one number of bytes were passed, expected at least two different ones"
        )
    figures = sorted(figures, key=lambda figure: figure.wire_bytes)
    num_bytes, seconds = (np.array([getattr(figure, name) for figure in figures]) for name in ("wire_bytes", "seconds"))
    # Divided by what was measured, each point is one equation: alpha / t + bytes / (beta t) = 1.
    ones, slopes = 1 / seconds, num_bytes / seconds
    (alpha, inverse), *_ = np.linalg.lstsq(np.stack((ones, slopes), 1), np.ones(len(figures)), rcond=None)
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
        tuple(figures),
        tuple(((fitted - seconds) / seconds).tolist()),
        float(1 - ((fitted - seconds) ** 2).sum() / spread) if spread else 1.0,
    )


_Key = tuple[str, str, str, str | None, str | None]


def fit_results(results: Results) -> dict[_Key, Fit]:
    """By operation, implementation, wire, transport and routing; what was measured at one size alone is left out."""
    groups: dict[_Key, list[Figure]] = {}
    for figure in results.figures:
        key = figure.operation, figure.implementation, figure.wire, figure.transport, figure.routing
        groups.setdefault(key, []).append(figure)
    usable = {key: group for key, group in groups.items() if len({figure.wire_bytes for figure in group}) > 1}
    return {key: fit_figures(group) for key, group in usable.items()}
