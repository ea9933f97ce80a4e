"""`GapRecovery`: puts one engine's messages in sequence order and asks for missing ones.

It knows the number of the message that comes next. Messages with later numbers are buffered until
those before them have arrived or are lost. It begins with a snapshot: the current one, or an
earlier one that the engine keeps. It belongs to the thread of its `Subscriber`.
"""

import logging
import threading
import time
from collections.abc import Iterable

import msgspec

from stepscope.engine.client.client import CommandRefused, ControlClient, EngineUnreachable
from stepscope.engine.client.reorder_buffer import Received, ReorderBuffer
from stepscope.engine.protocol import wire
from stepscope.engine.protocol.commands import GetSnapshot, ReplayFrom
from stepscope.engine.protocol.replies import Error, Replayed, ReplayedFrame
from stepscope.engine.protocol.wire import Snapshot
from stepscope.recordings.history.history import History
from stepscope.recordings.history.source import FrameTap

log = logging.getLogger("stepscope.recordings")

ASK_TIMEOUT_S = 2.0
ASK_AGAIN_S = 0.4  # repeat a question then: the answer may be lost with a connection
LAST_ASK_S = 1.0  # total time to wait for answers after `stopping` is set
SNAPSHOT_REST_S = 0.25  # minimum time between two questions: each snapshot costs the engine time
SNAPSHOT_AGAIN_S = 4.0  # as ASK_AGAIN_S: snapshots are larger, and wait for a step to end
SNAPSHOT_TIMEOUT_S = 30.0
BUSY_S = 1.0  # after so long, the engine is assumed to be in a long step
MAX_CATCH_UP_S = 4.0  # most that earlier messages may delay live ones
NUM_TRIED = 100  # messages to fetch to measure the speed
MIN_PAST_S = 1.0  # do not ask for less than this
_POLL_S = 0.05
TOPICS = frozenset(wire.TOPICS.values())
_MAX_REPLAY = 2_000  # most messages per question ...
_MIN_REPLAY = 20  # ... and fewest, where answers come too late over a slow connection


class JoinAgain(Exception):  # noqa: N818 - a turn of the loop, not an error
    """Messages come from another engine than the joined one, so the subscriber must join again."""


class GapRecovery:
    """Appends messages to `history` and hands them to `tap`, without gaps where possible.

    Once `stopping` is set, missing messages are no longer waited for. `past_s`: seconds before the
    first join to ask for, as far as the engine keeps them.
    """

    def __init__(
        self, history: History, tap: FrameTap, stopping: threading.Event, past_s: float = 0.0
    ) -> None:
        self.num_bad = 0  # number of messages that could not be read
        self.bad: str | None = None  # the error of the last bad message; None without one
        self._history = history
        self._tap = tap
        self._stopping = stopping
        self._past_s = past_s
        self._ask_until_s: float | None = None  # once `stopping` is set
        self._next_snapshot_s = 0.0
        # Of the joined engine:
        self._engine_id = ""
        self._next_sequence = 0  # number of the message that comes next
        self._replay_limit = _MAX_REPLAY
        self._buffered = ReorderBuffer()
        self._pending: Snapshot | None = None  # a snapshot waiting for the messages before it

    def join(self, client: ControlClient, snapshot: Snapshot) -> None:
        """Begin to follow the engine from which `snapshot` came.

        If its id is the known one, ask for the messages missed since the last one received.
        """
        known = self._history.info
        is_new = known is None or known.engine_id != snapshot.info.engine_id
        self._pending = None
        if is_new:
            self.end()  # append the last messages of the engine before
        self._engine_id = snapshot.info.engine_id
        last_sequence, first = self._history.last_sequence, snapshot
        if is_new or last_sequence is None or last_sequence > snapshot.sequence:
            if known is None:
                past_s, stopping = self._past_s, self._stopping
                first = ask_for_earlier(client, snapshot, past_s, stopping) or snapshot
            if is_new and known is not None:
                self._history.append(snapshot.sequence, snapshot)
            else:  # the history is empty or contradicts this engine
                self._history.reset(first)
            self._send_on(first)
            if first is not snapshot:
                self._catch_up(client, first.sequence, snapshot)
            self._next_sequence = snapshot.sequence + 1
        else:
            self._catch_up(client, last_sequence, snapshot)
        self._buffered.clear()

    def _catch_up(self, client: ControlClient, last_sequence: int, snapshot: Snapshot) -> None:
        self._next_sequence = last_sequence + 1
        self._pending = snapshot
        self._recover(client, snapshot.sequence + 1)
        self._next_sequence = snapshot.sequence + 1
        self._settle()

    def receive(self, client: ControlClient, batch: Iterable[Received]) -> None:
        """Append live messages. Messages missing in the sequence are recovered first.

        Raises JoinAgain: another engine has replaced the joined one.
        """
        buffered = self._buffered
        for received in batch:
            if not buffered and received.sequence <= self._next_sequence:
                self._accept(*received)
            else:
                buffered.add(received)
        if buffered:
            try:
                self.check(client)
            except JoinAgain:
                buffered.clear()
                raise
            except (EngineUnreachable, CommandRefused):
                if not self._stopping.is_set():
                    raise
            self._recover(client, buffered.newest + 1)
        now_s = time.monotonic()
        if (
            self._history.needs_snapshot
            and self._pending is None
            and now_s >= self._next_snapshot_s
            and not self._stopping.is_set()
        ):
            self._next_snapshot_s = now_s + SNAPSHOT_REST_S
            self._set_right(client)

    def end(self) -> None:
        """Append all buffered messages. Messages missing in the sequence count as lost."""
        while self._buffered:
            self._accept(*self._buffered.pop())

    def is_of(self, engine_id: str) -> bool:
        return engine_id == self._engine_id

    def check(self, client: ControlClient) -> None:
        """Ask the engine for its id. Raises JoinAgain if it is not the joined engine."""
        if not self.is_of(client.info(ASK_AGAIN_S, self._timeout_s()).engine_id):
            raise JoinAgain

    def note_bad(self, error: Exception) -> None:
        self.num_bad += 1
        self.bad = f"{self.num_bad:,} messages could not be read, the last one: {error}"

    def snapshot(self, client: ControlClient) -> Snapshot:
        """Ask for a current snapshot. The engine takes it between two steps, so it may take long.

        If the engine is in a long step and the history has none of its messages yet, the newest
        snapshot that the engine keeps is returned, as the messages since then can be replayed.

        Raises:
            EngineUnreachable: no answer in time, or `stopping` was set.
            CommandRefused: the engine refused, or answered with something else.
        """
        info = client.info(ASK_AGAIN_S)  # this is quick and shows whether the engine answers at all
        known = self._history.info
        takes_kept = info.keeps_snapshots and (known is None or info.engine_id != known.engine_id)
        now_s = next_ask_s = time.monotonic()
        busy_s, deadline_s = now_s + BUSY_S, now_s + SNAPSHOT_TIMEOUT_S
        wanted: set[int] = set()
        while (now_s := time.monotonic()) < deadline_s and not self._stopping.is_set():
            if now_s >= next_ask_s:
                wanted.add(client.send(GetSnapshot()))
                next_ask_s = now_s + SNAPSHOT_AGAIN_S
            if takes_kept and now_s >= busy_s:
                takes_kept = False
                if (kept := client.kept_snapshot(0.0)) is not None:
                    return kept
            received = client.receive(_POLL_S)
            if received is None or received[0] not in wanted:
                continue
            reply = received[1]
            if isinstance(reply, Snapshot):
                return reply
            if isinstance(reply, Error):
                raise CommandRefused(reply.code, reply.message)
            raise _wrong_reply(client, reply)
        where = client.endpoint.control
        raise EngineUnreachable(f"{where} gave no snapshot within {SNAPSHOT_TIMEOUT_S:g} s")

    def _set_right(self, client: ControlClient) -> None:
        """Ask for a snapshot, to correct the session's state after messages were lost."""
        try:
            snapshot = self.snapshot(client)
        except EngineUnreachable:
            if self._stopping.is_set():
                return  # received messages must still be appended
            raise
        if not self.is_of(snapshot.info.engine_id):
            raise JoinAgain  # a new engine, with message numbers from 0
        self._pending = snapshot
        self._settle()

    def _recover(self, client: ControlClient, end: int) -> None:
        """Append messages up to `end` (exclusive). Those neither buffered nor replayed are lost."""
        buffered = self._buffered
        while True:
            while buffered and buffered.oldest <= self._next_sequence:
                self._accept(*buffered.pop())
            first = self._next_sequence
            num_missing = buffered.num_to_ask(first, end, self._replay_limit)
            if not num_missing:
                return
            answer = self._ask(client, first, num_missing)
            settled, reach = buffered.settle(first, num_missing, end, answer)
            for each in settled:
                if isinstance(each, Received):
                    self._accept(*each)
                else:
                    self._accept_late(each)
            self._next_sequence = max(self._next_sequence, reach)

    def _ask(self, client: ControlClient, sequence: int, limit: int) -> Replayed | None:
        """Ask the engine for missing messages; None if it replays none."""
        while self._timeout_s() != 0:
            try:
                return self._replay(client, sequence, limit)
            except CommandRefused as error:
                if error.code == "rate_limited" and not self._stopping.wait(ASK_AGAIN_S):
                    continue
                log.warning("%s replays nothing: %s", client.endpoint.control, error)
                return None
            except (EngineUnreachable, JoinAgain):
                if not self._stopping.is_set():
                    raise
                return None
        return None

    def _timeout_s(self) -> float | None:
        """How long to wait for an answer, in seconds; None: the client's default.

        Once `stopping` is set, what is left of `LAST_ASK_S` for all answers together.
        """
        if not self._stopping.is_set():
            return None
        now_s = time.monotonic()
        if self._ask_until_s is None:
            self._ask_until_s = now_s + LAST_ASK_S
        return max(0.0, self._ask_until_s - now_s)

    def _replay(self, client: ControlClient, sequence: int, limit: int) -> Replayed:
        command = ReplayFrom(sequence=sequence, limit=limit)
        try:
            # Few repeats: each answer may be megabytes over the same slow connection.
            reply = client.ask(command, self._timeout_s(), again_s=ASK_TIMEOUT_S / 2)
        except EngineUnreachable:
            self._replay_limit = max(_MIN_REPLAY, self._replay_limit // 4)
            raise
        self._replay_limit = min(_MAX_REPLAY, self._replay_limit * 2)
        if not isinstance(reply, Replayed):
            raise _wrong_reply(client, reply)
        # The reply does not name its engine, and a new one numbers messages from 0.
        self.check(client)
        return reply

    def _accept_late(self, frame: ReplayedFrame) -> None:
        """Append a message that was missing and has been replayed by the engine."""
        try:
            message = wire.decode(frame.payload) if frame.topic in TOPICS else None
        except msgspec.DecodeError as error:
            self.note_bad(error)
            return
        self._accept(frame.sequence, frame.topic, frame.payload, message)

    def _accept(
        self, sequence: int, topic: bytes, payload: bytes, message: wire.Telemetry | None
    ) -> None:
        """Append a message to the history and hand it to the tap, unless it is known already."""
        if sequence < self._next_sequence:
            return
        if self._pending is not None and sequence > self._pending.sequence:
            # The snapshot precedes this message. Messages missing before the snapshot are lost.
            self._next_sequence = self._pending.sequence + 1
            self._settle()
        if message is None:  # a kind of message of a newer engine, unknown here
            self._history.skip(sequence)
        else:
            try:
                self._history.append(sequence, message, payload)
            except msgspec.DecodeError as error:
                self.note_bad(error)
                return
            self._tap.send(topic, sequence, payload)
        self._next_sequence = sequence + 1
        self._settle()

    def _settle(self) -> None:
        """Append the pending snapshot once all messages before it were received or lost."""
        pending = self._pending
        if pending is None or self._next_sequence <= pending.sequence:
            return
        self._pending = None
        self._history.append(pending.sequence, pending)
        self._send_on(pending)

    def _send_on(self, snapshot: Snapshot) -> None:
        self._tap.send(snapshot.topic, snapshot.sequence, wire.encode(snapshot))


def ask_for_earlier(
    client: ControlClient, now: Snapshot, past_s: float, stopping: threading.Event
) -> Snapshot | None:
    """Ask for a snapshot from about `past_s` seconds before `now`, of the same engine.

    If replaying the messages since then would take too long, a later snapshot is asked for. Returns
    None if the engine keeps no such snapshot, `stopping` is set, or the connection is too slow:
    live messages matter more.
    """
    try:
        while now.info.keeps_snapshots and past_s >= MIN_PAST_S and not stopping.is_set():
            earlier = client.kept_snapshot(past_s)
            if earlier is None or earlier.info.engine_id != now.info.engine_id:
                return None
            num_messages = now.sequence - earlier.sequence
            if num_messages <= 0:
                return None
            # Fetch some of them, to estimate how long it takes to fetch all.
            start_s = time.monotonic()
            few = ReplayFrom(sequence=earlier.sequence + 1, limit=min(num_messages, NUM_TRIED))
            answer = client.ask(few)
            num_tried = len(answer.frames) if isinstance(answer, Replayed) else 0
            took_s = time.monotonic() - start_s
            if took_s * num_messages / max(1, num_tried) <= MAX_CATCH_UP_S:
                return earlier
            past_s /= 2
    except (EngineUnreachable, CommandRefused) as error:
        log.warning("%s gives no older steps: %s", client.endpoint.control, error)
    return None


def _wrong_reply(client: ControlClient, reply: object) -> CommandRefused:
    what = f"{client.endpoint.control} gave a wrong answer: {type(reply).__name__}"
    return CommandRefused("protocol", what)
