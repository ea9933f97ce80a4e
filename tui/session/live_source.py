"""Makes the source of a live engine."""

from stepscope.engine.transport.endpoints import Endpoint
from stepscope.engine.transport.local_engines import called
from stepscope.recordings.history.history import History
from stepscope.recordings.live.subscriber import Subscriber


def receive(endpoint: Endpoint, history: History, past_s: float = 0.0) -> Subscriber:
    """The source of a live engine, not started yet."""
    source = Subscriber(endpoint, history, past_s=past_s)
    source.name = called(endpoint)
    return source
