"""Leaves an operator's pauses, and waits from before they are known, out of latencies."""

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


def leave_out_pauses(outcome: Outcome, state: SessionState, now_ns: int) -> None:
    """Subtract paused time from the waits for tokens that ended in a step.

    Args:
        state: the state right after the step.
        now_ns: when the tokens of the step were known.
    """
    pauses = state.pauses
    if not pauses.spans:
        return
    longest_ns = max(outcome.max_gap_ns or 0, *(ns for _, ns in outcome.ttft_ns), 0)
    if pauses.within(now_ns - longest_ns, now_ns):
        gaps_ns, request_ids = outcome.gaps_ns, outcome.gap_request_ids
        outcome.gaps_ns, outcome.gap_request_ids = {}, {}
        for gap_ns, count in gaps_ns.items():
            net_ns = gap_ns - pauses.within(now_ns - gap_ns, now_ns)
            outcome.gaps_ns[net_ns] = outcome.gaps_ns.get(net_ns, 0) + count
            outcome.gap_request_ids.setdefault(net_ns, request_ids[gap_ns])
        outcome.ttft_ns = [
            (request_id, ns - pauses.within(now_ns - ns, now_ns))
            for request_id, ns in outcome.ttft_ns
        ]
    if outcome.e2e_ns:
        outcome.e2e_ns = [
            (request_id, ns - pauses.within(now_ns - ns, now_ns))
            for request_id, ns in outcome.e2e_ns
        ]
    for index, (request_id, tpot_ns) in enumerate(outcome.tpot_ns):
        view = state.requests[request_id]
        first_ns, last_ns = view.first_token_ns, view.last_token_ns
        if first_ns is not None and last_ns is not None:
            paused_ns = pauses.within(first_ns, last_ns)
            if paused_ns:
                share_ns = round(paused_ns / (view.num_output_tokens - 1))
                outcome.tpot_ns[index] = request_id, tpot_ns - share_ns


def leave_out(outcome: Outcome, state: SessionState, now_ns: int, since_ns: int) -> None:
    """Correct the outcome of a step for pauses. The tokens of the step were known at `now_ns`.

    First drops waits that began before `since_ns` (unless that is 0), then subtracts paused time.
    """
    if since_ns:
        leave_out_begun(outcome, state, now_ns, since_ns)
    leave_out_pauses(outcome, state, now_ns)


def leave_out_begun(outcome: Outcome, state: SessionState, now_ns: int, since_ns: int) -> None:
    """Remove the waits that ended in a step but began before `since_ns`.

    An operator may have paused the engine at that time, so these waits are no valid samples.

    Args:
        state: the state right after the step.
        now_ns: when the tokens of the step were known.
        since_ns: engine time from which on pauses are known.
    """
    known_ns = now_ns - since_ns
    if outcome.gaps_ns and max(outcome.gaps_ns) > known_ns:
        outcome.gaps_ns = {ns: count for ns, count in outcome.gaps_ns.items() if ns <= known_ns}
    if outcome.ttft_ns:
        outcome.ttft_ns = [each for each in outcome.ttft_ns if each[1] <= known_ns]
    if outcome.e2e_ns:
        outcome.e2e_ns = [each for each in outcome.e2e_ns if each[1] <= known_ns]
    if outcome.tpot_ns:
        outcome.tpot_ns = [
            each
            for each in outcome.tpot_ns
            if (state.requests[each[0]].first_token_ns or 0) >= since_ns
        ]
