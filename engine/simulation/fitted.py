"""`FittedModel`: step times learned from steps that ran.

A cycle is a floor, plus so much for each prefill token, each decode, each query-key pair of
prefills, each key token that decodes see and each request that prefills. No coefficient is
negative. A prediction is marked as extrapolated if its step lies far outside of the measured ones.
"""

import math
import statistics
from collections.abc import Sequence
from operator import mul
from typing import NamedTuple

from msgspec import Struct

from stepscope.engine.protocol.settings.config_error import ConfigError
from stepscope.engine.simulation.least_squares import fit_relative
from stepscope.engine.simulation.step_time import StepShape, StepTime

MIN_STEPS = 60
TERMS = ("step", "prefill token", "decode", "prefill pair", "context token", "prefill")
_MIN_SHAPES = 8  # different ones: below, a fit is a guess
_MAX_STEPS = 5_000  # evenly taken from more
_NUM_FOLDS = 5
_REACH = 1.5  # times the largest seen: beyond, an answer is marked
_WORTH_SAYING = 0.005
_STOPPED = 3.0  # times the fit: something else stopped such a step, and no model learns it


class SeenStep(NamedTuple):
    """A step that ran. `cycle_s` goes from the tokens of the step before it to its own."""

    shape: StepShape
    cycle_s: float
    host_s: float | None = None  # of the cycle; None: unknown, or hidden behind the step before


class SeenRange(Struct, frozen=True):
    """Of one figure of the steps that were seen."""

    least: float
    most: float


class FittedModel(Struct, frozen=True, kw_only=True):
    """A `StepTimeModel`. Errors are of steps that the fit had not seen, as shares of their time.

    Times are those of the mean step, as a session lasts as long as the sum of its steps.
    """

    seconds: tuple[float, ...]  # for each of one of `TERMS`
    num_steps: int
    ranges: tuple[SeenRange, ...]  # for each of `TERMS`
    median_error: float
    p90_error: float
    spread: float
    stopped_share: float  # of the time of all steps, what stopped steps took beyond the fit
    host_s: float

    def __post_init__(self) -> None:
        if not len(self.seconds) == len(self.ranges) == len(TERMS):
            raise ValueError(f"expected a fit of {len(TERMS)} terms: fit the recording again")

    def step_time(self, shape: StepShape) -> StepTime:
        terms = terms_of(shape)
        cycle_s = sum(map(mul, self.seconds, terms))
        is_far = any(
            term > seen.most * _REACH for term, seen in zip(terms, self.ranges, strict=True)
        )
        host_s = min(self.host_s, cycle_s)
        return StepTime(cycle_s - host_s, host_s, self.spread, is_far)

    def in_words(self) -> list[str]:
        """What was learned from what, a line each."""
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
        lines.append(f"  {self.host_s * 1e3:10.3f} ms of a cycle are the host's")
        if self.stopped_share >= _WORTH_SAYING:
            lines.append(
                f"steps that something stopped took {self.stopped_share:.1%} of the time besides: "
                "no simulation has them"
            )
        return lines


def terms_of(shape: StepShape) -> tuple[float, ...]:
    """What the coefficients are multiplied by, as in `TERMS`."""
    return (
        1.0,
        float(shape.num_prefill_tokens),
        float(shape.num_decodes),
        float(shape.num_prefill_pairs),
        float(shape.num_context_tokens),
        float(shape.num_prefills),
    )


def fit(steps: Sequence[SeenStep]) -> FittedModel:
    """Learn from steps, in the order they ran.

    Raises:
        ConfigError: they are too few, or too much alike.
    """
    steps = [step for step in steps if step.cycle_s > 0]
    _check(steps)
    if len(steps) > _MAX_STEPS:
        steps = steps[:: math.ceil(len(steps) / _MAX_STEPS)]
    rows = [terms_of(step.shape) for step in steps]
    seconds = [step.cycle_s for step in steps]
    pairs = list(zip(_predicted_unseen(rows, seconds), seconds, strict=True))
    ran = [(found_s, each_s) for found_s, each_s in pairs if each_s <= _STOPPED * found_s]
    # The fit goes through the typical step, and slow ones are further from it than fast ones.
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
    """Each stretch of the session is predicted from the others: drift counts as an error."""
    predicted: list[float] = []
    count = len(rows)
    for fold in range(_NUM_FOLDS):
        begin, end = count * fold // _NUM_FOLDS, count * (fold + 1) // _NUM_FOLDS
        found = fit_relative([*rows[:begin], *rows[end:]], [*seconds[:begin], *seconds[end:]])
        predicted += [max(1e-9, sum(map(mul, found, row))) for row in rows[begin:end]]
    return predicted
