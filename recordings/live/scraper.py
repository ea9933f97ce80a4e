"""`Scraper`: the live source for a server of which only metrics are available.

Once a second, it makes a record of how much the server's counters have grown. Such a record covers
many steps or none; `EngineInfo.totals_every_s` marks a session of such records. What the counters
do not tell is None.
"""

import logging
import threading
import time
import uuid

from stepscope.engine.adapters.metrics.fetch import FetchError, MetricsAddress, reading_of
from stepscope.engine.adapters.metrics.reading import Reading, has_restarted, totals
from stepscope.engine.protocol.wire import EngineInfo, EngineStatus, StepRecord
from stepscope.recordings.history.history import History
from stepscope.recordings.history.source import FrameTap, Numbered, SourceStatus

log = logging.getLogger("stepscope.recordings")

EVERY_S = 1.0  # between two requests for metrics, but a timeout may take longer
_JOIN_S = 3.0  # a server may delay its answer; the thread is a daemon


class Scraper:
    """Fills `history` from a server's metrics; implements `Source`."""

    is_live = True

    def __init__(self, address: MetricsAddress, history: History) -> None:
        self.address = address
        self.name = address.name
        self.history = history
        self.tap = FrameTap()
        self.status: SourceStatus = "connecting"
        self.error: str | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scraper", daemon=True)
        self._last: Reading | None = None
        self._last_ns = 0
        self._step = -1
        self._messages = Numbered(self.history, self.tap)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        while not self._stopping.is_set():
            started_s = time.monotonic()
            try:
                reading = reading_of(self.address)
                self._apply(reading, time.monotonic_ns())
            except FetchError as error:
                self._note_down(str(error))
            except Exception as error:
                # This is a bug of ours, which must not lose the session on the screen.
                log.exception("the metrics of %s could not be taken", self.address.control)
                self._note_down(f"internal error, see the log: {error!r}")
            else:
                self.status, self.error = "live", None
            self._stopping.wait(max(0.0, EVERY_S - (time.monotonic() - started_s)))

    def _note_down(self, why: str) -> None:
        if self.status != "connecting":
            self.status = "down"
        self.error = why

    def _apply(self, now: Reading, now_ns: int) -> None:
        before = self._last
        if before is None or has_restarted(before, now):
            self._begin(now, now_ns)
        else:
            gained = totals(before, now)
            self._step += 1
            self._messages.publish(
                StepRecord(
                    step=self._step,
                    schedule_start_ns=self._last_ns,
                    tokens_ns=now_ns,
                    num_prefill_tokens=gained.num_prompt_tokens or 0,
                    num_decode_tokens=gained.num_output_tokens or 0,
                    num_running=now.num_running or 0,
                    num_waiting=now.num_waiting or 0,
                    waiting_reasons=now.waiting_reasons,
                    totals=gained,
                )
            )
        self._last, self._last_ns = now, now_ns
        self._messages.publish(
            EngineStatus(
                time_ns=now_ns,
                state="idle" if now.num_running == now.num_waiting == 0 else "running",
                step=self._step,
                num_running=now.num_running or 0,
                num_waiting=now.num_waiting or 0,
            )
        )

    def _begin(self, now: Reading, now_ns: int) -> None:
        """Begin a new session. What the counters had before it does not count."""
        info = EngineInfo(
            engine_id=uuid.uuid4().hex,
            name=self.name,
            software_version="",
            model=now.model,
            engine=now.engine,
            http_endpoint=self.address.server.partition("://")[2],
            monotonic_ns=now_ns,
            wall_ns=time.time_ns(),
            totals_every_s=EVERY_S,
        )
        self._step = -1
        self._messages.begin(info)
