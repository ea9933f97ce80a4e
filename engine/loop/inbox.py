"""`Inbox`: commands and other items that wait for the engine's thread.

Any thread may put an item in, and a signal handler too. Only the engine's thread takes items out.
It takes one item from each client in turn, so that no client waits for everything that another
client has sent. `CommandTime` bounds the work between two steps.

`WakingQueue` carries what the engine's thread has for a thread that waits at sockets.
"""

import contextlib
import os
import queue
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeAlias, TypeVar

from stepscope.engine.protocol.commands import Asker, Command
from stepscope.engine.protocol.replies import AnyReply
from stepscope.engine.text.text_stream import StopText


class Client(Protocol):
    """The sender of a command. `reply` is called on the engine's thread and must not wait."""

    def reply(self, message: AnyReply) -> None: ...


class SilentClient:
    """A client that ignores replies: the engine's own workload and signals."""

    def reply(self, message: AnyReply) -> None:
        return


@dataclass(slots=True)
class Call:
    """One command in the inbox."""

    command: Command
    client: Client
    token_ids: list[int] | None = None
    stop_text: StopText | None = None
    prompt_text: str | None = None  # for telemetry, where prompts are published
    asker: Asker | None = None  # who asks; None if the command's own `who` says that
    # When the command entered the inbox, where it may wait for a step or longer; None: it counts as
    # arrived when it is taken out.
    arrival_ns: int | None = None  # by the engine's clock
    # The queue of one client, whose calls are taken out in the order in which they came.
    lane: bytes = b""


@dataclass(slots=True)
class Refusal:
    """A `Submit` that never became a request; telemetry reports it as rejected."""

    client_id: str
    reason: str
    lane: bytes = b""


@dataclass(slots=True)
class Denial:
    """A command that was refused before it reached the engine's thread; for the audit trail."""

    asker: Asker
    command: str  # name of its type
    code: str
    message: str
    lane: bytes = b""


@dataclass(slots=True)
class Departure:
    """Asks to abort a request, because its client is gone."""

    request_id: int
    lane: bytes = b""


@dataclass(slots=True)
class Task:
    """Work that another thread of the engine's process wants done on the engine's thread."""

    do: Callable[[], None]
    lane: bytes = b""


Item: TypeAlias = Call | Refusal | Denial | Departure | Task

_T = TypeVar("_T")


class WakingQueue(Generic[_T]):
    """A queue: any thread adds, one takes. Readable `descriptor`: an item waits."""

    def __init__(self) -> None:
        self._waiting: deque[_T] = deque()
        self._is_woken = False  # True from a wake-up until the reader calls `awake`
        self.descriptor, self._write = os.pipe()
        for end in (self.descriptor, self._write):
            os.set_blocking(end, False)

    def post(self, item: _T) -> None:
        self._waiting.append(item)
        self.wake()

    def wake(self) -> None:
        # A step may post hundreds; only the first wakes the reader. The others are read with it,
        # because `awake` clears the flag before the reader looks.
        if not self._is_woken:
            self._is_woken = True
            os.write(self._write, b"\0")

    def awake(self) -> None:
        """Make `descriptor` unreadable until the next item. Call it before `take`."""
        with contextlib.suppress(BlockingIOError):  # nothing has woken the reader
            os.read(self.descriptor, 65536)
        self._is_woken = False

    def take(self) -> Iterator[_T]:
        """Yield the items that wait now, oldest first. A later one wakes the reader again."""
        for _ in range(len(self._waiting)):
            yield self._waiting.popleft()

    def close(self) -> None:
        self._is_woken = True  # so that no later post writes to a reused descriptor number
        os.close(self.descriptor)
        os.close(self._write)


_MAX_SORTED = 512  # items that are sorted into lanes at a time, at most
MIN_COMMAND_NS = 1_000_000
COMMAND_SHARE = 0.02  # of the time of a step
MAX_ITEMS = 128  # between two steps


class Inbox:
    """A queue that is fair to clients. Items of the engine's own process (lane "") come first."""

    def __init__(self) -> None:
        # The only part that several threads use. A SimpleQueue, because a signal handler may
        # interrupt `put`.
        self._arrived: queue.SimpleQueue[Item] = queue.SimpleQueue()
        # No lane is empty. The next to serve is "", else the first.
        self._lanes: dict[bytes, deque[Item]] = {}
        self._num_sorted = 0

    def put(self, item: Item) -> None:
        self._arrived.put(item)

    def qsize(self) -> int:
        return self._arrived.qsize() + self._num_sorted

    def get_nowait(self) -> Item:
        """Take out the next item. Raises queue.Empty if there is none."""
        is_own = self.has_own()
        if not self._lanes:
            raise queue.Empty
        lane = b"" if is_own else next(iter(self._lanes))
        items = self._lanes.pop(lane)
        item = items.popleft()
        self._num_sorted -= 1
        if items:
            self._lanes[lane] = items  # behind all others
        return item

    def has_own(self) -> bool:
        """Whether the next item comes from the engine's own process."""
        for _ in range(_MAX_SORTED):
            if self._arrived.empty():
                break
            self._sort(self._arrived.get_nowait())
        return b"" in self._lanes

    def get(self, timeout: float) -> Item:
        """Take out the next item. Waits `timeout` seconds at most, then raises queue.Empty."""
        if not self._num_sorted:
            self._sort(self._arrived.get(timeout=timeout))
        return self.get_nowait()

    def _sort(self, item: Item) -> None:
        self._lanes.setdefault(item.lane, deque()).append(item)
        self._num_sorted += 1


@dataclass(eq=False)
class CommandTime:
    """Bounds the time for clients' commands between two steps.

    At most `MAX_ITEMS` items are handled there, for at most `MIN_COMMAND_NS` or `COMMAND_SHARE` of
    a step, whichever is more. If one item takes longer, nothing is handled after the next steps
    until the time allowed there adds up to the excess. Items of the engine's own process are not
    bounded. If the clock stands still between two steps, as in a simulation, only the number of
    items counts.
    """

    clock: Callable[[], int]
    _began_ns: int | None = None  # when commands were handled last
    _spent_ns: int = 0  # now, plus what was overspent before

    def take(self, inbox: Inbox, do: Callable[[Item], None]) -> None:
        """Call `do` for the items in `inbox`, within the bounds."""
        now_ns = self.clock()
        step_ns = 0 if self._began_ns is None else now_ns - self._began_ns
        self._began_ns = now_ns
        allowed_ns = max(MIN_COMMAND_NS, round(step_ns * COMMAND_SHARE))
        num_left = MAX_ITEMS
        while inbox.has_own() or (num_left and self._spent_ns < allowed_ns):
            try:
                item = inbox.get_nowait()
            except queue.Empty:
                break
            before_ns = now_ns
            do(item)
            now_ns = self.clock()
            if item.lane:
                num_left -= 1
                self._spent_ns += now_ns - before_ns
        self._spent_ns = max(0, self._spent_ns - allowed_ns)

    def excuse(self, waited_ns: int) -> None:
        """Leave `waited_ns`, spent waiting for the device, out of the time of the current item."""
        self._spent_ns -= waited_ns
