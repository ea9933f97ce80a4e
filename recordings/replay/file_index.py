"""`FileIndex`: what happened in a whole file, including parts that a replay has not played yet.

Its thread reads the indexes of the file with a handle of its own. A file without indexes has its
messages read for them, a third of the time and a millisecond or two at once, so that this delays
nothing else.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from stepscope.engine.protocol.wire import Audited, KnobsChanged, Mark
from stepscope.recordings.attribution.baseline import ENOUGH_STEPS, Baseline
from stepscope.recordings.errors import RecordingError
from stepscope.recordings.file.messages import indexes
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.history.windows import Stalls
from stepscope.recordings.session.index import Index, IndexRows
from stepscope.recordings.session.waits import LateWaits
from stepscope.recordings.state import events
from stepscope.recordings.state.events import SessionEvent
from stepscope.recordings.state.latency import SLO
from stepscope.recordings.state.session import SessionState

MAX_KEPT = 1_500_000  # waits of 40 bytes, of which a busy week has 1.2 million; events of 300
_FIRST_PAUSE_S = 0.3  # the first screen is drawn first
_BUSY_S = 0.02  # seconds between calls of `is_busy`
_REST = 2.0  # rest, as a multiple of the time it worked
_MAX_SPREAD = 512  # cells of the widest bar
_LOGGED: tuple[events.EventKind, ...] = (
    "mark", "knobs", "engine", "gap", "preempt", "abort", "reject",
)  # fmt: skip
_NO_STATE = SessionState()  # the texts of the events of an index need no state


class _StoppedError(Exception):
    """Ends the reading."""


class FileIndex:
    """The events, late tokens and lost messages of one file. `start` begins to read.

    Args:
        is_busy: returns whether the replay has more urgent work, for which the reading waits.
        learnt: called once with the baseline (usual step durations), when enough steps are known
            or the file is read.
        marks: marks that are not in the file.
    """

    def __init__(
        self,
        path: Path,
        is_busy: Callable[[], bool] = lambda: False,
        learnt: Callable[[Baseline], None] = lambda baseline: None,
        marks: Sequence[Mark] = (),
    ) -> None:
        self.changes: Sequence[KnobsChanged] = ()  # oldest first, and so are these:
        self.audited: Sequence[events.AuditedStep] = ()  # other commands, accepted or refused
        self.share = 0.0  # the part of the file that was read, 0..1
        self._logs = {kind: events.EventLog(2 * MAX_KEPT) for kind in _LOGGED}
        # The longest of each second, which serves for all service levels: ITL and TTFT.
        self._itl, self._ttft = LateWaits("itl"), LateWaits("ttft")
        self._path = path
        self._is_busy = is_busy
        self._learnt = learnt
        self._baseline = Baseline()
        self._has_learnt = False
        self._worked_since_s = 0.0
        self._is_stopping = False
        self._hurry = threading.Event()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="index of the file", daemon=True)
        self._take_said([(mark.step, mark) for mark in marks])

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait for its end."""
        self._is_stopping = True
        self._hurry.set()
        if self._thread.ident is not None:
            self._thread.join()

    def wait(self, timeout_s: float = 10.0) -> bool:
        """Let it read without rests, and wait for its end. Returns False on timeout."""
        self._hurry.set()
        return self._done.wait(timeout_s)

    @property
    def is_done(self) -> bool:
        """Whether the reading has ended; with a `share` below 1 if not all can be read."""
        return self._done.is_set()

    def next(
        self, step: int, direction: int, kinds: Collection[str], slo: SLO
    ) -> SessionEvent | None:
        """The nearest event read so far in a later step (direction 1) or an earlier one (-1).

        `slo`: service levels that define late tokens. Only the longest late ITL and the longest
        late TTFT of each second count.
        """
        logs = [log for kind, log in self._logs.items() if kind in kinds]
        found = [log.next(step, direction, None) for log in logs]
        if "slo" in kinds:
            for waits in self._late(slo):
                wait = waits.next(step, direction)
                found.append(None if wait is None else events.breach_event(slo, *wait[:5]))
        near = [each for each in found if each is not None]
        return min(near, key=lambda each: (each.step - step) * direction, default=None)

    @property
    def num_events(self) -> int:
        return sum(map(len, self._logs.values()))

    @property
    def marks(self) -> list[SessionEvent]:
        return self._logs["mark"].spread()

    def landmarks(self) -> list[SessionEvent]:
        """The events to show on the bar of the whole file: marks, knob changes and preemptions."""
        caused = [*self.marks, *self._logs["knobs"].spread()]
        caused.sort(key=lambda each: (each.step, each.time_ns))
        return [*caused, *self._logs["preempt"].spread(_MAX_SPREAD)]

    def stalls(self, slo: SLO, limit: int) -> Stalls:
        """The longest waits above the ITL level, one per second, in the part that was read.

        If there are none, the waits above the TTFT level instead. `num_tokens` counts the tokens
        with exactly this wait; `number` counts the seconds with a wait above the level.
        """
        late = next((waits for waits in self._late(slo) if waits), None)
        return Stalls([], 0) if late is None else Stalls(late.longest(limit), len(late))

    def _late(self, slo: SLO) -> tuple[LateWaits, LateWaits]:
        return self._itl.above(slo.itl_ms * 1e6), self._ttft.above(slo.ttft_ms * 1e6)

    # The thread

    def _run(self) -> None:
        try:
            self._hurry.wait(_FIRST_PAUSE_S)
            self._worked_since_s = time.monotonic()
            # Playing the file reports what is wrong with it.
            with contextlib.suppress(RecordingError, OSError, _StoppedError):
                self._turn()
                with Recording(self._path) as recording:
                    self._read(recording)
            if not self._has_learnt and not self._is_stopping:
                self._learnt(self._baseline)
        finally:
            self._done.set()

    def _read(self, recording: Recording) -> None:
        for number, index in indexes(recording, self._turn):
            self._turn()
            with contextlib.suppress(ValueError, LookupError):  # damage that its checksum missed
                self._take(index)
            self.share = number / recording.num_chunks
            if self.num_events + len(self._itl) + len(self._ttft) > MAX_KEPT:
                return

    def _turn(self) -> None:
        """Rest for as long as it worked, times `_REST`."""
        self._hurry.wait(_REST * (time.monotonic() - self._worked_since_s))
        while self._is_busy() and not self._hurry.wait(_BUSY_S):
            pass
        if self._is_stopping:
            raise _StoppedError
        self._worked_since_s = time.monotonic()

    def _take(self, index: Index) -> None:
        rows = IndexRows(index)
        self._itl, self._ttft = self._itl.with_seconds_of(rows), self._ttft.with_seconds_of(rows)
        for lost in index.lost:
            self._log(events.gap_event(*lost))
        for step, time_ns, event in index.noted:
            self._log(events.request_event(event, _NO_STATE, step, time_ns))
        self._take_said(index.said)
        if self._has_learnt:
            return
        self._baseline.add_rows(rows.steps())
        if self._baseline.num_steps >= ENOUGH_STEPS:
            self._has_learnt = True
            self._learnt(self._baseline)

    def _take_said(self, said: Sequence[tuple[int, Mark | KnobsChanged | Audited]]) -> None:
        """Add what people or clients caused: marks, knob changes, other commands."""
        changes, audited = list(self.changes), list(self.audited)
        for step, message in said:
            if isinstance(message, Mark):
                self._log(events.mark_event(message))
            elif isinstance(message, KnobsChanged):
                if message not in changes and self._log(events.knobs_event(message)) is not None:
                    changes.append(message)
            elif (event := self._log(events.audit_event(message, step))) is not None:
                audited.append(events.AuditedStep(event.step, message))
        self.changes = sorted(changes, key=lambda each: each.version)
        self.audited = sorted(audited, key=lambda each: each.entry.time_ns)

    def _log(self, event: SessionEvent | None) -> SessionEvent | None:
        if event is not None:
            self._logs[event.kind].add(event)
        return event
