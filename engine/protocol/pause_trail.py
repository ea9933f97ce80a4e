"""`PauseTrail`: when the operator had paused an engine, as its telemetry shows it.

The engine keeps one for late joiners, and every observer one of what it receives. Both follow the
same messages, so they are equal.
"""

from typing import NamedTuple

from msgspec import Struct

MAX_SPANS = 256  # the last ones; single steps make one each


class PauseSpan(Struct, frozen=True, array_like=True):
    """A stretch of engine time without a step because of a pause."""

    start_ns: int
    end_ns: int | None = None  # None: it goes on


class PauseTrail(NamedTuple):
    """All pauses there were. Never changed: each message gives another one.

    Attributes:
        spans: oldest first; only the last may go on. None: none is known.
        stepped_ns: the end of a step that ran in a pause: it goes on from there, for an engine that
            runs single steps stays paused, unless a status says otherwise.
    """

    spans: tuple[PauseSpan, ...] | None = None
    stepped_ns: int | None = None

    @property
    def since_ns(self) -> int | None:
        """When the pause began that is under way and was published."""
        return self.spans[-1].start_ns if self.spans and self.spans[-1].end_ns is None else None

    @property
    def is_on(self) -> bool:
        """The next message says whether a pause goes on."""
        return self.stepped_ns is not None or self.since_ns is not None

    def last_since(self, time_ns: int) -> int:
        """How long the last pause was, in ns; 0 if it goes on or ended before `time_ns`."""
        last = self.spans[-1] if self.spans else None
        if last is None or last.end_ns is None or last.end_ns < time_ns:
            return 0
        return last.end_ns - last.start_ns

    def after_status(self, time_ns: int, *, is_paused: bool) -> "PauseTrail":
        """Take the state of the engine from a status."""
        if not is_paused:
            return PauseTrail(self._ended(None, time_ns)) if self.is_on else self
        if self.since_ns is not None:
            return self
        start_ns = time_ns if self.stepped_ns is None else self.stepped_ns
        return PauseTrail(((*(self.spans or ()), PauseSpan(start_ns)))[-MAX_SPANS:])

    def after_step(self, start_ns: int, tokens_ns: int) -> "PauseTrail":
        """A step ran although the engine was paused, or has just been resumed."""
        return PauseTrail(self._ended(self.stepped_ns, start_ns), tokens_ns)

    def _ended(self, since_ns: int | None, end_ns: int) -> tuple[PauseSpan, ...] | None:
        """Args: since_ns: of a pause that was not published."""
        spans = self.spans
        if (published_ns := self.since_ns) is not None and spans is not None:
            spans, since_ns = spans[:-1], published_ns
        if since_ns is None or since_ns >= end_ns:
            return spans
        return (*(spans or ()), PauseSpan(since_ns, end_ns))[-MAX_SPANS:]
