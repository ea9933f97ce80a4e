"""`stepscope stats` prints all figures of a session, `check` holds them against bounds, for CI.

A session may also be checked against a baseline. A figure then fails only if two things hold:
`compare` finds it worse beyond chance, so that noise fails nothing, and it is worse by more than is
allowed.
"""

import math
import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from stepscope.recordings.compare.comparison import Comparison, compare
from stepscope.recordings.compare.figures import ComparedFigure
from stepscope.recordings.compare.side import Side
from stepscope.recordings.figures import (
    FIGURES,
    KINDS,
    RANKS,
    BoundError,
    FigureBound,
    Figures,
    latency_name,
    parse_bound,
    value_text,
)  # fmt: skip
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.file.service_levels import levels_of, levels_text
from stepscope.tui.cli.recordings.measured import measure, side_of
from stepscope.tui.cli.shared.arguments import find_recording
from stepscope.tui.cli.shared.levels import advice_lines, limits_document, note_others
from stepscope.tui.cli.shared.options import AsJson, LastSeconds, Target, command, option
from stepscope.tui.cli.shared.output import say, text_table, write_json
from stepscope.tui.settings import cli_errors
from stepscope.tui.views import format as fmt


@command(
    "stepscope stats freeze",
    "stepscope stats engine-0 --seconds 10 --json | jq .figures.itl_p99",
    sections=("levels",),
    takes_key=True,
)
def stats(
    target: Target = None,
    *,
    seconds: LastSeconds = None,
    as_json: AsJson = False,
    flags: dict[str, Any],
) -> None:
    """Print all figures of a recording, an engine or /metrics."""
    found = measure(target, seconds, flags, "stats")
    if as_json:
        write_json({**found.document(), "advice": limits_document(found.run)["advice"]})
        return
    latencies = {kind: [latency_name(kind, rank) for rank in RANKS] for kind in KINDS}
    rows = [
        [label, *(fmt.milliseconds(found.figures[name]) for name in latencies[kind])]
        for kind, label in KINDS.items()
        if not kind.startswith("served") or found.figures[latencies[kind][0]] is not None
    ]
    left_out = {"steps", "seconds", *(name for names in latencies.values() for name in names)}
    others = [
        [name, value_text(spec, found.figures[name]), spec.meaning]
        for name, spec in FIGURES.items()
        if name not in left_out
    ]
    advised = advice_lines(found.run)
    say(
        f"{found.text}; levels {levels_text(levels_of(found.slo))}",
        "",
        *text_table(["ms", *RANKS.values()], rows),
        "",
        *text_table(["", "", ""], others, "<><")[1:],
        *([""] if advised else []),
        *advised,
    )


class CheckRow(NamedTuple):
    """The result for one bound, or for one figure compared with the baseline; values as text."""

    name: str  # of the figure
    asked: str
    measured: str
    # unsure: worse, but perhaps by chance; unknown: the session has no value
    outcome: Literal["ok", "unsure", "failed", "unknown"]
    detail: str = ""
    is_bound: bool = True  # else a comparison with the baseline


@command(
    "stepscope check run.mcap --max itl_p99=50ms --min goodput=95%",
    "stepscope check run.mcap --baseline main.mcap --json",
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
        "FILE", "fail where a figure is worse than in this recording, beyond chance"
    ),
    max_regression: str | None = option(
        "PERCENT", "with --baseline: how much worse is still accepted (default: 10%)"
    ),
    as_json: AsJson = False,
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
    allowed = _share(max_regression or "10%")
    found = measure(target, seconds, flags, "check", for_comparison=baseline is not None)
    checks = bound_checks(found.figures, bounds, lower)
    if baseline is not None:
        path = find_recording(baseline)
        with Recording(path) as recording:
            note_others(flags, baseline, recording, levels_of(found.slo), found.name)
        assert isinstance(found.run, Side)
        old = side_of(path, baseline, found.slo)
        checks += regression_checks(compare(old, found.run), allowed)
    outcomes = {each.outcome for each in checks}
    code = cli_errors.TOO_LITTLE_DATA if "unknown" in outcomes else cli_errors.DONE
    if "failed" in outcomes:
        code = cli_errors.FAILED
    if as_json:
        rows = [each._asdict() for each in checks]
        write_json({**found.document(), "checks": rows, "exit_code": code})
    else:
        listed = [each for each in checks if each.is_bound or each.outcome != "ok" or each.detail]
        cells = [[of.outcome, of.name, of.measured, of.asked, of.detail] for of in listed]
        heading = ["", "figure", "is", "asked", ""]
        say(found.text, *(text_table(heading, cells, "<<>><") if cells else []))
        if num_alike := len(checks) - len(listed):
            say(f"{num_alike} {'other ' * bool(cells)}figures are no worse than in the baseline")
    return code


def bound_checks(
    figures: Figures, most: Sequence[FigureBound], least: Sequence[FigureBound]
) -> list[CheckRow]:
    """Return a row for each bound. A value equal to its bound passes."""
    found = []
    for bound, sign in [*((each, "<=") for each in most), *((each, ">=") for each in least)]:
        figure, value = bound.figure, figures[bound.figure.name]
        asked, measured = f"{sign} {value_text(figure, bound.value)}", value_text(figure, value)
        if value is None:
            why = "the session has no sample of it"
            found.append(CheckRow(figure.name, asked, measured, "unknown", why))
            continue
        keeps = value <= bound.value if sign == "<=" else value >= bound.value
        found.append(CheckRow(figure.name, asked, measured, "ok" if keeps else "failed"))
    return found


def regression_checks(found: Comparison, allowed: float) -> list[CheckRow]:
    """Return a row for each figure that may be worse, or one that says why none is known."""
    if found.load.other_work is not None:
        why = f"the baseline was given other work: {found.load.other_work}"
        return [CheckRow("baseline", "the same work", "other work", "unknown", why)]
    checks = [
        _regression(figure, allowed)
        for figure in found.figures
        if figure.better is not None and figure.a is not None and figure.b is not None
    ]
    return checks or [CheckRow("baseline", "figures of both", "none", "unknown", "too few samples")]


def _regression(figure: ComparedFigure, allowed: float) -> CheckRow:
    by, spec = regression(figure), FIGURES.get(figure.key)
    before, now = (
        f"{value:,.4g}" if spec is None else value_text(spec, value)
        for value in (figure.a, figure.b)
    )
    row = CheckRow(figure.key, f"within {allowed:.0%} of {before}", now, "ok", is_bound=False)
    if figure.verdict == "a":
        detail = f"worse by {by:.1%}, which is significant"
        return row._replace(outcome="failed" if by > allowed else "ok", detail=detail)
    if figure.verdict == "unclear" and by > allowed:
        return row._replace(outcome="unsure", detail=f"worse by {by:.1%}, which may be chance")
    return row


def regression(figure: ComparedFigure) -> float:
    """Return by how much B is worse than A, as a share of A; of shares their difference."""
    a, b = figure.a or 0.0, figure.b or 0.0
    if figure.unit == "share" and figure.better == "higher":
        return a - b  # in percentage points: from 99 % to 98 % is one point
    change = b - a if figure.better == "lower" else a - b
    if not change:
        return 0.0
    return change / a if a else math.copysign(math.inf, change)


def _bound(option: str, text: str) -> FigureBound:
    try:
        bound = parse_bound(text)
    except BoundError as error:
        raise cli_errors.WrongUsage(f"{option} {error}") from error
    if bound.relation != "=":
        raise cli_errors.WrongUsage(f"{option} {text!r}: write {bound.figure.name}=VALUE")
    return bound


def _share(text: str) -> float:
    match = re.fullmatch(r"(\d*\.?\d+)(%?)", text)
    if match is None:
        raise cli_errors.WrongUsage(f"--max-regression: expected a share like 10%, got {text!r}")
    return float(match[1]) / (100 if match[2] else 1)
