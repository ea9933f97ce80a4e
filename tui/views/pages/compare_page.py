"""The page that compares two runs: which is better, in which figures, why, and both in charts."""

import re
import textwrap
from collections.abc import Sequence

from stepscope.recordings.compare.comparison import Comparison
from stepscope.recordings.compare.division import reaches
from stepscope.recordings.state.audit_text import with_short_names
from stepscope.tui.views import format as fmt
from stepscope.tui.views.charts import compare_charts
from stepscope.tui.views.frame import compare_text as words
from stepscope.tui.views.frame.compare_choices import ComparePage
from stepscope.tui.views.frame.frame import Frame
from stepscope.tui.views.framed_panels import Column, Target, bar, beside, table
from stepscope.tui.views.lines import (
    Line,
    Run,
    clean,
    facts,
    fitted,
    framed,
    length_of,
    spread,
    titled,
)
from stepscope.tui.views.panels.header import TITLE, SourceState

_TABLE_WIDTH = 68  # of the table of requests, if the charts are beside it
_BESIDE = 140
_WITH_PARTS = 18  # least lines to show also the parts of ITL
_ROOMY = 50  # least lines of a page with all figures
_LEAST_ROOM = 4  # lines for sentences, to begin with the result in one
_HEAD = 10  # cells left of a sentence
_REQUESTS = (
    Column("request", 13),
    Column("prompt", 9, True),
    Column("TTFT A", 7, True),
    Column("B", 6, True),
    Column("wait A", 7, True),
    Column("B", 7, True),
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


def header(frame: Frame, connection: SourceState, width: int) -> list[Line]:
    page = frame.compare
    line: list[Run] = [TITLE, ("▐COMPARE▌", "badge_replay")]
    if page is not None and page.names[0]:
        # Parts of one session are named after what divides them.
        found = reaches(*page.names)
        names, of = (page.names, "") if found is None else (("before", "after"), found[0])
        for letter, name in zip("AB", names, strict=True):
            line += [(f"  {letter} ", "strong"), (clean(name, max(8, (width - 62) // 2)), "text")]
        line += [(f"  {clean(of, max(8, width - 76))}", "mark")] if of else []
        line += facts("  by ", page.align)
        if page.is_reading:
            share = min(1.0 if share is None else share for share in page.shares)
            line.append((f"  reading {share:.0%}", "caution"))
        elif page.was_cancelled:
            line.append(("  reading was stopped", "caution"))
    return [spread(tuple(line), facts(f"{connection.fps:g}fps "), width)]


def draw(frame: Frame, width: int, height: int) -> list[Line]:
    page = frame.compare
    if page is None:
        return framed([], width, height, "compare")
    if page.choices is not None:
        return _chooser(frame, page, width, height)
    if page.comparison is None:
        return _waiting(frame, page, width, height)
    found = page.comparison
    lines = _verdict(page, found, width, height)
    rest = height - len(lines)
    if width >= _BESIDE:
        left = _requests(page, found, _TABLE_WIDTH, rest)
        right = _charts(frame, page, found.slo.itl_ms, width - _TABLE_WIDTH, rest)
        return [*lines, *beside(left, right)]
    if page.align == "request":
        # Without room for both show the table: the charts mean nothing without it.
        num_rows = min(len(found.requests.pairs) + 3, max(5, rest - 9), 14)
        num_rows = rest if rest - num_rows < 5 else num_rows
        lines += _requests(page, found, width, num_rows)
    if height > len(lines):
        lines += _charts(frame, page, found.slo.itl_ms, width, height - len(lines))
    return lines


def _verdict(page: ComparePage, found: Comparison, width: int, height: int) -> list[Line]:
    room = height - (9 if height < 30 else 16)  # for the charts
    inner = width - 2
    with_parts = room >= _WITH_PARTS
    figures = compare_charts.matrix(found, inner, with_parts=with_parts)
    room -= 2 + len(figures)
    num_others = (4 if inner >= 114 else 6) - 2 * (with_parts and height < _ROOMY)
    num_others = max(0, min(num_others, room - 8))
    sentences = _sentences(found, inner, room - num_others)
    body = [*sentences, *figures, *compare_charts.others(found, inner, num_others)]
    key = compare_charts.KEY
    title = "which is better"
    size = words.sizes(found, width - 8 - len(title) - length_of(key))
    idle = [letter for letter, work in zip("AB", found.works, strict=True) if not work.num_steps]
    notes = "; ".join([*(f"{letter} has no step yet" for letter in idle), *page.notes])
    said = f"  ! {clean(notes, max(10, inner - 75))}" if notes else ""
    heading = (*titled(title, f"  {size}" if size else ""), (said, "caution"))
    return framed(body, width, len(body) + 2, heading, key)


def _sentences(found: Comparison, width: int, room: int) -> list[Line]:
    """Return lines of sentences, the most important first. A text that does not fit ends in "…"."""
    lines: list[Line] = []
    headline = words.headline(found) if room > _LEAST_ROOM else ""
    if headline:
        forms = (headline, re.sub(r" \([^)]*\)", "", headline))
        said = clean(fmt.first_fitting(forms, width - 2), width - 2)
        lines.append(((f" {said}", "strong"),))
    why = words.load(found)
    if why is not None and all(work.num_steps for work in found.works):
        is_other = found.load.other_work is not None
        head, style = ("! work", "caution") if is_other else ("work", "mark")
        lines += _block(head, style, [why], width, (2 if room >= 5 else 1) + is_other)
    settings = [words.setting_text(each) for each in found.settings] or [words.SAME_SETTINGS]
    blocks: list[tuple[str, str, list[str]]] = [("set", "mark", [*words.reach(found), *settings])]
    for side, style in zip(words.SIDES, ("caution", "good"), strict=True):
        head, phrases = words.outcome(found, side)
        blocks.insert(0, (head, style if found.names_winner(side) else "text", phrases))
    # What the first sentence says is not said again.
    blocks = [each for each in blocks if not headline.endswith(": " + "; ".join(each[2]))]
    for number, (head, style, phrases) in enumerate(blocks):
        left = room - len(lines) - (len(blocks) - number - 1)
        lines += _block(head, style, phrases, width, max(1, min(3, left)))
    if room - len(lines) >= 2:
        for side in words.SIDES:
            itl, ttft = (words.causes_of(found, kind, side, 1) for kind in ("ITL", "TTFT"))
            late = f"ITL: {itl} │ TTFT: {ttft}".replace(" of waiting", "")
            lines += _block(f"late {side.upper()}", "text", [late], width, 1)
    unclear = words.unclear(found)
    if unclear and len(lines) < room:
        lines += _block("not sure", "muted", unclear, width, min(3, room - len(lines)))
    return lines


def _block(head: str, style: str, phrases: Sequence[str], width: int, most: int) -> list[Line]:
    room = max(20, width - _HEAD - 1)
    wrapped = textwrap.wrap(clean("; ".join(phrases), 4000), room) or [""]
    if rest := wrapped[most:]:
        wrapped[most - 1 :] = [clean(" ".join([wrapped[most - 1], *rest]), room)]
    heads = [head, *[""] * len(wrapped)]
    rows = zip(heads, wrapped, strict=False)
    return [((f" {head:<{_HEAD - 1}}", style), (text, "text")) for head, text in rows]


def _charts(frame: Frame, page: ComparePage, slo_ms: float, width: int, height: int) -> list[Line]:
    points = zip("AB", page.points, strict=True)
    cursor = [compare_charts.cursor_line(page, *each, slo_ms, width - 2) for each in points]
    if height < 4:
        return framed(cursor, width, height, "at the cursor")
    charts = compare_charts.draw(page, slo_ms, height - 2 - len(cursor))
    request = "no request in both" if page.pair is None else f"request {page.pair.name}"
    what = {"time": "time", "step": "steps"}.get(page.align, request)
    unit = fmt.plural(page.width, "step") if page.align == "step" else fmt.with_ms(page.width / 1e6)
    about = f"  aligned by {clean(what, 30)} ({frame.key('sort')}: other)  1 col = {unit}"
    title = titled("A above, B below", about)
    return framed([*charts, *cursor], width, height, title, compare_charts.LEGEND)


def _requests(page: ComparePage, found: Comparison, width: int, height: int) -> list[Line]:
    matched = found.requests
    rows: list[list[Run]] = []
    for pair in matched.pairs[: max(200, page.selected + 100)]:
        change = pair.worst_change_ns
        if change is None or abs(pair.ttft_change_ns or 0) > abs(change):
            change = pair.ttft_change_ns
        style = "muted" if not change else "good" if change < 0 else "caution"
        prompt = f"{pair.a.num_prompt_tokens:,}"
        if not pair.has_same_prompt:
            sizes = pair.a.num_prompt_tokens, pair.b.num_prompt_tokens
            texts = ["→".join(map(of, sizes)) for of in (str, fmt.short)]
            prompt = fmt.first_fitting(texts, _REQUESTS[1].width)
        both = (pair.a.ttft_ns, pair.b.ttft_ns, pair.a.worst_itl_ns, pair.b.worst_itl_ns)
        ms = (fmt.milliseconds(None if ns is None else ns / 1e6) for ns in both)
        moved = "—" if change is None else f"{change / 1e6:+,.1f}"
        cells: list[Run] = [(pair.name, "strong"), (prompt, "muted")]
        rows.append([*cells, *((each, "text") for each in ms), (moved, style)])
    selected = page.selected if page.align == "request" and rows else None
    body = table(_REQUESTS, rows, width - 2, height - 2, selected)
    if not rows:
        which = "spans both parts" if found.is_one_session else "is in both"
        body = [facts(f" no request {which}")]
    about = f" ({len(matched.pairs):,}, by {matched.by}); ms, largest gap first"
    return framed(body, width, height, titled("requests in both", about))


def _waiting(frame: Frame, page: ComparePage, width: int, height: int) -> list[Line]:
    body: list[Line] = [()]
    for letter, name, known in zip("AB", page.names, page.shares, strict=True):
        share = 1.0 if known is None else known
        begin: Line = ((f"  {letter} ", "strong"), (f"{clean(name, 30):<31}", "text"))
        read = bar(share, max(10, width - 60), "decode")
        body.append((*begin, *read, (f" {share:4.0%} read", "muted")))
    notes = page.notes or ["waiting for the first step of both sides"]
    body += [(), *(((f"  {clean(note, width - 6)}", "caution"),) for note in notes)]
    body.append(facts(f"  {frame.key('back')} stops reading"))
    return framed(body, width, height, "compare")


def _chooser(frame: Frame, page: ComparePage, width: int, height: int) -> list[Line]:
    rows: list[list[Run]] = []
    for choice in page.choices or ():
        of = fmt.first_fitting((choice.name, with_short_names(choice.name)), _CHOICES[1].width)
        rows.append([(choice.kind, "mark"), (of, "strong"), (choice.detail, "muted")])
    session, key = frame.history.info, frame.key
    name = "this session" if session is None else clean(session.name, 30)
    hint = f"{key('lane_up')} {key('lane_down')} choose, {key('inspect')} compares"
    said = " Marks and knob changes divide this session; each part ends at the next one."
    lines = [fitted(facts(said), width - 2)]
    lines += table(_CHOICES, rows, width - 2, height - 3, page.selected)
    return framed(lines, width, height, titled("compare", f"  {name} is A; what is B?"), hint)
