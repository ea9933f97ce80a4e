"""The report of `bench gpu`, with every sample and how it was measured. A JSON file."""

import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec

from stepscope.engine.protocol.settings.knobs import ConfigError

FORMAT = 1
_POINT_DEPTH = 3  # of `outcomes[i].points`

Fact: TypeAlias = float | int | str | bool | Sequence[float | int | str] | None
Facts: TypeAlias = dict[str, Fact]


class BenchPoint(msgspec.Struct, kw_only=True):
    """One quantity, measured several times.

    `samples` are milliseconds. Points without a time (exactness) have none, only `facts`. Each part
    defines the names and meanings of its facts.
    """

    what: str
    samples: list[float] = msgspec.field(default_factory=list)
    facts: Facts = msgspec.field(default_factory=dict)
    why: str | None = None  # why there are no samples

    @property
    def median(self) -> float | None:
        return statistics.median(self.samples) if self.samples else None

    def number(self, name: str) -> float | None:
        """Return a fact that is a number. None if there is no such fact, or it is not a number."""
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
    """The results of one part on one model, or without a model.

    `why` says why the part is incomplete. None if it is complete.
    """

    part: str  # its letter
    model: str | None = None
    seconds: float = 0.0
    points: list[BenchPoint] = msgspec.field(default_factory=list)
    settings: Facts = msgspec.field(default_factory=dict)
    why: str | None = None

    def point(self, what: str) -> BenchPoint | None:
        return next((point for point in self.points if point.what == what), None)


class Aim(msgspec.Struct, kw_only=True, frozen=True):
    """A target value and whether it was met. `found` and `held` are None if it was not measured."""

    what: str
    wanted: str
    found: float | None
    held: bool | None


class Report(msgspec.Struct, kw_only=True):
    """The results of one run of the benchmark.

    If `is_gpu` is False, they say nothing about a GPU.
    """

    format: int = FORMAT
    date: str  # when it began, in UTC
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
        """Return a rate per second from part (a). None if it was not measured.

        Args:
            what: name of the point (copy or product).
            fact: name of the amount that the point moves or computes, divided by its median time.
        """
        for outcome in self.of("a"):
            point = outcome.point(what)
            if point is not None and point.median and point.number(fact):
                return (point.number(fact) or 0.0) / point.median * 1e3
        return None

    @property
    def bytes_per_s(self) -> float | None:
        """Bytes per second of a large copy, counting both reads and writes."""
        return self.rate("copy", "bytes")

    @property
    def flops_per_s(self) -> float | None:
        """Operations per second of a large matrix product in bf16."""
        return self.rate("gemm", "flops")


def write(report: Report, file: Path) -> None:
    """Write a report atomically, so that `file` is always complete. Each point is one line."""
    text = _indented(msgspec.to_builtins(report), 0) + "\n"
    scratch = file.with_name(f".{file.name}.part")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(file)


def _indented(value: object, depth: int) -> str:
    """Return `value` as JSON with indented lines. Each point of a part is one line.

    So all samples of a point share a line, because there may be thousands.
    """
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
    """Read a report.

    Raises:
        ConfigError: `file` cannot be read, holds no report, or has a newer format.
    """
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
            "use the version that wrote it",
        )
    return report


def percentile(values: Sequence[float], share: float) -> float:
    """Return the percentile at `share` (0..1) by nearest rank. `values` must not be empty."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
