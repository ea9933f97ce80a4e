"""Finds the step that an operator typed: a step number, a time of day, or a time difference.

A time difference such as `-2m` counts from the step at the cursor.
"""

import re
import time
from typing import TYPE_CHECKING, NamedTuple

from stepscope.recordings.history.history import History
from stepscope.tui.views import format as fmt

if TYPE_CHECKING:
    from stepscope.recordings.replay.replay import ReplaySource  # with mcap, only when needed

# The forms in which times are shown: 12:41, 12:41:58.3, Nov 15 12:41:58, Nov 15 2025 12:41:58.
_TIME = re.compile(
    r"(?:(?P<month>[a-z]{3}) (?P<date>\d{1,2})(?: (?P<year>\d{4}))? )?"
    r"(?P<hour>\d{1,2}):(?P<minute>\d{2})(?::(?P<second>\d{2}(?:\.\d+)?))?",
    re.IGNORECASE,
)
_STRETCH = re.compile(r"([+-])(\d{1,12}(?:\.\d+)?)(ms|s|m|min)?")
_SECONDS = {"ms": 0.001, "s": 1, None: 1, "m": 60, "min": 60}
_HALF_DAY_NS = 12 * 3600 * 10**9


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
    elif (when := _TIME.fullmatch(text)) is not None:
        away_ns = _away_ns(when, history.wall_ns(summary.tokens_ns))
    else:
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
        if start.split(":")[0][:-3] == end.split(":")[0][:-3]:
            end = end[-len("00:00:00") :]  # the same day: do not name it twice
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
    summary = history.summary(step)
    wall_ns = None if summary is None else history.wall_ns(summary.tokens_ns)
    when = "" if wall_ns is None else f", of {fmt.moment(wall_ns)}"
    return f"the {'oldest step in memory' if is_oldest else 'newest step'} is {step:,}{when}"


def _step_in_memory(history: History, time_ns: int) -> int | None:
    first, last = (
        None if step is None else history.summary(step)
        for step in (history.first_step, history.last_step)
    )
    if first is None or last is None or not first.tokens_ns <= time_ns <= last.tokens_ns:
        return None
    return history.step_at(time_ns)


def _away_ns(when: re.Match[str], wall_ns: int | None) -> list[int]:
    """Return how far the typed time is from `wall_ns`, in ns, on each day, likeliest first."""
    if wall_ns is None:
        raise ValueError("the engine has not reported the time of day")
    day = time.localtime(wall_ns // 10**9)
    time_of_day = int(when["hour"]), int(when["minute"])
    if time_of_day[0] > 23 or time_of_day[1] > 59 or float(when["second"] or 0) >= 60:
        raise ValueError(f"{when[0]} is not a time of day")
    part_ns = round(float(when["second"] or 0) * 1e9)

    def away_ns(year: int, month: int, date: int) -> int:
        start_s = time.mktime((year, month, date, *time_of_day, 0, 0, 0, -1))
        return round(start_s) * 10**9 + part_ns - wall_ns

    if when["month"]:
        if when["month"].title() not in fmt.MONTHS:
            raise ValueError(f"unknown month {when['month']}: {', '.join(fmt.MONTHS)}")
        named = fmt.MONTHS.index(when["month"].title()) + 1, int(when["date"])
        years = [int(when["year"])] if when["year"] else [day.tm_year, day.tm_year - 1]
        return sorted((away_ns(year, *named) for year in years), key=abs)
    dates = (day.tm_mday, day.tm_mday - 1, day.tm_mday + 1)
    found = [away_ns(day.tm_year, day.tm_mon, date) for date in dates]
    if found[0] > _HALF_DAY_NS:
        return [found[1], found[0]]  # it is after midnight: yesterday is likelier
    return found
