"""`Healing`: messages of one engine in the order of their numbers; what is missing is asked for.

It owns what has been taken into the history, what comes next, and what has come and waits for what
is missing before it. Belongs to the thread of its `Subscriber`.
"""

import logging
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import msgspec

from stepscope.engine.client.client import ControlClient
from stepscope.engine.client.errors import CommandRefused, EngineUnreachable
from stepscope.engine.client.reorder_buffer import Received, ReorderBuffer
from stepscope.engine.protocol import wire
from stepscope.engine.protocol.commands import Replayed, ReplayedFrame, ReplayFrom
from stepscope.engine.protocol.wire import Snapshot
from stepscope.recordings.history.history import History
from stepscope.recordings.history.source import FrameTap
from stepscope.recordings.live.snapshot_asking import ASK_AGAIN_S, ask_for_earlier, ask_for_snapshot

log = logging.getLogger("stepscope.recordings")

ASK_TIMEOUT_S = 2.0
SNAPSHOT_REST_S = 0.25  # between two that are asked for: each costs the engine something
LAST_ASK_S = 1.0  # that answers are waited for, all together, when it is to stop
TOPICS = frozenset(wire.TOPICS.values())
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
        past_s: how much of what was before the first join is asked for, as far as it is kept.
    """

    def __init__(
        self, history: History, tap: FrameTap, stopping: threading.Event, past_s: float = 0.0
    ) -> None:
        self.num_healed = 0
        self.num_bad = 0
        self.bad: str | None = None
        self._history = history
        self._tap = tap
        self._stopping = stopping
        self._past_s = past_s
        self._last_ask_s = LAST_ASK_S  # left of it
        self._next_snapshot_s = 0.0
        # Of the engine that is joined:
        self._engine_id = ""
        self._next_sequence = 0  # the one that continues the history
        self._replay_limit = _MAX_REPLAY
        self._held = ReorderBuffer()
        self._pending: Snapshot | None = None  # until the messages before it have come

    def join(self, client: ControlClient, snapshot: Snapshot) -> None:
        """Begin with what an engine is like; what came since the last time is asked for."""
        info = snapshot.info
        known = self._history.info
        is_new = known is None or known.engine_id != info.engine_id
        self._pending = None
        if is_new:
            self.end()  # with the one before
        self._engine_id = info.engine_id
        last_sequence = self._history.last_sequence
        if last_sequence is None:
            last_sequence = -1
        if is_new or last_sequence > snapshot.sequence:
            earlier = None
            if known is None:
                earlier = ask_for_earlier(client, snapshot, self._past_s, self._stopping)
            if is_new and known is not None:
                self._history.append(snapshot.sequence, snapshot)
            else:  # nothing was known, or what was known cannot be of this engine
                self._history.reset(earlier or snapshot)
            self._send_on(earlier or snapshot)
            if earlier is not None:
                num_healed = self.num_healed
                try:
                    self._catch_up(client, earlier.sequence, snapshot)
                finally:
                    self.num_healed = num_healed  # nobody has missed what was before
            self._next_sequence = snapshot.sequence + 1
        else:
            self._catch_up(client, last_sequence, snapshot)
        self._held.clear()

    def _catch_up(self, client: ControlClient, last_sequence: int, snapshot: Snapshot) -> None:
        """Go on from a message up to what the engine is like now."""
        self._next_sequence = last_sequence + 1
        self._pending = snapshot
        self._heal(client, snapshot.sequence + 1)
        self._next_sequence = snapshot.sequence + 1
        self._settle()

    def take(self, client: ControlClient, batch: Iterable[Received]) -> None:
        """Messages that came by themselves, each after those that are missing before it.

        Raises:
            JoinAgain: another engine has taken the place of the one that was joined.
        """
        held = self._held
        for received in batch:
            if not held and received.sequence <= self._next_sequence:
                self._accept(*received)
            else:
                held.add(received)
        if held:
            self._check_held(client)
            self._heal(client, held.newest + 1)
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
        """Take what is held; what is missing before it is lost."""
        while self._held:
            self._accept(*self._held.pop())

    def is_of(self, engine_id: str) -> bool:
        """Whether it is this engine that is joined."""
        return engine_id == self._engine_id

    def check(self, client: ControlClient) -> None:
        """Raises JoinAgain when it is another engine that answers by now."""
        with self._asking() as timeout_s:
            info = client.info(ASK_AGAIN_S, timeout_s)
        if not self.is_of(info.engine_id):
            raise JoinAgain

    def note_bad(self, error: Exception) -> None:
        """A message could not be read."""
        self.num_bad += 1
        self.bad = f"{self.num_bad:,} messages could not be read, the last one: {error}"

    def snapshot(self, client: ControlClient) -> Snapshot:
        """What the engine is like now; see `ask_for_snapshot`."""
        return ask_for_snapshot(client, self._stopping)

    def _check_held(self, client: ControlClient) -> None:
        """Raises JoinAgain, and holds nothing, when it may be of another engine by now."""
        try:
            self.check(client)
        except JoinAgain:
            self._held.clear()
            raise
        except (EngineUnreachable, CommandRefused):
            if not self._stopping.is_set():
                raise

    def _set_right(self, client: ControlClient) -> None:
        """Ask for what the state is, after a loss."""
        try:
            snapshot = self.snapshot(client)
        except EngineUnreachable:
            if self._stopping.is_set():
                return  # what has come meanwhile is still to be taken
            raise
        if not self.is_of(snapshot.info.engine_id):
            raise JoinAgain  # it came while we asked, and counts anew
        self._pending = snapshot
        self._settle()

    def _heal(self, client: ControlClient, end: int) -> None:
        """Go on up to, not including, `end`; what is neither held nor to be had is lost."""
        held = self._held
        while True:
            while held and held.oldest <= self._next_sequence:
                self._accept(*held.pop())
            first = self._next_sequence
            num_missing = held.num_to_ask(first, end, self._replay_limit)
            if not num_missing:
                return
            answer = self._ask(client, first, num_missing)
            settled, reach = held.settle(first, num_missing, end, answer)
            for each in settled:
                if isinstance(each, Received):
                    self._accept(*each)
                else:
                    self._accept_late(each)
            self._next_sequence = max(self._next_sequence, reach)

    def _ask(self, client: ControlClient, sequence: int, limit: int) -> Replayed | None:
        """What the engine has of them, None when it gives nothing."""
        while self._last_ask_s > 0:
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

    @contextmanager
    def _asking(self) -> Iterator[float | None]:
        """Gives how long an answer may take, None: as long as usual."""
        if not self._stopping.is_set():
            yield None
            return
        start_s = time.monotonic()
        try:
            yield self._last_ask_s
        finally:
            self._last_ask_s = max(0.0, self._last_ask_s - (time.monotonic() - start_s))

    def _replay(self, client: ControlClient, sequence: int, limit: int) -> Replayed:
        command = ReplayFrom(sequence=sequence, limit=limit)
        try:
            # Not again and again: each answer may be megabytes, on the same slow way.
            with self._asking() as timeout_s:
                reply = client.ask(command, timeout_s, again_s=ASK_TIMEOUT_S / 2)
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

    def _accept_late(self, frame: ReplayedFrame) -> None:
        """A message that was missing."""
        try:
            message = wire.decode(frame.payload) if frame.topic in TOPICS else None
        except msgspec.DecodeError as error:
            self.note_bad(error)
            return
        self.num_healed += 1
        self._accept(frame.sequence, frame.topic, frame.payload, message)

    def _accept(
        self, sequence: int, topic: bytes, payload: bytes, message: wire.Telemetry | None
    ) -> None:
        """Make a message part of the history, unless it is already."""
        if sequence < self._next_sequence:
            return
        if self._pending is not None and sequence > self._pending.sequence:
            # What is missing before it is lost, and it is older than this message.
            self._next_sequence = self._pending.sequence + 1
            self._settle()
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
