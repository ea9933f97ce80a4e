"""`Guard`: gives every request an id, checks its key, host and origin, and catches all errors."""

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import re
import uuid
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stepscope.engine.http.errors import ApiError, internal_error
from stepscope.engine.http.metrics.exposition import Exposition
from stepscope.engine.http.openai.streaming import send_json

log = logging.getLogger("stepscope.http")

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
# Health and metrics need no key, as in vLLM, because probes and Prometheus send none.
_GUARDED = ("/v1/", "/reset_prefix_cache")


class Guard:
    """An ASGI application that wraps another one. No exception of a request gets past it."""

    def __init__(self, app: ASGIApp, api_key: str, exposition: Exposition) -> None:
        self._app = app
        self._key_hash = _hash(api_key.encode()) if api_key else None
        self._exposition = exposition

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope["stepscope.request_id"] = request_id
        status = 0

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", request_id.encode()),
                ]
            await send(message)

        try:
            self._check_key(scope)
            self._check_host(scope)
            self._check_origin(scope)
            await self._app(scope, receive, send_named)
        except ApiError as error:
            await send_json(send_named, error.status, error.body, error.headers)
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"])
            if not status:
                answer = internal_error()
                await send_json(send_named, answer.status, answer.body)
        finally:
            self._exposition.count_request(scope["path"], status)

    def _check_key(self, scope: Scope) -> None:
        if self._key_hash is None or not scope["path"].startswith(_GUARDED):
            return
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        # Compare hashes of equal length, so that the time reveals nothing about the key.
        is_key = hmac.compare_digest(_hash(key.encode("latin-1")), self._key_hash)
        if not is_key or scheme.lower() != "bearer":
            raise ApiError(
                401,
                "no valid API key was sent: set it in the client (Authorization: Bearer KEY)",
                code="invalid_api_key",
            )

    def _check_host(self, scope: Scope) -> None:
        """Raise ApiError if the Host header is malformed, or names a foreign host without a key.

        If the server needs no key, it is on the loopback address. A web page may let its own host
        name resolve to that address (DNS rebinding). The page's requests then look like same-site
        requests.
        """
        given = Headers(scope=scope).get("host", "")
        try:
            host = urlsplit(f"//{given}").hostname or ""
        except ValueError:
            raise ApiError(
                400, f"the Host header is no name or address: {given[:200]!r}", code="bad_host"
            ) from None
        if self._key_hash is not None:
            return
        if host == "localhost" or host.endswith(".localhost") or _is_address(host) or not host:
            return
        raise ApiError(
            403,
            f"this server is reached as localhost or by its address, not as {host[:200]!r}",
            code="wrong_host",
        )

    def _check_origin(self, scope: Scope) -> None:
        """Refuse requests that a browser sends for pages of other sites the user visits."""
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        if scope["method"] != "POST" or origin is None:
            return
        if origin.partition("://")[2] != headers.get("host"):
            raise ApiError(
                403, f"requests from pages of {origin[:200]} are not taken", code="cross_origin"
            )


def _request_id(scope: Scope) -> str:
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
