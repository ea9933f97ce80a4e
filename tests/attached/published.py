"""All bytes that an attached vLLM published, collected by a subscriber."""

import threading
from collections import Counter, defaultdict
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
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.is_set():
            if self._socket.poll(100):
                self.payloads.append(self._socket.recv_multipart()[-1])
        self._socket.close(0)

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def published(self) -> "Published":
        return Published([wire.decode(payload) for payload in list(self.payloads)])


class Published:
    """Decoded messages, by kind."""

    def __init__(self, messages: Sequence[Any]) -> None:
        kinds = wire.EngineInfo, wire.StepRecord, wire.StepInFlight, wire.Audited, wire.EngineStatus
        self.infos, self.steps, self.in_flight, self.audited, self.statuses = (
            [each for each in messages if isinstance(each, kind)] for kind in kinds
        )
        self.events = [event for each in messages for event in getattr(each, "events", ())]
        self.names = {each.request_id: each.client_id for each in self.of(wire.Arrived)}
        self.ends = {each.request_id: each for each in self.of(wire.Finished)}
        # When each was first admitted.
        self.cached = {e.request_id: e.num_cached_tokens for e in self.of(wire.Admitted)[::-1]}
        self.preempted = {each.request_id for each in self.of(wire.Preempted)}
        self.aborted = [each.request_id for each in self.of(wire.Aborted)]
        self.taken: dict[int, wire.TakenRow] = {}
        # When they came, and had gone out.
        self.chunks: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for each in [*self.steps, *self.statuses]:
            for front in each.front or ():
                self.taken.update({row.request_id: row for row in front.taken})
                for request_id, came_ns, out_ns in front.chunks():
                    self.chunks[request_id].append((came_ns, out_ns))
        self.num_row_tokens: Counter[int] = Counter()
        for step in self.steps:
            for row in step.batch or ():
                self.num_row_tokens[row.request_id] += row.num_tokens

    def of(self, kind: type[Any]) -> list[Any]:
        """Events of one kind, in order."""
        return [event for event in self.events if isinstance(event, kind)]

    def request_id(self, name: str) -> int | None:
        """Our id for the id that a client got; vLLM appends to the latter."""
        return next((ours for ours, each in self.names.items() if each.startswith(name)), None)
