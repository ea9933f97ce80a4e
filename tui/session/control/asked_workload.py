"""`AskedWorkload`: what the engine gives itself to do, for an operator who changes a part of it.

Telemetry tells of a new workload up to a second after it was taken. Who changes something else of
it within that second must not take the first change back: what was asked for last counts until
telemetry tells of something else than when it was asked for.
"""

from typing import NamedTuple

from stepscope.engine.protocol.wire import KnobValue
from stepscope.engine.protocol.workload_spec import WorkloadSpec
from stepscope.recordings.state.session import SessionState
from stepscope.tui.session.control.workload_text import told_workload, workload_text


class _PublishedWorkload(NamedTuple):
    """What an engine tells of its workload."""

    engine_id: str | None
    workload: str | None
    spec: dict[str, KnobValue] | None


class AskedWorkload:
    """Belongs to the thread of the screen."""

    def __init__(self) -> None:
        self._asked: tuple[WorkloadSpec | None, _PublishedWorkload] | None = (
            None  # and what was told then
        )

    def ask(self, spec: WorkloadSpec | None, state: SessionState) -> None:
        self._asked = spec, _told(state)

    def forget(self) -> None:
        """It was refused, or nobody knows what became of it."""
        self._asked = None

    def look(self, state: SessionState) -> None:
        """See whether telemetry tells of something new; as often as it may."""
        if self._asked is not None and self._asked[1] != _told(state):
            self._asked = None

    def now(self, state: SessionState) -> WorkloadSpec | None:
        """The workload that a change is a change of; None: none runs, or it is not known."""
        self.look(state)
        return told_workload(state.workload_spec) if self._asked is None else self._asked[0]

    def note(self, state: SessionState) -> str:
        """What there is to know before one changes it."""
        spec = self.now(state)
        if spec is not None:
            return f"now {workload_text(spec)}; what is not named stays as it is"
        if self._asked is not None or state.workload is None:
            return f"now none; what is not named is {workload_text(WorkloadSpec())}"
        return (
            f"now {state.workload}; more of it is not known here: what is not named becomes "
            f"{workload_text(WorkloadSpec())}"
        )


def _told(state: SessionState) -> _PublishedWorkload:
    engine_id = None if state.info is None else state.info.engine_id
    return _PublishedWorkload(engine_id, state.workload, state.workload_spec)
