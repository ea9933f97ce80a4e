"""`PauseTrail`: when the operator had paused an engine, derived from its telemetry.

The engine keeps a trail and puts it into snapshots; every observer builds one from the messages
that it receives. Both follow the same messages, so they are equal. No latency includes paused time.
"""

import sys
from bisect import bisect_right
from typing import NamedTuple

from stepscope.engine.protocol.wire import EngineStatus, PauseSpan, Snapshot, StepRecord, Telemetry

MAX_SPANS = 256  # in a snapshot, the newest ones; each single step makes one
_MAX_KEPT = 4096


class PauseTrail(NamedTuple):
    """The pauses so far. Immutable: each message makes a new trail.

    A pause begins with the status that reports it, and ends when the next step is scheduled. When
    that step is done, a new one begins, unless the next status says that the pause has ended: an
    engine that runs single steps counts as paused between them.

    Attributes:
        spans: the pauses, oldest first; only the last may still go on. None if no pause is known.
        stepped_ns: when the last step ended, if it ran during a pause (a single step); else None.
    """

    spans: tuple[PauseSpan, ...] | None = None
    stepped_ns: int | None = None

    @classmethod
    def of(cls, snapshot: Snapshot) -> "PauseTrail":
        """The pauses in a snapshot; an engine that publishes none only tells that one goes on."""
        told, is_paused = snapshot.pauses, snapshot.state == "paused"
        if told is None:
            return cls((PauseSpan(snapshot.time_ns),) if is_paused else None)
        trail = cls(tuple(told))
        if is_paused and trail.since_ns is None:
            return trail._replace(stepped_ns=snapshot.time_ns)
        return trail

    def published(self) -> list[PauseSpan]:
        return list((self.spans or ())[-MAX_SPANS:])

    @property
    def since_ns(self) -> int | None:
        """Start of the current pause, if a status has reported it; else None."""
        return self.spans[-1].start_ns if self.spans and self.spans[-1].end_ns is None else None

    @property
    def is_on(self) -> bool:
        """Whether the engine is paused, or may be: after a single step, the next message tells."""
        return self.stepped_ns is not None or self.since_ns is not None

    def parts(self, start_ns: int, end_ns: int) -> list[tuple[int, int]]:
        """The parts of [start_ns, end_ns] that were paused, in order of time."""
        spans, found = self.spans or (), []
        for index in range(bisect_right(spans, start_ns, key=_end_of), len(spans)):
            span = spans[index]
            if span.start_ns >= end_ns:
                break
            found.append((max(span.start_ns, start_ns), min(_end_of(span), end_ns)))
        return found

    def within(self, start_ns: int, end_ns: int) -> int:
        """How many ns of [start_ns, end_ns] were paused."""
        if not self.spans or _end_of(self.spans[-1]) <= start_ns:
            return 0
        return sum(end - start for start, end in self.parts(start_ns, end_ns))

    def last_since(self, time_ns: int) -> int:
        """Length of the last pause in ns; 0 if it still goes on, or ended before `time_ns`."""
        last = self.spans[-1] if self.spans else None
        if last is None or last.end_ns is None or last.end_ns < time_ns:
            return 0
        return last.end_ns - last.start_ns

    def after(self, message: Telemetry) -> "PauseTrail":
        """Return the trail after the next message of the session."""
        if isinstance(message, StepRecord) and self.is_on:  # a single step, or just after a resume
            spans = self._ended(self.stepped_ns, message.schedule_start_ns)
            return PauseTrail(spans, message.tokens_ns)
        if isinstance(message, EngineStatus) and message.state != "paused":
            return PauseTrail(self._ended(None, message.time_ns)) if self.is_on else self
        if isinstance(message, EngineStatus) and self.since_ns is None:
            start_ns = message.time_ns if self.stepped_ns is None else self.stepped_ns
            return PauseTrail((*(self.spans or ()), PauseSpan(start_ns))[-_MAX_KEPT:])
        if isinstance(message, Snapshot) and message.pauses is not None:
            return PauseTrail.of(message).joined(self)  # messages that told of pauses may be lost
        return self

    def joined(self, earlier: "PauseTrail") -> "PauseTrail":
        """Return the trail with the pauses of an earlier part of the session before its own."""
        begin_ns = self.spans[0].start_ns if self.spans else self.stepped_ns or sys.maxsize
        known = (span for span in earlier.spans or () if span.end_ns is not None)
        before = [span for span in known if _end_of(span) <= begin_ns]
        return self._replace(spans=(*before, *(self.spans or ()))) if before else self

    def _ended(self, since_ns: int | None, end_ns: int) -> tuple[PauseSpan, ...] | None:
        """Return the spans, with the current pause ended at `end_ns`.

        `since_ns`: start of a pause that no status has reported; used if there is no reported one.
        """
        spans = self.spans
        if (published_ns := self.since_ns) is not None and spans is not None:
            spans, since_ns = spans[:-1], published_ns
        if since_ns is None or since_ns >= end_ns:
            return spans
        return (*(spans or ()), PauseSpan(since_ns, end_ns))[-_MAX_KEPT:]


def _end_of(span: PauseSpan) -> int:
    return sys.maxsize if span.end_ns is None else span.end_ns
