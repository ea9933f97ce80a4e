"""`Past`: what is known of the waits that are under way when a side of a comparison begins."""

from collections.abc import Iterable

from stepscope.engine.protocol.wire import RequestView, Telemetry
from stepscope.recordings.attribution.baseline import Baseline
from stepscope.recordings.attribution.explain import Explainer
from stepscope.recordings.state.outcome import Outcome
from stepscope.recordings.state.pauses import Pauses, leave_out_begun
from stepscope.recordings.state.series.latency import SLO
from stepscope.recordings.state.session import SessionState


class Past:
    """The operator's pauses and the causes of waits, followed up to where a side begins.

    A wait belongs to the side in which it ends, whenever it began: to leave out those that were
    under way would take the longest ones out of a side that begins with a queue, for of them it
    keeps what began and ended within a moment. What has not ended by the end of a side is no wait
    of it, so that each is counted once.

    Args:
        slo: a longer wait is late.
        state: right before the first message that `take` gets; not changed.
        since_ns: engine time from which on all pauses are known; None: of those before `state`
            nothing is known. A wait that began before it is no measurement: nobody can tell how
            much of it the operator had the engine paused, and that may be hours.
    """

    def __init__(self, slo: SLO, state: SessionState, since_ns: int | None = None) -> None:
        self.since_ns = state.time_ns if since_ns is None else since_ns
        self.pauses = Pauses(state)
        usual = Baseline()  # of the steps so far: a run is read once, and may still go on
        self.explainer = Explainer(
            slo.itl_ms * 1e6,
            slo.ttft_ms * 1e6,
            state=state,
            since_ns=self.since_ns,
            baseline=usual,
            learns=usual,
        )

    def take(self, message: Telemetry, after_gap: bool) -> None:
        """The next message before the side begins."""
        self.pauses.take(message)
        self.explainer.take(message, after_gap)
        self.explainer.late.clear()  # these are no waits of the side

    def leave_out_begun(self, outcome: Outcome, state: SessionState, now_ns: int) -> None:
        """Take the waits out of a step that began when pauses were not known yet.

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
