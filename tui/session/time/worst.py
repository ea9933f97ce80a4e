"""`WorstStalls`: moves the cursor from one stall to the next, from the longest to shorter ones.

A stall is a wait for a token above the service level.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from stepscope.recordings.history.history import History
from stepscope.recordings.history.windows import Stalls
from stepscope.recordings.session.late_waits import Breach
from stepscope.tui.session.time.goto import is_searched, unsearched
from stepscope.tui.session.time.navigator import Navigator
from stepscope.tui.views import format as fmt
from stepscope.tui.views.notices import Notices

if TYPE_CHECKING:
    from stepscope.recordings.replay.replay import ReplaySource  # with mcap, only when needed

_MOST = 200  # stalls to visit; after the last of them the worst comes again


class WorstStalls:
    """Handles the key to the worst stall, then the next worst. For the UI thread only."""

    def __init__(
        self,
        navigator: Navigator,
        history: Callable[[], History],
        replay: "ReplaySource | None",
        notices: Notices,
        key: Callable[[str], str],
    ) -> None:
        self._navigator = navigator
        self._history = history
        self._replay = replay
        self._notices = notices
        self._key = key
        self._shown: Breach | None = None  # the stall that it went to last

    def next(self) -> None:
        """Go to the worst stall; from there to the next worst, and so on around."""
        stalls, where, of_file = self._known()
        if not stalls.longest:
            self._notices.say_of_place(self._nothing(where), "caution")
            return
        place, shown = 0, self._shown
        if shown is not None and self._at() == shown.step:
            ranked = [(each.step, each.kind) for each in stalls.longest]
            if (shown.step, shown.kind) in ranked:
                place = (ranked.index((shown.step, shown.kind)) + 1) % len(ranked)
        stall = self._shown = stalls.longest[place]
        what, who = "late first token", f"r{stall.request_id}"
        if stall.kind == "ITL":
            what, streams = "stall", fmt.plural(stall.num_tokens, "stream")
            # The search of a file serves any service level: it counts only the longest waits.
            who = f"{streams} waited so long" if of_file else f"held up {streams}"
        which = f"number {place + 1}" if place else "worst"
        which += f" of {fmt.plural(stalls.number, 'second')} with a {what}{where}"
        then = "the worst again" if place + 1 == len(stalls.longest) else "the next"
        hint = f" ({self._key('worst')}: {then})" if stalls.number > 1 else ""
        when = fmt.clock(self._history().wall_ns(stall.time_ns))
        self._navigator.go(stall.step)
        self._notices.say_of_place(f"{which}: {fmt.with_ms(stall.ns / 1e6)} at {when}; {who}{hint}")

    def _known(self) -> tuple[Stalls, str, bool]:
        """Return the stalls, where they were looked for in words, and whether in the file."""
        history, replay = self._history(), self._replay
        extent = None if replay is None else replay.extent
        is_whole = extent is None or (history.first_step, history.last_step) == extent
        if replay is not None and not is_whole:
            if is_searched(replay):
                return replay.file_index.stalls(history.slo, _MOST), unsearched(replay), True
            return history.windows.stalls(_MOST), " in memory", False
        return history.windows.stalls(_MOST), "", False

    def _at(self) -> int | None:
        """Return the step at the cursor; None while the cursor follows new steps."""
        cursor = self._navigator.view.cursor
        if cursor is None and self._replay is not None and self._replay.status != "playing":
            return self._history().last_step
        return cursor

    def _nothing(self, where: str) -> str:
        history, frame = self._history(), self._navigator.frame
        if not history.num_steps:
            return "there is no step yet"
        if frame is not None and not frame.tells_requests:
            return "the engine does not report when tokens came"
        if where and self._replay is not None and not self._replay.file_index.is_done:
            again = f"{self._key('worst')} again in a moment"
            return f"no late token found yet{unsearched(self._replay)}; {again}"
        levels = f"TTFT {history.slo.ttft_ms:g} ms, ITL {history.slo.itl_ms:g} ms"
        return f"no token{where} came later than {levels} ({self._key('service_levels')})"
