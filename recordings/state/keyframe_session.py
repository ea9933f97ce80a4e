"""`KeyframeSession`: the state of an engine, brought up to date only when somebody asks for it.

A step in memory is looked at now and then, not every step. While a request decodes one
token per step, only its newest batch row matters. So this class keeps that row. It applies the row
when the state is needed or when the request does something else.
"""

from stepscope.engine.protocol.wire import (
    BatchRow,
    EngineInfo,
    EngineStatus,
    Phase,
    Snapshot,
    StepRecord,
    Telemetry,
)
from stepscope.recordings.state.outcome import Outcome
from stepscope.recordings.state.session import SessionState

_DECODE = int(Phase.DECODE)


class KeyframeSession:
    """Applies messages to `state`, in place, as `SessionState` does, in a fraction of the time."""

    def __init__(self, state: SessionState | None = None) -> None:
        self._state = SessionState() if state is None else state
        # For each decoding request: its row not applied yet, and when its token was known. None if
        # all its rows are applied.
        self._rows: dict[int, tuple[BatchRow, int] | None] = {}

    @property
    def info(self) -> EngineInfo | None:
        return self._state.info

    def settled(self) -> SessionState:
        """The state after all messages so far. It is not a copy: later messages may change it."""
        self._apply_rows()
        return self._state

    def snapshot(self, sequence: int) -> Snapshot | None:
        """The state as a `Snapshot` message; see `SessionState.snapshot`."""
        return self.settled().snapshot(sequence)

    def apply(self, message: Telemetry) -> None:
        """Apply one message."""
        if isinstance(message, StepRecord):
            self._apply_step(message)
            return
        if isinstance(message, EngineStatus):
            for event in message.events:
                self._apply_row(event.request_id)
        else:
            self._apply_rows()
            self._rows.clear()
        self._state.apply(message)

    def _apply_step(self, record: StepRecord) -> None:
        if record.batch is None:
            self._state.apply(record)
            return
        rows = self._rows
        for event in record.events:
            self._apply_row(event.request_id)
        others = []
        now_ns = record.tokens_ns
        for row in record.batch:
            if row.request_id in rows and row.phase == _DECODE:
                rows[row.request_id] = row, now_ns
            else:
                self._apply_row(row.request_id)
                others.append(row)
        self._state.take_step(record, others)
        for row in others:
            if row.phase == _DECODE:
                rows[row.request_id] = None
        for event in record.events:
            rows.pop(event.request_id, None)

    def _apply_rows(self) -> None:
        for request_id, pending in self._rows.items():
            if pending is not None:
                self._state.table.take_rows([pending[0]], pending[1], Outcome())
                self._rows[request_id] = None

    def _apply_row(self, request_id: int) -> None:
        """Apply the kept row of a request. Its next row will be applied at once."""
        pending = self._rows.pop(request_id, None)
        if pending is not None:
            self._state.table.take_rows([pending[0]], pending[1], Outcome())
