"""The ITL strip: the longest gap between two tokens in each column of the budget chart."""

from stepscope.tui.views import format as fmt
from stepscope.tui.views.charts.budget_chart import labelled, with_cursor
from stepscope.tui.views.frame.frame import Frame
from stepscope.tui.views.framed_panels import column_chart
from stepscope.tui.views.lines import Line, framed

_MOST = 4.0  # times the bound: a longer gap fills its column
_LEAST = 1.25


def draw(frame: Frame, width: int, height: int, gutter: int) -> list[Line]:
    """Return the panel, `width` x `height` with its frame; labels in the `gutter` on its left."""
    bound_ms, num_rows = frame.history.slo.itl_ms, height - 2
    gaps_ms = [
        None if column is None or column.max_itl_ns is None else column.max_itl_ns / 1e6
        for column in frame.columns
    ]
    longest_ms = max((gap for gap in gaps_ms if gap is not None), default=0.0)
    top_ms = min(_MOST * bound_ms, max(_LEAST * bound_ms, longest_ms))
    styles = ["breach" if gap is not None and gap > bound_ms else "decode" for gap in gaps_ms]
    body: list[Line] = []
    at = num_rows - 1 - min(num_rows - 1, int(bound_ms / top_ms * num_rows))
    for y, line in enumerate(column_chart(gaps_ms, num_rows, top_ms, styles, bound_ms)):
        label = f"bound {bound_ms:g}" if y == at else fmt.with_ms(top_ms) if y == 0 else ""
        body.append((*labelled(label, gutter), *with_cursor(line, frame.cursor_column)))
    title: Line = (("ITL", "title"), (" ms, the longest gap in each column", "muted"))
    return framed(body, width, height, title)
