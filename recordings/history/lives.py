"""`LifeKeeper`: explains the waits of requests for their tokens, from the steps in memory.

It explains single waits, or all waits of one request (its "life"). It follows the life of one
request as steps come in, and caches explained waits. It decodes outside the timeline's lock, on
payloads that never change.
"""

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import RequestView, Snapshot, StepRecord, Transcript
from stepscope.recordings.attribution.baseline import MemoryBaseline
from stepscope.recordings.attribution.causes import Late, Piece, known_apart
from stepscope.recordings.attribution.explain import Explainer
from stepscope.recordings.attribution.late_sweep import LateSweep, LateWait
from stepscope.recordings.history.step_cache import StepCache
from stepscope.recordings.history.timeline import Timeline
from stepscope.recordings.state.session import SessionState
from stepscope.recordings.state.transcripts import KnownText, TranscriptReader

MAX_LIFE_STEPS = 8192  # steps to go back in search of an arrival
_MAX_KNOWN = 512
_BATCH = 256  # messages taken out of the ring at a time
_SWEEP_COST = 2  # cost of reading a step for all requests, relative to one request
_NAMED = ("max_itl_request_id", "max_ttft_request_id")


class Life(NamedTuple):
    """The explained waits of a request, from its arrival to the requested step.

    It begins with the oldest known step if the arrival is not in memory. It may reach further than
    requested if an earlier call requested a later step.
    """

    request_id: int
    waits: tuple[Late, ...]  # one wait for each token, in order
    pieces: tuple[Piece, ...]  # all time up to its last token, in order, not merged
    text: KnownText | None = None  # prompt and output; None if the engine does not publish them


@dataclass(slots=True)
class _LifeFollower:
    """An `Explainer` that follows one request, and the number of the next message to feed it."""

    request_id: int
    explainer: Explainer
    next_number: int
    transcript: TranscriptReader
    life: Life | None = None


class LifeKeeper:
    def __init__(
        self,
        lock: "threading.RLock",
        timeline: Timeline,
        cache: StepCache,
        baseline: MemoryBaseline,
    ) -> None:
        self._lock = lock
        self._timeline = timeline
        self._cache = cache
        self._known: OrderedDict[tuple[int, int], Late | None] = OrderedDict()
        self._follower: _LifeFollower | None = None
        self._sweep: LateSweep | None = None
        self._baseline = baseline
        self._own_lock = threading.Lock()  # held while decoding, unlike `lock`

    def is_known(self, step: int, request_id: int) -> bool:
        return (step, request_id) in self._known

    def wait(self, step: int, request_id: int) -> Late | None:
        with self._own_lock:
            self._refresh()
            key = step, request_id
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
            found = self._explain(step, request_id)
            self._keep(key, found)
            return found

    def explain(self, waits: Sequence[LateWait], max_steps: int) -> int | None:
        """Explain many waits in one pass over the steps, and cache the results for `wait`.

        Reads at most `max_steps` steps. Returns the step it reached; the next call continues there.
        Returns None if single calls of `wait` are cheaper.
        """
        with self._own_lock:
            self._refresh()
            waits = [each for each in waits if each[:2] not in self._known]
            if not waits:
                return None
            first_ns = min(each.start_ns for each in waits)
            last_step = max(each.step for each in waits)
            with self._lock:
                columns = self._timeline.columns
                num_alone = sum(1 + columns.num_between(each.start_ns, each.step) for each in waits)
                num_anew = columns.num_between(first_ns, last_step)
                oldest = columns.steps[0] if columns.steps else last_step
            num_on = None
            if self._sweep is not None and self._sweep.step >= oldest:
                first_step = min(each.step for each in waits)
                num_on = self._sweep.num_steps_for(first_ns, first_step, last_step)
            num_steps = num_anew if num_on is None else min(num_on, num_anew)
            if _SWEEP_COST * num_steps > num_alone:
                return None
            if num_on is None or num_on > num_anew:
                self._sweep = self._begin_sweep(first_ns)
            sweep = self._sweep
            if sweep is None:
                return None
            last_step = min(last_step, sweep.step + max_steps)
            self._keep_explained(sweep.go_on(last_step, self._feed), {each[:2] for each in waits})
            return last_step

    def _refresh(self) -> None:
        """Drop all explanations if another baseline holds, or one from twice as many steps."""
        if self._baseline.refresh():
            self._known.clear()
            self._sweep = self._follower = None

    def _begin_sweep(self, start_ns: int) -> LateSweep | None:
        begun = self._state_before(start_ns)
        if begun is None:
            return None
        state, number = begun
        slo = self._timeline.slo
        bounds_ns = slo.itl_ms * 1e6, slo.ttft_ms * 1e6
        return LateSweep(self._explainer(*bounds_ns, None, state), state, number)

    def _keep_explained(self, found: Sequence[Late], wanted: Set[tuple[int, int]]) -> None:
        """Cache the wanted waits, and the newest of the others, which may be requested next.

        More would displace waits that other calls have cached.
        """
        with self._lock:
            columns = self._timeline.columns
            named = {}
            for step in {late.step for late in found}:
                if (index := columns.index(step)) is not None:
                    named[step] = [columns.column(name)[index] for name in _NAMED]
        named_late = [late for late in found if late.request_id in named.get(late.step, ())]
        keys = [(late.step, late.request_id) for late in named_late]
        for number, (key, late) in enumerate(zip(keys, named_late, strict=True)):
            if key in wanted or len(named_late) - number <= _MAX_KNOWN // 2:
                pieces = self._known_apart(late.pieces)
                self._keep(key, late._replace(pieces=pieces))

    def _keep(self, key: tuple[int, int], found: Late | None) -> None:
        self._known[key] = found
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)

    def life(self, view: RequestView, last: int | None = None) -> Life | None:
        """All waits for tokens of a request, from its arrival to its end or to step `last`.

        `last` is None for the newest step. A repeated call for the same request reads only newer
        steps. Returns None if memory holds no step.
        """
        with self._own_lock:
            self._refresh()
            follower = self._follower
            if follower is None or follower.request_id != view.request_id:
                start_ns = 0 if view.is_partial else view.arrival_ns
                begun = self._begin(view.request_id, start_ns, last)
                if begun is None:
                    return None
                reader = TranscriptReader(view.request_id, self._transcript_of(view.request_id))
                follower = self._follower = _LifeFollower(view.request_id, *begun, reader)
            number = follower.next_number
            follower.next_number = self._feed(follower.explainer, number, last, follower.transcript)
            if follower.life is None or number != follower.next_number:
                explainer = follower.explainer
                follower.life = Life(
                    view.request_id,
                    tuple(
                        late._replace(pieces=self._known_apart(late.pieces))
                        for late in explainer.late
                    ),
                    self._known_apart(explainer.waits.life),
                    follower.transcript.known_text(),
                )
            return follower.life

    def _explain(self, step: int, request_id: int) -> Late | None:
        with self._lock:
            steps = self._timeline.columns.steps
            index = self._timeline.columns.index(step)
            before = None if not index else steps[index - 1]
            known_ns = None if index is None else self._known_start(index, request_id)
        if index is None:
            return None
        start_ns = known_ns or 0
        if before is not None and known_ns is None:
            view = self._cache.state_at(before).requests.get(request_id)
            if view is None:  # it arrived later
                view = self._cache.state_at(step).requests.get(request_id)
                start_ns = 0 if view is None else view.arrival_ns
            else:
                start_ns = view.arrival_ns if view.last_token_ns is None else view.last_token_ns
        begun = self._begin(request_id, start_ns, step)
        if begun is None:
            return None
        explainer, number = begun
        self._feed(explainer, number, step)
        late = explainer.late
        if not late or late[-1].step != step:
            return None
        return late[-1]._replace(pieces=self._known_apart(late[-1].pieces))

    def _begin(
        self, request_id: int, start_ns: int, last_step: int | None
    ) -> tuple[Explainer, int] | None:
        with self._lock:
            steps = self._timeline.columns.steps
            end = len(steps) if last_step is None else bisect_right(steps, last_step)
        begun = self._state_before(start_ns, end - MAX_LIFE_STEPS)
        if begun is None:
            return None
        state, number = begun
        return self._explainer(-1, -1, request_id, state), number

    def _explainer(
        self, itl_bound_ns: float, ttft_bound_ns: float, only: int | None, state: SessionState
    ) -> Explainer:
        return Explainer(
            itl_bound_ns,
            ttft_bound_ns,
            only,
            state,
            with_begun=True,
            baseline=self._baseline,
            after_slow=self._baseline.was_slow(state.step),
        )

    # From memory

    def _state_before(self, time_ns: int, earliest: int = -1) -> tuple[SessionState, int] | None:
        """The state after the last step before a time, and the number of the next message.

        `earliest`: index of the first step that may be used; -1: the state before all steps.
        """
        with self._lock:
            timeline = self._timeline
            steps = timeline.columns.steps
            if not steps:
                return None
            index = max(timeline.columns.index_at(time_ns), min(earliest, len(steps) - 1))
            found = timeline.ring.locate(steps[index]) if index >= 0 else None
            if found is None:
                oldest = timeline.ring.segments[0]
                keyframe, number = oldest.keyframe, oldest.first_number
            else:
                segment, place = found
                number = segment.first_number + place + 1
        state = keyframe.restore() if found is None else self._cache.state_at(steps[index])
        return state, number

    def _feed(
        self,
        explainer: Explainer,
        number: int,
        last: int | None,
        transcript: TranscriptReader | None = None,
    ) -> int:
        """Feed an explainer the messages from `number` on, up to the record of `last` (None: all).

        Returns the number of the next message.
        """
        while True:
            with self._lock:
                payloads = self._timeline.ring.payloads_from(number, _BATCH)
                gap_steps = self._timeline.gaps.steps
            if not payloads:
                return number
            for payload in payloads:
                if explainer.waits.has_ended:
                    return number
                message = wire.decode(payload)
                if isinstance(message, StepRecord):
                    if last is not None and message.step > last:
                        return number
                    explainer.take(message, message.step in gap_steps)
                else:
                    # A snapshot is kept only if messages before it are missing.
                    explainer.take(message, isinstance(message, Snapshot))
                if transcript is not None:
                    transcript.take(message)
                number += 1

    def _known_start(self, index: int, request_id: int) -> int | None:
        """When a request's wait began, if it is the longest ITL or TTFT of a step; else None.

        Also None after any pause by an operator, because the lengths in the columns leave pauses
        out. The caller holds the lock.
        """
        columns = self._timeline.columns
        end_ns = columns.tokens_ns[index]
        if self._timeline.state.pauses.within(0, end_ns):
            return None
        for kind in ("itl", "ttft"):
            if columns.column(f"max_{kind}_request_id")[index] == request_id:
                return end_ns - columns.column(f"max_{kind}_ns")[index]
        return None

    def _known_apart(self, pieces: Iterable[Piece]) -> tuple[Piece, ...]:
        with self._lock:
            starts_ns = self._timeline.columns.column("schedule_start_ns")
            begin_ns = starts_ns[0] if starts_ns else 0
        return known_apart(pieces, begin_ns, "forgotten")

    def _transcript_of(self, request_id: int) -> Transcript | None:
        """The text of a request in the timeline's first snapshot; None if that has none."""
        with self._lock:
            return self._timeline.transcripts.get(request_id)
