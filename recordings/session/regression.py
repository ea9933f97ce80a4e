"""`FittedModel`: step times learned from steps that ran, by `fit_relative`.

The cycle of a step (the time from the tokens of the step before it to its own) is a constant, plus
a cost for each prefill token, each decode, each query-key pair of prefills, each key token that
decodes attend to, and each request that prefills. No coefficient is negative, and outliers count
little. A prediction is marked as extrapolated if the step is much larger than all measured steps.
"""

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise
from operator import gt, mul
from typing import NamedTuple

from msgspec import Struct

from stepscope.engine.protocol.knobs import ConfigError
from stepscope.engine.simulation.step_time import StepShape, StepTime
from stepscope.recordings.state.lazy_numpy import Floats, np

LEAST_S = 5.0  # time in steps that tells how far a fit is off, as a forecast must know

_NUM_ROUNDS = 12
_SETTLED = 1e-4  # the rounds end when no coefficient changes by more than this share
_HUBER = 1.5  # residuals beyond this many standard deviations count linearly
_NOTHING = 1e-10  # a smaller gain is only rounding


def fit_relative(
    rows: Sequence[Sequence[float]] | Floats, seconds: Sequence[float] | Floats
) -> list[float]:
    """Find non-negative coefficients that make `sum(coefficient * term)` close to `seconds`.

    Minimises Huber's loss of the relative errors, so that a few slow steps change little.

    `seconds`: all above zero.
    """
    shares = np.asarray(rows) / np.asarray(seconds)[:, None]
    wanted = weights = np.ones(len(shares))
    before: Floats | None = None
    for _ in range(_NUM_ROUNDS):
        found = _weighted(shares, wanted, weights)
        if before is not None and (abs(found - before) <= _SETTLED * found).all():
            break
        before = found
        residuals = abs(shares @ found - wanted)
        limit = _HUBER * max(1.4826 * float(np.median(residuals)), 1e-12)
        weights = limit / np.maximum(residuals, limit)
    coefficients: list[float] = found.tolist()
    return coefficients


def _weighted(rows: Floats, targets: Floats, weights: Floats) -> Floats:
    """Return the non-negative x that minimises `sum(weight * (row . x - target)^2)`."""
    weighted = rows * weights[:, None]
    # Scale all columns to length 1, because the sizes of terms differ greatly.
    lengths = np.sqrt((weighted * rows).sum(axis=0))
    lengths[lengths == 0] = 1.0
    gram = weighted.T @ rows / np.outer(lengths, lengths)
    found: Floats = _non_negative(gram, weighted.T @ targets / lengths) / lengths
    return found


def _non_negative(gram: Floats, wanted: Floats) -> Floats:
    """Lawson and Hanson (1974), chapter 23: minimise `x.gram.x / 2 - wanted.x` for x >= 0."""
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


MIN_STEPS = 60
TERMS = ("step", "prefill token", "decode", "prefill pair", "context token", "prefill")
_MIN_SHAPES = 8  # different shapes: with fewer, a fit is a guess
_MAX_STEPS = 5_000  # of more steps, this many are picked evenly
_NUM_FOLDS = 5
_REACH = 1.5  # a prediction beyond this multiple of the largest measured term is extrapolated
_STOPPED = 3.0  # a step that took this multiple of the fit was stopped by something else


class SeenStep(NamedTuple):
    """A step that ran. `cycle_s` is the time from the tokens of the step before it to its own."""

    shape: StepShape
    cycle_s: float
    host_s: float | None = None  # host's part of it; None: unknown, or hidden by the step before


class FittedModel(Struct, frozen=True, kw_only=True):
    """A `StepTimeModel` fitted to measured steps. It predicts the mean, so that sums are right."""

    seconds: tuple[float, ...]  # the coefficient of each of `TERMS`
    num_steps: int
    reach: tuple[float, ...]  # the greatest value of each of `TERMS` that is not extrapolated
    median_error: float
    p90_error: float
    spread: float
    host_s: float

    def step_time(self, shape: StepShape) -> StepTime:
        terms = terms_of(shape)
        cycle_s = sum(map(mul, self.seconds, terms))
        is_far = any(map(gt, terms, self.reach))
        host_s = min(self.host_s, cycle_s)
        return StepTime(cycle_s - host_s, host_s, self.spread, is_far)

    def in_words(self) -> str:
        return (
            f"fitted on {self.num_steps:,} steps; on steps not seen the median error is "
            f"{self.median_error:.1%}, one in ten is above {self.p90_error:.1%}"
        )


def terms_of(shape: StepShape) -> tuple[float, ...]:
    """Return the numbers by which a step's coefficients are multiplied, in the order of `TERMS`."""
    return (
        1.0,
        float(shape.num_prefill_tokens),
        float(shape.num_decodes),
        float(shape.num_prefill_pairs),
        float(shape.num_context_tokens),
        float(shape.num_prefills),
    )


def fit(steps: Sequence[SeenStep]) -> FittedModel:
    """Fit a model to steps in their order. Raises ConfigError if they are too few or alike."""
    steps = [step for step in steps if step.cycle_s > 0]
    _check(steps)
    if len(steps) > _MAX_STEPS:
        steps = steps[:: math.ceil(len(steps) / _MAX_STEPS)]
    rows = np.array([terms_of(step.shape) for step in steps])
    seconds = [step.cycle_s for step in steps]
    pairs = list(zip(_predicted_unseen(rows, np.array(seconds)), seconds, strict=True))
    ran = [(found_s, each_s) for found_s, each_s in pairs if each_s <= _STOPPED * found_s]
    # The fit predicts typical steps, and slow ones are further from it than fast ones. Scaling
    # makes the sum right.
    scale = sum(each_s for _, each_s in ran) / sum(found_s for found_s, _ in ran)
    sizes = sorted(abs(scale * found_s / each_s - 1) for found_s, each_s in pairs)
    hosts = [step.host_s for step in steps if step.host_s is not None]
    return FittedModel(
        seconds=tuple(scale * each for each in fit_relative(rows, seconds)),
        num_steps=len(steps),
        reach=tuple((rows.max(axis=0) * _REACH).tolist()),
        median_error=statistics.median(sizes),
        p90_error=sizes[round(0.9 * (len(sizes) - 1))],
        spread=statistics.pstdev(math.log(each_s / found_s) for found_s, each_s in ran),
        host_s=statistics.median(hosts) if hosts else 0.0,
    )


def _check(steps: Sequence[SeenStep]) -> None:
    more = "record for longer, under a load that comes and goes"
    if len(steps) < MIN_STEPS:
        raise ConfigError(
            "too_few_steps", f"a fit takes {MIN_STEPS} steps, and there are {len(steps)}: {more}"
        )
    num_shapes = len({(step.shape.num_prefill_tokens, step.shape.num_decodes) for step in steps})
    if num_shapes < _MIN_SHAPES:
        raise ConfigError(
            "steps_too_alike",
            f"the {len(steps)} steps are too much alike for a fit, {num_shapes} kinds by prefill "
            f"tokens and decodes: {more}, or change max_num_batched_tokens meanwhile",
        )


def _predicted_unseen(rows: Floats, seconds: Floats) -> list[float]:
    """Predict each fifth of the session from the other four, so that drift counts as an error."""
    predicted: list[float] = []
    ends = [len(rows) * number // _NUM_FOLDS for number in range(_NUM_FOLDS + 1)]
    for begin, end in pairwise(ends):
        fold = slice(begin, end)
        found = fit_relative(np.delete(rows, fold, axis=0), np.delete(seconds, fold))
        predicted += np.maximum(1e-9, rows[fold] @ found).tolist()
    return predicted
