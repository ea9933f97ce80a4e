"""`Oldest`: handles the key that goes to the oldest step, in a live session.

The first press goes to the oldest step in memory. A second press there fetches the older steps that
the engine still keeps, and then goes to the oldest of these.
"""

from collections.abc import Callable

from stepscope.recordings.history.history import History
from stepscope.recordings.history.source import NO_ENGINE, Source
from stepscope.recordings.live.backfill import Backfill
from stepscope.recordings.live.subscriber import Subscriber
from stepscope.tui.views import format as fmt
from stepscope.tui.views.notices import Notices, Tone
from stepscope.tui.views.view import View


class Oldest:
    """Goes to the oldest step and fetches older ones. Use it only on the UI thread."""

    def __init__(
        self,
        view: View,
        source: Source,
        notices: Notices,
        key: Callable[[str], str],
        go: Callable[[int], None],
    ) -> None:
        self._view = view
        self._source = source
        self._notices = notices
        self._key = key
        self._go = go
        self._asked_at: int | None = None  # the oldest step when we asked; None: nothing asked

    def press(self, history: History) -> None:
        """Handle a press of the key while this history is on the screen."""
        first = history.first_step
        is_there = self._view.cursor == first
        if first is not None:
            self._go(first)
        backfill, info = self._backfill(history), history.info
        if backfill is not None and is_there:
            self._ask(history, backfill)
        elif first is not None:
            more = ""
            if backfill is not None and info is not None and info.keeps_snapshots:
                more = f"; {self._key('oldest')} again: older steps from the engine"
            self._notices.say_of_place(f"the oldest step in memory, {_clock(history)}{more}")

    def more(self, history: History) -> str:
        """Return a hint that the key fetches older steps; empty if the engine keeps none."""
        info = history.info
        is_first = history.first_step == 0
        if self._backfill(history) is None or is_first or info is None or not info.keeps_snapshots:
            return ""
        return f"; {self._key('oldest')}: older steps from the engine"

    @property
    def progress(self) -> str | None:
        """One line on the progress of fetching older steps; None if nothing is being fetched."""
        backfill = self._backfill(self._source.history)
        if backfill is None or self._asked_at is None or not backfill.is_active:
            return None
        before = _before(self._source.history)
        return f"{_ASKING} {before} … {fmt.percent(backfill.share)}"

    def news(self) -> tuple[str, Tone] | None:
        """Return one line on how fetching older steps ended, once; None before."""
        backfill, asked_at = self._backfill(self._source.history), self._asked_at
        if backfill is None or asked_at is None or backfill.is_active:
            return None
        history = self._source.history
        self._asked_at = None
        if backfill.state != "done":
            return f"no steps {_before(history)}: {backfill.note}", "caution"
        if self._view.cursor == asked_at and history.first_step is not None:
            self._go(history.first_step)
            where = f"the oldest is of {_clock(history)}"
        else:
            where = f"from {_clock(history)} on; {self._key('oldest')} goes there"
        note = f" ({backfill.note})" if backfill.note else ""
        return f"{fmt.plural(backfill.num_steps, 'more step')}, {where}{note}", "good"

    def _ask(self, history: History, backfill: Backfill) -> None:
        if self._source.status in NO_ENGINE:
            text = f"no steps {_before(history)}: the engine does not answer"
            self._notices.say_of_place(text, "caution")
            return
        self._asked_at = history.first_step if history.first_step is not None else -1
        backfill.ask()

    def _backfill(self, history: History) -> Backfill | None:
        """Return what fetches older steps into this history; None if no engine can send any."""
        source = self._source
        if not isinstance(source, Subscriber) or history is not source.history:
            return None
        return source.backfill


_ASKING = "asking the engine for what it keeps of"


def _clock(history: History) -> str:
    first = history.first_step
    summary = None if first is None else history.summary(first)
    return fmt.moment(None if summary is None else history.wall_ns(summary.tokens_ns))


def _before(history: History) -> str:
    return "before" if history.first_step is None else f"before {_clock(history)}"
