"""`AskedWorkload`: the synthetic workload of an engine, for the operator to change.

Telemetry shows a new workload up to a second late, and a second change within that second must not
undo the first. So until telemetry shows a change, the workload that was requested last counts.
"""

from typing import NamedTuple

from stepscope.engine.protocol.settings.workload_spec import WorkloadSpec
from stepscope.engine.protocol.wire import KnobValue
from stepscope.recordings.state.session import SessionState
from stepscope.tui.session.control.workload_text import published_workload, workload_text


class _PublishedWorkload(NamedTuple):
    """The workload of an engine as the engine's telemetry reports it."""

    engine_id: str | None
    workload: str | None
    spec: dict[str, KnobValue] | None


class AskedWorkload:
    """The workload that was requested last, until telemetry shows it.

    Use it on the screen's thread.
    """

    def __init__(self) -> None:
        self._asked: tuple[WorkloadSpec | None, _PublishedWorkload] | None = (
            None  # the workload requested last, and what was published at that time
        )

    def ask(self, spec: WorkloadSpec | None, state: SessionState) -> None:
        self._asked = spec, _published(state)

    def forget(self) -> None:
        """Drop the requested workload. Call this if the engine refused it or did not answer."""
        self._asked = None

    def look(self, state: SessionState) -> None:
        """Drop the requested workload if telemetry has shown a change since the request.

        It may be called as often as one likes.
        """
        if self._asked is not None and self._asked[1] != _published(state):
            self._asked = None

    def now(self, state: SessionState) -> WorkloadSpec | None:
        """Return the workload that a change starts from; None if none runs or it is unknown."""
        self.look(state)
        return published_workload(state.workload_spec) if self._asked is None else self._asked[0]

    def note(self, state: SessionState) -> str:
        """Return a line about the current workload, for the prompt in which it is changed."""
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
