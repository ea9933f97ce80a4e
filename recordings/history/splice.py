"""Putting what was before in front of what is in memory, without touching what is in memory."""

from stepscope.recordings.history.timeline import Timeline
from stepscope.recordings.state.clocks import BACK_NS
from stepscope.recordings.state.series.events import MAX_EVENTS
from stepscope.recordings.state.series.latency import Latencies

_ABORT = frozenset({"abort"})


def does_follow(later: Timeline, earlier: Timeline) -> bool:
    """Whether `later` begins with the very message after the last one of `earlier`.

    And whether it goes on in the same time, with later steps.
    """
    before, steps = earlier.columns, later.columns.steps
    keyframe = later.ring.segments[0].keyframe
    if earlier.last_sequence is None or keyframe.sequence != earlier.last_sequence:
        return False
    if not before.steps or not steps:
        return True
    return before.steps[-1] < steps[0] and (
        before.tokens_ns[-1] <= later.columns.tokens_ns[0] + BACK_NS
    )


def splice(later: Timeline, earlier: Timeline, latencies: Latencies) -> None:
    """Put everything that `earlier` keeps before what `later` keeps, which stays as it is.

    Who follows `later` goes on where it was. `earlier` is of no use afterwards.

    Args:
        later: see `does_follow`.
        earlier: nothing was lost in it.
        latencies: of both. They are ranked, which takes long: whoever holds a lock has them made
            before.
    """
    if earlier.slo != later.slo:  # changed while `earlier` was filled
        earlier.set_slo(later.slo)
    latencies.slo = later.slo
    # Nobody who came after the end of a request has a lane for it.
    between = later.log.until(earlier.state.step, MAX_EVENTS, _ABORT)
    earlier.lanes.abort([each.request_id for each in between if each.request_id is not None])
    later.ring.prepend(earlier.ring)
    later.columns.prepend(earlier.columns)
    later.lanes.prepend(earlier.lanes)
    later.latencies = latencies
    later.log.prepend(earlier.log)
    later.pauses.prepend(earlier.pauses)
    later.gaps.prepend(earlier.gaps)
    later.wall_clock.prepend(earlier.wall_clock)
    later.knob_changes[:0] = earlier.knob_changes
    later.knob_steps |= earlier.knob_steps
    later.stall_steps[:0] = earlier.stall_steps
    later.transcripts = earlier.transcripts  # as of the beginning, which is another one now
