"""`MeasuredModel`: step times interpolated between measured points.

A point is a step: the tokens it computed, the tokens in the KV cache that it attended to, and its
seconds. Times between points are interpolated linearly, first over the context and then over the
tokens.
"""

import csv
import statistics
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from stepscope.engine.protocol.field_errors import in_words
from stepscope.engine.protocol.settings.knobs import ConfigError
from stepscope.engine.simulation.step_time import StepShape, StepTime

_MIN_TOKENS = 2  # different numbers of tokens that the points must have


class MeasuredPoint(msgspec.Struct, frozen=True):
    """The size of a step, and how long such a step took. The names are the columns of a CSV."""

    num_tokens: Annotated[int, Meta(ge=1)] = msgspec.field(name="tokens")
    # Over all rows.
    num_context_tokens: Annotated[int, Meta(ge=0)] = msgspec.field(name="context")
    seconds: Annotated[float, Meta(gt=0)]


class MeasuredModel:
    """A `StepTimeModel` that interpolates between measured points.

    Args:
        host_ms: host time between two steps, if the points do not include it.

    Raises ConfigError: all points have the same number of tokens.
    """

    def __init__(self, points: Iterable[MeasuredPoint], *, host_ms: float = 0.0) -> None:
        by_tokens: dict[int, dict[int, list[float]]] = {}
        for point in points:
            contexts = by_tokens.setdefault(point.num_tokens, {})
            contexts.setdefault(point.num_context_tokens, []).append(point.seconds)
        if len(by_tokens) < _MIN_TOKENS:
            raise ConfigError(
                "too_few_points",
                f"the points have {len(by_tokens)} different numbers of tokens: at least "
                f"{_MIN_TOKENS} are needed",
            )
        self._tokens = sorted(by_tokens)
        self._lines = [
            sorted(
                (context, statistics.median(all_s)) for context, all_s in by_tokens[each].items()
            )
            for each in self._tokens
        ]
        self._context_s = _seconds_per_context(self._lines)
        self._most_context = max(line[-1][0] for line in self._lines)
        self._host_s = host_ms / 1e3

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
        return StepTime(low_s + share * (high_s - low_s), self._host_s, 0.0, is_far)

    def _at(self, index: int, context: int) -> float:
        """Return the time of a step with `context`, at one measured number of tokens."""
        line = self._lines[index]
        place = bisect_right(line, (context, float("inf")))
        if place == 0 or place == len(line):
            end, seconds = line[0] if place == 0 else line[-1]
            return max(0.0, seconds + (context - end) * self._context_s)
        (low, low_s), (high, high_s) = line[place - 1], line[place]
        return low_s + (context - low) / (high - low) * (high_s - low_s)


def _seconds_per_context(lines: Sequence[Sequence[tuple[int, float]]]) -> float:
    slopes = [
        (line[-1][1] - line[0][1]) / (line[-1][0] - line[0][0]) for line in lines if len(line) > 1
    ]
    return max(0.0, statistics.median(slopes)) if slopes else 0.0


def read_points(path: Path, model: str | None = None) -> list[MeasuredPoint]:
    """Read points from the JSON of `bench_gpu.py`, or a CSV with tokens, context, seconds.

    Args:
        model: which model of the JSON to use; None if it has only one.

    Raises ConfigError: the file has no points; the message says what is missing.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("no_points", f"{path} cannot be read: {error}") from None
    points = _of_report(path, text, model) if text.lstrip()[:1] == "{" else _of_csv(path, text)
    if not points:
        raise ConfigError("no_points", f"{path} has no points of steps")
    return points


def _of_csv(path: Path, text: str) -> list[MeasuredPoint]:
    reader = csv.DictReader(text.splitlines(), restkey="more", skipinitialspace=True)
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
    return points


class _Point(msgspec.Struct):
    samples: list[float] = []  # ms
    facts: dict[str, Any] = {}


class _Part(msgspec.Struct):
    part: str
    model: str | None = None
    points: list[_Point] = []


class _Report(msgspec.Struct):
    """The fields that we use of the report of `tests/bench/bench_gpu.py`."""

    outcomes: list[_Part]


def _of_report(path: Path, text: str, model: str | None) -> list[MeasuredPoint]:
    try:
        report = msgspec.json.decode(text, type=_Report)
    except msgspec.DecodeError as error:
        raise ConfigError("bad_points", f"{path} is no report of bench_gpu.py: {error}") from None
    names = sorted({each.model for each in report.outcomes if each.model and each.part in "bcd"})
    if model is None and len(names) > 1:
        raise ConfigError("bad_points", f"{path} has several models: {', '.join(names)}; name one")
    if model is not None and model not in names:
        raise ConfigError("bad_points", f"{path} has no model {model!r}; it has {', '.join(names)}")
    wanted = model or next(iter(names), None)
    return [
        point
        for outcome in report.outcomes
        if outcome.part in "bcd" and outcome.model == wanted
        for each in outcome.points
        if (point := _point_of(each)) is not None
    ]


def _point_of(point: _Point) -> MeasuredPoint | None:
    facts = point.facts
    if not point.samples:
        return None
    seconds = statistics.median(point.samples) / 1e3
    if "batch" in facts and "context" in facts:
        return MeasuredPoint(
            int(facts["batch"]), int(facts["batch"]) * (int(facts["context"]) - 1), seconds
        )
    return MeasuredPoint(int(facts["tokens"]), 0, seconds) if "tokens" in facts else None
