"""The report of `bench gpu`: every sample, and how it was taken. Written and read as JSON."""

import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec

from stepscope.engine.protocol.settings.config_error import ConfigError

FORMAT = 1
_POINT_DEPTH = 3  # of `outcomes[i].points`

Fact: TypeAlias = float | int | str | bool | Sequence[float | int | str] | None
Facts: TypeAlias = dict[str, Fact]


class BenchPoint(msgspec.Struct, kw_only=True):
    """One thing measured, several times.

    `samples` are milliseconds, except where `facts` has no time at all (exactness). What the facts
    are called and what they mean is said by the part that writes them.
    """

    what: str
    samples: list[float] = msgspec.field(default_factory=list)
    facts: Facts = msgspec.field(default_factory=dict)
    why: str | None = None  # why there are no samples

    @property
    def median(self) -> float | None:
        return statistics.median(self.samples) if self.samples else None

    def number(self, name: str) -> float | None:
        """A fact that is a number; None: there is no such fact."""
        value = self.facts.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return float(value)

    def numbers(self, name: str) -> list[float]:
        value = self.facts.get(name)
        if isinstance(value, str) or not isinstance(value, Sequence):
            return []
        return [float(each) for each in value]


class PartOutcome(msgspec.Struct, kw_only=True):
    """One part on one model (or on none). `why`: what keeps it from being whole; None: it is."""

    part: str  # its letter
    model: str | None = None
    seconds: float = 0.0
    points: list[BenchPoint] = msgspec.field(default_factory=list)
    settings: Facts = msgspec.field(default_factory=dict)
    why: str | None = None

    def point(self, what: str) -> BenchPoint | None:
        return next((point for point in self.points if point.what == what), None)


class Aim(msgspec.Struct, kw_only=True, frozen=True):
    """What was hoped for. `found` and `held` are None where it was not measured."""

    what: str
    wanted: str
    found: float | None
    held: bool | None


class Report(msgspec.Struct, kw_only=True):
    """One run of the bench. `is_gpu`: False, and nothing in it is a figure of a GPU."""

    format: int = FORMAT
    date: str  # of the beginning, in UTC
    is_gpu: bool
    is_quick: bool
    is_interrupted: bool = False
    seconds: float = 0.0
    device: str = ""
    versions: dict[str, str] = msgspec.field(default_factory=dict)
    commit: str | None = None
    host: Facts = msgspec.field(default_factory=dict)
    gpu: dict[str, Facts] = msgspec.field(default_factory=dict)  # nvidia-smi: "before", "after"
    settings: Facts = msgspec.field(default_factory=dict)
    outcomes: list[PartOutcome] = msgspec.field(default_factory=list)
    aims: list[Aim] = msgspec.field(default_factory=list)

    def of(self, part: str) -> Iterator[PartOutcome]:
        return (outcome for outcome in self.outcomes if outcome.part == part)

    def outcome(self, part: str, model: str | None) -> PartOutcome | None:
        return next((each for each in self.of(part) if each.model == model), None)

    def rate(self, what: str, fact: str) -> float | None:
        """Of part (a): what `fact` counts, a second."""
        for outcome in self.of("a"):
            point = outcome.point(what)
            if point is not None and point.median and point.number(fact):
                return (point.number(fact) or 0.0) / point.median * 1e3
        return None

    @property
    def bytes_per_s(self) -> float | None:
        """Of a large copy, bytes read and written."""
        return self.rate("copy", "bytes")

    @property
    def flops_per_s(self) -> float | None:
        """Of a large product in bf16."""
        return self.rate("gemm", "flops")


def write(report: Report, file: Path) -> None:
    """In one go: what is at `file` is whole, whenever it is looked at. A point is a line."""
    text = _indented(msgspec.to_builtins(report), 0) + "\n"
    scratch = file.with_name(f".{file.name}.part")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(file)


def _indented(value: object, depth: int) -> str:
    """JSON, laid out down to the points: thousands of samples are no lines of their own."""
    if not isinstance(value, dict | list) or not value or depth > _POINT_DEPTH:
        return msgspec.json.encode(value).decode()
    space = " " * (depth + 1)
    if isinstance(value, dict):
        parts = [
            f"{space}{msgspec.json.encode(str(name)).decode()}: {_indented(each, depth + 1)}"
            for name, each in value.items()
        ]
    else:
        parts = [f"{space}{_indented(each, depth + 1)}" for each in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    body = ",\n".join(parts)
    return f"{opening}\n{body}\n{' ' * depth}{closing}"


def read(file: Path) -> Report:
    """Raises ConfigError when there is no report in `file`."""
    try:
        report = msgspec.json.decode(file.read_bytes(), type=Report)
    except OSError as error:
        raise ConfigError("no_report", f"{file} cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            "bad_report", f"{file} is no report of 'stepscope bench gpu': {error}"
        ) from None
    if report.format > FORMAT:
        raise ConfigError(
            "bad_report",
            f"{file} has format {report.format}, and this stepscope reads up to {FORMAT}: "
            "take the version that wrote it",
        )
    return report


def percentile(values: Sequence[float], share: float) -> float:
    """By nearest rank; of at least one value."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
