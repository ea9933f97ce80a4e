"""`FittedModel`: step times learned from steps that ran.

The cycle of a step (the time from the tokens of the step before it to its own) is a constant, plus
a cost for each prefill token, each decode, each query-key pair of prefills, each key token that
decodes attend to, and each request that prefills. No coefficient is negative. A prediction is
marked as extrapolated if the step is much larger than all measured steps.

Least squares for step times: no coefficient is negative, and a few slow steps change little.

Written in plain Python, because a plain install has no numpy and a fit has only a few terms.
"""

import math
import statistics
from collections.abc import Sequence
from functools import cached_property
from operator import gt, mul
from typing import NamedTuple

from msgspec import Struct

from stepscope.engine.protocol.settings.knobs import ConfigError
from stepscope.engine.simulation.step_time import StepShape, StepTime

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


MIN_STEPS = 60
TERMS = ("step", "prefill token", "decode", "prefill pair", "context token", "prefill")
_MIN_SHAPES = 8  # different shapes: with fewer, a fit is a guess
_MAX_STEPS = 5_000  # of more steps, this many are picked evenly
_NUM_FOLDS = 5
_REACH = 1.5  # a prediction beyond this multiple of the largest measured term is extrapolated
_WORTH_SAYING = 0.005
_STOPPED = 3.0  # a step that took this multiple of the fit was stopped by something else


class SeenStep(NamedTuple):
    """A step that ran. `cycle_s` is the time from the tokens of the step before it to its own."""

    shape: StepShape
    cycle_s: float
    host_s: float | None = None  # host's part of it; None: unknown, or hidden by the step before


class SeenRange(Struct, frozen=True):
    """The least and the greatest value of one of `TERMS` in the measured steps."""

    least: float
    most: float


class FittedModel(Struct, frozen=True, kw_only=True, dict=True):
    """A `StepTimeModel` whose coefficients were fitted to measured steps.

    Predicts the mean time of a step, not the median, so that the sum over a session is right. The
    errors are relative, and measured on steps that were left out of the fit.
    """

    seconds: tuple[float, ...]  # the coefficient of each of `TERMS`
    num_steps: int
    ranges: tuple[SeenRange, ...]  # for each of `TERMS`
    median_error: float
    p90_error: float
    spread: float
    stopped_share: float  # time of stopped steps beyond the fit, as a share of all steps' time
    host_s: float

    def __post_init__(self) -> None:
        if not len(self.seconds) == len(self.ranges) == len(TERMS):
            raise ValueError(f"expected a fit of {len(TERMS)} terms: fit the recording again")

    def step_time(self, shape: StepShape) -> StepTime:
        terms = terms_of(shape)
        cycle_s = sum(map(mul, self.seconds, terms))
        is_far = any(map(gt, terms, self._reach))
        host_s = min(self.host_s, cycle_s)
        return StepTime(cycle_s - host_s, host_s, self.spread, is_far)

    @cached_property
    def _reach(self) -> tuple[float, ...]:
        """The greatest value of each of `TERMS` that is not extrapolated."""
        return tuple(seen.most * _REACH for seen in self.ranges)

    def in_words(self) -> list[str]:
        """Describe the fit and its errors for people, in lines."""
        lines = [
            f"fitted on {self.num_steps:,} steps; on steps not seen the median error is "
            f"{self.median_error:.1%}, one in ten is above {self.p90_error:.1%}"
        ]
        for name, each_s, seen in zip(TERMS, self.seconds, self.ranges, strict=True):
            if name == "step":
                lines.append(f"  {each_s * 1e3:10.3f} ms a step")
            elif not seen.most:
                lines.append(f"           ? a {name}: no step had any")
            else:
                lines.append(
                    f"  {each_s * 1e6:10.4g} µs a {name} (seen {seen.least:,.0f} to "
                    f"{seen.most:,.0f})"
                )
        lines.append(f"  {self.host_s * 1e3:10.3f} ms of a cycle are host time")
        if self.stopped_share >= _WORTH_SAYING:
            lines.append(
                f"steps that something stopped took {self.stopped_share:.1%} of the time besides: "
                "simulations leave them out"
            )
        return lines


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
    """Fit a model to steps, given in the order in which they ran.

    Raises:
        ConfigError: there are too few steps, or they are too much alike.
    """
    steps = [step for step in steps if step.cycle_s > 0]
    _check(steps)
    if len(steps) > _MAX_STEPS:
        steps = steps[:: math.ceil(len(steps) / _MAX_STEPS)]
    rows = [terms_of(step.shape) for step in steps]
    seconds = [step.cycle_s for step in steps]
    pairs = list(zip(_predicted_unseen(rows, seconds), seconds, strict=True))
    ran = [(found_s, each_s) for found_s, each_s in pairs if each_s <= _STOPPED * found_s]
    # The fit predicts typical steps, and slow ones are further from it than fast ones. Scaling
    # makes the sum right.
    scale = sum(each_s for _, each_s in ran) / sum(found_s for found_s, _ in ran)
    sizes = sorted(abs(scale * found_s / each_s - 1) for found_s, each_s in pairs)
    stopped_s = sum(each_s - found_s for found_s, each_s in pairs if each_s > _STOPPED * found_s)
    hosts = [step.host_s for step in steps if step.host_s is not None]
    return FittedModel(
        seconds=tuple(scale * each for each in fit_relative(rows, seconds)),
        num_steps=len(steps),
        ranges=tuple(SeenRange(min(column), max(column)) for column in zip(*rows, strict=True)),
        median_error=statistics.median(sizes),
        p90_error=sizes[round(0.9 * (len(sizes) - 1))],
        spread=statistics.pstdev(math.log(each_s / found_s) for found_s, each_s in ran),
        stopped_share=stopped_s / sum(seconds),
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


def _predicted_unseen(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Predict the time of each step by a fit without it (cross-validation).

    Each fifth of the session is predicted from the other four, so that drift counts as an error.
    """
    predicted: list[float] = []
    count = len(rows)
    for fold in range(_NUM_FOLDS):
        begin, end = count * fold // _NUM_FOLDS, count * (fold + 1) // _NUM_FOLDS
        found = fit_relative([*rows[:begin], *rows[end:]], [*seconds[:begin], *seconds[end:]])
        predicted += [max(1e-9, sum(map(mul, found, row))) for row in rows[begin:end]]
    return predicted
