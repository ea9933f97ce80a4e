"""What waits for the engine's thread: commands, and who is to be answered.

Any thread, and a signal handler too, may put something in; only the engine's thread takes it out,
in turn from each client, so that no client waits for all that another has sent. A `Turn` bounds
what it takes between two steps.
"""

import queue
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from stepscope.engine.protocol.asker import Asker
from stepscope.engine.protocol.commands import Command
from stepscope.engine.protocol.replies import Ack, AnyReply, Error
from stepscope.engine.text.stop_strings import StopText


class Client(Protocol):
    """The sender of a command. `reply` is called on the engine's thread and must not wait."""

    def reply(self, message: AnyReply) -> None: ...


class SilentClient:
    """A client that does not listen: the engine's own workload and signals."""

    def reply(self, message: AnyReply) -> None:
        return


@dataclass(slots=True)
class Call:
    """One command in the inbox.

    `asker` is None where the command itself says who asks. A `Submit` comes with its prompt as
    `token_ids` and, if it has stop strings, a `stop_text`; `arrival_ns` says when it was put here,
    for it may lie here as long as a step takes, or longer. None: it arrives when it is taken out.
    Calls of one client share a lane; they are taken in the order in which they came.
    """

    command: Command
    client: Client
    token_ids: list[int] | None = None
    stop_text: StopText | None = None
    prompt_text: str | None = None  # for telemetry, where prompts are published
    asker: Asker | None = None
    arrival_ns: int | None = None  # by the engine's clock
    lane: bytes = b""


@dataclass(slots=True)
class Refusal:
    """A `Submit` that never became a request, for the record."""

    client_id: str
    reason: str
    lane: bytes = b""


@dataclass(slots=True)
class Denial:
    """Commands that never got as far as the engine's thread, for the audit trail."""

    asker: Asker
    command: str  # name of its type; "" for several kinds
    code: str
    message: str
    count: int = 1
    lane: bytes = b""


@dataclass(slots=True)
class Departure:
    """The client of a request is gone: it ends."""

    request_id: int
    lane: bytes = b""


@dataclass(slots=True)
class Task:
    """Something that a thread of the engine's own process has to have done."""

    do: Callable[[], None]
    lane: bytes = b""


class Settled(NamedTuple):
    """The answer to a change that does not have to wait for the engine's thread."""

    answer: Ack | Error
    is_audited: bool


Item: TypeAlias = Call | Refusal | Denial | Departure | Task

_MAX_SORTED = 512  # items that are sorted into lanes in one go, however many have come
MIN_TURN_NS = 1_000_000
TURN_SHARE = 0.02  # of a step
MAX_ITEMS = 128  # of one turn


class Inbox:
    """A queue that is fair to clients. What the engine's own process puts in (lane "") is first."""

    def __init__(self) -> None:
        # The one part that several threads touch; a signal handler may interrupt even `put`.
        self._arrived: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._own: deque[Item] = deque()
        self._lanes: dict[bytes, deque[Item]] = {}  # none empty; the next one first
        self._num_sorted = 0

    def put(self, item: Item) -> None:
        self._arrived.put(item)

    def qsize(self) -> int:
        return self._arrived.qsize() + self._num_sorted

    def get_nowait(self) -> Item:
        """The next item. Raises queue.Empty."""
        self._sort_some()
        if self._own:
            self._num_sorted -= 1
            return self._own.popleft()
        if not self._lanes:
            raise queue.Empty
        lane = next(iter(self._lanes))
        items = self._lanes.pop(lane)
        item = items.popleft()
        self._num_sorted -= 1
        if items:
            self._lanes[lane] = items  # behind all others
        return item

    def has_own(self) -> bool:
        """Whether the next item is known to be one of the engine's own process."""
        self._sort_some()
        return bool(self._own)

    def get(self, timeout: float) -> Item:
        """The next item, for which it waits so many seconds at most. Raises queue.Empty."""
        if not self._num_sorted:
            self._sort(self._arrived.get(timeout=timeout))
        return self.get_nowait()

    def _sort_some(self) -> None:
        for _ in range(_MAX_SORTED):
            if self._arrived.empty():
                break
            self._sort(self._arrived.get_nowait())

    def _sort(self, item: Item) -> None:
        lane = self._lanes.setdefault(item.lane, deque()) if item.lane else self._own
        lane.append(item)
        self._num_sorted += 1


class Turn:
    """What the engine's thread may do for clients between two steps; later turns pay for more.

    At most `MAX_ITEMS`, and for as long as `MIN_TURN_NS` or `TURN_SHARE` of a step, whichever is
    more. One item may take longer than that: nothing is taken then until as much is saved.
    What the engine's own process asks for is bounded by neither. Where a clock stands still between
    two steps (a simulated one), only the number counts.

    Args:
        clock: nanoseconds, of the engine.
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._began_ns: int | None = None  # the last turn
        self._spent_ns = 0  # in this turn, and in those before it beyond what they had

    def take(self, inbox: Inbox, do: Callable[[Item], None]) -> None:
        """Do what waits in `inbox`, as far as there is time for it."""
        now_ns = self._clock()
        step_ns = 0 if self._began_ns is None else now_ns - self._began_ns
        self._began_ns = now_ns
        allowed_ns = max(MIN_TURN_NS, round(step_ns * TURN_SHARE))
        num_left = MAX_ITEMS
        while inbox.has_own() or (num_left and self._spent_ns < allowed_ns):
            try:
                item = inbox.get_nowait()
            except queue.Empty:
                break
            before_ns = now_ns
            do(item)
            now_ns = self._clock()
            if item.lane:
                num_left -= 1
                self._spent_ns += now_ns - before_ns
        self._spent_ns = max(0, self._spent_ns - allowed_ns)

    def excuse(self, waited_ns: int) -> None:
        """Of the item that is being done, so long went by waiting for the device."""
        self._spent_ns -= waited_ns
