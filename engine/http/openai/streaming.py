"""Runs a job and sends its answer, as a stream of server-sent events or as a whole.

Benchmark clients rely on these rules for streams: one event for each token, even if it adds no
text; no event before the first token; the usage, if requested, in a separate event without choices;
and `[DONE]` at the end, also after an error.
"""

import asyncio
import logging

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from stepscope.engine.client.client import CommandRefused, EngineUnreachable
from stepscope.engine.http.errors import ApiError, from_engine, internal_error
from stepscope.engine.http.openai.generation import Generation, TextPiece
from stepscope.engine.http.openai.job import Job
from stepscope.engine.http.openai.requests import ClientGone
from stepscope.engine.protocol.replies import UNSOUND_LOGITS

log = logging.getLogger("stepscope.http")

# The SSE standard does not treat these as line ends, but some clients do, so escape them in JSON.
_LINE_ENDS = [(each.encode(), f"\\u{ord(each):04x}".encode()) for each in "\x85\u2028\u2029"]
_DONE = b"data: [DONE]\n\n"
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # tell proxies not to buffer tokens
]


async def answer(
    job: Job, generation: Generation, scope: Scope, receive: Receive, send: Send
) -> None:
    """Run a job and send its answer. Raises ApiError: the job failed before anything was sent."""
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
    except ClientGone:
        return
    except (EngineUnreachable, CommandRefused) as error:
        raise from_engine(error) from error
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
    """Raise ApiError if the engine has ended the request."""
    if piece.output.finish_reason != "abort":
        return
    if piece.output.why == UNSOUND_LOGITS:
        message = f"the engine ended this request: {UNSOUND_LOGITS}"
        raise ApiError(500, message, code="unsound_logits")
    raise ApiError(
        503,
        "the engine ended this request before it was finished: it was stopped, the request was "
        "aborted, or its step failed",
        code="request_aborted",
    )


def _event(data: bytes) -> bytes:
    if not data.isascii():  # a fast check: most events are ASCII and need no search
        for character, escaped in _LINE_ENDS:
            data = data.replace(character, escaped)
    return b"data: " + data + b"\n\n"


async def _send_events(send: Send, events: list[bytes], *, more: bool = True) -> None:
    if events or not more:
        await send({"type": "http.response.body", "body": b"".join(events), "more_body": more})
