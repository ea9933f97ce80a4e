"""The latencies before and after a change of knobs, or the reason why they are unknown."""

from typing import NamedTuple, TypeAlias

from stepscope.engine.protocol.wire import KnobsChanged
from stepscope.recordings.history.history import History
from stepscope.recordings.state.series.latency import LatencyKind, LatencyReport

EFFECT_S = 10.0  # seconds before and after a change, less if another change is nearer

# One token of several hundred is beyond a p99: only the longest wait shows a freeze.
FIGURES: tuple[tuple[LatencyKind, str], ...] = (
    ("itl", "p50"),
    ("itl", "p99"),
    ("itl", "max"),
    ("ttft", "p50"),
    ("ttft", "p99"),
)

BeforeAfter: TypeAlias = tuple[float | None, float | None]


class KnobEffect(NamedTuple):
    """The latencies before and after a knob change."""

    figures: list[BeforeAfter]  # in ms, for each of `FIGURES`; None if unknown
    missing: str  # why some latencies are unknown; empty if all are known
    gist: str  # that reason in two or three words

    @property
    def is_blank(self) -> bool:
        return all(value is None for pair in self.figures for value in pair)


def effect_of(history: History, change: KnobsChanged, now_ns: int) -> KnobEffect:
    """Return the latencies around a knob change, as far as they are known at `now_ns`."""
    changes = history.knob_changes
    if change not in changes:
        nothing: list[BeforeAfter] = [(None, None)] * len(FIGURES)
        return KnobEffect(nothing, "older than memory", "too long ago")
    at = changes.index(change)
    earlier = changes[at - 1].time_ns if at else 0
    later = changes[at + 1].time_ns if at + 1 < len(changes) else None
    width_ns = round(EFFECT_S * 1e9)
    begin_ns = max(change.time_ns - width_ns, earlier)
    end_ns, until = change.time_ns + width_ns, f"in the {EFFECT_S:g} s after"
    if later is not None and later < end_ns:
        end_ns, until = later, "up to the next change"
    if now_ns < end_ns:
        end_ns, until = now_ns, "since"
    before = history.latency(change.time_ns, (change.time_ns - begin_ns) / 1e9, 1)
    after = history.latency(end_ns, (end_ns - change.time_ns) / 1e9, 1)
    since = "before" if at == 0 or earlier < begin_ns else "after the change before"
    missing = [_missing(before, since), _missing(after, until)]
    gist = "unknown"
    if begin_ns < history.kept_from_ns and not before.step.num_samples:
        missing[0] = "before not in memory"
    elif all(not report.step.num_samples for report in (before, after)):
        missing, gist = [f"nothing ran {since}, nor {until}"], "nothing ran"
    return KnobEffect(
        [
            (
                getattr(getattr(before, kind), f"{rank}_ms"),
                getattr(getattr(after, kind), f"{rank}_ms"),
            )
            for kind, rank in FIGURES
        ],
        ", ".join(each for each in missing if each),
        gist,
    )


def _missing(report: LatencyReport, when: str) -> str:
    """Return why latencies are missing `when`; TTFT needs a first token then, ITL a second."""
    if not report.step.num_samples:
        return f"nothing ran {when}"
    tokens = {"first": report.ttft, "second": report.itl}
    without = [name for name, series in tokens.items() if not series.num_samples]
    if not without:
        return ""
    return f"no {without[0]} token {when}" if len(without) == 1 else f"no token {when}"
