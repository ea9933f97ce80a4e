"""Turns the measurements in a report of `stepscope bench gpu` into rows of text.

A report has parts, lettered a to j, such as decode or prefill. Most parts are run for each model.
"""

from collections.abc import Iterator
from typing import NamedTuple

from stepscope.engine.bench.gpu import aims
from stepscope.engine.bench.gpu.results import BenchPoint, PartOutcome, Report, percentile
from stepscope.tui.views.format import three_digits


class Row(NamedTuple):
    """One measurement as text.

    Attributes:
        column: the model, or in the part on kernels, which implementation of the kernel was
            measured.
        value: the number behind `text`, to compare two reports.
    """

    label: str
    column: str
    text: str
    value: float | None  # to compare with another report's


def rows_of(report: Report, outcome: PartOutcome) -> Iterator[Row]:
    """Yield the measurements of one part of the report (lettered a to j) on one model."""
    column = outcome.model or ""
    if outcome.part == "a":
        yield from _ceilings(report)
    elif outcome.part in "bcd":
        for point in outcome.points:
            if point.median is not None:
                yield Row(point.what, column, _step(report, point), point.median)
        knee = aims.knee_of(outcome) if outcome.part == "d" else None
        if knee is not None:
            share = "" if knee.budget_share is None else f", {knee.budget_share:.0%} of the best"
            text = f"{knee.tokens:.0f}: budget {knee.budget}{share}"
            yield Row("knee, in tokens", column, text, knee.tokens)
    elif outcome.part == "e":
        for point in outcome.points:
            if point.median is not None:
                share = _percent(aims.share_of_floor(report, point))
                text = f"{point.median * 1e3:,.1f} us {share}".rstrip()
                contender = str(point.facts["contender"])
                yield Row(str(point.facts["case"]), contender, text, point.median)
    elif outcome.part == "f":
        for point in outcome.points:
            rate = point.number("output_tokens_per_s")
            if rate is not None and point.median is not None:
                partial = ", a part of them" if point.facts.get("is_partial") else ""
                text = f"{rate:,.0f} ({point.median / 1e3:.1f} s{partial})"
                yield Row(point.what, column, text, rate)
    elif outcome.part == "g":
        yield from _peers(outcome, column)
    elif outcome.part == "h":
        yield from _modes(outcome, column)
    elif outcome.part == "i":
        ratio = aims.telemetry_ratio(outcome)
        pairs = outcome.point("with telemetry / without")
        if ratio is not None and pairs is not None:
            ratios = pairs.numbers("ratios")
            text = f"{ratio:.3f} ({min(ratios):.3f} to {max(ratios):.3f}, {len(ratios)} pairs)"
            yield Row(pairs.what, column, text, ratio)
    else:
        for point in outcome.points:
            found = point.number("found")
            if found is not None:
                verdict = "held" if point.facts.get("held") else "NOT HELD"
                counts = (point.number("num_equal"), point.number("num_tokens"))
                text = f"{found:.2f}"
                if counts[0] is not None and counts[1] is not None:
                    text = f"{counts[0]:.0f} of {counts[1]:.0f}"
                yield Row(point.what, column, f"{text}, {verdict}", found)


def _ceilings(report: Report) -> Iterator[Row]:
    for label, rate, unit, scale in (
        ("copy, bytes read and written", report.bytes_per_s, "TB/s", 1e12),
        ("product in bf16", report.flops_per_s, "TFLOP/s", 1e12),
    ):
        if rate is not None:
            yield Row(label, "", f"{rate / scale:,.3g} {unit}", rate)


def _step(report: Report, point: BenchPoint) -> str:
    assert point.median is not None
    text = three_digits(point.median)
    share = aims.share_of_floor(report, point)
    if share is None:
        return text
    device = BenchPoint(what="", samples=point.numbers("device_ms")).median
    inner = "" if device is None else _percent(aims.share_of_floor(report, point, device))
    return f"{text} {_percent(share)}" + (f" ({inner})" if inner else "")


def _peers(outcome: PartOutcome, column: str) -> Iterator[Row]:
    for theirs, ours in aims.pairs(outcome):
        rates = [
            None if each is None else each.number("output_tokens_per_s") for each in (ours, theirs)
        ]
        if rates[0] is None and rates[1] is None:
            continue
        ratio = aims.rate_ratio(theirs, ours)
        texts = ["-" if rate is None else f"{rate:,.0f}" for rate in rates]
        times = "" if ratio is None else f" = {ratio:.1f}x"
        yield Row(str(theirs.facts["work"]), column, " / ".join(texts) + times, ratio)


def _modes(outcome: PartOutcome, column: str) -> Iterator[Row]:
    for point in outcome.points:
        figures = [point.number(f"{name}_ms") for name in ("p50", "p99", "max")]
        if any(each is None for each in figures):
            continue
        middle, high, most = (three_digits(each or 0.0) for each in figures)
        waits = point.numbers("ttft_ms")
        wait = f", TTFT of the long {three_digits(percentile(waits, 0.5))}" if waits else ""
        partial = ", cut" if point.facts.get("is_partial") else ""
        text = f"p50 {middle}, p99 {high}, max {most}{wait}{partial}"
        yield Row(point.what, column, text, figures[1])
    ratio = aims.itl_ratio(outcome)
    if ratio is not None:
        yield Row("p99, continuous / chunked", column, f"{ratio:.1f}", ratio)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"
