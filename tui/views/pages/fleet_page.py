"""The fleet page: a line per engine, and notes on engines that differ from the others.

From the top: the table; the notes on what is wrong, stands out or is set differently; the events of
the engines; requests across prefill and decode engines. Without enough room the last parts are left
out.
"""

import textwrap
from collections.abc import Sequence

from stepscope.recordings.fleets.whole_lives import WholeLife
from stepscope.recordings.state.session import request_name
from stepscope.tui.views import format as fmt
from stepscope.tui.views.frame import fleet_view
from stepscope.tui.views.frame.fleet_view import FleetPage
from stepscope.tui.views.frame.frame import Frame
from stepscope.tui.views.framed_panels import Target, first_shown
from stepscope.tui.views.lines import (
    Field,
    Line,
    Run,
    clean,
    facts,
    fitted,
    framed,
    joined,
    length_of,
    spread,
    titled,
    whole,
)
from stepscope.tui.views.panels.header import TITLE, SourceState

_LEAST_ROWS = 3  # least rows of the table
_NUM_DIFFERENCES = 6
_TOO_FEW = "fewer than two engines are up: there is nothing to compare"
_ALL_WELL = (
    "no engine stands out: waiting within 2x, KV within 25 points, TTFT within 2x and ITL "
    "within 1.5x of the others of its kind"
)
_HOW_TO_ADD: tuple[Line, ...] = (
    facts(" to watch several engines side by side:"),
    facts("", "   stepscope top engine-0 engine-1 tcp://10.0.0.7:5555"),
    facts(" or in the config file, for 'stepscope top' alone:"),
    facts("", '   [fleet] engines = ["engine-0", "tcp://10.0.0.7:5555"]'),
)


def targets(frame: Frame) -> list[Target]:
    page = frame.fleet
    return [] if page is None else [Target(engine=each.name) for each in page.engines]


def draw(frame: Frame, width: int, height: int) -> list[Line]:
    page = frame.fleet
    if page is None or width < 4 or height < 3:
        return [fitted((), width)] * height
    notes = _notes(page, width - 2)
    lines = _table(frame, page, width, height, len(notes))
    left = height - len(lines)
    if left >= 3:
        notes_height = min(left, len(notes) + 2)
        lines += framed(_cut(notes, notes_height - 2), width, notes_height, "what stands out")
    left, num_events = height - len(lines), len(page.picture.events)
    if left >= 4 and num_events:
        lines += _events(page, width, min(left, num_events + 2))
    left = height - len(lines)
    if page.picture.lives and left >= 4:
        lines += _lives(page, width, left)
    return lines + [fitted((), width)] * (height - len(lines))


def header(frame: Frame, connection: SourceState, width: int) -> list[Line]:
    right, page = facts(f"{connection.fps:g}fps "), frame.fleet
    if page is None:
        return [spread((), right, width)]
    left: Line = (TITLE, ("▐FLEET▌", "badge_live"), (" ", "text"))
    room = width - length_of(right) - 1
    return [spread(whole(_fields((*left, *_up(page)), page), room), right, width)]


def _up(page: FleetPage) -> list[Run]:
    picture = page.picture
    number = len(picture.lines)
    all_up = "strong" if picture.num_up == number else "caution"
    runs: list[Run] = [(f"{picture.num_up}/{number} up", all_up)]
    for status in ("stale", "down", "starting", "connecting"):
        count = sum(line.figures.status == status for line in picture.lines)
        style = "badge_down" if status == "down" else "caution"
        if count:
            runs += [("  ", "text"), (f"{count} {status.upper()}", style)]
    if page.recorded:
        runs += [("  ● REC", "mark"), (f" {len(page.recorded)}" * (number > 1), "text")]
    return runs


def _fields(begin: Line, page: FleetPage) -> list[Field]:
    def total(name: str) -> str:
        values = [getattr(engine, name) for engine in page.engines]
        known = [value for value in values if value is not None]
        return fmt.short(sum(known)) if known else "-"

    running, seats = total("num_running"), total("num_seats")
    values = {
        " run": running if "-" in (running, seats) else f"{running}/{seats}",
        "wait": total("num_waiting"),
        "out": f"{total('output_tokens_per_s')} tok/s",
        "preempt": f"{total('num_preempted')}/m",
        "gap": total("num_lost"),
    }
    sums = (Field(n, facts(f"  {name} ", values[name])) for n, name in enumerate(values, 1))
    return [Field(0, begin), *sums]


def _table(frame: Frame, page: FleetPage, width: int, height: int, num_notes: int) -> list[Line]:
    """Return the table, with room for all engines, unless the notes need some of it."""
    number, wanted, key = len(page.lines), len(page.lines) + 3, frame.key
    least_notes = min(num_notes + 2, max(3, height // 3))
    height = min(height, max(min(wanted, height - least_notes), min(wanted, _LEAST_ROWS + 3)))
    legend = (
        f"{key('inspect')} opens one; {key('step_back')}/{key('step_forward')} orders by another "
        f"column, {key('reverse')} reverses it"
    )
    room = height - 3
    first = first_shown(number, room, page.selected)
    which = f"  {first + 1}-{first + room} of {number}" if number > room else ""
    body = fleet_view.draw(page, width - 2, height - 2)
    return framed(body, width, height, titled("engines", which), legend)


def _cut(notes: Sequence[Line], room: int) -> list[Line]:
    if len(notes) <= room:
        return list(notes)
    more = facts(f" … {len(notes) - room + 1} more lines; a taller window shows them")
    return [*notes[: max(0, room - 1)], more]


def _events(page: FleetPage, width: int, height: int) -> list[Line]:
    body: list[Line] = []
    for event in reversed(page.picture.events[-(height - 2) :]):
        when, style = fmt.clock(round(event.wall_s * 1e9)), "text" if event.is_good else "caution"
        name = (f"{clean(event.name, 30)} ", "strong")
        body.append(facts(f" {when} ", name, (clean(event.text, width), style)))
    return framed(body, width, min(height, len(body) + 2), "what happened")


def _notes(page: FleetPage, width: int) -> list[Line]:
    picture = page.picture
    lines: list[Line] = []
    for line in picture.lines:
        figures, info = line.figures, line.figures.info
        if not figures.is_up and figures.status != "connecting":
            text, style = fleet_view.state_text(line)
            begin: Line = ((" ", "text"), (f"{figures.name} {text}", style), ("  ", "text"))
            error = figures.error or "nothing received from it yet"
            lines += _wrapped(begin, clean(error, 300), "text", width)
        # Of an attached one, which engine goes on is decided for each request.
        is_prefill = info is not None and info.engine is None and info.role == "prefill"
        if is_prefill and info is not None and info.decode_engine is None and figures.is_up:
            begin = ((" ", "text"), (f"▲ {figures.name}", "caution"), ("  ", "text"))
            text = "has no decode engine: it runs the decodes itself until one is there"
            lines += _wrapped(begin, text, "text", width)
    for each in picture.imbalances:
        sign, style = ("▼", "good") if each.has_room else ("▲", "caution")
        seconds = picture.now_s - each.since_s
        begun = fmt.clock(round((picture.wall_s - seconds) * 1e9))
        since = f" since {begun} ({fmt.short_span(seconds)})  "
        begin = ((f" {sign} {each.name}", style), (since, "muted"))
        lines += _wrapped(begin, "; ".join(each.texts), "text", width)
    if not lines or (not picture.imbalances and picture.num_up > 1):
        style = "good" if len(picture.lines) > 1 else "text"
        said = _ALL_WELL if picture.num_up > 1 else _TOO_FEW
        lines += _wrapped(((" ", "text"),), said, style, width)
    if len(picture.lines) < 2:
        lines += _HOW_TO_ADD
    labels = [" other settings  ", *[" " * 21] * _NUM_DIFFERENCES]
    for label, text in zip(labels, picture.differences[:_NUM_DIFFERENCES], strict=False):
        lines += _wrapped(facts(label), clean(text, 300), "text", width)
    hidden = len(picture.differences) - _NUM_DIFFERENCES
    if hidden > 0:
        lines.append(facts(f"{' ' * 21}and {fmt.plural(hidden, 'more setting')}"))
    return lines


def _wrapped(begin: Line, text: str, style: str, width: int) -> list[Line]:
    used = length_of(begin)
    indent = used if used <= width // 2 else 4
    first, *rest = textwrap.wrap(
        text, max(width, used + 8), initial_indent=" " * used, subsequent_indent=" " * indent,
        break_on_hyphens=False,
    )  # fmt: skip
    return [(*begin, (first[used:], style)), *(((each, style),) for each in rest)]


_SECOND = 10  # cells
_CELL_NS = 1_000_000_000 // _SECOND
_LIFE_LABEL = 24

_PREFILL: Run = ("▓", "prefill")
_WAIT: Run = ("·", "idle")
_WAY: Run = ("→", "caution")
_DECODE: Run = ("━", "decode")
_END: Run = ("●", "finished")
_NOTHING: Run = (" ", "text")
_LIVES_KEY: Line = (
    _PREFILL, (" prefill  ", "muted"), _WAIT, (" waits  ", "muted"),
    _WAY, (" handed over  ", "muted"), _DECODE, (" decode  ", "muted"),
    _END, (" end", "muted"),
)  # fmt: skip


def _lives(page: FleetPage, width: int, height: int) -> list[Line]:
    lanes = life_lanes(page.picture.lives, page.picture.lives_ns, width - 2, height - 3)
    body = [*lanes, _life_axis(width - 2)]
    return framed(body, width, height, "from prefill to decode", _LIVES_KEY)


def life_lanes(lives: Sequence[WholeLife], now_ns: int, width: int, height: int) -> list[Line]:
    """Return one line for each of the newest requests that fit, the oldest of these on top."""
    cells = max(0, width - _LIFE_LABEL - 1)
    begin_ns = (now_ns // _CELL_NS - cells) * _CELL_NS  # whole cells, which do not flicker
    shown = [life for life in lives if life.end_ns is None or life.end_ns > begin_ns][-height:]
    engines = {name for life in shown for name in (life.prefill, life.decode) if name is not None}
    lines = []
    for life in shown:
        times = (begin_ns + place * _CELL_NS for place in range(cells))
        lane = joined(_life_cell(life, start_ns, now_ns) for start_ns in times)
        lines.append(fitted((*_life_label(life, len(engines)), *lane), width))
    return lines


def _life_axis(width: int) -> Line:
    seconds, rest = divmod(max(0, width - _LIFE_LABEL - 1), _SECOND)
    ticks = "".join(f"┴-{second} s".ljust(_SECOND, "─") for second in range(seconds, 0, -1))
    return ((" " * (_LIFE_LABEL + 1), "text"), ("─" * rest + ticks, "muted"))


def _life_label(life: WholeLife, num_engines: int) -> Line:
    """Both ids, and the client's; of several pairs of engines, their names instead."""
    who = life.client_id if num_engines <= 2 else f"{life.prefill}→{life.decode or '?'}"
    names = request_name(life.request_id)
    if life.decode_id is not None:
        names += f"→{request_name(life.decode_id)}"
    room = _LIFE_LABEL - len(names) - 3
    return ((f" {names} ", "text"), (f"{clean(who, room):<{room}}  ", "muted"))


def _life_cell(life: WholeLife, start_ns: int, now_ns: int) -> Run:
    """Return what the request did from `start_ns` on; a transfer gets a cell, however short."""
    end_ns = start_ns + _CELL_NS
    gone_ns = now_ns if life.end_ns is None else life.end_ns
    if end_ns <= life.arrival_ns or start_ns >= gone_ns:
        return _NOTHING
    if life.end_ns is not None and end_ns >= life.end_ns:
        return _END
    if start_ns < life.waited_until_ns:
        return _WAIT
    if life.first_token_ns is None or start_ns < life.first_token_ns - _CELL_NS:
        return _PREFILL
    if life.sent_ns is not None:
        received_ns = gone_ns if life.received_ns is None else life.received_ns
        if start_ns <= received_ns and life.sent_ns < end_ns:
            return _WAY
        if start_ns > received_ns:
            return _WAIT if start_ns < life.loaded_after_ns else _DECODE
    if start_ns < life.first_token_ns:
        return _PREFILL
    return _DECODE if life.decodes_here else _WAIT
