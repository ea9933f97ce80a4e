"""The notes of the fleet page: errors, engines whose figures stand out, settings that differ."""

import textwrap
from collections.abc import Sequence

from stepscope.recordings.fleets.fleet import FleetPicture
from stepscope.recordings.fleets.imbalance import FleetFigure, Imbalance
from stepscope.tui.views import format as fmt
from stepscope.tui.views.charts.fleet_columns import state_text
from stepscope.tui.views.frame.fleet_view import FleetPage
from stepscope.tui.views.lines import Line, Run, clean, length_of

_NUM_DIFFERENCES = 6
_LEAST_ALIKE = 3  # least number of engines to share a note
_NAMED = 6  # engines named in a shared note, besides the worst


def notes(page: FleetPage, width: int) -> list[Line]:
    """Return the lines of the notes, with what an operator should know first on top."""
    picture = page.picture
    lines: list[Line] = []
    for each in picture.lines:
        if not each.figures.is_up and each.figures.status != "connecting":
            text, style = state_text(each)
            error = each.figures.error or "nothing received from it yet"
            begin: Line = ((" ", "text"), (f"{each.figures.name} {text}", style), ("  ", "text"))
            lines += _wrapped(begin, [(clean(error, 300), "text")], width)
    for each in picture.lines:
        info = each.figures.info
        if info is None or info.role != "prefill" or info.decode_engine is not None:
            continue
        if info.engine is not None:  # attached: which engine goes on is decided for each request
            continue
        if each.figures.is_up:
            begin = ((" ", "text"), (f"▲ {each.figures.name}", "caution"), ("  ", "text"))
            text = "has no decode engine: it runs the decodes itself until one is there"
            lines += _wrapped(begin, [(text, "text")], width)
    for group in _alike(picture.imbalances):
        lines += _imbalance(picture, group, width)
    if not lines or (not picture.imbalances and picture.num_up > 1):
        style = "good" if len(picture.lines) > 1 else "text"
        lines += _wrapped(((" ", "text"),), [(_all_well(page), style)], width)
    if len(picture.lines) < 2:
        lines += _how_to_add()
    for number, text in enumerate(picture.differences[:_NUM_DIFFERENCES]):
        label = " other settings  " if not number else " " * 21
        lines += _wrapped(((label, "muted"),), [(clean(text, 300), "text")], width)
    hidden = len(picture.differences) - _NUM_DIFFERENCES
    if hidden > 0:
        lines.append(((f"{' ' * 21}and {fmt.plural(hidden, 'more setting')}", "muted"),))
    return lines


def _alike(imbalances: Sequence[Imbalance]) -> list[list[Imbalance]]:
    """Group engines that share a note (three or more), and single ones, by their worst engine."""
    kinds: dict[tuple[FleetFigure, ...], list[Imbalance]] = {}
    for each in imbalances:
        kinds.setdefault(each.figures, []).append(each)
    groups = []
    for each in imbalances:
        kind = kinds[each.figures]
        if len(kind) < _LEAST_ALIKE:
            groups.append([each])
        elif kind[0] is each:
            groups.append(kind)
    return groups


def _imbalance(picture: FleetPicture, group: Sequence[Imbalance], width: int) -> list[Line]:
    worst = group[0]
    sign, style = ("▼", "good") if worst.has_room else ("▲", "caution")
    seconds = picture.now_s - min(each.since_s for each in group)
    lasted = fmt.duration(seconds).split(".")[0]
    since = f" for {lasted}"
    if width >= 98:
        since = f" since {fmt.clock(round((picture.wall_s - seconds) * 1e9))} ({lasted})"
    begin: Line = ((f" {sign} {worst.name}", style), (f"{since}  ", "muted"))
    pieces: list[Run] = [(text, "text") for text in worst.texts]
    others = [each.name for each in group[1:]]
    if others:
        more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
        pieces.append((f"likewise {', '.join(others[:_NAMED])}{more}", "muted"))
    return _wrapped(begin, pieces, width)


def _all_well(page: FleetPage) -> str:
    picture = page.picture
    if len(picture.lines) < 2:
        return "one engine: there is nothing to compare it with"
    if picture.num_up < 2:
        return "fewer than two engines are up: there is nothing to compare"
    infos = [line.figures.info for line in picture.lines]
    roles = {None if info is None else info.role for info in infos}
    if roles == {"prefill", "decode"} and len(infos) == len(roles):
        return "one prefill and one decode engine: neither is compared with the other"
    return (
        "no engine stands out: waiting within 2x, KV within 25 points, TTFT within 2x and ITL "
        "within 1.5x of the others"
    )


def _how_to_add() -> list[Line]:
    return [
        ((" to watch several engines side by side:", "muted"),),
        (("   stepscope top engine-0 engine-1 tcp://10.0.0.7:5555", "text"),),
        ((" or in the config file, for 'stepscope top' alone:", "muted"),),
        (('   [fleet] engines = ["engine-0", "tcp://10.0.0.7:5555"]', "text"),),
    ]


def _wrapped(begin: Line, pieces: Sequence[Run], width: int) -> list[Line]:
    """Return lines with a beginning, then the pieces with dots between, wrapped to `width`."""
    indent = length_of(begin)
    if indent > width // 2:
        indent = 4
    lines: list[Line] = []
    line: list[Run] = list(begin)
    is_empty = True  # apart from the beginning
    for text, style in pieces:
        if not is_empty and length_of(line) + 3 + len(text) > width:
            lines.append(tuple(line))
            line, is_empty = [(" " * indent, "text")], True
        if not is_empty:
            line.append((" · ", "muted"))
        room = max(8, width - length_of(line))
        first, *rest = textwrap.wrap(text, room, break_on_hyphens=False) or [""]
        line.append((first, style))
        is_empty = False
        for part in rest:
            lines.append(tuple(line))
            line = [(" " * indent, "text"), (part, style)]
    lines.append(tuple(line))
    return lines
