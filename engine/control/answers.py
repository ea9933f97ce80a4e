"""`AnswerBook`: keeps the answer to each change, so that a repeated command is applied once.

A client that lost its connection before the answer arrived sends the command again. If the first
command has an answer by then, the client gets this answer. Otherwise it waits, and both commands
get the answer. Use the book on the control thread.
"""

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from stepscope.engine.protocol.replies import AnyReply

MAX_ANSWERS = 16_384  # lasts for minutes, even if one client sends changes without pause
MAX_WAITING = 64  # senders of one repeated command that has no answer yet

_C = TypeVar("_C")


class OnceReused(Exception):  # noqa: N818 - reads as what happened
    """A client sent a command under a name that it had used for another command."""


def digest_of(payload: bytes) -> bytes:
    """Return a short digest of a command, to keep in its place.

    Commands may be megabytes, and the book has thousands.
    """
    return hashlib.blake2b(payload, digest_size=16).digest()


@dataclass(slots=True)
class _Entry(Generic[_C]):
    digest: bytes
    reply: AnyReply | None = None
    waiting: list[_C] = field(default_factory=list)


class AnswerBook(Generic[_C]):
    """The answers to changes, by client and by the client's name for the command.

    If there are too many, the oldest are dropped. `_C` is the type of the receiver of an answer.
    """

    def __init__(self) -> None:
        self._entries: OrderedDict[tuple[bytes, bytes], _Entry[_C]] = OrderedDict()

    def is_new(self, key: tuple[bytes, bytes], payload: bytes, client: _C) -> bool:
        """Whether the command must be applied. If False, `take_ready` will return its answer.

        Args:
            key: the client, and its name for the command.
            payload: the encoded command.
            client: will receive the answer if the command is a repeated one.

        Raises:
            OnceReused: the client sent another command under this name before.
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
        """Remove and return the senders of a repeated command, each with the answer.

        Empty if the command has no answer yet.
        """
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
