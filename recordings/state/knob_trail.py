"""Merges knob changes from three sources: the history, the audit entries, and the whole file."""

from collections.abc import Sequence

from stepscope.engine.protocol.commands import SetKnobs
from stepscope.engine.protocol.wire import Audited, KnobsChanged
from stepscope.recordings.state.audit_text import who_text


def known_changes(
    in_memory: Sequence[KnobsChanged],
    audit: Sequence[Audited],
    in_file: Sequence[KnobsChanged] = (),
) -> list[KnobsChanged]:
    """All known knob changes, in order of their version.

    An observer that joined late finds older changes only in the engine's audit entries. A replay
    also finds changes in parts of the file that were not played yet.
    """
    versions = {change.version for change in in_memory}
    told = [
        KnobsChanged(
            version=entry.version,
            effective_step=entry.effective_step,
            who=who_text(entry),
            old=entry.old or {},
            new=entry.new,
            time_ns=entry.time_ns,
        )
        for entry in audit
        if entry.command == SetKnobs.__name__
        and not entry.code
        and entry.new
        and entry.effective_step is not None
        and entry.version is not None
        and entry.version not in versions
    ]
    versions |= {change.version for change in told}
    others = [change for change in in_file if change.version not in versions]
    return sorted([*others, *told, *in_memory], key=lambda change: change.version)
