"""`fit_relative`: a regression with non-negative coefficients, in which outliers count little."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats: TypeAlias = NDArray[np.float64]

_NUM_ROUNDS = 12
_SETTLED = 1e-4  # the rounds end when no coefficient changes by more than this share
_HUBER = 1.5  # residuals beyond this many standard deviations count linearly
_NOTHING = 1e-10  # a smaller gain is only rounding


def fit_relative(
    rows: "Sequence[Sequence[float]] | Floats",
    seconds: "Sequence[float] | Floats",
    at_least: Sequence[float] | None = None,
) -> list[float]:
    """Find non-negative coefficients that make `sum(coefficient * term)` close to `seconds`.

    Minimises Huber's loss of the relative errors, so that a few slow steps change little.

    Args:
        seconds: all above zero.
        at_least: lower bound of each coefficient; None: zero.
    """
    import numpy as np

    shares = np.asarray(rows) / np.asarray(seconds)[:, None]
    floors = np.zeros(shares.shape[1]) if at_least is None else np.array(at_least)
    wanted = 1 - shares @ floors
    weights = np.ones(len(shares))
    before: Floats | None = None
    for _ in range(_NUM_ROUNDS):
        found = _weighted(shares, wanted, weights)
        if before is not None and (abs(found - before) <= _SETTLED * found).all():
            break
        before = found
        residuals = abs(shares @ found - wanted)
        limit = _HUBER * max(1.4826 * float(np.median(residuals)), 1e-12)
        weights = limit / np.maximum(residuals, limit)
    coefficients: list[float] = (found + floors).tolist()
    return coefficients


def _weighted(rows: "Floats", targets: "Floats", weights: "Floats") -> "Floats":
    """Return the non-negative x that minimises `sum(weight * (row . x - target)^2)`."""
    import numpy as np

    weighted = rows * weights[:, None]
    # Scale all columns to length 1, because the sizes of terms differ greatly.
    lengths = np.sqrt((weighted * rows).sum(axis=0))
    lengths[lengths == 0] = 1.0
    gram = weighted.T @ rows / np.outer(lengths, lengths)
    found: Floats = _non_negative(gram, weighted.T @ targets / lengths) / lengths
    return found


def _non_negative(gram: "Floats", wanted: "Floats") -> "Floats":
    """Lawson and Hanson (1974), chapter 23: minimise `x.gram.x / 2 - wanted.x` for x >= 0."""
    import numpy as np

    found = np.zeros(len(wanted))
    is_free = np.zeros(len(wanted), dtype=bool)  # the others are held at zero
    for _ in range(3 * len(wanted)):
        gains = np.where(is_free, -np.inf, wanted - gram @ found)
        best = int(gains.argmax())
        if gains[best] <= _NOTHING * abs(wanted).max():
            break
        is_free[best] = True
        while is_free.any():
            solved = np.zeros(len(wanted))
            # If two terms are proportional, any split between them will do.
            solved[is_free] = np.linalg.lstsq(gram[is_free][:, is_free], wanted[is_free])[0]
            below = np.flatnonzero(is_free & (solved <= 0))
            if not len(below):
                break
            # Move until the first of them reaches zero, and hold that one there.
            gaps = found[below] - solved[below]
            ways = found[below] / np.where(gaps == 0, 1.0, gaps)
            found = found + ways.min() * (solved - found)
            first = below[ways.argmin()]
            found[first], is_free[first] = 0.0, False
        else:
            return found
        found = solved
    return found
