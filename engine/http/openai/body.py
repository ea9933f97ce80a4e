"""Reading a request's body, bounded in size and time."""

import asyncio

from starlette.datastructures import Headers
from starlette.types import Receive

from stepscope.engine.http.errors import ApiError
from stepscope.engine.protocol.commands import MAX_COMMAND_BYTES

# What is decoded from it must fit into one command.
MAX_BODY_BYTES = MAX_COMMAND_BYTES - 64 * 1024
# A client reads the answer only once it has sent its body: so much more is read and thrown away.
MAX_WASTED_BYTES = 64 * 1024 * 1024
BODY_TIMEOUT_S = 30.0


class Vanished(Exception):  # noqa: N818 - reads as what happened
    """The client hung up before its request was whole."""


async def read_body(receive: Receive, headers: Headers) -> bytes:
    """The whole body.

    Raises:
        ApiError: it is too long, or does not come.
        Vanished: the client hung up.
    """
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await _read(receive, headers)
    except TimeoutError:
        raise ApiError(
            408, f"the body did not come within {BODY_TIMEOUT_S:g} s", code="timeout"
        ) from None


async def _read(receive: Receive, headers: Headers) -> bytes:
    length = headers.get("content-length", "")
    is_too_long = length.isdigit() and int(length) > MAX_BODY_BYTES
    chunks: list[bytes] = []
    num_bytes = 0
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Vanished
        chunk: bytes = message.get("body", b"")
        num_bytes += len(chunk)
        more = message.get("more_body", False)
        is_too_long = is_too_long or num_bytes > MAX_BODY_BYTES
        if is_too_long:
            chunks.clear()
            if num_bytes > MAX_WASTED_BYTES:
                break
        else:
            chunks.append(chunk)
    if is_too_long:
        raise ApiError(
            413,
            f"the body is longer than {MAX_BODY_BYTES} bytes; send a shorter prompt",
            code="request_too_large",
        )
    return b"".join(chunks)
