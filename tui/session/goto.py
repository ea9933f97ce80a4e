"""Finds the step that an operator typed: a step number, a time of day, or a time difference.

A time difference such as `-2m` counts from the step at the cursor.
`nearest` and its like find events, and tell whether all of a replayed file was searched for them.
"""

import re
from collections.abc import Collection
from contextlib import suppress
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

from stepscope.recordings.history.history import History
from stepscope.recordings.state.events import SessionEvent
from stepscope.tui.views import format as fmt

if TYPE_CHECKING:
    from stepscope.recordings.replay.replay import ReplaySource  # with mcap, only when needed


def nearest(
    history: History, file: "ReplaySource | None", at: int, direction: int, kinds: frozenset[str]
) -> SessionEvent | None:
    """Return the nearest known event before (-1) or after step `at`, in memory or in the file."""
    # Of late tokens, memory has the seconds at its two ends only in part.
    in_memory = kinds - {"slo"} if is_searched(file) else kinds
    events = [history.next_event(at, direction, in_memory)]
    if file is not None:
        events.append(file.file_index.next(at, direction, kinds, history.slo))
    # Of two events at the same step, `min` returns the first: it says more.
    found = [each for each in events if each is not None]
    return min(found, key=lambda each: (each.step - at) * direction, default=None)


def is_searched(file: "ReplaySource | None") -> bool:
    """Whether all of the file was searched."""
    return file is not None and file.file_index.share == 1


def unsearched(file: "ReplaySource | None") -> str:
    """Return that not all of the file was searched, for a notice; empty if it was."""
    if file is None or is_searched(file):
        return ""
    is_done = file.file_index.is_done
    return "; not all of the file could be searched" if is_done else "; the file is still searched"


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
    in_file = None if file is None else file.extent
    first, last = in_file or (history.first_step, history.last_step)
    if first is None or last is None or first <= step <= last:
        return Wanted(step)
    which, end = ("first", first) if step < first else ("last", last)
    if in_file is not None:
        return Wanted(end, f"the {which} step of the file is {end:,}")
    return Wanted(end, _end_of_memory(history, is_oldest=which == "first"))


def _end_of_memory(history: History, *, is_oldest: bool) -> str:
    step = (history.first_step if is_oldest else history.last_step) or 0
    which = "oldest step in memory" if is_oldest else "newest step"
    summary = history.summary(step)
    wall_ns = None if summary is None else history.wall_ns(summary.tokens_ns)
    return f"the {which} is {step:,}" + ("" if wall_ns is None else f", of {fmt.moment(wall_ns)}")


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
    return [round(when.timestamp() * 1e6) * 1000 - wall_ns for when in found]


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
