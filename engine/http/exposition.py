"""`Exposition`: all metrics as one text in the Prometheus format. `TelemetryFollower` fills them.

The follower first subscribes, then asks for a snapshot, and then reads: no message is lost between
them. One that never comes counts as lost: the queues between here and the engine hold minutes.
"""

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

import msgspec
import zmq
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from stepscope.engine.client.client import CommandRefused, EngineUnreachable
from stepscope.engine.http.engine_client import EngineClient, SocketReader
from stepscope.engine.http.metrics_reducer import EngineMetrics
from stepscope.engine.protocol import wire
from stepscope.engine.protocol.commands import GetSnapshot
from stepscope.engine.protocol.wire import Snapshot
from stepscope.engine.transport.sockets import client_socket

log = logging.getLogger("stepscope.http")

SNAPSHOT_S = 60.0
RETRY_S = 1.0
RECEIVE_QUEUE = 50_000
_TOPICS = frozenset(wire.TOPICS.values())

_ENGINE = "0"
_PATHS = (
    *("/v1/completions", "/v1/chat/completions", "/v1/models"),
    *("/health", "/metrics", "/version", "/reset_prefix_cache"),
)


class Exposition(Collector):
    """Exports all metrics as one text. `served_model_name` "": the engine's name for the model."""

    def __init__(
        self, metrics: EngineMetrics, served_model_name: str, others: Iterable[Collector] = ()
    ) -> None:
        self.is_engine_up = False
        self._num_in_flight = 0
        self._metrics = metrics
        self._served_model_name = served_model_name
        self._registry = CollectorRegistry(auto_describe=False)
        for each in (self, *others):
            self._registry.register(each)
        self._responses = Counter(
            "stepscope_http_responses",
            "HTTP responses; status 0 is a client that hung up before its response.",
            ("path", "status"),
            registry=None,
        )

    def count_request(self, path: str, status: int) -> None:
        """Count one HTTP response. Status 0: the client disconnected before the response began."""
        self._responses.labels(path if path in _PATHS else "other", status).inc()

    def write(self, num_in_flight: int) -> bytes:
        self._num_in_flight = num_in_flight
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        metrics = self._metrics
        info = metrics.info
        # Without telemetry, zeros would wrongly mean that there is no load.
        if info is None or info.publishes:
            model = self._served_model_name or (info.model if info is not None else "")
            families = chain(self._gauges(), metrics.meters.registry.collect())
            yield from _labelled(families, {"model_name": model, "engine": _ENGINE})
        if info is not None:
            config = {
                "block_size": str(info.block_size),
                "num_gpu_blocks": str(info.num_blocks),
                "cache_dtype": str(info.dtype),
                "enable_prefix_caching": str(metrics.knobs.get("enable_prefix_caching")),
                "engine": _ENGINE,
            }
            name, text = "vllm:cache_config_info", "How the KV cache is laid out."
            yield from _labelled([GaugeMetricFamily(name, text, 1)], config)
        text = "HTTP requests for tokens under way."
        yield GaugeMetricFamily("stepscope_http_requests_in_flight", text, self._num_in_flight)
        text = "Whether the engine answers."
        yield GaugeMetricFamily("stepscope_engine_up", text, self.is_engine_up)
        text = "Service levels that stepscope_requests_within_levels_total counts by."
        levels = {"ttft": metrics.ttft_s, "itl": metrics.itl_s}
        yield _by_label("stepscope_service_level_seconds", text, "kind", levels)
        yield from _labelled(self._responses.collect(), {})

    def _gauges(self) -> Iterator[Metric]:
        step, latest = self._metrics.step, self._metrics.latest
        families: list[tuple[str, str, float | None]] = []
        if step is not None:
            families += [
                ("stepscope_token_budget", "Token budget of the latest step.", step.token_budget),
                ("stepscope_max_num_seqs", "Most requests in the latest step.", step.max_num_seqs),
            ]
        if latest is not None:
            families += [
                ("vllm:num_requests_running", "Requests in the batch.", latest.num_running),
                ("vllm:num_requests_waiting", "Requests that wait.", latest.num_waiting),
            ]
        if latest is not None and (kv := latest.kv) is not None:
            share = "Share of the KV blocks that requests hold; 1 is all of them."
            cached = "Free KV blocks whose content can still be hit."
            num_blocks = max(1, kv.num_blocks)
            families += [
                ("vllm:kv_cache_usage_perc", share, kv.used / num_blocks),
                ("stepscope_kv_blocks_used", "KV blocks that requests hold.", kv.used),
                ("stepscope_kv_blocks_cached", cached, kv.cached),
                ("stepscope_kv_blocks_empty", "KV blocks that hold nothing.", kv.empty),
            ]
        yield from (GaugeMetricFamily(*each) for each in families)  # None: without a sample
        is_known = latest is not None and latest.num_waiting
        reasons = self._metrics.waiting_reasons if is_known else {}
        text = "Requests that wait, by what they wait for."
        yield _by_label("stepscope_requests_waiting", text, "reason", reasons)


def _by_label(name: str, text: str, label: str, values: Mapping[str, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=(label,))
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _labelled(families: Iterable[Metric], labels: Mapping[str, str]) -> Iterator[Metric]:
    """Add labels to all samples, and leave out when each series began."""
    for family in families:
        family.samples = [
            Sample(each.name, {**labels, **each.labels}, each.value)
            for each in family.samples
            if not each.name.endswith("_created")
        ]
        yield family


class TelemetryFollower:
    """Updates `metrics` from the telemetry of the engine that `engine` is connected to."""

    def __init__(self, engine: EngineClient, metrics: EngineMetrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._next_sequence = 0

    async def run(self) -> None:
        """Follow the telemetry of the engine that is connected now, until cancelled."""
        socket = client_socket(zmq.SUB, self._engine.endpoint)
        socket.rcvhwm = RECEIVE_QUEUE
        socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_TELEMETRY_BYTES)
        reader: SocketReader | None = None
        try:
            socket.connect(self._engine.endpoint.here.telemetry)
            socket.subscribe(b"")
            self.join(await self._snapshot())
            reader = SocketReader(socket, self.receive)  # also of what came meanwhile
            await asyncio.Event().wait()
        finally:
            if reader is not None:
                reader.close()
                self._drain(socket)
            self._metrics.leave()
            socket.close()

    def join(self, snapshot: Snapshot) -> None:
        self._metrics.join(snapshot)
        self._next_sequence = snapshot.sequence + 1

    def receive(self, frames: list[bytes]) -> None:
        """Apply a message; those skipped before it count as lost."""
        try:
            topic, number, payload = frames
            sequence = wire.sequence_of(number)
            message = wire.decode(payload) if topic in _TOPICS else None
        except (ValueError, msgspec.DecodeError) as error:
            log.warning("the engine published what is no message: %s", error)
            return
        num_lost = sequence - self._next_sequence
        if num_lost < 0:
            return  # the snapshot includes it
        if num_lost:
            log.warning("%d messages of the engine are lost to the metrics", num_lost)
            self._metrics.lose(num_lost)
        self._next_sequence = sequence + 1
        if message is not None:
            self._metrics.apply(message)

    async def _snapshot(self) -> Snapshot:
        while True:
            try:
                return await self._engine.ask_for(Snapshot, GetSnapshot(), SNAPSHOT_S)
            except (EngineUnreachable, CommandRefused) as error:
                log.warning("the metrics wait for the engine: %s", error)
                await asyncio.sleep(RETRY_S)

    def _drain(self, socket: "zmq.Socket[bytes]") -> None:
        for _ in range(RECEIVE_QUEUE):
            try:
                self.receive(socket.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
