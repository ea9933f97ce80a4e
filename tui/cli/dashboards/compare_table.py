"""Prints a comparison as text: which run is better in each figure, then both runs side by side."""

from collections.abc import Sequence

from stepscope.recordings.compare.columns import Align, stretches
from stepscope.recordings.compare.comparison import Comparison
from stepscope.recordings.compare.estimate import CONFIDENCE
from stepscope.recordings.compare.side.points import StepPoint
from stepscope.recordings.compare.side.side import Side
from stepscope.tui.cli.shared.limits_text import advice_lines, limits_text
from stepscope.tui.cli.shared.text_table import text_table
from stepscope.tui.views import format as fmt
from stepscope.tui.views.frame import compare_sides as sides_text
from stepscope.tui.views.frame import compare_text as words

SURE = f"{CONFIDENCE:.0%} sure"


def lines(
    found: Comparison, sides: tuple[Side, Side], align: Align | None, limit: int
) -> list[str]:
    """Return the comparison as lines of text.

    Args:
        align: how to align the two runs side by side; None leaves that part out.
        limit: rows of requests, 0 for all.
    """
    return [
        *_summary(found),
        *_limits(sides),
        *_figures(found),
        *_aligned(found, sides, align, limit),
    ]


def _limits(sides: tuple[Side, Side]) -> list[str]:
    lines = []
    for letter, side in zip("AB", sides, strict=True):
        lines.append(f"{'limited by':<14} {letter}: {limits_text(side)}")
    for letter, side in zip("AB", sides, strict=True):
        lines += [f"{letter}  {line}" for line in advice_lines(side)]
    return lines


def _summary(found: Comparison) -> list[str]:
    names = found.names
    lines = [
        f"{letter}  {name}: {sides_text.work_text(work)}"
        for letter, name, work in zip("AB", names, found.works, strict=True)
    ]
    why = words.load(found)
    if why is not None:
        lines.append(f"{' ' if found.different_work is None else '!'}  {why}")
    lines.append("")
    settings = [words.setting_text(each) for each in found.settings]
    sections: Sequence[tuple[str, list[str]]] = (
        words.outcome(found, "b"),
        words.outcome(found, "a"),
        ("requests", words.paired(found)),
        ("not sure", words.unclear(found)),
        ("set", settings or [words.SAME_SETTINGS]),
    )
    for heading, phrases in sections:
        for number, phrase in enumerate(phrases):
            lines.append(f"{heading if not number else '':<9} {phrase}".rstrip())
    for kind in ("ITL", "TTFT"):
        bound = sides_text.bound_of(found, kind)
        for letter, side in (("A", "a"), ("B", "b")):
            why = sides_text.causes_of(found, kind, "a" if side == "a" else "b")
            lines.append(f"{kind + f' >{bound:g} ms':<14} {letter}: {why}")
    return lines


def _figures(found: Comparison) -> list[str]:
    rows = [
        [
            figure.label + (" ms" if figure.unit == "ms" else ""),
            words.value(figure, figure.a),
            words.value(figure, figure.b),
            words.ratio(figure),
            words.between(figure),
            words.verdict(figure),
        ]
        for figure in found.figures
    ]
    return ["", *text_table(["", "A", "B", "B/A", SURE, ""], rows, "<>>>><")]


def _aligned(
    found: Comparison, sides: tuple[Side, Side], align: Align | None, limit: int
) -> list[str]:
    if align is None:
        return []
    if align == "request":
        return _requests(found, limit)
    rows = []
    for start, a, b in stretches(*sides, align):
        where = f"{start:,}" if align == "step" else f"{start / 1e9:.1f} s"
        rows.append([where, *_cells(a), *_cells(b)])
    unit = "step from" if align == "step" else "from"
    heading = [unit, *(f"{side} {name}" for side in "AB" for name in _POINT_COLUMNS)]
    return ["", *text_table(heading, rows, ">" * len(heading))]


_POINT_COLUMNS = ("prefill", "budget", "decode", "wait ms")


def _cells(point: StepPoint | None) -> list[str]:
    if point is None:
        return ["", "", "", ""]
    wait = None if point.longest_us is None else point.longest_us / 1000
    return [
        f"{point.num_prefill_tokens:,}",
        fmt.count(point.token_budget),
        f"{point.num_decode_tokens:,}",
        fmt.milliseconds(wait),
    ]


def _requests(found: Comparison, limit: int) -> list[str]:
    matched = found.requests
    pairs = matched.pairs[: limit or None]
    rows = [
        [
            pair.name,
            f"{pair.a.num_prompt_tokens:,}" + ("" if pair.has_same_prompt else " ≠"),
            _ms(pair.a.ttft_ns),
            _ms(pair.b.ttft_ns),
            _ms(pair.a.worst_itl_ns),
            _ms(pair.b.worst_itl_ns),
            f"r{pair.a.request_id}",
            f"r{pair.b.request_id}",
        ]
        for pair in pairs
    ]
    heading = [
        "request", "prompt", "TTFT A", "TTFT B", "worst ITL A", "worst ITL B", "in A", "in B",
    ]  # fmt: skip
    rest = len(matched.pairs) - len(pairs)
    notes = [f"and {rest:,} more: --limit 0 shows all"] if rest else []
    if matched.only_a or matched.only_b:
        notes.append(f"without a partner: {matched.only_a:,} in A, {matched.only_b:,} in B")
    lines = ["", f"{len(matched.pairs):,} requests in both, by {matched.by}; milliseconds"]
    return [*lines, *text_table(heading, rows, "<>>>>>>>"), *notes]


def _ms(ns: int | None) -> str:
    return "—" if ns is None else f"{ns / 1e6:,.1f}"
