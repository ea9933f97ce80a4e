"""The report of `bench_gpu.py`: its structs, and its table."""

import statistics
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from stepscope.recordings.session.knee import find_knee

# Letter -> name, and weight: its share of the time, about a fifth of its seconds on an H200.
PARTS: dict[str, tuple[str, float]] = {
    "a": ("ceilings: a large copy and a large product", 1),
    "b": ("decode, share of the bandwidth floor", 2),
    "c": ("prefill, share of the rate of a large product", 2),
    "d": ("step time over tokens, and its knee", 1),
    "e": ("attention alone", 4),
    "f": ("256-request yardstick", 5),
    "g": ("the same work through transformers' generate_batch", 3),
    "h": ("long prompts among decodes, in each batching mode", 7),
    "i": ("telemetry on and off", 3),
    "j": ("exactness against transformers", 4),
}
FORMAT, WIDTH = 1, 100
UNFINISHED = "its process ended without giving a reason"  # until a part has ended
Facts = dict[str, Any]


class Point(msgspec.Struct, kw_only=True):
    """One quantity, measured several times.

    `samples` are milliseconds; exactness has none, only `facts`. `why` says why there are none.
    """

    what: str
    samples: list[float] = []
    facts: Facts = {}
    why: str | None = None

    @property
    def median(self) -> float | None:
        return statistics.median(self.samples) if self.samples else None

    @property
    def hidden_share(self) -> float | None:
        """The share of the host's work in a step that ran while the device worked on another.

        With no other step in flight, what the device does not take of a step is the host's; with
        two in flight, it is what the device waited for. Older reports tell sampling apart
        (`sampling_ms`).
        """
        parts = [self.facts.get(name) for name in ("device_ms", "sampling_ms")]
        if self.median is None or not self.facts.get("alone_ms") or not parts[0]:
            return None
        device_ms = sum(statistics.median(part) for part in parts if part)
        host_ms = statistics.median(self.facts["alone_ms"]) - device_ms
        return 1 - max(0.0, self.median - device_ms) / host_ms if host_ms > 0 else None


class Outcome(msgspec.Struct, kw_only=True):
    """What one part found, of one model or of none. `why` says why it is incomplete."""

    part: str
    model: str | None = None
    seconds: float = 0.0
    points: list[Point] = []
    settings: Facts = {}
    why: str | None = None

    def point(self, what: str) -> Point | None:
        return next((point for point in self.points if point.what == what), None)


class Report(msgspec.Struct, kw_only=True):
    """The results of one run. If `is_gpu` is False, they say nothing about a GPU."""

    format: int = FORMAT
    date: str
    is_gpu: bool
    is_quick: bool
    is_interrupted: bool = False
    seconds: float = 0.0
    device: str = ""
    versions: dict[str, str] = {}
    commit: str | None = None
    host: Facts = {}
    gpu: dict[str, Facts] = {}  # nvidia-smi: "before", "after"
    settings: Facts = {}
    outcomes: list[Outcome] = []

    def outcome(self, part: str, model: str | None) -> Outcome:
        """The outcome of a part on a model; adds one if there is none."""
        for each in self.outcomes:
            if (each.part, each.model) == (part, model):
                return each
        self.outcomes.append(Outcome(part=part, model=model))
        return self.outcomes[-1]

    def rate(self, what: str, fact: str) -> float | None:
        """Bytes (fact) of the copy (what), or operations of the product, per second: part (a)."""
        for outcome in self.outcomes:
            point = outcome.point(what) if outcome.part == "a" else None
            if point is not None and point.median:
                return float(point.facts[fact]) / point.median * 1e3
        return None

    def share_of_floor(self, point: Point) -> float | None:
        """The least time of a point, by its bytes or operations and (a), over the time it took."""
        rates = {
            "floor_bytes": self.rate("copy", "bytes"),
            "floor_flops": self.rate("gemm", "flops"),
        }
        floors_s = [
            point.facts[name] / rate for name, rate in rates.items() if rate and name in point.facts
        ]
        return max(floors_s) * 1e3 / point.median if floors_s and point.median else None

    def write(self, file: Path) -> None:
        """Write it so that `file` is always a whole report."""
        scratch = file.with_name(f".{file.name}.part")
        scratch.write_bytes(msgspec.json.encode(self) + b"\n")
        scratch.replace(file)


def steps_csv(report: Report, model: str) -> Iterator[str]:
    """The measured steps of one model, as `stepscope simulate --step-time` reads them."""
    yield "tokens,context,seconds"
    for outcome in report.outcomes:
        for point in outcome.points if outcome.model == model and outcome.part in "bcd" else ():
            batch, context = point.facts.get("batch"), point.facts.get("context")
            tokens = batch if batch and context else point.facts.get("tokens")
            if point.median and tokens:
                found = batch * (context - 1) if batch and context else 0
                yield f"{tokens},{found},{point.median / 1e3}"


def read(file: Path) -> Report:
    return msgspec.json.decode(file.read_bytes(), type=Report)


# The table

_SHOWN = (
    *("output_tokens_per_s", "p50_ms", "p99_ms", "max_ms"),
    *("num_equal", "num_tokens", "found", "held"),
)


def rows(report: Report, outcome: Outcome) -> Iterator[tuple[str, str, float]]:
    """Every figure of one part: (name, text, its number, to compare with another report's)."""
    for point in outcome.points:
        words, facts, median = [], point.facts, point.median
        if median is not None:
            words.append(f"{median:.4g} ms")
            if share := report.share_of_floor(point):
                words.append(f"{share:.0%} of the floor's rate")
            if (share := point.hidden_share) is not None:
                words.append(f"{share:.0%} of the host's work hidden")
        words += [f"{name} {facts[name]:.4g}" for name in _SHOWN if facts.get(name) is not None]
        words += ["a part of it"] * bool(facts.get("is_partial"))
        words += ["requests share blocks"] * bool(facts.get("has_shared_blocks"))
        if point.why:
            words = [f"not measured: {point.why}"]
        yield point.what, ", ".join(words), float(median or facts.get("found") or 0)
    for name, form, value in _of_all_points(report, outcome):
        if value:
            yield name, form.format(value), value


def _of_all_points(report: Report, outcome: Outcome) -> Iterator[tuple[str, str, float | None]]:
    """What several points of a part say together: (name, format, value)."""
    points = {point.what: point for point in outcome.points}
    if outcome.part == "a":
        for what, fact in (("copy", "bytes"), ("gemm", "flops")):
            yield f"{what}, {fact} a second", "{:.4g}", report.rate(what, fact)
    elif outcome.part == "d":
        curve = [(p.facts["tokens"], p.median / 1e3) for p in outcome.points if p.median]
        tokens, seconds = zip(*curve, strict=True) if curve else ((), ())
        knee = find_knee(tokens, seconds, [each * each for each in tokens])  # attended to
        if knee is not None:
            budget = 1 << (max(1, round(knee.tokens)) - 1).bit_length()
            yield "knee, in tokens", f"{{:.0f}}: budget {budget}", knee.tokens
    elif outcome.part == "g":
        of = {(p.facts["contender"], p.facts["work"]): p.median for p in outcome.points}
        for (contender, work), theirs in of.items():
            if contender == "generate_batch":
                ratio = _over(theirs, of.get(("stepscope", work)))
                yield f"rate / generate_batch, {work}", "{:.2f}", ratio
    elif outcome.part == "h" and {"continuous", "chunked"} <= points.keys():
        p99 = [points[mode].facts.get("p99_ms") for mode in ("continuous", "chunked")]
        yield "p99, continuous / chunked", "{:.1f}", _over(*p99)
    elif outcome.part == "i":
        for point in outcome.points:
            if ratios := point.facts.get("ratios"):
                yield "median of the ratios", "{:.3f}", statistics.median(ratios)


def _over(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


def table(report: Report, other: Report | None = None) -> Iterator[str]:
    """Yield a report as lines, or two: each figure of both, and the second over the first."""
    reports = [report] if other is None else [report, other]
    for each in reports:
        state = " (interrupted)" if each.is_interrupted else ""
        yield f"bench_gpu: {each.device}, {each.date}, {each.seconds:.0f} s{state}"
        if not each.is_gpu or each.is_quick:
            kind = "NOT A GPU" if not each.is_gpu else "QUICK"
            yield f"{kind}: tiny models, to see that the bench runs. No figure of a GPU."
        versions = [f"{name} {version}" for name, version in each.versions.items()]
        gpu = [f"{name} {value}" for name, value in each.gpu.get("before", {}).items()]
        yield from textwrap.wrap(", ".join([*versions, f"commit {each.commit}", *gpu]), WIDTH)
    keys = {(o.part, o.model): None for each in reports for o in each.outcomes}
    for part, model in sorted(keys, key=lambda key: key[0]):
        yield f"({part}) {PARTS[part][0]}" + (f", {model}" if model else "")
        outcomes = [each.outcome(part, model) for each in reports]
        found = [
            {name: (text, value) for name, text, value in rows(each, outcome)}
            for each, outcome in zip(reports, outcomes, strict=True)
        ]
        for name in dict.fromkeys(name for of in found for name in of):
            both = [of.get(name, ("-", 0.0)) for of in found]
            ratio = _over(both[-1][1], both[0][1]) if other else None
            times = f"  ({ratio:.2f} times)" if ratio else ""
            yield f"    {name}: " + "  |  ".join(text for text, _ in both) + times
        for outcome in outcomes:
            settings = ", ".join(f"{name} {value}" for name, value in outcome.settings.items())
            yield from textwrap.indent(textwrap.fill(settings, WIDTH - 4), "    ").splitlines()
            if outcome.why:
                yield f"    incomplete: {outcome.why}"
