"""The queue of waiting requests at the cursor: since when and for what each waits."""

from stepscope.engine.protocol.wire import RequestView, StepRecord
from stepscope.recordings.attribution.open_waits import blocking_reason
from stepscope.recordings.attribution.queue import in_order, reason_text
from stepscope.recordings.state.session import request_name
from stepscope.tui.views import format as fmt
from stepscope.tui.views.frame.frame import Frame
from stepscope.tui.views.framed_panels import Cell, Column, Rows, table
from stepscope.tui.views.lines import Line, framed

_NUM_PREEMPTIONS = 200  # the newest preemptions to look up
_COLUMNS = (
    Column("request", 8),
    Column("since", 8),
    Column("waits", 8, True),
    Column("prompt", 7, True),
    Column("behind", 7, True),
    Column("for", 0),
)


def height(frame: Frame, room: int) -> int:
    """Return the height of the panel in lines; 0 if the queue is empty or `room` is too small."""
    num_waiting = len(_waiting(frame))
    return 0 if not num_waiting or room < 12 else min(num_waiting + 3, room // 3)


def draw(frame: Frame, record: StepRecord, width: int, num_lines: int) -> list[Line]:
    """Return the panel, with the first request of the queue on top."""
    events = frame.history.events(frame.cursor, _NUM_PREEMPTIONS, frozenset({"preempt"}))
    # When each was last preempted, as far as memory reaches back.
    preempted_ns = {each.request_id: each.time_ns for each in events if each.request_id is not None}
    queue = in_order(_waiting(frame), preempted_ns, frame.state.knobs)

    def row(place: int) -> list[Cell]:
        view = queue[place]
        is_out = view.status == "preempted"
        since_ns = preempted_ns.get(view.request_id) if is_out else view.arrival_ns
        if view.is_partial and not is_out:
            since_ns = None
        wall_ns = None if since_ns is None else frame.history.wall_ns(since_ns)
        waits_s = None if since_ns is None else (frame.state.time_ns - since_ns) / 1e9
        return [
            (request_name(view.request_id), "caution" if is_out else "strong"),
            ("—" if wall_ns is None else fmt.clock(wall_ns), "muted"),
            ("—" if waits_s is None else f"{max(0.0, waits_s):,.1f} s", "text"),
            (f"{view.num_prompt_tokens:,}", "muted"),
            (f"{len(queue) - 1 - place:,}", "text"),
            (_reason(frame, record, queue, place), "text" if not place else "muted"),
        ]

    # Remove the marks for clicks: only the batch rows of the step can be selected.
    lines = table(_COLUMNS, Rows(len(queue), row), width - 2, num_lines - 2, None)
    body = [tuple(run for run in line if run[0]) for line in lines]
    title = f"waiting ({len(queue)}), in the order of the queue"
    return framed(body, width, num_lines, title)


def _waiting(frame: Frame) -> list[RequestView]:
    views = frame.state.requests.values()
    return [view for view in views if view.status in ("waiting", "preempted")]


def _reason(frame: Frame, record: StepRecord, queue: list[RequestView], place: int) -> str:
    view = queue[place]
    is_paused = frame.state.state == "paused"
    if not (is_paused or view.held) and "kv_blocks" in (record.waiting_reasons or {}):
        first = next((each for each in queue if each.held in ("", "priority")), view)
        if first is not view:
            return f"behind {request_name(first.request_id)}"
    text = reason_text("paused" if is_paused else view.held or blocking_reason(record))
    if view.num_blocks:
        text += f"; holds {fmt.plural(view.num_blocks, 'block')}"
    return f"{text}; was preempted" if view.status == "preempted" else text
