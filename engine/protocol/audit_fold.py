"""Aborted requests in the audit trail: many at once are one entry.

Who ends a load or closes a page aborts thousands of requests in a moment, and whoever reads the
trail looks for changes of knobs.
"""

from collections.abc import Iterable

import msgspec

from stepscope.engine.protocol.commands import Abort
from stepscope.engine.protocol.wire import Audited, KnobValue


def are_alike(entry: Audited, other: Audited) -> bool:
    """Whether both are aborts of one client, done or refused for one cause."""
    return entry.command == other.command == Abort.__name__ and (
        (entry.who, entry.key, entry.code) == (other.who, other.key, other.code)
    )


def folded(earlier: Audited, later: Audited) -> Audited:
    """Two that are alike as one, which counts all and names the first request and the last."""
    return msgspec.structs.replace(
        later,
        count=earlier.count + later.count,
        old=_ends(earlier.old, later.old),
        new=_ends(earlier.new, later.new),
    )


def side_by_side(entries: Iterable[Audited]) -> list[Audited]:
    """All of them, and those that are alike as one where nothing lies between them."""
    found: list[Audited] = []
    for entry in entries:
        if found and are_alike(found[-1], entry):
            found[-1] = folded(found[-1], entry)
        else:
            found.append(entry)
    return found


def latest(newest_first: Iterable[Audited], most: int) -> list[Audited]:
    """The last ones, oldest first: of those that are alike one, where the last of them was."""
    found: list[Audited] = []
    for entry in newest_first:
        if entry.command == Abort.__name__:
            at = next((at for at, each in enumerate(found) if are_alike(entry, each)), None)
            if at is not None:
                found[at] = folded(entry, found[at])
                continue
        if len(found) == most:
            break
        found.append(entry)
    found.reverse()
    return found


def _ends(
    earlier: dict[str, KnobValue] | None, later: dict[str, KnobValue] | None
) -> dict[str, KnobValue] | None:
    """The first and the last of the requests."""
    if not earlier or not later:
        return later or earlier
    first, last = next(iter(earlier)), next(reversed(later))
    return {first: earlier[first], last: later[last]}
