"""`LifeKeeper`: explains the waits of requests for their tokens, from the steps in memory.

It explains single waits, and caches them, or all waits of one request (its "life"), which it
follows as steps come in. It decodes outside the timeline's lock, on payloads that never change.
"""

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import RequestView, Snapshot, StepRecord
from stepscope.recordings.attribution.baseline import MemoryBaseline
from stepscope.recordings.attribution.causes import Late, Piece, known_apart
from stepscope.recordings.attribution.explain import Explainer
from stepscope.recordings.history.step_cache import StepCache
from stepscope.recordings.history.timeline import Timeline
from stepscope.recordings.state.transcripts import KnownText, TranscriptReader

MAX_LIFE_STEPS = 8192  # steps to go back in search of an arrival
_MAX_KNOWN = 512
_BATCH = 256  # messages taken out of the ring at a time


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
            found = self._known[key] = self._explain(step, request_id)
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
            return found

    def _refresh(self) -> None:
        """Drop all explanations if another baseline holds, or one from twice as many steps."""
        if self._baseline.refresh():
            self._known.clear()
            self._follower = None

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
                known = self._timeline.transcripts.get(view.request_id)
                reader = TranscriptReader(view.request_id, known)
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
        """An explainer of a request from a time on, and the number of its first message."""
        with self._lock:
            columns, ring = self._timeline.columns, self._timeline.ring
            steps = columns.steps
            if not steps:
                return None
            end = len(steps) if last_step is None else bisect_right(steps, last_step)
            index = max(columns.index_at(start_ns), min(end - MAX_LIFE_STEPS, len(steps) - 1))
            step = steps[index] if index >= 0 else -1
            found = ring.locate(step) if index >= 0 else None
            oldest = ring.segments[0]
            number = oldest.first_number if found is None else found[0].first_number + found[1] + 1
        state = oldest.keyframe.restore() if found is None else self._cache.state_at(step)
        after_slow, baseline = self._baseline.was_slow(state.step), self._baseline
        explainer = Explainer(
            *(-1, -1, request_id, state), with_begun=True, baseline=baseline, after_slow=after_slow
        )
        return explainer, number

    # From memory

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
