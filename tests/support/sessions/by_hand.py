"""Figures of a session, counted slowly from its raw messages: the oracle of all sums.

It shares no code with the reducer. It knows sessions of our own engine, from the engine's start.
"""

import itertools
import math
from collections import defaultdict

from stepscope.engine.protocol.wire import (
    Admitted,
    Arrived,
    EngineStatus,
    Finished,
    Preempted,
    RowFlag,
    StepRecord,
    Telemetry,
)

Messages = list[tuple[int, Telemetry]]


def figures_by_hand(
    messages: Messages, ttft_ms: float, itl_ms: float
) -> dict[str, float | int | None]:
    """The figures of a session without lost messages; a repeated step counts once."""
    steps: list[StepRecord] = []
    events = []
    pauses: list[tuple[int, int]] = []
    paused_ns: int | None = None
    for _, message in messages:
        if isinstance(message, EngineStatus):
            events += [(message.time_ns, event) for event in message.events]
            if message.state == "paused":
                paused_ns = message.time_ns if paused_ns is None else paused_ns
            elif paused_ns is not None:
                pauses.append((paused_ns, message.time_ns))
                paused_ns = None
        elif isinstance(message, StepRecord) and message.step not in {s.step for s in steps[-1:]}:
            steps.append(message)
            events += [(message.tokens_ns, event) for event in message.events]
    arrival_ns = {e.request_id: e.time_ns for _, e in events if isinstance(e, Arrived)}
    tokens_ns: dict[int, list[int]] = defaultdict(list)  # when each token of a request came
    num_out = 0
    for step in steps:
        for row in step.batch or ():
            if row.flags & RowFlag.LAST_CHUNK:
                tokens_ns[row.request_id].append(step.tokens_ns)
                num_out += row.num_tokens if row.phase == 1 else 1

    def waited(start: int, end: int) -> int:
        return end - start - sum(max(0, min(b, end) - max(a, start)) for a, b in pauses)

    ttft = {each: waited(arrival_ns[each], at[0]) for each, at in tokens_ns.items()}
    itl = {
        each: [waited(a, b) for a, b in itertools.pairwise(at)] for each, at in tokens_ns.items()
    }
    ended = {e.request_id: ns for ns, e in events if isinstance(e, Finished)}
    tpot = [round(sum(itl[each]) / len(itl[each])) for each in ended if itl[each]]
    in_time = {each for each in ended if ttft[each] <= ttft_ms * 1e6}
    kept = [each for each in in_time if max(itl[each], default=0) <= itl_ms * 1e6]
    gaps = [gap for each in itl.values() for gap in each]
    seconds = (steps[-1].tokens_ns - steps[0].schedule_start_ns) / 1e9
    prompts = {e.request_id: e.num_prompt_tokens for _, e in events if isinstance(e, Arrived)}
    reached: dict[int, int] = defaultdict(int)  # how far the prompt of each request came
    hits: dict[int, int] = {}  # at its first admission
    for _, event in events:
        if isinstance(event, Admitted):
            hits.setdefault(event.request_id, event.num_cached_tokens)
    for step in steps:
        for row in step.batch or ():
            end = min(row.start + row.num_tokens, prompts[row.request_id])
            reached[row.request_id] = max(reached[row.request_id], end)
    prefill = sum(step.num_prefill_tokens for step in steps)
    recomputed = prefill - (sum(reached.values()) - sum(hits.values()))
    kv = [step.kv for step in steps if step.kv is not None]
    shares = [each.used / (each.used + each.cached + each.empty) for each in kv]
    took_ns = [step.tokens_ns - step.schedule_start_ns for step in steps]
    found: dict[str, float | int | None] = {
        "ttft_within_slo": _share([ns <= ttft_ms * 1e6 for ns in ttft.values()]),
        "itl_within_slo": _share([ns <= itl_ms * 1e6 for ns in gaps]),
        "goodput": len(kept) / len(ended),
        "goodput_per_s": len(kept) / seconds,
        "finished": len(ended),
        "finished_per_s": len(ended) / seconds,
        "arrived": len(arrival_ns),
        "out_tokens_per_s": num_out / seconds,
        "in_tokens_per_s": sum(reached.values()) / seconds,
        "preemptions": sum(isinstance(event, Preempted) for _, event in events),
        "recomputed_share": recomputed / prefill,
        "evictions": sum(each.evicted for each in kv),
        "waiting": sum(step.num_waiting for step in steps) / len(steps),
        "kv_peak": max(shares),
        "mixed_steps": _share([s.num_prefill_tokens > 0 < s.num_decode_tokens for s in steps]),
        "busy": sum(took_ns) / 1e9 / seconds,
        "steps": len(steps),
        "seconds": seconds,
    }
    if ranked := [step for step in steps if step.ranks]:
        work_ns = [sorted(rank.work_ns for rank in step.ranks or ()) for step in ranked]  # of two
        whole_ns = sum(step.tokens_ns - step.schedule_start_ns for step in ranked)
        found["rank_wait"] = sum(longer - shorter for shorter, longer in work_ns) / whole_ns
    for kind, samples in {
        "ttft": list(ttft.values()),
        "itl": gaps,
        "tpot": tpot,
        "e2e": [waited(arrival_ns[each], ns) for each, ns in ended.items()],
        "step": took_ns,
    }.items():
        ordered = sorted(samples)
        for rank in (50, 90, 95, 99):
            found[f"{kind}_p{rank}"] = ordered[math.ceil(rank * len(ordered) / 100) - 1] / 1e6
        found[f"{kind}_max"] = ordered[-1] / 1e6
    return found


def waits_by_hand(messages: Messages) -> dict[tuple[int, int], tuple[int, int]]:
    """When each wait for a token began and ended: (request, step of the token) -> (start, end).

    For sessions from the engine's start, without lost messages.
    """
    began: dict[int, int] = {}  # request -> when its wait began
    found: dict[tuple[int, int], tuple[int, int]] = {}
    steps: set[int] = set()
    for _, message in messages:
        if isinstance(message, StepRecord | EngineStatus):
            for event in message.events:
                if isinstance(event, Arrived):
                    began.setdefault(event.request_id, event.time_ns)
        if isinstance(message, StepRecord) and message.step not in steps:
            steps.add(message.step)
            for row in message.batch or ():
                if row.flags & RowFlag.LAST_CHUNK:
                    wait = began[row.request_id], message.tokens_ns
                    found[row.request_id, message.step] = wait
                    began[row.request_id] = message.tokens_ns
    return found


def _share(held: list[bool]) -> float:
    return sum(held) / len(held)
