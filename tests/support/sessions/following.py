"""Live sources that have joined an engine."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from stepscope.recordings.history.history import History
from stepscope.recordings.live.subscriber import Subscriber
from tests.support.waiting import wait_for


def joined(endpoint: Any, history: History | None = None, **options: Any) -> Subscriber:
    """Return a subscriber that is live. The caller stops it."""
    source = Subscriber(endpoint, history, **options)
    source.start()
    wait_for(lambda: source.status == "live", "the join")
    return source


@contextmanager
def following(endpoint: Any, **options: Any) -> Iterator[Subscriber]:
    """A subscriber that is live, and soon notices that an engine is silent."""
    source = joined(endpoint, **{"stale_s": 0.5, "retry_s": 0.1, **options})
    try:
        yield source
    finally:
        source.stop()
