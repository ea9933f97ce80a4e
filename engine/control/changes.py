"""`Changes`: handles commands that change the engine. Use it on the control thread.

A client that lost its connection before the answer arrived sends the command again. It is still
applied only once: `AnswerBook` keeps the answer to each change. If the first command has an answer
by then, the client gets this answer; otherwise it waits, and both commands get the answer.

A change without effect is answered by the control thread. Every other change goes to the engine's
thread, and `answered` receives the answer.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from stepscope.engine.control.remote_client import Outgoing, RemoteClient
from stepscope.engine.loop.inbox import Call, Denial, Inbox, Settled
from stepscope.engine.protocol.asker import Asker
from stepscope.engine.protocol.commands import Change
from stepscope.engine.protocol.replies import AnyReply, Error
from stepscope.engine.protocol.settings.knobs import ConfigError
from stepscope.engine.transport.connections import Connections

MAX_ANSWERS = 16_384  # lasts for minutes, even if one client sends changes without pause
MAX_WAITING = 64  # senders of one repeated command that has no answer yet

_C = TypeVar("_C")


class OnceReused(Exception):  # noqa: N818 - reads as what happened
    """A client sent a command under a name that it had used for another command."""


def digest_of(payload: bytes) -> bytes:
    """Return a short digest of a command, to keep in its place."""
    return hashlib.blake2b(payload, digest_size=16).digest()


@dataclass(slots=True)
class _Entry(Generic[_C]):
    digest: bytes
    reply: AnyReply | None = None
    waiting: list[_C] = field(default_factory=list)


class AnswerBook(Generic[_C]):
    """The answers to changes, by client and the command's name; the oldest are dropped."""

    def __init__(self) -> None:
        self._entries: OrderedDict[tuple[bytes, bytes], _Entry[_C]] = OrderedDict()

    def is_new(self, key: tuple[bytes, bytes], payload: bytes, client: _C) -> bool:
        """Whether the command must be applied. If False, `take_ready` will return its answer.

        Raises OnceReused: the client sent another command under this name before.
        """
        digest = digest_of(payload)
        entry = self._entries.get(key)
        if entry is None:
            self._entries[key] = _Entry(digest)
            if len(self._entries) > MAX_ANSWERS:
                self._entries.popitem(last=False)
            return True
        if entry.digest != digest:
            raise OnceReused
        if len(entry.waiting) < MAX_WAITING:
            entry.waiting.append(client)
        return False

    def take_ready(self, key: tuple[bytes, bytes]) -> list[tuple[_C, AnyReply]]:
        """Remove and return the senders of a repeated command, each with the answer."""
        entry = self._entries.get(key)
        if entry is None or entry.reply is None:
            return []
        waiting, entry.waiting = entry.waiting, []
        return [(client, entry.reply) for client in waiting]

    def answered(self, key: tuple[bytes, bytes], reply: AnyReply) -> None:
        """Keep the first answer to a command. Later answers are ignored."""
        entry = self._entries.get(key)
        if entry is not None and entry.reply is None:
            entry.reply = reply


class Changes:
    def __init__(
        self,
        inbox: Inbox,
        settled: Callable[[Change, Asker, bool], Settled | None],
        connections: Connections,
        post: Callable[[Outgoing], None],
        send: Callable[[bytes, bytes, AnyReply], None],
    ) -> None:
        self._inbox = inbox
        self._settled = settled
        self._connections = connections
        self._post = post
        self._send = send
        self._answers: AnswerBook[RemoteClient] = AnswerBook()
        self._num_on_their_way = 0  # changes that the engine has not answered yet

    def apply(self, identity: bytes, command_id: bytes, command: Change, payload: bytes) -> None:
        """Handle a change. Raises ConfigError if its name belongs to another command."""
        # A name is valid for all connections of a key. Without keys, all clients are one user.
        # A command without a name is identified by its connection, id and content.
        if command.once:
            once = (self._connections.key(identity), command.once.encode())
        else:
            once = (identity, command_id + digest_of(payload))
        account = self._connections.account(identity)
        client = RemoteClient(self._post, identity, command_id, once=once, account=account)
        try:
            is_new = self._answers.is_new(once, payload, client)
        except OnceReused:
            raise ConfigError(
                "once_reused", f"another command was sent as {command.once!r}; choose a new name"
            ) from None
        if not is_new:
            self._answer_again(once)
            return
        asker = self._connections.asker(identity, command.who)
        settled = self._settled(command, asker, self._num_on_their_way == 0)
        if settled is None:
            self._num_on_their_way += 1
            self._inbox.put(Call(command, client, asker=asker, lane=account))
            return
        reply, is_audited = settled
        if is_audited and isinstance(reply, Error):
            name = type(command).__name__
            self._inbox.put(Denial(asker, name, reply.code, reply.message, lane=account))
        self._send(identity, command_id, reply)
        self._keep(once, reply)

    def answered(self, once: tuple[bytes, bytes], reply: AnyReply) -> None:
        """Keep the engine's answer to a change, and answer the repeated commands."""
        self._num_on_their_way -= 1
        self._keep(once, reply)

    def _keep(self, once: tuple[bytes, bytes], reply: AnyReply) -> None:
        self._answers.answered(once, reply)
        self._answer_again(once)

    def _answer_again(self, once: tuple[bytes, bytes]) -> None:
        for client, reply in self._answers.take_ready(once):
            self._send(client.identity, client.command_id, reply)
