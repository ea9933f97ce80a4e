"""`History`: a session so far, in memory. One thread writes (its `Source`), any number read.

This class adds messages; its base class `HistoryView` reads. When an engine restarts or its clock
is set back, a new history begins in the same object. The last history with any step is kept as
`previous` until `reset`.
"""

import copy
import time
from collections.abc import Mapping

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import EngineInfo, Mark, Snapshot, StepRecord, Telemetry
from stepscope.recordings.attribution.baseline import Baseline
from stepscope.recordings.file import service_levels
from stepscope.recordings.history.history_view import HistoryView
from stepscope.recordings.history.timeline import Timeline
from stepscope.recordings.state.clocks import back_by, check_numbers, set_back
from stepscope.recordings.state.latency import SLO
from stepscope.recordings.state.session import SessionState

MAX_STEPS = 100_000
MAX_BYTES = 256 * 1024 * 1024


class History(HistoryView):
    """Adds messages to a session in memory; see `HistoryView` for reading.

    Args:
        slo: service levels (bounds of TTFT and ITL) that the viewer chose, all or some by name. The
            others are those of `carried`, of the engine, or the defaults.
        max_steps, max_bytes: how much is kept. Beyond that, the oldest steps are forgotten.
        known_since_ns: engine time from which on pauses by an operator are known. Waits that began
            earlier are left out of all figures. 0: from the beginning.
    """

    def __init__(
        self,
        slo: SLO | service_levels.Levels | None = None,
        max_steps: int = MAX_STEPS,
        max_bytes: int = MAX_BYTES,
        known_since_ns: int = 0,
    ) -> None:
        self.chosen = dict(service_levels.levels_of(slo) if isinstance(slo, SLO) else slo or {})
        self.carried: Mapping[str, str] = {}  # metadata of the recording, which may hold levels
        slo = service_levels.slo_of(self.chosen)
        super().__init__(slo, Timeline(slo, max_steps, max_bytes, SessionState(), None))
        self.max_steps = max_steps
        self.max_bytes = max_bytes
        self.known_since_ns = known_since_ns
        self.previous: History | None = None

    def append(
        self, sequence: int, message: Telemetry | bytes, payload: bytes | None = None
    ) -> None:
        """Add the next message: decoded, or its payload, or both.

        A message with a known sequence number is ignored. Skipped numbers make a `Gap`. A
        `Snapshot` corrects the state after missing messages; otherwise it is ignored. A new engine
        id begins a new history.

        Raises:
            msgspec.DecodeError: the payload is no telemetry, or a number in it is out of range. The
            history is then unchanged.
        """
        if isinstance(message, bytes):
            payload, message = message, wire.decode(message)
        elif payload is None:
            payload = wire.encode(message)
        check_numbers(sequence, message)
        with self._lock:
            if isinstance(message, Mark):
                self._timeline.add_mark(message)
            else:
                self._take(sequence, message, payload)
                if isinstance(message, EngineInfo | Snapshot):
                    self._judge()
            self.version, self.heard_s = self.version + 1, time.monotonic()

    def skip(self, sequence: int) -> None:
        """Skip a message of an unknown kind, so that its number does not count as missing."""
        with self._lock:
            if self._timeline.last_sequence == sequence - 1:
                self._timeline.last_sequence = sequence

    def reset(self, snapshot: Snapshot) -> None:
        """Restart from `snapshot`. Forgets everything but the marks of this engine."""
        with self._lock:
            old = self._timeline
            self.begin(SessionState.from_snapshot(snapshot), snapshot.sequence)
            self._timeline.know_transcripts(snapshot)
            self._keep_marks(old)
            self.heard_s = time.monotonic()

    def begin(self, state: SessionState, sequence: int) -> None:
        """Forget everything and restart from `state`, as of message `sequence`, which it owns."""
        with self._lock:
            self.previous = None
            self._begin(self._new_timeline(state, sequence))
            self._timeline.known_since_ns = self.known_since_ns
            self.version += 1

    def adopt(self, other: "History") -> None:
        """Swap contents with another history."""
        with self._lock:
            old = self._timeline
            self.previous = None
            self._begin(other._timeline)
            other._begin(old)
            self._keep_marks(old)
            self.version += 1

    def end_short(self) -> None:
        """Clear `is_short`: no earlier steps will be prepended."""
        with self._lock:
            self.is_short = False
            self.version += 1

    def keep(self, max_steps: int, max_bytes: int) -> None:
        """Change how many steps and bytes are kept. The next message removes the excess."""
        with self._lock:
            self.max_steps = self._timeline.ring.max_steps = max_steps
            self.max_bytes = self._timeline.ring.max_bytes = max_bytes

    def rewind(self, step: int) -> bool:
        """Forget everything after `step`. Returns False, without a change, if it is not there."""
        with self._lock:
            if not self._timeline.rewind(step):
                return False
            self._drop_caches()
            self.version += 1
            return True

    def add_mark(self, mark: Mark) -> None:
        """Add a mark (a note at a step). Duplicates are ignored. Any thread may call it."""
        with self._lock:
            self._timeline.add_mark(mark)
            self.version += 1

    def know_baseline(self, baseline: Baseline) -> None:
        """Explain waits by the baseline of the replayed file, which must not change any more.

        Any thread may call it.
        """
        with self._lock:
            self._file_baseline = self._baseline.of_file = baseline
            if self.previous is not None:
                self.previous.know_baseline(baseline)
            self.version += 1

    def set_slo(self, slo: SLO) -> None:
        """Choose service levels, also for past steps. From any thread.

        A level that is as before is not chosen: it stays that of the engine or the recording.
        """
        with self._lock:
            now = service_levels.levels_of(self.slo)
            self.chosen |= {
                name: ms for name, ms in service_levels.levels_of(slo).items() if ms != now[name]
            }
            self._judge()
            if self.previous is not None:
                self.previous.set_slo(slo)
            self.version += 1

    @property
    def own_levels(self) -> str:
        """Says that levels are the viewer's choice against those of the engine; else empty."""
        return service_levels.own_text(
            self.chosen, service_levels.levels_said(self.info, self.carried)
        )

    # Inside

    def _begin(self, timeline: Timeline) -> None:
        super()._begin(timeline)
        self._judge()

    def _judge(self) -> None:
        """Judge by the levels that hold for the engine of the timeline."""
        slo = service_levels.slo_of(
            self.chosen, service_levels.levels_said(self.info, self.carried)
        )
        if slo != self.slo or slo != self._timeline.slo:
            self.slo = slo
            self._timeline.set_slo(slo)
            self._drop_caches()

    def _new_timeline(self, state: SessionState, last_sequence: int | None) -> Timeline:
        return Timeline(self.slo, self.max_steps, self.max_bytes, state, last_sequence)

    def _keep_marks(self, old: Timeline) -> None:
        before, now = old.state.info, self._timeline.state.info
        if before is not None and now is not None and before.engine_id == now.engine_id:
            for mark in old.marks:
                self._timeline.add_mark(mark)

    def _take(self, sequence: int, message: Telemetry, payload: bytes) -> None:
        if self._timeline.state.is_replaced_by(message):
            state = SessionState()
            state.apply(message)
            info = state.info
            assert info is not None
            self._begin_anew(state, sequence, f"{info.name} restarted (pid {info.pid or '?'})")
            if isinstance(message, Snapshot):
                self._timeline.know_transcripts(message)
            return
        columns = self._timeline.columns
        if isinstance(message, StepRecord) and columns.steps and message.step > columns.steps[-1]:
            back_ns = back_by(columns.tokens_ns[-1], message)
            if back_ns:  # continued, steps would no longer be in the order of their times
                state = set_back(self._timeline.state, back_ns)
                text = f"the engine's clock went back by {back_ns / 1e9:,.1f} s"
                self._begin_anew(state, sequence - 1, f"{text}: a new history begins")
        self._timeline.take(sequence, message, payload)

    def _begin_anew(self, state: SessionState, last_sequence: int, why: str) -> None:
        """Begin a new timeline, and keep the current one as `previous` unless it has no step.

        An engine that keeps crashing at its start has no steps. So it does not displace the last
        one that worked.
        """
        if self._timeline.columns.steps or self.previous is None:
            self.previous = copy.copy(self)
            self.previous.previous = None
            self.previous._begin(self._timeline)
        self._begin(self._new_timeline(state, last_sequence))
        self._timeline.say(max(state.time_ns, 0), why)
