"""`RemoteClient`: the core's receiver of answers to a command from the control socket."""

from collections.abc import Callable
from typing import TypeAlias

import msgspec

from stepscope.engine.protocol.replies import AnyReply
from stepscope.engine.text.output_text import OutputText


class RemoteClient:
    """One command of one client of the socket.

    Args:
        post: queues a reply, from any thread.
        identity, command_id: the connection it came from, and the sender's name for it.
        text: completes the outputs of a `Submit`.
        once: of a change, its place in the book of answers.
        bundles: whether its outputs may come together with those of others.
        account: the same for all connections of a client; it shares one lane of the inbox.
        is_bulk: its answer is one of `BulkReplies`.
    """

    def __init__(
        self,
        post: Callable[["Outgoing"], None],
        identity: bytes,
        command_id: bytes,
        text: OutputText | None = None,
        once: tuple[bytes, bytes] | None = None,
        bundles: bool = False,
        account: bytes = b"",
        is_bulk: bool = False,
    ) -> None:
        self._post = post
        self.identity = identity
        self.command_id = command_id
        self.text = text
        self.once = once
        self.bundles = bundles
        self.account = account or identity
        self.is_bulk = is_bulk

    def reply(self, message: AnyReply) -> None:
        self._post((self, message))


# A reply on its way to the thread that owns the socket. No type of its own: the engine's thread
# makes one for each token, and a plain tuple is made in a tenth of the time.
Outgoing: TypeAlias = tuple[RemoteClient, AnyReply | msgspec.Raw]
