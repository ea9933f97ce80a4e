"""`FileIndex`: what happened in a whole file, including parts that a replay has not played yet.

Its thread reads the indexes of the file with a handle of its own. A file without indexes has its
messages read for them, a third of the time and a millisecond or two at once, so that this delays
nothing else. `EventSteps`: its steps with a certain request event. `WorstWaits`: the longest ITL
(or TTFT) of each of its seconds, in a few bytes each.
"""

import contextlib
import threading
import time
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from stepscope.engine.protocol.wire import Aborted, Audited, KnobsChanged, Mark, Preempted, Rejected
from stepscope.recordings.attribution.baseline import ENOUGH_STEPS, Baseline
from stepscope.recordings.attribution.late_sweep import Breach, worst_of_seconds
from stepscope.recordings.errors import RecordingError
from stepscope.recordings.file.messages import indexes
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.history.windows import Stalls
from stepscope.recordings.session.index import Index, IndexRows
from stepscope.recordings.state.series.events import (
    AuditedStep,
    EventKind,
    SessionEvent,
    audit_event,
    breach_event,
    gap_event,
    knobs_event,
    mark_event,
    request_event,
)
from stepscope.recordings.state.series.latency import SLO, LatencyKind
from stepscope.recordings.state.session import SessionState

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class WorstWaits:
    """The longest wait of each second of engine time; of equal ones the first.

    Late tokens come in swarms, so one per second is enough for a list from which people jump to
    steps. The longest wait of a second serves for all service levels. One thread adds, any number
    read: what they read is replaced, never changed. `num_tokens` of a breach is the tokens of its
    step with exactly this wait.
    """

    def __init__(self, kind: LatencyKind) -> None:
        self._kind = kind
        self._rows: NDArray[np.int64] | None = None  # step, time, ns, request, tokens

    def __len__(self) -> int:
        return 0 if self._rows is None else self._rows.shape[1]

    def add(self, rows: IndexRows) -> None:
        import numpy as np

        places, *waits = rows.longest(self._kind)
        steps = [rows.column("steps", name)[places] for name in ("step", "tokens_ns")]
        fresh = np.array([*steps, *waits])
        known = self._rows
        found = fresh if known is None else np.concatenate((known[:, -1:], fresh), axis=1)
        found = found[:, found[2] > 0]
        found = found[:, worst_of_seconds(found[1], found[2])]
        self._rows = found if known is None else np.concatenate((known[:, :-1], found), axis=1)

    def next(self, step: int, direction: int, bound_ns: float) -> Breach | None:
        """The nearest wait above a bound in a later step (direction 1) or an earlier one (-1)."""
        if (rows := self._rows) is None:
            return None
        steps, late = rows[0], rows[2] > bound_ns
        if direction > 0:
            begin = bisect_right(steps, step)
            places = late[begin:].nonzero()[0][:1] + begin
        else:
            places = late[: bisect_left(steps, step)].nonzero()[0][-1:]
        return self._breach(rows[:, places[0]].tolist()) if len(places) else None

    def longest(self, limit: int, bound_ns: float) -> list[Breach]:
        if (rows := self._rows) is None:
            return []
        late = rows[:, rows[2] > bound_ns]
        order = (-late[2]).argsort(kind="stable")[:limit]
        return [self._breach(each) for each in late[:, order].T.tolist()]

    def num_above(self, bound_ns: float) -> int:
        return 0 if self._rows is None else int((self._rows[2] > bound_ns).sum())

    def _breach(self, row: list[int]) -> Breach:
        step, time_ns, ns, request_id, num_tokens = row
        return Breach(step, time_ns, self._kind.upper(), ns, request_id, num_tokens)


Noted: TypeAlias = Preempted | Aborted | Rejected

_NO_STATE = SessionState()  # the texts of these events need no state


class EventSteps:
    """Request events of one kind, such as preemptions; only the first in each step is stored.

    One thread writes, any number read.
    """

    def __init__(self) -> None:
        self._steps = array("q")
        self._times_ns = array("q")
        self._events: list[Noted] = []

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: int, time_ns: int, event: Noted) -> None:
        """Add the next event in file order."""
        if self._steps and step <= self._steps[-1]:
            return  # the same step, or a repeated one
        # Steps are added last: a reader that finds a step finds the rest.
        self._times_ns.append(time_ns)
        self._events.append(event)
        self._steps.append(step)

    def next(self, step: int, direction: int) -> SessionEvent | None:
        """The nearest event in a later step (direction 1) or an earlier one (-1)."""
        steps = self._steps
        at = bisect_right(steps, step) if direction > 0 else bisect_left(steps, step) - 1
        return self._event(at) if 0 <= at < len(steps) else None

    def spread(self, most: int) -> list[SessionEvent]:
        """All events; if more than `most`, one from each of `most` equal ranges of steps."""
        steps, number = self._steps, len(self._steps)
        if number <= most:
            return self._told(range(number))
        first, extent = steps[0], steps[-1] - steps[0] + 1
        places = {bisect_left(steps, first + extent * each // most) for each in range(most)}
        return self._told(at for at in sorted(places) if at < number)

    def _told(self, places: Iterable[int]) -> list[SessionEvent]:
        return [event for at in places if (event := self._event(at)) is not None]

    def _event(self, at: int) -> SessionEvent | None:
        return request_event(self._events[at], _NO_STATE, self._steps[at], self._times_ns[at])


if TYPE_CHECKING:
    import msgspec

MAX_KEPT = 1_500_000  # waits of 40 bytes, of which a busy week has 1.2 million; events of 130
_FIRST_PAUSE_S = 0.3  # the first screen is drawn first
_BUSY_S = 0.02  # seconds between calls of `is_busy`
_REST = 2.0  # rest, as a multiple of the time it worked
_MAX_SPREAD = 512  # cells of the widest bar
_OF_REQUESTS: "dict[type[msgspec.Struct], EventKind]" = {
    Preempted: "preempt",
    Aborted: "abort",
    Rejected: "reject",
}


class _StoppedError(Exception):
    """Ends the reading."""


class FileIndex:
    """The events, late tokens and lost messages of one file. `start` begins to read.

    Lists are replaced, so that readers see all events of a chunk or none.

    Args:
        is_busy: returns whether the replay has more urgent work, for which the reading waits.
        learnt: called once with the baseline (usual step durations), when enough steps are known
            or the file is read.

    `audited`: other commands, accepted or refused, oldest first.
    """

    def __init__(
        self,
        path: Path,
        is_busy: Callable[[], bool] = lambda: False,
        learnt: Callable[[Baseline], None] = lambda baseline: None,
    ) -> None:
        self.found: Sequence[SessionEvent] = ()  # marks and knob changes, by step
        self.changes: Sequence[KnobsChanged] = ()  # knob changes, oldest first
        self.audited: Sequence[AuditedStep] = ()
        self._share = 0.0
        self._of_engine: Sequence[SessionEvent] = ()
        self._lost: Sequence[SessionEvent] = ()
        self._of_requests = {kind: EventSteps() for kind in _OF_REQUESTS.values()}
        self._itl, self._ttft = WorstWaits("itl"), WorstWaits("ttft")
        self._steps: tuple[int, int] | None = None  # the first and last step read
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
        """Whether the reading has ended. `spans` tells what was read."""
        return self._done.is_set()

    @property
    def share(self) -> float:
        """The part of the file that was read, 0..1."""
        return self._share

    def spans(self) -> list[tuple[int, int]]:
        """First and last step of the part of the file that was read; empty before it has a step."""
        return [] if self._steps is None else [self._steps]

    def next(
        self, step: int, direction: int, kinds: Collection[str], slo: SLO
    ) -> SessionEvent | None:
        """The nearest event read so far in a later step (direction 1) or an earlier one (-1).

        `slo`: service levels that define late tokens. Only the longest late ITL and the longest
        late TTFT of each second count.
        """
        told = [e for e in (*self.found, *self._of_engine, *self._lost) if e.kind in kinds]
        found = [each for each in told if (each.step - step) * direction > 0]
        for kind, steps in self._of_requests.items():
            if kind in kinds and (event := steps.next(step, direction)) is not None:
                found.append(event)
        if "slo" in kinds:
            for waits, bound_ms in self._kinds(slo):
                if (wait := waits.next(step, direction, bound_ms * 1e6)) is not None:
                    found.append(breach_event(slo, *wait[:5]))
        return min(found, key=lambda each: (each.step - step) * direction, default=None)

    def landmarks(self) -> list[SessionEvent]:
        """The events to show on the bar of the whole file: marks, knob changes and preemptions."""
        return [*self.found, *self._of_requests["preempt"].spread(_MAX_SPREAD)]

    def stalls(self, slo: SLO, limit: int) -> Stalls:
        """The longest waits above the ITL level, one per second, in the part that was read.

        If there are none, the waits above the TTFT level instead. `num_tokens` counts the tokens
        with exactly this wait; `number` counts the seconds with a wait above the level.
        """
        for waits, bound_ms in self._kinds(slo):
            if longest := waits.longest(limit, bound_ms * 1e6):
                return Stalls(longest, waits.num_above(bound_ms * 1e6))
        return Stalls([], 0)

    def _kinds(self, slo: SLO) -> list[tuple[WorstWaits, float]]:
        return [(self._itl, slo.itl_ms), (self._ttft, slo.ttft_ms)]

    def note(self, marks: Sequence[Mark]) -> None:
        """Add marks that are not in the file. Call it before `start`."""
        self._take_said([(mark.step, mark) for mark in marks])

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
            self._share = number / recording.num_chunks
            num_others = sum(map(len, self._of_requests.values()))
            if num_others + len(self._itl) + len(self._ttft) + len(self._lost) > MAX_KEPT:
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
        self._itl.add(rows)
        self._ttft.add(rows)
        if index.lost:
            self._lost = [*self._lost, *(gap_event(*each) for each in index.lost)]
        for step, time_ns, event in index.noted:
            if isinstance(event, Preempted | Aborted | Rejected):
                self._of_requests[_OF_REQUESTS[type(event)]].add(step, time_ns, event)
        self._take_said(index.said)
        if rows.number("steps"):
            numbers = rows.column("steps", "step")
            first = int(numbers[0]) if self._steps is None else self._steps[0]
            self._steps = first, int(numbers[-1])
        if self._has_learnt:
            return
        self._baseline.add_rows(rows.steps())
        if self._baseline.num_steps >= ENOUGH_STEPS:
            self._has_learnt = True
            self._learnt(self._baseline)

    def _take_said(self, said: Sequence[tuple[int, Mark | KnobsChanged | Audited]]) -> None:
        """Add what people or clients caused: marks, knob changes, other commands."""
        caused: set[SessionEvent] = set()
        of_engine: set[SessionEvent] = set()
        changes, audited = list(self.changes), list(self.audited)
        for step, message in said:
            if isinstance(message, Mark):
                caused.add(mark_event(message))
            elif isinstance(message, KnobsChanged):
                if (event := knobs_event(message)) is not None:
                    caused.add(event)
                    changes.append(message)
            elif (event := audit_event(message, step)) is not None:
                of_engine.add(event)
                audited.append(AuditedStep(event.step, message))
        if caused:
            self.changes = sorted(changes, key=lambda each: each.version)
            self.found = _by_step({*self.found, *caused})
        if of_engine:
            self.audited = sorted(audited, key=lambda each: each.entry.time_ns)
            self._of_engine = _by_step({*self._of_engine, *of_engine})


def _by_step(events: set[SessionEvent]) -> list[SessionEvent]:
    return sorted(events, key=lambda each: (each.step, each.time_ns))
