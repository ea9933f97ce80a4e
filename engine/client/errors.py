"""Errors of the control client."""

from stepscope.engine.protocol.wire import SCHEMA_VERSION
from stepscope.engine.transport.endpoints import Endpoint


class EngineUnreachable(Exception):  # noqa: N818 - reads as what happened
    """The engine could not be reached, or did not answer in time."""


class EngineSilent(EngineUnreachable):
    """No answer arrived in time, but the engine is not known to be gone."""


class NoAnswer(EngineUnreachable):
    """A change was sent and no answer arrived in time. The engine may still apply it."""


class EngineStarting(EngineUnreachable):
    """The engine's process runs, but does not listen yet."""

    def __init__(self, name: str, pid: int) -> None:
        super().__init__(f"{name} (pid {pid}) is still starting")
        self.name = name
        self.pid = pid


class EngineGone(EngineUnreachable):
    """The engine has ended."""


class KeyRefused(EngineUnreachable):
    """The engine rejects our key, or asks for one; the message says what to do."""


class NoEngine(EngineUnreachable):
    """The program at the endpoint is not a stepscope engine that this client can talk to."""

    def __init__(self, endpoint: Endpoint, what: str) -> None:
        super().__init__(
            f"the program at {endpoint.control} is not a stepscope engine with schema "
            f"{SCHEMA_VERSION} ({what}); check the endpoint"
        )


class CommandRefused(Exception):  # noqa: N818
    """The engine answered with an error. Nothing was changed."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
