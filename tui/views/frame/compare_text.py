"""The result of a comparison of two runs in sentences, for the screen and the command line.

A side is one of the runs, A or B.
"""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Literal

from stepscope.engine.protocol.wire import KnobValue
from stepscope.recordings.compare.comparison import Comparison, SettingDifference
from stepscope.recordings.compare.division import reaches
from stepscope.recordings.compare.figures import COMPARED_KINDS, PARTS, ComparedFigure, Verdict
from stepscope.recordings.figures.table import RANKS
from stepscope.recordings.state.audit_text import value_text
from stepscope.tui.views import format as fmt

VERDICTS: dict[Verdict, str] = {
    "a": "A better",
    "b": "B better",
    "alike": "alike",  # `NO_DIFFERENCE`, if that may be chance
    "unclear": "may be chance",
    "differs": "",
    "unknown": "not published",
}
TOO_FEW = "too few to be sure"
NO_DIFFERENCE = "no difference seen"
_NARROW = 1.1  # an interval within this factor shows that two values are alike
NOTHING = "nothing for sure"
NONE_LOWER = "in no latency"
_LARGE = 1.5  # from this factor on, an unclear difference is called "too few", not chance
SAME_SETTINGS = "no difference found"
_TOLD = ("itl", "ttft", "tpot")  # step times only explain these


def value(figure: ComparedFigure, number: float | None) -> str:
    """Return one run's value of a figure as text, without the unit; a dash if it is unknown."""
    if number is None:
        return "—"
    if figure.unit == "ms":
        return fmt.milliseconds(number)
    if figure.unit == "share":
        return percent(number)
    if abs(number) >= 99.95 or number == int(number):
        return f"{number:,.0f}" if abs(number) < 99_999 else fmt.short(number)
    return f"{number:.1f}" if abs(number) >= 0.095 else f"{number:.2g}"


def percent(share: float) -> str:
    """Return a share in percent. A share that only rounds to 100 % or 0 % is not shown as such."""
    if share >= 1 or share <= 0:
        return f"{share:.0%}"
    return f"{min(0.999, max(0.001, share)):.1%}"


def ratio(figure: ComparedFigure) -> str:
    """Return B's value divided by A's value; a dash if the ratio has no meaning."""
    found = figure.ratio
    if found is None:
        return "—"
    if found >= 99.5 or (found and found < 0.0095):
        return f"{found:.3g}x"
    return f"{found:.2f}x"


def times(figure: ComparedFigure) -> str:
    """Return the larger value divided by the smaller one; empty if the factor is unknown."""
    return "" if figure.factor is None else factor_text(figure.factor)


def factor_text(factor: float) -> str:
    if factor >= 99.5:
        return f"{factor:.0f}x"
    return f"{factor:.2g}x" if factor >= 1.995 else f"{factor:.2f}x"


def between(figure: ComparedFigure) -> str:
    """Return the confidence interval of B / A; empty if it is unknown."""
    if figure.interval is None:
        return ""
    low, high = figure.interval
    if low and high < math.inf:
        return f"{_number(low)}-{_number(high)}x"
    return f"> {_number(low)}x" if low else f"< {_number(high)}x" if high < math.inf else ""


def _number(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def verdict(figure: ComparedFigure) -> str:
    """Return in words which run is better in this figure, or why that is not known."""
    if figure.verdict == "differs" and figure.a is not None and figure.b is not None:
        more, less = ("higher", "lower") if figure.kind is not None else ("more", "less")
        return f"{more if figure.b > figure.a else less} in B"
    if figure.verdict == "alike" and figure.interval is not None:
        low, high = figure.interval
        if low < 1 / _NARROW or high > _NARROW:
            return NO_DIFFERENCE
    return TOO_FEW if is_large(figure) else VERDICTS[figure.verdict]


def is_large(figure: ComparedFigure) -> bool:
    """Whether an unclear difference is so large that longer runs might confirm it."""
    if figure.verdict != "unclear":
        return False
    factor = figure.factor or 0.0
    if figure.unit == "share" and figure.a is not None and figure.b is not None:
        missing = sorted((1 - figure.a, 1 - figure.b))  # 98 % and 86 %: 7 times as many were late
        factor = max(factor, missing[1] / missing[0] if missing[0] > 0 else math.inf)
    return factor >= _LARGE


def change(figure: ComparedFigure) -> str:
    """Return both values: 765.7→90.1. If only one is in seconds, both get a unit: 17.1s→19.5ms."""
    a, b = value(figure, figure.a), value(figure, figure.b)
    if figure.unit == "ms" and a.endswith("s") != b.endswith("s"):
        a, b = (fmt.either_unit(each) for each in (figure.a, figure.b))
    return f"{a}→{b}"


# Sentences


def load(found: Comparison) -> str | None:
    """Return how the work that clients requested differs between the runs; None if it is equal.

    The sentence also says what can still be judged in spite of it. Its numbers count requested
    work; numbers with the same units in the table count served work.
    """
    difference = found.load.difference
    if difference is None:
        return None
    if not found.load.is_known:
        return f"loads unknown, so nothing is judged: {difference}"
    if found.load.is_chance:
        return f"loads differ, maybe by chance: {difference}"
    return f"loads differ; only more work may win: {difference}"


def headline(found: Comparison) -> str:
    """Return the result in one sentence: the largest difference on each side that is better."""
    sides: tuple[Literal["a", "b"], ...] = ("b", "a")
    won = {
        side: re.sub(r", at \w+ [^)]*|(?<=\)), .*", "", outcome(found, side)[1][0])
        for side in sides
        if found.names_winner(side) and found.better(side)
    }
    if len(won) == 2:
        return f"B is better than A in {won['b']}, worse in {won['a']}"
    for side, what in won.items():
        return f"B is {'better' if side == 'b' else 'worse'} than A: {what}"
    is_known = found.different_work is None
    return "neither is better for sure" if is_known else "not to be judged: the work differs"


def outcome(found: Comparison, side: Literal["a", "b"]) -> tuple[str, list[str]]:
    """Return a heading ("A better", or of unlike work "A lower") and phrases on the figures."""
    letter = side.upper()
    if found.names_winner(side):
        sure, perhaps = _phrases(found.better(side)), _perhaps(found, side)
        if perhaps and not sure:
            sure = [f"{NOTHING}; perhaps {', '.join(perhaps)}: {TOO_FEW}"]
        return f"{letter} better", sure or [NOTHING]
    lower = [
        figure
        for figure in found.figures
        if figure.kind is not None
        and figure.rank is not None
        and figure.verdict == "differs"
        and figure.a is not None
        and figure.b is not None
        and (figure.a < figure.b) == (side == "a")
    ]
    return f"{letter} lower", _phrases(lower) or [NONE_LOWER]


def _perhaps(found: Comparison, side: Literal["a", "b"]) -> list[str]:
    return _phrases(
        [
            figure
            for figure in found.figures
            if is_large(figure)
            and figure.a is not None
            and figure.b is not None
            and (figure.a < figure.b) == ((figure.better == "lower") == (side == "a"))
        ]
    )


def _phrases(figures: Sequence[ComparedFigure]) -> list[str]:
    """Return a phrase for each kind of figure, the largest first, the parts of ITL last."""
    phrases: list[tuple[bool, float, str]] = []
    for kind in (*_TOLD, *PARTS):
        of_kind = [figure for figure in figures if figure.kind == kind]
        if of_kind:
            parts = [_part(figure) for figure in _outstanding(of_kind)]
            weight = max(min(figure.weight, 10) for figure in of_kind)
            text = f"{COMPARED_KINDS[kind]} {', '.join(parts)}"
            phrases.append((kind in PARTS, -weight, text))
    for figure in figures:
        if figure.kind is None:
            text = f"{figure.label} {change(figure)}{_times(figure)}"
            phrases.append((False, -figure.weight, text))
    return [text for *_, text in sorted(phrases, key=lambda phrase: phrase[:2])]


def _outstanding(figures: Sequence[ComparedFigure]) -> list[ComparedFigure]:
    """Return the three percentiles of one kind that differ most, not p90, nor equal ones."""
    kept: list[ComparedFigure] = []
    for figure in sorted(figures, key=lambda each: -each.weight):
        if figure.rank != 90 and not any(
            (figure.a, figure.b) == (other.a, other.b) for other in kept
        ):
            kept.append(figure)
    return kept[:3]


def _part(figure: ComparedFigure) -> str:
    if figure.rank is None:
        return f"{figure.label.split(' ', 1)[1]} {change(figure)}"
    unit = fmt.ms_unit(change(figure))
    return f"{RANKS[figure.rank]} {change(figure)}{unit}{_times(figure)}"


def _times(figure: ComparedFigure) -> str:
    text = times(figure)
    least = figure.least_factor
    if text and least is not None and figure.verdict in ("a", "b"):
        text += f", at least {factor_text(least)}"
    return f" ({text})" if text else ""


def unclear(found: Comparison) -> list[str]:
    """Return a phrase for each figure whose difference may be chance."""
    judges = found.different_work is None  # with different work, longer runs would not decide it
    phrases = []
    for kind, label in COMPARED_KINDS.items():
        figures = [f for f in found.figures if f.kind == kind and f.verdict == "unclear"]
        figures = [f for f in figures if f.rank != 90]  # p95 stands for it
        if figures:
            ranks = ", ".join(_unsure(f, judges) for f in figures)
            a, b = figures[0].num_a, figures[0].num_b
            number = f"{a:,}" if a == b else f"{a:,} and {b:,}"
            notes = [f"of {number}"] if found.load.is_same else []
            notes += [TOO_FEW] if judges and any(is_large(f) for f in figures) else []
            phrases.append(f"{label} {ranks}" + (f" ({', '.join(notes)})" if notes else ""))
    others = [f.label for f in found.figures if f.kind is None and f.verdict == "unclear"]
    return phrases + others


def _unsure(figure: ComparedFigure, has_values: bool) -> str:
    if has_values and is_large(figure):
        return _part(figure)
    return "within SLO" if figure.rank is None else RANKS[figure.rank]


def values_text(values: Iterable[KnobValue]) -> str:
    """Return all values that a setting had during a run, in order of time."""
    return "→".join(value_text(each) for each in values)


def reach(found: Comparison) -> list[str]:
    """Return a phrase on where parts of one session are cut short by another change, if so."""
    known = reaches(*found.names)
    parts = [] if known is None else zip("AB", known[1:], strict=True)
    joined = ", ".join(f"{letter} {text}" for letter, text in parts if text)
    return [joined] if joined else []


def setting_text(setting: SettingDifference) -> str:
    return f"{setting.name} {values_text(setting.a)} | {values_text(setting.b)}"
