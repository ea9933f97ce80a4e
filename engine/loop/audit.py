"""`AuditTrail`: who changed the engine, or tried to. Belongs to the engine's thread.

Each entry is published when it is made, so that every recording has it. The trail keeps the last
entries for clients that ask later.

Some entries are folded (several events become one entry, with their count):
- The aborts of one client wait for a second and are then published as one entry.
- The first refusal of a command to a client is published at once; further ones are published as
  one entry every `REFUSED_FOLD_NS`.

Refusals are kept in a list of their own, so that many refusals never push a change out.

`ControlTally`: counts what the control socket refuses.
"""

from collections import deque
from collections.abc import Callable
from heapq import merge
from itertools import chain, islice, takewhile
from operator import attrgetter
from typing import NamedTuple

import msgspec

from stepscope.engine.protocol import commands
from stepscope.engine.protocol.audit_fold import are_alike, folded, latest
from stepscope.engine.protocol.commands import Asker
from stepscope.engine.protocol.replies import AuditPage
from stepscope.engine.protocol.wire import Audited, ControlCounts, KnobValue
from stepscope.engine.transport.gate import Gate


class ControlTally:
    """Counts of refused messages. The control thread counts; any thread may read."""

    def __init__(self, gate: Gate | None = None) -> None:
        self.num_bad_messages = 0  # messages that were no command
        self.num_limited = 0  # messages over the rate limit
        self.num_denied = 0  # commands that need an operator's key but came with a viewer's
        self._gate = gate

    def counts(self) -> ControlCounts | None:
        """Return all counts; None if nothing was refused."""
        num_keyless = 0 if self._gate is None else self._gate.num_refused
        found = (self.num_bad_messages, self.num_limited, self.num_denied, num_keyless)
        return ControlCounts(*found) if any(found) else None


MAX_ENTRIES = 10_000  # changes that are kept
MAX_REFUSALS = 2_000  # entries of refusals that are kept
IN_SNAPSHOT = 20  # changes in a snapshot, and as many refusals
_LOOKED_AT = 200  # newest changes, and as many refusals, that `last` searches for those
FOLD_NS = 1_000_000_000  # how long aborts of one client are folded into one entry
REFUSED_FOLD_NS = 5_000_000_000  # how long refusals after the first are folded into one entry
MAX_REFUSED = 64  # causes of refusals that are told apart at a time; all others are folded together

# Changes of one kind undo each other; the others do not.
_KINDS = {"SetKnobs": "knobs", "SetWorkload": "workload"} | dict.fromkeys(
    ("Pause", "Resume", "StepOnce", "Drain", "Shutdown"), "loop"
)


class ChangeEffect(NamedTuple):
    """What a change did: the old and the new values; None if it left all as it was."""

    old: dict[str, KnobValue] | None = None
    new: dict[str, KnobValue] | None = None
    detail: str = ""
    version: int | None = None


class AuditTrail:
    """Numbers the entries, keeps the last ones and publishes all."""

    def __init__(self, publish: Callable[[Audited], None], clock: Callable[[], int]) -> None:
        self._publish = publish
        self._clock = clock
        # In the order of their numbers.
        self._lists: dict[str, deque[Audited]] = {
            "changes": deque(maxlen=MAX_ENTRIES), "refusals": deque(maxlen=MAX_REFUSALS)
        }  # fmt: skip
        self.newest = 0  # number of the newest entry
        self._aborts: Audited | None = None  # folded aborts that are not published yet
        self._aborts_due_ns = 0
        # By who, command and code: when it is due, and the folded refusals after the first.
        self._refused: dict[tuple[str, str, str], tuple[int, Audited | None]] = {}

    def done(
        self, command: commands.Change, asker: Asker, effective_step: int, effect: ChangeEffect
    ) -> None:
        """Record a change that was made."""
        entry = Audited(
            number=0,  # until it is published
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
        if not isinstance(command, commands.Abort):
            self.publish_aborts()
            self._enter(entry)
        elif self._aborts is not None and are_alike(self._aborts, entry):
            self._aborts = folded(self._aborts, entry)
        else:
            self.publish_aborts()
            self._aborts, self._aborts_due_ns = entry, entry.time_ns + FOLD_NS

    def refused(self, command: str, asker: Asker, code: str, message: str) -> None:
        """Record that a command was refused, and why."""
        now_ns = self._clock()
        entry = Audited(
            number=0,  # until it is published
            command=command,
            who=asker.who,
            key=asker.key,
            time_ns=now_ns,
            detail=message,
            code=code,
        )
        cause = asker.name, command, code
        if cause not in self._refused and len(self._refused) >= MAX_REFUSED:
            cause = "", "", ""
            entry = msgspec.structs.replace(entry, who="several clients", key=None)
        if cause in self._refused:
            due_ns, earlier = self._refused[cause]
            self._refused[cause] = due_ns, entry if earlier is None else folded(earlier, entry)
        else:
            self._refused[cause] = now_ns + REFUSED_FOLD_NS, None
            self.publish_aborts()
            self._enter(entry)

    def changed_since(
        self, number: int, command: commands.Change, but_by: Asker | None = None
    ) -> Audited | None:
        """Return the last change, after entry `number`, to the same thing as `command` changes.

        None without one. The changes of the client `but_by` do not count.
        """
        kind = _KINDS.get(type(command).__name__)
        for entry in takewhile(lambda each: each.number > number, reversed(self._lists["changes"])):
            is_alike = kind is not None and _KINDS.get(entry.command) == kind
            if is_alike and Asker(entry.who, entry.key) != but_by:
                return entry
        return None

    def page(self, after: int, limit: int) -> AuditPage:
        """Return up to `limit` entries with numbers above `after`, folded aborts included."""
        self.publish_aborts()
        kept = {what: each for what, each in self._lists.items() if each}
        newest = [takewhile(lambda e: e.number > after, reversed(each)) for each in kept.values()]
        found = sorted(chain(*newest), key=attrgetter("number"))
        missing = [
            f"{what} before entry {each[0].number:,} are not kept any more: the engine keeps the "
            f"last {each.maxlen:,}; a recording of that time has them"
            for what, each in kept.items()
            if len(each) == each.maxlen and after + 1 < each[0].number
        ]
        return AuditPage(
            entries=found[:limit],
            oldest=min((each[0].number for each in kept.values()), default=0),
            newest=self.newest,
            detail="; ".join(missing),
        )

    def last(self) -> list[Audited]:
        """Return the entries that a snapshot contains. Call `publish_aborts` first."""
        newest = (islice(reversed(each), _LOOKED_AT) for each in self._lists.values())
        return latest(merge(*newest, key=attrgetter("number"), reverse=True), IN_SNAPSHOT)

    def publish_if_due(self) -> None:
        """Publish the folded entries that are due. Call it about once a second."""
        if self._aborts is None and not self._refused:
            return
        now_ns = self._clock()
        if now_ns >= self._aborts_due_ns:
            self.publish_aborts()
        for cause, (due_ns, entry) in list(self._refused.items()):
            if now_ns < due_ns:
                continue
            if entry is None:
                del self._refused[cause]  # no further refusal came
            else:
                self._enter(entry)
                self._refused[cause] = now_ns + REFUSED_FOLD_NS, None

    def publish_aborts(self) -> None:
        """Publish the folded aborts now, without waiting for more."""
        if self._aborts is not None:
            entry, self._aborts = self._aborts, None
            self._enter(entry)

    def publish_all(self) -> None:
        """Publish all folded entries now, because the engine ends."""
        self.publish_aborts()
        for _, entry in self._refused.values():
            if entry is not None:
                self._enter(entry)
        self._refused.clear()

    def _enter(self, entry: Audited) -> None:
        self.newest += 1
        entry = msgspec.structs.replace(entry, number=self.newest)
        self._lists["refusals" if entry.code else "changes"].append(entry)
        self._publish(entry)
