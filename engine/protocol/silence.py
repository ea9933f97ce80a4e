"""Whether an engine publishes anything, as it says of itself."""

from stepscope.engine.protocol.wire import EngineInfo


def publishes(info: EngineInfo) -> bool:
    """Whether there is telemetry of it; without (`--no-telemetry`) what it does is unknown.

    An engine that names an address for commands and none for telemetry publishes nothing. One that
    names neither, as in a recording of another program, says nothing about it.
    """
    return bool(info.telemetry_endpoint) or not info.control_endpoint
