"""The ASGI application: its routes and their handlers, and `Guard`: what each request must pass."""

import hmac
import ipaddress
import logging
import re
import time
import uuid
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import msgspec
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stepscope.engine.client.client import CommandRefused, EngineUnreachable
from stepscope.engine.http import requests
from stepscope.engine.http.engine_client import EngineClient
from stepscope.engine.http.errors import (
    ApiError,
    from_engine,
    internal_error,
    too_many,
    unavailable,
)
from stepscope.engine.http.exposition import Exposition
from stepscope.engine.http.job import Head, Job, chat_job, completion_job
from stepscope.engine.http.settings import HttpSettings
from stepscope.engine.http.streaming import Generation, answer
from stepscope.engine.protocol.commands import ResetPrefixCache
from stepscope.engine.protocol.replies import Ack
from stepscope.engine.protocol.wire import EngineInfo

log = logging.getLogger("stepscope.http")

ANSWER_S = 60.0  # an engine answers between two steps, and a step may be long
ANY_LENGTH = 10_000_000
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
# Health and metrics need no key, as in vLLM, because probes and Prometheus send none.
_GUARDED = ("/v1/", "/reset_prefix_cache")


class Api:
    """The handlers of the routes, and their shared state."""

    def __init__(
        self, settings: HttpSettings, engine: EngineClient, exposition: Exposition
    ) -> None:
        self.settings = settings
        self.engine = engine
        self.exposition = exposition
        self.num_in_flight = 0

    # Requests that generate tokens

    def completion(self, body: bytes, request_id: str) -> Job:
        request = requests.decode(body, requests.CompletionRequest)
        return completion_job(request, self._head(request, f"cmpl-{request_id}"))

    def chat(self, body: bytes, request_id: str) -> Job:
        request = requests.decode(body, requests.ChatRequest)
        head = self._head(request, f"chatcmpl-{request_id}")
        return chat_job(request, head, self._info().max_model_len or ANY_LENGTH)

    # The others

    async def models(self, _: Request) -> Response:
        return _json({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        model, wanted = self._model(), request.path_params["model"]
        if wanted != model["id"]:
            raise _no_such_model(wanted, model["id"])
        return _json(model)

    async def health(self, _: Request) -> Response:
        info = self._info()
        return _json({"status": "ok", "engine": info.name, "model": self._model_name(info)})

    async def version(self, _: Request) -> Response:
        return _json({"version": self._info().software_version})

    async def metrics(self, _: Request) -> Response:
        body = self.exposition.write(self.num_in_flight)
        return Response(body, media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def reset_prefix_cache(self, _: Request) -> Response:
        ack = await self.engine.ask_for(Ack, ResetPrefixCache(), ANSWER_S)
        return _json({"status": "ok", "detail": ack.detail})

    # Names

    def _info(self) -> EngineInfo:
        info = self.engine.info
        if info is None:
            raise unavailable("there is no engine at the moment; try again when it is back")
        return info

    def _model_name(self, info: EngineInfo) -> str:
        return self.settings.served_model_name or info.model

    def _model(self) -> dict[str, Any]:
        info = self._info()
        return {
            "id": self._model_name(info),
            "object": "model",
            "created": info.wall_ns // 1_000_000_000,
            "owned_by": "stepscope",
            "root": info.model,
            "parent": None,
            "max_model_len": info.max_model_len,
            # Whether telemetry subscribers and recordings get prompts and outputs.
            "with_tokens": info.with_tokens,
        }

    def _head(self, request: requests.GenerationRequest, identifier: str) -> Head:
        info = self._info()
        name = self._model_name(info)
        if request.model is not None and request.model != name:
            raise _no_such_model(request.model, name)
        fingerprint = f"fp_{info.config_hash}" if info.config_hash else None
        return Head(identifier, int(time.time()), name, fingerprint)


class _Generating:
    """A route that generates tokens. A plain ASGI application sees when the client disconnects."""

    def __init__(self, api: Api, make_job: Callable[[bytes, str], Job]) -> None:
        self._api = api
        self._make_job = make_job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        api, most = self._api, self._api.settings.max_concurrent_requests
        if api.num_in_flight >= most:
            raise too_many(f"{most} requests are under way already", "too_many_requests")
        api.num_in_flight += 1
        try:
            job = self._make_job(await requests.read_body(receive), scope["stepscope.request_id"])
            await answer(job, Generation(api.engine, job.submits), scope, receive, send)
        except requests.ClientGone:
            return
        finally:
            api.num_in_flight -= 1


def build_app(api: Api) -> ASGIApp:
    routes = [
        Route("/v1/completions", _Generating(api, api.completion), methods=["POST"]),
        Route("/v1/chat/completions", _Generating(api, api.chat), methods=["POST"]),
        Route("/v1/models", api.models),
        Route("/v1/models/{model:path}", api.model),
        Route("/health", api.health),
        Route("/version", api.version),
        Route("/metrics", api.metrics),
        Route("/reset_prefix_cache", api.reset_prefix_cache, methods=["POST"]),
    ]
    return Guard(Router(routes, redirect_slashes=False), api.settings.api_key, api.exposition)


def _no_such_model(wanted: str, served: str) -> ApiError:
    message = f"there is no model {wanted[:200]!r} here; this server has {served!r}"
    return ApiError(404, message, param="model", code="model_not_found")


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


class Guard:
    """An ASGI application that wraps another one, and gives every request an id.

    Checks its key, host and origin. No exception of a request gets past it.
    """

    def __init__(self, app: ASGIApp, api_key: str, exposition: Exposition) -> None:
        self._app = app
        self._key = api_key.encode()
        self._exposition = exposition

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = Headers(scope=scope).get("x-request-id", "")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex
        scope["stepscope.request_id"] = request_id
        scope["app"] = self  # the router then raises HTTPException where there is no route
        status = 0

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                named = (b"x-request-id", request_id.encode())
                message["headers"] = [*message["headers"], named]
            await send(message)

        try:
            self._check(scope)
            await self._app(scope, receive, send_named)
        except ApiError as error:
            await error.response(scope, receive, send_named)
        except (EngineUnreachable, CommandRefused) as error:
            await from_engine(error).response(scope, receive, send_named)
        except HTTPException as error:
            await _no_route(error, scope).response(scope, receive, send_named)
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"])
            if not status:
                await internal_error().response(scope, receive, send_named)
        finally:
            self._exposition.count_request(scope["path"], status)

    def _check(self, scope: Scope) -> None:
        """Raise ApiError for a wrong key, and for what a web page of another site might send."""
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if self._key and scope["path"].startswith(_GUARDED):
            scheme, _, key = headers.get("authorization", "").partition(" ")
            is_key = hmac.compare_digest(key.encode("latin-1"), self._key)
            if not is_key or scheme.lower() != "bearer":
                message = "no valid API key was sent: set it in the client"
                message += " (Authorization: Bearer KEY)"
                raise ApiError(401, message, code="invalid_api_key")
        # A page may let its own host name resolve to the loopback address (DNS rebinding), where a
        # server without a key listens. The page's requests then look like same-site requests.
        if not self._key and not _is_local(host):
            message = "this server is reached as localhost or by its address"
            raise ApiError(403, f"{message}, not as {host[:200]!r}", code="wrong_host")
        if scope["method"] == "POST" and origin and origin.partition("://")[2] != host:
            message = f"requests from pages of {origin[:200]} are not taken"
            raise ApiError(403, message, code="cross_origin")


def _no_route(error: HTTPException, scope: Scope) -> ApiError:
    path = scope["path"]
    if error.status_code == 404:
        return ApiError(404, f"there is no {path} here; the API is at /v1", code="not_found")
    message = f"{path} does not accept {scope['method']}"
    named = ApiError(error.status_code, message, code="method_not_allowed")
    named.headers.update(error.headers or {})
    return named


def _is_local(host: str) -> bool:
    """Whether a Host header is an address, or a name that no other site can have."""
    try:
        name = urlsplit(f"//{host}").hostname or "localhost"
        return f".{name}".endswith(".localhost") or bool(ipaddress.ip_address(name))
    except ValueError:
        return False
