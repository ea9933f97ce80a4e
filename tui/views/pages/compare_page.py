"""The page that compares two runs: which is better, in which figures, why, and both in charts."""

import re
import textwrap
from collections.abc import Sequence

from stepscope.recordings.compare.comparison import Comparison
from stepscope.recordings.compare.division import reaches
from stepscope.tui.views import format as fmt
from stepscope.tui.views.charts import compare_charts
from stepscope.tui.views.frame import compare_choices as sides
from stepscope.tui.views.frame import compare_text as words
from stepscope.tui.views.frame.compare_choices import ComparePage
from stepscope.tui.views.frame.frame import Frame
from stepscope.tui.views.framed_panels import Cell, Column, Target, bar, beside, table
from stepscope.tui.views.lines import Line, Run, clean, fitted, framed, length_of, spread

_TABLE_WIDTH = 68  # of the table of requests, if the charts are beside it
_BESIDE = 140
_WITH_PARTS = 18  # least lines to show also the parts of ITL
_ROOMY = 50  # least lines of a page with all figures
_LEAST_ROOM = 4  # lines for sentences, to begin with the result in one
_HEAD = 10  # cells left of a sentence
_REQUESTS = (
    Column("request", 13),
    Column("prompt", 7, True),
    Column("TTFT A", 7, True),
    Column("B", 7, True),
    Column("wait A", 7, True),
    Column("B", 8, True),
    Column("B-A", 0, True),
)
_CHOICES = (Column("", 9), Column("compare with", 34), Column("", 0))


def chart_columns(width: int) -> int:
    if width >= _BESIDE:
        width -= _TABLE_WIDTH
    return max(1, width - 2 - compare_charts.GUTTER)


def column_at(line: str, width: int, x: int) -> int | None:
    """Return the index of the chart column at cell `x` of the page; None beside the charts."""
    first = (_TABLE_WIDTH if width >= _BESIDE else 0) + 1 + compare_charts.GUTTER
    if len(line) <= first or line[first - 1] not in "│┤" or not first <= x < width - 1:
        return None
    return x - first


def targets(frame: Frame) -> list[Target]:
    page = frame.compare
    if page is None:
        return []
    if page.choices is not None:
        return [Target() for _ in page.choices]
    if page.align != "request" or page.comparison is None:
        return []
    return [Target(request_id=pair.a.request_id) for pair in page.comparison.requests.pairs]


def header(frame: Frame, title: str, fps: float, width: int) -> list[Line]:
    page = frame.compare
    line: list[Run] = [(f" {clean(title, 24)} ", "strong"), ("▐COMPARE▌", "badge_replay")]
    if page is not None and page.names[0]:
        names, of = _short_names(*page.names)
        room = max(8, (width - 62) // 2)
        for letter, name in zip("AB", names, strict=True):
            line += [(f"  {letter} ", "strong"), (clean(name, room), "text")]
        line += [(f"  {clean(of, max(8, width - 76))}", "mark")] if of else []
        line += [("  by ", "muted"), (page.align, "text")]
        if page.is_reading:
            shares = [1.0 if share is None else share for share in page.shares]
            line.append((f"  reading {min(shares):.0%}", "caution"))
        elif page.was_cancelled:
            line.append(("  reading was stopped", "caution"))
    return [spread(tuple(line), ((f"{fps:g}fps ", "muted"),), width)]


def _short_names(a: str, b: str) -> tuple[tuple[str, str], str]:
    """Return short names of both runs, and what divides them if they are parts of one session."""
    found = reaches(a, b)
    return ((a, b), "") if found is None else (("before", "after"), found[0])


def small(frame: Frame, width: int, height: int) -> list[Line]:
    page = frame.compare
    if page is None or page.comparison is None:
        nothing: Line = ((" nothing to compare yet", "muted"),)
        return [nothing][:height]
    return _sentences(page.comparison, width, height)[:height]


def draw(frame: Frame, width: int, height: int) -> list[Line]:
    page = frame.compare
    if page is None:
        return framed([], width, height, (("compare", "title"),))
    if page.choices is not None:
        return _chooser(frame, page, width, height)
    if page.comparison is None:
        return _waiting(frame, page, width, height)
    found = page.comparison
    lines = _verdict(page, found, width, height)
    rest = height - len(lines)
    if width >= _BESIDE:
        left = _requests(page, found, _TABLE_WIDTH, rest)
        right = _charts(frame, page, width - _TABLE_WIDTH, rest)
        return [*lines, *beside(left, right)]
    if page.align == "request":
        # Without room for both show the table: the charts mean nothing without it.
        num_rows = min(len(found.requests.pairs) + 3, max(5, rest - 9), 14)
        num_rows = rest if rest - num_rows < 5 else num_rows
        lines += _requests(page, found, width, num_rows)
    if height > len(lines):
        lines += _charts(frame, page, width, height - len(lines))
    return lines


# The verdict


def _verdict(page: ComparePage, found: Comparison, width: int, height: int) -> list[Line]:
    """Return the panel above the charts: sentences on which run is better, and its figures."""
    room = height - (9 if height < 30 else 16)  # for the charts
    inner = width - 2
    with_parts = room >= _WITH_PARTS
    figures = compare_charts.matrix(found, inner, with_parts=with_parts)
    room -= 2 + len(figures)
    num_others = 4 if inner >= 114 else 6
    if with_parts and height < _ROOMY:
        num_others -= 2
    num_others = max(0, min(num_others, room - 8))
    sentences = _sentences(found, inner, room - num_others)
    others = compare_charts.others(found, inner, num_others) if num_others else []
    title: Line = (("which is better", "title"),)
    key = compare_charts.key(found)
    size = sides.sizes(found, width - 8 - len("which is better") - length_of(key))
    if size:
        title = (*title, (f"  {size}", "muted"))
    elif size := sides.sizes(found, width - 6 - length_of(key)):
        title = ((size, "title"),)
    body = [*sentences, *figures, *others]
    idle = [letter for letter, work in zip("AB", found.works, strict=True) if not work.num_steps]
    notes = [f"{letter} has no step yet" for letter in idle] + page.notes
    notes_text = "; ".join(notes)
    if notes_text:
        title = (*title, (f"  ! {clean(notes_text, max(10, inner - 75))}", "caution"))
    return framed(body, width, len(body) + 2, title, key)


def _sentences(found: Comparison, width: int, room: int) -> list[Line]:
    """Return lines of sentences, the most important first. A text that does not fit ends in "…"."""
    settings = [words.setting_text(each) for each in found.settings]
    lines: list[Line] = []
    headline = words.headline(found) if room > _LEAST_ROOM else ""
    if headline:
        fits = len(headline) <= width - 2
        said = headline if fits else re.sub(r" \([^)]*\)", "", headline)
        lines.append(((f" {clean(said, width - 2)}", "strong"),))
    why = words.load(found)
    if why is not None and all(work.num_steps for work in found.works):
        is_other = found.different_work is not None
        head, style = ("! work", "caution") if is_other else ("work", "mark")
        most = 2 if room >= 5 else 1
        lines += _block(head, style, [why], width, most + is_other)
    (head_b, in_b), (head_a, in_a) = words.outcome(found, "b"), words.outcome(found, "a")
    blocks: list[tuple[str, str, list[str]]] = [
        (head_b, "good" if found.names_winner("b") else "text", in_b),
        (head_a, "caution" if found.names_winner("a") else "text", in_a),
        ("set", "mark", [*words.reach(found), *(settings or [words.SAME_SETTINGS])]),
    ]
    # What the first sentence says is not said again.
    blocks = [each for each in blocks if not headline.endswith(": " + "; ".join(each[2]))]
    for number, (head, style, phrases) in enumerate(blocks):
        left = room - len(lines) - (len(blocks) - number - 1)
        lines += _block(head, style, phrases, width, max(1, min(3, left)))
    if room - len(lines) >= 2:
        late = [sides.late(found, side, width - _HEAD - 1) for side in sides.SIDES]
        both = f"A {late[0]}; B {late[1]}"
        heads = {"late A": late[0], "late B": late[1]}
        for head, text in ({"late": both} if len(both) < width - _HEAD else heads).items():
            lines += _block(head, "text", [text], width, 1)
    unclear = words.unclear(found)
    if unclear and len(lines) < room:
        lines += _block("not sure", "muted", unclear, width, min(3, room - len(lines)))
    return lines


def _block(head: str, style: str, phrases: Sequence[str], width: int, most: int) -> list[Line]:
    wrapped = _wrapped(phrases, width - _HEAD - 1, most)
    return [
        ((f" {head if not number else '':<{_HEAD - 1}}", style), (text, "text"))
        for number, text in enumerate(wrapped)
    ]


def _wrapped(phrases: Sequence[str], width: int, num_lines: int) -> list[str]:
    text = "; ".join(phrases)
    lines = textwrap.wrap(clean(text, 4000), max(20, width)) or [""]
    if len(lines) > num_lines:
        rest = " ".join(lines[num_lines - 1 :])
        lines = [*lines[: num_lines - 1], clean(rest, max(1, width))]
    return lines


# Step against step


def _charts(frame: Frame, page: ComparePage, width: int, height: int) -> list[Line]:
    slo_ms = page.comparison.slo.itl_ms if page.comparison is not None else 0.0
    cursor = compare_charts.cursor_lines(page, slo_ms, width - 2)
    if height < 4:
        return framed(cursor, width, height, (("at the cursor", "title"),))
    charts = compare_charts.draw(page, slo_ms, height - 2 - len(cursor))
    what = {"time": "time", "step": "steps"}.get(page.align)
    if what is None:
        what = f"request {page.pair.name}" if page.pair is not None else "no request in both"
    unit = fmt.plural(page.width, "step") if page.align == "step" else fmt.with_ms(page.width / 1e6)
    title: Line = (
        ("A above, B below", "title"),
        (f"  aligned by {clean(what, 30)} ({frame.key('sort')}: other)", "muted"),
        (f"  1 col = {unit}", "muted"),
    )
    return framed([*charts, *cursor], width, height, title, compare_charts.LEGEND)


def _requests(page: ComparePage, found: Comparison, width: int, height: int) -> list[Line]:
    matched = found.requests
    rows: list[list[Cell]] = []
    for pair in matched.pairs[: max(200, page.selected + 100)]:
        change = pair.worst_change_ns
        if change is None or abs(pair.ttft_change_ns or 0) > abs(change):
            change = pair.ttft_change_ns
        style = "muted" if not change else "good" if change < 0 else "caution"
        prompt = f"{pair.a.num_prompt_tokens:,}" + ("" if pair.has_same_prompt else "!")
        rows.append(
            [
                (pair.name, "strong"),
                (prompt, "muted"),
                *((_ms(ns), "text") for ns in (pair.a.ttft_ns, pair.b.ttft_ns)),
                *((_ms(ns), "text") for ns in (pair.a.worst_itl_ns, pair.b.worst_itl_ns)),
                ("—" if change is None else f"{change / 1e6:+,.1f}", style),
            ]
        )
    selected = page.selected if page.align == "request" and rows else None
    body = table(_REQUESTS, rows, width - 2, height - 2, selected)
    if not rows:
        text = "no request is in both"
        if found.is_one_session:
            text = "no request spans both parts"
        body = [((f" {clean(text, width - 3)}", "muted"),)]
    number = f"{len(matched.pairs):,}"
    title: Line = (
        ("requests in both", "title"),
        (f" ({number}, by {matched.by}); ms, largest gap first", "muted"),
    )
    return framed(body, width, height, title)


def _ms(ns: int | None) -> str:
    return fmt.milliseconds(None if ns is None else ns / 1e6)


# Before there is anything


def _waiting(frame: Frame, page: ComparePage, width: int, height: int) -> list[Line]:
    body: list[Line] = [()]
    for letter, name, share in zip("AB", page.names, page.shares, strict=True):
        line: list[Run] = [(f"  {letter} ", "strong"), (f"{clean(name, 30):<31}", "text")]
        line += [*bar(1.0 if share is None else share, max(10, width - 60), "decode")]
        line.append((f" {1.0 if share is None else share:4.0%} read", "muted"))
        body.append(tuple(line))
    notes = page.notes or ["waiting for the first step of both sides"]
    body += [(), *(((f"  {clean(note, width - 6)}", "caution"),) for note in notes)]
    body.append(((f"  {frame.key('back')} stops reading", "muted"),))
    return framed(body, width, height, (("compare", "title"),))


def _chooser(frame: Frame, page: ComparePage, width: int, height: int) -> list[Line]:
    rows: list[list[Cell]] = [
        [(choice.kind, "mark"), (choice.name, "strong"), (choice.detail, "muted")]
        for choice in page.choices or ()
    ]
    body = table(_CHOICES, rows, width - 2, height - 3, page.selected)
    session = frame.history.info
    name = "this session" if session is None else clean(session.name, 30)
    title: Line = (("compare", "title"), (f"  {name} is A; what is B?", "muted"))
    key = frame.key
    hint: Line = (
        (f"{key('lane_up')} {key('lane_down')} choose, {key('inspect')} compares", "muted"),
    )
    lines: list[Line] = [fitted(((
        " Marks and knob changes divide this session: A and B each end at the next change.", "muted"
    ),), width - 2), *body]  # fmt: skip
    return framed(lines, width, height, title, hint)
