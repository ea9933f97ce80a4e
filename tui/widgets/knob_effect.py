"""What the latencies did after a change of knobs."""

from stepscope.engine.wire import KnobsChanged
from stepscope.recordings.history import History

EFFECT_S = 10.0  # before and after a change, or to the next one


def effect_of(
    history: History, change: KnobsChanged, now_ns: int
) -> list[tuple[float | None, float | None]]:
    """p50 and p99 of ITL, then of TTFT, in ms: before a change, and after it as of `now_ns`."""
    changes = history.knob_changes
    at = changes.index(change) if change in changes else 0
    earlier = changes[at - 1].time_ns if at else 0
    later = changes[at + 1].time_ns if at + 1 < len(changes) else None
    width_ns = round(EFFECT_S * 1e9)
    begin_ns = max(change.time_ns - width_ns, earlier)
    end_ns = change.time_ns + width_ns
    if later is not None:
        end_ns = min(end_ns, later)
    end_ns = min(end_ns, now_ns)
    before = history.latency(change.time_ns, (change.time_ns - begin_ns) / 1e9, 1)
    after = history.latency(end_ns, (end_ns - change.time_ns) / 1e9, 1)
    return [
        (getattr(getattr(before, kind), rank), getattr(getattr(after, kind), rank))
        for kind in ("itl", "ttft")
        for rank in ("p50_ms", "p99_ms")
    ]
