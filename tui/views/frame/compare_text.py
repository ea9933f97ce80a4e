"""The result of a comparison of two runs in sentences, for the screen and the command line.

A side is one of the runs, A or B.
"""

import math
import re
from collections.abc import Sequence
from typing import Literal, TypeAlias

from stepscope.recordings.attribution.causes import WORDS
from stepscope.recordings.compare.comparison import Comparison, SettingDifference, SideWork
from stepscope.recordings.compare.division import reaches
from stepscope.recordings.compare.figures import COMPARED_KINDS, PARTS, ComparedFigure, Verdict
from stepscope.recordings.figures import RANKS
from stepscope.recordings.state.audit_text import value_text
from stepscope.recordings.state.session import SIMULATED
from stepscope.tui.views import format as fmt

SideName: TypeAlias = Literal["a", "b"]
SIDES: tuple[SideName, ...] = ("a", "b")
VERDICTS: dict[Verdict, str] = {
    "a": "A better",
    "b": "B better",
    "alike": "alike",
    "unclear": "may be chance",
    "differs": "",
    "unknown": "not published",
}
_NARROW = 1.1  # an interval within this factor shows that two values are alike
SAME_SETTINGS = "no difference found"
_TOLD = ("itl", "ttft", "tpot")  # step times only explain these


def value(figure: ComparedFigure, number: float | None) -> str:
    """Return one run's value of a figure as text, without the unit; a dash if it is unknown."""
    if number is None:
        return "—"
    if figure.unit == "ms":
        return fmt.milliseconds(number)
    if figure.unit == "share":
        return fmt.exact_percent(number)
    if abs(number) >= 99.95 or number == int(number):
        return f"{number:,.0f}" if abs(number) < 99_999 else fmt.short(number)
    return f"{number:.1f}" if abs(number) >= 0.095 else f"{number:.2g}"


def ratio(figure: ComparedFigure) -> str:
    """Return B's value divided by A's value; a dash if the ratio has no meaning."""
    found = figure.ratio
    if found is None:
        return "—"
    return f"{found:.3g}x" if found >= 99.5 or 0 < found < 0.0095 else f"{found:.2f}x"


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
    low, high = (f"{end:.2f}" if end >= 0.1 else f"{end:.2g}" for end in figure.interval)
    if figure.interval[1] < math.inf:
        return f"{low}-{high}x" if figure.interval[0] else f"< {high}x"
    return f"> {low}x" if figure.interval[0] else ""


def verdict(figure: ComparedFigure) -> str:
    """Return in words which run is better in this figure, or why that is not known."""
    if figure.verdict == "differs" and figure.a is not None and figure.b is not None:
        more, less = ("higher", "lower") if figure.kind is not None else ("more", "less")
        return f"{more if figure.b > figure.a else less} in B"
    if figure.verdict == "alike" and figure.interval is not None:
        low, high = figure.interval
        if low < 1 / _NARROW or high > _NARROW:
            return "no difference seen"
    return VERDICTS[figure.verdict]


def change(figure: ComparedFigure) -> str:
    """Return both values: 765.7→90.1. If only one is in seconds, both get a unit: 17.1s→19.5ms."""
    a, b = value(figure, figure.a), value(figure, figure.b)
    if figure.unit == "ms" and a.endswith("s") != b.endswith("s"):
        a, b = (fmt.either_unit(each) for each in (figure.a, figure.b))
    return f"{a}→{b}"


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
    won = {
        side: re.sub(r", at \w+ [^)]*|(?<=\)), .*", "", outcome(found, side)[1][0])
        for side in SIDES
        if found.names_winner(side) and found.better(side)
    }
    if len(won) == 2:
        return f"B is better than A in {won['b']}, worse in {won['a']}"
    for side, what in won.items():
        return f"B is {'better' if side == 'b' else 'worse'} than A: {what}"
    is_known = found.load.other_work is None
    return "neither is better for sure" if is_known else "not to be judged: the work differs"


def outcome(found: Comparison, side: SideName) -> tuple[str, list[str]]:
    """Return a heading ("A better", or of unlike work "A lower") and phrases on the figures."""
    letter = side.upper()
    if found.names_winner(side):
        return f"{letter} better", _phrases(found.better(side)) or ["nothing for sure"]
    ranked = [f for f in found.figures if None not in (f.kind, f.rank) and f.verdict == "differs"]
    known = [(figure, figure.a, figure.b) for figure in ranked]
    lower = [f for f, a, b in known if a is not None and b is not None and (a < b) == (side == "a")]
    return f"{letter} lower", _phrases(lower) or ["in no latency"]


def _phrases(figures: Sequence[ComparedFigure]) -> list[str]:
    """Return a phrase for each kind of figure, the largest first, the parts of ITL last."""
    phrases: list[tuple[bool, float, str]] = []
    for kind in (*_TOLD, *PARTS):
        of_kind = [figure for figure in figures if figure.kind == kind]
        if of_kind:
            parts = ", ".join(_part(figure) for figure in _outstanding(of_kind))
            weight = max(min(figure.weight, 10) for figure in of_kind)
            phrases.append((kind in PARTS, -weight, f"{COMPARED_KINDS[kind]} {parts}"))
    for figure in figures:
        if figure.kind is None:
            text = f"{figure.label} {change(figure)}{_times(figure)}"
            phrases.append((False, -figure.weight, text))
    return [text for *_, text in sorted(phrases, key=lambda phrase: phrase[:2])]


def _outstanding(figures: Sequence[ComparedFigure]) -> list[ComparedFigure]:
    """Return the three percentiles of one kind that differ most, not p90, nor equal ones."""
    kept: dict[object, ComparedFigure] = {}
    for figure in sorted(figures, key=lambda each: -each.weight):
        if figure.rank != 90:
            kept.setdefault((figure.a, figure.b), figure)
    return list(kept.values())[:3]


def _part(figure: ComparedFigure) -> str:
    if figure.rank is None:
        return f"{figure.label.split(' ', 1)[1]} {change(figure)}"
    unit = fmt.ms_unit(change(figure))
    return f"{RANKS[figure.rank]} {change(figure)}{unit}{_times(figure)}"


def _times(figure: ComparedFigure) -> str:
    text = times(figure)
    least = figure.least_factor
    if text and least is not None and figure.verdict in SIDES:
        text += f", at least {factor_text(least)}"
    return f" ({text})" if text else ""


def unclear(found: Comparison) -> list[str]:
    """Return a phrase for each kind of figure whose difference may be chance."""
    phrases = []
    for kind, label in COMPARED_KINDS.items():
        figures = [f for f in found.figures if f.kind == kind and f.verdict == "unclear"]
        figures = [f for f in figures if f.rank != 90]  # p95 stands for it
        if figures:
            ranks = ("within SLO" if f.rank is None else RANKS[f.rank] for f in figures)
            a, b = figures[0].num_a, figures[0].num_b
            number = f"{a:,}" if a == b else f"{a:,} and {b:,}"
            of = f" (of {number})" if found.load.is_same else ""
            phrases.append(f"{label} {', '.join(ranks)}{of}")
    others = [f.label for f in found.figures if f.kind is None and f.verdict == "unclear"]
    return phrases + others


def reach(found: Comparison) -> list[str]:
    """Return a phrase on where parts of one session are cut short by another change, if so."""
    known = reaches(*found.names)
    parts = [] if known is None else zip("AB", known[1:], strict=True)
    joined = ", ".join(f"{letter} {text}" for letter, text in parts if text)
    return [joined] if joined else []


def setting_text(setting: SettingDifference) -> str:
    """Return the values of a setting in both runs, each in order of time: `name 8→4 | 8`."""
    a, b = ("→".join(map(value_text, values)) for values in (setting.a, setting.b))
    return f"{setting.name} {a} | {b}"


def sizes(found: Comparison, width: int) -> str:
    """Return the number of requests and the duration of both runs; empty if there is no room."""
    a, b = (
        f"{letter}{'' if work.simulated is None else f' {SIMULATED},'} "
        f"{_requests(work)} in {fmt.span(work.seconds)}"
        for letter, work in zip("AB", found.works, strict=True)
    )
    num_a, num_b = (fmt.count(work.num_requests) for work in found.works)
    return fmt.first_fitting((f"{a}, {b}", f"A {num_a}, B {num_b} requests", ""), width)


def work_text(work: SideWork) -> str:
    how = "" if work.simulated is None else f"{SIMULATED}, "
    unit = "records" if work.sums_up else "steps"
    tokens = f"{fmt.count(work.num_in_tokens)} tokens in, {fmt.count(work.num_out_tokens)} out"
    steps = f"{work.num_steps:,} {unit} in {fmt.span(work.seconds)}"
    return f"{how}{steps}, {_requests(work)}, {tokens}"


def _requests(work: SideWork) -> str:
    if work.num_requests is None:
        return "— requests"
    before = work.num_requests - (work.num_arrived or work.num_requests)
    from_before = f" ({before:,} from before)" if before > 0 else ""
    return fmt.plural(work.num_requests, "request") + from_before


def causes_of(found: Comparison, kind: str, side: SideName, limit: int = 3) -> str:
    """Return a line on a run's late tokens: how many, the total wait, `limit` main causes."""
    shares = [
        (share.cause, *((share.a_ns, share.num_a) if side == "a" else (share.b_ns, share.num_b)))
        for share in found.causes
        if share.kind == kind
    ]
    total_ns, number = sum(ns for _, ns, _ in shares), sum(num for *_, num in shares)
    if not number or not total_ns:
        within = found.figure(f"{kind.lower()}_within_slo")
        known = within.a if side == "a" else within.b
        return "unknown" if known is None else "none" if known == 1 else "of unknown cause"
    parts = [
        f"{WORDS[cause].name} {fmt.exact_percent(ns / total_ns)}"
        for cause, ns, _ in sorted(shares, key=lambda share: -share[1])[:limit]
        if ns >= total_ns / 100
    ]
    late = f"{number:,} late, {total_ns / 1e9:,.1f} s of waiting"
    return f"{late}: {', '.join(parts)}" if parts else late
