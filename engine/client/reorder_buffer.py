"""`ReorderBuffer`: holds messages of one engine that arrived while earlier ones are missing.

A subscriber that missed messages asks the engine to send them again. This class decides how many to
ask for, and which messages can be processed after an answer. A question costs the engine more than
the messages in its answer, so one question covers all gaps.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from stepscope.engine.protocol.replies import Replayed, ReplayedFrame
from stepscope.engine.protocol.wire import Telemetry


class Received(NamedTuple):
    """A message from the subscription, not from an answer. `message`: None for an unknown kind."""

    sequence: int
    topic: bytes
    payload: bytes
    message: Telemetry | None


Settled: TypeAlias = Received | ReplayedFrame


class ReorderBuffer:
    """Held messages, in the order of their sequence numbers. Use it from one thread."""

    def __init__(self) -> None:
        self._messages: deque[Received] = deque()

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def oldest(self) -> int:
        """Sequence number of the oldest held message. The buffer must not be empty."""
        return self._messages[0].sequence

    @property
    def newest(self) -> int:
        return self._messages[-1].sequence

    def add(self, received: Received) -> None:
        """Hold a message. Ignored if a message with the same or a later number is already held."""
        if not self._messages or received.sequence > self.newest:
            self._messages.append(received)

    def pop(self) -> Received:
        """Remove and return the oldest held message."""
        return self._messages.popleft()

    def clear(self) -> None:
        self._messages.clear()

    def num_to_ask(self, first: int, end: int, limit: int) -> int:
        """Return how many messages to ask for, to cover all gaps before `end` (exclusive)."""
        end = min(end, first + limit)
        last_end = expected = first
        for sequence in (received.sequence for received in self._messages):
            if sequence > expected:
                last_end = min(sequence, end)
            if sequence >= end:
                return last_end - first
            expected = max(expected, sequence + 1)
        return (end if expected < end else last_end) - first

    def settle(
        self, first: int, num_asked: int, end: int, answer: Replayed | None
    ) -> tuple[Sequence[Settled], int]:
        """Process the engine's answer to a question for missing messages.

        Args:
            end: end (exclusive) of the wanted messages. The answer may reach farther.
            answer: None if there is no answer and nothing more will be asked.

        Returns the messages that can now be processed, in order, and a sequence number. Messages
        before this number that are not among the returned ones will never arrive.
        """
        if answer is None:
            return self._pop_before(end), end
        frames = [frame for frame in answer.frames if first <= frame.sequence < end]
        reach = frames[-1].sequence + 1 if frames else first + num_asked
        reach = max(reach, answer.oldest_sequence)
        if reach >= answer.next_sequence or reach > end:
            reach = end
        settled: list[Settled] = []
        for frame in frames:
            settled += self._pop_before(frame.sequence)
            if self._messages and self.oldest == frame.sequence:
                settled.append(self.pop())
            else:
                settled.append(frame)
        return settled + self._pop_before(reach), reach

    def _pop_before(self, end: int) -> list[Settled]:
        popped: list[Settled] = []
        while self._messages and self.oldest < end:
            popped.append(self.pop())
        return popped
