"""Adds the step in flight, which has no record yet, as the newest column of the charts."""

from typing import NamedTuple

from stepscope.engine.protocol.wire import StepInFlight
from stepscope.recordings.state.series.lanes import Cell
from stepscope.recordings.state.session import SessionState
from stepscope.tui.views.frame.chart_columns import ChartColumn
from stepscope.tui.views.frame.lane_rows import LaneRow


class Drawn(NamedTuple):
    """The columns of the charts, and the lanes of requests over the same columns."""

    columns: list[ChartColumn | None]
    lanes: list[LaneRow]


def with_open_column(drawn: Drawn, step: StepInFlight, state: SessionState) -> Drawn:
    """Shift the columns and lanes left by one, and add the step in flight as the last column."""
    prefilling = {part.request_id for part in step.prefills}
    column = ChartColumn(
        step.step,
        step.step,
        step.since_ns,
        step.num_prefill_tokens,
        step.num_decodes,
        step.token_budget,
        None,
        has_preemption=False,
        has_knob_change=False,
        has_mark=False,
        has_breach=False,
        is_lost=False,
        is_open=True,
    )
    lanes = []
    for lane in drawn.lanes:
        view = state.requests.get(lane.request_id)
        cell = int(Cell.ABSENT)
        if lane.request_id in prefilling:
            cell = int(Cell.PREFILL)
        elif view is not None and view.status == "waiting":
            cell = int(Cell.WAITING)
        elif view is not None and view.status == "running":
            cell = len(Cell)  # the step of its next token still runs
        lanes.append(lane._replace(cells=lane.cells[1:] + bytes((cell,))))
    return Drawn([*drawn.columns[1:], column], lanes)
