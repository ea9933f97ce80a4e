"""All bytes that an attached vLLM published, collected by a subscriber."""

import threading
from collections.abc import Sequence
from typing import Any

import zmq

from stepscope.engine.protocol import wire


class Collector:
    """Reads a PUB socket on a thread until `stop`."""

    def __init__(self, telemetry: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.set_hwm(0)
        self._socket.subscribe(b"")
        self._socket.connect(telemetry)
        self.payloads: list[bytes] = []
        self.sequences: list[int] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.is_set():
            if self._socket.poll(100):
                _, sequence, payload = self._socket.recv_multipart()
                self.sequences.append(wire.sequence_of(sequence))
                self.payloads.append(payload)
        self._socket.close(0)

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def published(self) -> "Published":
        return Published([wire.decode(payload) for payload in list(self.payloads)])


class Published:
    """Decoded messages, by kind."""

    def __init__(self, messages: Sequence[Any]) -> None:
        self.infos = [each for each in messages if isinstance(each, wire.EngineInfo)]
        self.steps = [each for each in messages if isinstance(each, wire.StepRecord)]
        self.in_flight = [each for each in messages if isinstance(each, wire.StepInFlight)]
        self.audited = [each for each in messages if isinstance(each, wire.Audited)]
        self.statuses = [each for each in messages if isinstance(each, wire.EngineStatus)]
        self.events: list[wire.RequestEvent] = []
        for each in messages:
            if isinstance(each, wire.StepRecord | wire.EngineStatus):
                self.events += each.events
        self.names = {each.request_id: each.client_id for each in self.of(wire.Arrived)}
        self.ends = {each.request_id: each for each in self.of(wire.Finished)}
        self.cached: dict[int, int] = {}
        for admitted in self.of(wire.Admitted):
            self.cached.setdefault(admitted.request_id, admitted.num_cached_tokens)
        self.preempted = {each.request_id for each in self.of(wire.Preempted)}
        self.aborted = [each.request_id for each in self.of(wire.Aborted)]
        self.taken: dict[int, wire.TakenRow] = {}
        self.chunks: dict[int, list[tuple[int, int]]] = {}  # when they came, and had gone out
        for each in [*self.steps, *self.statuses]:
            for front in each.front or ():
                self.taken.update({row.request_id: row for row in front.taken})
                for request_id, came_ns, out_ns in front.chunks():
                    self.chunks.setdefault(request_id, []).append((came_ns, out_ns))
        self.num_row_tokens: dict[int, int] = {}
        for step in self.steps:
            for row in step.batch or ():
                tokens = self.num_row_tokens.get(row.request_id, 0)
                self.num_row_tokens[row.request_id] = tokens + row.num_tokens

    def of(self, kind: type[Any]) -> list[Any]:
        """Events of one kind, in order."""
        return [event for event in self.events if isinstance(event, kind)]

    def request_id(self, name: str) -> int | None:
        """Our id for the id that a client got; vLLM appends to the latter."""
        return next((ours for ours, each in self.names.items() if each.startswith(name)), None)
