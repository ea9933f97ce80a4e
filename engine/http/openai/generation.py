"""`Generation`: submits one HTTP request to the engine, and keeps its outputs until they are read.

A request has one or more choices. A client that reads slowly does not delay others: its unread
outputs are kept here.
"""

import asyncio
from typing import NamedTuple

from stepscope.engine.client.client import CommandRefused, EngineUnreachable
from stepscope.engine.http.engine_client import EngineClient
from stepscope.engine.http.openai.requests import ClientGone
from stepscope.engine.protocol.commands import Abort, Submit
from stepscope.engine.protocol.replies import AnyReply, Error, Output, Submitted

MAX_AT_ONCE = 256  # outputs that are written in one go, while other streams wait


class TextPiece(NamedTuple):
    """New output of one choice of a request."""

    choice: int
    output: Output


class Generation:
    """Submits the choices of one HTTP request, collects their outputs, and can abort them.

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
            self._indices[self._engine.send(submit, self)] = index
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

    # Waiter

    def receive(self, command_id: int, reply: AnyReply) -> None:
        if isinstance(reply, Submitted):
            self._num_submitted += 1
            self._request_ids[command_id] = reply.request_id
            if self._is_closed:
                self._abort(reply.request_id)
        elif isinstance(reply, Output):
            if not self._is_closed:
                self._pending.append(TextPiece(self._indices[command_id], reply))
            if reply.finish_reason is not None:
                self._done(command_id)
        elif isinstance(reply, Error):
            self._done(command_id)
            self._fail(CommandRefused(reply.code, reply.message))
        self._news.set()

    def lose(self, error: EngineUnreachable) -> None:
        self._indices.clear()
        self._fail(error)

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

        The caller first checks that there is nothing new. It must not await between this check and
        the call, or it could miss a reply.
        """
        if self._failure is None:
            self._news.clear()
            await self._news.wait()
        if self._failure is not None:
            raise self._failure
