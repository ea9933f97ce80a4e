"""`AuditTrail`: who changed the engine, or tried to. Belongs to the engine's thread.

Each entry is published as it is made, so that it is in every recording; the last ones are kept here
for who asks later. Only aborts of one client wait for a second, to be one entry.
"""

from collections import deque
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from stepscope.engine.protocol.asker import Asker
from stepscope.engine.protocol.audit_fold import are_alike, folded, latest
from stepscope.engine.protocol.commands import (
    Abort,
    AuditPage,
    Change,
    Drain,
    Pause,
    Resume,
    SetKnobs,
    SetWorkload,
    Shutdown,
    StepOnce,
)
from stepscope.engine.protocol.wire import Audited, KnobValue

MAX_ENTRIES = 10_000
IN_SNAPSHOT = 20  # entries that a late joiner is told of
FOLD_NS = 1_000_000_000  # so long aborts of one client go into one entry

_Kind: TypeAlias = Literal["knobs", "loop", "workload"]
# Changes of one kind undo each other; the others do not.
_KINDS: Mapping[str, _Kind] = {
    SetKnobs.__name__: "knobs",
    SetWorkload.__name__: "workload",
    **{kind.__name__: "loop" for kind in (Pause, Resume, StepOnce, Drain, Shutdown)},
}


class Effect(NamedTuple):
    """What a change did, from and to."""

    old: dict[str, KnobValue] | None = None
    new: dict[str, KnobValue] | None = None
    detail: str = ""
    version: int | None = None


class AuditTrail:
    """Numbers, keeps and publishes entries.

    Args:
        publish: takes each entry.
        clock: the engine's time.
    """

    def __init__(self, publish: Callable[[Audited], None], clock: Callable[[], int]) -> None:
        self._publish = publish
        self._clock = clock
        self._entries: deque[Audited] = deque(maxlen=MAX_ENTRIES)
        self.newest = 0  # number of the newest entry
        self._aborts: Audited | None = None  # those that are not told yet
        self._aborts_due_ns = 0

    def done(self, command: Change, asker: Asker, effective_step: int, effect: Effect) -> None:
        """A change was made."""
        self._add(
            Audited(
                number=0,  # until it is told
                command=type(command).__name__,
                who=asker.who,
                key=asker.key,
                time_ns=self._clock(),
                effective_step=effective_step,
                version=effect.version,
                old=effect.old,
                new=effect.new,
                detail=effect.detail,
            )
        )

    def refused(self, command: str, asker: Asker, code: str, message: str, count: int = 1) -> None:
        """Nothing was changed, and why.

        Args:
            command: name of its type; "" for several kinds.
            count: commands that were refused for this.
        """
        self._add(
            Audited(
                number=0,  # until it is told
                command=command,
                who=asker.who,
                key=asker.key,
                time_ns=self._clock(),
                detail=message,
                code=code,
                count=count,
            )
        )

    def changed_since(
        self, number: int, command: Change, but_by: Asker | None = None
    ) -> Audited | None:
        """The last change of the same kind with a higher number, None when there is none.

        Args:
            but_by: whose changes do not count.
        """
        kind = _KINDS.get(type(command).__name__)
        if kind is None:
            return None
        for entry in reversed(self._entries):
            if entry.number <= number:
                return None
            is_own = but_by == Asker(entry.who, entry.key)
            if not entry.code and not is_own and _KINDS.get(entry.command) == kind:
                return entry
        return None

    def page(self, after: int, limit: int) -> AuditPage:
        self.tell()
        oldest = self._entries[0].number if self._entries else 0
        skipped = min(len(self._entries), max(0, after + 1 - oldest))
        gone = ""
        if after + 1 < oldest:
            gone = (
                f"entries {after + 1:,} to {oldest - 1:,} are not kept any more: the engine keeps "
                f"the last {MAX_ENTRIES:,}; a recording of that time has them"
            )
        return AuditPage(
            entries=list(islice(self._entries, skipped, skipped + limit)),
            oldest=oldest,
            newest=self.newest,
            detail=gone,
        )

    def last(self) -> list[Audited]:
        """For a snapshot; `tell` comes before it."""
        return latest(reversed(self._entries), IN_SNAPSHOT)

    def tell_if_due(self) -> None:
        """To be called once a second or so."""
        if self._aborts is not None and self._clock() >= self._aborts_due_ns:
            self.tell()

    def tell(self) -> None:
        """Publish the aborts that wait for others of their kind."""
        if self._aborts is not None:
            entry, self._aborts = self._aborts, None
            self._enter(entry)

    def _add(self, entry: Audited) -> None:
        if entry.command != Abort.__name__:
            self.tell()
            self._enter(entry)
        elif self._aborts is not None and are_alike(self._aborts, entry):
            self._aborts = folded(self._aborts, entry)
        else:
            self.tell()
            self._aborts, self._aborts_due_ns = entry, entry.time_ns + FOLD_NS

    def _enter(self, entry: Audited) -> None:
        self.newest += 1
        entry = msgspec.structs.replace(entry, number=self.newest)
        self._entries.append(entry)
        self._publish(entry)
