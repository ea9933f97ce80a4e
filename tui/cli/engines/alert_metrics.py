"""Serves states of alert rules to Prometheus: alone (`watch`) or with other metrics (`http`)."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from prometheus_client import start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry

from stepscope.engine.http.settings import Address
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.recordings.alerts.judge import Judge, RuleWatch
from stepscope.recordings.alerts.meter import WINDOW_S, Meter
from stepscope.recordings.alerts.rule import Rule
from stepscope.recordings.history.history import History
from stepscope.recordings.live.subscriber import Subscriber
from stepscope.tui.cli.shared.levels import chosen_levels
from stepscope.tui.settings.cli_errors import CommandFailed

TICK_S = 0.25
MAX_STEPS = 20_000
MAX_BYTES = 64 * 1024 * 1024


class _RuleGauges(Collector):
    """Prometheus gauges for each rule: whether it fires, and the measured value if it is known."""

    def __init__(self, engine: str, watches: Sequence[RuleWatch]) -> None:
        self._engine = engine
        self._watches = watches

    def collect(self) -> Iterator[GaugeMetricFamily]:
        firing = GaugeMetricFamily(
            "stepscope_alert_firing", "1 while a rule fires, else 0.", labels=("engine", "rule")
        )
        value = GaugeMetricFamily(
            "stepscope_alert_value",
            "The figure of a rule over the last ten seconds.",
            labels=("engine", "rule", "figure", "unit"),
        )
        for each in self._watches:
            labels = (self._engine, each.rule.text)
            if (state := each.state) != "unknown":
                firing.add_metric(labels, float(state == "firing"))
            if (measured := each.value) is not None:
                figure = each.rule.bound.figure
                value.add_metric((*labels, figure.name, figure.unit), measured)
        yield from (firing, value)


@contextmanager
def judged_rules(endpoint: Endpoint, rules: Sequence[Rule]) -> Iterator[list[Collector]]:
    """Judge rules about an engine, which may restart; yield their Prometheus collectors."""
    if not rules:
        yield []
        return
    source = Subscriber(endpoint, History(chosen_levels({}), MAX_STEPS, MAX_BYTES), past_s=WINDOW_S)
    judge, meter, is_over = Judge(rules), Meter(source), threading.Event()

    def look() -> None:
        while not is_over.wait(TICK_S):
            judge.take(meter.measure(), time.monotonic())

    thread = threading.Thread(target=look, name="rules", daemon=True)
    source.start()
    thread.start()
    try:
        yield [_RuleGauges(source.name, judge.watches)]
    finally:
        is_over.set()
        thread.join()
        source.stop()


@contextmanager
def serve_alert_metrics(
    address: Address | None, engine: str, watches: Sequence[RuleWatch]
) -> Iterator[None]:
    """Answer GET /metrics at `address` until the end of the block; None: serve nothing."""
    if address is None:
        yield
        return
    registry = CollectorRegistry()
    registry.register(_RuleGauges(engine, watches))
    try:
        server, thread = start_http_server(address.port, address.host, registry)
    except OSError as error:
        raise CommandFailed(f"--metrics: {address.text}: {error.strerror}") from error
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
