"""`WorstStalls`: moves the cursor from one stall to the next, from the longest to shorter ones.

A stall is a wait for a token above the service level.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from stepscope.recordings.history.history import History
from stepscope.recordings.history.windows import Stalls
from stepscope.recordings.session.late_waits import Breach
from stepscope.tui.session.time.goto import is_searched
from stepscope.tui.session.time.navigator import Navigator
from stepscope.tui.views import format as fmt
from stepscope.tui.views.notices import Notices

if TYPE_CHECKING:
    from stepscope.recordings.replay.replay import ReplaySource  # with mcap, only when needed

_MOST = 200  # stalls to visit; after the last of them the worst comes again
_SUFFIXES = {1: "st", 2: "nd", 3: "rd"}


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
        of_file = self._is_of_file
        stalls = self._known(of_file)
        if not stalls.longest:
            self._notices.say_of_place(self._nothing(of_file), "caution")
            return
        place = 0
        shown = self._shown
        if shown is not None and self._at() == shown.step:
            ranked = [(each.step, each.kind) for each in stalls.longest]
            if (shown.step, shown.kind) in ranked:
                place = (ranked.index((shown.step, shown.kind)) + 1) % len(ranked)
        self._shown = stalls.longest[place]
        text = self._stall_notice(stalls, place, of_file)
        self._navigator.go(self._shown.step)
        self._notices.say_of_place(text)

    def _known(self, of_file: bool) -> Stalls:
        history, replay = self._history(), self._replay
        if replay is not None and of_file:
            return replay.file_index.stalls(history.slo, _MOST)
        return history.windows.stalls(None, _MOST)

    def _at(self) -> int | None:
        """Return the step at the cursor; None while the cursor follows new steps."""
        cursor = self._navigator.view.cursor
        if cursor is None and self._replay is not None and self._replay.status != "playing":
            return self._history().last_step
        return cursor

    # Words

    def _stall_notice(self, stalls: Stalls, place: int, of_file: bool) -> str:
        stall, number = stalls.longest[place], stalls.number
        is_itl = stall.kind == "ITL"
        what = "stall" if is_itl else "late first token"
        which, hint = f"the only second with a {what}", ""
        if number > 1:
            rank = f"{'' if not place else _ordinal(place + 1) + ' '}worst"
            which = f"{rank} of {number:,} seconds with a {what}"
            is_last = place + 1 == len(stalls.longest)
            hint = f" ({self._key('worst')}: the {'worst again' if is_last else 'next'})"
        when = fmt.clock(self._history().wall_ns(stall.time_ns))
        moment = f"{fmt.with_ms(stall.ns / 1e6)} at {when}"
        who = f"r{stall.request_id}"
        if is_itl:
            streams = fmt.plural(stall.num_tokens, "stream")
            # The search of a file serves any service level: it counts only the longest waits.
            who = f"{streams} waited so long" if of_file else f"held up {streams}"
        return f"{which}{self._where(of_file)}: {moment}; {who}{hint}"

    def _nothing(self, of_file: bool) -> str:
        history = self._history()
        frame = self._navigator.frame
        if not history.num_steps:
            return "there is no step yet"
        if frame is not None and not frame.tells_requests:
            return "the engine does not report when tokens came"
        if self._replay is not None and self._is_searching:
            share = f"{int(100 * self._replay.file_index.share)}%"
            again = f"{self._key('worst')} again in a moment"
            return f"no late token found yet: {share} of the file searched; {again}"
        slo, where = history.slo, self._where(of_file)
        levels = f"TTFT {slo.ttft_ms:g} ms, ITL {slo.itl_ms:g} ms"
        return f"no token{where} came later than {levels} ({self._key('service_levels')})"

    def _where(self, of_file: bool) -> str:
        """Return in words which part of the file was searched; empty if all of it was."""
        if self._replay is None or self._is_all:
            return ""
        if of_file:
            return ""
        return " in memory, the file is still searched" if self._is_searching else " in memory"

    @property
    def _is_searching(self) -> bool:
        """Whether the background search of the file for late tokens still runs."""
        replay = self._replay
        return replay is not None and not self._is_all and not replay.file_index.is_done

    @property
    def _is_of_file(self) -> bool:
        """Whether stalls come from the file's search: if it has covered all in memory."""
        replay = self._replay
        return replay is not None and not self._is_all and is_searched(replay)

    @property
    def _is_all(self) -> bool:
        """Whether memory holds all steps of the replayed file; true for a live source."""
        extent = None if self._replay is None else self._replay.extent
        history = self._history()
        return extent is None or (history.first_step, history.last_step) == extent


def _ordinal(number: int) -> str:
    suffix = "th" if number % 100 in (11, 12, 13) else _SUFFIXES.get(number % 10, "th")
    return f"{number}{suffix}"
