"""`WorstStalls`: leads the cursor from one stall to the next, the worst first."""

from collections.abc import Callable

from stepscope.recordings.history import History
from stepscope.recordings.longest import Breach
from stepscope.recordings.windows import Stalls
from stepscope.tui import format as fmt
from stepscope.tui.navigator import Navigator, Replay
from stepscope.tui.notices import Notices

_MOST = 200  # of the worst; after them the first of them comes again
_SUFFIXES = {1: "st", 2: "nd", 3: "rd"}


class WorstStalls:
    """Belongs to the UI thread. Whoever moves the cursor otherwise begins with the worst again.

    Args:
        history: gives the one that is shown.
        replay: what is replayed; None for a live source.
        key: the key of an action, for what is said.
    """

    def __init__(
        self,
        navigator: Navigator,
        history: Callable[[], History],
        replay: Replay | None,
        notices: Notices,
        key: Callable[[str], str],
    ) -> None:
        self._navigator = navigator
        self._history = history
        self._replay = replay
        self._notices = notices
        self._key = key
        self._shown: Breach | None = None  # where it led to last

    def next(self) -> None:
        """To the worst; from there to the next worst, and from the last one to the worst again."""
        stalls = self._known()
        if not stalls.longest:
            self._notices.say_of_place(self._nothing(), "caution")
            return
        place = 0
        if self._shown in stalls.longest and self._at() == self._shown.step:
            place = (stalls.longest.index(self._shown) + 1) % len(stalls.longest)
        self._shown = stalls.longest[place]
        self._navigator.go(self._shown.step)
        self._notices.say_of_place(self._told(stalls, place))

    def _known(self) -> Stalls:
        """All that one can go to: those in memory.

        Of a replay that is not all of the file. What its `file_events` know of late tokens outside
        of memory belongs here; `Navigator.go` seeks what is not in memory.
        """
        return self._history().stalls(None, _MOST)

    def _at(self) -> int | None:
        """The step looked at; of what moves on by itself none, but where a replay stands still."""
        cursor = self._navigator.view.cursor
        if cursor is None and self._replay is not None and self._replay.status != "playing":
            return self._history().last_step
        return cursor

    # Words

    def _told(self, stalls: Stalls, place: int) -> str:
        stall, number = stalls.longest[place], stalls.number
        is_itl = stall.kind == "ITL"
        what = "stall" if is_itl else "late first token"
        if number == 1:
            which, hint = f"the only {what}", ""
        else:
            which = f"{'' if not place else _ordinal(place + 1) + ' '}worst of {number:,} {what}s"
            is_last = place + 1 == len(stalls.longest)
            hint = f" ({self._key('worst')}: the {'worst again' if is_last else 'next'})"
        where = "" if self._is_all else " in memory"
        when = fmt.clock(self._history().wall_ns(stall.time_ns))
        how_long = fmt.with_ms(stall.ns / 1e6)
        who = f"r{stall.request_id}"
        if is_itl:
            who = f"held up {fmt.plural(stall.num_tokens, 'stream')}"
        return f"{which}{where}: {how_long} at {when}, {who}{hint}"

    def _nothing(self) -> str:
        history = self._history()
        frame = self._navigator.frame
        if not history.num_steps:
            return "there is no step yet"
        if frame is not None and not frame.tells_requests:
            return "the engine does not tell when whose tokens came"
        slo, where = history.slo, "" if self._is_all else " in memory"
        levels = f"TTFT {slo.ttft_ms:g} ms, ITL {slo.itl_ms:g} ms"
        return f"no token{where} came later than {levels} ({self._key('service_levels')})"

    @property
    def _is_all(self) -> bool:
        """Nothing that could be replayed is outside of memory; true of what is live."""
        extent = None if self._replay is None else self._replay.extent
        history = self._history()
        return extent is None or (history.first_step, history.last_step) == extent


def _ordinal(number: int) -> str:
    """2 -> 2nd."""
    suffix = "th" if number % 100 in (11, 12, 13) else _SUFFIXES.get(number % 10, "th")
    return f"{number}{suffix}"
