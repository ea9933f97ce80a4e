"""`PauseTrail`: when the operator had paused an engine, derived from its telemetry.

The engine keeps a trail and puts it into snapshots; every observer builds one from the messages
that it receives. Both follow the same messages, so they are equal.
"""

from typing import NamedTuple

from msgspec import Struct

MAX_SPANS = 256  # spans that are kept, the newest ones; each single step makes one


class PauseSpan(Struct, frozen=True, array_like=True):
    """A stretch of engine time without a step because of a pause."""

    start_ns: int
    end_ns: int | None = None  # None while the pause lasts


class PauseTrail(NamedTuple):
    """The pauses so far. Immutable: each message makes a new trail.

    Attributes:
        spans: the pauses, oldest first; only the last may still go on. None if no pause is known.
        stepped_ns: when the last step ended, if it ran during a pause (a single step); else None. A
            new span begins there, unless the next status says that the pause has ended.
    """

    spans: tuple[PauseSpan, ...] | None = None
    stepped_ns: int | None = None

    @property
    def since_ns(self) -> int | None:
        """Start of the current pause, if a status has reported it; else None."""
        return self.spans[-1].start_ns if self.spans and self.spans[-1].end_ns is None else None

    @property
    def is_on(self) -> bool:
        """Whether the engine is paused, or may be: after a single step, the next message tells."""
        return self.stepped_ns is not None or self.since_ns is not None

    def last_since(self, time_ns: int) -> int:
        """Length of the last pause in ns; 0 if it still goes on, or ended before `time_ns`."""
        last = self.spans[-1] if self.spans else None
        if last is None or last.end_ns is None or last.end_ns < time_ns:
            return 0
        return last.end_ns - last.start_ns

    def after_status(self, time_ns: int, *, is_paused: bool) -> "PauseTrail":
        """Return the trail after a status message."""
        if not is_paused:
            return PauseTrail(self._ended(None, time_ns)) if self.is_on else self
        if self.since_ns is not None:
            return self
        start_ns = time_ns if self.stepped_ns is None else self.stepped_ns
        return PauseTrail(((*(self.spans or ()), PauseSpan(start_ns)))[-MAX_SPANS:])

    def after_step(self, start_ns: int, tokens_ns: int) -> "PauseTrail":
        """Return the trail after a step that ran during a pause, or just after a resume."""
        return PauseTrail(self._ended(self.stepped_ns, start_ns), tokens_ns)

    def _ended(self, since_ns: int | None, end_ns: int) -> tuple[PauseSpan, ...] | None:
        """Return the spans, with the current pause ended at `end_ns`.

        Args:
            since_ns: start of a pause that no status has reported; used if there is no reported
                one.
        """
        spans = self.spans
        if (published_ns := self.since_ns) is not None and spans is not None:
            spans, since_ns = spans[:-1], published_ns
        if since_ns is None or since_ns >= end_ns:
            return spans
        return (*(spans or ()), PauseSpan(since_ns, end_ns))[-MAX_SPANS:]
