"""Leaves an operator's pauses, and waits from before they are known, out of latencies."""

from collections.abc import Sequence

from stepscope.engine.protocol.pause_trail import MAX_SPANS
from stepscope.engine.protocol.wire import Snapshot
from stepscope.recordings.state.outcome import Outcome
from stepscope.recordings.state.session import SessionState


def known_since(told: Snapshot | SessionState) -> int:
    """Engine time from which on all pauses are known, from a snapshot or state and later messages.

    If the snapshot or state lists pauses, it is assumed to list all of them, at most the last
    MAX_SPANS. For engines that publish no pauses, a file or history has its own `known_since_ns`.
    """
    spans = told.pauses if isinstance(told, Snapshot) else told.pauses.spans
    if spans is None:
        return told.time_ns
    return spans[0].start_ns if len(spans) >= MAX_SPANS else 0


def leave_out(outcome: Outcome, state: SessionState, now_ns: int, since_ns: int) -> None:
    """Leave paused time out of the waits that ended in a step, and waits from before `since_ns`.

    Before `since_ns`, an operator may have paused the engine, so these waits are no valid samples.

    Args:
        state: the state right after the step.
        now_ns: when the tokens of the step were known.
        since_ns: engine time from which on pauses are known.
    """
    views, pauses, known_ns = state.requests, state.pauses, now_ns - since_ns
    if since_ns:
        outcome.gaps_ns = {ns: count for ns, count in outcome.gaps_ns.items() if ns <= known_ns}
        outcome.late_gaps = [each for each in outcome.late_gaps if each[1] <= known_ns]
        outcome.ttft_ns = [each for each in outcome.ttft_ns if each[1] <= known_ns]
        outcome.e2e_ns = [each for each in outcome.e2e_ns if each[1] <= known_ns]
        outcome.tpot_ns = [
            each for each in outcome.tpot_ns if (views[each[0]].first_token_ns or 0) >= since_ns
        ]
    if not pauses.spans:
        return

    def without_pauses(waits: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        return [(request_id, ns - pauses.within(now_ns - ns, now_ns)) for request_id, ns in waits]

    outcome.ttft_ns, outcome.e2e_ns = map(without_pauses, (outcome.ttft_ns, outcome.e2e_ns))
    if pauses.within(now_ns - (outcome.max_gap_ns or 0), now_ns):
        gaps_ns, request_ids = outcome.gaps_ns, outcome.gap_request_ids
        outcome.gaps_ns, outcome.gap_request_ids = {}, {}
        for gap_ns, count in gaps_ns.items():
            net_ns = gap_ns - pauses.within(now_ns - gap_ns, now_ns)
            outcome.add_gaps(net_ns, count, request_ids[gap_ns])
    for index, (request_id, tpot_ns) in enumerate(outcome.tpot_ns):
        view = views[request_id]
        first_ns, last_ns = view.first_token_ns, view.last_token_ns
        if first_ns is not None and last_ns is not None:
            share_ns = pauses.within(first_ns, last_ns) / (view.num_output_tokens - 1)
            outcome.tpot_ns[index] = request_id, tpot_ns - round(share_ns)
