"""Finds the nearest event, and tells which steps of a replayed file were not searched for it.

A background thread searches the file, so at first only a part has been searched.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING

from stepscope.recordings.history.history import History
from stepscope.recordings.state.series.events import SessionEvent
from stepscope.tui.views import format as fmt

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
    spans = file.file_index.spans()
    return all(
        any(begin <= first and last <= end for begin, end in spans)
        for first, last in _in_memory(history)
    )


def passed_over(history: History, file: "ReplaySource | None", at: int, step: int) -> str:
    """Return how many steps between were not searched, for a notice; empty if all were."""
    number = 0 if file is None else _num_unsearched(history, file, at, step)
    if file is None or not number:
        return ""
    yet = "" if file.file_index.is_done else "yet "
    return f"; {fmt.plural(number, 'step')} between not {yet}searched"


def nothing(
    history: History, file: "ReplaySource | None", at: int, direction: int, kinds: Collection[str]
) -> str:
    """Return the notice that no event was found from `at` on, and what was not searched."""
    kind = "preemption" if set(kinds) == {"preempt"} else "event"
    where = f"{'after' if direction > 0 else 'before'} step {at:,}"
    if file is None or file.extent is None:
        return f"no {kind} {where} in memory"
    end = file.extent[direction > 0]
    if at == end:
        return f"no {kind} {where}, the {'last' if direction > 0 else 'first'} of the file"
    beyond = end + direction
    number = _num_unsearched(history, file, at, beyond)
    if number and not file.file_index.is_done:
        return f"no {kind} {where} so far; {fmt.plural(number, 'step')} not yet searched"
    if number:
        return f"no other {kind} {where}; {fmt.plural(number, 'step')} could not be searched"
    return f"no {kind} {where} in all of the file"


def _num_unsearched(history: History, file: "ReplaySource", at: int, step: int) -> int:
    return _num_outside([*_in_memory(history), *file.file_index.spans()], at, step)


def _in_memory(history: History) -> list[tuple[int, int]]:
    first, last = history.first_step, history.last_step
    return [] if first is None or last is None else [(first, last)]


def _num_outside(spans: Collection[tuple[int, int]], at: int, step: int) -> int:
    begin, end = min(at, step) + 1, max(at, step)
    number = 0
    for first, last in sorted(spans):
        number += max(0, min(first, end) - begin)
        begin = max(begin, last + 1)
    return number + max(0, end - begin)
