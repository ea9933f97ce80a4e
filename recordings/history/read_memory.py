"""`ReadMemory`: reads from memory the states and messages that are needed to explain a wait.

Decoding happens outside the timeline's lock, on payloads that never change.
"""

import threading
from collections.abc import Iterable

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import Snapshot, StepRecord, Transcript
from stepscope.recordings.attribution.causes import Piece
from stepscope.recordings.attribution.explain import Explainer
from stepscope.recordings.history.step_cache import StepCache
from stepscope.recordings.history.timeline import Timeline
from stepscope.recordings.state.session import SessionState
from stepscope.recordings.state.transcripts import TranscriptReader

_BATCH = 256  # messages taken out of the ring at a time


class ReadMemory:
    def __init__(self, lock: "threading.RLock", timeline: Timeline, cache: StepCache) -> None:
        self._lock = lock
        self._timeline = timeline
        self._cache = cache

    def state_before(self, time_ns: int, earliest: int = -1) -> tuple[SessionState, int] | None:
        """The state after the last step before a time, and the number of the next message.

        `earliest`: index of the first step that may be used; -1: the state before all steps.
        """
        with self._lock:
            timeline = self._timeline
            steps = timeline.columns.steps
            if not steps:
                return None
            index = max(timeline.columns.index_at(time_ns), min(earliest, len(steps) - 1))
            found = timeline.ring.locate(steps[index]) if index >= 0 else None
            if found is None:
                oldest = timeline.ring.segments[0]
                keyframe, number = oldest.keyframe, oldest.first_number
            else:
                segment, place = found
                number = segment.first_number + place + 1
        state = keyframe.restore() if found is None else self._cache.state_at(steps[index])
        return state, number

    def feed(
        self,
        explainer: Explainer,
        number: int,
        last: int | None,
        transcript: TranscriptReader | None = None,
    ) -> int:
        """Feed an explainer the messages from `number` on, up to the record of `last` (None: all).

        Returns the number of the next message.
        """
        while True:
            with self._lock:
                payloads = self._timeline.ring.payloads_from(number, _BATCH)
                gap_steps = self._timeline.gaps.steps
            if not payloads:
                return number
            for payload in payloads:
                if explainer.has_ended:
                    return number
                message = wire.decode(payload)
                if isinstance(message, StepRecord):
                    if last is not None and message.step > last:
                        return number
                    explainer.take(message, message.step in gap_steps)
                else:
                    # A snapshot is kept only if messages before it are missing.
                    explainer.take(message, isinstance(message, Snapshot))
                if transcript is not None:
                    transcript.take(message)
                number += 1

    def known_start(self, index: int, request_id: int) -> int | None:
        """When a request's wait began, if it is the longest ITL or TTFT of a step; else None.

        Also None after any pause by an operator, because the lengths in the columns leave pauses
        out. The caller holds the lock.
        """
        columns = self._timeline.columns
        end_ns = columns.tokens_ns[index]
        if self._timeline.state.pauses.within(0, end_ns):
            return None
        for kind in ("itl", "ttft"):
            if columns.column(f"max_{kind}_request_id")[index] == request_id:
                return end_ns - columns.column(f"max_{kind}_ns")[index]
        return None

    def known_apart(self, pieces: Iterable[Piece]) -> tuple[Piece, ...]:
        """Mark unknown time before the first step in memory as `forgotten`.

        So it can be told from time that is unknown because messages were lost.
        """
        with self._lock:
            starts_ns = self._timeline.columns.column("schedule_start_ns")
            begin_ns = starts_ns[0] if starts_ns else 0
        return tuple(
            piece._replace(detail="forgotten")
            if piece.cause == "unknown" and piece.start_ns < begin_ns
            else piece
            for piece in pieces
        )

    def transcript_of(self, request_id: int) -> Transcript | None:
        """The text of a request in the timeline's first snapshot; None if that has none."""
        with self._lock:
            return self._timeline.transcripts.get(request_id)
