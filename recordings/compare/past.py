"""`Past`: what is known of the waits that are under way when a side of a comparison begins."""

from collections.abc import Iterable

from stepscope.engine.wire import RequestView, Telemetry
from stepscope.recordings.explain import Explainer
from stepscope.recordings.latency import SLO
from stepscope.recordings.outcome import Outcome
from stepscope.recordings.pauses import Pauses, leave_out_begun
from stepscope.recordings.session import SessionState


class Past:
    """The operator's pauses and the causes of waits, followed up to where a side begins.

    Args:
        slo: a longer wait is late.
        state: right before the first message that `take` gets; not changed.

    Attributes:
        since_ns: engine time from which on everything is known. Whether the engine was paused
            before it nobody can tell, so that a wait that began before it is no measurement.
    """

    def __init__(self, slo: SLO, state: SessionState) -> None:
        self.since_ns = state.time_ns
        self.pauses = Pauses(state)
        self.explainer = Explainer(slo.itl_ms * 1e6, slo.ttft_ms * 1e6, state=state)

    def take(self, message: Telemetry, after_gap: bool) -> None:
        """The next message before the side begins."""
        self.pauses.take(message)
        self.explainer.take(message, after_gap)
        self.explainer.late.clear()  # these are no waits of the side

    def leave_out_begun(self, outcome: Outcome, state: SessionState, now_ns: int) -> None:
        """Take the waits out of a step that began before anything was known.

        Args:
            state: right after the step.
            now_ns: when its tokens were known.
        """
        leave_out_begun(outcome, state, now_ns, self.since_ns)


def oldest_arrival(views: Iterable[RequestView]) -> int | None:
    """When the oldest of those requests came that are still there; None without any."""
    return min(
        (view.arrival_ns for view in views if view.status != "finished" and not view.is_partial),
        default=None,
    )
