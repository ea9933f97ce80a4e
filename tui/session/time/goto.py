"""Finds the step that an operator typed: a step number, a time of day, or a time difference.

A time difference such as `-2m` counts from the step at the cursor.
`Oldest`: handles the key that goes to the oldest step, in a live session: first to the oldest in
memory; a second press there fetches the older steps that the engine still keeps.
`nearest` and its like find events, and tell how much of a replayed file a background thread has not
searched for them yet.
"""

import re
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

from stepscope.recordings.history.history import History
from stepscope.recordings.history.source import NO_ENGINE, Source
from stepscope.recordings.live.backfill import Backfill
from stepscope.recordings.live.subscriber import Subscriber
from stepscope.recordings.state.series.events import SessionEvent
from stepscope.tui.views import format as fmt
from stepscope.tui.views.notices import Notices, Tone
from stepscope.tui.views.view import View

if TYPE_CHECKING:
    from stepscope.recordings.replay.replay import ReplaySource  # with mcap, only when needed


def nearest(
    history: History, file: "ReplaySource | None", at: int, direction: int, kinds: frozenset[str]
) -> SessionEvent | None:
    """Return the nearest known event before (-1) or after step `at`, in memory or in the file."""
    in_memory = kinds
    if file is not None and is_searched(history, file):
        in_memory = kinds - {"slo"}  # memory has the seconds at its two ends only in part
    events = [history.next_event(at, direction, in_memory)]
    if file is not None:
        events.append(file.file_index.next(at, direction, kinds, history.slo))
    # Of two events at the same step, `min` returns the first: it says more.
    found = [each for each in events if each is not None]
    return min(found, key=lambda each: (each.step - at) * direction, default=None)


def is_searched(history: History, file: "ReplaySource") -> bool:
    """Whether all steps in memory lie in the part of the file already searched."""
    first, last = history.first_step, history.last_step
    if first is None or last is None:
        return True
    return any(begin <= first and last <= end for begin, end in file.file_index.spans())


def unsearched(file: "ReplaySource | None") -> str:
    """Return how much of a file was searched, for a notice; empty if all of it was."""
    if file is None or file.file_index.share == 1:
        return ""
    share = f"{int(100 * file.file_index.share)}% of the file"
    return f"; only {share} could be searched" if file.file_index.is_done else f"; {share} searched"


def nothing(file: "ReplaySource | None", at: int, direction: int, kinds: Collection[str]) -> str:
    """Return the notice that no event was found from `at` on, and what was not searched."""
    kind = "preemption" if set(kinds) == {"preempt"} else "event"
    where = f"{'after' if direction > 0 else 'before'} step {at:,}"
    if file is None or file.extent is None:
        return f"no {kind} {where} in memory"
    if at == file.extent[direction > 0]:
        return f"no {kind} {where}, the {'last' if direction > 0 else 'first'} of the file"
    return f"no {kind} {where}{unsearched(file) or ' in all of the file'}"


# The forms in which times are shown: 12:41, 12:41:58.3, Nov 15 12:41:58, Nov 15 2025 12:41:58.
_CLOCKS = ("%H:%M", "%H:%M:%S", "%H:%M:%S.%f")
_DAY = timedelta(days=1)
_STRETCH = re.compile(r"([+-])(\d{1,12}(?:\.\d+)?)(ms|s|m|min)?")
_SECONDS = {"ms": 0.001, "s": 1, None: 1, "m": 60, "min": 60}


class Wanted(NamedTuple):
    """A step to go to; `note` tells the operator if it is not the one that was typed."""

    step: int
    note: str | None = None


def wanted(text: str, at: int | None, history: History, file: "ReplaySource | None") -> Wanted:
    """Return the step that a text means from step `at` on; ValueError says why there is none."""
    text = text.strip().replace(",", "")
    if text.isdecimal():
        return _clamped(int(text), history, file)
    summary = None if at is None else history.summary(at)
    if at is None or summary is None:
        raise ValueError("there is no step yet")
    stretch = _STRETCH.fullmatch(text)
    sign = -1 if text.startswith("-") else 1
    if stretch:
        away_ns = [sign * round(float(stretch[2]) * _SECONDS[stretch[3]] * 1e9)]
    elif not (away_ns := _away_ns(text, history.wall_ns(summary.tokens_ns))):
        raise ValueError("not a step, a time or a distance in time")
    for ns in away_ns:
        step = _step_in_memory(history, summary.tokens_ns + ns)
        if step is None and file is not None:
            step = file.step_in(at, ns)
        if step is not None:
            return Wanted(step)
    if stretch and file is not None and file.extent is not None:
        return _clamped(file.extent[0] - 1 if sign < 0 else file.extent[1] + 1, history, file)
    if file is not None:
        start, end = (fmt.moment(wall_ns) for wall_ns in file.extent_ns)
        raise ValueError(f"not in the file, which is of {start} to {end}")
    step = history.step_at(summary.tokens_ns + away_ns[0])
    if step is None:
        raise ValueError("there is no step yet")
    return Wanted(step, _end_of_memory(history, is_oldest=step == history.first_step))


def _clamped(step: int, history: History, file: "ReplaySource | None") -> Wanted:
    """Return the step with this number, or the nearest step that exists, with a note on that."""
    if file is not None and file.extent is not None:
        first, last = file.extent
        if first <= step <= last:
            return Wanted(step)
        which, end = ("first", first) if step < first else ("last", last)
        return Wanted(end, f"the {which} step of the file is {end:,}")
    found, last_found = history.first_step, history.last_step
    if found is None or last_found is None or found <= step <= last_found:
        return Wanted(step)
    is_oldest = step < found
    return Wanted(found if is_oldest else last_found, _end_of_memory(history, is_oldest=is_oldest))


def _end_of_memory(history: History, *, is_oldest: bool) -> str:
    step = (history.first_step if is_oldest else history.last_step) or 0
    which = "oldest step in memory" if is_oldest else "newest step"
    return f"the {which} is {step:,}, of {_clock(history, step)}"


def _step_in_memory(history: History, time_ns: int) -> int | None:
    first, last = (
        None if step is None else history.summary(step)
        for step in (history.first_step, history.last_step)
    )
    if first is None or last is None or not first.tokens_ns <= time_ns <= last.tokens_ns:
        return None
    return history.step_at(time_ns)


def _away_ns(text: str, wall_ns: int | None) -> list[int]:
    """Return how far a typed time is from `wall_ns`, likeliest first; none if it is no time."""
    if wall_ns is None:
        raise ValueError("the engine has not reported the time of day")
    found = _moments(text, datetime.fromtimestamp(wall_ns // 10**9))
    second_ns = 10**9
    return [int(when.timestamp()) * second_ns + when.microsecond * 1000 - wall_ns for when in found]


def _moments(text: str, now: datetime) -> list[datetime]:
    for clock in _CLOCKS:
        with suppress(ValueError):
            return [datetime.strptime(text, f"%b %d %Y {clock}")]
        with suppress(ValueError):
            this = datetime.strptime(f"{now.year} {text}", f"%Y %b %d {clock}")
            both = this, this.replace(year=now.year - 1)
            return sorted(both, key=lambda each: abs(each - now))
        with suppress(ValueError):
            today = datetime.combine(now, datetime.strptime(text, clock).time())
            if today - now > _DAY / 2:  # it is after midnight: yesterday is likelier
                return [today - _DAY, today]
            return [today, today - _DAY, today + _DAY]
    return []


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
        backfill = self._backfill(history)
        if backfill is None or not is_there:
            more = self.more(history).replace(": older", " again: older")
            said = f"the oldest step in memory, {_clock(history, first)}{more}"
            self._notices.say_of_place(said if first is not None else "there is no step yet")
        elif self._source.status in NO_ENGINE:
            text = f"no steps {_before(history)}: the engine does not answer"
            self._notices.say_of_place(text, "caution")
        else:
            self._asked_at = first if first is not None else -1
            backfill.ask()

    def more(self, history: History) -> str:
        """Return a hint that the key fetches older steps; empty if the engine keeps none."""
        info = history.info
        has_none = self._backfill(history) is None or info is None or not info.keeps_snapshots
        if has_none or history.first_step == 0:
            return ""
        return f"; {self._key('oldest')}: older steps from the engine"

    @property
    def progress(self) -> str | None:
        """One line on the progress of fetching older steps; None if nothing is being fetched."""
        backfill = self._backfill(self._source.history)
        if backfill is None or self._asked_at is None or not backfill.is_active:
            return None
        asking = f"asking the engine for what it keeps of {_before(self._source.history)}"
        return f"{asking} … {fmt.percent(backfill.share)}"

    def news(self) -> tuple[str, Tone] | None:
        """Return one line on how fetching older steps ended, once; None before."""
        history = self._source.history
        backfill, asked_at = self._backfill(history), self._asked_at
        if backfill is None or asked_at is None or backfill.is_active:
            return None
        self._asked_at = None
        if backfill.state != "done":
            return f"no steps {_before(history)}: {backfill.note}", "caution"
        oldest = _clock(history, history.first_step)
        where = f"from {oldest} on; {self._key('oldest')} goes there"
        if self._view.cursor == asked_at and history.first_step is not None:
            self._go(history.first_step)
            where = f"the oldest is of {oldest}"
        note = f" ({backfill.note})" if backfill.note else ""
        return f"{fmt.plural(backfill.num_steps, 'more step')}, {where}{note}", "good"

    def _backfill(self, history: History) -> Backfill | None:
        """Return what fetches older steps into this history; None if no engine can send any."""
        source = self._source
        if not isinstance(source, Subscriber) or history is not source.history:
            return None
        return source.backfill


def _clock(history: History, step: int | None) -> str:
    summary = None if step is None else history.summary(step)
    return fmt.moment(None if summary is None else history.wall_ns(summary.tokens_ns))


def _before(history: History) -> str:
    first = history.first_step
    return "before" if first is None else f"before {_clock(history, first)}"
