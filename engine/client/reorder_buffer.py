"""`ReorderBuffer`: keeps messages of one engine that came before others that are missing.

Here is decided how much is asked for at once, and what an answer settles, for all who follow an
engine. A question costs the engine more than the messages it brings, so one is asked for all gaps
together.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from stepscope.engine.protocol.replies import Replayed, ReplayedFrame
from stepscope.engine.protocol.wire import Telemetry


class Received(NamedTuple):
    """A message that came by itself; `message` is None for a kind that we do not know."""

    sequence: int
    topic: bytes
    payload: bytes
    message: Telemetry | None


Settled: TypeAlias = Received | ReplayedFrame


class ReorderBuffer:
    """In the order of their numbers. Belongs to one thread."""

    def __init__(self) -> None:
        self._messages: deque[Received] = deque()

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def oldest(self) -> int:
        """Its number; there has to be one."""
        return self._messages[0].sequence

    @property
    def newest(self) -> int:
        return self._messages[-1].sequence

    def add(self, received: Received) -> None:
        """Hold a message, unless one of its number or a later one is held."""
        if not self._messages or received.sequence > self.newest:
            self._messages.append(received)

    def pop(self) -> Received:
        """The oldest one."""
        return self._messages.popleft()

    def clear(self) -> None:
        self._messages.clear()

    def num_to_ask(self, first: int, end: int, limit: int) -> int:
        """How many messages from `first` on have all that are missing before `end`, up to `limit`.

        0 when none is missing.
        """
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
        """What can be gone on with after an answer, and up to which number (not including) it is
        all there will ever be.

        Args:
            first, num_asked: what was asked for.
            end: of what is wanted; the answer may reach farther.
            answer: None: there is none, and nothing is asked for any more.
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
