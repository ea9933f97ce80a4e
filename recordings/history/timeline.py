"""`Timeline`: all data kept of one engine, without a lock. `History` owns it.

From each message it derives the newest state, a step summary, latency samples and events. When the
ring of messages drops its oldest segment, the step summaries, samples and events of those steps are
dropped, too.

`Follower`: reads its messages, stored ones first, at its own pace.
"""

import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.pause_trail import PauseTrail
from stepscope.recordings.history.ring import StepCache, StepRing, replayed
from stepscope.recordings.session.steps import StepTable
from stepscope.recordings.state import events
from stepscope.recordings.state.audit_text import in_flight_text
from stepscope.recordings.state.clocks import WallClock, leave_out, lost_before
from stepscope.recordings.state.lanes import LaneBoard
from stepscope.recordings.state.latency import SLO, Latencies
from stepscope.recordings.state.latency_samples import RequestWatch
from stepscope.recordings.state.outcome import AppliedStep, Outcome
from stepscope.recordings.state.session import SessionState


class Timeline:
    """The data kept of one engine, from an initial state on.

    Args:
        last_sequence: number of the message that led to `state`; None if unknown.
        max_steps, max_bytes: how much is kept at most.
    """

    def __init__(
        self,
        slo: SLO,
        max_steps: int,
        max_bytes: int,
        state: SessionState,
        last_sequence: int | None,
    ) -> None:
        self.slo = slo
        # Waits that began before this engine time are left out of all figures.
        self.known_since_ns = 0
        self.state = state
        self.last_sequence = last_sequence
        self.wall_clock = WallClock()
        if state.info is not None:
            self.wall_clock.add(state.info)
        self.ring = StepRing(state, max_steps, max_bytes, last_sequence)
        self.columns = StepTable()
        self.lanes = LaneBoard(state, state.step + 1)
        self.latencies = Latencies(slo)
        self.log = events.EventLog()
        self.transcripts: dict[int, wire.Transcript] = {}  # of the first state, if published
        self.gaps = events.Gaps()
        self.marks: list[wire.Mark] = []
        self.knob_changes: list[wire.KnobsChanged] = []
        self._watch = RequestWatch(slo.itl_ms, state)

    def know_transcripts(self, snapshot: wire.Snapshot) -> None:
        self.transcripts = {each.request_id: each for each in snapshot.transcripts or ()}

    def take(self, sequence: int, message: wire.Telemetry, payload: bytes) -> None:
        # Of the message that led to `state`; unknown if a loss made the state unsure.
        true_after = None if self.gaps.needs_snapshot else self.last_sequence
        if not self._is_next(sequence, message):
            return
        state = self.state
        step = message.step if isinstance(message, wire.StepRecord) else None
        if step is not None and self.columns.steps and step <= self.columns.steps[-1]:
            return  # the publisher repeats steps under new numbers
        if self.ring.append(sequence, payload, step, state, true_after):
            self._forget_old()
        if step is not None and not self.columns.steps:
            self.lanes = LaneBoard(state, step)
        self.lanes.extend(message)
        flying, pauses = state.in_flight, state.pauses
        outcome = state.apply(message)
        now_flying = state.in_flight
        is_new = now_flying is not None and (flying is None or flying.step != now_flying.step)
        if isinstance(message, wire.StepInFlight) and is_new:
            self.say(message.time_ns, in_flight_text(message))
        self._note_pause(message, pauses)
        if isinstance(message, wire.StepRecord):
            assert outcome is not None
            self._take_step(sequence, message, outcome)
        elif isinstance(message, wire.EngineStatus):
            self._log_requests(message.events, max(message.step, 0), message.time_ns)
        elif isinstance(message, wire.KnobsChanged):
            if (event := events.knobs_event(message)) is not None:
                self.log.add(event)
                self.knob_changes.append(message)
        elif isinstance(message, wire.Audited):
            self.log.add(events.audit_event(message, max(state.step, 0)))
        if isinstance(message, wire.EngineInfo | wire.Snapshot) and state.info is not None:
            self.wall_clock.add(state.info)

    def _is_next(self, sequence: int, message: wire.Telemetry) -> bool:
        """Whether a message is new. If messages before it are missing, a gap is noted."""
        gaps, last = self.gaps, self.last_sequence
        num_lost = lost_before(sequence, message, last, is_unsure=gaps.needs_snapshot)
        if num_lost is None:
            return False
        if num_lost and last is not None:
            step = self.columns.steps[-1] if self.columns.steps else self.state.step
            gaps.note(last + 1, last + num_lost, step)
            self.log.add(events.gap_event(num_lost, step, self.state.time_ns))
            self._watch.begin(self.state)
        if isinstance(message, wire.Snapshot):
            gaps.needs_snapshot = False
        self.last_sequence = sequence
        return True

    def rewind(self, step: int) -> bool:
        """Go back to the state right after the record of `step`; False if that is not in memory."""
        found = self.ring.locate(step)
        index = self.columns.index(step)
        if found is None or index is None:
            return False
        segment, place = found
        payloads = self.ring.payloads(segment, 0, place + 1)
        self.state = replayed(segment.keyframe.restore(), payloads)
        self._watch.begin(self.state)
        self.last_sequence = self.columns.column("sequence")[index]
        self.ring.forget_after(segment, place)
        self.lanes.forget_after(self.state)
        self.columns.forget_after(step)
        self.latencies.forget_after(self.columns.tokens_ns[-1])
        self.log.forget_after(step)
        self.gaps.forget_after(step)
        self.knob_changes = [c for c in self.knob_changes if c.effective_step <= step]
        return True

    def set_slo(self, slo: SLO) -> None:
        self.slo = self.latencies.slo = slo
        self._watch.set_floor(slo.itl_ms, self.state)

    def add_mark(self, mark: wire.Mark) -> None:
        if mark in self.marks:
            return
        self.marks.append(mark)
        self.marks.sort(key=lambda each: each.step)
        self.log.add(events.mark_event(mark))

    def _take_step(self, sequence: int, record: wire.StepRecord, outcome: Outcome) -> None:
        state, now_ns = self.state, record.tokens_ns
        self.gaps.end(record.step)
        leave_out(outcome, state, now_ns, self.known_since_ns)
        if outcome.ttft_ns or outcome.late_gaps or outcome.e2e_ns:
            self._watch.take(outcome, state, now_ns)
        self._log_requests(record.events, record.step, now_ns)
        applied = AppliedStep(sequence, record, outcome, not state.is_summed_up)
        self.columns.append(applied)
        self.latencies.append(applied)

    def _note_pause(self, message: wire.Telemetry, before: PauseTrail) -> None:
        if self.state.pauses is before:
            return
        before_ns, since_ns = before.since_ns, self.state.pauses.since_ns
        if before_ns is None and since_ns is not None:
            self.say(since_ns, "the engine was paused")
        elif before_ns is not None and since_ns is None:
            now_ns = self.state.time_ns
            if isinstance(message, wire.StepRecord):
                now_ns = message.schedule_start_ns
            self.say(
                now_ns, f"the engine goes on after {(now_ns - before_ns) / 1e9:.1f} s of pause"
            )

    def say(self, time_ns: int, text: str) -> None:
        self.log.add(events.SessionEvent(max(self.state.step, 0), time_ns, "engine", text))

    def _log_requests(self, told: Sequence[wire.RequestEvent], step: int, time_ns: int) -> None:
        for event in told:
            self.log.add(events.request_event(event, self.state, step, time_ns))

    def _forget_old(self) -> None:
        if not self.columns.steps:
            return
        step = self.ring.first_step
        if step is None:  # all steps are forgotten
            step = self.columns.steps[-1] + 1
        self.columns.forget_before(step)
        self.lanes.forget_before(step)
        if self.columns.steps:
            self.latencies.forget_before(self.columns.tokens_ns[0])
        self.log.forget_before(step)
        self.knob_changes = [c for c in self.knob_changes if c.effective_step >= step]
        self.gaps.forget_before(step)
        self.marks = [mark for mark in self.marks if mark.step >= step]


class Followed(NamedTuple):
    message: wire.Telemetry
    after_gap: bool  # whether messages right before this message were lost or forgotten
    sequence: int
    payload: bytes


class Follower:
    """Reads the messages of one timeline. Belongs to one thread.

    `first`: the first step to read; None: the oldest in memory.

    Attributes:
        state: the state right before the first message. Never changed.
        sequence: the number of the message that led to it.
        number: place of the next message among all of the timeline.
    """

    def __init__(
        self, lock: "threading.RLock", timeline: Timeline, cache: StepCache, first: int | None
    ) -> None:
        self._lock = lock
        self.timeline = timeline
        with lock:
            found = None if first is None else timeline.ring.locate(first - 1)
            segment, place = found or (timeline.ring.segments[0], -1)
            before = segment.keyframe.sequence
            if found is not None:
                before = segment.sequences[place]
            elif before is None and segment.sequences:
                before = segment.sequences[0] - 1
            self.sequence = before or 0
        self.number = segment.first_number + place + 1
        self.state = cache.state_after(segment, place)

    def read(self, limit: int, last_step: int | None = None) -> Iterator[Followed]:
        """Yield the next messages, at most `limit`; none if all were read.

        `last_step`: stop before the record of a later step.
        """
        with self._lock:
            gap_steps = self.timeline.gaps.steps
            oldest = self.timeline.ring.segments[0].first_number
            is_behind, first = self.number < oldest, max(self.number, oldest)
            told = self.timeline.ring.messages_from(first, limit)
        for number, (sequence, payload) in enumerate(told, first):
            message = wire.decode(payload)
            if isinstance(message, wire.StepRecord):
                if last_step is not None and message.step > last_step:
                    return
                after_gap = message.step in gap_steps
            else:  # a snapshot is kept only if messages before it are missing
                after_gap = isinstance(message, wire.Snapshot)
            self.number = number + 1
            yield Followed(message, is_behind or after_gap, sequence, payload)
            is_behind = False

    @property
    def num_ahead(self) -> int:
        with self._lock:
            return max(0, self.timeline.ring.end_number - self.number)
