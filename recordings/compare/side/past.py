"""`Past`: the facts about waits that are open when a side of a comparison begins."""

from collections.abc import Iterable

from stepscope.engine.protocol.wire import RequestView, Telemetry
from stepscope.recordings.attribution.baseline import Baseline
from stepscope.recordings.attribution.explain import Explainer
from stepscope.recordings.state.pauses import Pauses
from stepscope.recordings.state.series.latency import SLO
from stepscope.recordings.state.session import SessionState


class Past:
    """The operator's pauses and the causes of waits before a side begins.

    A wait belongs to the side in which it ends. If waits that were open at its beginning were left
    out, a side that begins with a queue would lose its longest waits and keep only short ones. A
    wait that is still open at the end of a side does not belong to that side. So each wait counts
    once.

    Args:
        slo: a longer wait is late.
        state: the state right before the first message for `take`; not changed.
        since_ns: engine time from which all pauses are known; None: the time of `state`. Waits that
            began earlier are left out, because an unknown part of them, perhaps hours, may be a
            pause by the operator.
    """

    def __init__(self, slo: SLO, state: SessionState, since_ns: int | None = None) -> None:
        self.since_ns = state.time_ns if since_ns is None else since_ns
        self.pauses = Pauses(state)
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
        """Process the next message before the side begins."""
        self.pauses.take(message)
        self.explainer.take(message, after_gap)
        self.explainer.late.clear()  # these waits do not belong to the side


def oldest_arrival(views: Iterable[RequestView]) -> int | None:
    """The oldest known arrival among the requests that have not ended; None without any."""
    return min(
        (view.arrival_ns for view in views if view.status != "finished" and not view.is_partial),
        default=None,
    )
