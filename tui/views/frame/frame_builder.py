"""`FrameBuilder`: makes each `Frame`, and caches what is expensive to compute."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stepscope.engine.protocol.wire import StepInFlight
from stepscope.recordings.compare.advice import RecentRun, advice
from stepscope.recordings.history.history import History
from stepscope.recordings.history.verdict import verdict_at
from stepscope.recordings.session.sums import Sums
from stepscope.recordings.state.audit_text import seconds_of
from stepscope.recordings.state.events import SessionEvent
from stepscope.recordings.state.lanes import Cell
from stepscope.recordings.state.session import SessionState
from stepscope.tui.settings.action_table import Page
from stepscope.tui.views.frame import chart_columns
from stepscope.tui.views.frame.frame import LATENCY_WINDOW_S, NOTABLE, RATES_WINDOW_S, Frame
from stepscope.tui.views.frame.lane_rows import LaneRow, lane_rows
from stepscope.tui.views.view import View

if TYPE_CHECKING:
    from stepscope.recordings.replay.file_index import FileIndex  # with mcap, only when needed

_REFRESH_S = 1.0  # between two updates of figures that cost much, or are read rather than watched
_MOST_REFRESH_S = 5.0  # of figures that cost very much
_KNEE_SHARE = 4_000  # a knee that took t seconds is found again after 4,000 t: it hardly changes
_LAG_S = 60.0  # the least delay of messages in so many seconds counts as usual
_ASKING = ("knobs", "latency", "kv")  # pages with figures of their own


class FrameBuilder:
    """Makes frames; caches what is expensive to compute. Use it only on the UI thread.

    Args:
        recorded: first and last step of the replayed file; None for a live source.
        cpu_clock: returns the seconds of processor time that this thread has used; None: as told
            by the system, or by `clock` if that is a test's.
        keys: action -> its first key as people write it, for actions without their default key.
        stands: returns true if the newest step changes only when the operator moves (a replay that
            does not play).
    """

    def __init__(
        self,
        history: History,
        recorded: tuple[int, int] | None = None,
        clock: Callable[[], float] = time.monotonic,
        keys: Mapping[str, str] | None = None,
        in_file: "FileIndex | None" = None,
        stands: Callable[[], bool] = lambda: False,
        cpu_clock: Callable[[], float] | None = None,
    ) -> None:
        self._history = history
        self._stands = stands
        self._in_file = in_file
        self._recorded = recorded
        self._clock = clock
        self._cpu_clock = cpu_clock or (time.thread_time if clock is time.monotonic else clock)
        self._keys = keys or {}
        self._columns = chart_columns.ChartColumns(history)
        self._figures: Mapping[str, Any] = {}
        self._figures_ns = 0  # engine time of the step that they are up to
        self._figures_mode: object = None
        self._figures_at: int | None = None
        self._figures_due_s = 0.0
        self._figures_of: object = None  # the frame that they were computed for
        self._built_of: object = None  # the last frame
        self._lag: tuple[object, float] = (None, 0.0)  # of which step, by how many seconds
        self._least_lag: dict[int, float] = {}  # by the minute; of the last two
        self._knee: tuple[object, int | None, float] = (None, None, 0.0)  # of what, it, next time
        self._landmarks: tuple[object, list[SessionEvent]] | None = None

    @property
    def is_behind(self) -> bool:
        """Whether the last frame showed outdated figures that are due again now."""
        return self._figures_of != self._built_of and self._clock() >= self._figures_due_s

    def build(self, view: View, num_columns: int, num_lanes: int, num_events: int) -> Frame:
        """Return the current frame, and move the cursor to a step still in memory."""
        history = self._history
        self._built_of = view.cursor if view.cursor is not None else (history.version,)
        first_step, last_step, newest_state = history.newest
        if view.cursor is not None and first_step is not None and last_step is not None:
            # Memory drops old steps even while the operator looks at them.
            view.cursor = max(first_step, min(last_step, view.cursor))
        cursor = last_step if view.cursor is None else view.cursor
        state = newest_state if view.cursor is None else history.state_at(view.cursor)
        columns = self._columns.visible(view, num_columns, last_step)
        if last_step is not None and not view.live and _column_of(columns, view.cursor) is None:
            if shown := [column for column in columns if column is not None]:
                view.keep_visible(shown[0].first, shown[-1].last, last_step)
                columns = self._columns.visible(view, num_columns, last_step)
            if _column_of(columns, view.cursor) is None:  # wide steps right of it leave no room
                view.right = view.cursor
                columns = self._columns.visible(view, num_columns, last_step)
        lanes, total = lane_rows(history, view, columns, state, num_lanes)
        if state.in_flight is not None and view.live:
            columns, lanes = self._with_open_step(view, columns, lanes, state.in_flight, state)
        figures = self._paced(view, cursor, state, num_events)
        # Without a new step, as of an idle engine, they are no older than the picture.
        age_ns = 0 if cursor == self._figures_at else max(0, state.time_ns - self._figures_ns)
        return Frame(
            history=history,
            view=view,
            state=state,
            first_step=first_step,
            last_step=last_step,
            cursor=cursor,
            summary=None if cursor is None else history.summary(cursor),
            columns=columns,
            cursor_column=_column_of(columns, view.cursor),
            lanes=lanes,
            num_lanes=total,
            **figures,
            figures_age_s=age_ns / 1e9,
            age_s=time.monotonic() - history.heard_s,
            behind_s=self._behind_s(newest_state, last_step),
            landmarks=self._scrub_marks(),
            changes_in_file=() if self._in_file is None else self._in_file.changes,
            audited_in_file=() if self._in_file is None else self._in_file.audited,
            extent=self._recorded
            or (None if first_step is None or last_step is None else (first_step, last_step)),
            is_replay=self._recorded is not None,
            keys=self._keys,
        )

    def _behind_s(self, state: SessionState, step: int | None) -> float:
        """Return by how many seconds later than usual a step has come; 0 if that is unknown.

        It is for a replay, an engine that has nothing to do, and one without a true clock.
        """
        info, is_replay = state.info, self._recorded is not None
        if is_replay or info is None or info.simulated is not None or state.state == "idle":
            return 0.0
        if (info.engine_id, step) != self._lag[0]:
            now_s = self._clock()
            delay_s, minute = now_s - state.time_ns / 1e9, int(now_s / _LAG_S)
            kept = {at: least for at, least in self._least_lag.items() if at >= minute - 1}
            self._least_lag = kept | {minute: min(delay_s, kept.get(minute, delay_s))}
            self._lag = (info.engine_id, step), delay_s - min(self._least_lag.values())
        return self._lag[1]

    def _paced(
        self, view: View, cursor: int | None, state: SessionState, num_events: int
    ) -> Mapping[str, Any]:
        """Return the fields of a frame that change slowly; compute them again after a second.

        If computing takes long, because a minute has very many samples, more time passes between
        two computations. Processor time counts, not time: a busy machine must not age the figures.
        """
        history, info = self._history, self._history.info
        page = view.page if view.page in _ASKING else None
        reach = None if view.live else history.first_step
        of = None if info is None else info.engine_id
        mode = (of, view.live, history.is_short, reach, page, num_events, len(history.marks))
        start_s = self._clock()
        is_due = start_s >= self._figures_due_s and (view.live or self._figures_at != cursor)
        is_elsewhere = self._figures_at != cursor and self._stands()
        if not self._figures or self._figures_mode != mode or is_due or is_elsewhere:
            spent_s = -self._cpu_clock()
            end_ns = None if view.live else state.time_ns
            self._figures = self._computed(page, cursor, state, end_ns) | {
                "events": self._events(view, num_events) if num_events else [],
                "knee": self._knee_at(view, cursor),
            }
            self._figures_ns = state.time_ns
            self._figures_mode, self._figures_at = mode, cursor
            spent_s, now_s = spent_s + self._cpu_clock(), self._clock()
            pause_s = min(_MOST_REFRESH_S, max(_REFRESH_S, 50 * spent_s))
            self._figures_due_s = now_s + (pause_s if view.live else now_s - start_s)
            self._figures_of = self._built_of
        return self._figures

    def _computed(
        self, page: Page | None, cursor: int | None, state: SessionState, end_ns: int | None
    ) -> dict[str, Any]:
        history, windows = self._history, self._history.windows
        # While earlier steps are being loaded, a report of the last minute would be incomplete, and
        # rates of fewer than ten seconds are unknown.
        window_s = 0.0 if history.is_short else LATENCY_WINDOW_S
        latency, minute = windows.latency(end_ns, window_s), windows.sums(end_ns, LATENCY_WINDOW_S)
        recent = windows.sums(end_ns, RATES_WINDOW_S)
        if history.is_short and recent.seconds < RATES_WINDOW_S:
            recent = Sums()
        reports = {}
        if page == "latency" and not history.is_short:
            reports = {"10 s": windows.latency(end_ns, 10.0), "60 s": latency}
            reports["all"] = windows.latency(end_ns, None)
        return {
            "latency": latency,
            "windows": reports,
            "recent": recent,
            "minute": minute,
            "kept": windows.kept(end_ns, window_s),
            "limits": {} if history.is_short else minute.limits,
            "stall": history.last_stall(cursor),
            "worst": windows.stalls(),
            "waiting_trend": self._waiting_trend(cursor, state),
            "verdict": verdict_at(history, state, cursor, latency),
            "advice": advice(RecentRun(history, state)) if page == "knobs" else (),
            "speculation": history.speculation(end_ns, window_s) if page == "latency" else None,
            "prompts": windows.sums(end_ns, None) if page == "kv" else None,
        }

    def _knee_at(self, view: View, cursor: int | None) -> int | None:
        """Return the knee by the steps up to the cursor, in tokens of two digits."""
        history = self._history
        of = None if history.info is None else history.info.engine_id
        is_moved = not view.live or self._stands()
        if is_moved or of != self._knee[0] or self._clock() >= self._knee[2]:
            spent_s = -self._cpu_clock()
            found = None if cursor is None else history.windows.knee(cursor)
            due_s = self._clock() + _KNEE_SHARE * (spent_s + self._cpu_clock())
            self._knee = of, None if found is None else found.rounded, due_s
        return self._knee[1]

    def _waiting_trend(self, cursor: int | None, state: SessionState) -> int:
        before = self._history.step_at(state.time_ns - 2_000_000_000)
        summary = None if before is None or cursor is None else self._history.summary(before)
        if summary is None or summary.num_waiting is None:
            return 0
        return (state.num_waiting > summary.num_waiting) - (state.num_waiting < summary.num_waiting)

    def _events(self, view: View, num_events: int) -> list[SessionEvent]:
        """Return the last events up to the cursor; rare kinds have places of their own."""
        found: list[SessionEvent] = []
        share = num_events // 4
        notable, finished = NOTABLE - {"slo"}, frozenset({"finish"})
        found += self._history.events(view.cursor, num_events - 2 * share, notable)
        found += self._late(view.cursor, num_events - len(found) - share)
        if len(found) < num_events:
            found += self._history.events(view.cursor, num_events - len(found), finished)
        return sorted(found, key=lambda event: event.step)

    def _late(self, cursor: int | None, limit: int) -> list[SessionEvent]:
        """Return late ITLs in up to half the places: all first tokens may be late."""
        windows = self._history.windows
        found = windows.late_events(cursor, limit - limit // 2, ("ITL",))
        return found + windows.late_events(cursor, limit - len(found), ("TTFT",))

    def _scrub_marks(self) -> list[SessionEvent]:
        file = self._in_file
        marks, first_step = len(self._history.marks), self._history.first_step
        when: object = round(self._clock()), marks, first_step, file and file.num_events
        if self._landmarks is None or self._landmarks[0] != when:
            kinds = frozenset({"preempt", "knobs", "mark", "gap"})
            found = self._history.events(None, 500, kinds)
            self._landmarks = (when, [*(file.landmarks() if file else ()), *found])
        return self._landmarks[1]

    def _with_open_step(
        self,
        view: View,
        columns: Sequence[chart_columns.ChartColumn | None],
        lanes: Sequence[LaneRow],
        step: StepInFlight,
        state: SessionState,
    ) -> tuple[list[chart_columns.ChartColumn | None], list[LaneRow]]:
        """Shift columns and lanes left, and add the step in flight, which has no record yet."""
        took_ns, width = round(seconds_of(step) * 1e9), len(columns)
        if view.axis == "time":
            num = max(1, min(width // 2, took_ns // (chart_columns.COLUMN_NS * view.zoom)))
        else:
            num = chart_columns.cells_of(took_ns, chart_columns.usual_ns(columns), width // 8)
        is_slow = took_ns > self._history.slo.itl_ms * 1e6
        column = chart_columns.ChartColumn(
            *(step.step, step.step, step.since_ns),
            *(step.num_prefill_tokens, step.num_decodes, step.token_budget),
            has_breach=is_slow, is_slow=is_slow, is_open=True,
            longest_ns=took_ns, is_wide=is_slow and num > 1,
        )  # fmt: skip
        # Of a running request the step of its next token still runs.
        by_status: dict[str, int] = {"waiting": Cell.WAITING, "running": len(Cell)}
        prefilling = {part.request_id for part in step.prefills}
        shifted = []
        for lane in lanes:
            request = state.requests.get(lane.request_id)
            cell = by_status.get("" if request is None else request.status, int(Cell.ABSENT))
            cell = int(Cell.PREFILL) if lane.request_id in prefilling else cell
            shifted.append(lane._replace(cells=lane.cells[num:] + bytes((cell,)) * num))
        return [*columns[num:], *[column] * num], shifted


def _column_of(columns: list[chart_columns.ChartColumn | None], step: int | None) -> int | None:
    if step is None:
        return None
    for x in range(len(columns) - 1, -1, -1):
        column = columns[x]
        if column is not None and column.first <= step <= column.last:
            return x
    return None
