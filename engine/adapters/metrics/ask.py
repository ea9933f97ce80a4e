"""Asks a server for its metrics, wherever it keeps them."""

from stepscope.engine.adapters.metrics.address import MetricsAddress
from stepscope.engine.adapters.metrics.fetch import TIMEOUT_S, FetchError, fetch
from stepscope.engine.adapters.metrics.reading import Reading, read


def reading_of(address: MetricsAddress, timeout_s: float = TIMEOUT_S) -> Reading:
    """What a server's metrics say now.

    Raises:
        FetchError: it does not answer in time, or exports nothing that we know.
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
