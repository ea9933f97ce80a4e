"""`serve_alert_metrics`: how the rules of `stepscope watch` stand, for Prometheus."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from prometheus_client import start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry

from stepscope.engine.http.settings import Address
from stepscope.recordings.alerts.judge import RuleWatch
from stepscope.tui.settings.cli_errors import CommandFailed


class _RuleGauges(Collector):
    """A rule or a figure that is unknown has no sample."""

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
def serve_alert_metrics(
    address: Address | None, engine: str, watches: Sequence[RuleWatch]
) -> Iterator[None]:
    """Answers GET /metrics at `address`, if there is one, until the end of the block.

    Raises:
        CommandFailed: the address cannot be bound.
    """
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
