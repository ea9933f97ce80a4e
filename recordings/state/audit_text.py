"""Texts of audit entries, of knobs and of a step in flight, the same wherever they are shown.

`known_changes` merges the knob changes of a history, of audit entries and of a whole file.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

from stepscope.engine.protocol.commands import Asker, SetKnobs
from stepscope.engine.protocol.wire import Audited, KnobsChanged, KnobValue, StepInFlight
from stepscope.engine.protocol.workload_spec import NO_WORKLOAD
from stepscope.recordings.state.session import request_name

# Short names for narrow lines, the same as in key figures and screens.
_SHORT = {
    "max_num_batched_tokens": "budget",
    "max_num_seqs": "seats",
    "enable_chunked_prefill": "chunks",
    "long_prefill_token_threshold": "long prefill",
    "enable_prefix_caching": "prefix cache",
    "prefill_schedule_interval": "prefill every",
}


def value_text(value: KnobValue | None) -> str:
    """The value of a knob as screens show it: on or off for a bool, a dash for None."""
    if value is None:
        return "—"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def typed_text(value: KnobValue | None) -> str:
    """The value of a knob as a person types it for `stepscope set`, such as `true`."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def changes_text(
    old: Mapping[str, KnobValue], new: Mapping[str, KnobValue], room: int | None = None
) -> str:
    """One line with all knob changes, each from its old to its new value.

    `room`: terminal cells. To fit, names are shortened, then the last changes only counted.
    """
    values = {
        name: f"{value_text(old.get(name))}→{value_text(value)}" for name, value in new.items()
    }
    short = [f"{_SHORT.get(name, name)} {value}" for name, value in values.items()]
    forms = [[f"{name} {value}" for name, value in values.items()], short]
    forms += [[*short[:n], f"+{len(short) - n} more"] for n in range(len(short) - 1, 0, -1)]
    texts = [", ".join(form) for form in forms]
    return next((text for text in texts if room is None or len(text) <= room), texts[-1])


def with_short_names(text: str) -> str:
    return re.sub("|".join(_SHORT), lambda found: _SHORT[found[0]], text)


class _Words(NamedTuple):
    done: str
    refused: str
    expected: tuple[str, ...] = ()  # states in which it is usual; the text mentions any other state


_WORDS = {
    "": _Words("", "commands"),
    "Pause": _Words("paused the engine", "pause", ("running", "idle")),
    "Resume": _Words("resumed the engine", "resume", ("paused",)),
    "Drain": _Words("started to drain the engine", "drain", ("running", "idle")),
    "Shutdown": _Words("shut the engine down", "shutdown", ("running", "idle")),
    "ResetPrefixCache": _Words("reset the prefix cache", "reset of the prefix cache"),
    "SetWorkload": _Words("set the workload", "change of the workload"),
    "Step": _Words("ran single steps", "single steps", ("paused",)),
    "StepOnce": _Words("ran single steps", "single steps", ("paused",)),
    "Abort": _Words("aborted a request", "abort of a request"),
    "SetKnobs": _Words("changed knobs", "change of knobs"),
}


def who_text(entry: Audited) -> str:
    """Who sent the command: the proved key, then in brackets the name that the client claimed."""
    asker = Asker(entry.who, entry.key)
    if not asker.proved or entry.who in ("", entry.key):
        return asker.name
    return f"{asker.proved} ({entry.who})"


def shorter_who(who: str, room: int) -> str:
    """Drop the name in brackets from a `who_text` that is wider than `room` cells."""
    if len(who) <= room or not who.endswith(")"):
        return who
    return who.partition(" (")[0]


def change_text(entry: Audited) -> str:
    """What the command changed, from and to which value, or what was refused and why."""
    words = _WORDS.get(entry.command, _Words(entry.command, entry.command))
    many = entry.count if entry.count > 1 else 0
    old, new = entry.old or {}, entry.new or {}
    if entry.code:
        if many and entry.command == "Abort":
            return f"{many:,} aborts of requests refused: {entry.detail}"
        times = f" {many:,} times" if many else ""
        return f"{words.refused} refused{times}: {entry.detail}"
    if entry.command == "Abort" and many:
        names = list(old)
        which = f" (first {names[0]}, last {names[-1]})" if names else ""
        return f"aborted {many:,} requests{which}"
    if entry.command == "Abort" and len(old) == 1:
        ((name, before),) = old.items()
        return f"aborted {name}, which was {before}"
    workloads = [each.get("workload") for each in (old, new)]
    if entry.command == "SetWorkload" and all(isinstance(each, str) for each in workloads):
        return _workload_text(*("" if each == NO_WORKLOAD else str(each) for each in workloads))
    if words.expected:
        before = old.get("state", "")
        is_expected = not before or before in words.expected
        told = [each for each in ("" if is_expected else f"it was {before}", entry.detail) if each]
        return f"{words.done} ({', '.join(told)})" if told else words.done
    if entry.command == "ResetPrefixCache" and entry.detail:
        return f"{words.done}: {entry.detail}"
    changes = changes_text(old, new)
    detail = f" ({entry.detail})" if entry.detail else ""
    return f"{words.done}: {changes}{detail}" if changes else f"{words.done}{detail}"


def _workload_text(old: str, new: str) -> str:
    if not old:
        begun = f"started a workload of {new}"
        return begun if new else "stopped the workload, but none was running"
    if not new:
        return f"stopped the workload of {old}"
    if old == new:
        return f"started the same workload anew: {new}"
    # Only the parts that differ: a whole mix would be a long line.
    before, after = (each.replace(": ", ", ", 1).split(", ") for each in (old, new))
    gone = ", ".join(part for part in before if part not in after)
    come = ", ".join(part for part in after if part not in before)
    if not gone or not come:
        return f"workload: {f'no longer {gone}' if gone else f'now also {come}'}"
    pairs = list(zip_longest(gone.split(), come.split(), fillvalue=""))
    if all(a == b or (a[:1].isdigit() and b[:1].isdigit()) for a, b in pairs):
        return f"workload: {' '.join(a if a == b else f'{a}→{b}' for a, b in pairs)}"
    return f"workload: {gone}→{come}"


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


_NAMED = 2  # most requests that are named


def in_flight_text(message: StepInFlight) -> str:
    """A line such as `step 1,234 in flight 7.3 s: 8,192 prefill of r17 beside 63 decodes`."""
    return f"step {message.step:,} in flight {seconds_of(message):.1f} s: {work_text(message)}"


def seconds_of(message: StepInFlight) -> float:
    """Seconds from the start of the step until this message was sent."""
    return (message.time_ns - message.since_ns) / 1e9


def work_text(message: StepInFlight) -> str:
    """What the step computes, such as `8,192 prefill of r17 beside 63 decodes`."""
    decodes = f"{message.num_decodes:,} decode" + ("" if message.num_decodes == 1 else "s")
    if not message.num_prefill_tokens:
        return decodes
    named = [request_name(part.request_id) for part in message.prefills[:_NAMED]]
    num_others = len(message.prefills) - len(named)
    whose = " and ".join(named) if not num_others else f"{', '.join(named)} and others"
    text = f"{message.num_prefill_tokens:,} prefill of {whose}"
    return f"{text} beside {decodes}" if message.num_decodes else text
