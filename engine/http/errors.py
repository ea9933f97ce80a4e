"""`ApiError`: an error response of the server, as the JSON object that OpenAI's clients expect."""

from typing import Any

import msgspec
from msgspec import Struct

from stepscope.engine.client.client import CommandRefused, EngineUnreachable
from stepscope.engine.protocol.field_errors import in_words

RETRY_AFTER_S = 1


class ErrorObject(Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(Struct, frozen=True):
    error: ErrorObject


class ApiError(Exception):
    """An error response.

    Args:
        kind: OpenAI's `type`. None: the type that fits the status.
        retry_after_s: seconds after which a retry may succeed.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s
        if kind is None:
            kind = "server_error" if status >= 500 else "invalid_request_error"
        self.error = ErrorObject(message=message, type=kind, param=param, code=code)

    @property
    def body(self) -> bytes:
        return msgspec.json.encode(ErrorBody(self.error))

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}


def internal_error() -> ApiError:
    """Return the error response for a bug of the server. It has no details: they are in the log."""
    return ApiError(500, "the server failed; its log says why", code="internal_error")


def too_many(message: str, code: str) -> ApiError:
    return ApiError(429, message, code=code, kind="rate_limit_error", retry_after_s=RETRY_AFTER_S)


def unavailable(message: str, code: str = "engine_unavailable") -> ApiError:
    return ApiError(503, message, code=code, retry_after_s=RETRY_AFTER_S)


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
    param = name if colon and name.isidentifier() else None
    return ApiError(400, message, param=param, code=code)


def from_validation(error: Exception) -> ApiError:
    """Return the error response for a body that is malformed JSON or has an invalid field."""
    message = str(error)
    if not isinstance(error, msgspec.ValidationError):
        return ApiError(400, f"the body is no valid JSON: {message}", code="invalid_json")
    field, message = in_words(error)
    return ApiError(400, f"{field or 'body'}: {message}", param=field, code="invalid_value")


def invalid(param: str, message: str) -> ApiError:
    """Return the error response for a field with a wrong value."""
    return ApiError(400, f"{param}: {message}", param=param, code="invalid_value")


def not_supported(name: str, value: Any, reason: str) -> ApiError:
    shown = msgspec.json.encode(value).decode()
    if len(shown) > 60:
        shown = shown[:60] + "..."
    return ApiError(
        400,
        f"{name}: {shown} cannot be honoured: {reason}; leave the field out",
        param=name,
        code="unsupported_parameter",
    )
