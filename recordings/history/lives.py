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

from stepscope.engine.protocol.wire import RequestView
from stepscope.recordings.attribution.baseline import MemoryBaseline
from stepscope.recordings.attribution.causes import Late, Piece, known_apart
from stepscope.recordings.attribution.explain import Explainer
from stepscope.recordings.history.ring import StepCache
from stepscope.recordings.history.timeline import Follower, Timeline
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
    """An `Explainer` that follows one request, and the messages to feed it."""

    request_id: int
    explainer: Explainer
    messages: Follower
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
            explainer, messages = follower.explainer, follower.messages
            number = messages.number
            if not explainer.waits.has_ended:
                _feed(explainer, messages, last, follower.transcript)
            if follower.life is None or number != messages.number:
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
            columns = self._timeline.columns
            index = columns.index(step)
            before = columns.steps[index - 1] if index else None
        if index is None:
            return None
        start_ns = 0
        if before is not None:
            view = self._cache.state_at(before).requests.get(request_id)
            last_ns = None if view is None else view.last_token_ns
            if view is None:  # it arrived later
                view = self._cache.state_at(step).requests.get(request_id)
            if view is not None:
                start_ns = view.arrival_ns if last_ns is None else last_ns
        begun = self._begin(request_id, start_ns, step)
        if begun is None:
            return None
        explainer, messages = begun
        _feed(explainer, messages, step)
        late = explainer.late
        if not late or late[-1].step != step:
            return None
        return late[-1]._replace(pieces=self._known_apart(late[-1].pieces))

    def _begin(
        self, request_id: int, start_ns: int, last_step: int | None
    ) -> tuple[Explainer, Follower] | None:
        """An explainer of a request from a time on, and the messages from that time on."""
        with self._lock:
            columns = self._timeline.columns
            steps = columns.steps
            if not steps:
                return None
            end = len(steps) if last_step is None else bisect_right(steps, last_step)
            index = max(columns.index_at(start_ns), min(end - MAX_LIFE_STEPS, len(steps) - 1))
            first = steps[index] + 1 if index >= 0 else None
        messages = Follower(self._lock, self._timeline, self._cache, first)
        explainer = Explainer(
            *(-1, -1, request_id, messages.state),
            since_ns=0,
            baseline=self._baseline,
            after_slow=self._baseline.was_slow(messages.state.step),
        )
        return explainer, messages

    def _known_apart(self, pieces: Iterable[Piece]) -> tuple[Piece, ...]:
        with self._lock:
            starts_ns = self._timeline.columns.column("schedule_start_ns")
            begin_ns = starts_ns[0] if starts_ns else 0
        return known_apart(pieces, begin_ns, "forgotten")


def _feed(
    explainer: Explainer,
    messages: Follower,
    last: int | None,
    transcript: TranscriptReader | None = None,
) -> None:
    """Feed an explainer the next messages, up to the record of the step `last` (None: all)."""
    number = -1
    while number != messages.number:
        number = messages.number
        for message, after_gap, _, _ in messages.read(_BATCH, last):
            explainer.take(message, after_gap)
            if transcript is not None:
                transcript.take(message)
            if explainer.waits.has_ended:
                return
