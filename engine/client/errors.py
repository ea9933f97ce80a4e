"""What may become of asking an engine something."""

from stepscope.engine.protocol.wire import SCHEMA_VERSION
from stepscope.engine.transport.endpoints import Endpoint


class EngineUnreachable(Exception):  # noqa: N818 - reads as what happened
    """No answer at the endpoint within the time given."""


class EngineSilent(EngineUnreachable):
    """Nothing has come in time, but the engine is not known to be gone."""


class NoAnswer(EngineUnreachable):
    """A change was sent, and nothing has come back in time: it may still be done."""


class EngineStarting(EngineUnreachable):
    """Its process is there and does not listen yet."""

    def __init__(self, name: str, pid: int) -> None:
        super().__init__(f"{name} (pid {pid}) is still starting")
        self.name = name
        self.pid = pid


class EngineGone(EngineUnreachable):
    """It has ended."""


class NoEngine(EngineUnreachable):
    """Something answers there, and it is no stepscope engine that this program can talk to."""

    def __init__(self, endpoint: Endpoint, what: str) -> None:
        super().__init__(
            f"what answers at {endpoint.control} is no stepscope engine of schema "
            f"{SCHEMA_VERSION} ({what}); look at the endpoint"
        )


class CommandRefused(Exception):  # noqa: N818
    """The engine answered with an error; nothing was changed."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
