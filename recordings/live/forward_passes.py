"""`ForwardPassSource`: the live source for an SGLang server that publishes its forward passes.

The format is that of `srt/observability/forward_pass_metrics.py` in SGLang 0.5.23. A message has
three frames: an empty topic, a counter (u64, big-endian) and a msgpack map. The counter counts sent
messages. So a message lost on the way leaves a gap in the counter. A message that SGLang dropped
before sending leaves no gap.

A step has only what SGLang publishes: totals and the time on the GPU. Everything else is None.
"""

import threading
import time
import uuid
from dataclasses import dataclass
from typing import Annotated

import msgspec
import zmq
from msgspec import Meta, Struct

from stepscope.engine.protocol.knobs import WrongValue
from stepscope.engine.protocol.wire import EngineInfo, EngineStatus, StepRecord, Totals, sequence_of
from stepscope.engine.transport.sockets import client_socket
from stepscope.recordings.history.history import History
from stepscope.recordings.history.source import FrameTap, Numbered, SourceStatus

PREFIX = "sglang+"  # before the ZeroMQ address, on a command line
VERSION = 1
_POLL_MS = 100
_STALE_S = 3.0  # SGLang sends a heartbeat every second while it is idle
_MAX_BYTES = 64 * 1024
_QUEUE = 10_000  # messages waiting in the socket


class RequestTotals(Struct, frozen=True):
    """Totals over the requests in the forward pass, or over those that wait."""

    num_prefill_requests: int = 0
    sum_prefill_tokens: int = 0
    num_decode_requests: int = 0


class ForwardPass(Struct, frozen=True):
    """One message of SGLang's stream: a forward pass, or a heartbeat while no pass runs.

    `wall_time` is the time on the GPU in seconds, 0 in a heartbeat.
    """

    version: int = VERSION
    worker_id: str = ""
    dp_rank: int = 0
    wall_time: Annotated[float, Meta(ge=0, lt=3600)] = 0.0
    scheduled_requests: RequestTotals = RequestTotals()
    queued_requests: RequestTotals = RequestTotals()


@dataclass(frozen=True, slots=True)
class ForwardPassAddress:
    """The address of SGLang's stream: `sglang+ipc:///tmp/fpm.0` or `sglang+tcp://HOST:PORT`.

    `control`: as typed on a command line; `name`: its last part, for lists.
    """

    socket: str

    @property
    def control(self) -> str:
        return PREFIX + self.socket

    @property
    def name(self) -> str:
        return self.socket.rpartition("/")[2]

    @classmethod
    def parse(cls, text: str) -> "ForwardPassAddress":
        """Parse an address, with or without `sglang+`. Raises WrongValue: `text` is none."""
        socket = text.strip().removeprefix(PREFIX)
        scheme, _, rest = socket.partition("://")
        if scheme not in ("ipc", "tcp") or not rest:
            said = f"{text!r} is not sglang+ipc://PATH or sglang+tcp://HOST:PORT"
            raise WrongValue("bad_endpoint", said)
        return cls(socket)


_decoder = msgspec.msgpack.Decoder(ForwardPass)


def decode(payload: bytes) -> ForwardPass:
    """Decode a message. Raises msgspec.DecodeError if it is not of the known version."""
    found = _decoder.decode(payload)
    if found.version != VERSION:
        said = f"forward-pass metrics of version {found.version}, not {VERSION}"
        raise msgspec.ValidationError(f"{said}: a newer stepscope may read them")
    return found


class ForwardPassSource:
    """Fills `history` from SGLang's stream; implements `Source`."""

    is_live = True

    def __init__(self, address: ForwardPassAddress, history: History) -> None:
        self.address = address
        self.name = address.name
        self.history = history
        self.tap = FrameTap()
        self.num_bad = 0
        self._bad: str | None = None
        self._messages = Numbered(self.history, self.tap)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="forward passes", daemon=True)
        self._heard_s: float | None = None
        self._counter = -1  # of the last message
        self._step = -1
        self._last_ns = 0

    @property
    def status(self) -> SourceStatus:
        if self._heard_s is None:
            return "connecting"
        return "live" if time.monotonic() - self._heard_s < _STALE_S else "stale"

    @property
    def error(self) -> str | None:
        if self.status == "live":
            return self._bad
        return self._bad or f"nothing comes from {self.address.socket}"

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        with client_socket(zmq.SUB, None) as socket:
            socket.rcvhwm = _QUEUE
            socket.setsockopt(zmq.MAXMSGSIZE, _MAX_BYTES)
            socket.connect(self.address.socket)
            socket.subscribe(b"")
            while not self._stopping.is_set():
                if socket.poll(_POLL_MS):
                    self._apply(socket.recv_multipart(), time.monotonic_ns())

    def _apply(self, frames: list[bytes], now_ns: int) -> None:
        try:
            _, number, payload = frames
            counter, passed = sequence_of(number), decode(payload)
        except (ValueError, msgspec.DecodeError) as error:
            self.num_bad += 1
            self._bad = f"{self.num_bad:,} messages could not be read, the last one: {error}"
            return
        if counter <= self._counter or self._heard_s is None:
            self._begin(passed, now_ns)
        elif counter > self._counter + 1:
            self._messages.lose(counter - self._counter - 1)
        self._counter, self._heard_s = counter, time.monotonic()
        scheduled, queued = passed.scheduled_requests, passed.queued_requests
        num_running = scheduled.num_prefill_requests + scheduled.num_decode_requests
        num_waiting = max(0, queued.num_prefill_requests + queued.num_decode_requests)
        if not num_running:
            self._messages.publish(
                EngineStatus(
                    time_ns=now_ns,
                    state="idle",
                    step=self._step,
                    num_running=0,
                    num_waiting=num_waiting,
                )
            )
        else:
            self._step += 1
            device_ns = round(passed.wall_time * 1e9)
            # SGLang reports how long the pass took on the GPU, but not when it ran: so it ended
            # when its message came, and did not begin before the last one did. Running requests
            # outside the pass are unknown.
            self._messages.publish(
                StepRecord(
                    step=self._step,
                    schedule_start_ns=min(now_ns, max(self._last_ns, now_ns - device_ns)),
                    tokens_ns=now_ns,
                    device_ns=device_ns,
                    num_prefill_tokens=scheduled.sum_prefill_tokens,
                    num_decode_tokens=scheduled.num_decode_requests,
                    num_running=num_running,
                    num_waiting=num_waiting,
                    totals=Totals(is_load_known=False),
                )
            )
        self._last_ns = now_ns

    def _begin(self, passed: ForwardPass, now_ns: int) -> None:
        """Begin a new session for an SGLang process that has started: its step counter is at 0."""
        self._step, self._last_ns = -1, 0
        self._messages.begin(
            EngineInfo(
                engine_id=uuid.uuid4().hex,
                name=self.name,
                software_version="",
                model=passed.worker_id,
                engine="sglang",
                data_parallel_rank=passed.dp_rank,
                monotonic_ns=now_ns,
                wall_ns=time.time_ns(),
            )
        )
