"""The verdict line: one sentence on what the engine is doing, with the key to its evidence."""

from stepscope.tui.views import format as fmt
from stepscope.tui.views.frame.frame import Frame
from stepscope.tui.views.lines import Line, clean, click

_OLD_S = 6.0  # what was judged is no longer news


def draw(frame: Frame, width: int, height: int, gutter: int) -> list[Line]:
    if frame.view.live and frame.status in ("starting", "connecting"):
        return [((" waiting for the engine", "muted"),)]
    if frame.is_silent:
        what = "has stopped" if frame.state.state == "stopped" else "does not answer"
        said = f" the engine {what}: the figures are {fmt.span(frame.age_s)} old"
        return [((clean(said, width), "breach"),)]
    old_s = frame.figures_age_s + (frame.behind_s if frame.is_behind else 0.0)
    if old_s >= _OLD_S and frame.view.live and not frame.is_replay:
        why = "the engine's messages come late" if frame.is_behind else "they take long to compute"
        return [((clean(f" figures are {fmt.span(old_s)} old: {why}", width), "caution"),)]
    verdict = frame.verdict
    hint = f" ({frame.key(verdict.look)})" if verdict.look else ""
    said, room = f" {verdict.text}", max(1, width - len(hint))
    if len(said) > room:  # how often it was comes last
        said = said.rpartition("; ")[0] or said
    text = clean(said, room)
    line: Line = ((text, verdict.tone), (hint, "muted"))
    return [click(verdict.look, *line) if verdict.look else line]
