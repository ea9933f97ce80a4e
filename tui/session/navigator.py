"""`Navigator`: moves the cursor through time, in a live session and in a replay.

A replay loads steps of a file into memory; its position is the newest of these steps. Moving
forward from there plays the file. Moving to a step that is not in memory makes the replay seek that
step in the file.
"""

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, cast

from stepscope.engine.protocol.wire import Phase
from stepscope.recordings.history.history import History
from stepscope.recordings.history.source import Source
from stepscope.recordings.history.windows import Stalls
from stepscope.recordings.session.waits import Breach
from stepscope.recordings.state.events import mark_event
from stepscope.tui.session.goto import Wanted, is_searched, nearest, nothing, unsearched, wanted
from stepscope.tui.views import format as fmt
from stepscope.tui.views.frame.frame import NOTABLE, Frame
from stepscope.tui.views.notices import Notices
from stepscope.tui.views.view import View

if TYPE_CHECKING:
    from stepscope.recordings.replay.replay import ReplaySource  # with mcap, only when needed

_MAX_SEARCH = 5_000  # steps to decode in search of the next step of a request
_MOST_STALLS = 200  # to visit; after the last of them the worst comes again


def replay_of(source: Source) -> "ReplaySource | None":
    """Return the source as a replay; None for a live source."""
    return None if source.is_live else cast("ReplaySource", source)


class Navigator:
    """Moves the cursor of `view`; `frame` is on the screen. Use it only on the UI thread."""

    def __init__(
        self, view: View, source: Source, notices: Notices, key: Callable[[str], str]
    ) -> None:
        self.view = view
        self._key = key
        self.frame: Frame | None = None
        self._history = source.history
        self._replay = replay_of(source)
        self._notices = notices
        self._stall: Breach | None = None  # the stall that it went to last

    def look_at(self, history: History) -> None:
        """Move through another history from now on, such as the one from before a restart."""
        self._history = history

    def pause(self) -> None:
        replay, view = self._replay, self.view
        if replay is None and view.live:
            view.pause(self._history.last_step)
        elif replay is not None and view.live and replay.status == "playing":
            replay.pause()
        else:
            if replay is not None and replay.status == "ended" and replay.extent is not None:
                replay.seek(replay.extent[0])
            self.follow()
            if replay is not None:
                replay.play()

    def live(self) -> None:
        """Go to the newest step, in a replay of the file, and follow new ones."""
        if self._replay is not None and self._replay.extent is not None:
            self.go(self._replay.extent[1])
        self.follow()

    def follow(self) -> None:
        """Show the newest step in memory, and go on to each new step."""
        self._notices.leave_place()
        self.view.follow()

    def oldest(self) -> None:
        replay = self._replay
        if replay is not None and replay.extent is not None:
            self.go(replay.extent[0])
        elif (first := self._history.first_step) is not None:
            self.go(first)
            self._notices.say_of_place("the oldest step in memory")

    def go(self, step: int) -> None:
        """Move the cursor to a step; a replay seeks it in the file if it is not in memory."""
        self._notices.leave_place()
        history, replay = self._history, self._replay
        first, last = history.first_step, history.last_step
        if replay is not None:
            if replay.status == "playing":
                replay.pause()
            is_held = first is not None and last is not None and first <= step <= last
            if not is_held or not replay.has_room_at(step):
                self.view.follow()
                replay.seek(step)
                return
        if first is not None and last is not None:
            self.view.go(step, first, last)

    def move(self, columns: int) -> None:
        """Move the cursor by this many columns of the chart, back in time if negative."""
        at = self._at_or_say()
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
        """Move the cursor to the last step of the chart column with index `x`."""
        columns = self.frame.columns if self.frame is not None else []
        column = columns[x] if 0 <= x < len(columns) else None
        if column is not None:
            self.go(column.last)

    def event(self, direction: int, kinds: Collection[str] = NOTABLE) -> None:
        at = self._at_or_say()
        if at is None:
            return
        history, file, kinds = self._history, self._replay, frozenset(kinds)
        found = nearest(history, file, at, direction, kinds)
        if found is None:
            self._notices.say_of_place(nothing(file, at, direction, kinds), "caution")
            return
        rest = unsearched(file)
        self.go(found.step)
        self._notices.say_of_place(found.text + rest, "caution" if rest else "text")

    def mark(self) -> None:
        """Go to the last mark before the cursor; if there is none, to the last mark of all."""
        at = self._at()
        found = {mark_event(mark) for mark in self._history.marks}
        if self._replay is not None:
            found |= set(self._replay.file_index.marks)
        marks = sorted((each.step, each.text) for each in found)
        if not marks or at is None:
            text = f"no mark yet{unsearched(self._replay)}; {self._key('mark')} sets one"
            self._notices.say_of_place(text, "caution")
            return
        is_newest = self.view.live and self._replay is None
        before = [mark for mark in marks if mark[0] < at] if not is_newest else marks
        step, text = (before or marks)[-1]
        self.go(step)
        self._notices.say_of_place(f"mark: {text}")

    def of_request(self, direction: int) -> None:
        """Go to the next or previous step with the selected request, or else the followed one."""
        at, request_id = self._at(), self.view.selected
        request_id = self.view.followed if request_id is None else request_id
        if at is None or request_id is None:
            self._notices.say(f"select a request first ({lane_keys(self._key)})", "caution")
            return
        first, last = self._history.first_step or 0, self._history.last_step or 0
        ended = self._history.end_of(request_id, at) if direction < 0 else None
        if ended is not None:
            at = min(at, ended.step + 1)  # search from where the request ended
        end = min(last, at + _MAX_SEARCH) if direction > 0 else max(first, at - _MAX_SEARCH)
        for step in range(at + direction, end + direction, direction):
            record = self._history.record(step)
            batch = (record.batch if record else None) or ()
            row = next((row for row in batch if row.request_id == request_id), None)
            if row is not None:
                self.go(step)
                what, tokens = Phase(row.phase).name.lower(), fmt.plural(row.num_tokens, "token")
                self._notices.say_of_place(f"r{request_id}: {what} of {tokens}")
                return
        self._notices.say_of_place(f"r{request_id} has no such step in memory", "caution")

    def worst(self) -> None:
        """Go to the worst wait above the service level; from there to the next worst, around."""
        history, last = self._history, self._stall
        stalls, where, of_file = self._stalls()
        if not stalls.longest:
            self._notices.say_of_place(self._no_stall(where), "caution")
            return
        at, place = self.view.cursor, 0
        if at is None and self._replay is not None and self._replay.status != "playing":
            at = history.last_step
        if last is not None and at == last.step:
            ranked = [(each.step, each.kind) for each in stalls.longest]
            if (last.step, last.kind) in ranked:
                place = (ranked.index((last.step, last.kind)) + 1) % len(ranked)
        stall = self._stall = stalls.longest[place]
        what, who = "late first token", f"r{stall.request_id}"
        if stall.kind == "ITL":
            what, streams = "stall", fmt.plural(stall.num_tokens, "stream")
            # The search of a file serves any service level: it counts only the longest waits.
            who = f"{streams} waited so long" if of_file else f"held up {streams}"
        which = f"number {place + 1}" if place else "worst"
        which += f" of {fmt.plural(stalls.number, 'second')} with a {what}{where}"
        then = "the worst again" if place + 1 == len(stalls.longest) else "the next"
        hint = f" ({self._key('worst')}: {then})" if stalls.number > 1 else ""
        when = fmt.clock(history.wall_ns(stall.time_ns))
        self.go(stall.step)
        self._notices.say_of_place(f"{which}: {fmt.with_ms(stall.ns / 1e6)} at {when}; {who}{hint}")

    def _stalls(self) -> tuple[Stalls, str, bool]:
        """Return the stalls, where they were looked for in words, and whether in the file."""
        history, replay, where = self._history, self._replay, ""
        extent = None if replay is None else replay.extent
        if extent is not None and (history.first_step, history.last_step) != extent:
            if replay is not None and is_searched(replay):
                return replay.file_index.stalls(history.slo, _MOST_STALLS), "", True
            where = " in memory"
        return history.windows.stalls(_MOST_STALLS), where, False

    def _no_stall(self, where: str) -> str:
        history = self._history
        if not history.num_steps:
            return "there is no step yet"
        if self.frame is not None and not self.frame.tells_requests:
            return "the engine does not report when tokens came"
        if where and self._replay is not None and not self._replay.file_index.is_done:
            again = f"{self._key('worst')} again in a moment"
            return f"no late token found yet{unsearched(self._replay)}; {again}"
        levels = f"TTFT {history.slo.ttft_ms:g} ms, ITL {history.slo.itl_ms:g} ms"
        return f"no token{where} came later than {levels} ({self._key('service_levels')})"

    def goto(self, text: str) -> None:
        """Go to what was typed: a step, a time of day, or a time difference from the cursor."""
        if (found := self.target(text)) is not None:
            self.go(found.step)
            if found.note is not None:
                self._notices.say_of_place(found.note, "caution")

    def target(self, text: str) -> Wanted | None:
        """Return the step that a typed text means; ValueError says why there is none."""
        return wanted(text, self._at(), self._history, self._replay) if text.strip() else None

    def change_speed(self, factor: float) -> None:
        if self._replay is not None:
            self._replay.play(self._replay.speed * factor)
            self.view.follow()

    def _at(self) -> int | None:
        return self._history.last_step if self.view.cursor is None else self.view.cursor

    def _at_or_say(self) -> int | None:
        if (at := self._at()) is None:
            self._notices.say_of_place("there is no step in memory yet", "caution")
        return at

    def _steps_of_column(self, step: int) -> int:
        if self.view.axis == "step":
            return self.view.zoom
        for column in self.frame.columns if self.frame is not None else ():
            if column is not None and column.first <= step <= column.last:
                return column.last - column.first + 1
        return 1


def lane_keys(key: Callable[[str], str]) -> str:
    return f"{key('lane_up')} and {key('lane_down')}"
