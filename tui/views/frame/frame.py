"""`Frame`: everything one picture is drawn from, taken from the history at one moment.

The views are pure functions of a frame, so that a test can make one and read the lines.
`FrameBuilder` makes them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stepscope.engine.protocol.wire import KnobsChanged, StepInFlight, StepRecord
from stepscope.recordings.attribution.causes import Late
from stepscope.recordings.history.history import History
from stepscope.recordings.history.rates import Rates
from stepscope.recordings.history.source import SourceStatus
from stepscope.recordings.history.windows import Goodput, Stalls
from stepscope.recordings.state.series.columns import StepSummary
from stepscope.recordings.state.series.events import AuditedStep, SessionEvent
from stepscope.recordings.state.series.latency import LatencyReport
from stepscope.recordings.state.series.limits import Limit
from stepscope.recordings.state.session import SessionState
from stepscope.tui.settings.actions import BY_ID
from stepscope.tui.views.frame.chart_columns import ChartColumn
from stepscope.tui.views.frame.compare_picture import ComparePage
from stepscope.tui.views.frame.fleet_desk import FleetPage
from stepscope.tui.views.frame.lane_rows import LaneRow
from stepscope.tui.views.view import View

LATENCY_WINDOW_S = 60.0
RATES_WINDOW_S = 10.0
NOTABLE = frozenset({"preempt", "abort", "reject", "knobs", "slo", "gap", "mark", "engine"})


@dataclass(slots=True)
class Frame:
    """What the screen shows. `summary`, `state` and the latencies are those at the cursor."""

    history: History
    view: View
    state: SessionState
    first_step: int | None
    last_step: int | None
    cursor: int | None  # step looked at; the newest while live
    summary: StepSummary | None
    columns: list[ChartColumn | None]
    cursor_column: int | None  # None while live: the newest is where it always is
    lanes: list[LaneRow]
    num_lanes: int  # that could be shown
    latency: LatencyReport
    rates: Rates
    goodput: Goodput  # of the last minute
    limits: dict[Limit, float]  # share of its steps that each thing limited
    stall: Late | None
    worst: Stalls  # the longest in memory, wherever the cursor is
    waiting_trend: int  # +1 more wait than a moment ago, -1 fewer
    events: list[SessionEvent] = field(default_factory=list)
    landmarks: list[SessionEvent] = field(default_factory=list)  # for the scrub bar
    changes_in_file: Sequence[KnobsChanged] = ()  # of knobs, in all of a replayed file
    audited_in_file: Sequence[AuditedStep] = ()  # all other audited commands of the file
    extent: tuple[int, int] | None = None  # all steps one can go to; of a replay, in the file
    is_replay: bool = False
    status: SourceStatus = "live"  # of the source when the picture was made
    windows: dict[str, LatencyReport] = field(default_factory=dict)  # of the latency screen
    fleet: FleetPage | None = None  # on the fleet screen
    compare: ComparePage | None = None  # on the compare screen
    keys: Mapping[str, str] = field(default_factory=dict)  # of actions, where they are not theirs

    @property
    def is_whole(self) -> bool:
        """All of a replayed file that is before the cursor is in memory; true of what is live."""
        extent, first_step = self.extent, self.first_step
        return not self.is_replay or not extent or first_step is None or first_step <= extent[0]

    @property
    def window_s(self) -> float | None:
        """How much of the last minute of a replay is in memory, where not all of it is."""
        return self.cut_s(LATENCY_WINDOW_S)

    def cut_s(self, window_s: float) -> float | None:
        """How much of a window of a replay is in memory, where not all of it is.

        None, too, where figures of it are left out because more of it is about to be there.
        """
        if self.is_whole or self.first_step is None or self.history.is_short:
            return None
        # The engine may have been idle before the first step: then there is no more of it.
        seconds = max(0.0, (self.state.time_ns - self.history.kept_from_ns) / 1e9)
        return seconds if seconds < window_s else None

    @property
    def tells_requests(self) -> bool:
        """The engine publishes the requests of a step; if not, their figures are unknown."""
        return self.summary is None or self.summary.num_rows is not None

    @property
    def is_summed_up(self) -> bool:
        """Each record is of a second, not of a step, and latencies are estimates."""
        return self.state.is_summed_up

    @property
    def is_idle(self) -> bool:
        """The engine has nothing to do now; false where its state is unknown."""
        return self.view.live and self.status == "live" and self.state.state == "idle"

    @property
    def is_silent(self) -> bool:
        """The engine's state now is unknown."""
        return self.view.live and self.status in ("stale", "down", "starting")

    @property
    def is_past(self) -> bool:
        """The last step is not one that has just been: the engine is paused, or not heard of."""
        return self.is_silent or (
            self.view.live and self.status == "live" and self.state.state == "paused"
        )

    def key(self, action_id: str) -> str:
        """The key of an action, for a sentence."""
        return self.keys.get(action_id) or BY_ID[action_id].key

    @property
    def in_flight(self) -> StepInFlight | None:
        """The step that runs now, if it takes long and the engine still publishes."""
        return self.state.in_flight if self.view.live and not self.is_silent else None

    @property
    def step(self) -> int | None:
        """The step at the cursor; of an engine that was idle ever since, its last one."""
        if self.cursor is not None or self.state.step < 0:
            return self.cursor
        return self.state.step

    @property
    def record(self) -> StepRecord | None:
        """The whole record of the step at the cursor."""
        return None if self.cursor is None else self.history.record(self.cursor)

    def wall_ns(self, step: int | None) -> int | None:
        summary = None if step is None else self.history.summary(step)
        return None if summary is None else self.history.wall_ns(summary.tokens_ns)
