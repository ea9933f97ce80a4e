"""`Past`: what is known about the waits in progress at the beginning of a compared run."""

from collections.abc import Iterable

from stepscope.engine.protocol.wire import RequestView, Telemetry
from stepscope.recordings.attribution.baseline import Baseline
from stepscope.recordings.attribution.explain import Explainer
from stepscope.recordings.state.series.latency import SLO
from stepscope.recordings.state.session import SessionState


class Past:
    """The pauses by an operator and the causes of waits before a compared run begins.

    A wait belongs to the run in which it ends. Waits that were in progress at the beginning of a
    run must count: else a run that begins with a queue would lose its longest waits and keep only
    short ones. A wait still in progress at the end of a run does not belong to that run. So each
    wait counts once.

    Args:
        slo: a longer wait is late.
        state: the state right before the first message for `take`; not changed.
        since_ns: engine time from which all pauses are known; None: the time of `state`. Waits that
            began earlier are left out, because an unknown part of them, perhaps hours, may be a
            pause by the operator.
    """

    def __init__(self, slo: SLO, state: SessionState, since_ns: int | None = None) -> None:
        self.since_ns = state.time_ns if since_ns is None else since_ns
        baseline = Baseline()  # learns while it reads: a run is read once and may still grow
        self.explainer = Explainer(
            slo.itl_ms * 1e6,
            slo.ttft_ms * 1e6,
            state=state,
            since_ns=self.since_ns,
            baseline=baseline,
            learns=baseline,
        )

    def take(self, message: Telemetry, after_gap: bool) -> None:
        """Process the next message from before the run."""
        self.explainer.take(message, after_gap)
        self.explainer.late.clear()  # these waits do not belong to the side


def oldest_arrival(views: Iterable[RequestView]) -> int | None:
    """The oldest known arrival among the requests that have not ended; None without any."""
    return min(
        (view.arrival_ns for view in views if view.status != "finished" and not view.is_partial),
        default=None,
    )
