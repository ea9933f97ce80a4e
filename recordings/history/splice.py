"""Inserts earlier steps before the steps in memory, which stay unchanged."""

from stepscope.recordings.history.timeline import Timeline
from stepscope.recordings.state.clocks import BACK_NS
from stepscope.recordings.state.series.events import MAX_EVENTS

_ABORT = frozenset({"abort"})


def does_follow(later: Timeline, earlier: Timeline) -> bool:
    """Whether `later` begins right after the last message of `earlier`.

    Its first step must also have a higher number, and must not be earlier in time.
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


def splice(later: Timeline, earlier: Timeline) -> None:
    """Insert everything in `earlier` before `later`, whose own steps stay unchanged.

    `later` must follow `earlier` (see `does_follow`), which must have no gaps; do not use it
    afterwards. Followers of `later` continue where they were.
    """
    if earlier.slo != later.slo:  # changed while `earlier` was filled
        earlier.set_slo(later.slo)
    # A history that began after a request ended has no lane for it.
    between = later.log.until(earlier.state.step, MAX_EVENTS, _ABORT)
    earlier.lanes.abort([each.request_id for each in between if each.request_id is not None])
    later.ring.prepend(earlier.ring)
    later.columns.prepend(earlier.columns)
    later.lanes.prepend(earlier.lanes)
    later.latencies = later.latencies.after(earlier.latencies)
    later.log.prepend(earlier.log)
    later.state.pauses = later.state.pauses.joined(earlier.state.pauses)
    later.gaps.prepend(earlier.gaps)
    later.wall_clock.prepend(earlier.wall_clock)
    later.knob_changes[:0] = earlier.knob_changes
    later.knob_steps |= earlier.knob_steps
    later.transcripts = earlier.transcripts  # they belong to the first step, which has changed
