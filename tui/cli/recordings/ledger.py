"""`stepscope explain --queue`: prints which requests wait or were preempted, and what it cost."""

from collections.abc import Sequence
from typing import Any

from stepscope.recordings.attribution.baseline import Baseline
from stepscope.recordings.attribution.ledger import Ledger
from stepscope.recordings.attribution.queue import Preemption, QueueWait, reason_text
from stepscope.recordings.errors import TooLittleData
from stepscope.recordings.file.messages import indexes, messages
from stepscope.recordings.file.reader import Position, Recording
from stepscope.recordings.replay.seek import state_at
from stepscope.recordings.session.index import IndexRows
from stepscope.recordings.state.session import request_name
from stepscope.tui.cli.shared.output import (
    Progress,
    clock_ms,
    in_ms,
    ms,
    note,
    say,
    session_text,
    text_table,
    told,
    write_json,
)
from stepscope.tui.views import format as fmt


def print_ledger(
    name: str, recording: Recording, last_s: float | None, is_cut: bool, limit: int, as_json: bool
) -> None:
    """Print waits and preemptions of the last seconds; `is_cut`: the recording has only those."""
    begin = Position(0, 0)
    if last_s is not None and not is_cut:
        begin = recording.find_time(recording.end_ns - round(last_s * 1e9))
    state, sequence = state_at(recording, begin)
    baseline = Baseline()
    for _, index in indexes(recording):
        baseline.add_rows(IndexRows(index).steps())
    found = Ledger(state, baseline)
    first, last = state.step + 1, recording.last_step or 0
    with Progress() as progress:
        for number, each in enumerate(messages(recording, begin, sequence)):
            found.take(each.message, each.after_gap)
            if number % 4096 == 0:
                done = found.state.step - first + 1
                progress(f"reading {name}", done / max(1, last - first + 1))
    note(recording.message)
    if not found.explainer.num_steps:
        raise TooLittleData(f"{name}: it holds no step")
    if as_json:
        write_json(_document(name, found))
    else:
        span_s = (found.state.time_ns - (found.explainer.first_step_ns or 0)) / 1e9
        say(session_text(name, found.explainer.num_steps, span_s, last_s), *_lines(found, limit))


def _lines(found: Ledger, limit: int) -> list[str]:
    tax = found.tax()
    lines = [f"preemptions: {'none' if found.publishes_requests else 'unknown'}"]
    if found.preemptions:
        lines = [
            f"preemptions: {tax.num_preemptions:,}, which threw away {fmt.count(tax.num_lost)} "
            "tokens",
            f"recompute tax: {fmt.count(tax.num_recomputed)} of {tax.num_tokens:,} tokens "
            f"({_share(tax.token_share)}), {ms(tax.recompute_ns)} of the {ms(tax.step_ns)} in "
            f"steps ({_share(tax.time_share)})",
        ]
    if not found.publishes_requests:
        return [*lines, "the engine does not publish the requests of a step: nothing else is known"]
    queue, admitted = found.waiting(), found.admitted()
    return [
        *lines,
        *_waits(found, f"waiting by the end: {len(queue):,}, in their order", queue, limit),
        *_waits(found, f"admitted: {found.num_admitted:,}; the longest waits", admitted, limit),
        *_preemptions(found, limit),
    ]


def _waits(found: Ledger, title: str, waits: Sequence[QueueWait], limit: int) -> list[str]:
    rows = []
    for wait in waits[: limit or None]:
        spent = sorted(((ns, why) for why, ns in wait.reasons.items()), key=lambda item: -item[0])
        row = [
            request_name(wait.request_id) + (" (preempted)" if wait.was_preempted else ""),
            clock_ms(_wall_ns(found, wait.since_ns)),
            ms(wait.waited_ns(found.state.time_ns)),
            f"{wait.num_prompt_tokens:,}",
            "—" if wait.step is None else f"{wait.step:,}",
            f"{wait.num_behind:,}",
            ", ".join(f"{reason_text(why)} {ms(ns)}" for ns, why in spent if ns >= 50_000) or "—",
        ]
        rows.append(row)
    heading = ["request", "since", "waited", "prompt", "until step", "behind it", "for"]
    return ["", title, *text_table(heading, rows, "<<>>>><"), *_more(waits, rows)] if rows else []


def _preemptions(found: Ledger, limit: int) -> list[str]:
    if not found.preemptions:
        return []
    dearest = sorted(found.preemptions, key=lambda each: -each.recompute_ns)[: limit or None]
    rows = [
        [
            fmt.count(each.step) if each.step is not None else "before",
            clock_ms(_wall_ns(found, each.time_ns)),
            request_name(each.request_id),
            _beneficiary(each),
            fmt.count(each.num_lost),
            f"{each.num_from_cache:,}",
            f"{each.num_recomputed:,}",
            ms(each.recompute_ns),
        ]
        for each in dearest
    ]
    heading = ["step", "at", "victim", "for", "lost", "from cache", "computed again", "took"]
    title = "preemptions, the dearest first (tokens; 'took' is their share of the steps' time)"
    return ["", title, *text_table(heading, rows, "><<<>>>>"), *_more(found.preemptions, rows)]


def _beneficiary(preemption: Preemption) -> str:
    if preemption.beneficiary is None:
        return f"— ({preemption.reason})" if preemption.reason else "—"
    is_itself = preemption.beneficiary == preemption.request_id
    return "itself" if is_itself else request_name(preemption.beneficiary)


def _more(found: Sequence[object], rows: Sequence[object]) -> list[str]:
    rest = len(found) - len(rows)
    return [f"and {rest:,} more: --limit 0 shows all"] if rest else []


def _share(share: float | None) -> str:
    return "—" if share is None else f"{share:.2%}"


def _wall_ns(found: Ledger, time_ns: int | None) -> int | None:
    info = found.state.info
    assert info is not None, "it has steps"
    return None if time_ns is None else info.wall_at(time_ns)


def _document(name: str, found: Ledger) -> dict[str, Any]:
    tax = found.tax()
    return {
        "name": name,
        "publishes_requests": found.publishes_requests,
        "recompute_tax": {**told(tax), **told(tax, "token_share", "time_share")},
        "waiting": [_wait(found, wait) for wait in found.waiting()],
        "num_admitted": found.num_admitted,
        "longest_waits": [_wait(found, wait) for wait in found.admitted()],
        "preemptions": [
            {**told(each), "wall_ns": _wall_ns(found, each.time_ns)} for each in found.preemptions
        ],
    }


def _wait(found: Ledger, wait: QueueWait) -> dict[str, Any]:
    return {
        **told(wait, "request_id", "client_id", "num_prompt_tokens", "was_preempted"),
        **told(wait, "step", "num_behind"),
        "since_wall_ns": _wall_ns(found, wait.since_ns),
        "waited_ms": in_ms(wait.waited_ns(found.state.time_ns)),
        "for_ms": {reason or "unknown": in_ms(ns) for reason, ns in wait.reasons.items()},
    }
