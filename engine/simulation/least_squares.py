"""Least squares for step times: no coefficient is negative, and a few slow steps change little.

Written in plain Python, because a plain install has no numpy and a fit has only a few terms.
"""

import statistics
from collections.abc import Sequence
from operator import mul

_NUM_ROUNDS = 12
_SETTLED = 1e-4  # the rounds end when no coefficient changes by more than this share
_HUBER = 1.5  # residuals beyond this many standard deviations count linearly
_NOTHING = 1e-10  # a smaller gain is only rounding


def fit_relative(
    rows: Sequence[Sequence[float]],
    seconds: Sequence[float],
    at_least: Sequence[float] | None = None,
) -> list[float]:
    """Find non-negative coefficients that make `sum(coefficient * term)` close to `seconds`.

    Minimises Huber's loss of the relative errors; all `seconds` must be above zero.

    Args:
        rows: the terms of each step, the same number for every step.
        at_least: lower bound of each coefficient; None: zero.
    """
    floors = at_least or [0.0] * len(rows[0])
    shares = [
        [term / each for term, each in zip(column, seconds, strict=True)]
        for column in zip(*rows, strict=True)
    ]
    wanted = [1 - sum(map(mul, floors, row)) for row in zip(*shares, strict=True)]
    weights = [1.0] * len(seconds)
    found: list[float] = []
    for _ in range(_NUM_ROUNDS):
        before, found = found, _weighted(shares, wanted, weights)
        if before and all(
            abs(new - old) <= _SETTLED * new for new, old in zip(found, before, strict=True)
        ):
            break
        predicted = [sum(map(mul, found, row)) for row in zip(*shares, strict=True)]
        residuals = [abs(each - share) for each, share in zip(predicted, wanted, strict=True)]
        limit = _HUBER * max(1.4826 * statistics.median(residuals), 1e-12)
        weights = [1.0 if each <= limit else limit / each for each in residuals]
    return [each + floor for each, floor in zip(found, floors, strict=True)]


def _weighted(
    columns: Sequence[Sequence[float]], targets: Sequence[float], weights: Sequence[float]
) -> list[float]:
    """Return non-negative coefficients that minimise the weighted sum of squared errors.

    That is `sum(weight * (row . coefficients - target)^2)`.
    """
    weighted = [list(map(mul, column, weights)) for column in columns]
    # Scale all columns to length 1, because the sizes of terms differ greatly.
    lengths = [
        sum(map(mul, one, other)) ** 0.5 or 1.0
        for one, other in zip(weighted, columns, strict=True)
    ]
    gram = [
        [
            sum(map(mul, one, other)) / (length * other_length)
            for other, other_length in zip(columns, lengths, strict=True)
        ]
        for one, length in zip(weighted, lengths, strict=True)
    ]
    wanted = [
        sum(map(mul, one, targets)) / length for one, length in zip(weighted, lengths, strict=True)
    ]
    found = _non_negative(gram, wanted)
    return [each / length for each, length in zip(found, lengths, strict=True)]


def _non_negative(gram: Sequence[Sequence[float]], wanted: Sequence[float]) -> list[float]:
    """Return the x that minimises `x.gram.x / 2 - wanted.x`, with no element below zero.

    Lawson and Hanson, Solving Least Squares Problems (1974), chapter 23.
    """
    count = len(wanted)
    found = [0.0] * count
    free: list[int] = []  # indices that are not held at zero
    for _ in range(3 * count):
        gains = [wanted[i] - sum(map(mul, gram[i], found)) for i in range(count)]
        best = max((i for i in range(count) if i not in free), key=gains.__getitem__, default=None)
        if best is None or gains[best] <= _NOTHING * max(map(abs, wanted)):
            break
        free.append(best)
        solved = _solved(gram, wanted, free)
        while min(solved.values()) <= 0:
            # Move until the first of them reaches zero, and hold that one there.
            share, first = min(
                (found[i] / ((found[i] - solved[i]) or 1.0), i) for i in free if solved[i] <= 0
            )
            for i in free:
                found[i] += share * (solved[i] - found[i])
            found[first] = 0.0
            free.remove(first)
            if not free:
                return found
            solved = _solved(gram, wanted, free)
        for i in free:
            found[i] = solved[i]
    return found


def _solved(
    gram: Sequence[Sequence[float]], wanted: Sequence[float], free: Sequence[int]
) -> dict[int, float]:
    """Return the minimum over the elements `free`, with all others at zero.

    Uses Gaussian elimination.
    """
    lines = [[gram[i][j] for j in free] + [wanted[i]] for i in free]
    count = len(free)
    for column in range(count):
        pivot = max(range(column, count), key=lambda line: abs(lines[line][column]))
        lines[column], lines[pivot] = lines[pivot], lines[column]
        top = lines[column]
        if abs(top[column]) < _NOTHING:
            top[column] = _NOTHING  # two terms are proportional: any split between them will do
        for line in lines[column + 1 :]:
            share = line[column] / top[column]
            for place in range(column, count + 1):
                line[place] -= share * top[place]
    values = [0.0] * count
    for column in reversed(range(count)):
        known = sum(map(mul, lines[column][column + 1 : count], values[column + 1 :]))
        values[column] = (lines[column][count] - known) / lines[column][column]
    return dict(zip(free, values, strict=True))
