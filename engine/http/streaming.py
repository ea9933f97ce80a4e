"""Runs the job of an HTTP request and sends its answer, as a stream of server-sent events or whole.

Benchmark clients rely on these rules for streams: one event for each token, even if it adds no
text; no event before the first token; the usage, if requested, in a separate event without choices;
and `[DONE]` at the end, also after an error.
"""

import asyncio
import logging

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from stepscope.engine.client.client import CommandRefused, EngineUnreachable
from stepscope.engine.http.engine_client import EngineClient
from stepscope.engine.http.errors import ApiError, from_engine, internal_error
from stepscope.engine.http.job import Job, TextPiece
from stepscope.engine.http.requests import ClientGone
from stepscope.engine.protocol.commands import Abort, Submit
from stepscope.engine.protocol.replies import UNSOUND_LOGITS, AnyReply, Error, Output, Submitted

log = logging.getLogger("stepscope.http")

# The SSE standard does not treat these as line ends, but some clients do, so escape them in JSON.
_LINE_ENDS = [(each.encode(), f"\\u{ord(each):04x}".encode()) for each in "\x85\u2028\u2029"]
_DONE = b"data: [DONE]\n\n"
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # tell proxies not to buffer tokens
]
MAX_AT_ONCE = 256  # outputs that are written in one go, while other streams wait


class Generation:
    """Submits the choices of one HTTP request, and keeps their outputs until they are read.

    So a client that reads slowly delays no other. `close` and `abandon` abort the choices.

    `submits`: one command for each choice. The list is emptied once they are sent, because prompts
    may be long.
    """

    def __init__(self, engine: EngineClient, submits: list[Submit]) -> None:
        self._engine = engine
        self._submits = submits
        self._indices: dict[int, int] = {}  # choice by command id, of unfinished commands
        self._request_ids: dict[int, int] = {}  # by command id, of accepted commands
        self._num_submitted = 0
        self._pending: list[TextPiece] = []
        self._failure: Exception | None = None
        self._is_closed = False
        self._news = asyncio.Event()

    async def start(self) -> None:
        """Submit all choices, and wait until the engine has accepted them.

        Raises:
            CommandRefused: the engine refused one of them. `close` then ends the others.
            EngineUnreachable: there is no engine, or it was lost.
            ClientGone: `abandon` was called.
        """
        num_submits = len(self._submits)
        for index, submit in enumerate(self._submits):
            self._indices[self._engine.send(submit, self.receive)] = index
        self._submits.clear()
        while self._num_submitted < num_submits:
            await self._changed()

    async def next_pieces(self) -> list[TextPiece]:
        """Wait for new outputs and return some, in order; an empty list after the last."""
        while not self._pending:
            if not self._indices and self._failure is None:
                return []
            await self._changed()
        pieces = self._pending[:MAX_AT_ONCE]
        del self._pending[:MAX_AT_ONCE]
        return pieces

    def abandon(self) -> None:
        """Abort all choices, because the client is gone. Whoever waits gets ClientGone."""
        self.close()
        self._fail(ClientGone())

    def close(self) -> None:
        """Abort all unfinished choices. May be called more than once."""
        if self._is_closed:
            return
        self._is_closed = True
        self._pending.clear()
        for command_id in list(self._indices):
            # One that is not accepted yet is aborted when it is.
            if (request_id := self._request_ids.get(command_id)) is not None:
                self._abort(request_id)

    def receive(self, command_id: int, reply: AnyReply | EngineUnreachable) -> None:
        if isinstance(reply, Output):
            if not self._is_closed:
                self._pending.append(TextPiece(self._indices[command_id], reply))
            if reply.finish_reason is not None:
                self._done(command_id)
        elif isinstance(reply, Submitted):
            self._num_submitted += 1
            self._request_ids[command_id] = reply.request_id
            if self._is_closed:
                self._abort(reply.request_id)
        elif isinstance(reply, Error):
            self._done(command_id)
            self._fail(CommandRefused(reply.code, reply.message))
        elif isinstance(reply, EngineUnreachable):
            self._indices.clear()
            self._fail(reply)
        self._news.set()

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        self._news.set()

    def _done(self, command_id: int) -> None:
        self._engine.forget(command_id)
        self._indices.pop(command_id, None)
        self._request_ids.pop(command_id, None)

    def _abort(self, request_id: int) -> None:
        try:
            # Ignore the answer: the request may have finished meanwhile.
            self._engine.send(Abort(request_id=request_id, who="http"), None)
        except EngineUnreachable:
            return  # the request has ended with its engine

    async def _changed(self) -> None:
        """Wait until a reply or an error arrives. Raises the error.

        The caller must not await between its check for news and this call, or it could miss some.
        """
        if self._failure is None:
            self._news.clear()
            await self._news.wait()
        if self._failure is not None:
            raise self._failure


async def answer(
    job: Job, generation: Generation, scope: Scope, receive: Receive, send: Send
) -> None:
    """Run a job and send its answer.

    Raises ApiError, EngineUnreachable, CommandRefused, ClientGone: it failed before anything was
    sent.
    """
    watch = asyncio.create_task(_watch(receive, generation))
    try:
        await generation.start()
        if job.stream:
            # A separate task, so that the wake-up for each token does not pass through all layers
            # of the application.
            await asyncio.create_task(_stream(job, generation, send))
            return
        while pieces := await generation.next_pieces():
            for piece in pieces:
                _check(piece)
                job.writer.add(piece)
        await Response(job.writer.whole(), media_type="application/json")(scope, receive, send)
    finally:
        watch.cancel()
        generation.close()


async def _watch(receive: Receive, generation: Generation) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
    generation.abandon()


async def _stream(job: Job, generation: Generation, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
    try:
        while pieces := await generation.next_pieces():
            events: list[bytes] = []
            for piece in pieces:
                if piece.output.finish_reason == "abort":
                    await _send_events(send, events)
                    _check(piece)
                events.append(_event(job.writer.chunk(piece)))
            await _send_events(send, events)
        last = job.writer.usage_chunk()
    except ClientGone:
        return
    except (EngineUnreachable, CommandRefused) as error:
        last = from_engine(error).body
    except ApiError as error:
        last = error.body
    except Exception:
        log.exception("a stream failed")
        last = internal_error().body
    await _send_events(send, [b"" if last is None else _event(last), _DONE], more=False)


def _check(piece: TextPiece) -> None:
    if piece.output.finish_reason != "abort":
        return
    message = "the engine ended this request"
    if piece.output.why == UNSOUND_LOGITS:
        raise ApiError(500, f"{message}: {UNSOUND_LOGITS}", code="unsound_logits")
    why = "it was stopped, the request was aborted, or its step failed"
    raise ApiError(503, f"{message} before it was finished: {why}", code="request_aborted")


def _event(data: bytes) -> bytes:
    if not data.isascii():  # a fast check: most events are ASCII and need no search
        for character, escaped in _LINE_ENDS:
            data = data.replace(character, escaped)
    return b"data: " + data + b"\n\n"


async def _send_events(send: Send, events: list[bytes], *, more: bool = True) -> None:
    if events or not more:
        await send({"type": "http.response.body", "body": b"".join(events), "more_body": more})
