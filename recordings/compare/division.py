"""Finds landmarks of a session, and divides it into two parts, before and after one.

A landmark is a step with a mark (a note by a person), a knob change or a workload change.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from stepscope.engine.protocol.wire import Audited, KnobsChanged, Mark
from stepscope.recordings.file.step_range import StepRange
from stepscope.recordings.state.audit_text import typed_text

if TYPE_CHECKING:
    from stepscope.recordings.file.reader import Recording


class Landmark(NamedTuple):
    """A mark, knob change or workload change. `step` is the first step after it."""

    step: int
    text: str
    kind: Literal["mark", "knobs", "workload", "step"]


def landmarks(recording: "Recording") -> Iterator[Landmark]:
    """All landmarks, in file order."""
    from stepscope.recordings.file.messages import indexes  # with mcap, only when needed

    for _, index in indexes(recording):
        for _, message in index.said:
            if (found := landmark_of(message)) is not None:
                yield found


def landmark_of(message: object) -> Landmark | None:
    """The landmark that a message stands for; None if the message is no landmark."""
    if isinstance(message, Mark):
        return Landmark(message.step, message.text, "mark")
    if isinstance(message, KnobsChanged) and message.new:
        text = ", ".join(f"{name}={typed_text(value)}" for name, value in message.new.items())
        return Landmark(message.effective_step, text, "knobs")
    if isinstance(message, Audited) and message.command == "SetWorkload":
        # A refused command has no step, because it changed nothing.
        step = message.effective_step
        return None if step is None else Landmark(step, "the workload", "workload")
    return None


def find_landmark(found: Sequence[Landmark], text: str) -> Landmark | None:
    """The last landmark with that text, or else the last one whose text contains it."""
    exact = [each for each in found if each.text == text]
    within = [each for each in found if text.lower() in each.text.lower()]
    return next(reversed(exact or within), None)


_SINCE, _UNTIL = " since the change at step ", " until the change at step "


class SessionPart(NamedTuple):
    name: str
    stretch: StepRange


def divide(mark: Landmark, found: Iterable[Landmark]) -> tuple[SessionPart, SessionPart]:
    """The parts of a session before and after a landmark, each with unchanged engine settings.

    A part is cut where a knob or the engine's own workload changes. Marks cut nothing, because they
    change no setting. If the landmark is of kind "step", nothing is cut: the parts are the whole
    session.
    """
    cutting = () if mark.kind == "step" else ("knobs", "workload")
    changes = {each.step for each in found if each.kind in cutting}
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
