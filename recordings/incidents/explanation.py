"""Explains, from the messages in memory, why tokens were late in an incident."""

from typing import NamedTuple

from stepscope.engine.protocol.wire import Telemetry
from stepscope.recordings.attribution.baseline import Baseline
from stepscope.recordings.attribution.explain import Explainer
from stepscope.recordings.attribution.explained import affected_by
from stepscope.recordings.history.history import History
from stepscope.recordings.state.in_flight import in_flight_text

_TURN = 1_000


class LateSummary(NamedTuple):
    """Number of requests with late tokens, and a text that explains the worst waits."""

    num_late: int
    text: str


def explained(history: History, first: int | None) -> LateSummary:
    """Explain the late tokens of the steps from `first` on; None: from the oldest in memory."""
    follower = history.follow(first)
    state, num_messages = follower.state, follower.num_ahead
    messages: list[tuple[Telemetry, bool]] = []
    while len(messages) < num_messages:
        some = [(each.message, each.after_gap) for each in follower.read(_TURN)]
        if not some:
            break
        messages += some
    itl_ns, ttft_ns = history.slo.itl_ms * 1e6, history.slo.ttft_ms * 1e6
    baseline = Baseline()
    learner = Explainer(itl_ns, ttft_ns, state=state, learns=baseline)
    for message, after_gap in messages:
        learner.take(message, after_gap)
    explainer = Explainer(itl_ns, ttft_ns, state=state, baseline=baseline)
    for message, after_gap in messages:
        explainer.take(message, after_gap)
    late = [each for each in explainer.late if not each.is_excused]
    parts = []
    flying = history.state.in_flight
    if flying is not None:
        parts.append(f"{in_flight_text(flying)}, not ended")
    for kind in ("ITL", "TTFT"):
        waits = [each for each in late if each.kind == kind]
        if waits:
            worst = max(waits, key=lambda each: each.gap_ns)
            parts.append(f"longest {kind}: {worst.text} ({worst.explanation})")
    return LateSummary(affected_by(late, 0).num_late, ". ".join(parts))
