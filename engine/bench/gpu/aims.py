"""Judges whether a report meets the aims: target values, set for one H200.

Everything is computed from the samples in the report.
"""

from collections.abc import Iterator

from stepscope.engine.bench.gpu.knee import Knee, find_knee
from stepscope.engine.bench.gpu.results import Aim, BenchPoint, PartOutcome, Report

DECODE_SHARES = ((1, 512, 0.80), (128, 4096, 0.70))  # batch, context, of the bandwidth floor
PREFILL_TOKENS, PREFILL_SHARE = 2048, 0.65  # share of the rate of a large matrix product
ITL_RATIO = 5.0  # p99, continuous over chunked
TELEMETRY_RATIO = 1.01
LARGE = "8b"  # only models with this suffix have aims for decode and prefill


def judge(report: Report) -> list[Aim]:
    """Return every aim with its result.

    Empty if the report is not of a GPU, or is of quick sizes.
    """
    return list(_judge(report)) if report.is_gpu and not report.is_quick else []


def _judge(report: Report) -> Iterator[Aim]:
    models = [each.model for each in report.of("b") if each.model and each.model.endswith(LARGE)]
    for model in models:
        for batch, context, share in DECODE_SHARES:
            found = _share_of(report, "b", model, f"batch {batch}, context {context}")
            yield _at_least(f"{model}: decode, batch {batch}, context {context}", found, share)
    for model in [each.model for each in report.of("c") if each.model]:
        if model.endswith(LARGE):
            found = _share_of(report, "c", model, f"{PREFILL_TOKENS} tokens")
            yield _at_least(f"{model}: prefill of {PREFILL_TOKENS} tokens", found, PREFILL_SHARE)
    for outcome in report.of("g"):
        for theirs, ours in pairs(outcome):
            ratio = rate_ratio(theirs, ours)
            yield Aim(
                what=f"{outcome.model}: stepscope / generate_batch, {theirs.facts['work']}",
                wanted="above 1",
                found=ratio,
                held=None if ratio is None else ratio > 1,
            )
    for outcome in report.of("h"):
        ratio = itl_ratio(outcome)
        yield Aim(
            what=f"{outcome.model}: p99 ITL, continuous / chunked",
            wanted=f"{ITL_RATIO:g} or more",
            found=ratio,
            held=None if ratio is None else ratio >= ITL_RATIO,
        )
    for outcome in report.of("i"):
        ratio = telemetry_ratio(outcome)
        yield Aim(
            what=f"{outcome.model}: time with telemetry / without",
            wanted=f"up to {TELEMETRY_RATIO:g}",
            found=ratio,
            held=None if ratio is None else ratio <= TELEMETRY_RATIO,
        )
    for outcome in report.of("j"):
        for point in outcome.points:
            held = point.facts.get("held")
            yield Aim(
                what=f"{outcome.model}: {point.what}",
                wanted=str(point.facts.get("wanted", "")),
                found=point.number("found"),
                held=held if isinstance(held, bool) else None,
            )


def _at_least(what: str, found: float | None, share: float) -> Aim:
    held = None if found is None else found >= share
    return Aim(what=what, wanted=f"{share:.0%} or more", found=found, held=held)


def _share_of(report: Report, part: str, model: str, what: str) -> float | None:
    outcome = report.outcome(part, model)
    point = None if outcome is None else outcome.point(what)
    return None if point is None else share_of_floor(report, point)


def share_of_floor(
    report: Report, point: BenchPoint, milliseconds: float | None = None
) -> float | None:
    """Return the least possible time of a point (one measurement), over the time it took.

    The least time follows from the point's bytes or operations and the device's rates. None if the
    report lacks the rates, or the point lacks its bytes and operations or its time.

    Args:
        milliseconds: the time that the point took. None: the median of the point's samples.
    """
    taken = point.median if milliseconds is None else milliseconds
    floors_s = [
        amount / rate
        for amount, rate in (
            (point.number("floor_bytes"), report.bytes_per_s),
            (point.number("floor_flops"), report.flops_per_s),
        )
        if amount and rate
    ]
    return max(floors_s) * 1e3 / taken if floors_s and taken else None


def knee_of(outcome: PartOutcome) -> Knee | None:
    """Return the knee of part (d), found from the time of a step by its number of tokens.

    None if no knee can be found.
    """
    return find_knee(
        {
            int(point.number("tokens") or 0): point.median
            for point in outcome.points
            if point.median and point.number("tokens")
        }
    )


def pairs(outcome: PartOutcome) -> Iterator[tuple[BenchPoint, BenchPoint | None]]:
    """Yield transformers' points of part (g), each with stepscope's point for the same requests.

    The second is None if stepscope did not run these requests.
    """
    ours = [point for point in outcome.points if point.facts.get("contender") == "stepscope"]
    for theirs in outcome.points:
        if theirs.facts.get("contender") == "generate_batch":
            work = theirs.facts["work"]
            yield theirs, next((each for each in ours if each.facts["work"] == work), None)


def rate_ratio(theirs: BenchPoint, ours: BenchPoint | None) -> float | None:
    """Return stepscope's output tokens per second over transformers', for the same requests."""
    if ours is None or not ours.median or not theirs.median:
        return None
    return theirs.median / ours.median


def itl_ratio(outcome: PartOutcome) -> float | None:
    """Return the ratio of part (h): p99 ITL in mode continuous over p99 ITL in mode chunked."""
    whole, sliced = (outcome.point(mode) for mode in ("continuous", "chunked"))
    above = None if whole is None else whole.number("p99_ms")
    below = None if sliced is None else sliced.number("p99_ms")
    return above / below if above and below else None


def telemetry_ratio(outcome: PartOutcome) -> float | None:
    """Return the median ratio of part (i): time with telemetry over time without it.

    Each ratio is of two runs that followed each other.
    """
    point = outcome.point("with telemetry / without")
    if point is None:
        return None
    ratios = BenchPoint(what="", samples=point.numbers("ratios"))
    return ratios.median
