"""`DecodeLink`: sends requests from a prefill engine to a decode engine, and forwards the outputs.

Its own thread uses the connection. If the decode engine is gone or silent, the link returns all
requests to its owner (`LinkOwner`), and keeps looking for a decode engine.

An `AwayRequest` is used on that thread alone until it ends or comes back.
"""

import logging
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from msgspec.structs import replace

from stepscope.engine.client.client import CommandRefused, ControlClient, EngineUnreachable
from stepscope.engine.loop.client_requests import aborted, append_output, output_of
from stepscope.engine.loop.inbox import Client, WakingQueue
from stepscope.engine.protocol.commands import Abort, GetInfo, HandedOver, KVTicket, Submit
from stepscope.engine.protocol.knobs import ConfigError
from stepscope.engine.protocol.replies import AnyReply, Error, Loaded, Output, Submitted
from stepscope.engine.protocol.wire import EngineInfo
from stepscope.engine.scheduling.request import Request
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.engine.transport.local_engines import killed_pid


@dataclass(slots=True, eq=False)
class AwayRequest:
    """A request in the decode engine, its client, and the ticket for its keys and values."""

    request: Request
    client: Client
    submit: Submit
    handed_over: HandedOver
    # Identifies the copy of the keys and values; None once the decode engine has loaded them. Use
    # it on the engine's thread only.
    ticket: KVTicket | None
    remote_id: int | None = None  # the decode engine's id for the request; None until known
    is_aborted: bool = False  # whether the client has aborted the request

    def pass_on(self, output: Output, now_ns: int) -> None:
        """Forward an output of the decode engine to the client, as if it came from this engine."""
        request, reason = self.request, output.finish_reason
        append_output(request, output.token_ids)
        if output.token_ids:
            request.last_token_ns = now_ns
        if output.logprobs:
            request.logprobs += output.logprobs
        if reason == "abort":
            self.end(output.why)
        elif self.submit.stream or reason is not None:
            token_ids = output.token_ids if self.submit.stream else request.output_token_ids
            self.client.reply(output_of(request, token_ids, reason))

    def end(self, why: str | None = None) -> None:
        """Tell the client that the request was aborted, without another token."""
        self.client.reply(replace(aborted(self.request, self.submit), why=why))


class LinkOwner(Protocol):
    """What a link reports to, on the engine's thread. See `hand_over.HandOver`."""

    def loaded(self, away: AwayRequest) -> None: ...
    def ended(self, away: AwayRequest) -> None: ...
    def refused(self, away: AwayRequest) -> None: ...
    def lost(self, aways: list[AwayRequest]) -> None: ...
    def opened(self) -> None: ...


log = logging.getLogger("stepscope.engine")

_LOOK_S = 0.25  # how often to check on the decode engine
_SILENT_S = 3.0  # after this long without a message, it counts as gone
_REOPEN_S = 1.0  # how long to try to reconnect, and the pause after that


class DecodeLink:
    """The connection of a prefill engine to its decode engine.

    `who`: the prefill engine's name, for the decode engine's audit trail.
    """

    def __init__(self, endpoint: Endpoint, who: str) -> None:
        self.engine = ""
        self.is_open = False  # whether the link accepts requests. May be read from any thread.
        self._endpoint = endpoint
        self._who = who
        self._layout: str | None = None  # of our KV blocks, once the model is loaded
        self._info: EngineInfo | None = None  # of the decode engine
        self._client: ControlClient | None = None
        self._away: dict[int, AwayRequest] = {}  # by the id of their `Submit`
        self._todo: WakingQueue[Callable[[], None]] = WakingQueue()  # for the link's thread
        self._said = ""  # the last logged reason why no decode engine was found
        self._heard_s = self._looked_s = 0.0
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def connect(self, timeout_s: float = _SILENT_S) -> None:
        """Connect to the decode engine.

        Raises ConfigError: there is no decode engine, or it cannot continue the requests of this
        engine.
        """
        client = ControlClient(self._endpoint, timeout_s)
        try:
            info = client.info(again_s=1.0)
            if info.role != "decode":
                raise ConfigError("decode_to", f"{info.name} is no decode engine: --role decode")
            self._info = info
            self.check_layout(self._layout)
        except (EngineUnreachable, CommandRefused, ConfigError) as error:
            client.close()
            if isinstance(error, ConfigError):
                raise
            advice = "Start the decode engine first: stepscope serve --role decode"
            raise ConfigError("decode_to", f"{error}. {advice}") from None
        self._client, self.engine = client, info.name
        self._heard_s = time.monotonic()
        self.is_open = True

    def check_layout(self, layout: str | None) -> None:
        """Set the KV layout of this engine. Raises ConfigError if the decode engine's differs."""
        self._layout, info = layout, self._info
        assert info is not None, "connect comes first"
        if layout is not None and info.kv_layout != layout:
            raise ConfigError(
                "kv_layout",
                f"{info.name} serves another model, or its KV blocks have another shape (it has "
                f"{info.model}, {info.dtype}, KV cache in {info.kv_cache_dtype}, blocks of "
                f"{info.block_size} tokens): give both engines the same --model, --dtype, "
                "--kv-cache-dtype and --block-size",
            )

    def start(self, owner: LinkOwner, post: Callable[[Callable[[], None]], None]) -> None:
        """Start the link's thread. Call it once, after `connect`.

        `post`: has the owner's reports carried out on the engine's thread.
        """
        self._owner, self._post = owner, post
        self._heard_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="decode-link", daemon=True)
        self._thread.start()

    def send(self, away: AwayRequest) -> None:
        """Send a request to the decode engine, on the link's thread."""
        self._todo.post(lambda: self._send(away))

    def abort(self, away: AwayRequest) -> None:
        self._todo.post(lambda: self._abort(away))

    def close(self) -> None:
        """End all requests in the decode engine, and the link's thread. May be called again."""
        self.is_open = False
        if self._thread is None and self._client is None:
            return  # it was never connected, or is closed
        if self._thread is not None:
            self._todo.post(self._begin_to_close)
            self._thread.join()
            self._thread = None
        if self._client is not None:
            self._client.close()
            self._client = None
        self._todo.close()

    # On the link's thread

    def _run(self) -> None:
        while not self._is_closing:
            try:
                self._turn()
            except EngineUnreachable as error:
                self._lose(str(error))
            except Exception:
                log.exception("the link to the decode engine failed")
                self._lose("an error of ours")
        for away in self._take_all():
            away.end()

    def _turn(self) -> None:
        client = self._client
        if client is None:
            self._try_to_reopen()
        else:
            received = client.receive(_LOOK_S, or_readable=self._todo.descriptor)
            while received is not None:
                self._take(*received)
                received = client.receive(0)
            self._look_after(client)
        self._todo.awake()
        for do in self._todo.take():
            do()

    def _begin_to_close(self) -> None:
        self._is_closing = True

    def _send(self, away: AwayRequest) -> None:
        if self._client is None:
            self._post(lambda: self._owner.lost([away]))
            return
        request = away.request
        submit = Submit(
            client_id=away.submit.client_id,
            prompt_token_ids=request.prompt_token_ids,
            sampling=request.sampling,
            priority=request.priority,
            with_text=False,
            handed_over=away.handed_over,
        )
        try:
            command_id = self._client.send(submit)
        except CommandRefused as error:  # it is too large to send
            self._refuse(away, str(error))
            return
        except EngineUnreachable:
            self._post(lambda: self._owner.lost([away]))
            raise
        self._away[command_id] = away

    def _abort(self, away: AwayRequest) -> None:
        away.is_aborted = True
        if away.remote_id is not None and self._client is not None:
            self._client.send(Abort(request_id=away.remote_id, who=self._who))

    def _take(self, command_id: int, reply: AnyReply) -> None:
        self._heard_s = time.monotonic()
        if isinstance(reply, EngineInfo):
            assert self._info is not None
            if reply.engine_id != self._info.engine_id:
                raise EngineUnreachable("another engine has taken its place")
        away = self._away.get(command_id)
        if away is None:
            return
        if isinstance(reply, Submitted):
            away.remote_id = reply.request_id
            if away.is_aborted:
                self._abort(away)
        elif isinstance(reply, Loaded):
            self._post(lambda: self._owner.loaded(away))
        elif isinstance(reply, Output):
            away.pass_on(reply, time.monotonic_ns())
            if reply.finish_reason is not None:
                del self._away[command_id]
                self._post(lambda: self._owner.ended(away))
        elif isinstance(reply, Error):
            if reply.code == "stopped":  # the engine has ended with all its requests
                raise EngineUnreachable("it was shut down")
            del self._away[command_id]
            self._refuse(away, reply.message)

    def _refuse(self, away: AwayRequest, why: str) -> None:
        log.warning("request %d is not handed over: %s", away.request.request_id, why)
        self._post(lambda: self._owner.refused(away))

    def _take_all(self) -> list[AwayRequest]:
        aways, self._away = list(self._away.values()), {}
        return aways

    def _look_after(self, client: ControlClient) -> None:
        now_s = time.monotonic()
        if now_s - self._looked_s < _LOOK_S:
            return
        self._looked_s = now_s
        client.idle()
        if killed_pid(self._endpoint) is not None:
            raise EngineUnreachable("it was killed, or crashed")
        if now_s - self._heard_s > _SILENT_S:
            raise EngineUnreachable(f"it has not answered for {_SILENT_S:g} s")
        client.send(GetInfo())

    def _lose(self, why: str) -> None:
        """Close the connection, and give all requests back to the object that owns this link."""
        self.is_open = False
        if self._client is not None:
            self._client.close()
            self._client = None
        aways = self._take_all()
        message = "the decode engine %s is gone: %s; %d requests continue in this engine"
        log.warning(message, self.engine, why, len(aways))
        self._post(lambda: self._owner.lost(aways))

    def _try_to_reopen(self) -> None:
        try:
            self.connect(_REOPEN_S)
        except ConfigError as error:
            if str(error) != self._said:
                self._said = str(error)
                log.warning("no decode engine: %s", error)
            select.select([self._todo.descriptor], [], [], _REOPEN_S)
            return
        self._said = ""
        log.warning("the decode engine %s is there again", self.engine)
        self._post(self._owner.opened)
