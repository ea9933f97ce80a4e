"""`Frame`: all the data that one picture is drawn from, taken from the history at one moment.

The history is the session that the dashboard keeps in memory. The views are pure functions of a
frame, so a test can make a frame and read the lines. `FrameBuilder` makes frames.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stepscope.engine.protocol.wire import KnobsChanged, StepInFlight, StepRecord
from stepscope.recordings.attribution.causes import Late
from stepscope.recordings.compare.advice import Advice
from stepscope.recordings.history.history import History
from stepscope.recordings.history.source import SourceStatus
from stepscope.recordings.history.verdict import Verdict
from stepscope.recordings.history.windows import Stalls
from stepscope.recordings.session.drafts import Speculation
from stepscope.recordings.session.steps import StepSummary
from stepscope.recordings.session.sums import Sums
from stepscope.recordings.state.events import AuditedStep, SessionEvent
from stepscope.recordings.state.latency import LatencyReport
from stepscope.recordings.state.latency_samples import KeptLevels
from stepscope.recordings.state.limits import Limit
from stepscope.recordings.state.session import SessionState
from stepscope.tui.settings.actions import BY_ID
from stepscope.tui.views import format as fmt
from stepscope.tui.views.frame.chart_columns import ChartColumn
from stepscope.tui.views.frame.compare_choices import ComparePage
from stepscope.tui.views.frame.fleet_view import FleetPage
from stepscope.tui.views.frame.lane_rows import LaneRow
from stepscope.tui.views.view import View

LATENCY_WINDOW_S = 60.0
RATES_WINDOW_S = 10.0
BEHIND_S = 2.0  # messages may come so much later than usual
OLD_S = 3.0  # figures may be so much older than the step beside them
NOTABLE = frozenset({"preempt", "abort", "reject", "knobs", "slo", "gap", "mark", "engine"})


@dataclass(slots=True)
class Frame:
    """The data of one picture; `summary`, `state` and latencies are those at the cursor."""

    history: History
    view: View
    state: SessionState
    first_step: int | None
    last_step: int | None
    cursor: int | None  # the step to show; the newest while live
    summary: StepSummary | None
    columns: list[ChartColumn | None]
    cursor_column: int | None  # None while live: the newest column is always the last
    lanes: list[LaneRow]
    num_lanes: int  # all lanes, including those that do not fit
    latency: LatencyReport
    recent: Sums  # of the last ten seconds
    minute: Sums  # of the last minute
    kept: KeptLevels  # of the last minute
    limits: dict[Limit, float]  # of the last minute: the share of steps that each limit held back
    stall: Late | None
    worst: Stalls  # the longest stalls in memory, wherever the cursor is
    waiting_trend: int  # +1: more requests wait than two seconds ago, -1: fewer
    verdict: Verdict  # on the seconds up to the cursor
    advice: Sequence[Advice] = ()  # which knob to change; only on the knobs screen
    knee: int | None = None  # tokens from which on a step is bound by compute; two digits
    figures_age_s: float = 0.0  # from the step that latencies, rates and verdict are up to
    age_s: float = 0.0  # since the last message of the engine, on the clock of the dashboard
    behind_s: float = 0.0  # by how much later than usual its messages come
    events: list[SessionEvent] = field(default_factory=list)
    landmarks: list[SessionEvent] = field(default_factory=list)  # for the scrub bar
    changes_in_file: Sequence[KnobsChanged] = ()  # all knob changes in a replayed file
    audited_in_file: Sequence[AuditedStep] = ()  # all other audited commands in the file
    extent: tuple[int, int] | None = None  # first and last step that the cursor can go to
    is_replay: bool = False
    status: SourceStatus = "live"  # of the source when the picture was made
    windows: dict[str, LatencyReport] = field(default_factory=dict)  # only on the latency screen
    speculation: Speculation | None = None  # only there, and only if there were drafts
    prompts: Sums | None = None  # over all steps in memory up to the cursor; only on the KV screen
    fleet: FleetPage | None = None  # only on the fleet screen
    compare: ComparePage | None = None  # only on the compare screen
    keys: Mapping[str, str] = field(default_factory=dict)  # of actions without their default key

    @property
    def is_whole(self) -> bool:
        """Whether memory holds a replayed file from its start; true for a live source."""
        extent, first_step = self.extent, self.first_step
        return not self.is_replay or not extent or first_step is None or first_step <= extent[0]

    @property
    def window_s(self) -> float | None:
        """How many seconds of the last minute of a replay are in memory; None if all of it is."""
        return self.cut_s(LATENCY_WINDOW_S)

    def known_s(self, window_s: float) -> float:
        """Return how many seconds of a window up to the cursor have steps in memory."""
        begin = None if self.first_step is None else self.history.summary(self.first_step)
        if begin is None:
            return window_s
        return min(window_s, (self.state.time_ns - begin.schedule_start_ns) / 1e9)

    def cut_s(self, window_s: float) -> float | None:
        """Return how many seconds of a window up to the cursor are in memory; None if all of it is.

        Only a replay may have less than the window in memory. None also while earlier steps are
        still being loaded: until they are, the window's figures are left out.
        """
        if self.is_whole or self.first_step is None or self.history.is_short:
            return None
        # Memory may be complete from before its first step: the engine may have been idle.
        seconds = max(0.0, (self.state.time_ns - self.history.kept_from_ns) / 1e9)
        return seconds if seconds < window_s else None

    @property
    def tells_requests(self) -> bool:
        """Whether the engine publishes the requests of each step, and so their figures."""
        return self.summary is None or self.summary.num_rows is not None

    @property
    def is_summed_up(self) -> bool:
        """Whether a record is not of one step, but of a second or of a moment."""
        return self.state.is_summed_up

    @property
    def unit(self) -> str:
        """What a record is called: a step, if it is of one."""
        return "record" if self.is_summed_up else "step"

    @property
    def imported(self) -> str | None:
        """The kind of file of another tool that the session was read from; None: an engine."""
        return None if self.state.info is None else self.state.info.imported

    @property
    def is_idle(self) -> bool:
        """Whether the engine has nothing to do now; false if its state is unknown."""
        is_idle = self.state.state == "idle" and self.in_flight is None
        return self.view.live and self.status == "live" and is_idle

    @property
    def is_silent(self) -> bool:
        """Whether the engine's current state is unknown."""
        return self.view.live and self.status in ("stale", "down", "starting")

    @property
    def is_behind(self) -> bool:
        """Whether the picture is of an earlier moment, because messages come late."""
        return self.behind_s >= BEHIND_S and self.view.live and self.status == "live"

    @property
    def is_past(self) -> bool:
        """Whether the newest step may be long over, because the engine is paused or silent."""
        is_paused = self.status == "live" and self.state.state == "paused"
        return self.is_silent or (self.view.live and is_paused)

    def key(self, action_id: str) -> str:
        """Return the key that starts an action, for use in a sentence."""
        return self.keys.get(action_id) or BY_ID[action_id].key

    @property
    def in_flight(self) -> StepInFlight | None:
        """The step that runs now, if for long and the engine still publishes; else None."""
        return self.state.in_flight if self.view.live and not self.is_silent else None

    @property
    def step(self) -> int | None:
        """The step at the cursor; if there is no cursor, the last step that the engine reported."""
        if self.cursor is not None or self.state.step < 0:
            return self.cursor
        return self.state.step

    @property
    def record(self) -> StepRecord | None:
        return None if self.cursor is None else self.history.record(self.cursor)

    def wall_ns(self, step: int | None) -> int | None:
        summary = None if step is None else self.history.summary(step)
        return None if summary is None else self.history.wall_ns(summary.tokens_ns)

    def clock(self, time_ns: int) -> str:
        """Return a time of the engine as a time of day."""
        return fmt.clock(self.history.wall_ns(time_ns))
