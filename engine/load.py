"""`LoadGenerator`: sends arrivals to an engine over its control socket, as a client would.

It owns nothing of the engine: what it measures is what a client sees, on the client's clock. One
thread and one socket; a `ControlClient` belongs to it for as long as it runs.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET, UnsetType

from stepscope.engine.client import ControlClient
from stepscope.engine.client_errors import EngineUnreachable
from stepscope.engine.commands import Abort, AnyReply, Error, Output, Submitted
from stepscope.engine.workload import Arrival

_TICK_S = 0.2  # how often the progress is told and the will to stop is asked for
_SILENCE_S = 2.0  # after so long without a word, ask whether the engine is still there, ...
_ALIVE_S = 2.5  # ... which it says at once, whatever it is computing
_ASK_AGAIN_S = 0.5  # an answer may have been on a connection that was lost
_ABORT_WAIT_S = 3.0


@dataclass(slots=True)
class LoadReport:
    """What has been sent and what has come back so far. Times in seconds, of the client."""

    num_sent: int = 0
    num_cut: int = 0  # of those, longer than the model can take
    num_finished: int = 0
    num_aborted: int = 0
    errors: Counter[str] = field(default_factory=Counter)  # message: how often
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)  # of every request with a first token
    itl_s: list[float] = field(default_factory=list)  # gaps between two messages of a request
    duration_s: float = 0.0

    @property
    def num_errors(self) -> int:
        return self.errors.total()

    @property
    def num_open(self) -> int:
        return self.num_sent - self.num_finished - self.num_aborted - self.num_errors


@dataclass(slots=True)
class _Open:
    """A request that has not ended."""

    sent_s: float
    request_id: int | None = None  # known once the engine has taken it
    last_token_s: float | None = None


class LoadGenerator:
    """Sends each arrival when it is due and reads what comes back.

    Args:
        client: a connection to the engine that answers.
        arrivals: in the order of their offsets.
        max_concurrency: requests under way at most; what comes later is put off.
        seconds: send for so long, then only wait for what is under way. None: to the last arrival.
        on_progress: told the report a few times a second.
        wants_stop: asked as often; True ends the run, and `abort` gives up what is under way.
    """

    def __init__(
        self,
        client: ControlClient,
        arrivals: Iterator[Arrival],
        *,
        max_concurrency: int | None = None,
        seconds: float | None = None,
        on_progress: Callable[[LoadReport], None] = lambda report: None,
        wants_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.report = LoadReport()
        self._client = client
        self._arrivals = arrivals
        self._max_concurrency = max_concurrency
        self._seconds = seconds
        self._on_progress = on_progress
        self._wants_stop = wants_stop
        self._open: dict[int, _Open] = {}  # by command id
        self._heard_s = 0.0
        self._bundles: bool | UnsetType = UNSET  # True: the engine knows them

    def run(self) -> LoadReport:
        """Send and receive until all is done or `wants_stop`.

        Raises:
            EngineUnreachable: it stopped answering; `report` holds what came until then.
        """
        info = self._client.info()
        engine_id, self._bundles = info.engine_id, info.bundles or UNSET
        start_s = self._heard_s = time.perf_counter()
        put_off_s = 0.0  # by `max_concurrency`: moves the rest along, so that no burst follows
        upcoming = next(self._arrivals, None)
        next_tick_s = start_s
        while upcoming is not None or self._open:
            now_s = time.perf_counter()
            self.report.duration_s = now_s - start_s
            if now_s >= next_tick_s:
                next_tick_s = now_s + _TICK_S
                self._on_progress(self.report)
                if self._wants_stop():
                    break
                self._check_alive(now_s, engine_id)
            if self._seconds is not None and now_s - start_s >= self._seconds:
                upcoming = None
            wait_s = next_tick_s - now_s
            if upcoming is not None:
                due_s = start_s + put_off_s + upcoming.offset_s
                if now_s < due_s:
                    wait_s = min(wait_s, due_s - now_s)
                elif self._max_concurrency is None or len(self._open) < self._max_concurrency:
                    if self._max_concurrency is not None:
                        put_off_s += now_s - due_s
                    self._send(upcoming)
                    upcoming = next(self._arrivals, None)
                    wait_s = 0.0
            self._receive(wait_s)
        self.report.duration_s = time.perf_counter() - start_s
        return self.report

    def abort(self) -> LoadReport:
        """Give up what is under way and wait a moment for the engine to say so."""
        told: set[int] = set()
        deadline_s = time.perf_counter() + _ABORT_WAIT_S
        while self._open and time.perf_counter() < deadline_s:
            for each in self._open.values():
                if each.request_id is not None and each.request_id not in told:
                    told.add(each.request_id)
                    self._client.send(Abort(request_id=each.request_id, who="load"))
            self._receive(0.05)
        return self.report

    def _send(self, arrival: Arrival) -> None:
        submit = msgspec.structs.replace(arrival.submit(), bundle=self._bundles)
        command_id = self._client.send(submit)
        self._open[command_id] = _Open(sent_s=time.perf_counter())
        self.report.num_sent += 1
        self.report.num_cut += arrival.is_cut

    def _receive(self, timeout_s: float) -> None:
        """Everything that is there, after waiting for the first of it."""
        received = self._client.receive(timeout_s)
        while received is not None:
            self._heard_s = time.perf_counter()
            self._take(*received)
            received = self._client.receive(0.0)

    def _take(self, command_id: int, reply: AnyReply) -> None:
        request = self._open.get(command_id)
        if request is None:
            return  # the answer to an Abort
        report = self.report
        if isinstance(reply, Error):
            report.errors[reply.message] += 1
            del self._open[command_id]
        elif isinstance(reply, Submitted):
            request.request_id = reply.request_id
            report.num_prompt_tokens += reply.num_prompt_tokens
        elif isinstance(reply, Output):
            if reply.token_ids:
                if request.last_token_s is None:
                    report.ttft_s.append(self._heard_s - request.sent_s)
                else:
                    report.itl_s.append(self._heard_s - request.last_token_s)
                request.last_token_s = self._heard_s
                report.num_output_tokens += len(reply.token_ids)
            if reply.finish_reason is not None:
                if reply.finish_reason == "abort":
                    report.num_aborted += 1
                else:
                    report.num_finished += 1
                del self._open[command_id]

    def _check_alive(self, now_s: float, engine_id: str) -> None:
        """A paused engine is silent for as long as it likes, a dead one must not be waited for."""
        if not self._open or now_s - self._heard_s < _SILENCE_S:
            return
        self._heard_s = now_s
        info = self._client.info(_ASK_AGAIN_S, _ALIVE_S)
        if info.engine_id != engine_id:
            raise EngineUnreachable(
                f"the engine at {self._client.endpoint.control} was started anew; "
                f"{len(self._open)} requests are lost"
            )


def percentile(samples: list[float], share: float) -> float | None:
    """The sample that `share` (0..1) of the samples do not exceed, None without samples."""
    if not samples:
        return None
    return sorted(samples)[max(0, math.ceil(share * len(samples)) - 1)]
