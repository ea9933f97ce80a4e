"""`AskedWorkload`: the engine's own workload, for an operator who changes a part of it.

Telemetry shows a new workload up to a second late. A second change within that second must not undo
the first: the workload requested last counts until telemetry shows a change.
"""

from typing import NamedTuple

from stepscope.engine.protocol.settings.workload_spec import WorkloadSpec
from stepscope.engine.protocol.wire import KnobValue
from stepscope.recordings.state.session import SessionState
from stepscope.tui.session.control.workload_text import published_workload, workload_text


class _PublishedWorkload(NamedTuple):
    """What an engine reports of its workload."""

    engine_id: str | None
    workload: str | None
    spec: dict[str, KnobValue] | None


class AskedWorkload:
    """Belongs to the thread of the screen."""

    def __init__(self) -> None:
        self._asked: tuple[WorkloadSpec | None, _PublishedWorkload] | None = (
            None  # and what was published then
        )

    def ask(self, spec: WorkloadSpec | None, state: SessionState) -> None:
        self._asked = spec, _published(state)

    def forget(self) -> None:
        """The workload was refused, or its outcome is unknown."""
        self._asked = None

    def look(self, state: SessionState) -> None:
        """Compare with the newest telemetry; call it as often as you like."""
        if self._asked is not None and self._asked[1] != _published(state):
            self._asked = None

    def now(self, state: SessionState) -> WorkloadSpec | None:
        """The workload that a change is a change of; None: none runs, or it is not known."""
        self.look(state)
        return published_workload(state.workload_spec) if self._asked is None else self._asked[0]

    def note(self, state: SessionState) -> str:
        """A note on the current workload, for the prompt."""
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
