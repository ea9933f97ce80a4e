"""`stepscope explain --queue`: prints which requests wait or were preempted, and what it cost."""

import sys
from typing import Any

from stepscope.engine.protocol.wire import EngineInfo
from stepscope.recordings.attribution.ledger import Ledger
from stepscope.recordings.attribution.messages import messages_in
from stepscope.recordings.attribution.preemptions import Preemption
from stepscope.recordings.attribution.queue import QueueWait, reason_text
from stepscope.recordings.file.reader import Position, Recording
from stepscope.recordings.replay.seek import state_at
from stepscope.recordings.state.session import request_name
from stepscope.tui.cli.recordings.measured import (
    LIVE_S,
    NothingMeasured,
    first_of,
    is_recording,
    last_seconds,
)
from stepscope.tui.cli.shared.connect import choose
from stepscope.tui.cli.shared.errors import say, write_json
from stepscope.tui.cli.shared.progress import Progress
from stepscope.tui.cli.shared.recording_path import find_recording
from stepscope.tui.cli.shared.text_table import text_table
from stepscope.tui.views import format as fmt

_NAMED = 3  # requests to name behind another one in the queue


def ledger(target: str | None, seconds: float | None, limit: int, as_json: bool) -> None:
    """Print the waits and preemptions of a recording or a running engine.

    Raises:
        CommandFailed: there is no such recording or engine.
        NothingMeasured: the session holds no step.
    """
    if target is not None and is_recording(target):
        name, found = target, _of_recording(target, seconds)
    else:
        endpoint = choose(target, "stepscope explain {} --queue")
        history = last_seconds(endpoint, seconds or LIVE_S, {})
        follower = history.follow(first_of(history, seconds or LIVE_S))
        name, found = endpoint.name, Ledger(follower.state)
        for message, after_gap in follower.read(follower.num_ahead):
            found.take(message, after_gap)
    if not found.num_steps:
        raise NothingMeasured(f"{name}: it holds no step")
    if as_json:
        write_json(_document(name, found))
        return
    say(*_lines(name, found, limit))


def _of_recording(target: str, seconds: float | None) -> Ledger:
    with Recording(find_recording(target)) as recording, Progress() as progress:
        begin = Position(0, 0)
        if seconds is not None:
            begin = recording.find_time(recording.end_ns - round(seconds * 1e9))
        state, sequence = state_at(recording, begin)
        found = Ledger(state)
        first, last = state.step + 1, recording.last_step or 0
        for number, (message, is_lost) in enumerate(messages_in(recording, begin, sequence)):
            found.take(message, is_lost)
            if number % 4096 == 0:
                done = found.last_step - first + 1
                progress(f"reading {target}", done / max(1, last - first + 1))
        if recording.message is not None:
            print(f"stepscope: note: {recording.message}", file=sys.stderr)
    return found


# Text output


def _lines(name: str, found: Ledger, limit: int) -> list[str]:
    assert found.info is not None
    span_s = (found.now_ns - (found.first_ns or 0)) / 1e9
    lines = [f"{name}: {found.num_steps:,} steps in {span_s:,.1f} s", *_tax(found)]
    if not found.publishes_requests:
        return [*lines, "the engine does not publish the requests of a step: nothing else is known"]
    return [
        *lines,
        *_waiting(found, found.info, limit),
        *_admitted(found, found.info, limit),
        *_preemptions(found, found.info, limit),
    ]


def _tax(found: Ledger) -> list[str]:
    tax = found.tax()
    if not found.preemptions:
        return ["preemptions: none" if found.publishes_requests else "preemptions: unknown"]
    return [
        f"preemptions: {tax.num_preemptions:,}, which threw away {fmt.count(tax.num_lost)} tokens",
        f"recompute tax: {fmt.count(tax.num_recomputed)} of {tax.num_tokens:,} tokens "
        f"({_share(tax.token_share)}), {_ms(tax.recompute_ns)} of the {_ms(tax.step_ns)} in steps "
        f"({_share(tax.time_share)})",
    ]


def _waiting(found: Ledger, info: EngineInfo, limit: int) -> list[str]:
    queue = found.waiting()
    if not queue:
        return ["", "waiting by the end: none"]
    rows = [
        [
            _request(wait),
            _clock(info, wait.since_ns),
            _ms(wait.waited_ns(found.now_ns)),
            f"{wait.num_prompt_tokens:,}",
            _reasons(wait),
            _behind(queue[place + 1 :]),
        ]
        for place, wait in enumerate(queue[: limit or None])
    ]
    heading = ["request", "since", "waits", "prompt", "for", "behind it"]
    title = f"waiting by the end: {len(queue):,}, in the order of the queue"
    return ["", title, *text_table(heading, rows, "<<>><<"), *_more(queue, rows)]


def _admitted(found: Ledger, info: EngineInfo, limit: int) -> list[str]:
    waits = found.admitted()
    if not waits:
        return []
    rows = [
        [
            _request(wait),
            _clock(info, wait.since_ns),
            _ms(wait.waited_ns(found.now_ns)),
            f"{wait.num_prompt_tokens:,}",
            "it ended" if wait.step is None else f"{wait.step:,}",
            f"{wait.num_behind:,}",
            _reasons(wait),
        ]
        for wait in waits[: limit or None]
    ]
    heading = ["request", "since", "waited", "prompt", "until step", "behind it", "for"]
    title = f"admitted: {found.num_admitted:,}; the longest waits"
    return ["", title, *text_table(heading, rows, "<<>>>><")]


def _preemptions(found: Ledger, info: EngineInfo, limit: int) -> list[str]:
    if not found.preemptions:
        return []
    dearest = sorted(found.preemptions, key=lambda each: -each.recompute_ns)[: limit or None]
    rows = [
        [
            fmt.count(each.step) if each.step is not None else "before",
            _clock(info, each.time_ns),
            request_name(each.request_id),
            _beneficiary(each),
            fmt.count(each.num_lost),
            f"{each.num_from_cache:,}",
            f"{each.num_recomputed:,}",
            f"{each.num_steps:,}",
            _ms(each.recompute_ns),
            _ms(each.waited_ns),
            each.status,
        ]
        for each in dearest
    ]
    heading = ["step", "at", "victim", "for", "lost", "from cache", "computed again", "steps"]
    heading += ["took", "waited", "now"]
    title = "preemptions, the dearest first (tokens; 'took' is their share of the steps' time)"
    return ["", title, *text_table(heading, rows, "><<<>>>>>><"), *_more(found.preemptions, rows)]


def _request(wait: QueueWait) -> str:
    return request_name(wait.request_id) + (" (preempted)" if wait.was_preempted else "")


def _reasons(wait: QueueWait) -> str:
    """Return a text with the reasons why a request waited and the time of each, longest first."""
    spent = sorted(wait.reasons.items(), key=lambda item: -item[1])
    parts = [f"{reason_text(reason)} {_ms(ns)}" for reason, ns in spent if ns >= 50_000]
    return ", ".join(parts) or "—"


def _behind(queue: list[QueueWait]) -> str:
    names = [request_name(wait.request_id) for wait in queue[:_NAMED]]
    rest = len(queue) - len(names)
    return ", ".join(names) + (f" and {rest:,} more" if rest else "") if names else "none"


def _beneficiary(preemption: Preemption) -> str:
    if preemption.beneficiary is None:
        return "—" if not preemption.reason else f"— ({preemption.reason})"
    if preemption.beneficiary == preemption.request_id:
        return "itself"
    return request_name(preemption.beneficiary)


def _more(found: list[Any], rows: list[list[str]]) -> list[str]:
    rest = len(found) - len(rows)
    return [f"and {rest:,} more: --limit 0 shows all"] if rest else []


def _ms(ns: float | None) -> str:
    return "—" if ns is None else f"{ns / 1e6:,.1f} ms"


def _share(share: float | None) -> str:
    return "—" if share is None else f"{share:.2%}"


def _clock(info: EngineInfo, time_ns: int | None) -> str:
    return clock_ms(_wall_ns(info, time_ns))


def clock_ms(wall_ns: int | None) -> str:
    """Return a time of day with its milliseconds; a dash if it is unknown."""
    return "—" if wall_ns is None else f"{fmt.clock(wall_ns)}.{wall_ns // 1_000_000 % 1000:03d}"


# JSON output


def _document(name: str, found: Ledger) -> dict[str, Any]:
    info, tax = found.info, found.tax()
    assert info is not None
    queue = found.waiting()
    names = [wait.request_id for wait in queue]
    return {
        "name": name,
        "publishes_requests": found.publishes_requests,
        "recompute_tax": {
            "preemptions": tax.num_preemptions,
            "lost_tokens": tax.num_lost,
            "recomputed_tokens": tax.num_recomputed,
            "tokens": tax.num_tokens,
            "token_share": tax.token_share,
            "recompute_ms": _in_ms(tax.recompute_ns),
            "step_ms": tax.step_ns / 1e6,
            "time_share": tax.time_share,
        },
        "waiting": [
            {**_wait(found, info, wait), "behind": names[place + 1 :]}
            for place, wait in enumerate(queue)
        ],
        "num_admitted": found.num_admitted,
        "longest_waits": [
            {**_wait(found, info, wait), "step": wait.step, "num_behind": wait.num_behind}
            for wait in found.admitted()
        ],
        "preemptions": [
            {
                "request_id": each.request_id,
                "client_id": each.client_id,
                "step": each.step,
                "wall_ns": _wall_ns(info, each.time_ns),
                "reason": each.reason or None,
                "blocks": each.num_blocks,
                "beneficiary": each.beneficiary,
                "lost_tokens": each.num_lost,
                "from_cache_tokens": each.num_from_cache,
                "recomputed_tokens": each.num_recomputed,
                "recompute_steps": each.num_steps,
                "recompute_ms": each.recompute_ns / 1e6,
                "waited_ms": _in_ms(each.waited_ns),
                "status": each.status,
            }
            for each in found.preemptions
        ],
    }


def _wait(found: Ledger, info: EngineInfo, wait: QueueWait) -> dict[str, Any]:
    return {
        "request_id": wait.request_id,
        "client_id": wait.client_id,
        "prompt_tokens": wait.num_prompt_tokens,
        "preempted": wait.was_preempted,
        "since_wall_ns": _wall_ns(info, wait.since_ns),
        "waited_ms": _in_ms(wait.waited_ns(found.now_ns)),
        "for_ms": {reason or "unknown": ns / 1e6 for reason, ns in wait.reasons.items()},
    }


def _in_ms(ns: float | None) -> float | None:
    return None if ns is None else ns / 1e6


def _wall_ns(info: EngineInfo, time_ns: int | None) -> int | None:
    return None if time_ns is None else info.wall_ns + time_ns - info.monotonic_ns
