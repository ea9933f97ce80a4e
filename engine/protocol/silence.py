"""Whether an engine publishes telemetry, according to its `EngineInfo`."""

from stepscope.engine.protocol.wire import EngineInfo


def publishes(info: EngineInfo) -> bool:
    """Whether the engine publishes telemetry; with `--no-telemetry` it does not.

    An engine with a control endpoint but no telemetry endpoint publishes nothing. An engine with
    neither, as in a recording made by another program, counts as publishing.
    """
    return bool(info.telemetry_endpoint) or not info.control_endpoint
