"""Reads the metrics of a server, trying each possible path."""

from stepscope.engine.adapters.metrics.address import MetricsAddress
from stepscope.engine.adapters.metrics.fetch import TIMEOUT_S, FetchError, fetch
from stepscope.engine.adapters.metrics.reading import Reading, read


def reading_of(address: MetricsAddress, timeout_s: float = TIMEOUT_S) -> Reading:
    """Return the current values of a server's metrics.

    Raises:
        FetchError: the server does not answer in time, or exports no metric of a known engine.
    """
    error: FetchError | None = None
    for url in address.urls:
        try:
            reading = read(fetch(url, timeout_s))
        except FetchError as failed:
            error = error or failed
            continue
        if reading is not None:
            return reading
        error = FetchError(f"{url} exports no metric of vLLM, SGLang, TensorRT-LLM or stepscope")
    assert error is not None
    raise error
