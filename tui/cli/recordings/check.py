"""`stepscope check`: checks that a session keeps its bounds, for a pipeline that gates a release.

The session may also be compared with a baseline. A figure then fails only if two things hold:
`compare` finds it worse beyond chance, so that noise fails nothing, and it is worse by more than is
allowed.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias
from xml.etree import ElementTree

from stepscope.recordings.compare.comparison import Comparison, compare
from stepscope.recordings.compare.figures import ComparedFigure
from stepscope.recordings.compare.side.side import Side
from stepscope.recordings.figures.sums import Figures
from stepscope.recordings.figures.table import (
    FIGURES,
    BoundError,
    FigureBound,
    parse_bound,
    value_text,
)
from stepscope.recordings.file.service_levels import levels_of
from stepscope.tui.cli.recordings.measured import MeasuredSession, measure
from stepscope.tui.cli.shared.options import AsJson, LastSeconds, Target, command, option
from stepscope.tui.cli.shared.output import say, text_table, write_json
from stepscope.tui.cli.shared.paths import output_path
from stepscope.tui.settings import cli_errors

DEFAULT_REGRESSION = "10%"

Outcome: TypeAlias = Literal["ok", "unsure", "failed", "unknown"]


class CheckRow(NamedTuple):
    """The result for one bound, or for one figure compared with the baseline; values as text."""

    name: str  # of the figure
    asked: str
    measured: str
    outcome: Outcome  # unsure: worse, but perhaps by chance; unknown: the session has no value
    detail: str = ""
    is_bound: bool = True  # else a comparison with the baseline


@command(
    "stepscope check run.mcap --max itl_p99=50ms --min goodput=95%",
    "stepscope check run.mcap --baseline main.mcap --junit check.xml",
    sections=("levels",),
    takes_key=True,
)
def check(
    target: Target = None,
    *,
    seconds: LastSeconds = None,
    most: list[str] | None = option("FIGURE=VALUE", "fail above it; may be repeated", "--max"),
    least: list[str] | None = option("FIGURE=VALUE", "fail below it; may be repeated", "--min"),
    baseline: str | None = option(
        "FILE",
        "fail where a figure is worse than in this recording, and 'stepscope compare' "
        "says that it is significant",
    ),
    max_regression: str | None = option(
        "PERCENT", "with --baseline: how much worse is still accepted (default: 10%)"
    ),
    as_json: AsJson = False,
    junit: str | None = option("FILE", "also write a JUnit report"),
    flags: dict[str, Any],
) -> int:
    """Check that a session keeps its bounds, for CI.

    docs/figures.md lists the figures.

    Ends with 0 if all bounds hold, 1 if one does not, and 3 if there is too little data to say.
    """
    bounds = [_bound("--max", text) for text in most or ()]
    lower = [_bound("--min", text) for text in least or ()]
    if not bounds and not lower and baseline is None:
        raise cli_errors.WrongUsage(
            "nothing to check: give --max or --min FIGURE=VALUE, or --baseline FILE"
        )
    if max_regression is not None and baseline is None:
        raise cli_errors.WrongUsage("--max-regression: only with --baseline FILE")
    allowed = _share(max_regression or DEFAULT_REGRESSION)
    report = None if junit is None else output_path(junit)
    found = measure(target, seconds, flags, "check", for_comparison=baseline is not None)
    checks = bound_checks(found.figures, bounds, lower)
    if baseline is not None:
        old = measure(baseline, None, levels_of(found.slo), "check", for_comparison=True)
        assert isinstance(old.run, Side)
        assert isinstance(found.run, Side)
        checks += regression_checks(compare(old.run, found.run), allowed)
    code = exit_code(checks)
    if report is not None:
        report.write_bytes(junit_xml(found.name, checks))
    if as_json:
        rows = [each._asdict() for each in checks]
        write_json({**found.document(), "checks": rows, "exit_code": code})
    else:
        say(*_lines(found, checks))
    return code


def exit_code(checks: Sequence[CheckRow]) -> int:
    """Return the exit code for these rows: 1 if any failed, else 3 if any is unknown, else 0."""
    outcomes = {each.outcome for each in checks}
    if "failed" in outcomes:
        return cli_errors.FAILED
    return cli_errors.TOO_LITTLE_DATA if "unknown" in outcomes or not checks else cli_errors.DONE


def bound_checks(
    figures: Figures, most: Sequence[FigureBound], least: Sequence[FigureBound]
) -> list[CheckRow]:
    """Return a row for each bound. A value equal to its bound passes."""
    found = []
    for bound, sign in [*((each, "<=") for each in most), *((each, ">=") for each in least)]:
        figure, value = bound.figure, figures[bound.figure.name]
        asked, measured = f"{sign} {value_text(figure, bound.value)}", value_text(figure, value)
        if value is None:
            detail = "the session has no sample of it"
            found.append(CheckRow(figure.name, asked, measured, "unknown", detail))
            continue
        is_kept = value <= bound.value if sign == "<=" else value >= bound.value
        found.append(CheckRow(figure.name, asked, measured, "ok" if is_kept else "failed"))
    return found


def regression_checks(found: Comparison, allowed: float) -> list[CheckRow]:
    """Return a row for each figure that may be worse, or one that says why none is known."""
    if found.different_work is not None:
        why = f"the baseline was given other work: {found.different_work}"
        return [CheckRow("baseline", "the same work", "other work", "unknown", why)]
    checks = [
        _regression(figure, allowed)
        for figure in found.figures
        if figure.better is not None and figure.a is not None and figure.b is not None
    ]
    if not checks:
        return [CheckRow("baseline", "figures of both", "none", "unknown", "too few samples")]
    return checks


def _regression(figure: ComparedFigure, allowed: float) -> CheckRow:
    by = regression(figure)
    is_worse = figure.verdict == "a" and by > allowed
    spec = FIGURES.get(figure.key)
    texts = [
        f"{value:,.4g}" if spec is None else value_text(spec, value)
        for value in (figure.a, figure.b)
    ]
    detail = "" if figure.verdict != "a" else f"worse by {by:.1%}, which is significant"
    outcome: Outcome = "failed" if is_worse else "ok"
    if figure.verdict == "unclear" and by > allowed:
        outcome, detail = "unsure", f"worse by {by:.1%}, which may be chance"
    asked = f"within {allowed:.0%} of {texts[0]}"
    return CheckRow(figure.key, asked, texts[1], outcome, detail, is_bound=False)


def regression(figure: ComparedFigure) -> float:
    """Return by how much B is worse than A, as a share of A; of shares their difference."""
    a, b = figure.a or 0.0, figure.b or 0.0
    if figure.unit == "share" and figure.better == "higher":
        return a - b  # in percentage points: from 99 % to 98 % is one point
    change = b - a if figure.better == "lower" else a - b
    if not change:
        return 0.0
    return change / a if a else math.copysign(math.inf, change)


def junit_xml(name: str, checks: Sequence[CheckRow]) -> bytes:
    """Return a JUnit report with a test case for each row; the outcome unknown becomes an error."""
    attributes = {
        "name": f"stepscope check {name}",
        "tests": str(len(checks)),
        "failures": str(sum(each.outcome == "failed" for each in checks)),
        "errors": str(sum(each.outcome == "unknown" for each in checks)),
    }
    suite = ElementTree.Element("testsuite", attributes)
    for each in checks:
        case = ElementTree.SubElement(
            suite, "testcase", classname="stepscope", name=f"{each.name} {each.asked}"
        )
        if each.outcome in ("failed", "unknown"):
            kind = "failure" if each.outcome == "failed" else "error"
            message = " ".join(part for part in (f"is {each.measured}", each.detail) if part)
            ElementTree.SubElement(case, kind, message=message)
    report: bytes = ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True)
    return report


def _lines(found: MeasuredSession, checks: Sequence[CheckRow]) -> list[str]:
    listed = [each for each in checks if each.is_bound or each.outcome != "ok" or each.detail]
    rows = [[each.outcome, each.name, each.measured, each.asked, each.detail] for each in listed]
    num_alike = len(checks) - len(listed)
    table = text_table(["", "figure", "is", "asked", ""], rows, "<<>><") if rows else []
    alike = f"{num_alike} {'other ' * bool(rows)}figures are no worse than in the baseline"
    return [found.text, *table, *([alike] if num_alike else [])]


def _bound(option: str, text: str) -> FigureBound:
    try:
        bound = parse_bound(text)
    except BoundError as error:
        raise cli_errors.WrongUsage(f"{option} {error}") from error
    if bound.relation != "=":
        raise cli_errors.WrongUsage(f"{option} {text!r}: write {bound.figure.name}=VALUE")
    return bound


def _share(text: str) -> float:
    number = text.removesuffix("%")
    try:
        value = float(number) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise cli_errors.WrongUsage(f"--max-regression: expected a share like 10%, got {text!r}")
    return value
