"""Sends the requests of a workload when they are due.

`LoadGenerator` sends them to an engine over its control socket, as a client would. It measures
latencies as a client sees them, by the client's clock. It uses one thread and one socket: nothing
else may use its `ControlClient` while it runs. `WorkloadDriver` sends an engine its own workload,
from a thread in the engine.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from stepscope.engine.client.client import ControlClient, EngineSilent, EngineUnreachable
from stepscope.engine.protocol.commands import Abort, Submit
from stepscope.engine.protocol.replies import AnyReply, Error, Output, Submitted
from stepscope.engine.protocol.workload_spec import WorkloadSpec
from stepscope.engine.transport.local_engines import is_refused
from stepscope.engine.workload.arrivals import Arrival, PromptWriter, synthetic

PATIENCE_S = 30.0  # how long an engine may be silent: its process or machine may be suspended

_TICK_S = 0.2  # how often to report progress and check for a stop
_SILENCE_S = 2.0  # after this long without a message, ask whether the engine is still there
_ALIVE_S = 2.5  # wait for that answer; an engine answers at once, whatever it is computing
_ASK_AGAIN_S = 0.5  # ask again after this, because a lost connection may have lost the answer
_ABORT_WAIT_S = 3.0


@dataclass(slots=True)
class SentRequest:
    """A request that has finished. Times in seconds, by the client's clock."""

    ttft_s: float
    worst_itl_s: float  # 0 if only one message came
    e2e_s: float  # from sending it to its last token
    num_output_tokens: int

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; None with fewer than two tokens."""
        if self.num_output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.num_output_tokens - 1)


@dataclass(slots=True)
class LoadReport:
    """Requests and replies so far. Times in seconds, by the client's clock."""

    num_sent: int = 0
    num_cut: int = 0  # of these, cut because they were too long for the model
    num_finished: int = 0
    num_aborted: int = 0
    errors: Counter[str] = field(default_factory=Counter)  # number of each error message
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens of finished requests found in the prefix cache
    num_finished_prompt_tokens: int = 0
    num_output_tokens: int = 0
    finished: list[SentRequest] = field(default_factory=list)
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
class _OpenRequest:
    sent_s: float
    request_id: int | None = None  # known once the engine has accepted it
    first_token_s: float | None = None
    last_token_s: float | None = None
    worst_itl_s: float = 0.0


@dataclass(eq=False)
class LoadGenerator:
    """Sends each arrival when it is due, and reads the replies."""

    client: ControlClient
    arrivals: Iterator[Arrival]
    max_concurrency: int | None = None
    seconds: float | None = None  # stop sending then, and wait for the open ones; None: send all
    on_progress: Callable[[LoadReport], None] = lambda report: None
    # Called as often; True ends the run (`abort` then ends the open requests).
    wants_stop: Callable[[], bool] = lambda: False
    report: LoadReport = field(default_factory=LoadReport)
    _open: dict[int, _OpenRequest] = field(default_factory=dict)  # by command id
    _heard_s: float = 0.0  # when the engine last sent anything

    def run(self) -> LoadReport:
        """Send and receive until all requests have ended, or `wants_stop`, or EngineUnreachable."""
        engine_id = self.client.info().engine_id
        start_s = self._heard_s = time.perf_counter()
        # Delays by `max_concurrency` move all later arrivals, too, so that no burst follows.
        put_off_s = 0.0
        most = self.max_concurrency
        upcoming = next(self.arrivals, None)
        next_tick_s = start_s
        while upcoming is not None or self._open:
            now_s = time.perf_counter()
            self.report.duration_s = now_s - start_s
            if now_s >= next_tick_s:
                next_tick_s = now_s + _TICK_S
                self.on_progress(self.report)
                if self.wants_stop():
                    break
                self._check_alive(now_s, engine_id)
            if self.seconds is not None and now_s - start_s >= self.seconds:
                upcoming = None
            wait_s = next_tick_s - now_s
            if upcoming is not None:
                due_s = start_s + put_off_s + upcoming.offset_s
                if now_s < due_s:
                    wait_s = min(wait_s, due_s - now_s)
                elif most is None or len(self._open) < most:
                    if most is not None:
                        put_off_s += now_s - due_s
                    self._send(upcoming)
                    upcoming = next(self.arrivals, None)
                    wait_s = 0.0
            self._receive(wait_s)
        self.report.duration_s = time.perf_counter() - start_s
        return self.report

    def abort(self) -> LoadReport:
        """Abort all open requests, and wait a moment for the engine to confirm."""
        listed: set[int] = set()
        deadline_s = time.perf_counter() + _ABORT_WAIT_S
        while self._open and time.perf_counter() < deadline_s:
            for each in self._open.values():
                if each.request_id is not None and each.request_id not in listed:
                    listed.add(each.request_id)
                    self.client.send(Abort(request_id=each.request_id, who="load"))
            self._receive(0.05)
        return self.report

    def _send(self, arrival: Arrival) -> None:
        command_id = self.client.send(arrival.submit())
        self._open[command_id] = _OpenRequest(sent_s=time.perf_counter())
        self.report.num_sent += 1
        self.report.num_cut += arrival.is_cut

    def _receive(self, timeout_s: float) -> None:
        received = self.client.receive(timeout_s)
        while received is not None:
            self._heard_s = time.perf_counter()
            self._apply(*received)
            received = self.client.receive(0.0)

    def _apply(self, command_id: int, reply: AnyReply) -> None:
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
                    request.first_token_s = self._heard_s
                    report.ttft_s.append(self._heard_s - request.sent_s)
                else:
                    itl_s = self._heard_s - request.last_token_s
                    request.worst_itl_s = max(request.worst_itl_s, itl_s)
                    report.itl_s.append(itl_s)
                request.last_token_s = self._heard_s
                report.num_output_tokens += len(reply.token_ids)
            if reply.finish_reason is not None:
                if reply.finish_reason == "abort":
                    report.num_aborted += 1
                else:
                    report.num_finished += 1
                    self._note_finished(request, reply)
                del self._open[command_id]

    def _note_finished(self, request: _OpenRequest, last: Output) -> None:
        report = self.report
        report.num_cached_tokens += last.num_cached_tokens
        report.num_finished_prompt_tokens += last.num_prompt_tokens
        if request.first_token_s is None or request.last_token_s is None:
            return
        report.finished.append(
            SentRequest(
                request.first_token_s - request.sent_s,
                request.worst_itl_s,
                request.last_token_s - request.sent_s,
                last.num_output_tokens,
            )
        )

    def _check_alive(self, now_s: float, engine_id: str) -> None:
        """If the engine has been silent, ask whether it is alive. Raises EngineUnreachable if not.

        A paused engine sends nothing for a long time, but answers the question. One that does not
        answer, but is not known to be gone, is suspended or cut off: it has `PATIENCE_S`.
        """
        client = self.client
        if not self._open or now_s - self._heard_s < _SILENCE_S:
            return
        try:
            info = client.info(_ASK_AGAIN_S, _ALIVE_S)
        except EngineSilent:
            silent_s = time.perf_counter() - self._heard_s
            if is_refused(client.endpoint):
                what = "is gone: nothing listens there any more"
            elif silent_s >= PATIENCE_S:
                what = f"has answered nothing for {silent_s:.0f} s"
            else:
                return
        else:
            self._heard_s = time.perf_counter()
            if info.engine_id == engine_id:
                return
            what = "was restarted"
        where, num_lost = client.endpoint.control, len(self._open)
        raise EngineUnreachable(f"the engine at {where} {what}; {num_lost} requests are lost")


_RECHECK_S = 0.05  # how often a delayed arrival checks whether there is room


class _WorkloadRun(NamedTuple):
    spec: WorkloadSpec
    stopped: threading.Event


@dataclass(eq=False)
class WorkloadDriver:
    """Starts, replaces and stops a synthetic mix of requests."""

    submit: Callable[[Submit], None]  # queues one without waiting; called on the driver's thread
    chars_per_token: float
    max_model_len: int
    num_unfinished: Callable[[], int]  # the engine's unfinished requests, for `max_concurrency`
    speed: float = 1.0  # seconds of the engine's time for each second of real time
    _run: _WorkloadRun | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)  # held while one is submitted
    _writer: PromptWriter | None = None

    @property
    def spec(self) -> WorkloadSpec | None:
        """The mix that runs; None if none was started, or it has ended."""
        run = self._run
        return None if run is None or run.stopped.is_set() else run.spec

    def set(self, spec: WorkloadSpec | None) -> None:
        """Stop the current mix and start `spec`, if any. The old mix submits nothing after this."""
        with self._lock:
            if self._run is not None:
                self._run.stopped.set()
            self._run = None if spec is None else _WorkloadRun(spec, threading.Event())
        if self._run is not None:
            threading.Thread(
                target=self._arrive, args=(self._run,), name="workload", daemon=True
            ).start()

    def _arrive(self, run: _WorkloadRun) -> None:
        if self._writer is None:
            self._writer = PromptWriter(self.chars_per_token)
        start_s, most = time.monotonic(), run.spec.max_concurrency
        for arrival in synthetic(run.spec, self._writer, self.max_model_len):
            offset_s = arrival.offset_s / self.speed
            if run.stopped.wait(max(0.0, start_s + offset_s - time.monotonic())):
                return
            due_s = time.monotonic()
            while most is not None and self.num_unfinished() >= most:
                if run.stopped.wait(_RECHECK_S):
                    return
            # A delay moves all later arrivals, too, so that no burst follows.
            start_s += time.monotonic() - due_s
            with self._lock:
                if run.stopped.is_set():
                    return
                self.submit(arrival.submit())
        run.stopped.set()
