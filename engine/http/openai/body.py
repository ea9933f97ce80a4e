"""Reads a request's body. Limits the body's size and time, and the size of all bodies together."""

import asyncio
from typing import Self

from starlette.datastructures import Headers
from starlette.types import Receive

from stepscope.engine.http.errors import ApiError, too_many
from stepscope.engine.protocol.commands import MAX_COMMAND_BYTES

# The decoded request must fit into one command.
MAX_BODY_BYTES = MAX_COMMAND_BYTES - 64 * 1024
# Many clients read the answer only after sending the whole body, so the rest of a body that is too
# long is read and discarded, up to this size.
MAX_WASTED_BYTES = 64 * 1024 * 1024
BODY_TIMEOUT_S = 30.0
MAX_HELD_BYTES = 256 * 1024 * 1024
SMALL_BODY_BYTES = 64 * 1024  # so small a body is always taken


class Vanished(Exception):  # noqa: N818 - reads as what happened
    """The client disconnected before its request was complete."""


class HeldBodies:
    """The bodies that are being received, or that the engine has not taken yet."""

    def __init__(self) -> None:
        self.num_bytes = 0  # of those that are not small


class HeldBody:
    """One of `bodies`, until it is released."""

    def __init__(self, bodies: HeldBodies) -> None:
        self._bodies = bodies
        self._num_counted = 0

    def grow(self, num_bytes: int) -> None:
        """Set the body's size so far. Raises ApiError if all bodies together are too large."""
        if num_bytes <= SMALL_BODY_BYTES:
            return
        added = num_bytes - self._num_counted
        if self._bodies.num_bytes + added > MAX_HELD_BYTES:
            raise too_many("too many long requests are under way", "too_many_bytes")
        self._bodies.num_bytes += added
        self._num_counted = num_bytes

    def release(self) -> None:
        """Stop counting the body. May be called more than once."""
        self._bodies.num_bytes -= self._num_counted
        self._num_counted = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


async def read_body(receive: Receive, headers: Headers, held: HeldBody) -> bytes:
    """Return the whole body.

    Raises:
        ApiError: the body is too long, takes too long to arrive, or there is no room for it now.
        Vanished: the client disconnected.
    """
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await _read(receive, headers, held)
    except TimeoutError:
        raise ApiError(
            408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s", code="timeout"
        ) from None


async def _read(receive: Receive, headers: Headers, held: HeldBody) -> bytes:
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
            held.release()
            if num_bytes > MAX_WASTED_BYTES:
                break
        else:
            held.grow(num_bytes)
            chunks.append(chunk)
    if is_too_long:
        raise ApiError(
            413,
            f"the body is longer than {MAX_BODY_BYTES} bytes; send a shorter prompt",
            code="request_too_large",
        )
    return b"".join(chunks)
