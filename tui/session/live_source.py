"""Makes the source of a live session: an engine, or a server that only exports metrics."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from stepscope.engine.adapters.metrics.fetch import MetricsAddress, in_file, is_metrics_url
from stepscope.engine.transport.endpoints import Endpoint, find_local, ranks_of
from stepscope.engine.transport.local_engines import called, holder_pid
from stepscope.recordings.history.history import History
from stepscope.recordings.history.source import Source
from stepscope.recordings.live.forward_passes import PREFIX, ForwardPassAddress, ForwardPassSource
from stepscope.recordings.live.subscriber import Subscriber

if TYPE_CHECKING:
    from stepscope.engine.adapters.metrics.local_servers import LocalServer
    from stepscope.recordings.importing.log_source import LogSource
    from stepscope.recordings.live.scraper import Scraper

Address: TypeAlias = Endpoint | MetricsAddress | ForwardPassAddress
LiveSource: TypeAlias = "Subscriber | Scraper | ForwardPassSource | LogSource"


def addresses(text: str) -> list[Address]:
    """Return the addresses that a text means: engine, URL, JSON file of servers, or ranks."""
    if is_metrics_url(text):
        return [MetricsAddress.parse(text)]
    if text.startswith(PREFIX):
        return [ForwardPassAddress.parse(text)]
    path = Path(text)
    if path.suffix == ".json" and path.is_file():
        return [*in_file(path)]
    return [*ranks_of(text)]


def local_addresses(servers: "Iterable[LocalServer]") -> list[Address]:
    """Return the addresses of engines, and of servers that only export metrics, on this machine."""
    from stepscope.engine.adapters.metrics.local_servers import without_attached

    engines = find_local()
    pids = [pid for each in engines if (pid := holder_pid(each)) is not None]
    return [*engines, *(each.address for each in without_attached(servers, pids))]


def receive(address: Address, history: History, past_s: float = 0.0) -> LiveSource:
    """Return a source that receives the steps of a live engine; the caller starts it."""
    if isinstance(address, MetricsAddress):
        from stepscope.recordings.live.scraper import Scraper  # imports a parser

        return Scraper(address, history)
    if isinstance(address, ForwardPassAddress):
        return ForwardPassSource(address, history)
    source = Subscriber(address, history, past_s=past_s)
    source.name = called(address)
    return source


def control_of(source: Source) -> str | None:
    """Return the control address of a source's engine; None if it cannot be controlled."""
    return source.endpoint.control if isinstance(source, Subscriber) else None
