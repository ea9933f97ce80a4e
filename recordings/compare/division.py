"""Divides a session into two parts, before and after a landmark. Pure functions.

A landmark is a step with a mark (a note by a person), a knob change or a workload change.
"""

from collections.abc import Iterable
from typing import NamedTuple

from stepscope.recordings.file.landmarks import Landmark
from stepscope.recordings.file.step_range import StepRange

_SINCE, _UNTIL = " since the change at step ", " until the change at step "


class SessionPart(NamedTuple):
    name: str
    stretch: StepRange


def divide(mark: Landmark, found: Iterable[Landmark]) -> tuple[SessionPart, SessionPart]:
    """The parts of a session before and after a landmark, each with unchanged engine settings.

    A part is cut where a knob or the engine's own workload changes. Marks cut nothing, because they
    change no setting. If the landmark is of kind "step", nothing is cut: the parts are the whole
    session.

    Args:
        mark: the landmark.
        found: landmarks of the whole session, in any order.
    """
    changes = {each.step for each in found if each.kind in ("knobs", "workload")}
    if mark.kind == "step":
        changes = set()
    since = max((step for step in changes if step < mark.step), default=None)
    until = min((step for step in changes if step > mark.step), default=None)
    before, after = f"before {mark.text}", f"after {mark.text}"
    if since is not None:
        before += f"{_SINCE}{since:,}"
    if until is not None:
        after += f"{_UNTIL}{until:,}"
    last = None if until is None else until - 1
    return (
        SessionPart(before, StepRange(since, mark.step - 1)),
        SessionPart(after, StepRange(mark.step, last)),
    )


def reaches(a: str, b: str) -> tuple[str, str, str] | None:
    """Parse the names that `divide` gave to two parts; None for other names.

    Returns the landmark, then where the first part begins and where the second ends ("": not cut).
    """
    before, from_where, since = a.partition(_SINCE)
    after, to_where, until = b.partition(_UNTIL)
    of = before.removeprefix("before ")
    if of == before or after != f"after {of}":
        return None
    return of, f"{from_where}{since}".strip(), f"{to_where}{until}".strip()
