"""The verdict line: one sentence on what the engine is doing, with the key to its evidence."""

from stepscope.tui.views import format as fmt
from stepscope.tui.views.frame.frame import Frame
from stepscope.tui.views.lines import Line, clean


def draw(frame: Frame, width: int, height: int, gutter: int) -> list[Line]:
    if frame.view.live and frame.status in ("starting", "connecting"):
        return [((" waiting for the engine", "muted"),)]
    if frame.is_silent:
        said = f" the engine does not answer: the figures are {fmt.span(frame.age_s)} old"
        return [((clean(said, width), "breach"),)]
    verdict = frame.verdict
    hint = f" ({frame.key(verdict.look)})" if verdict.look else ""
    text = clean(f" {verdict.text}", max(1, width - len(hint)))
    return [((text, verdict.tone), (hint, "muted"))]
