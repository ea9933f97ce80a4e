"""What was searched for an event, in words: in a replay not every step for every kind."""

from collections.abc import Collection

from stepscope.recordings.history import History

# What a file does not tell before it is played: it has to be reckoned.
RECKONED = frozenset({"slo", "gap"})


def passed_over(history: History, at: int, step: int, kinds: Collection[str]) -> str:
    """Of a jump from `at` to `step`: what may lie between them and was not searched for."""
    if not set(kinds) & RECKONED:
        return ""
    number = _num_outside(history, at, step)
    return f"; {_steps(number)} between not searched for late tokens" if number else ""


def nothing(
    history: History,
    extent: tuple[int, int] | None,
    is_done: bool,
    at: int,
    direction: int,
    kinds: Collection[str],
) -> str:
    """That nothing was found from `at` on, and where that is not all of what there is.

    Args:
        extent: first and last step of the file that is replayed, if it is one.
        is_done: all of that file has been looked through.
    """
    kind = "preemption" if set(kinds) == {"preempt"} else "event"
    where = f"{'after' if direction > 0 else 'before'} step {at:,}"
    if extent is None:
        return f"no {kind} {where} in memory"
    end = extent[direction > 0]
    if at == end:
        return f"no {kind} {where}, the {'last' if direction > 0 else 'first'} of the file"
    number = _num_outside(history, at, end + direction)
    if number and not is_done:
        return f"no {kind} {where} in memory; the rest of the file is still looked through"
    if number and set(kinds) & RECKONED:
        rest = f"{_steps(number)} not in memory were not searched for them"
        return f"{where} at most late tokens or lost messages: {rest}"
    return f"no {kind} {where} in all of the file"


def _num_outside(history: History, at: int, step: int) -> int:
    """How many steps between these two are not in memory."""
    first, last = history.first_step, history.last_step
    begin, end = sorted((at, step))
    if first is None or last is None:
        return max(0, end - begin - 1)
    return max(0, min(end, first) - begin - 1) + max(0, end - max(begin, last) - 1)


def _steps(number: int) -> str:
    return f"{number:,} step{'' if number == 1 else 's'}"
