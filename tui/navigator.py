"""`Navigator`: moves the view through time, in a live session and in a replay.

In a replay the newest step in memory is where the replay stands; going on from there plays the
file, and what is not in memory is sought in it.
"""

import re
import time
from collections.abc import Callable, Collection
from typing import Protocol, cast

from stepscope.engine.wire import Phase
from stepscope.recordings.history import History
from stepscope.recordings.source import Source, SourceStatus
from stepscope.tui.frame import NOTABLE, Frame
from stepscope.tui.notices import Notices
from stepscope.tui.view import View

_MAX_SEARCH = 5_000  # steps decoded in search of one of a request


class Extent(Protocol):
    """What a replay knows of its file."""

    first_step: int | None
    last_step: int | None


class Replay(Protocol):
    """What a replay can do that a live source cannot."""

    recording: Extent
    on_found: Callable[[], None] | None  # called on its thread once what was sought is shown

    @property
    def speed(self) -> float: ...

    @property
    def status(self) -> SourceStatus: ...

    @property
    def is_seeking(self) -> bool: ...

    def play(self, speed: float | None = None) -> None: ...

    def pause(self) -> None: ...

    def seek(self, step: int) -> None: ...

    def skip(self, num_steps: int) -> None: ...

    def show(self, num_steps: int) -> None: ...

    def wait(self, timeout_s: float = 10.0) -> bool: ...


def replay_of(source: Source) -> Replay | None:
    return None if source.is_live else cast(Replay, source)


def recorded_extent(source: Source) -> tuple[int, int] | None:
    """First and last step of the file that is replayed; None for a live source."""
    replay = replay_of(source)
    recording = None if replay is None else replay.recording
    if recording is None or recording.first_step is None or recording.last_step is None:
        return None
    return recording.first_step, recording.last_step


class Navigator:
    """Changes `view`; belongs to the UI thread. `frame` is the picture that is on the screen.

    Args:
        key: the key of an action, for what is said.
    """

    def __init__(
        self,
        view: View,
        history: History,
        source: Source,
        notices: Notices,
        key: Callable[[str], str],
    ) -> None:
        self.view = view
        self._key = key
        self.frame: Frame | None = None
        self._history = history
        self._replay = replay_of(source)
        self._notices = notices

    def look_at(self, history: History) -> None:
        """Move through another history from now on."""
        self._history = history

    # Pause and follow

    def pause(self) -> None:
        replay, view = self._replay, self.view
        if replay is None:
            if view.live:
                view.pause(self._history.last_step)
            else:
                view.follow()
        elif view.live and replay.status == "playing":
            replay.pause()
        else:
            if replay.status == "ended" and replay.recording.first_step is not None:
                replay.seek(replay.recording.first_step)
            view.follow()
            replay.play()

    def live(self) -> None:
        self.view.follow()

    def oldest(self) -> None:
        replay = self._replay
        if replay is not None and replay.recording.first_step is not None:
            self.go(replay.recording.first_step)
        elif self._history.first_step is not None:
            self.go(self._history.first_step)

    # Steps

    def go(self, step: int) -> None:
        """To a step, in memory or in the file."""
        history, replay = self._history, self._replay
        first, last = history.first_step, history.last_step
        if replay is not None:
            if replay.status == "playing":
                replay.pause()
            if first is None or last is None or not first <= step <= last:
                self.view.follow()
                replay.seek(step)
                return
        if first is not None and last is not None:
            self.view.go(step, first, last)

    def move(self, columns: int) -> None:
        """So many columns on, or back if negative."""
        at = self._at()
        if at is None:
            return
        step = at + columns * self._steps_of_column(at)
        last = self._history.last_step or 0
        if step > last and self._replay is not None:
            self.view.follow()
            self._replay.skip(step - last)
            return
        self.go(step)

    def move_screen(self, direction: int) -> None:
        frame, at = self.frame, self._at()
        shown = [c for c in (frame.columns if frame else ()) if c is not None]
        if at is None or not shown:
            return
        steps = shown[-1].last - shown[0].first + 1
        if self.view.right is None:
            self.view.right = self._history.last_step
        self.go(at + direction * steps)
        if self.view.right is not None and self.view.cursor is not None:
            last = self._history.last_step or 0
            first = self._history.first_step or 0
            self.view.right = min(last, max(first + steps - 1, self.view.right + direction * steps))

    def of_column(self, x: int) -> None:
        """To the last step of a column of the chart."""
        columns = self.frame.columns if self.frame is not None else []
        column = columns[x] if 0 <= x < len(columns) else None
        if column is not None:
            self.go(column.last)

    # Landmarks

    def event(self, direction: int, kinds: Collection[str] = NOTABLE) -> None:
        at = self._at()
        if at is None:
            return
        found = self._history.next_event(at, direction, frozenset(kinds))
        if found is None:
            where = "after" if direction > 0 else "before"
            self._notices.say(f"no {_kind(kinds)} {where} step {at:,} in memory", "caution")
            return
        self.go(found.step)
        self._notices.say(found.text)

    def mark(self) -> None:
        marks = self._history.marks
        at = self._at()
        if not marks or at is None:
            self._notices.say(f"no mark yet; {self._key('mark')} sets one", "caution")
            return
        before = [mark for mark in marks if mark.step < at] if not self.view.live else marks
        mark = (before or marks)[-1]
        self.go(mark.step)
        self._notices.say(f"mark: {mark.text}")

    def of_request(self, direction: int) -> None:
        """To the next step in which the selected request has a row."""
        at, request_id = self._at(), self.view.selected
        if at is None or request_id is None:
            self._notices.say(f"select a request first ({lane_keys(self._key)})", "caution")
            return
        first, last = self._history.first_step or 0, self._history.last_step or 0
        end = min(last, at + _MAX_SEARCH) if direction > 0 else max(first, at - _MAX_SEARCH)
        for step in range(at + direction, end + direction, direction):
            record = self._history.record(step)
            if record and any(row.request_id == request_id for row in record.batch or ()):
                row = next(row for row in record.batch or () if row.request_id == request_id)
                self.go(step)
                what = Phase(row.phase).name.lower()
                self._notices.say(f"r{request_id}: {what} of {row.num_tokens} tokens")
                return
        self._notices.say(f"r{request_id} has no such step in memory", "caution")

    # Words

    def goto(self, text: str) -> None:
        """To a step, a time of day, or so many seconds back; `target` says what is understood."""
        if text.strip():
            self.go(self.target(text))

    def check_target(self, text: str) -> str | None:
        try:
            if text.strip():
                self.target(text)
        except ValueError as error:
            return str(error)
        return None

    def target(self, text: str) -> int:
        """The step that `text` means.

        Raises:
            ValueError: it means none; the message says what would.
        """
        text = text.strip().replace(",", "")
        if text.isdigit():
            return int(text)
        at = self._at()
        summary = None if at is None else self._history.summary(at)
        if summary is None:
            raise ValueError("there is no step yet")
        back = re.fullmatch(r"([+-])(\d+(?:\.\d+)?)(ms|s|m|min)?", text)
        if back:
            seconds = float(back[2]) * {"ms": 0.001, "s": 1, None: 1, "m": 60, "min": 60}[back[3]]
            time_ns = summary.tokens_ns + round(seconds * 1e9) * (1 if back[1] == "+" else -1)
        elif re.fullmatch(r"\d{1,2}:\d{2}(:\d{2})?", text):
            time_ns = self._time_of_day(text, summary.tokens_ns)
        else:
            raise ValueError("not a step, a time or a stretch of time")
        step = self._history.step_at(time_ns)
        if step is None:
            raise ValueError("there is no step yet")
        return step

    def _time_of_day(self, text: str, near_ns: int) -> int:
        wall_ns = self._history.wall_ns(near_ns)
        if wall_ns is None:
            raise ValueError("the engine has not told the time of day")
        parts = [int(part) for part in text.split(":")] + [0]
        day = time.localtime(wall_ns / 1e9)
        wanted_s = time.mktime(
            (day.tm_year, day.tm_mon, day.tm_mday, parts[0], parts[1], parts[2], 0, 0, -1)
        )
        if wanted_s * 1e9 > wall_ns + 12 * 3600 * 10**9:
            wanted_s -= 24 * 3600  # yesterday, seen from after midnight
        return near_ns - (wall_ns - round(wanted_s * 1e9))

    # Replay

    def change_speed(self, factor: float) -> None:
        if self._replay is not None:
            self._replay.play(self._replay.speed * factor)
            self.view.follow()

    def _at(self) -> int | None:
        return self._history.last_step if self.view.cursor is None else self.view.cursor

    def _steps_of_column(self, step: int) -> int:
        if self.view.axis == "step":
            return self.view.zoom
        for column in self.frame.columns if self.frame is not None else ():
            if column is not None and column.first <= step <= column.last:
                return column.last - column.first + 1
        return 1


def lane_keys(key: Callable[[str], str]) -> str:
    """What selects a request."""
    return f"{key('lane_up')} and {key('lane_down')}"


def _kind(kinds: Collection[str]) -> str:
    return "preemption" if set(kinds) == {"preempt"} else "event"
