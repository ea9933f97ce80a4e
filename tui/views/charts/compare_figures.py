"""The figures of a comparison, each with both values and the better run.

Latencies form a matrix of kinds and percentiles; the other figures are listed in columns below.
"""

from stepscope.recordings.compare.comparison import Comparison
from stepscope.recordings.compare.figures import ComparedFigure, Verdict
from stepscope.recordings.figures.table import KINDS
from stepscope.recordings.session.wait_slices import BESIDE_PREFILL, DECODE_ONLY
from stepscope.tui.views.frame import compare_text as words
from stepscope.tui.views.lines import Line, Run, clean

_LABEL = 7
_BLOCK = 22  # cells of a percentile, with the vertical line before it
_RANKS = {50: "p50", 95: "p95", 99: "p99", 100: "max", None: "in SLO"}
_PARTS = {DECODE_ONLY: "├decode", BESIDE_PREFILL: "└beside"}
_SERVED = {"ttft": "served_ttft", "itl": "served_itl"}  # as the front end sent them, if it tells
_BY_NEED = (99, 50, 100, None, 95)  # without room, the last of these is left out first
MARKS: dict[Verdict, tuple[str, str]] = {
    "a": ("A", "caution"),
    "b": ("B", "good"),
    "alike": ("=", "muted"),
    "unclear": ("?", "muted"),
    "differs": (" ", "muted"),
    "unknown": (" ", "muted"),
}
_ALIKE: Line = (
    ("=", "muted"), (" alike ", "muted"), ("?", "muted"), (" not sure", "muted"),
)  # fmt: skip


def key(found: Comparison) -> Line:
    """Return the legend of the marks behind each pair of values (better run, alike, not sure)."""
    if found.different_work is not None and not found.better("a") + found.better("b"):
        return (("A→B  ", "muted"), ("▼▲", "text"), (" lower, higher in B ", "muted"), *_ALIKE)
    return (
        ("A→B  ", "muted"),
        ("B", "good"), (" or ", "muted"), ("A", "caution"), (" is better ", "muted"), *_ALIKE,
    )  # fmt: skip


def matrix(found: Comparison, width: int, *, with_parts: bool) -> list[Line]:
    """Return the table of latencies: a line per kind, a column for each percentile that fits.

    With parts, two lines below ITL are for gaps without a prefill beside them and with one.
    """
    num = max(1, (width - _LABEL) // _BLOCK)
    kept = set(_BY_NEED[:num])
    ranks = [(rank, name) for rank, name in _RANKS.items() if rank in kept]
    head: list[Run] = [(f"{'ms':>{_LABEL - 1}} ", "muted")]
    for _, name in ranks:
        head += [("│", "frame"), (f"{name:^{_BLOCK - 1}}", "muted")]
    lines: list[Line] = [tuple(head)]
    rows: list[tuple[str, list[ComparedFigure]]] = []
    for kind, label in KINDS.items():
        if kind == "e2e" or kind in _SERVED.values():
            continue  # the sum of the others; the table has it
        of_kind = [figure for figure in found.figures if figure.kind == kind]
        if kind.startswith("served") and all(f.a is None and f.b is None for f in of_kind):
            continue  # few engines tell
        rows.append((" " + label.removesuffix(" time"), of_kind))
        if kind == "itl" and with_parts:
            rows += [
                (label, [figure for figure in found.figures if figure.kind == part])
                for part, label in _PARTS.items()
            ]
        served = [figure for figure in found.figures if figure.kind == _SERVED.get(kind, "")]
        if any(figure.a is not None or figure.b is not None for figure in served):
            rows.append(("└served", served))
    for label, of_row in rows:
        figures = {figure.rank: figure for figure in of_row}
        line: list[Run] = [(f"{label:<{_LABEL}}", "strong")]
        for rank, _ in ranks:
            line += [("│", "frame"), *_block(figures.get(rank))]
        lines.append(tuple(line))
    return lines


def _block(figure: ComparedFigure | None) -> Line:
    room = _BLOCK - 1
    if figure is None:
        return ((" " * room, "text"),)
    mark, style = _mark(figure)
    is_said = figure.verdict in ("a", "b")
    shown = words.change(figure)
    width = 13
    is_clear = figure.verdict in ("a", "b", "differs") or words.is_large(figure)
    has_factor = figure.rank is not None and is_clear
    factor = words.times(figure) if has_factor else ""
    return (
        (f"{shown:>{width}} ", "strong" if is_said else "text"),
        (mark, style),
        (f"{factor:>{room - width - 2}}", style if is_said else "muted"),
    )


def _mark(figure: ComparedFigure) -> Run:
    if figure.verdict == "differs":
        return "▲" if (figure.b or 0) > (figure.a or 0) else "▼", "muted"
    return MARKS[figure.verdict]


def others(found: Comparison, width: int, height: int) -> list[Line]:
    """Return the figures that are not latencies, in as many columns as fit into `width`."""
    num = max(1, width // 38)
    room = width // num
    # First those with a better run, last those without values in both runs.
    rank = {"a": 0, "b": 0, "unclear": 1, "differs": 1, "alike": 2, "unknown": 4}
    figures = [each for each in found.figures if each.kind is None]
    figures.sort(key=lambda f: rank[f.verdict] + (1 if not f.a and not f.b else 0))
    figures = figures[: num * height]
    lines: list[Line] = []
    for first in range(0, len(figures), num):
        line: list[Run] = []
        for figure in figures[first : first + num]:
            line += _entry(figure, room)
        lines.append(tuple(line))
    return lines


def _entry(figure: ComparedFigure, room: int) -> Line:
    mark, style = _mark(figure)
    is_said = figure.verdict in ("a", "b")
    factor = words.times(figure) if figure.verdict in ("a", "b", "differs") else ""
    tail = f" {mark}{factor:>6} "
    label = clean(figure.label, 16)
    shown = words.change(figure)
    gap = room - len(label) - len(shown) - len(tail) - 1
    return (
        (f" {label}", "muted"),
        (" " * max(1, gap), "muted"),
        (shown, "strong" if is_said else "text"),
        (tail, style),
    )
