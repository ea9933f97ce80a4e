"""`MeasuredModel`: step times interpolated between measured points.

A point is a step: the tokens it computed, the tokens in the KV cache that it attended to, and its
seconds. Times between points are interpolated linearly, first over the context and then over the
tokens.
"""

import csv
import statistics
from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from stepscope.engine.protocol.field_errors import in_words
from stepscope.engine.protocol.knobs import ConfigError
from stepscope.engine.simulation.step_time import StepShape, StepTime


class MeasuredPoint(msgspec.Struct, frozen=True):
    """The size of a step, and how long such a step took. The names are the columns of a CSV."""

    num_tokens: Annotated[int, Meta(ge=1)] = msgspec.field(name="tokens")
    # Over all rows.
    num_context_tokens: Annotated[int, Meta(ge=0)] = msgspec.field(name="context")
    seconds: Annotated[float, Meta(gt=0)]


class MeasuredModel:
    """A `StepTimeModel` that interpolates between measured points.

    Raises ConfigError: all points have the same number of tokens.
    """

    def __init__(self, points: Iterable[MeasuredPoint]) -> None:
        by_tokens: dict[int, dict[int, list[float]]] = {}
        for point in points:
            contexts = by_tokens.setdefault(point.num_tokens, {})
            contexts.setdefault(point.num_context_tokens, []).append(point.seconds)
        if len(by_tokens) < 2:
            what = f"the points have {len(by_tokens)} different numbers of tokens"
            raise ConfigError("too_few_points", f"{what}: at least 2 are needed")
        self._tokens = sorted(by_tokens)
        self._lines = [
            sorted((context, statistics.median(all_s)) for context, all_s in contexts.items())
            for _, contexts in sorted(by_tokens.items())
        ]
        slopes = [
            (line[-1][1] - line[0][1]) / (line[-1][0] - line[0][0])
            for line in self._lines
            if len(line) > 1
        ]
        self._context_s = max(0.0, statistics.median(slopes)) if slopes else 0.0
        self._most_context = max(line[-1][0] for line in self._lines)

    def step_time(self, shape: StepShape) -> StepTime:
        # The context of a shape includes the step's own tokens; that of a point does not.
        context = shape.num_context_tokens - shape.num_decodes
        context += max(0, shape.num_prefill_context - shape.num_prefill_tokens)
        tokens = self._tokens
        upper = min(max(bisect_right(tokens, shape.num_tokens), 1), len(tokens) - 1)
        low, high = tokens[upper - 1], tokens[upper]
        low_s, high_s = self._at(upper - 1, context), self._at(upper, context)
        share = max(0.0, (shape.num_tokens - low) / (high - low))
        is_far = shape.num_tokens > tokens[-1] or context > self._most_context
        return StepTime(low_s + share * (high_s - low_s), 0.0, 0.0, is_far)

    def _at(self, index: int, context: int) -> float:
        """Return the time of a step with `context`, at one measured number of tokens."""
        line = self._lines[index]
        place = bisect_right(line, (context, float("inf")))
        if place == 0 or place == len(line):
            end, seconds = line[0] if place == 0 else line[-1]
            return max(0.0, seconds + (context - end) * self._context_s)
        (low, low_s), (high, high_s) = line[place - 1], line[place]
        return low_s + (context - low) / (high - low) * (high_s - low_s)


def read_points(path: Path) -> list[MeasuredPoint]:
    """Read points from a CSV with tokens, context, seconds.

    Raises ConfigError: the file has no points; the message says what is missing.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("no_points", f"{path} cannot be read: {error}") from None
    reader = csv.DictReader(lines, restkey="more", skipinitialspace=True)
    points = []
    for found in reader:
        try:
            points.append(msgspec.convert(found, MeasuredPoint, strict=False))
        except msgspec.ValidationError as error:
            raise ConfigError(
                "bad_points",
                f"{path}, line {reader.line_num}: {in_words(error).text}; a CSV of points begins "
                "with the line tokens,context,seconds",
            ) from None
    if not points:
        raise ConfigError("no_points", f"{path} has no points of steps")
    return points
