"""`ForwardPassSource`: the live source for an SGLang server that publishes its forward passes.

A step has only what SGLang publishes: totals and the time on the GPU. Everything else is None.
"""

import threading
import time
import uuid

import msgspec
import zmq

from stepscope.engine.adapters.sglang.forward_passes import (
    ForwardPass,
    ForwardPassAddress,
    decode,
    record_of,
)
from stepscope.engine.protocol.wire import EngineInfo, EngineStatus, sequence_of
from stepscope.engine.transport.sockets import client_socket
from stepscope.recordings.history.history import History
from stepscope.recordings.history.source import FrameTap, Numbered, SourceStatus

_POLL_MS = 100
_STALE_S = 3.0  # SGLang sends a heartbeat every second while it is idle
_MAX_BYTES = 64 * 1024
_QUEUE = 10_000  # messages waiting in the socket


class ForwardPassSource:
    """Fills `history` from SGLang's stream; implements `Source`."""

    is_live = True

    def __init__(self, address: ForwardPassAddress, history: History | None = None) -> None:
        self.address = address
        self.name = address.name
        self.history = history if history is not None else History()
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
        if passed.is_idle:
            self._messages.publish(
                EngineStatus(
                    time_ns=now_ns,
                    state="idle",
                    step=self._step,
                    num_running=0,
                    num_waiting=passed.num_waiting,
                )
            )
        else:
            self._step += 1
            self._messages.publish(record_of(passed, self._step, now_ns, self._last_ns))
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
