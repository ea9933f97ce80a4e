"""`Generation`: what the engine makes for one HTTP request, one choice or many.

A client that reads slowly delays no other: what it has not read is kept here, and once that is
many outputs the newest are joined into one, so that no more is kept than the text itself.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from stepscope.engine.client.errors import CommandRefused, EngineUnreachable
from stepscope.engine.http.engine_client import EngineClient
from stepscope.engine.protocol.commands import Abort, Submit, Withdraw
from stepscope.engine.protocol.replies import AnyReply, Error, Output, PositionLogprobs, Submitted

MAX_PENDING = 256  # outputs of one request that wait for its reader one by one


class TextPiece(NamedTuple):
    """New output of one choice."""

    choice: int
    output: Output


class ClientGone(Exception):  # noqa: N818 - reads as what happened
    """The client wants the rest no more."""


class _JoinedText:
    """Outputs of one choice that its client was too slow for."""

    def __init__(self, first: Output) -> None:
        self._last = first
        self._token_ids = list(first.token_ids)
        self._texts = [first.text or ""]
        self._logprobs: list[PositionLogprobs] = list(first.logprobs or ())

    def add(self, output: Output) -> None:
        self._last = output
        self._token_ids += output.token_ids
        self._texts.append(output.text or "")
        self._logprobs += output.logprobs or ()

    def output(self) -> Output:
        return msgspec.structs.replace(
            self._last,
            token_ids=self._token_ids,
            text="".join(self._texts),
            logprobs=self._logprobs if self._last.logprobs is not None else None,
        )


class Generation:
    """Submits, collects, and aborts abandoned requests. Implements `Waiter`.

    Args:
        engine: who generates.
        submits: one for each choice; emptied once they are sent, for prompts may be long.
        on_taken: called once the engine has taken (or refused) all of them.
    """

    def __init__(
        self,
        engine: EngineClient,
        submits: list[Submit],
        on_taken: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine = engine
        self._submits = submits
        self._on_taken = on_taken
        self._indices: dict[int, int] = {}  # choice of each command that is not done
        self._request_ids: dict[int, int] = {}  # of commands that were accepted
        self._num_submitted = 0
        self._pending: deque[TextPiece] = deque()
        self._joined: dict[int, _JoinedText] = {}  # by choice; newer than all that is pending
        self._failure: Exception | None = None
        self._is_closed = False
        self._change: asyncio.Future[None] | None = None  # what is waited for, or was

    async def start(self) -> None:
        """Hand everything in.

        Raises:
            CommandRefused: the engine does not take one of them, and so gets none.
            EngineUnreachable: there is none, or it was lost.
            ClientGone: `abandon` was called.
        """
        num_submits = len(self._submits)
        for index, submit in enumerate(self._submits):
            self._indices[self._engine.send(submit, self)] = index
        self._submits.clear()
        while self._num_submitted < num_submits:
            await self._changed()
        self._on_taken()

    async def next_pieces(self) -> list[TextPiece]:
        """What is new, in order; empty once everything has come.

        Raises:
            EngineUnreachable: it was lost.
            ClientGone: `abandon` was called.
        """
        while not self._pending and not self._joined:
            if not self._indices and self._failure is None:
                return []
            await self._changed()
        pieces = [*self._pending]
        pieces += [TextPiece(index, joined.output()) for index, joined in self._joined.items()]
        self._pending.clear()
        self._joined.clear()
        return pieces

    def abandon(self) -> None:
        """The client is gone: free at once what the engine holds for it."""
        if self._failure is None:
            self._failure = ClientGone()
        self.close()
        self._wake()

    def close(self) -> None:
        """End what is unfinished. May be called more than once."""
        if self._is_closed:
            return
        self._is_closed = True
        self._pending.clear()
        self._joined.clear()
        for command_id in list(self._indices):
            if (request_id := self._request_ids.get(command_id)) is not None:
                self._send(Abort(request_id=request_id, who="http"))
            else:
                self._send(Withdraw(command_id=command_id))

    # Waiter

    def take(self, command_id: int, reply: AnyReply) -> None:
        if isinstance(reply, Submitted):
            self._num_submitted += 1
            self._request_ids[command_id] = reply.request_id
            if self._is_closed:
                self._send(Abort(request_id=reply.request_id, who="http"))
        elif isinstance(reply, Output):
            index = self._indices[command_id]
            if reply.finish_reason is not None:
                self._done(command_id)
            if self._is_closed:
                return
            self._keep(index, reply)
        elif isinstance(reply, Error):
            self._done(command_id)
            if self._failure is None:
                self._failure = CommandRefused(reply.code, reply.message)
        self._wake()

    def lose(self, error: EngineUnreachable) -> None:
        self._indices.clear()
        if self._failure is None:
            self._failure = error
        self._wake()

    def _keep(self, index: int, output: Output) -> None:
        if (joined := self._joined.get(index)) is not None:
            joined.add(output)
        elif len(self._pending) < MAX_PENDING:
            self._pending.append(TextPiece(index, output))
        else:
            self._joined[index] = _JoinedText(output)

    def _done(self, command_id: int) -> None:
        self._engine.forget(command_id)
        self._indices.pop(command_id, None)
        self._request_ids.pop(command_id, None)

    def _send(self, command: Abort | Withdraw) -> None:
        try:
            # The answer is of no use: the request may have finished meanwhile.
            self._engine.send(command, None)
        except EngineUnreachable:
            return  # it has ended with its engine

    def _wake(self) -> None:
        if self._change is not None and not self._change.done():
            self._change.set_result(None)

    async def _changed(self) -> None:
        """To be called in the very turn of the loop in which there was nothing new."""
        if self._failure is None:
            self._change = asyncio.get_running_loop().create_future()
            await self._change
        if self._failure is not None:
            raise self._failure
