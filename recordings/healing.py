"""`Healing`: messages of one engine in the order of their numbers; what is missing is asked for.

It owns what has been taken into the history and what comes next. Belongs to the thread of its
`Subscriber`.
"""

import logging
import threading
import time

import msgspec

from stepscope.engine import wire
from stepscope.engine.client import CommandRefused, ControlClient, EngineUnreachable
from stepscope.engine.commands import Error, GetSnapshot, Replayed, ReplayFrom
from stepscope.engine.wire import Snapshot
from stepscope.recordings.history import History
from stepscope.recordings.source import FrameTap

log = logging.getLogger("stepscope.recordings")

ASK_TIMEOUT_S = 2.0
ASK_AGAIN_S = 0.4  # an answer may have been on a connection that was lost
SNAPSHOT_AGAIN_S = 4.0  # ... a snapshot is larger, and waits for the end of a step
SNAPSHOT_TIMEOUT_S = 30.0
TOPICS = frozenset(wire.TOPICS.values())
_POLL_S = 0.05
_MAX_REPLAY = 2_000  # messages asked for at once, ...
_MIN_REPLAY = 20  # ... fewer where the way is so slow that the answer does not come in time
_KEYFRAME = wire.TOPICS[Snapshot]


class JoinAgain(Exception):  # noqa: N818 - a turn of the loop, not an error
    """What comes now is not what was joined."""


class Healing:
    """Takes what comes into `history` and hands it on to `tap`, without a gap where that can be.

    Attributes:
        num_healed: messages that were missing and came when asked for.
        num_bad: messages that could not be read.
        bad: what was wrong with the last of them, None without any.

    Args:
        history: to fill.
        tap: of the source.
        stopping: set when what has not come yet is not to be waited for any more.
    """

    def __init__(self, history: History, tap: FrameTap, stopping: threading.Event) -> None:
        self.num_healed = 0
        self.num_bad = 0
        self.bad: str | None = None
        self._history = history
        self._tap = tap
        self._stopping = stopping
        # Of the engine that is joined:
        self._engine_id = ""
        self._next_sequence = 0  # the one that continues the history
        self._replay_limit = _MAX_REPLAY
        self._pending: Snapshot | None = None  # until the messages before it have come

    def join(self, client: ControlClient, snapshot: Snapshot) -> None:
        """Begin with what an engine is like; what came since the last time is asked for."""
        info = snapshot.info
        known = self._history.info
        self._engine_id = info.engine_id
        self._pending = None
        last_sequence = self._history.last_sequence
        if last_sequence is None:
            last_sequence = -1
        is_new = known is None or known.engine_id != info.engine_id
        if is_new or last_sequence > snapshot.sequence:
            if is_new and known is not None:
                self._history.append(snapshot.sequence, snapshot)
            else:  # nothing was known, or what was known cannot be of this engine
                self._history.reset(snapshot)
            self._send_on(snapshot)
            self._next_sequence = snapshot.sequence + 1
        else:
            self._next_sequence = last_sequence + 1
            self._pending = snapshot
            self._heal(client, snapshot.sequence + 1)
            self._next_sequence = snapshot.sequence + 1
            self._settle()

    def take(
        self,
        client: ControlClient,
        topic: bytes,
        sequence: int,
        message: wire.Telemetry | None,
        payload: bytes,
    ) -> None:
        """A message that came by itself, after those that are missing before it.

        Raises:
            JoinAgain: another engine has taken the place of the one that was joined.
        """
        if sequence > self._next_sequence:
            self.check(client)
            self._heal(client, sequence)
        self._accept(topic, sequence, message, payload)
        if self._history.needs_snapshot and self._pending is None:
            snapshot = self.snapshot(client)
            if snapshot.info.engine_id != self._engine_id:
                raise JoinAgain  # it came while we asked, and counts anew
            self._pending = snapshot
            self._settle()

    def is_of(self, engine_id: str) -> bool:
        """Whether it is this engine that is joined."""
        return engine_id == self._engine_id

    def check(self, client: ControlClient) -> None:
        """Raises JoinAgain when it is another engine that answers by now."""
        if not self.is_of(client.info(ASK_AGAIN_S).engine_id):
            raise JoinAgain

    def note_bad(self, error: Exception) -> None:
        """A message could not be read."""
        self.num_bad += 1
        self.bad = f"{self.num_bad:,} messages could not be read, the last one: {error}"

    def snapshot(self, client: ControlClient) -> Snapshot:
        """Ask for a snapshot. It is taken between two steps, and a step may be long."""
        client.info(ASK_AGAIN_S)  # is quick, and tells whether there is anybody at all
        now_s = next_ask_s = time.monotonic()
        deadline_s = now_s + SNAPSHOT_TIMEOUT_S
        wanted: set[int] = set()
        while (now_s := time.monotonic()) < deadline_s and not self._stopping.is_set():
            if now_s >= next_ask_s:
                wanted.add(client.send(GetSnapshot()))
                next_ask_s = now_s + SNAPSHOT_AGAIN_S
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

    def _heal(self, client: ControlClient, end: int) -> None:
        """Ask for the messages from the next one up to, not including, `end`."""
        while self._next_sequence < end:
            if self._stopping.is_set():
                raise JoinAgain  # what has not come yet is not lost
            limit = min(self._replay_limit, end - self._next_sequence)
            try:
                replayed = self._replay(client, self._next_sequence, limit)
            except CommandRefused as error:
                if error.code == "rate_limited" and not self._stopping.wait(ASK_AGAIN_S):
                    continue
                log.warning("%s replays nothing: %s", client.endpoint.control, error)
                return
            before = self._next_sequence
            for frame in replayed.frames:
                if not self._next_sequence <= frame.sequence < end:
                    continue
                try:
                    known = frame.topic in TOPICS
                    message = wire.decode(frame.payload) if known else None
                except msgspec.DecodeError as error:
                    self.note_bad(error)
                    continue
                self.num_healed += 1
                self._accept(frame.topic, frame.sequence, message, frame.payload)
            if self._next_sequence == before:
                return  # it does not have them any more

    def _replay(self, client: ControlClient, sequence: int, limit: int) -> Replayed:
        command = ReplayFrom(sequence=sequence, limit=limit)
        try:
            # Not again and again: each answer may be megabytes, on the same slow way.
            reply = client.ask(command, again_s=ASK_TIMEOUT_S / 2)
        except EngineUnreachable:
            self._replay_limit = max(_MIN_REPLAY, self._replay_limit // 4)
            raise
        self._replay_limit = min(_MAX_REPLAY, self._replay_limit * 2)
        if not isinstance(reply, Replayed):
            raise CommandRefused(
                "protocol",
                f"{client.endpoint.control} answered with {type(reply).__name__}, not Replayed",
            )
        # It does not say of which engine: one that has come meanwhile counts anew.
        self.check(client)
        return reply

    def _accept(
        self, topic: bytes, sequence: int, message: wire.Telemetry | None, payload: bytes
    ) -> None:
        """Make a message part of the history, unless it is already."""
        if sequence < self._next_sequence:
            return
        if message is None:  # of a newer engine: a kind that we do not know
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
        """Take over a snapshot that was asked for after a loss, at its place in the sequence."""
        pending = self._pending
        if pending is None or self._next_sequence <= pending.sequence:
            return
        self._pending = None
        self._history.append(pending.sequence, pending)
        self._send_on(pending)

    def _send_on(self, snapshot: Snapshot) -> None:
        self._tap.send(_KEYFRAME, snapshot.sequence, wire.encode(snapshot))
