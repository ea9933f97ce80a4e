"""`StepWatcher`: publishes a step while it runs, if it takes long.

A record is published when its step has ended, so without the watcher a step that hangs would look
like an engine that is silent. The watcher's own thread looks at the running step a few times a
second; for this the engine's thread only keeps a reference to that step.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from stepscope.engine.protocol.wire import Phase, PrefillPart, StepInFlight

LOOK_S = 0.25
LONG_NS = 1_000_000_000  # a step that takes longer is published
MAX_PREFILLS = 32  # prefill chunks in one message


class RunningRow(NamedTuple):
    """One request in a running step."""

    request_id: int
    phase: int  # Phase
    start: int
    num_tokens: int


class StepUnderWay(NamedTuple):
    """A step that the engine's thread launches or waits for."""

    step: int
    since_ns: int
    rows: Sequence[RunningRow]
    token_budget: int | None

    def message(self, now_ns: int) -> StepInFlight:
        decodes = [row for row in self.rows if row.phase == Phase.DECODE]
        prefills = [row for row in self.rows if row.phase != Phase.DECODE]
        prefills.sort(key=lambda row: -row.num_tokens)
        return StepInFlight(
            step=self.step,
            since_ns=self.since_ns,
            time_ns=now_ns,
            num_prefill_tokens=sum(row.num_tokens for row in prefills),
            num_decode_tokens=sum(row.num_tokens for row in decodes),
            num_decodes=len(decodes),
            prefills=[
                PrefillPart(row.request_id, row.start, row.num_tokens)
                for row in prefills[:MAX_PREFILLS]
            ],
            token_budget=self.token_budget,
        )


class StepSource(Protocol):
    """The attribute of an engine that the watcher reads, from the watcher's thread."""

    @property
    def step_under_way(self) -> StepUnderWay | None: ...


class StepWatcher:
    """Publishes a `StepInFlight` while a step takes long. Its own thread calls `look`."""

    def __init__(
        self,
        source: StepSource,
        publish: Callable[[StepInFlight], None],
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._source = source
        self._publish = publish
        self._clock = clock
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="step watcher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def look(self) -> None:
        """Publish the running step if it takes long."""
        running, now_ns = self._source.step_under_way, self._clock()
        if running is not None and now_ns - running.since_ns >= LONG_NS:
            self._publish(running.message(now_ns))

    def _run(self) -> None:
        while not self._ended.wait(LOOK_S):
            self.look()
