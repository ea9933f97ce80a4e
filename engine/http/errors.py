"""`ApiError`: an error response of the server, as the JSON object that OpenAI's clients expect."""

from typing import Any

import msgspec
from starlette.responses import Response

from stepscope.engine.client.client import CommandRefused, EngineUnreachable
from stepscope.engine.protocol.field_errors import in_words


class ApiError(Exception):
    """`kind`: OpenAI's `type`; "": the one that fits the status. `is_temporary`: retries help."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = "",
        is_temporary: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {"retry-after": "1"} if is_temporary else {}
        kind = kind or ("server_error" if status >= 500 else "invalid_request_error")
        self.error = {"message": message, "type": kind, "param": param, "code": code}

    @property
    def body(self) -> bytes:
        return msgspec.json.encode({"error": self.error})

    @property
    def response(self) -> Response:
        return Response(self.body, self.status, self.headers, "application/json")


def internal_error() -> ApiError:
    """Return the error response for a bug of the server. It has no details: they are in the log."""
    return ApiError(500, "the server failed; its log says why", code="internal_error")


def too_many(message: str, code: str) -> ApiError:
    return ApiError(429, message, code=code, kind="rate_limit_error", is_temporary=True)


def unavailable(message: str, code: str = "engine_unavailable") -> ApiError:
    return ApiError(503, message, code=code, is_temporary=True)


def from_engine(error: EngineUnreachable | CommandRefused) -> ApiError:
    """Return the error response for a command that the engine refused, or could not receive."""
    if isinstance(error, EngineUnreachable):
        return unavailable(str(error))
    code, message = error.code, error.message
    if code in ("queue_full", "rate_limited"):
        return too_many(message, code)
    if code == "draining":
        return unavailable(message, code)
    if code == "prompt_too_long":
        return ApiError(400, message, code="context_length_exceeded")
    if code in ("internal", "protocol"):
        return ApiError(500, message, code="internal_error")
    # Messages about one field begin with its name.
    name, colon, _ = message.partition(":")
    return ApiError(400, message, param=name if colon and name.isidentifier() else None, code=code)


def from_validation(error: Exception) -> ApiError:
    """Return the error response for a body that is malformed JSON or has an invalid field."""
    if not isinstance(error, msgspec.ValidationError):
        return ApiError(400, f"the body is no valid JSON: {error}", code="invalid_json")
    field, message = in_words(error)
    return ApiError(400, f"{field or 'body'}: {message}", param=field, code="invalid_value")


def invalid(param: str, message: str) -> ApiError:
    return ApiError(400, f"{param}: {message}", param=param, code="invalid_value")


def not_supported(name: str, value: Any, reason: str) -> ApiError:
    shown = msgspec.json.encode(value).decode()
    if len(shown) > 60:
        shown = shown[:60] + "..."
    message = f"{name}: {shown} cannot be honoured: {reason}; leave the field out"
    return ApiError(400, message, param=name, code="unsupported_parameter")
