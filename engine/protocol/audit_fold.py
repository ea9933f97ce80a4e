"""Entries of the audit trail that are alike: many of them are one.

Who ends a load or closes a page aborts thousands of requests in a moment, and a client that may not
change anything can try as often as it likes; a reader of the trail looks for changes of knobs.
"""

from collections.abc import Iterable

import msgspec

from stepscope.engine.protocol.commands import Abort
from stepscope.engine.protocol.wire import Audited, KnobValue


def kin(entry: Audited) -> tuple[str | None, ...] | None:
    """The same for entries that are alike; None: there is none like it.

    Alike are refusals of one command, and aborts, of one client for one cause.
    """
    if not entry.code and entry.command != Abort.__name__:
        return None
    return entry.command, entry.who, entry.key, entry.code


def are_alike(entry: Audited, other: Audited) -> bool:
    return (of_entry := kin(entry)) is not None and of_entry == kin(other)


def folded(earlier: Audited, later: Audited) -> Audited:
    """Two as one, which counts all and names the first request and the last.

    Refusals of several commands are of no command in particular.
    """
    return msgspec.structs.replace(
        later,
        command=later.command if later.command == earlier.command else "",
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
    """The last changes and the last refusals, `most` of each, oldest first.

    Of those that are alike there is one, where the last of them was.
    """
    found: list[Audited] = []
    places: dict[tuple[str | None, ...], int] = {}
    num_left = {True: most, False: most}  # of refusals, of changes
    for entry in newest_first:
        alike = kin(entry)
        if alike is not None and (at := places.get(alike)) is not None:
            found[at] = folded(entry, found[at])
        elif num_left[entry.code != ""]:
            num_left[entry.code != ""] -= 1
            if alike is not None:
                places[alike] = len(found)
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
