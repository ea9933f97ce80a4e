"""`Backfill`: fetches steps older than those in memory, as far as the engine still keeps them.

It asks the engine for one of the snapshots that the engine keeps. From there it fills a separate
history with messages, up to the oldest message in the history in memory. When the separate history
is complete, it is put in front of the history in memory, which does not change until then.
Functions and recorders that follow the history in memory do not get the fetched messages.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Literal, TypeAlias

import msgspec

from stepscope.engine.client.client import (
    CommandRefused,
    ControlClient,
    EngineGone,
    EngineUnreachable,
)
from stepscope.engine.protocol import wire
from stepscope.engine.protocol.commands import MAX_PAST_S, GetSnapshot, ReplayFrom
from stepscope.engine.protocol.replies import Error, Replayed
from stepscope.engine.protocol.wire import Snapshot
from stepscope.recordings.history.history import History
from stepscope.recordings.history.ring.ring import SEGMENT_STEPS

log = logging.getLogger("stepscope.recordings")

ASK_AGAIN_S = 0.4  # repeat a question then: the answer may be lost with a connection
SNAPSHOT_AGAIN_S = 4.0  # the same for snapshots, which are larger and wait for a step to end
SNAPSHOT_TIMEOUT_S = 30.0
BUSY_S = 1.0  # after so long, the engine is assumed to be in a long step
MAX_CATCH_UP_S = 4.0  # most that earlier messages may delay live ones
NUM_TRIED = 100  # messages to fetch to measure the speed
MIN_PAST_S = 1.0  # do not ask for less than this
_POLL_S = 0.05


def ask_for_snapshot(
    client: ControlClient, stopping: threading.Event, known_id: str | None = None
) -> Snapshot:
    """Ask for a current snapshot. The engine takes it between two steps, so the call may take long.

    If the engine is in a long step and the caller has none of its messages yet, the newest snapshot
    that the engine keeps is returned instead, because the messages since then can be replayed.

    `known_id`: id of the engine whose messages the caller already has.

    Raises:
        EngineUnreachable: no answer in time, or `stopping` was set.
        CommandRefused: the engine refused, or answered with something else.
    """
    info = client.info(ASK_AGAIN_S)  # this is quick and shows whether the engine answers at all
    takes_kept = info.keeps_snapshots and info.engine_id != known_id
    now_s = next_ask_s = time.monotonic()
    busy_s = now_s + BUSY_S
    deadline_s = now_s + SNAPSHOT_TIMEOUT_S
    wanted: set[int] = set()
    while (now_s := time.monotonic()) < deadline_s and not stopping.is_set():
        if now_s >= next_ask_s:
            wanted.add(client.send(GetSnapshot()))
            next_ask_s = now_s + SNAPSHOT_AGAIN_S
        if takes_kept and now_s >= busy_s:
            takes_kept = False
            kept = client.kept_snapshot(0.0)
            if kept is not None:
                return kept
        received = client.receive(_POLL_S)
        if received is None or received[0] not in wanted:
            continue
        reply = received[1]
        if isinstance(reply, Snapshot):
            return reply
        if isinstance(reply, Error):
            raise CommandRefused(reply.code, reply.message)
        raise CommandRefused(
            "protocol",
            f"{client.endpoint.control} answered with {type(reply).__name__}, not a Snapshot",
        )
    raise EngineUnreachable(
        f"{client.endpoint.control} gave no snapshot within {SNAPSHOT_TIMEOUT_S:g} s"
    )


def ask_for_earlier(
    client: ControlClient, now: Snapshot, past_s: float, stopping: threading.Event
) -> Snapshot | None:
    """Ask for a snapshot from about `past_s` seconds before `now`, of the same engine.

    If replaying the messages since then would take too long, a later snapshot is asked for. Returns
    None if the engine keeps no such snapshot, `stopping` is set, or the connection is too slow:
    live messages matter more.
    """
    if not now.info.keeps_snapshots:
        return None
    try:
        return _ask_for_earlier(client, now, past_s, stopping)
    except (EngineUnreachable, CommandRefused) as error:
        log.warning("%s gives no older steps: %s", client.endpoint.control, error)
        return None


def _ask_for_earlier(
    client: ControlClient, now: Snapshot, past_s: float, stopping: threading.Event
) -> Snapshot | None:
    while past_s >= MIN_PAST_S and not stopping.is_set():
        earlier = client.kept_snapshot(past_s)
        if earlier is None or earlier.info.engine_id != now.info.engine_id:
            return None
        num_messages = now.sequence - earlier.sequence
        if num_messages <= 0:
            return None
        if catch_up_s(client, earlier.sequence + 1, num_messages) <= MAX_CATCH_UP_S:
            return earlier
        past_s /= 2
    return None


def catch_up_s(client: ControlClient, first: int, num_messages: int) -> float:
    """Estimate how many seconds it takes to fetch `num_messages`, by fetching some of them.

    Raises:
        EngineUnreachable: even these did not come in time.
        CommandRefused: the engine replays none.
    """
    start_s = time.monotonic()
    answer = client.ask(ReplayFrom(sequence=first, limit=min(num_messages, NUM_TRIED)))
    took_s = time.monotonic() - start_s
    num_tried = len(answer.frames) if isinstance(answer, Replayed) else 0
    return took_s * num_messages / max(1, num_tried)


MAX_FETCH_S = 30.0  # time limit for all of it; fetch less if it would take longer
_TURN = 500  # messages per question; live messages are received in between
_MIN_TURN = 20
_ANSWER_S = 1.0  # time limit for one answer: live messages wait for it
_MAX_FAILED = 3  # missing answers in a row before giving up
_MIN_ROOM_BYTES = 1024 * 1024
_TOO_SLOW = "the connection to the engine is too slow"
_TOPICS = frozenset(wire.TOPICS.values())

# In order: not asked for; being fetched; complete; not available.
BackfillState: TypeAlias = Literal["idle", "asking", "done", "failed"]


class _CannotBeHad(Exception):  # noqa: N818 - an answer to who asked, in words
    pass


class Backfill:
    """Fetches steps that are older than the oldest one in `history`.

    Belongs to the thread of its `Subscriber`. Any thread may call `ask` and read attributes.
    """

    def __init__(self, history: History) -> None:
        # Progress of the last backfill; stays `done` or `failed` until the next `ask`.
        self.state: BackfillState = "idle"
        self.note = ""  # why it failed, or a remark when it is done; "" for none
        self.num_steps = 0  # steps added by the last backfill
        self.share = 0.0  # share of the messages fetched so far, 0 to 1
        self._history = history
        self._lock = threading.Lock()
        # Of the backfill being fetched:
        self._older: History | None = None
        self._begin = 0  # number of the message it begins after
        self._why_no_more = ""  # why the engine has nothing earlier
        self._num_failed = 0
        self._turn = _TURN
        self._past_s = MAX_PAST_S  # seconds asked for
        self._next_s = 0.0

    @property
    def is_active(self) -> bool:
        return self.state == "asking"

    @property
    def is_due(self) -> bool:
        """Whether a backfill is under way and the engine may be asked for its next messages now."""
        return self.is_active and time.monotonic() >= self._next_s

    def ask(self) -> None:
        """Start a backfill of all that the engine keeps. Returns at once. From any thread."""
        with self._lock:
            if self.state == "asking":
                return
            self._older, self.share, self.note, self.num_steps = None, 0.0, "", 0
            self._num_failed, self._turn, self._past_s = 0, _TURN, MAX_PAST_S
            self.state = "asking"

    def give_up(self, why: str) -> None:
        """End the backfill under way, if any, as failed; `why` becomes its note."""
        if self.is_active:
            self._end("failed", why)

    def go_on(self, client: ControlClient, check: Callable[[], None]) -> None:
        """If a backfill is under way, ask the engine for its next part.

        `check`: asks which engine answers; raises `JoinAgain` if it is not the joined one.

        Raises JoinAgain: from `check`.
        """
        if not self.is_due:
            return
        try:
            if self._older is None:
                self._older = self._fitting(client)
            elif self._fill(client, self._older):
                check()  # answers do not name their engine
                self._put_in_front(self._older)
        except _CannotBeHad as error:
            self._end("failed", str(error))
        except msgspec.DecodeError as error:
            self._end("failed", f"a message could not be read: {error}")
        except CommandRefused as error:
            if error.code == "rate_limited":
                self._next_s = time.monotonic() + ASK_AGAIN_S
            else:
                self._end("failed", str(error))
        except EngineGone as error:
            self._end("failed", str(error))
        except EngineUnreachable:
            self._num_failed += 1
            self._turn = max(_MIN_TURN, self._turn // 4)
            if self._num_failed >= _MAX_FAILED:
                self._end("failed", "the engine does not answer in time")

    def _fitting(self, client: ControlClient) -> History | None:
        """Return an empty history that begins as early as engine, connection and memory allow.

        Returns None if the connection is too slow for so many messages. The next call then tries
        half the time span. While the call waits for an answer, the thread receives no live messages
        and cannot stop.
        """
        end, room_steps, room_bytes = self._end_of_it()
        history = self._history
        snapshot = self._kept(client, self._past_s)
        if snapshot.sequence >= end or self._past_s < MIN_PAST_S:
            is_slow = self._past_s < MAX_PAST_S
            raise _CannotBeHad(_TOO_SLOW if is_slow else self._why_none(snapshot))
        if catch_up_s(client, snapshot.sequence + 1, end - snapshot.sequence) > MAX_FETCH_S:
            past_s = (history.state.time_ns - snapshot.time_ns) / 1e9
            self._past_s = min(self._past_s, max(0.0, past_s)) / 2
            return None
        self._why_no_more = self._why_none(snapshot)
        older = History(history.slo, room_steps, room_bytes, history.known_since_ns)
        older.reset(snapshot)
        self._begin = snapshot.sequence
        return older

    def _kept(self, client: ControlClient, past_s: float) -> Snapshot:
        info = self._history.info
        if info is None or not info.keeps_snapshots:
            raise _CannotBeHad("the engine is of an older stepscope, and keeps no older steps")
        snapshot = client.kept_snapshot(past_s)
        if snapshot is None or snapshot.info.engine_id != info.engine_id:
            raise _CannotBeHad("the engine keeps no older steps")
        return snapshot

    def _end_of_it(self) -> tuple[int, int, int]:
        """Return (number of the last message to fetch, steps, bytes that memory has room for)."""
        end = self._history.begins_after
        if end is None:
            raise _CannotBeHad("messages were lost right before the oldest step")
        room_steps, room_bytes = self._history.room
        if room_steps < SEGMENT_STEPS or room_bytes < _MIN_ROOM_BYTES:
            raise _CannotBeHad(
                f"the memory is full ({self._history.num_steps:,} steps): "
                "older steps would be dropped at once"
            )
        return end, room_steps, room_bytes

    def _why_none(self, oldest: Snapshot) -> str:
        if oldest.step < 0:
            return "this is already the engine's first step"
        kept_s = (self._history.state.time_ns - oldest.time_ns) / 1e9
        return f"the engine keeps no more than its last {kept_s:,.0f} s"

    def _fill(self, client: ControlClient, older: History) -> bool:
        """Fetch the next messages into `older`. Returns whether these were the last ones."""
        end = self._end_of_it()[0]
        last = older.last_sequence
        first = begin = (self._begin if last is None else last) + 1
        if first <= end:
            answer = self._replay(client, first, min(self._turn, end + 1 - first))
            for frame in answer.frames:
                if frame.sequence != first:
                    break
                if frame.topic in _TOPICS:
                    older.append(first, frame.payload)
                else:  # a message kind of a newer engine
                    older.skip(first)
                first += 1
            if first == begin:
                raise _CannotBeHad("the engine no longer keeps these messages")
            self._num_failed = 0
            self._turn = min(_TURN, self._turn * 2)
        self.share = (first - 1 - self._begin) / max(1, end - self._begin)
        return first > end

    def _replay(self, client: ControlClient, sequence: int, limit: int) -> Replayed:
        reply = client.ask(ReplayFrom(sequence=sequence, limit=limit), _ANSWER_S)
        if not isinstance(reply, Replayed):
            raise CommandRefused("protocol", f"it sent {type(reply).__name__}, not Replayed")
        return reply

    def _put_in_front(self, older: History) -> None:
        num_before = self._history.num_steps
        is_cut = older.begins_after != self._begin
        if not self._history.prepend(older):
            raise _CannotBeHad("the fetched steps do not connect to those in memory")
        self.num_steps = self._history.num_steps - num_before
        if not self.num_steps:  # the earlier messages held no step
            raise _CannotBeHad(self._why_no_more)
        self._end("done", "memory is full" if is_cut else "")

    def _end(self, state: BackfillState, note: str) -> None:
        if state == "failed":
            log.warning("no older steps: %s", note)
        self._older = None
        self.note = note
        self.state = state
