"""Folding: entries of the audit trail that are alike become one entry with a count.

A client that ends a load aborts thousands of requests at once, and a client without permission can
try again without end. Folding keeps these from burying the knob changes that a reader looks for.
"""

from collections.abc import Iterable

import msgspec

from stepscope.engine.protocol.commands import Abort
from stepscope.engine.protocol.wire import Audited, KnobValue


def kin(entry: Audited) -> tuple[str | None, ...] | None:
    """Return a key equal for refusals, or aborts, that are alike; None: never folded."""
    if not entry.code and entry.command != Abort.__name__:
        return None
    return entry.command, entry.who, entry.key, entry.code


def are_alike(entry: Audited, other: Audited) -> bool:
    return (of_entry := kin(entry)) is not None and of_entry == kin(other)


def folded(earlier: Audited, later: Audited) -> Audited:
    """Fold two entries into one, with the sum of their counts.

    `old` and `new` keep the values of the first and of the last request only; `command` is empty
    if the two are refusals of different commands.
    """
    return msgspec.structs.replace(
        later,
        command=later.command if later.command == earlier.command else "",
        count=earlier.count + later.count,
        old=_ends(earlier.old, later.old),
        new=_ends(earlier.new, later.new),
    )


def side_by_side(entries: Iterable[Audited]) -> list[Audited]:
    """Return the entries in order, with neighbours that are alike folded into one."""
    found: list[Audited] = []
    for entry in entries:
        if found and are_alike(found[-1], entry):
            found[-1] = folded(found[-1], entry)
        else:
            found.append(entry)
    return found


def latest(newest_first: Iterable[Audited], most: int) -> list[Audited]:
    """Return the last changes and the last refusals, at most `most` of each, oldest first."""
    # By what makes entries alike, or the number of one that is never folded.
    found: dict[tuple[str | None, ...] | int, Audited] = {}
    num_left = {True: most, False: most}  # of refusals, of changes
    for entry in newest_first:
        alike = kin(entry) or entry.number
        if alike in found:
            found[alike] = folded(entry, found[alike])
        elif num_left[entry.code != ""]:
            num_left[entry.code != ""] -= 1
            found[alike] = entry
    return list(reversed(found.values()))


def _ends(
    earlier: dict[str, KnobValue] | None, later: dict[str, KnobValue] | None
) -> dict[str, KnobValue] | None:
    if not earlier or not later:
        return later or earlier
    first, last = next(iter(earlier)), next(reversed(later))
    return {first: earlier[first], last: later[last]}
