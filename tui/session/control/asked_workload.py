"""`AskedWorkload`: the workload that the engine runs itself, as the base of the next change.

Telemetry shows a new workload up to a second late. A second change within that second must not undo
the first: the workload requested last counts until telemetry shows a change.
"""

from typing import NamedTuple

from stepscope.engine.protocol.settings.workload_spec import WorkloadSpec
from stepscope.engine.protocol.wire import KnobValue
from stepscope.recordings.state.session import SessionState
from stepscope.tui.session.control.workload_text import published_workload, workload_text


class _PublishedWorkload(NamedTuple):
    """The workload of an engine as its telemetry reports it."""

    engine_id: str | None
    workload: str | None
    spec: dict[str, KnobValue] | None


class AskedWorkload:
    """Belongs to the thread of the screen."""

    def __init__(self) -> None:
        self._asked: tuple[WorkloadSpec | None, _PublishedWorkload] | None = (
            None  # the workload requested last, and what was published at that time
        )

    def ask(self, spec: WorkloadSpec | None, state: SessionState) -> None:
        self._asked = spec, _published(state)

    def forget(self) -> None:
        """Drop the requested workload: the engine refused it, or its outcome is unknown."""
        self._asked = None

    def look(self, state: SessionState) -> None:
        """Drop the requested workload once telemetry shows a change; call it at any rate."""
        if self._asked is not None and self._asked[1] != _published(state):
            self._asked = None

    def now(self, state: SessionState) -> WorkloadSpec | None:
        """Return the workload to base a change on; None if none runs or it is unknown."""
        self.look(state)
        return published_workload(state.workload_spec) if self._asked is None else self._asked[0]

    def note(self, state: SessionState) -> str:
        """Return a note on the current workload, for the prompt where the operator types."""
        spec = self.now(state)
        if spec is not None:
            return f"now {workload_text(spec)}; fields you leave out stay"
        if self._asked is not None or state.workload is None:
            return f"now none; fields you leave out are {workload_text(WorkloadSpec())}"
        return (
            f"now {state.workload}; its other fields are unknown here: fields you leave out become "
            f"{workload_text(WorkloadSpec())}"
        )


def _published(state: SessionState) -> _PublishedWorkload:
    engine_id = None if state.info is None else state.info.engine_id
    return _PublishedWorkload(engine_id, state.workload, state.workload_spec)
