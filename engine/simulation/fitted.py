"""`FittedModel`: step times learned from steps that ran.

The cycle of a step (the time from the tokens of the step before it to its own) is a constant, plus
a cost for each prefill token, each decode, each query-key pair of prefills, each key token that
decodes attend to, and each request that prefills. No coefficient is negative. A prediction is
marked as extrapolated if the step is much larger than all measured steps.
"""

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise
from operator import gt, mul
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from stepscope.engine.protocol.settings.knobs import ConfigError
from stepscope.engine.simulation.regression import fit_relative
from stepscope.engine.simulation.step_time import StepShape, StepTime

if TYPE_CHECKING:
    from stepscope.engine.simulation.regression import Floats

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
        """Describe the fit's errors for people."""
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
    import numpy as np

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


def _predicted_unseen(rows: "Floats", seconds: "Floats") -> list[float]:
    """Predict each fifth of the session from the other four, so that drift counts as an error."""
    import numpy as np

    predicted: list[float] = []
    ends = [len(rows) * number // _NUM_FOLDS for number in range(_NUM_FOLDS + 1)]
    for begin, end in pairwise(ends):
        fold = slice(begin, end)
        found = fit_relative(np.delete(rows, fold, axis=0), np.delete(seconds, fold))
        predicted += np.maximum(1e-9, rows[fold] @ found).tolist()
    return predicted
